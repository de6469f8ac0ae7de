"""Tensors in a file, with a checksum of all that they mean.

`write_tensors` writes, `read_tensors` reads and `checksum` seals. `pack_tensors` compresses those with many zeros
or repetitions. `as_format_error` and `load_checked` are for readers of files that make no sense: they say so and
build nothing.
"""

import contextlib
import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from wellposed.errors import FileFormatError, InputError, WellposedError
from wellposed.forms.storage import strict_json
from wellposed.models.io.archives import UNPACKED_FREE, UNPACKED_PER_BYTE


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, with the permissions of any new file of the user.

    Raises:
        OSError: the disk is full, or the folder is missing or cannot be written to.
    """
    path.touch()
    rights = path.stat().st_mode
    try:
        save_file(tensors, path, metadata=metadata)
        path.chmod(rights)  # it was written for the owner alone
    except SafetensorError as error:
        raise OSError(f"{path.parent} cannot be written to, or its disk is full: {error}") from error


LARGEST_HEADER = 1 << 26


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a safetensors file; refuses duplicate or unknown entries in its header. Returns tensors and metadata.

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
    """Refuses what safetensors would ignore: duplicate and unknown entries."""
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


_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _KINDS.items()}
WORTH, LEAST = 0.75, 512  # a packed tensor has at most this part of its bytes, and so many fewer


def pack_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Compresses tensors that become clearly smaller; returns what is stored and a table of the packed ones.

    A packed tensor is a zlib stream of the first bytes of all its numbers, then of their second bytes, and so on;
    whole numbers are replaced by their differences, whose sign is kept in the lowest bit. The table names type and
    shape.

    Example:
        >>> stored, table = pack_tensors({"A": torch.eye(64)})
        >>> table, stored["A"].dtype, len(stored["A"]) < 600
        ({'A': {'dtype': 'F32', 'shape': [64, 64]}}, torch.uint8, True)
        >>> torch.equal(unpack_tensors(stored, table)["A"], torch.eye(64))
        True
    """
    stored, packed = dict(tensors), {}
    for name, value in tensors.items():
        if value.dtype in _NAMES and value.nbytes > LEAST:
            data = zlib.compress(_planes(value), 9)
            if len(data) <= min(WORTH * value.nbytes, value.nbytes - LEAST):
                packed[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    small = sorted(packed, key=lambda name: -tensors[name].nbytes)
    while small:
        stored |= {name: packed[name] for name in small}
        if _unpacked_size(tensors.values()) <= _largest_unpacked(stored.values()):
            break
        stored[small[-1]] = tensors[small.pop()]  # no reader would unpack so much of so little
    table = {name: {"dtype": _NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)} for name in small}
    return stored, table


def unpack_tensors(stored: Mapping[str, Tensor], table: Any) -> dict[str, Tensor]:
    """Returns the tensors that `pack_tensors` was given.

    Raises:
        FileFormatError: the table does not fit the tensors, or asks for far more than they can hold.
    """
    if not isinstance(table, dict) or not table:
        raise FileFormatError(f"packed tensors are listed by their names; received {table!r}")
    total = _unpacked_size(value for name, value in stored.items() if name not in table)
    for name, entry in table.items():
        if name not in stored or stored[name].dtype != torch.uint8 or stored[name].dim() != 1:
            raise FileFormatError(f"there is no packed tensor {name!r}")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape"} or not _is_shape(entry["shape"]):
            raise FileFormatError(f"a packed tensor has a dtype and a shape; received {entry!r}")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in _KINDS:
            raise FileFormatError(f"numbers of the type {entry['dtype']!r} are not packed")
        total += math.prod(entry["shape"]) * _KINDS[entry["dtype"]].itemsize
    if total > (limit := _largest_unpacked(stored.values())):
        raise FileFormatError(f"its tensors unpack to {total} bytes; of a file of this size {limit} are read")
    return {name: _unpacked(value, table[name]) if name in table else value for name, value in stored.items()}


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 < size < 2**31 for size in value)


def _unpacked_size(tensors: Iterable[Tensor]) -> int:
    return sum(value.nbytes for value in tensors)


