"""Files that are never half written."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a place to write to, and puts what was written at `path` once it is completely on the disk.

    If anything goes wrong before that, what was at `path` stays, and nothing else is left behind.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with written_whole(target) as place:
        ...     _ = place.write_text("all of it")
        >>> target.read_text(), [path.name for path in target.parent.iterdir()]
        ('all of it', ['note.txt'])
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, target)
        _flush(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
