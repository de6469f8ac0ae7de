"""Activation maps that act on blocks of states: pooling, sorting, softmax, normalisation and products.

A map whose result is shorter than its argument is filled up with zeros, so that it takes R^n to R^n (003, section
2.5). `max_pool`, `group_sort`, `softmax`, `normalise`, `multiply` and `matrix_product` act alike on all blocks;
`piecewise` joins maps that differ from block to block.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.activations.activation import (
    NORMS,
    Activation,
    Map,
    Traits,
    block_view,
    product_ends,
    real,
    same_map,
    used,
    whole,
)
from wellposed.errors import InputError


def max_pool(size: int) -> Activation:
    """Builds the pooling map: the first entry of each block carries its maximum, the rest is zero.

    1-Lipschitz and not componentwise; the padded zeros of 003 (section 2.5) are dead states.

    Example:
        >>> max_pool(2)(torch.tensor([1.0, 3.0, -2.0, -5.0]))
        tensor([ 3.,  0., -2.,  0.])
    """
    size = whole("size of max_pool", size)
    return _selection(f"max_pool({size})", partial(_pool, size=size), size)


def group_sort(size: int) -> Activation:
    """Builds the map that sorts every block in ascending order, non-expansive in every l_p norm.

    Example:
        >>> group_sort(2)(torch.tensor([3.0, 1.0, -5.0, -2.0]))
        tensor([ 1.,  3., -5., -2.])
    """
    size = whole("size of group_sort", size)
    return _selection(f"group_sort({size})", partial(_sort, size=size), size)


def _selection(name: str, function: Map, size: int) -> Activation:
    ones = dict.fromkeys(NORMS, 1.0)
    ordered = Traits(increasing=True)
    return Activation(name, function, homogeneous=True, block=size, constants=ones, rounding=0.0, traits=ordered)


def _pool(z: Tensor, size: int) -> Tensor:
    """Puts the maximum of every block first, and zeros after it."""
    return F.pad(block_view(z, size).amax(-1, keepdim=True), (0, size - 1)).flatten(-2)


def _sort(z: Tensor, size: int) -> Tensor:
    """Sorts every block."""
    return block_view(z, size).sort(-1).values.flatten(-2)


def softmax(size: int) -> Activation:
    """Builds the softmax of every block, 1/2-Lipschitz in the l1, l2 and inf norms.

    Example:
        >>> softmax(2)(torch.zeros(4))
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    size = whole("size of softmax", size)
    constants = dict.fromkeys(NORMS, 0.5)
    function = partial(_softmax, size=size)
    return Activation(f"softmax({size})", function, block=size, constants=constants, image=(0.0, 1.0))


def normalise(size: int, eps: float = 1e-5) -> Activation:
    """Builds z -> (z - mean) / sqrt(variance + eps) on every block, the core of layer normalisation.

    Its Lipschitz constant 1 / sqrt(eps) in the l2 norm (sqrt(k) times that in the others) bounds next to nothing:
    fine in a network without loops, and no basis for a certificate in one with loops.

    Example:
        >>> normalise(2, 0.0)(torch.tensor([1.0, 3.0, 5.0, 5.5]))
        tensor([-1.,  1., -1.,  1.])
    """
    size, eps = whole("size of normalise", size), real("eps of normalise", eps, 0.0)
    steepest = _up(1 / math.sqrt(used(eps)[0])) if used(eps)[0] else math.inf
    limit = _up(math.sqrt(size))
    constants = {"1": _up(steepest * limit), "2": steepest, "inf": _up(steepest * limit)}
    function = partial(_normalise, size=size, eps=eps)
    return Activation(
        f"normalise({size}, {eps!r})", function, block=size, constants=constants, image=(-limit, limit)
    )


