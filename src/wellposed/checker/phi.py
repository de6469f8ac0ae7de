"""What the checker knows of activations: slopes, constants and values, written down once more and on its own."""

import ast
import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from wellposed.checker.tensors import RefusedError, rounded

HALF, ZERO, ONE = Fraction(1, 2), Fraction(0), Fraction(1)
SIXTH, QUARTER = Fraction(1, 6), Fraction(1, 4)


class Phi(NamedTuple):
    """What is known of an activation.

    Args:
        slope: encloses all difference quotients; None for a map on blocks.
        block: size of the blocks, None acts entry by entry, 0 on all entries of its part.
        constant: of Lipschitz in the norms 1 and inf; None where there is none.
        projection: whether it is the projection on an interval.
        image: encloses phi of an interval; None where phi is not increasing or not known here.
        kinks: between which it is affine; None where it is not.
        derivative: encloses phi' of a map that is odd up to a constant, convex below zero and concave above.
    """

    slope: tuple[Fraction, Fraction] | None
    block: int | None = None
    constant: Fraction | None = Fraction(1)
    projection: bool = False
    image: Callable[[Fraction], tuple[Fraction, Fraction]] | None = None
    kinks: tuple[Fraction, ...] | None = None
    derivative: Callable[[Fraction], tuple[Fraction, Fraction]] | None = None

    @property
    def gamma(self) -> Fraction:
        if self.slope is not None:
            return max(map(abs, self.slope))
        if self.constant is None:
            raise RefusedError("an activation has no Lipschitz constant, which a proof of a loop needs")
        return self.constant


def activation(name: Any) -> Phi:
    """Looks an activation up; parameters stand in brackets.

    Example:
        >>> activation("leaky_relu(0.25)").slope
        (Fraction(1, 4), Fraction(1, 1))
    """
    family, bracket, rest = name.partition("(") if isinstance(name, str) else ("", "", "")
    if bracket and not rest.endswith(")"):
        raise RefusedError(f"the activation {name!r} cannot be read")
    try:
        given = () if not bracket or name == "multiply()" else ast.literal_eval(f"({rest[:-1]},)")
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise RefusedError(f"the activation {name!r} cannot be read") from error
    if bracket and f"{family}({', '.join(map(repr, given))})" != name:
        raise RefusedError(f"the activation {name!r} cannot be read: it is not written as the library writes it")
    if family == "rescaled" and [type(part) for part in given] == [str, float]:
        return _rescaled(*given)
    if family not in PHI:
        raise RefusedError(f"the activation {name!r} is not known to the checker, so nothing is proven")
    whole = WHOLE.get(family, 0)
    if not all(type(number) is (int if k < whole else float) for k, number in enumerate(given)):
        raise RefusedError(f"the activation {name!r} cannot be read: its parameters are no numbers of its kind")
    try:
        return PHI[family](*map(Fraction, given))
    except (TypeError, OverflowError) as error:
        raise RefusedError(f"the activation {name!r} cannot be read") from error


def _rescaled(name: str, exponent: float) -> Phi:
    """Returns 2^e phi(2^-e z), which has the slopes of phi; where it is phi itself, it has the name of phi."""
    phi = activation(name)._replace(kinks=None, derivative=None)
    if not 0 < abs(exponent) <= 1000 or name.partition("(")[0] in HOMOGENEOUS:
        raise RefusedError(f"the activation {name!r} cannot be read with the exponent {exponent!r}")
    if phi.image is None or not exponent.is_integer():
        return phi._replace(image=None, projection=False)
    factor, inner = Fraction(2) ** int(exponent), phi.image

    def image(z: Fraction) -> tuple[Fraction, Fraction]:
        low, high = inner(z / factor)
        return low * factor, high * factor

    return phi._replace(image=image)


def _exact(function: Callable[[Fraction], Fraction]) -> Callable[[Fraction], tuple[Fraction, Fraction]]:
    return lambda z: (function(z), function(z))


def _computed(function: Callable[[float], float]) -> Callable[[Fraction], tuple[Fraction, Fraction]]:
    """Encloses a value of the C library, which is taken to be right in its first twelve digits."""

    def image(z: Fraction) -> tuple[Fraction, Fraction]:
        value = Fraction(function(float(max(min(z, Fraction(700)), Fraction(-700)))))
        error = abs(value) * Fraction(1, 10**12) + Fraction(1, 10**300)
        return value - error, value + error

    return image


def _clip(low: Fraction, high: Fraction | None) -> Phi:
    if high is not None and not low < high:
        raise RefusedError(
            f"an activation cannot be read: nothing lies between {rounded(low):g} and {rounded(high):g}"
        )
    cut = _exact(lambda z: max(low, z) if high is None else max(low, min(high, z)))
    kinks = (low,) if high is None else (low, high)
    return Phi((Fraction(0), Fraction(1)), projection=True, image=cut, kinks=kinks)


def _increasing(
    high: str | int | Fraction, function: Callable[[Fraction], tuple[Fraction, Fraction]] | None
) -> Phi:
    return Phi((Fraction(0), Fraction(high)), image=function)


def _sigmoidal(
    high: Fraction, function: Callable[[float], float], derivative: Callable[[Fraction], Fraction]
) -> Phi:
    """Makes tanh or sigmoid, whose derivative is a function of the value that decreases from zero on."""
    image = _computed(function)
    start = image(ZERO)[1]

    def slope(z: Fraction) -> tuple[Fraction, Fraction]:
        low, top = image(abs(z))
        return max(derivative(top), ZERO), derivative(low) if low > start else high

    return _increasing(high, image)._replace(derivative=slope)


