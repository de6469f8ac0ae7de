"""Archives, files of torch and compressed streams; every byte is read once, by one reader.

The same file can be another archive to another program: with a second directory of contents, bytes before or
behind it, or a name that stands in it twice. So `read_zip` reads the members into memory, within bounds, and
`write_zip` makes a fresh archive of them for a parser that wants one; the file itself goes to no second parser.
`read_torch` reads what `torch.save` wrote, in that way. `open_unpacked` opens a file that may be compressed by
gzip, and reads no more of it than its size makes likely.
"""

import gzip
import io
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from wellposed.errors import FileFormatError

MOST_FILES = 100_000
# A tensor with a stride of zero, or a sparse one, has more entries than are stored: so many a byte, and some more.
ENTRIES_PER_BYTE, ENTRIES_FREE = 16, 1 << 20


def read_zip(file: BinaryIO, max_bytes: float = math.inf, *, packed: bool = False) -> dict[str, bytes]:
    """Reads all members of a zip archive, by name.

    Args:
        file: open for reading.
        max_bytes: of all members together, unpacked.
        packed: whether members may be compressed, which only deflate may do; then each byte becomes 1,032 at most.

    Raises:
        FileFormatError: members that overlap, stand there twice or are larger than they may be. What zipfile and
            zlib raise on a damaged archive passes through.

    Example:
        >>> read_zip(write_zip({"a/b": b"text"}))
        {'a/b': b'text'}
    """
    size = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        _check_directory(infos, size, max_bytes, packed)
        return {info.filename: _member(archive, info) for info in infos}


def _check_directory(infos: list[zipfile.ZipInfo], size: int, max_bytes: float, packed: bool) -> None:
    kinds = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) if packed else (zipfile.ZIP_STORED,)
    if len(infos) > MOST_FILES:
        raise FileFormatError(f"the archive holds {len(infos)} files; at most {MOST_FILES} are read")
    if len({info.filename for info in infos}) < len(infos):
        raise FileFormatError("the archive holds a file twice; refused")
    for info in infos:
        if info.compress_type not in kinds or info.flag_bits & 1:
            how = "only stored or deflated" if packed else "only stored"
            raise FileFormatError(f"{info.filename!r} is compressed or encrypted in another way: {how} is read")
    held, total = sum(info.compress_size for info in infos), sum(info.file_size for info in infos)
    if held > size or (not packed and total > size):
        raise FileFormatError(f"the archive has {size} bytes and its members {max(held, total)}: they overlap")
    if total > max_bytes:
        raise FileFormatError(f"the archive unpacks to {total} bytes; at most {max_bytes} are read")


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as stream:
        data = stream.read(info.file_size + 1)  # never more, whatever is packed there
    if len(data) != info.file_size:
        raise FileFormatError(f"{info.filename!r} declares {info.file_size} bytes and holds {len(data)}")
    return data


def write_zip(members: dict[str, bytes]) -> io.BytesIO:
    """Makes an archive in memory, stored, and takes each member out of `members` as it goes.

    Names that differ in capitals only are refused: some readers, that of torch too, take one for the other.
    """
    if len({name.casefold() for name in members}) < len(members):
        raise FileFormatError("the archive holds two files whose names differ in capitals only; refused")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in list(members):
            archive.writestr(zipfile.ZipInfo(name), members.pop(name))
    file.seek(0)
    return file


def read_torch(file: BinaryIO) -> Any:
    """Reads what `torch.save` wrote, without running anything of it, and no more than the file can hold.

    Raises:
        FileFormatError: damaged, not plain tensors, or tensors that have far more entries than the file has bytes.
    """
    try:
        size, start = file.seek(0, io.SEEK_END), file.seek(0)
        packed = file.read(2) == b"PK" or zipfile.is_zipfile(file)
        file.seek(start)
        members = read_zip(file) if packed else {"": file.read()}  # before torch 1.6 it was no archive
        for name, data in members.items():
            if (name.endswith(".pkl") or not packed) and b"bytearray" in data:
                raise FileFormatError("it makes a bytearray, which would reserve any memory that it names")
        source = write_zip(members) if packed else io.BytesIO(members[""])
        content = torch.load(source, map_location="cpu", weights_only=True)
    except FileFormatError:
        raise
    except Exception as error:  # torch.load has many ways to stumble over a damaged file
        reason = (str(error).strip().splitlines() or ["it is damaged"])[0]
        raise FileFormatError(f"torch reads no plain tensors there, so it is refused: {reason}") from error
    for tensor in _tensors(content):
        check_entries(tensor.numel(), size, f"a tensor {tuple(tensor.shape)}")
    return content


UNPACKED_PER_BYTE, UNPACKED_FREE = 64, 1 << 26  # tables of numbers become three to ten times as long


def largest_unpacked(path: str | os.PathLike[str]) -> int:
    """Returns how many bytes a compressed file may hold; gzip alone could make 1,032 of one, bzip2 more."""
    return UNPACKED_PER_BYTE * os.path.getsize(path) + UNPACKED_FREE


def open_unpacked(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a file for reading, by gzip if its name ends with .gz.

    Raises:
        FileFormatError: when more is read than a file of that size should hold.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "zeros.gz")
        >>> with gzip.open(path, "wb") as stream:
        ...     _ = stream.write(bytes(10**8))
        >>> with open_unpacked(path) as stream:
        ...     len(stream.read())
        Traceback (most recent call last):
            ...
        wellposed.errors.FileFormatError: ... unpacks to more than ...: unpack it yourself if ...
    """
    packed = os.fspath(path).endswith(".gz")
    raw = _Unpacked((gzip.open if packed else open)(path, "rb"), os.fspath(path), largest_unpacked(path))
    return io.BufferedReader(raw)


class _Unpacked(io.RawIOBase):
    """Passes on what a stream holds, up to a number of bytes."""

    def __init__(self, source: Any, name: str, limit: int) -> None:
        self.source, self.name, self.limit, self.left = source, name, limit, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.source.read(len(buffer))
        self.left -= len(data)
        if self.left < 0:
            raise FileFormatError(
                f"{self.name!r} has {os.path.getsize(self.name)} bytes and unpacks to more than {self.limit}: "
                "unpack it yourself if it is meant to be as large"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.source.close()
        super().close()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Finds the tensors in nested lists, tuples and dicts, even in one that contains itself."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, Mapping | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            waiting.extend(part.values() if isinstance(part, Mapping) else part)


def check_entries(count: int, size: int, what: str) -> None:
    """Raises `FileFormatError` if something has far more entries than the bytes that hold it.

    Example:
        >>> check_entries(10**9, 1000, "a tensor")
        Traceback (most recent call last):
        wellposed.errors.FileFormatError: a tensor has 1000000000 entries, and what holds it 1000 bytes: ...
    """
    if count > ENTRIES_PER_BYTE * size + ENTRIES_FREE:
        raise FileFormatError(
            f"{what} has {count} entries, and what holds it {size} bytes: store all its entries, with "
            f"tensor.contiguous() or tensor.to_dense(), if it is meant to be as large"
        )