def _largest_unpacked(stored: Iterable[Tensor]) -> int:
    return UNPACKED_PER_BYTE * sum(value.nbytes for value in stored) + UNPACKED_FREE


def _planes(value: Tensor) -> bytes:
    """Lays out the bytes of numbers in planes: all first bytes, then all second ones."""
    flat = value.detach().cpu().contiguous().flatten()
    if value.dtype == torch.int64:
        step = np.diff(flat.numpy(), prepend=np.int64(0))
        flat = torch.from_numpy((step << 1) ^ (step >> 63))
    return bytes(flat.view(torch.uint8).numpy().reshape(-1, flat.element_size()).T.tobytes())


def _unpacked(stored: Tensor, entry: dict[str, Any]) -> Tensor:
    kind, shape = _KINDS[entry["dtype"]], entry["shape"]
    size, reader = math.prod(shape) * kind.itemsize, zlib.decompressobj()
    try:
        data = reader.decompress(stored.numpy().tobytes(), size + 1)  # never more, whatever is packed there
    except zlib.error as error:
        raise FileFormatError(f"a packed tensor is damaged: {error}") from error
    if len(data) != size or not reader.eof or reader.unused_data:
        raise FileFormatError(f"a packed tensor declares {size} bytes and holds others")
    lines: NDArray[np.uint8] = np.frombuffer(data, np.uint8).reshape(kind.itemsize, -1).T
    flat = torch.from_numpy(lines.copy()).view(-1).view(kind)
    if kind == torch.int64:
        code = flat.numpy()
        step = ((code >> 1) & np.int64(2**63 - 1)) ^ -(code & 1)
        flat = torch.from_numpy(np.cumsum(step))
    return flat.reshape(shape)


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


M = TypeVar("M", bound=nn.Module)
MALFORMED = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError),
    *(MemoryError, AssertionError),
)
FLOATS = ("float64", "float32", "float16", "bfloat16")
COUNTS = ("depth", "num_layers")  # of layers, each of which has tensors


@contextlib.contextmanager
def as_format_error(what: str) -> Iterator[None]:
    """Turns whatever a malformed description leads to into a `FileFormatError`.

    Example:
        >>> with as_format_error("its configuration is no model"):
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


def load_checked(make: Callable[[], M], tensors: Mapping[str, Tensor]) -> M:
    """Builds a module and loads its tensors, after a check that they fit.

    The check builds the module without memory, so that a configuration that claims more than the file holds costs
    nothing. Parameters and buffers share one dtype; counters of batch norm are integers.

    Example:
        >>> load_checked(lambda: nn.Linear(10**9, 10**9), {"weight": torch.ones(1, 1), "bias": torch.ones(1)})
        Traceback (most recent call last):
            ...
        wellposed.errors.FileFormatError: the configuration asks for bias of (1000000000,), the file holds (1,)
    """
    if not tensors:
        raise FileFormatError("there are no tensors")
    with torch.device("meta"):
        wanted = make().state_dict()
    counters = {name for name, value in wanted.items() if value.dtype == torch.int64}
    numbers = {name: value for name, value in tensors.items() if name not in counters}
    kinds = {str(value.dtype).removeprefix("torch.") for value in numbers.values()}
    if len(kinds) != 1 or not kinds <= {*FLOATS}:
        raise FileFormatError(
            f"its tensors are {', '.join(sorted(kinds))}; a model has one of {', '.join(FLOATS)}"
        )
    if any(name in tensors and tensors[name].dtype != torch.int64 for name in counters):
        raise FileFormatError(f"{', '.join(sorted(counters))} must be integers")
    expected = {name: tuple(value.shape) for name, value in wanted.items()}
    given = {name: tuple(value.shape) for name, value in tensors.items()}
    for name in sorted({*expected, *given}):
        if expected.get(name) != given.get(name):
            raise FileFormatError(
                f"the configuration asks for {name} of {expected.get(name, 'no shape')}, the file holds "
                f"{given.get(name, 'none')}"
            )
    module = make().to(next(iter(numbers.values())).dtype)
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
