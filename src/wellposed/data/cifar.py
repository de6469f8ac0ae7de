"""Reads CIFAR-10 and CIFAR-100: the original archives, binary or pickled, and lossless WebP sprites.

`load_plain` reads plain data from a pickle without running anything that the pickle names. `read_binary`,
`read_pickled` and `read_sprites` are the readers.
"""

import io
import os
import pickle
import pickletools
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.data.files import read_members
from wellposed.errors import FileFormatError, require
from wellposed.models.io.arrays import read_arrays

_ARRAY = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
_NUMPY = _ARRAY | {"numpy.ndarray", "numpy.dtype"}
# What data sets consist of. Left out are all ways to make objects but GLOBAL and REDUCE, persistent identifiers,
# extensions, and byte arrays, which reserve the memory that they declare.
_PLAIN = """
PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES
EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD
"""
_OPCODES = frozenset(_PLAIN.split())


class NumpyRecord:
    """Stands for a numpy object of a pickle: records the arguments of its construction and does nothing.

    Args:
        name: the dotted name in the pickle.
        arguments: what it was called with.
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, *arguments: object) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __call__(self, *arguments: object) -> "NumpyRecord":
        return NumpyRecord(self.name, *arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NumpyRecord:
        if f"{module}.{name}" not in _NUMPY:
            raise FileFormatError(f"it names {module}.{name}, which data do not need and which could run code")
        return NumpyRecord(f"{module}.{name}")


def load_plain(data: bytes) -> Any:
    """Reads lists, tuples, dictionaries, text, numbers and numpy arrays; refuses all else.

    Text of Python 2 is read as Latin-1. An array comes as a `NumpyRecord`; `byte_matrix` makes a tensor of it.

    Raises:
        FileFormatError: the pickle is damaged, or names anything but the parts of a numpy array.

    Example:
        >>> load_plain(pickle.dumps({"labels": [3, 1]}, protocol=2))
        {'labels': [3, 1]}
        >>> load_plain(pickle.dumps(print))
        Traceback (most recent call last):
        wellposed.errors.FileFormatError: refused a pickle: ...
    """
    try:
        _check_opcodes(data)
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a hostile pickle can raise whatever it likes
        raise FileFormatError(f"refused a pickle: {error}") from error


def byte_matrix(record: object, columns: int) -> Tensor:
    """Makes a tensor (N, columns) of the recorded numpy array, if it is one of unsigned bytes.

    Raises:
        FileFormatError: it is something else.
    """
    state = record.state if isinstance(record, NumpyRecord) and record.name in _ARRAY else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise FileFormatError(f"expected a numpy array, received {type(record).__name__}")
    _, shape, dtype, fortran_order, data = state
    kind = dtype.arguments[:1] if isinstance(dtype, NumpyRecord) else ()
    if kind != ("u1",) or fortran_order or not isinstance(shape, tuple) or shape[1:] != (columns,):
        raise FileFormatError(f"expected unsigned bytes (N, {columns}), received {kind} of shape {shape}")
    raw = data.encode("latin1") if isinstance(data, str) else data
    if not isinstance(raw, bytes) or not raw or len(raw) != shape[0] * columns:
        raise FileFormatError(f"the array declares the shape {shape}, which is not what it holds")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(shape)


def _check_opcodes(data: bytes) -> None:
    """Scans the opcodes of a pickle without executing them."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise FileFormatError(f"it uses the operation {opcode.name}, which data do not need")
        # The memo is a list: a large index would fill the memory.
        if opcode.name.endswith("PUT") and (argument is None or argument > len(data)):
            raise FileFormatError(f"it counts to {argument} objects in {len(data)} bytes")


_PIXELS = 3 * 32 * 32
_ROWS, _COLUMNS = 25, 40  # of tiles in a sprite
_MAX_BYTES = 1 << 28  # all batches of either set take 185 MB

Pair = tuple[Tensor, Tensor]  # pixels (N, 3, 32, 32) uint8 and labels (N,) int64


def read_binary(path: str | os.PathLike[str], batches: Sequence[str], classes: int, label_bytes: int = 1) -> Pair:
    """Reads batches of the binary version, whose records are label bytes followed by 3072 pixels.

    Args:
        path: the tar archive.
        batches: file names of the batches, without folder, in the order wanted.
        classes: every label must be below it.
        label_bytes: in front of each record; the last one is the label. CIFAR-100 has 2, coarse and fine.

    Raises:
        FileFormatError: a batch is missing or not made of whole records, or a label is out of range.
    """
    record = label_bytes + _PIXELS

    def decode(data: bytes) -> Pair:
        if not data or len(data) % record:
            raise FileFormatError(f"{len(data)} bytes are not a whole number of records of {record}")
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, record)
        return rows[:, label_bytes:], rows[:, label_bytes - 1].long()

    return _read_batches(path, batches, classes, decode)