def multiply(first: float | None = None, second: float | None = None) -> Activation:
    """Builds the product of pairs, (a, b) -> (ab, 0).

    With bounds |a| <= c1 and |b| <= c2 (each factor is clipped to its own) the map is Lipschitz with
    max(c1, c2) in the l1 norm, sqrt(c1^2 + c2^2) in l2 and c1 + c2 in the inf norm (003, section 2.4, where
    the factors are phi_i with constants gamma_i); without them it has no Lipschitz constant.

    Example:
        >>> multiply()(torch.tensor([2.0, 3.0, 4.0, -1.0]))
        tensor([ 6.,  0., -4.,  0.])
        >>> multiply(1.0, 2.0).lipschitz("1")
        2.0
    """
    bounds = _bounds("multiply", first, second)
    if bounds is None:
        return _product("multiply()", partial(_multiply, bounds=None), 2, dict.fromkeys(NORMS, math.inf))
    name, function = f"multiply({bounds[0]!r}, {bounds[1]!r})", partial(_multiply, bounds=bounds)
    c1, c2 = used(bounds[0])[1], used(bounds[1])[1]
    constants = {"1": max(c1, c2), "2": _up(math.hypot(c1, c2)), "inf": _least_above(Fraction(c1) + Fraction(c2))}
    return _product(name, function, 2, constants, product_ends(-c1, c1, c2))


def matrix_product(
    rows: int, inner: int, columns: int, first: float | None = None, second: float | None = None
) -> Activation:
    """Builds the product of two matrices a block, (P, Q) -> (PQ, 0), row by row, as attention needs it.

    With bounds |P_ij| <= c1 and |Q_jk| <= c2 (each entry is clipped to its own) the map is Lipschitz, since
    PQ - P'Q' = (P - P') Q + P' (Q - Q'): with max(columns c2, rows c1) in the l1 norm of all entries,
    sqrt(inner (columns c2^2 + rows c1^2)) in l2 and inner (c1 + c2) in the inf norm; without them it has no
    Lipschitz constant.

    Example:
        >>> matrix_product(1, 2, 1)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([11.,  0.,  0.,  0.])
        >>> matrix_product(3, 2, 5, 1.0, 1.0).lipschitz("1")
        5.0
    """
    sizes = {"rows": rows, "inner": inner, "columns": columns}
    rows, inner, columns = (whole(f"{name} of matrix_product", value) for name, value in sizes.items())
    size, given = max(rows * inner + inner * columns, rows * columns), f"{rows}, {inner}, {columns}"
    function = partial(_matrix_product, rows=rows, inner=inner, columns=columns, size=size)
    bounds = _bounds("matrix_product", first, second)
    if bounds is None:
        return _product(f"matrix_product({given})", function, size, dict.fromkeys(NORMS, math.inf))
    name, clipped = f"matrix_product({given}, {bounds[0]!r}, {bounds[1]!r})", partial(function, bounds=bounds)
    c1, c2 = used(bounds[0])[1], used(bounds[1])[1]
    constants = {
        "1": _least_above(max(columns * Fraction(c2), rows * Fraction(c1))),
        "2": _up(math.sqrt(inner) * math.hypot(math.sqrt(columns) * c2, math.sqrt(rows) * c1)),
        "inf": _least_above(inner * (Fraction(c1) + Fraction(c2))),
    }
    largest = _least_above(inner * Fraction(c1) * Fraction(c2))
    return _product(name, clipped, size, constants, (-largest, largest))


def _least_above(value: Fraction) -> float:
    """Returns the least number of float64 that is not below an exact one."""
    try:
        nearest = float(value)
    except OverflowError:
        return math.inf
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def _up(value: float) -> float:
    """Raises a constant by more than the few operations behind it can have lost; small integers are exact."""
    return value if value.is_integer() and value < 2**20 else value * (1 + 2.0**-49)


def _bounds(name: str, first: float | None, second: float | None) -> tuple[float, float] | None:
    if first is None and second is None:
        return None
    if first is None or second is None:
        raise InputError(f"{name} takes bounds of both factors or of none; received {first} and {second}")
    return real(f"first bound of {name}", first, 0.0), real(f"second bound of {name}", second, 0.0)


def _product(
    name: str,
    function: Map,
    size: int,
    constants: dict[str, float],
    image: tuple[float, float] = (-math.inf, math.inf),
) -> Activation:
    return Activation(name, function, block=size, constants=constants, image=image)


def _softmax(z: Tensor, size: int) -> Tensor:
    return block_view(z, size).softmax(-1).flatten(-2)


def _normalise(z: Tensor, size: int, eps: float) -> Tensor:
    return F.layer_norm(block_view(z, size), (size,), eps=eps).flatten(-2)


