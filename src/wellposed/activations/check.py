"""A sampled check of the constants that an activation declares."""

import torch
from torch import Tensor

from wellposed.activations.activation import Activation, block_view
from wellposed.errors import InputError


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
