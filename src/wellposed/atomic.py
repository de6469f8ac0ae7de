"""Files that are written whole or not at all: what is killed leaves the old version or the new one.

`atomic_write` replaces one file, `atomic_write_with_proof` a file and its proof, and `atomic_write_folder` the
files of a folder, which `read_folder` reads all of one version. Whatever the library or the lab keeps is written
by these. A `Journal` keeps the results of a long run, one by one.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from wellposed.errors import FileFormatError, InputError, WellposedError


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary file to write to, and moves it to `path` once it is completely on the disk.

    If anything goes wrong before that, what was at `path` stays, and nothing else is left behind.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; the message says which file.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with atomic_write(target) as temporary:
        ...     _ = temporary.write_text("all of it")
        >>> target.read_text(), [path.name for path in target.parent.iterdir()]
        ('all of it', ['note.txt'])
    """
    target = Path(path)
    with name_file_in_errors(target), _temporary(target) as temporary:
        yield temporary
        _flush(temporary)
        os.replace(temporary, target)
        _flush(target.parent)


@contextlib.contextmanager
def atomic_write_with_proof(path: str | os.PathLike[str], proof: Path) -> Iterator[tuple[Path, Path]]:
    """Yields temporary files for a file and its proof, and moves both into place once they are on the disk.

    The old proof goes before the new file comes, and the new proof comes last: a process that is killed leaves the
    old file or the new one, with its own proof or with none. If nothing was written for a proof, there is none.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write_with_proof(folder / "a.txt", folder / "a.proof") as (temporary, proof):
        ...     _ = temporary.write_text("all of it"), proof.write_text("so it is")
        >>> sorted(path.name for path in folder.iterdir())
        ['a.proof', 'a.txt']
    """
    target = Path(path)
    with name_file_in_errors(target), _temporary(target) as temporary, _temporary(proof) as temporary_proof:
        yield temporary, temporary_proof
        proven = temporary_proof.exists()
        _flush(temporary)
        if proven:
            _flush(temporary_proof)
        proof.unlink(missing_ok=True)
        os.replace(temporary, target)
        if proven:
            os.replace(temporary_proof, proof)
        _flush(target.parent)


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yields a unique temporary path beside `target`; an error removes the file."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):  # the folder may have become one that cannot be written to
            temporary.unlink(missing_ok=True)
        raise


NEW = ".new"  # in a folder: files that are complete, and have not all been moved to their places yet
PROOF = ".cert"  # the ending of what is moved last
TRIES = 20  # readings of a folder that others write to


@contextlib.contextmanager
def atomic_write_folder(folder: str | os.PathLike[str], stale: Iterable[str] = ()) -> Iterator[Path]:
    """Yields an empty folder to write files to, and puts them into `folder` all at once.

    No file system replaces several files in one step. What was written becomes the folder ``.new`` in `folder` by
    one renaming, and from then on counts for `read_folder`, whether its files were moved to their places or not.
    The next writer moves what a killed one has left there. If anything goes wrong before the renaming, all stays
    as it was.

    Args:
        folder: made if it is not there; other files in it are left alone.
        stale: files of the old version that are deleted first, such as its proof.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write_folder(folder) as temporary:
        ...     _ = (temporary / "a").write_text("one"), (temporary / "b").write_text("two")
        >>> sorted(path.name for path in folder.iterdir())
        ['a', 'b']
    """
    target = Path(folder)
    temporary = target / f"{NEW}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with name_file_in_errors(target):
            target.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            for path in (*temporary.iterdir(), temporary):
                _flush(path)
            while not _committed(temporary, target, stale):
                pass
            _flush(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _install(target)


def _committed(temporary: Path, folder: Path, stale: Iterable[str]) -> bool:
    """Makes a complete folder the new version; False if another writer was faster with its own."""
    _install(folder)
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    try:
        os.rename(temporary, folder / NEW)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _install(folder: Path) -> None:
    """Moves the files of the new version into place; any process may, at any time and several at once."""
    waiting = folder / NEW
    try:
        names = os.listdir(waiting)
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda name: name.endswith(PROOF)):
        with contextlib.suppress(FileNotFoundError):  # moved by another process
            os.replace(waiting / name, folder / name)
    _flush(folder)
    with contextlib.suppress(OSError):  # gone, or the new version of another process
        waiting.rmdir()