def _multiply(z: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    a, b = block_view(z, 2).unbind(-1)
    if bounds is not None:
        a, b = a.clamp(-bounds[0], bounds[0]), b.clamp(-bounds[1], bounds[1])
    return torch.stack([a * b, torch.zeros_like(a)], dim=-1).flatten(-2)


def _matrix_product(
    z: Tensor, rows: int, inner: int, columns: int, size: int, bounds: tuple[float, float] | None = None
) -> Tensor:
    blocks, first, second = block_view(z, size), rows * inner, inner * columns
    left = blocks[..., :first].unflatten(-1, (rows, inner))
    right = blocks[..., first : first + second].unflatten(-1, (inner, columns))
    if bounds is not None:
        left, right = left.clamp(-bounds[0], bounds[0]), right.clamp(-bounds[1], bounds[1])
    return F.pad((left @ right).flatten(-2), (0, size - rows * columns)).flatten(-2)


def piecewise(activations: Sequence[Activation], sizes: Sequence[int]) -> Activation:
    """Joins the maps of consecutive blocks, phi(z) = (phi_1(z_1), ..., phi_L(z_L)) (003, section 2.4).

    Blocks of one and the same map that acts in blocks of its own size are that map; a mixture with a map on
    blocks is one map on the whole vector, with the largest constant of them all in every norm.

    Example:
        >>> from wellposed.activations import get_activation
        >>> phi = piecewise([get_activation("relu"), get_activation("tanh")], [1, 2])
        >>> phi.name, phi(torch.tensor([[-1.0, 0.0, 1.0]]))
        ('relu[1] tanh[2]', tensor([[0.0000, 0.0000, 0.7616]]))
    """
    first = activations[0]
    if len(activations) == 1 or (first.block != 0 and all(same_map(part, first) for part in activations)):
        return first
    whole = all(part.componentwise for part in activations)
    shared = [norm for norm in NORMS if all(norm in part.constants for part in activations)]
    constants = {norm: max(part.constants[norm] for part in activations) for norm in shared}
    blocks: dict[str, Any] = {"activations": tuple(activations), "sizes": tuple(sizes)}
    return Activation(
        _name(activations, sizes),
        partial(_apply, **blocks),
        (min(part.slope[0] for part in activations), max(part.slope[1] for part in activations)),
        partial(_slopes, **blocks) if whole else None,
        homogeneous=all(part.homogeneous for part in activations),
        projection=all(part.projection for part in activations),
        block=None if whole else 0,
        constants=constants or dict.fromkeys(NORMS, math.inf),
        rounding=max(part.rounding for part in activations),
        image=(min(part.image[0] for part in activations), max(part.image[1] for part in activations)),
    )


def _name(activations: Sequence[Activation], sizes: Sequence[int]) -> str:
    """Names the maps with their sizes, neighbours of one name together."""
    runs: list[tuple[str, int]] = []
    for part, size in zip(activations, sizes, strict=True):
        if runs and runs[-1][0] == part.name:
            runs[-1] = (part.name, runs[-1][1] + size)
        else:
            runs.append((part.name, size))
    shown = [f"{name}[{size}]" for name, size in runs]
    return " ".join(shown if len(shown) <= 4 else [*shown[:3], f"... {len(shown) - 3} more"])


def parts_of(activation: Activation) -> tuple[tuple[Activation, int], ...] | None:
    """Returns the maps that `piecewise` joined, with their sizes; None for any other activation.

    Example:
        >>> [(part.name, size) for part, size in parts_of(piecewise([max_pool(2), softmax(3)], [4, 3]))]
        [('max_pool(2)', 4), ('softmax(3)', 3)]
    """
    bound = getattr(activation.function, "keywords", {})
    if bound.keys() != {"activations", "sizes"} or not same_map(piecewise(**bound), activation):
        return None
    return tuple(zip(bound["activations"], bound["sizes"], strict=True))


def _apply(z: Tensor, activations: tuple[Activation, ...], sizes: tuple[int, ...]) -> Tensor:
    pieces = zip(activations, z.split(sizes, dim=-1), strict=True)
    return torch.cat([phi.function(piece) for phi, piece in pieces], dim=-1)


def _slopes(z: Tensor, activations: tuple[Activation, ...], sizes: tuple[int, ...]) -> Tensor:
    pieces = zip(activations, z.split(sizes, dim=-1), strict=True)
    return torch.cat([phi.slope_at(piece) for phi, piece in pieces], dim=-1)
