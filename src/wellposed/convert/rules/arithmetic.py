"""Sums, differences, products and averages of signals and constants.

`multiplied` and `matrix_multiplied` are products of two signals, entry by entry and of matrices, as blocks of
states (003, section 2.4); they need the bounds that `bounds` finds. `plus`, `minus`, `times`, `divided` and
`power` take signals and constants, `chosen` picks by a mask, `total` and `average` reduce.
"""

import math
import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import matrix_product, multiply
from wellposed.activations.catalogue import spellings
from wellposed.convert.rules.shape import as_signal
from wellposed.convert.signal import INPUT, RULES, Network, Signal, UnsupportedError
from wellposed.errors import InputError
from wellposed.forms import Block, Dense, Identity, Operator, Repeated, Selection
from wellposed.forms.operators.base import tensors
from wellposed.forms.operators.entries import abs_upper_bound, sum_length

EXACT = 256.0  # whole numbers up to here, and their sums, are exact in every type
COARSE = 2.0**-6  # relative rounding of operands where matrices are multiplied in bfloat16, and more
UNIT = 2.0**-23  # of float32, in which a form may come to be evaluated whatever its weights are now


def multiplied(
    a: Signal, b: Signal, name: str = "", limits: tuple[float | None, float | None] | None = None
) -> Signal:
    """Multiplies two signals entry by entry, with broadcasting, as pairs of states ``(a, b) -> (ab, 0)``.

    Where both factors are bounded, such as gates or values of tanh, the block is Lipschitz with
    ``max(c2 g1, c1 g2)`` in the l1 norm (003, section 2.4); otherwise it has no Lipschitz constant,
    which does no harm in a network without loops. A constant factor makes no states.

    Args:
        a, b: signals of shapes that broadcast.
        name: the label of the block.
        limits: proven bounds on ``|a|`` and ``|b|``; None finds them by `bounds`.

    Example:
        >>> network = Network((2,), torch.float32, torch.device("cpu"))
        >>> gate, value = network.input.activate("sigmoid"), network.input.activate("tanh")
        >>> product = multiplied(gate, value)
        >>> network.activations[-1].name, product.shape
        ('multiply(1.0, 1.0)', (1, 2))
        >>> multiplied(product, network.input) and network.activations[-1].lipschitz("1")
        inf
    """
    shape = _broadcast(a, b)
    if not a.terms or not b.terms:
        constant, other = (a, b) if not a.terms else (b, a)
        return _scaled(_expanded(other, shape), constant, shape)
    first, second = a.indices().broadcast_to(shape), b.indices().broadcast_to(shape) + a.size
    pairs = picked([a, b], torch.stack([first, second], dim=-1).reshape(-1))
    c1, c2 = (limit(a), limit(b)) if limits is None else limits
    product = pairs.activate(multiply(*_both(c1, c2)), name)
    return product.select(2 * torch.arange(math.prod(shape), device=a.device).reshape(shape))


def matrix_multiplied(a: Signal, b: Signal, name: str = "") -> Signal:
    """Multiplies two signals as matrices in their last two dimensions, as `torch.matmul` does.

    Every entry of the batch is a block ``(P, Q) -> (PQ, 0)``; entries of the state that no product fills are
    dead, and nothing reads them. Bounds of the factors are found as in `multiplied`; a constant factor makes no
    states.

    Example:
        >>> network = Network((2, 3), torch.float32, torch.device("cpu"))
        >>> x = network.input
        >>> matrix_multiplied(x, x.select(x.indices().mT)).shape, network.activations[-1].name
        ((1, 2, 2), 'matrix_product(2, 3, 2)')
    """
    left, right = _matrices(a, b)
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = _batch(left, right)
    shape = (*batch, *((rows,) if len(a.shape) > 1 else ()), *((columns,) if len(b.shape) > 1 else ()))
    if not a.terms or not b.terms:
        return _constant_product(left, right, batch).reshape(shape)
    activation = matrix_product(rows, inner, columns, *_both(limit(a), limit(b)))
    count, size = math.prod(batch), activation.block or 0
    first = left.indices().broadcast_to((*batch, rows, inner)).reshape(count, -1)
    second = right.indices().broadcast_to((*batch, inner, columns)).reshape(count, -1) + a.size
    empty = first.new_full((count, size - first.shape[1] - second.shape[1]), -1)
    blocks = picked([a, b], torch.cat([first, second, empty], dim=1).reshape(-1)).activate(activation, name)
    places = torch.arange(count * size, device=a.device).reshape(count, size)[:, : rows * columns]
    return blocks.select(places.reshape(shape))


