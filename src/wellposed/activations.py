"""Activation maps with the constants that well-posedness rests on."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import InputError, unknown_name

Map = Callable[[Tensor], Tensor]
NORMS = ("1", "2", "inf")


@dataclass(frozen=True)
class Activation:
    """Describes phi in x = phi(Ax + Bu) as a BLIP map.

    Blockwise Lipschitz: ``|phi_l(a) - phi_l(b)|_p <= gamma_p |a - b|_p`` on every block l
    (003, Definition 1); a componentwise map has blocks of one entry.

    Args:
        function: phi, applied along the last dimension.
        slope: range of the difference quotients of a componentwise map.
        derivative: phi'(z) in differentiable torch operations; None falls back to autograd.
        homogeneous: whether phi(a z) = a phi(z) for every a > 0.
        projection: whether phi is the projection on an interval, phi(phi(z)) = phi(z).
        block: None acts componentwise, k on consecutive blocks of k entries, 0 on the whole vector.
        constants: Lipschitz constant per norm "1", "2", "inf"; derived from `slope` if componentwise.
        rounding: the computed phi(z) is off by at most this many unit roundoffs of ``|phi(0)| + gamma |z|``.

    Example:
        >>> get_activation("sigmoid").lipschitz()
        0.25
        >>> get_activation("relu")(torch.tensor([-1.0, 2.0]))
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

    def __post_init__(self) -> None:
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

    def lipschitz(self, norm: str = "inf") -> float:
        """Returns gamma in ``|phi(a) - phi(b)|_p <= gamma |a - b|_p`` on a block.

        Example:
            >>> get_activation("softmax").lipschitz("1")
            0.5
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
            >>> get_activation("relu").slope_at(torch.tensor([-1.0, 2.0]))
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


def block_view(z: Tensor, size: int) -> Tensor:
    """Splits the last dimension in blocks, (..., n) -> (..., n / k, k); size 0 is one block.

    Example:
        >>> block_view(torch.zeros(3, 6), 2).shape
        torch.Size([3, 3, 2])
    """
    width = size or z.shape[-1]
    if z.shape[-1] % width:
        raise InputError(f"a map on blocks of {width} got {z.shape[-1]} entries; pad to a multiple of {width}")
    return z.reshape(*z.shape[:-1], -1, width)


def leaky_relu(slope: float = 0.01) -> Activation:
    """Builds z -> max(z, 0) + slope min(z, 0), the PReLU of a fixed slope.

    Example:
        >>> leaky_relu(0.5)(torch.tensor([-1.0, 2.0]))
        tensor([-0.5000,  2.0000])
    """
    bounds = (min(slope, 1.0), max(slope, 1.0))
    function, derivative = partial(F.leaky_relu, negative_slope=slope), partial(_step, left=slope, right=1.0)
    return Activation(f"leaky_relu({slope:g})", function, bounds, derivative, homogeneous=True, rounding=2.0)


def max_pool(size: int) -> Activation:
    """Builds the pooling map: the first entry of each block carries its maximum, the rest is zero.

    1-Lipschitz and not componentwise; the padded zeros of 003 (section 2.5) are dead states.

    Example:
        >>> max_pool(2)(torch.tensor([1.0, 3.0, -2.0, -5.0]))
        tensor([ 3.,  0., -2.,  0.])
    """
    return _selection(f"max_pool({size})", partial(_pool, size=size), size)


def group_sort(size: int) -> Activation:
    """Builds the map that sorts every block in ascending order, non-expansive in every l_p norm.

    Example:
        >>> group_sort(2)(torch.tensor([3.0, 1.0, -5.0, -2.0]))
        tensor([ 1.,  3., -5., -2.])
    """
    return _selection(f"group_sort({size})", partial(_sort, size=size), size)


def _selection(name: str, function: Map, size: int) -> Activation:
    if size < 1:
        raise InputError(f"{name} needs blocks of at least one entry; pass size >= 1")
    ones = dict.fromkeys(NORMS, 1.0)
    return Activation(name, function, homogeneous=True, block=size, constants=ones, rounding=0.0)


def _pool(z: Tensor, size: int) -> Tensor:
    return F.pad(block_view(z, size).amax(-1, keepdim=True), (0, size - 1)).flatten(-2)


def _sort(z: Tensor, size: int) -> Tensor:
    return block_view(z, size).sort(-1).values.flatten(-2)


def _identity(z: Tensor) -> Tensor:
    return z


def _step(z: Tensor, left: float, right: float) -> Tensor:
    return torch.full_like(z, left).masked_fill(z > 0, right)


def _window(z: Tensor, low: float, high: float, height: float = 1.0) -> Tensor:
    return torch.zeros_like(z).masked_fill((z > low) & (z < high), height)


def _elu_slope(z: Tensor, scale: float = 1.0, alpha: float = 1.0) -> Tensor:
    return torch.where(z > 0, scale, scale * alpha * torch.exp(z.clamp(max=0)))


def _gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _silu_slope(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 + z * (1 - gate))


def _softplus(z: Tensor) -> Tensor:
    # F.softplus jumps by 2e-9 at its threshold of 20, which float64 sees.
    return torch.logaddexp(z, torch.zeros_like(z))


def _softsign_slope(z: Tensor) -> Tensor:
    return (1 + z.abs()).reciprocal().square()


def _tanh_slope(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z).square()


def _sigmoid_slope(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 - gate)


def _hardsigmoid(z: Tensor) -> Tensor:
    # F.hardsigmoid differentiates with a float32 sixth, also in float64.
    return (z / 6 + 0.5).clamp(0, 1)


def _tanhshrink_slope(z: Tensor) -> Tensor:
    return torch.tanh(z).square()


def _softshrink_slope(z: Tensor) -> Tensor:
    return 1 - _window(z, -0.5, 0.5)


_SELU = (1.0507009873554805, 1.6732632423543772)
_GELU, _SILU = 1.1289041452, 1.0998393202
_REFUSED = {
    "hardshrink": "it jumps at +-0.5, so no Lipschitz constant exists; use 'softshrink'",
    "threshold": "it jumps, so no Lipschitz constant exists; use 'relu'",
    "sign": "it jumps at 0, so no Lipschitz constant exists; use 'hardtanh' or 'tanh'",
    "rrelu": "its slope is random, so f is not a function; use leaky_relu(slope)",
}


def _catalogue() -> list[Activation]:
    cone = {"homogeneous": True, "projection": True, "rounding": 0.0}
    box = {"projection": True, "rounding": 0.0}
    unit, sixth = (0.0, 1.0), math.nextafter(1 / 6, 1.0)
    rows: list[tuple[str, Map, tuple[float, float], Map, dict[str, Any]]] = [
        ("identity", _identity, (1.0, 1.0), torch.ones_like, cone),
        ("relu", torch.relu, unit, partial(_step, left=0.0, right=1.0), cone),
        ("hardtanh", F.hardtanh, unit, partial(_window, low=-1.0, high=1.0), box),
        ("relu6", F.relu6, unit, partial(_window, low=0.0, high=6.0), box),
        ("elu", F.elu, unit, _elu_slope, {}),
        ("selu", F.selu, (0.0, 1.7580993408473773), partial(_elu_slope, scale=_SELU[0], alpha=_SELU[1]), {}),
        ("gelu", F.gelu, (1.0 - _GELU, _GELU), _gelu_slope, {}),
        ("silu", F.silu, (1.0 - _SILU, _SILU), _silu_slope, {}),
        ("softplus", _softplus, unit, torch.sigmoid, {}),
        ("softsign", F.softsign, unit, _softsign_slope, {}),
        ("tanh", torch.tanh, unit, _tanh_slope, {}),
        ("sigmoid", torch.sigmoid, (0.0, 0.25), _sigmoid_slope, {}),
        ("hardsigmoid", _hardsigmoid, (0.0, sixth), partial(_window, low=-3.0, high=3.0, height=1 / 6), {}),
        ("tanhshrink", F.tanhshrink, unit, _tanhshrink_slope, {}),
        ("softshrink", F.softshrink, unit, _softshrink_slope, {"rounding": 2.0}),
        ("sin", torch.sin, (-1.0, 1.0), torch.cos, {}),
    ]
    halves = dict.fromkeys(NORMS, 0.5)
    softmax = Activation("softmax", partial(torch.softmax, dim=-1), block=0, constants=halves)
    return [softmax] + [Activation(*row[:4], **row[4]) for row in rows]


_REGISTRY = {activation.name: activation for activation in _catalogue()} | {"leaky_relu": leaky_relu()}


def activation_names() -> tuple[str, ...]:
    """Lists the registered names.

    Example:
        >>> "relu" in activation_names()
        True
    """
    return tuple(sorted(_REGISTRY))


def get_activation(activation: str | Activation) -> Activation:
    """Returns the registered activation of that name; an `Activation` passes through.

    Example:
        >>> get_activation("selu").slope
        (0.0, 1.7580993408473773)
    """
    if isinstance(activation, Activation):
        return activation
    if activation in _REFUSED:
        raise InputError(f"activation {activation!r} is refused: {_REFUSED[activation]}")
    if activation not in _REGISTRY:
        raise unknown_name("activation", activation, _REGISTRY)
    return _REGISTRY[activation]


def register_activation(activation: Activation, *, check: bool = True) -> Activation:
    """Makes an activation available by name, after a sampled check of its constants.

    Example:
        >>> register_activation(leaky_relu(0.2)).name
        'leaky_relu(0.2)'
    """
    if activation.name in _REFUSED:
        raise InputError(f"the name {activation.name!r} is refused: {_REFUSED[activation.name]}")
    if check:
        check_constants(activation)
    _REGISTRY[activation.name] = activation
    return activation


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
            for other in _partners(z, scale, generator):
                _check_pairs(activation, z, other)
            _check_flags(activation, z)
    if activation.componentwise:
        grid = 10 * torch.linspace(-1, 1, 20001, dtype=torch.float64).unsqueeze(-1)
        _check_pairs(activation, grid[:-1], grid[1:])


def _partners(z: Tensor, scale: float, generator: torch.Generator) -> list[Tensor]:
    step = torch.randn(z.shape, generator=generator, dtype=z.dtype)
    axis = torch.eye(z.shape[1], dtype=z.dtype)[torch.randint(z.shape[1], (len(z),), generator=generator)]
    return [z + scale * axis, z + 1e-4 * scale * axis, z + 1e-4 * scale * step.sign(), z + scale * step]


def _check_pairs(activation: Activation, a: Tensor, b: Tensor) -> None:
    width = 1 if activation.block is None else activation.block
    inputs = block_view(a, width), block_view(b, width)
    values = block_view(activation(a), width), block_view(activation(b), width)
    same, kept = (inputs[0] == inputs[1]).all(-1), torch.isclose(*values, rtol=1e-12).all(-1)
    _blame(activation, f"block={activation.block}", (same & ~kept).double(), same, a, b)
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


def _blame(activation: Activation, claim: str, excess: Tensor, quotient: Tensor, a: Tensor, b: Tensor) -> None:
    excess = torch.nan_to_num(excess, nan=-1.0)
    if excess.max() > 0:
        worst = int(excess.argmax())
        row, found = worst // (excess.numel() // len(excess)), float(quotient.flatten()[worst])
        raise InputError(
            f"activation {activation.name!r} violates {claim}: {found:.6g} between "
            f"{a[row].tolist()} and {b[row].tolist()}; declare what is true (a map that jumps cannot be used)"
        )
