"""Reads plain data from a pickle without running anything that the pickle names."""

import io
import pickle
import pickletools
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import FileFormatError

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
    """Stands for a numpy object of a pickle: it keeps what numpy would have been told, and does nothing.

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
    if not isinstance(record, NumpyRecord) or record.name not in _ARRAY or not _is_five(record.state):
        raise FileFormatError(f"expected a numpy array, received {type(record).__name__}")
    _, shape, dtype, fortran_order, data = record.state
    kind = dtype.arguments[:1] if isinstance(dtype, NumpyRecord) else ()
    if kind != ("u1",) or fortran_order or not isinstance(shape, tuple) or shape[1:] != (columns,):
        raise FileFormatError(f"expected unsigned bytes (N, {columns}), received {kind} of shape {shape}")
    raw = data.encode("latin1") if isinstance(data, str) else data
    if not isinstance(raw, bytes) or not raw or len(raw) != shape[0] * columns:
        raise FileFormatError(f"the array declares the shape {shape}, which is not what it holds")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(shape)


def _is_five(state: object) -> bool:
    return isinstance(state, tuple) and len(state) == 5


def _check_opcodes(data: bytes) -> None:
    """Walks over the pickle without obeying it."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise FileFormatError(f"it uses the operation {opcode.name}, which data do not need")
        # The memo is a list: a large index would fill the memory.
        if opcode.name.endswith("PUT") and (argument is None or argument > len(data)):
            raise FileFormatError(f"it counts to {argument} objects in {len(data)} bytes")