def bounds(signal: Signal) -> tuple[Tensor, Tensor] | None:
    """Encloses every entry of a signal, from the values that the activations before it can take.

    The interval ``M c -+ |M| r`` of an affine map of states in ``[c - r, c + r]``, widened by all rounding that
    its evaluation may do, so that clipping at the bounds changes nothing; None where a state or the input that
    it depends on has no bounds.

    Returns:
        the lowest and the highest values in the shape of the signal, in float64.

    Example:
        >>> network = Network((2,), torch.float32, torch.device("cpu"))
        >>> low, high = bounds(network.input.activate("sigmoid").scaled(-2.0))
        >>> low.tolist(), high.tolist()
        ([[-2.0, -2.0]], [[0.0, 0.0]])
        >>> bounds(network.input) is None
        True
    """
    zero = torch.zeros(signal.size, dtype=torch.float64, device=signal.device)
    middle, radius, size, length, exact = zero, zero, zero, 1, True
    if signal.offset is not None:
        middle, size = signal.offset.to(torch.float64), signal.offset.to(torch.float64).abs()
        exact = _whole(middle)
    for k, part in signal.terms.items():
        value = signal.network.constants.get(k)
        if value is not None:
            double, exact = part.to(torch.float64), False
            middle = middle + double.apply(value.double()[None])[0]
            size = size + abs_upper_bound(double, formed=False).apply(value.double().abs()[None])[0]
            continue
        low, high = (-math.inf, math.inf) if k <= INPUT else signal.network.activations[k].image
        if not math.isfinite(low) or not math.isfinite(high):
            return None
        double = part.to(torch.float64)
        reach = abs_upper_bound(double, formed=False).row_sums()
        middle = middle + double.row_sums() * ((low + high) / 2)
        radius = radius + reach * ((high - low) / 2)
        size = size + reach * max(abs(low), abs(high))
        length += sum_length(part) + 1
        exact = exact and low.is_integer() and high.is_integer() and _whole(*tensors(part))
    if not exact or float(size.max()) > EXACT:
        radius = radius + size * (COARSE + length * UNIT)
    return (middle - radius).reshape(signal.shape), (middle + radius).reshape(signal.shape)


def limit(signal: Signal) -> float | None:
    """Returns a number that no entry exceeds in magnitude, rounded up to few digits; None if there is none.

    Example:
        >>> network = Network((2,), torch.float32, torch.device("cpu"))
        >>> limit(network.input.activate("tanh").shifted(2.0))
        3.0
    """
    ends = bounds(signal)
    largest = math.inf if ends is None else float(torch.maximum(-ends[0], ends[1]).max())
    return rounded_up(largest) if math.isfinite(largest) else None


def rounded_up(value: float) -> float:
    """Returns the next number of at most ten binary digits.

    Example:
        >>> rounded_up(3.0), rounded_up(3.0000001), rounded_up(0.0)
        (3.0, 3.00390625, 0.0)
    """
    if value <= 0:
        return 0.0
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.ceil(mantissa * 1024) / 1024, exponent)


def picked(signals: Sequence[Signal], index: Tensor) -> Signal:
    """Picks entries from several signals laid one after the other; -1 gives zero.

    Does what selecting from `stacked` does, and leaves out every part of the signals that is not picked.

    Args:
        index: flat places, ``(n,)``.

    Example:
        >>> network = Network((2,), torch.float32, torch.device("cpu"))
        >>> x, y = network.input, network.input.activate("relu")
        >>> both = picked([x, y], torch.tensor([0, 2, -1]))
        >>> both.shape, both.terms[-1].to_dense().tolist()
        ((3,), [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    """
    network = signals[0].network
    starts = [0, *accumulate(signal.size for signal in signals)]
    local = [_inside(index, start, stop) for start, stop in pairwise(starts)]
    terms: dict[int, Operator] = {}
    for k in sorted({k for signal in signals for k in signal.terms}):
        owners = [
            (signal.terms[k], places) for signal, places in zip(signals, local, strict=True) if k in signal.terms
        ]
        used = [(part, places) for part, places in owners if bool((places >= 0).any())]
        if used:
            terms[k] = _rows(network, used)
    return Signal(network, (len(index),), terms, _offset(signals, local))


