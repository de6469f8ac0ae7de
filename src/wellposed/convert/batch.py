"""Programs that were exported for a fixed number of samples, read for one."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wellposed.convert.dispatch import UnsupportedError
from wellposed.convert.signal import Signal

_RESHAPING = ("view", "reshape", "_unsafe_view", "expand", "view_copy")
_MEETING = {
    "add", "sub", "rsub", "mul", "div", "where", "maximum", "minimum", "masked_fill", "lerp", "addcmul", "cat",
    "stack", "hstack", "matmul", "bmm", "baddbmm", "slice_scatter", "select_scatter", "copy", "gather",
}  # fmt: skip


def for_one_sample(node: fx.Node, args: tuple, batch: int) -> tuple:
    """Changes the arguments of a node, written for a batch, to what they are for one sample.

    Sizes are those of the batch where the graph was recorded, so which dimension holds the samples is known from
    the recorded shape of the signal and its shape now.
    """
    recorded = _recorded(node.args[0])
    signal = args[0] if args else None
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name in _RESHAPING and isinstance(signal, Signal) and recorded is not None:
        own = _recorded(node)
        dim = _held(recorded, signal.shape, batch)
        if own is None or dim is None:
            return args
        wanted = _expanded if name == "expand" else _reshaped
        return (signal, wanted(own, recorded, signal.shape, dim, batch), *args[2:])
    return tuple(_narrowed(node, args, batch)) if name.removesuffix("_") in _MEETING else args


def _recorded(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def _held(recorded: Sequence[int], shape: Sequence[int], batch: int) -> int | None:
    """Finds the dimension that holds the samples."""
    found = [k for k, (then, now) in enumerate(zip(recorded, shape, strict=True)) if then != now]
    if not found:
        return None
    if len(found) > 1 or recorded[found[0]] != batch * shape[found[0]]:
        raise UnsupportedError(f"a tensor {tuple(recorded)} of the program is {tuple(shape)} for one sample")
    return found[0]


def _reshaped(own: Sequence[int], recorded: Sequence[int], shape: Sequence[int], dim: int, batch: int) -> list:
    """Divides the dimension in which the samples end up, by where they lie in memory."""
    stride = shape[dim] * math.prod(recorded[dim + 1 :])
    for k, size in enumerate(own):
        inner = math.prod(own[k + 1 :])
        if inner <= stride and stride * batch <= inner * size:
            return [n // batch if j == k else n for j, n in enumerate(own)]
    raise UnsupportedError(f"the program mixes the samples of its batch of {batch}; export it for one sample")


def _expanded(own: Sequence[int], recorded: Sequence[int], shape: Sequence[int], dim: int, batch: int) -> list:
    place = len(own) - len(recorded) + dim
    return [shape[dim] if k == place else n for k, n in enumerate(own)]


def _narrowed(node: fx.Node, args: tuple, batch: int) -> list:
    """Takes one sample of constants that were made for the whole batch and meet a signal."""
    held = None
    for given, value in _pairs(node.args, args):
        if isinstance(value, Signal) and (recorded := _recorded(given)) is not None:
            dim = _held(recorded, value.shape, batch)
            held = None if dim is None else dim - len(recorded)
            break
    return list(args) if held is None else [_one(value, held, batch) for value in args]


def _pairs(nodes: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Lists the arguments of a node with their values, those in lists one by one."""
    for node, value in zip(nodes, values, strict=True):
        if isinstance(node, list | tuple):
            yield from zip(node, value, strict=True)
        else:
            yield node, value


def _one(value: Any, dim: int, batch: int) -> Any:
    if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
        return [_one(part, dim, batch) for part in value]
    if not isinstance(value, Tensor) or value.dim() < -dim or value.shape[dim] != batch:
        return value
    first = value.narrow(dim, 0, 1)
    if not torch.equal(first.expand_as(value), value):
        raise UnsupportedError("a constant of the program differs from sample to sample of its batch")
    return first


def first_of(value: Any, batch: int) -> Any:
    """Takes one sample of an output that does not depend on the input."""
    if isinstance(value, list | tuple):
        return type(value)(first_of(part, batch) for part in value)
    return _one(value, -value.dim(), batch) if isinstance(value, Tensor) and value.dim() else value
