"""What the library needs to know about an activation map.

`Activation` describes phi by its blocks, slopes and Lipschitz constants (003, Definition 1), and by the `Traits`
that kernels, bounds and conversion look up; `block_view` cuts states into these blocks. `real` and `whole` check
the parameters with which activations are built; `check_constants` samples phi and finds constants that are wrong.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor, nn

from wellposed.errors import InputError

Map = Callable[[Tensor], Tensor]
NORMS = ("1", "2", "inf")


@dataclass(frozen=True)
class Traits:
    """What kernels, bounds and conversion know of a function beyond its constants.

    Traits hold for the function they were first given with: a copy of the activation with another function, slope
    or derivative (``dataclasses.replace``) has none.

    Args:
        layers: the modules that compute it, such as ``nn.ReLU``.
        functions: what torch calls it, such as ``"relu"``: as a function, a method or an operator.
        kernel: the branch of the compiled kernels that computes it, and its slope below zero.
        kinks: where a piecewise linear map bends, ``()`` for an affine one; its lines in CROWN.
        stretch: s where phi'(z) = phi'(0) / cosh(s z)^2, as for tanh; its lines in CROWN.
        increasing: whether a map on blocks increases in every entry; a componentwise map says so by its slopes.
    """

    layers: tuple[type[nn.Module], ...] = ()
    functions: tuple[str, ...] = ()
    kernel: tuple[str, float] | None = None
    kinks: tuple[float, ...] | None = None
    stretch: float | None = None
    increasing: bool = False
    subject: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Activation:
    """Describes phi in x = phi(Ax + Bu) as a BLIP map.

    Blockwise Lipschitz: ``|phi_l(a) - phi_l(b)|_p <= gamma_p |a - b|_p`` on every block l
    (003, Definition 1); a componentwise map has blocks of one entry.

    Args:
        name: what it is called in messages and files, and nothing else.
        function: phi, applied along the last dimension.
        slope: range of the difference quotients of a componentwise map.
        derivative: phi'(z) in differentiable torch operations; None falls back to autograd.
        homogeneous: whether phi(a z) = a phi(z) for every a > 0.
        projection: whether phi is the projection on an interval, phi(phi(z)) = phi(z).
        block: None acts componentwise, k on consecutive blocks of k entries, 0 on the whole vector.
        constants: Lipschitz constant per norm "1", "2", "inf"; derived from `slope` if componentwise.
        image: an interval that holds every value of phi.
        rounding: the computed phi(z) is off by at most this many unit roundoffs of ``|phi(0)| + gamma |z|``.
        traits: what kernels, bounds and conversion may use.

    Example:
        >>> Activation("quarter", lambda z: z / 4, (0.25, 0.25)).lipschitz()
        0.25
        >>> Activation("relu", torch.relu)(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    name: str
    function: Map
    slope: tuple[float, float] = (0.0, 1.0)
    derivative: Map | None = None
    homogeneous: bool = False
    projection: bool = False
    block: int | None = None
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    rounding: float = 8.0
    image: tuple[float, float] = (-math.inf, math.inf)
    traits: Traits = Traits()

    def __post_init__(self) -> None:
        subject = self.function, self.slope, self.derivative, self.block
        if self.traits.subject is None:
            object.__setattr__(self, "traits", replace(self.traits, subject=subject))
        elif not alike(self.traits.subject, subject):
            object.__setattr__(self, "traits", Traits())
        if not self.constants:
            if not self.componentwise:
                raise InputError(
                    f"{self.name!r} acts on blocks and declares no constants; pass constants={{'inf': ...}}"
                )
            steepest = max(abs(self.slope[0]), abs(self.slope[1]))
            object.__setattr__(self, "constants", dict.fromkeys(NORMS, steepest))
        if unknown := set(self.constants) - set(NORMS):
            raise InputError(
                f"constants of {self.name!r} name the norms {sorted(unknown)}; use {', '.join(NORMS)}"
            )

    def __call__(self, z: Tensor) -> Tensor:
        return self.function(z)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Activation":
        return self  # nothing in it can change

    @property
    def componentwise(self) -> bool:
        """Whether every output entry depends on its own input entry alone."""
        return self.block is None

    @property
    def increasing(self) -> bool:
        """Whether phi increases in every entry of its argument."""
        return self.slope[0] >= 0 if self.componentwise else self.traits.increasing

    @property
    def is_identity(self) -> bool:
        """Whether phi(z) = z: no other homogeneous map has the slope one everywhere."""
        return self.componentwise and self.homogeneous and self.slope == (1.0, 1.0)

    @property
    def is_relu(self) -> bool:
        """Whether phi(z) = max(z, 0), the projection on the numbers that are not negative."""
        cone = self.componentwise and self.projection and self.homogeneous
        return cone and self.slope == (0.0, 1.0) and self.image[0] == 0

    def lipschitz(self, norm: str = "inf") -> float:
        """Returns gamma in ``|phi(a) - phi(b)|_p <= gamma |a - b|_p`` on a block.

        Example:
            >>> Activation("relu", torch.relu).lipschitz("1")
            1.0
        """
        if norm not in self.constants:
            raise InputError(
                f"{self.name!r} declares no Lipschitz constant in the norm {norm!r}; "
                f"it has them in {', '.join(sorted(self.constants))}"
            )
        return self.constants[norm]

    def slope_at(self, z: Tensor) -> Tensor:
        """Returns phi'(z) of a componentwise map.

        Example:
            >>> Activation("relu", torch.relu).slope_at(torch.tensor([-1.0, 2.0]))
            tensor([0., 1.])
        """
        if not self.componentwise:
            raise InputError(
                f"{self.name!r} acts on blocks, so it has a Jacobian and no slope; use torch.func.jvp"
            )
        if self.derivative is not None:
            return self.derivative(z)
        slope: Tensor = torch.func.vjp(self.function, z)[1](torch.ones_like(z))[0]
        return slope


def same_map(first: Activation, second: Activation) -> bool:
    """Returns whether two activations evaluate the same function with the same constants, whatever their names.

    Functions are the same object, or partial ones of the same object with the same parameters.

    Example:
        >>> relu = Activation("relu", torch.relu)
        >>> same_map(relu, Activation("mine", torch.relu)), same_map(relu, Activation("relu", torch.tanh))
        (True, False)
    """
    names = [part.name for part in fields(Activation) if part.name not in ("name", "traits")]
    return first is second or all(alike(getattr(first, name), getattr(second, name)) for name in names)


def alike(first: Any, second: Any) -> bool:
    """Compares functions, numbers, and partial functions, tuples and dicts of them."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, partial):
        return all(alike(getattr(first, name), getattr(second, name)) for name in ("func", "args", "keywords"))
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(alike, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(alike(first[name], second[name]) for name in first)
    if isinstance(first, Activation):
        return same_map(first, second)
    return isinstance(first, int | float | str) and first == second


def block_view(z: Tensor, size: int) -> Tensor:
    """Splits the last dimension in blocks, (..., n) -> (..., n / k, k); size 0 is one block.

    Example:
        >>> block_view(torch.zeros(3, 6), 2).shape
        torch.Size([3, 3, 2])
    """
    width = size or z.shape[-1]
    if width and z.shape[-1] % width:
        raise InputError(f"a map on blocks of {width} got {z.shape[-1]} entries; pad to a multiple of {width}")
    return z.reshape(*z.shape[:-1], z.shape[-1] // width if width else 1, width)


def real(what: str, value: SupportsFloat, least: float = -math.inf, *, above: bool = False) -> float:
    """Returns a parameter as a finite float of at least (or strictly above) a bound.

    Example:
        >>> real("alpha of elu", -1, 0.0)
        Traceback (most recent call last):
            ...
        wellposed.errors.InputError: alpha of elu must be a finite number >= 0; received -1
    """
    number = _converted(float, value)
    if number is None or not math.isfinite(number) or number < least or (above and number == least):
        bound = "" if least == -math.inf else f" {'>' if above else '>='} {least:g}"
        raise InputError(f"{what} must be a finite number{bound}; received {value!r}")
    return float(number)


def used(value: float) -> tuple[float, float]:
    """Returns a range that holds a parameter and its rounding to float32, which torch may compute with.

    Example:
        >>> used(0.5), used(0.1)
        ((0.5, 0.5), (0.1, 0.10000000149011612))
    """
    rounded = float(torch.tensor(value, dtype=torch.float64, device="cpu").to(torch.float32))
    return (min(value, rounded), max(value, rounded)) if math.isfinite(rounded) else (value, value)


def product_ends(low: float, high: float, factor: float) -> tuple[float, float]:
    """Multiplies the ends of an interval by a positive parameter, rounded outward.

    Example:
        >>> product_ends(-1.0, 1.0, 8.0)
        (-8.0, 8.0)
    """
    least, most = used(factor)
    bottom, top = min(low * least, low * most), max(high * least, high * most)
    if least == most and math.frexp(factor)[0] == 0.5:  # a power of two
        return bottom, top
    return _outward(bottom, -math.inf), _outward(top, math.inf)


def _outward(end: float, side: float) -> float:
    return end if end == 0 or math.isinf(end) else math.nextafter(end, side)


def whole(what: str, value: SupportsIndex) -> int:
    """Returns a parameter as a whole number of at least one.

    Example:
        >>> whole("size of max_pool", 2.5)
        Traceback (most recent call last):
            ...
        wellposed.errors.InputError: size of max_pool must be a whole number, at least one; received 2.5
    """
    count = _converted(lambda number: number.__index__(), value)
    if count is None or isinstance(value, bool) or count < 1:
        raise InputError(f"{what} must be a whole number, at least one; received {value!r}")
    return int(count)


def _converted(kind: Any, value: Any) -> Any:
    try:
        return None if isinstance(value, str) else kind(value)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


def check_constants(activation: Activation, seed: int = 0) -> None:
    """Samples phi in float64 and raises where a declared constant is violated.

    Looks at random, close and axis-parallel pairs at scales 1e-3 to 1e3, and at a dense grid for
    componentwise maps: evidence, not proof.

    Example:
        >>> check_constants(Activation("double", lambda z: 2 * z))
        Traceback (most recent call last):
            ...
        wellposed.errors.InputError: activation 'double' violates slope=(0.0, 1.0): 2 between ...
    """
    generator = torch.Generator().manual_seed(seed)
    widths = (1, 16) if activation.componentwise else (2, 3, 16)
    for width in (activation.block, 3 * activation.block) if activation.block else widths:
        for scale in (1e-3, 1e-1, 1.0, 10.0, 1e3):
            z = scale * torch.randn(400, width, generator=generator, dtype=torch.float64)
            step = torch.randn(z.shape, generator=generator, dtype=z.dtype)
            axis = torch.eye(width, dtype=z.dtype)[torch.randint(width, (len(z),), generator=generator)]
            for move in (scale * axis, 1e-4 * scale * axis, 1e-4 * scale * step.sign(), scale * step):
                _check_pairs(activation, z, z + move)
            _check_flags(activation, z)
    _check_traits(activation, generator)
    if activation.componentwise:
        grid = 10 * torch.linspace(-1, 1, 20001, dtype=torch.float64).unsqueeze(-1)
        _check_pairs(activation, grid[:-1], grid[1:])


def _check_pairs(activation: Activation, a: Tensor, b: Tensor) -> None:
    width = 1 if activation.block is None else activation.block
    inputs = block_view(a, width), block_view(b, width)
    values = block_view(activation(a), width), block_view(activation(b), width)
    same, equal = (inputs[0] == inputs[1]).all(-1), torch.isclose(*values, rtol=1e-12).all(-1)
    _blame(activation, f"block={activation.block}", (same & ~equal).double(), same, a, b)
    slack = (activation.rounding + 4) * 2.0**-51 * (1 + sum(t.abs().sum(-1) for t in (*inputs, *values)))
    if activation.componentwise:
        quotient = ((values[1] - values[0]) / (inputs[1] - inputs[0])).squeeze(-1)
        low, high = activation.slope
        excess = torch.maximum(low - quotient, quotient - high) - slack / (a - b).abs()
        _blame(activation, f"slope={activation.slope}", excess, quotient, a, b)
    for norm, constant in activation.constants.items():
        distance = torch.linalg.vector_norm(inputs[0] - inputs[1], float(norm), -1)
        quotient = torch.linalg.vector_norm(values[0] - values[1], float(norm), -1) / distance
        excess = quotient - constant - slack / distance
        _blame(activation, f"constants[{norm!r}]={constant:g}", excess, quotient, a, b)


def _check_flags(activation: Activation, z: Tensor) -> None:
    value, tripled = activation(z), activation(3.7 * z)
    if activation.homogeneous:
        gap = (tripled - 3.7 * value).abs() - 1e-12 * z.abs().amax(-1, keepdim=True)
        _blame(activation, "homogeneous=True", gap, tripled / value, z, 3.7 * z)
    if activation.projection:
        gap = (activation(value) - value).abs()
        _blame(activation, "projection=True", gap, activation(value) / value, z, value)
    if activation.componentwise and activation.derivative is not None:
        expected = torch.func.vjp(activation.function, z)[1](torch.ones_like(z))[0]
        gap = (expected - activation.slope_at(z)).abs() - 1e-9
        _blame(activation, "derivative", gap, expected, z, z)


def _check_traits(activation: Activation, generator: torch.Generator) -> None:
    traits = activation.traits
    if traits.kinks is not None:  # between two of these points it must be a line
        points = torch.cat([torch.linspace(-30, 31, 242), torch.tensor(traits.kinks)]).double().sort().values
        a, b = points[:-1, None], points[1:, None]
        bend = ((activation(a) + activation(b)) / 2 - activation((a + b) / 2)).abs()
        _blame(activation, f"kinks={traits.kinks}", bend - 1e-6, bend, a, b)
    if traits.stretch is not None:
        z = torch.linspace(-9, 9, 241, dtype=torch.float64)[:, None]
        gap = (activation.slope_at(z) - activation.slope[1] / torch.cosh(traits.stretch * z).square()).abs()
        _blame(activation, f"stretch={traits.stretch}", gap - 1e-9, activation.slope_at(z), z, z)
    if traits.increasing:
        a, step = torch.randn(2, 400, activation.block or 8, generator=generator, dtype=torch.float64)
        fall = activation(a) - activation(a + step.abs())
        _blame(activation, "increasing=True", fall, fall, a, a + step.abs())


def _blame(activation: Activation, claim: str, excess: Tensor, quotient: Tensor, a: Tensor, b: Tensor) -> None:
    excess = torch.nan_to_num(excess, nan=-1.0)
    if excess.max() > 0:
        worst = int(excess.argmax())
        row, value = worst // (excess.numel() // len(excess)), float(quotient.flatten()[worst])
        raise InputError(
            f"activation {activation.name!r} violates {claim}: {value:.6g} between "
            f"{a[row].tolist()} and {b[row].tolist()}; declare what is true (a map that jumps cannot be used)"
        )
