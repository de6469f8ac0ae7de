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

    Raises:
        OSError: the disk is full, or the folder cannot be written to; the message says which file.

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
        with naming(target):
            yield temporary
            _flush(temporary)
            os.replace(temporary, target)
            _flush(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder may have become one that cannot be written to
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(target: str | os.PathLike[str]) -> Iterator[None]:
    """Lets the errors of a full disk or a folder without the right to write say which file they are about.

    Example:
        >>> with naming("run.ckpt"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
            ...
        OSError: [Errno 28] No space left on device: run.ckpt could not be written, and what was saved before ...
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it speaks for itself
            raise
        remedy = "make room on the disk, or choose a folder that can be written to"
        said = f"{error.strerror}: {os.fspath(target)} could not be written, and what was saved before stays"
        raise OSError(error.errno, f"{said}; {remedy}") from error


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