def _inside(index: Tensor, start: int, stop: int) -> Tensor:
    return torch.where((index >= start) & (index < stop), index - start, -1)


def _rows(network: Network, used: Sequence[tuple[Operator, Tensor]]) -> Operator:
    """Joins the rows that are picked from operators with the same columns; no row is picked twice."""
    narrow = [_narrowed(part, places) for part, places in used]
    if len(narrow) == 1:
        part, places = narrow[0]
        return Selection(places, part.shape[0], network.dtype) @ part
    direct = [_composed(part, places) for part, places in narrow]
    if all(index is not None for index in direct):
        joined = torch.stack([index for index in direct if index is not None]).amax(0)
        return Selection(joined, narrow[0][0].shape[1], network.dtype)
    heights = tuple(part.shape[0] for part, _ in narrow)
    starts = [0, *accumulate(heights)]
    places = torch.stack(
        [torch.where(p >= 0, p + start, -1) for (_, p), start in zip(narrow, starts, strict=False)]
    )
    blocks = {(i, 0): part for i, (part, _) in enumerate(narrow)}
    whole = Block(heights, (narrow[0][0].shape[1],), blocks, network.dtype, network.device)
    return Selection(places.amax(0), sum(heights), network.dtype) @ whole


def _narrowed(part: Operator, places: Tensor) -> tuple[Operator, Tensor]:
    """Looks into a column of blocks where all rows are picked from one of them."""
    if not isinstance(part, Block) or len(part.widths) != 1:
        return part, places
    starts = [0, *accumulate(part.heights)]
    for i, (start, stop) in enumerate(pairwise(starts)):
        within = _inside(places, start, stop)
        if torch.equal(within >= 0, places >= 0):
            return _narrowed(part.part(i, 0), within)
    return part, places


def _composed(part: Operator, places: Tensor) -> Tensor | None:
    """Returns which columns are picked, if the operator only picks."""
    if isinstance(part, Identity):
        return places
    if isinstance(part, Selection):
        return torch.where(places >= 0, part.index[places.clamp(min=0)], -1)
    return None


def _offset(signals: Sequence[Signal], local: Sequence[Tensor]) -> Tensor | None:
    offsets = [
        torch.where(places >= 0, signal.offset[places.clamp(min=0)], 0)
        for signal, places in zip(signals, local, strict=True)
        if signal.offset is not None and signal.size
    ]
    return torch.stack(offsets).sum(0) if offsets else None


def _broadcast(a: Signal, b: Signal) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(a.shape, b.shape))
    except RuntimeError as error:
        raise InputError(
            f"signals of shapes {a.shape} and {b.shape} cannot be multiplied entry by entry"
        ) from error


def _expanded(signal: Signal, shape: tuple[int, ...]) -> Signal:
    return signal if signal.shape == shape else signal.select(signal.indices().broadcast_to(shape))


def _scaled(signal: Signal, constant: Signal, shape: tuple[int, ...]) -> Signal:
    if constant.offset is None or not bool(constant.offset.any()):
        return Signal(signal.network, shape, {})
    return signal.scaled(constant.offset.reshape(constant.shape))


def _matrices(a: Signal, b: Signal) -> tuple[Signal, Signal]:
    """Gives vectors their second dimension, a row on the left and a column on the right."""
    if not a.shape or not b.shape or a.shape[-1] != b.shape[-2 if len(b.shape) > 1 else 0]:
        raise InputError(f"signals of shapes {a.shape} and {b.shape} cannot be multiplied as matrices")
    left = a.reshape((1, *a.shape)) if len(a.shape) == 1 else a
    return left, b.reshape((*b.shape, 1)) if len(b.shape) == 1 else b


def _batch(left: Signal, right: Signal) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))
    except RuntimeError as error:
        raise InputError(f"batches of matrices {left.shape} and {right.shape} do not fit together") from error


