"""Tensors in a file: written whole or not at all, with a checksum of all that they mean.

`write_tensors` writes, `read_tensors` reads and `checksum` seals. `written_whole` makes sure that no file is ever
half written, `written_with` that no proof lies beside another file than its own, and `written_together` that the
files of a folder are all old or all new to `read_together`. `making_sense` and `filled` are what every reader does
about a file that makes no sense: it says so, and builds nothing from it.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from wellposed.errors import FileFormatError, InputError, WellposedError
from wellposed.forms.storage import strict_json


def write_tensors(place: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, with the rights that any new file of the user's has.

    Raises:
        OSError: the disk is full, or the folder is missing or cannot be written to.
    """
    place.touch()
    rights = place.stat().st_mode
    try:
        save_file(tensors, place, metadata=metadata)
        place.chmod(rights)  # it was written for the owner alone
    except SafetensorError as error:
        raise OSError(f"{place.parent} cannot be written to, or its disk is full: {error}") from error


LARGEST_HEADER = 1 << 26


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a safetensors file whose header says everything once and nothing else; returns tensors and metadata.

    Raises:
        FileFormatError: it is no such file, or it is damaged.
    """
    try:
        _check_header(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileFormatError:
        raise
    except (SafetensorError, *MALFORMED) as error:
        raise FileFormatError(f"it is not a safetensors file or is damaged: {error}") from error


def _check_header(path: Path) -> None:
    """Refuses what safetensors would read over: entries that come twice or mean nothing."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(LARGEST_HEADER, path.stat().st_size - 8):
            raise FileFormatError(f"it is not a safetensors file or is damaged: its header claims {length} bytes")
        header = strict_json(file.read(length), "its header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise FileFormatError(f"its metadata are no table of texts; received {metadata!r}")
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise FileFormatError(f"its header describes {name!r} by other entries than a tensor has")


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of a text and of the names, dtypes, shapes and bytes of tensors.

    Example:
        >>> zeros, ones = torch.zeros(2), torch.ones(2)
        >>> checksum("", {"a": zeros}) == checksum("", {"a": ones})
        False
    """
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    with naming(target), _temporary(target) as place:
        yield place
        _flush(place)
        os.replace(place, target)
        _flush(target.parent)


@contextlib.contextmanager
def written_with(path: str | os.PathLike[str], proof: Path) -> Iterator[tuple[Path, Path]]:
    """Yields places for a file and for its proof, and puts both where they belong once they are on the disk.

    The old proof goes before the new file comes, and the new proof comes last: a process that is killed leaves the
    old file or the new one, with its own proof or with none. If nothing was written for a proof, there is none.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with written_with(folder / "a.txt", folder / "a.proof") as (place, proof):
        ...     _ = place.write_text("all of it"), proof.write_text("so it is")
        >>> sorted(path.name for path in folder.iterdir())
        ['a.proof', 'a.txt']
    """
    target = Path(path)
    with naming(target), _temporary(target) as place, _temporary(proof) as place_of_proof:
        yield place, place_of_proof
        proven = place_of_proof.exists()
        _flush(place)
        if proven:
            _flush(place_of_proof)
        proof.unlink(missing_ok=True)
        os.replace(place, target)
        if proven:
            os.replace(place_of_proof, proof)
        _flush(target.parent)


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yields a name beside `target` for a file that nobody else writes; an error removes the file."""
    place = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield place
    except BaseException:
        with contextlib.suppress(OSError):  # the folder may have become one that cannot be written to
            place.unlink(missing_ok=True)
        raise


NEW = ".new"  # in a folder: files that are complete, and have not all been moved to their places yet
PROOF = ".cert"  # the ending of what is moved last
TRIES = 20  # readings of a folder that others write to


@contextlib.contextmanager
def written_together(folder: str | os.PathLike[str], stale: Iterable[str] = ()) -> Iterator[Path]:
    """Yields an empty folder to write files to, and puts them into `folder` all at once.

    No file system replaces several files in one step. What was written becomes the folder ``.new`` in `folder` by
    one renaming, and from then on counts for `read_together`, whether its files were moved to their places or not.
    The next writer moves what a killed one has left there. If anything goes wrong before the renaming, all stays
    as it was.

    Args:
        folder: made if it is not there; other files in it are left alone.
        stale: files of the old version that are deleted first, such as its proof.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with written_together(folder) as place:
        ...     _ = (place / "a").write_text("one"), (place / "b").write_text("two")
        >>> sorted(path.name for path in folder.iterdir())
        ['a', 'b']
    """
    target = Path(folder)
    temporary = target / f"{NEW}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with naming(target):
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
    _settle(target)


def _committed(temporary: Path, folder: Path, stale: Iterable[str]) -> bool:
    """Makes a complete folder the new version; False if another writer was faster with its own."""
    _settle(folder)
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    try:
        os.rename(temporary, folder / NEW)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _settle(folder: Path) -> None:
    """Moves the files of the new version to their places; any process may, at any time and several at once."""
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


def read_together(folder: Path, names: Iterable[str], read: Callable[[dict[str, Path]], T]) -> T:
    """Reads files that `written_together` has written, all of one version, while others may be writing.

    Args:
        folder: where they are.
        names: the files that `read` looks at.
        read: makes something of the files, given where each of them is; it is called again if they were replaced.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with written_together(folder) as place:
        ...     _ = (place / "a").write_text("one")
        >>> read_together(folder, ["a"], lambda places: places["a"].read_text())
        'one'
    """
    listed = tuple(names)
    for _ in range(TRIES - 1):
        before = _versions(folder, listed)
        try:
            found = read(_latest(folder, listed))
        except (OSError, WellposedError):
            if _versions(folder, listed) == before:
                raise
            continue
        if _versions(folder, listed) == before:
            return found
    return read(_latest(folder, listed))


def _latest(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    new = {name: folder / NEW / name for name in names}
    return {name: place if place.is_file() else folder / name for name, place in new.items()}


def _versions(folder: Path, names: tuple[str, ...]) -> list[tuple[Path, int, int, int] | None]:
    """Tells files apart from those that replace them, and from themselves at another place."""
    found: list[tuple[Path, int, int, int] | None] = []
    for place in _latest(folder, names).values():
        try:
            status = place.stat()
        except OSError:
            found.append(None)
        else:
            found.append((place, status.st_ino, status.st_mtime_ns, status.st_size))
    return found


REMEDIES = {
    errno.ENOENT: "there is no such folder: make it first, or choose another",
    errno.ENOTDIR: "there is a file where a folder should be: choose another place",
}


@contextlib.contextmanager
def naming(target: str | os.PathLike[str]) -> Iterator[None]:
    """Lets the errors of a full disk, or of a folder that is missing or cannot be written to, name their file.

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
        remedy = REMEDIES.get(error.errno, "make room on the disk, or choose a folder that can be written to")
        stays = "" if error.errno in (errno.ENOENT, errno.ENOTDIR) else ", and what was saved before stays"
        said = f"{error.strerror}: {os.fspath(target)} could not be written{stays}"
        raise OSError(error.errno, f"{said}; {remedy}") from error


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


M = TypeVar("M", bound=nn.Module)
MALFORMED = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError),
    *(MemoryError, AssertionError),
)
FLOATS = ("float64", "float32", "float16", "bfloat16")
COUNTS = ("depth", "num_layers")  # of layers, each of which has tensors


@contextlib.contextmanager
def making_sense(what: str) -> Iterator[None]:
    """Turns whatever a malformed description leads to into a `FileFormatError`.

    Example:
        >>> with making_sense("its configuration is no model"):
        ...     {}["state_features"]
        Traceback (most recent call last):
            ...
        wellposed.errors.FileFormatError: its configuration is no model: KeyError('state_features')
    """
    try:
        yield
    except InputError as error:  # it is the file that is wrong, not what the caller has given
        raise FileFormatError(f"{what}: {error}") from error
    except WellposedError:
        raise
    except MALFORMED as error:
        raise FileFormatError(f"{what}: {error!r}") from error


def filled(make: Callable[[], M], tensors: Mapping[str, Tensor]) -> M:
    """Builds a module and gives it its tensors, after a look at whether they fit.

    The look is at a module without memory, so that a configuration that claims more than the file holds costs
    nothing.

    Example:
        >>> filled(lambda: nn.Linear(10**9, 10**9), {"weight": torch.ones(1, 1), "bias": torch.ones(1)})
        Traceback (most recent call last):
            ...
        wellposed.errors.FileFormatError: the configuration asks for bias of (1000000000,), the file holds (1,)
    """
    if not tensors:
        raise FileFormatError("there are no tensors")
    kinds = {str(value.dtype).removeprefix("torch.") for value in tensors.values()}
    if len(kinds) != 1 or not kinds <= {*FLOATS}:
        raise FileFormatError(
            f"its tensors are {', '.join(sorted(kinds))}; a model has one of {', '.join(FLOATS)}"
        )
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in make().state_dict().items()}
    given = {name: tuple(value.shape) for name, value in tensors.items()}
    for name in sorted({*expected, *given}):
        if expected.get(name) != given.get(name):
            raise FileFormatError(
                f"the configuration asks for {name} of {expected.get(name, 'no shape')}, the file holds "
                f"{given.get(name, 'none')}"
            )
    module = make().to(next(iter(tensors.values())).dtype)
    module.load_state_dict(dict(tensors))
    return module


def check_counts(config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuses a configuration of more layers than there are tensors.

    Example:
        >>> check_counts({"cell": {"depth": 10**9}}, {})
        Traceback (most recent call last):
            ...
        wellposed.errors.FileFormatError: depth is 1000000000, for 0 tensors
    """
    for name, value in config.items() if isinstance(config, dict) else ():
        if name in COUNTS and isinstance(value, int) and value > len(tensors):
            raise FileFormatError(f"{name} is {value}, for {len(tensors)} tensors")
        check_counts(value, tensors)