def read_pickled(path: str | os.PathLike[str], batches: Sequence[str], classes: int, key: str = "labels") -> Pair:
    """Reads batches of the Python version, without executing its pickles (see `load_plain`).

    Args:
        path: the tar archive.
        batches: file names of the batches, without folder, in the order wanted.
        classes: every label must be below it.
        key: of the labels: "labels" for CIFAR-10, "fine_labels" for CIFAR-100.

    Raises:
        FileFormatError: a batch is missing or is anything but such data.
    """

    def decode(data: bytes) -> Pair:
        content = load_plain(data)
        if not isinstance(content, dict) or not {"data", key} <= content.keys():
            raise FileFormatError(f"expected a dictionary with 'data' and {key!r}")
        labels = content[key]
        if not isinstance(labels, list) or not all(type(n) is int and 0 <= n < classes for n in labels):
            raise FileFormatError(f"{key!r} must be a list of whole numbers from 0 to {classes - 1}")
        return byte_matrix(content["data"], _PIXELS), torch.tensor(labels, dtype=torch.int64)

    return _read_batches(path, batches, classes, decode)


def read_sprites(labels: Path, part: str, start: int, sprites: Sequence[Path]) -> Pair:
    """Reads sprites: WebP pictures of 25 rows of 40 images, losslessly compressed.

    Args:
        labels: an .npz file with one array of labels a part.
        part: "train" or "test".
        start: the label of the first image.
        sprites: the pictures, in order.

    Raises:
        FileFormatError: a picture of another kind or size, or labels that do not fit.
    """
    pixels = torch.cat([_read_sprite(path) for path in sprites])
    values = _read_labels(labels, part)[start : start + len(pixels)]
    return _checked(pixels, values, 10, labels)


def _read_batches(
    path: str | os.PathLike[str], batches: Sequence[str], classes: int, decode: Callable[[bytes], Pair]
) -> Pair:
    decoded = {}
    for member, data in read_members(path, lambda name: PurePosixPath(name).name in batches, _MAX_BYTES):
        try:
            decoded[PurePosixPath(member).name] = decode(data)
        except FileFormatError as error:
            raise FileFormatError(f"{member!r} in {os.fspath(path)!r} is not a CIFAR batch: {error}") from error
    missing = [name for name in batches if name not in decoded]
    if missing:
        raise FileFormatError(f"{os.fspath(path)!r} lacks {', '.join(missing)}")
    pixels, labels = (torch.cat(pieces) for pieces in zip(*(decoded[name] for name in batches), strict=True))
    return _checked(pixels.reshape(-1, 3, 32, 32), labels, classes, path)


def _checked(pixels: Tensor, labels: Tensor, classes: int, path: str | os.PathLike[str]) -> Pair:
    if len(labels) != len(pixels) or not bool(((labels >= 0) & (labels < classes)).all()):
        raise FileFormatError(
            f"{os.fspath(path)!r} must have a label from 0 to {classes - 1} for each of {len(pixels)} images; "
            f"received {len(labels)} labels" + (f" from {labels.min()} to {labels.max()}" if len(labels) else "")
        )
    return pixels, labels


def _read_sprite(path: Path) -> Tensor:  # (1000, 3, 32, 32)
    image = require("PIL.Image", extra="data")
    try:
        with image.open(path, formats=["WEBP"]) as picture:
            if picture.size != (32 * _COLUMNS, 32 * _ROWS):
                raise FileFormatError(
                    f"{str(path)!r} must be a picture of {32 * _COLUMNS} x {32 * _ROWS} points; received "
                    f"{picture.size[0]} x {picture.size[1]}"
                )
            points = np.array(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        if isinstance(error, FileFormatError | FileNotFoundError | PermissionError):
            raise
        raise FileFormatError(f"{str(path)!r} is damaged or not a WebP picture: {error}") from error
    tiles = torch.from_numpy(points).reshape(_ROWS, 32, _COLUMNS, 32, 3)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def _read_labels(path: Path, part: str) -> Tensor:
    try:
        values = read_arrays(path, _MAX_BYTES)[part]
    except (FileFormatError, KeyError) as error:
        raise FileFormatError(f"{str(path)!r} has no labels of {part!r} or is damaged: {error}") from error
    if values.dtype != np.uint8 or values.ndim != 1:
        raise FileFormatError(f"{str(path)!r} must hold bytes (N,); received {values.dtype} {values.shape}")
    return torch.from_numpy(values).long()