def _constant_product(left: Signal, right: Signal, batch: tuple[int, ...]) -> Signal:
    """Multiplies by matrices that depend on nothing, a linear map; transposed where they stand on the left."""
    if right.terms:
        turned = [side.select(side.indices().mT) for side in (right, left)]
        transposed = _constant_product(turned[0], turned[1], batch)
        return transposed.select(transposed.indices().mT)
    (rows, inner), columns, count = left.shape[-2:], right.shape[-1], math.prod(batch)
    zero = torch.zeros(right.size, dtype=left.dtype, device=left.device)
    matrices = (zero if right.offset is None else right.offset).reshape(right.shape)
    each = matrices.broadcast_to((*batch, inner, columns)).reshape(count, inner, columns)
    blocks: dict[tuple[int, int], Operator] = {
        (i, i): Repeated(Dense(matrix.mT.contiguous()), rows) for i, matrix in enumerate(each)
    }
    operator = Block((rows * columns,) * count, (rows * inner,) * count, blocks, left.dtype, left.device)
    return _expanded(left, (*batch, rows, inner)).linear(operator, (*batch, rows, columns))


def _both(c1: float | None, c2: float | None) -> tuple[float, ...]:
    return () if c1 is None or c2 is None else (c1, c2)


def _whole(*values: Tensor) -> bool:
    """Returns whether all numbers are whole."""
    return all(bool((value == value.round()).all()) for value in values if value.is_floating_point())


Value = Signal | Tensor | float


def network_of(*values: Any) -> Network:
    """Finds the network that signals belong to."""
    return next(value.network for value in values if isinstance(value, Signal))


def expanded(signal: Signal, shape: Sequence[int]) -> Signal:
    """Repeats entries where a shape is broadcast to another."""
    return signal if signal.shape == tuple(shape) else signal.select(signal.indices().broadcast_to(shape))


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Signal | Tensor) else ()


@RULES.function(*spellings("add"), operator.add, operator.iadd)
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


@RULES.function(*spellings("sub"), *spellings("subtract"), operator.sub, operator.isub)
def minus(a: Value, b: Value, alpha: float = 1) -> Signal:
    """Subtracts."""
    return plus(a, times(b, -alpha))


@RULES.named("rsub")
def _reversed(a: Value, b: Value, alpha: float = 1) -> Signal:
    return minus(b, a, alpha)


@RULES.function(*spellings("mul"), *spellings("multiply"), operator.mul, operator.imul)
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


@RULES.function(*spellings("div"), *spellings("divide"), *spellings("true_divide"), operator.truediv)
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


@RULES.function(*spellings("neg"), *spellings("negative"), operator.neg)
def _negative(signal: Signal) -> Signal:
    return signal.scaled(-1.0)


RULES.function(*spellings("positive"), operator.pos)(lambda signal: signal)


@RULES.function(*spellings("pow"), operator.pow, operator.ipow, "square", torch.square, torch.ops.aten.square)
def power(signal: Any, exponent: Any = 2) -> Signal:
    """Multiplies a signal by itself; whole positive exponents only."""
    if not isinstance(signal, Signal) or isinstance(exponent, Signal | Tensor) or exponent != int(exponent):
        raise UnsupportedError("powers convert for whole exponents that are numbers, such as x ** 2")
    if exponent < 1:
        raise UnsupportedError(f"the power {exponent} has no Lipschitz constant near zero")
    result = signal
    for _ in range(int(exponent) - 1):
        result = multiplied(result, signal)
    return result


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
    return signal.select(torch.where(mask, signal.indices().broadcast_to(shape), -1))


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


def _comparison(above: bool) -> Any:
    def rule(a: Any, b: Any) -> Positive:
        signal, bound = (a, b) if isinstance(a, Signal) else (b, a)
        zero = not isinstance(bound, Signal) and bool((torch.as_tensor(bound) == 0).all())
        if not zero:
            raise UnsupportedError("a comparison of signals jumps; only z > 0 inside torch.where converts")
        return Positive(signal, above if isinstance(a, Signal) else not above)

    return rule


for _name, _above in {"gt": True, "ge": True, "lt": False, "le": False, "greater": True, "less": False}.items():
    RULES.function(*spellings(_name))(_comparison(_above))
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
    ordered = signal.select(signal.indices().permute(*rest, *dims))
    return ordered.linear(row if count == 1 else Repeated(row, count), shape)
