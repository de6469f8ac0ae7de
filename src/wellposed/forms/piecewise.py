"""Activation maps that differ from block to block of the state."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from wellposed.activations import NORMS, Activation


def piecewise(activations: Sequence[Activation], sizes: Sequence[int]) -> Activation:
    """Joins the maps of consecutive blocks, phi(z) = (phi_1(z_1), ..., phi_L(z_L)) (003, section 2.4).

    Blocks of one and the same map that acts in blocks of its own size are that map; a mixture with a map on
    blocks is one map on the whole vector, with the largest constant of its parts in every norm.

    Example:
        >>> from wellposed.activations import get_activation
        >>> phi = piecewise([get_activation("relu"), get_activation("tanh")], [1, 2])
        >>> phi.name, phi(torch.tensor([[-1.0, 0.0, 1.0]]))
        ('relu[1] tanh[2]', tensor([[0.0000, 0.0000, 0.7616]]))
    """
    first = activations[0]
    if len(activations) == 1 or (first.block != 0 and all(part.name == first.name for part in activations)):
        return first
    whole = all(part.componentwise for part in activations)
    shared = [norm for norm in NORMS if all(norm in part.constants for part in activations)]
    constants = {norm: max(part.constants[norm] for part in activations) for norm in shared}
    functions = tuple(part.function for part in activations)
    derivative = partial(_slopes, parts=tuple(activations), sizes=tuple(sizes)) if whole else None
    return Activation(
        _name(activations, sizes),
        partial(_apply, functions=functions, sizes=tuple(sizes)),
        (min(part.slope[0] for part in activations), max(part.slope[1] for part in activations)),
        derivative,
        homogeneous=all(part.homogeneous for part in activations),
        projection=all(part.projection for part in activations),
        block=None if whole else 0,
        constants=constants or dict.fromkeys(NORMS, math.inf),
        rounding=max(part.rounding for part in activations),
        image=(min(part.image[0] for part in activations), max(part.image[1] for part in activations)),
    )


def _name(activations: Sequence[Activation], sizes: Sequence[int]) -> str:
    """Names the parts with their sizes, neighbours of one name together."""
    runs: list[tuple[str, int]] = []
    for part, size in zip(activations, sizes, strict=True):
        if runs and runs[-1][0] == part.name:
            runs[-1] = (part.name, runs[-1][1] + size)
        else:
            runs.append((part.name, size))
    shown = [f"{name}[{size}]" for name, size in runs]
    return " ".join(shown if len(shown) <= 4 else [*shown[:3], f"... {len(shown) - 3} more"])


def _apply(z: Tensor, functions: tuple, sizes: tuple[int, ...]) -> Tensor:
    pieces = z.split(sizes, dim=-1)
    return torch.cat([phi(piece) for phi, piece in zip(functions, pieces, strict=True)], dim=-1)


def _slopes(z: Tensor, parts: tuple[Activation, ...], sizes: tuple[int, ...]) -> Tensor:
    pieces = z.split(sizes, dim=-1)
    return torch.cat([part.slope_at(piece) for part, piece in zip(parts, pieces, strict=True)], dim=-1)
