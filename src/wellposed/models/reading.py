"""What every reader of a model file does about one that makes no sense: it says so, and builds nothing from it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellposed.errors import FileFormatError, WellposedError

M = TypeVar("M", bound=nn.Module)
MALFORMED = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError),
    *(MemoryError, AssertionError),
)
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