def _between(low: str, high: str) -> Phi:
    return Phi((Fraction(low), Fraction(high)))


def _leaky(slope: Fraction = Fraction(1, 100)) -> Phi:
    image = _exact(lambda z: max(z, Fraction(0)) + slope * min(z, Fraction(0))) if slope >= 0 else None
    return Phi((min(slope, Fraction(1)), max(slope, Fraction(1))), image=image, kinks=(ZERO,))


def _blocks(size: Fraction, constant: Fraction = ONE) -> Phi:
    if size < 1:
        raise RefusedError(f"an activation cannot be read: it acts on blocks of {size}")
    return Phi(None, int(size), constant)


def _at_least(value: Fraction, phi: Phi, *, above: bool = False) -> Phi:
    """Returns phi if its parameter is not negative."""
    if value < 0 or (above and not value):
        raise RefusedError(f"an activation cannot be read: its parameter is {rounded(value):g}")
    return phi


def _used(value: Fraction) -> tuple[Fraction, Fraction]:
    """Returns a range that holds a parameter and what float32 makes of it."""
    try:
        rounded = Fraction(struct.unpack("<f", struct.pack("<f", float(value)))[0])
    except OverflowError:
        rounded = value
    return min(value, rounded), max(value, rounded)


def _product(size: Fraction, first: Fraction, second: Fraction, inner: Fraction, outer: Fraction) -> Phi:
    """Products of clipped factors: inner sums of them, each factor being used outer times at most."""
    for bound in (first, second):
        _at_least(bound, Phi(None))
    c1, c2 = _used(first)[1], _used(second)[1]
    return _blocks(size, max(inner * (c1 + c2), outer * max(c1, c2)))


def _multiply(first: Fraction | None = None, second: Fraction | None = None) -> Phi:
    if first is None or second is None:
        return Phi(None, 2, None) if first is None and second is None else _blocks(ZERO)
    return _product(Fraction(2), first, second, ONE, ONE)


def _matrix_product(
    rows: Fraction,
    inner: Fraction,
    columns: Fraction,
    first: Fraction | None = None,
    second: Fraction | None = None,
) -> Phi:
    size = max(rows * inner + inner * columns, rows * columns)
    if min(rows, inner, columns) < 1 or (first is None) != (second is None):
        return _blocks(ZERO)
    if first is None or second is None:
        return Phi(None, int(size), None)
    return _product(size, first, second, inner, max(rows, columns))


def _normalise(size: Fraction, eps: Fraction) -> Phi:
    """Has the constant sqrt(size / eps), rounded up."""
    _at_least(eps, _blocks(size))
    least = _used(eps)[0]
    if not least:
        return Phi(None, int(size), None)
    root = math.isqrt(math.ceil(size / least * (1 << 120))) + 1
    return Phi(None, int(size), Fraction(root, 1 << 60))


# How many parameters are whole numbers, such as sizes; those after them are real.
WHOLE = {"max_pool": 1, "group_sort": 1, "softmax": 1, "normalise": 1, "matrix_product": 3}
HOMOGENEOUS = ("identity", "relu", "leaky_relu", "max_pool", "group_sort")
PHI: dict[str, Callable[..., Phi]] = {
    "identity": lambda: Phi((ONE, ONE), projection=True, image=_exact(lambda z: z), kinks=()),
    "relu": lambda: _clip(ZERO, None),
    "relu6": lambda: _clip(ZERO, Fraction(6)),
    "hardtanh": lambda low=-ONE, high=ONE: _clip(low, high),
    "leaky_relu": _leaky,
    "hardsigmoid": lambda: _increasing(SIXTH, _exact(lambda z: max(ZERO, min(ONE, z / 6 + HALF))))._replace(
        kinks=(Fraction(-3), Fraction(3))
    ),
    "softsign": lambda: _increasing(1, _exact(lambda z: z / (1 + abs(z)))),
    "softshrink": lambda margin=HALF: _at_least(
        margin,
        _increasing(1, _exact(lambda z: z - max(-margin, min(margin, z))))._replace(kinks=(-margin, margin)),
    ),
    "tanh": lambda: _sigmoidal(ONE, math.tanh, lambda t: 1 - t * t),
    "sigmoid": lambda: _sigmoidal(QUARTER, lambda z: 1 / (1 + math.exp(-z)), lambda t: t * (1 - t)),
    "softplus": lambda beta=ONE: _at_least(beta, _increasing(1, None), above=True),
    "elu": lambda alpha=ONE: _at_least(alpha, Phi((ZERO, max(ONE, alpha)))),
    "tanhshrink": lambda: _increasing(1, None),
    "logsigmoid": lambda: _increasing(1, None),
    "selu": lambda: _increasing("1.758099340847378", None),
    "sin": lambda: _between("-1", "1"),
    "gelu": lambda: _between("-0.128904145185155", "1.128904145185155"),
    "gelu_tanh": lambda: _between("-0.128993068658772", "1.128993068658772"),
    "silu": lambda: _between("-0.099839320128867", "1.099839320128867"),
    "mish": lambda: _between("-0.1125261224", "1.0884981613"),
    "hardswish": lambda: _between("-0.5", "1.5"),
    "max_pool": lambda size: _blocks(size),
    "group_sort": lambda size: _blocks(size),
    "multiply": _multiply,
    "matrix_product": _matrix_product,
    "normalise": _normalise,
    "softmax": lambda size=None: Phi(None, 0, HALF) if size is None else _blocks(size, HALF),
}
