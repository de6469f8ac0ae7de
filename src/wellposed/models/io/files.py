"""Tensors in a file, with a checksum of all that they mean.

`write_tensors` writes, `read_tensors` reads and `checksum` seals. `making_sense` and `filled` are what every
reader does about a file that makes no sense: it says so, and builds nothing from it.
"""

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
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