T = TypeVar("T")


def read_folder(folder: Path, names: Iterable[str], read: Callable[[dict[str, Path]], T]) -> T:
    """Reads files that `atomic_write_folder` has written, all of one version, while others may be writing.

    Args:
        folder: where they are.
        names: the files that `read` looks at.
        read: makes something of the files, given where each of them is; it is called again if they were replaced.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write_folder(folder) as temporary:
        ...     _ = (temporary / "a").write_text("one")
        >>> read_folder(folder, ["a"], lambda places: places["a"].read_text())
        'one'
    """
    listed = tuple(names)
    for _ in range(TRIES - 1):
        before = _versions(folder, listed)
        try:
            content = read(_latest(folder, listed))
        except (OSError, WellposedError):
            if _versions(folder, listed) == before:
                raise
            continue
        if _versions(folder, listed) == before:
            return content
    return read(_latest(folder, listed))


def _latest(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    new = {name: folder / NEW / name for name in names}
    return {name: file if file.is_file() else folder / name for name, file in new.items()}


def _versions(folder: Path, names: tuple[str, ...]) -> list[tuple[Path, int, int, int] | None]:
    """Tells files apart from those that replace them, and from themselves at another path."""
    versions: list[tuple[Path, int, int, int] | None] = []
    for file in _latest(folder, names).values():
        try:
            status = file.stat()
        except OSError:
            versions.append(None)
        else:
            versions.append((file, status.st_ino, status.st_mtime_ns, status.st_size))
    return versions


class Journal(dict[str, Any]):
    """Results by name, each appended to a file as a line of JSON as soon as it is known.

    A process that is killed loses only what it was working on: a last line that is not whole is dropped.

    Args:
        path: the file.
        about: what the results are about; a run goes on only with what is about the same.
        resume: whether results in the file are read, else it is begun anew.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> Journal(path, {"model": "a"})["first"] = 1
        >>> Journal(path, {"model": "a"}, resume=True)
        {'first': 1}
    """

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any], resume: bool = False) -> None:
        super().__init__()
        self.path = Path(path)
        if resume and self.path.exists():
            self._read(about)
        else:
            with atomic_write(self.path) as temporary:
                temporary.write_text(json.dumps(about) + "\n", encoding="utf-8")

    def _read(self, about: dict[str, Any]) -> None:
        whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        try:
            header, *lines = [json.loads(line) for line in whole.split(b"\n")]
            entries = {str(key): value for line in lines for key, value in line.items()}
            differing = sorted(name for name in {*header, *about} if header.get(name) != about.get(name))
        except (ValueError, AttributeError, TypeError) as error:
            raise FileFormatError(
                f"{self.path} is no journal of results: {error}; delete it to begin anew"
            ) from error
        if differing:
            raise InputError(
                f"{self.path} has the results of another run, which differs in {', '.join(differing)}; begin "
                "anew, or choose another file"
            )
        for key, value in entries.items():
            super().__setitem__(key, value)
        with name_file_in_errors(self.path):
            os.truncate(self.path, len(whole) + 1)

    def __setitem__(self, key: str, value: Any) -> None:
        line = (json.dumps({key: value}) + "\n").encode()
        with name_file_in_errors(self.path), self.path.open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())
        super().__setitem__(key, value)


REMEDIES = {
    errno.ENOENT: "there is no such folder: make it first, or choose another",
    errno.ENOTDIR: "there is a file where a folder should be: choose another place",
}


@contextlib.contextmanager
def name_file_in_errors(target: str | os.PathLike[str]) -> Iterator[None]:
    """Lets the errors of a full disk, or of a folder that is missing or cannot be written to, name their file.

    Example:
        >>> with name_file_in_errors("run.ckpt"):
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
        remedy = REMEDIES.get(error.errno, "make room on the disk, or choose a folder that can be written to")
        stays = "" if error.errno in (errno.ENOENT, errno.ENOTDIR) else ", and what was saved before stays"
        message = f"{error.strerror}: {os.fspath(target)} could not be written{stays}"
        raise OSError(error.errno, f"{message}; {remedy}") from error


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
