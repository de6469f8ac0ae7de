"""Reads .npy and .npz files of plain numbers, and trusts no declared size before the data are there."""

import io
import math
import os
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import FileFormatError
from wellposed.models.io.archives import read_zip

LARGEST = 1 << 32


def read_arrays(path: str | os.PathLike[str], max_bytes: int = LARGEST) -> dict[str, NDArray[Any]]:
    """Reads all arrays of an .npz file by name, or the one of an .npy file under the name "".

    Memory grows with what the files hold once unpacked, up to a limit, never with what a header declares. Objects,
    which would have to be unpickled, are refused.

    Args:
        path: the file.
        max_bytes: of all arrays together.

    Raises:
        FileFormatError: damaged, too large, or not of numbers or texts; FileNotFoundError stays what it is.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.npz")
        >>> np.savez(path, u=np.arange(3))
        >>> read_arrays(path)
        {'u': array([0, 1, 2])}
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            if zipfile.is_zipfile(file):
                members = read_zip(file, max_bytes, packed=True)
                return {name.removesuffix(".npy"): _array(members.pop(name)) for name in list(members)}
            if file.seek(0, io.SEEK_END) > max_bytes:
                raise FileFormatError(f"it has more than {max_bytes} bytes")
            file.seek(0)
            return {"": _array(file.read())}
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # zlib, zipfile, numpy and its tokenizer have many ways to stumble over a file
        raise FileFormatError(f"{name!r} holds no plain arrays: {error}") from error


def _array(data: bytes) -> NDArray[Any]:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise FileFormatError(f"version {version} of the format is for tables, not for plain arrays")
    shape, fortran_order, kind = readers[version](stream)
    start = stream.tell()
    if kind.hasobject or kind.fields is not None or any(size < 0 for size in shape):
        raise FileFormatError(f"an array of {kind} {shape} is not of plain numbers")
    if math.prod(shape) * kind.itemsize != len(data) - start:
        raise FileFormatError(f"an array declares {kind} {shape} and holds {len(data) - start} bytes")
    if kind.itemsize == 0:  # numpy would make one letter of each empty text, however many there are
        raise FileFormatError(f"an array declares {kind} {shape}, which needs no bytes")
    flat = np.frombuffer(data, kind, offset=start)
    return flat.reshape(shape, order="F" if fortran_order else "C").copy()
