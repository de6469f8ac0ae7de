"""Sums, differences, products and averages of signals and constants."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.convert.dispatch import RULES, UnsupportedError, everywhere
from wellposed.convert.multiply import multiplied
from wellposed.convert.shape import as_signal
from wellposed.convert.signal import Network, Signal
from wellposed.forms import Dense, Operator, Repeated

Value = Signal | Tensor | float


def network_of(*values: Any) -> Network:
    """Finds the network that signals belong to."""
    return next(value.network for value in values if isinstance(value, Signal))


def expanded(signal: Signal, shape: Sequence[int]) -> Signal:
    """Repeats entries where a shape is broadcast to another."""
    return signal if signal.shape == tuple(shape) else signal.select(signal.places().broadcast_to(shape))


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Signal | Tensor) else ()


@RULES.function(*everywhere("add"), operator.add, operator.iadd)
def plus(a: Value, b: Value, alpha: float = 1, out: None = None) -> Signal:
    """Adds signals and constants of shapes that broadcast."""
    first, second = (b, a) if not isinstance(a, Signal) else (a, b)
    if alpha != 1:
        return plus(a, times(b, alpha))
    assert isinstance(first, Signal)
    wide = expanded(first, torch.broadcast_shapes(first.shape, _shape(second)))
    if not isinstance(second, Signal):
        return wide.shifted(second)
    return wide.plus(expanded(second, wide.shape))


@RULES.function(*everywhere("sub"), *everywhere("subtract"), operator.sub, operator.isub)
def minus(a: Value, b: Value, alpha: float = 1) -> Signal:
    """Subtracts."""
    return plus(a, times(b, -alpha))


@RULES.named("rsub")
def _reversed(a: Value, b: Value, alpha: float = 1) -> Signal:
    return minus(b, a, alpha)


@RULES.function(*everywhere("mul"), *everywhere("multiply"), operator.mul, operator.imul)
def times(a: Value, b: Value) -> Any:
    """Multiplies entry by entry; two signals become pairs of states."""
    if isinstance(a, Signal) and isinstance(b, Signal):
        return multiplied(a, b)
    if not isinstance(a, Signal) and not isinstance(b, Signal):
        return a * b
    signal, factor = (a, b) if isinstance(a, Signal) else (b, a)
    assert isinstance(signal, Signal)
    wide = expanded(signal, torch.broadcast_shapes(signal.shape, _shape(factor)))
    return wide.scaled(factor)  # type: ignore[arg-type]


@RULES.function(*everywhere("div"), *everywhere("divide"), *everywhere("true_divide"), operator.truediv)
@RULES.function(operator.itruediv)
def divided(a: Value, b: Value, rounding_mode: str | None = None) -> Signal:
    """Divides by a constant."""
    if rounding_mode is not None:
        raise UnsupportedError(f"division with rounding_mode={rounding_mode!r} jumps; leave the rounding out")
    if isinstance(b, Signal) and b.terms:
        raise UnsupportedError(
            "a division by something that depends on the input has no Lipschitz constant near zero; register a "
            "rule for the module that divides"
        )
    assert isinstance(a, Signal)
    wide = expanded(a, torch.broadcast_shapes(a.shape, _shape(b)))
    return wide.scaled(1 / torch.as_tensor(b, dtype=torch.float64, device=a.device))


@RULES.function(*everywhere("neg"), *everywhere("negative"), operator.neg)
def _negative(signal: Signal) -> Signal:
    return signal.scaled(-1.0)


RULES.function(*everywhere("positive"), operator.pos)(lambda signal: signal)


@RULES.function(*everywhere("pow"), operator.pow, operator.ipow, "square", torch.square, torch.ops.aten.square)
def power(signal: Any, exponent: Any = 2) -> Signal:
    """Multiplies a signal by itself; whole positive exponents only."""
    if not isinstance(signal, Signal) or isinstance(exponent, Signal | Tensor) or exponent != int(exponent):
        raise UnsupportedError("powers convert for whole exponents that are numbers, such as x ** 2")
    if exponent < 1:
        raise UnsupportedError(f"the power {exponent} has no Lipschitz constant near zero")
    found = signal
    for _ in range(int(exponent) - 1):
        found = multiplied(found, signal)
    return found


@RULES.named("lerp")
def _lerp(a: Value, b: Value, weight: Any) -> Signal:
    return plus(a, times(minus(b, a), weight))


@RULES.named("addcmul")
def _addcmul(a: Value, b: Value, c: Value, value: float = 1) -> Signal:
    return plus(a, times(times(b, c), value))


@RULES.named("masked_fill")
def _masked_fill(signal: Signal, mask: Tensor, value: float | Tensor) -> Signal:
    return chosen(mask, value, signal)


@RULES.named("where")
def chosen(mask: Any, a: Any, b: Any) -> Signal:
    """Takes entries of one or the other signal by a constant mask, or by the sign of what both are multiples of.

    ``where(z > 0, z, s z)`` is ``s z + (1 - s) relu(z)``, the PReLU.
    """
    if isinstance(mask, Positive):
        return mask.chosen(a, b)
    if not isinstance(mask, Tensor):
        raise UnsupportedError("where() with a mask that depends on the input jumps in general; use relu or clamp")
    network = network_of(a, b)
    shape = torch.broadcast_shapes(mask.shape, _shape(a), _shape(b))
    wide = mask.broadcast_to(shape)
    return _masked(as_signal(a, network), wide, shape).plus(_masked(as_signal(b, network), ~wide, shape))


def _masked(signal: Signal, mask: Tensor, shape: Sequence[int]) -> Signal:
    if not signal.terms and signal.offset is not None:  # infinite constants times zero would not be zero
        value = signal.offset.reshape(signal.shape).broadcast_to(shape)
        return signal.network.constant(torch.where(mask, value, 0))
    return signal.select(torch.where(mask, signal.places().broadcast_to(shape), -1))


class Positive:
    """What ``z > 0`` or ``z >= 0`` stands for, with an optional exchange of both sides."""

    def __init__(self, signal: Signal, above: bool) -> None:
        self.signal, self.above = signal, above

    def chosen(self, a: Any, b: Any) -> Signal:
        """Joins two multiples of z at zero, where they meet."""
        above, below = (a, b) if self.above else (b, a)
        left, right = self._factor(below), self._factor(above)
        joined = self.signal.scaled(left)
        return joined.plus(self.signal.activate("relu").scaled(right - left))

    def _factor(self, value: Any) -> Tensor:
        if not isinstance(value, Signal):
            if bool((torch.as_tensor(value) == 0).all()):
                return torch.zeros(self.signal.shape, dtype=self.signal.dtype)
        elif value is self.signal:
            return torch.ones(value.shape, dtype=value.dtype)
        elif value.multiple_of is not None and value.multiple_of[0] is self.signal:
            return value.multiple_of[1].reshape(self.signal.shape)
        raise UnsupportedError("where(z > 0, a, b) may jump unless a and b are constant multiples of z")


def _comparison(above: bool, swapped: bool = False) -> Any:
    def rule(a: Any, b: Any) -> Positive:
        signal, bound = (a, b) if isinstance(a, Signal) else (b, a)
        zero = not isinstance(bound, Signal) and bool((torch.as_tensor(bound) == 0).all())
        if not zero:
            raise UnsupportedError("a comparison of signals jumps; only z > 0 inside torch.where converts")
        return Positive(signal, above if isinstance(a, Signal) else not above)

    return rule


for _name, _above in {"gt": True, "ge": True, "lt": False, "le": False, "greater": True, "less": False}.items():
    RULES.function(*everywhere(_name))(_comparison(_above))
    if hasattr(operator, _name):
        RULES.function(getattr(operator, _name))(_comparison(_above))


def _dims(signal: Signal, dim: Any) -> list[int]:
    """Reads dimensions, all of them if none is given, and refuses to mix samples."""
    count = len(signal.shape)
    given = range(count) if dim is None or dim in ((), []) else [dim] if isinstance(dim, int) else dim
    dims = sorted(k % count for k in given)
    if 0 in dims and count > 1 and signal.shape[0] == 1:
        raise UnsupportedError(
            "a reduction over the first dimension, the batch, mixes samples, so it has no implicit form; reduce "
            "over the other dimensions"
        )
    return dims


@RULES.named("sum")
def total(signal: Signal, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **names: Any) -> Signal:
    """Adds up along dimensions."""
    return weighted(signal, names.get("axis", dim), keepdim, 1.0)


@RULES.named("mean")
def average(signal: Signal, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **names: Any) -> Signal:
    """Averages along dimensions."""
    return weighted(signal, names.get("axis", dim), keepdim, None)


def weighted(signal: Signal, dim: Any, keepdim: bool, weight: float | None) -> Signal:
    """Adds up along dimensions with one weight, one over their number if None."""
    dims = _dims(signal, dim)
    rest = [k for k in range(len(signal.shape)) if k not in dims]
    size = math.prod(signal.shape[k] for k in dims)
    row: Operator = Dense(torch.full((1, size), weight or 1 / size, dtype=signal.dtype, device=signal.device))
    count = signal.size // size
    shape = [1 if k in dims else n for k, n in enumerate(signal.shape) if keepdim or k not in dims]
    ordered = signal.select(signal.places().permute(*rest, *dims))
    return ordered.linear(row if count == 1 else Repeated(row, count), shape)
