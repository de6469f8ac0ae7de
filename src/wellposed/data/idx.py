"""Reads unsigned bytes from IDX files, the format of MNIST, without trusting their header."""

import gzip
import math
import os
import struct
import zlib
from io import BufferedIOBase
from pathlib import Path

import torch
from torch import Tensor

from wellposed.errors import FileFormatError

_UNSIGNED_BYTE = 8
_CHUNK = 1 << 20


def read_idx(path: str | os.PathLike[str], dimensions: int, max_bytes: int = 1 << 30) -> Tensor:
    """Reads an IDX file of unsigned bytes, gzipped if its name ends with .gz.

    The header is two zero bytes, the type (8 for unsigned bytes), the number d of dimensions and d sizes of four
    bytes each, most significant byte first; the data follow and end the file. Memory grows with what the file
    holds, never with what its header declares.

    Args:
        path: the file.
        dimensions: how many it must have: 3 for images (N, H, W), 1 for labels.
        max_bytes: of data; a header that declares more is refused.

    Returns:
        A uint8 tensor of the declared sizes.

    Raises:
        FileFormatError: wrong type, dimensions or length, or a damaged gzip stream.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels"
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 2, 1]))
        >>> read_idx(path, dimensions=1)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    file = Path(path)
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            sizes = _read_header(stream, file, dimensions, max_bytes)
            data = _read_exactly(stream, file, math.prod(sizes))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileFormatError(f"{str(file)!r} is cut off or not a gzip file: {error}") from error
    return torch.frombuffer(data, dtype=torch.uint8).reshape(sizes)


def _read_header(stream: BufferedIOBase, path: Path, dimensions: int, max_bytes: int) -> tuple[int, ...]:
    magic, expected = stream.read(4), bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if magic != expected:
        raise FileFormatError(
            f"{str(path)!r} is not an IDX file of unsigned bytes with {dimensions} dimension(s): it must begin "
            f"with {expected.hex(' ')}, received {magic.hex(' ') or 'nothing'}"
        )
    header = stream.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise FileFormatError(f"{str(path)!r} ends within its header; get it again")
    sizes = struct.unpack(f">{dimensions}I", header)
    if not 0 < math.prod(sizes) <= max_bytes:
        raise FileFormatError(
            f"{str(path)!r} declares the sizes {sizes}, that is {math.prod(sizes)} bytes; 1 to {max_bytes} are "
            "accepted (max_bytes)"
        )
    return sizes


def _read_exactly(stream: BufferedIOBase, path: Path, count: int) -> bytearray:
    data = bytearray()
    while len(data) <= count:
        chunk = stream.read(_CHUNK)
        if not chunk:
            break
        data += chunk
    if len(data) != count:
        received = f"{len(data)}" if len(data) < count else "more"
        raise FileFormatError(f"{str(path)!r} declares {count} bytes of data and holds {received}; get it again")
    return data
