"""Does the equilibrium that a model finds depend on where the solve started?"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wellposed.equilibrium.maps import Packing, State, max_norm
from wellposed.equilibrium.solution import Solution, Status
from wellposed.errors import ConvergenceWarning, InputError

ROOM = 200.0  # two points with the residual r are at most 2 r / (1 - c) apart; this is for c = 0.99
_EVAL = {"training": False, "on_failure": "ignore"}


class EquilibriumModel(Protocol):
    """Anything that finds equilibria from a given start."""

    def equilibrium(self, u: Any, x0: Any = None) -> Solution: ...


@dataclass(frozen=True)
class PathIndependence:
    """Compares the equilibria reached from several starts, per sample.

    Attributes:
        distance: the largest distance between two of the points reached, ``|x - y|_inf`` relative to the
            largest of them (and to a thousandth of the starts, which decides where the equilibrium is zero).
        alignment: the smallest cosine between the point reached from zero and another one (Anil et al. 2022);
            it means nothing where the equilibrium is zero.
        converged: whether all solves reached an equilibrium.
        independent: whether all did, and within the tolerance the same one.
        starts: solves per sample.
    """

    distance: Tensor  # (B,)
    alignment: Tensor  # (B,)
    converged: Tensor  # (B,) bool
    independent: Tensor  # (B,) bool
    starts: int

    def __str__(self) -> str:
        if self.independent.numel() == 0:
            return "empty batch"
        counts = f"{int(self.independent.sum())} of {self.independent.numel()} samples are path independent"
        failures = int((~self.converged).sum())
        reason = f" ({failures} without an equilibrium from some start)" if failures else ""
        return (
            f"{counts}{reason}: over {self.starts} starts, relative distance {float(self.distance.max()):.1e} and "
            f"alignment {float(self.alignment.min()):.4f} at worst"
        )


@torch.no_grad()
def path_independence(
    model: EquilibriumModel,
    u: State,
    *,
    starts: int = 4,
    scale: float = 1.0,
    tolerance: float | None = None,
    generator: torch.Generator | None = None,
) -> PathIndependence:
    """Solves from several starts and compares the equilibria (Anil et al. 2022).

    The starts are zero, random normal states of the size of the equilibrium reached from zero, and the
    equilibrium of another sample of the batch. A contraction is path independent; that no dependence was seen
    from a few starts proves nothing about the others. The model is in evaluation mode meanwhile.

    Args:
        model: anything with ``equilibrium(u, x0)``: `ImplicitModel`, `DEQ`, `MultiscaleDEQ`.
        u: inputs, batch-first.
        starts: how many random ones.
        scale: their size relative to the equilibrium (to one, where that is zero).
        tolerance: the largest relative distance between two points that count as the same. None means 200
            times the relative residuals at which the solves ended, and between 1e-3 and 1e-1.
        generator: of the random starts.

    Example:
        >>> from wellposed.models.implicit import ImplicitModel
        >>> print(path_independence(ImplicitModel(3, 2, 8), torch.randn(5, 3)))
        5 of 5 samples are path independent: over 6 starts, relative distance ... and alignment 1.0000 at worst
    """
    if starts < 1 or not scale > 0:
        raise InputError(f"at least one start and a positive scale are needed; received {starts} and {scale}")
    with _evaluating(model):
        reference = model.equilibrium(u)
        packing = Packing.of(reference.value)
        others = [_random(reference.value, scale, generator) for _ in range(starts)]
        if packing.batch > 1:
            others.append(_map(reference.value, lambda tensor: tensor.roll(1, 0)))
        solutions = [reference, *(model.equilibrium(u, x0) for x0 in others)]
    points = torch.stack([packing.pack(solution.value) for solution in solutions])  # (K, B, n)
    floor = torch.stack([max_norm(packing.pack(x0)) for x0 in others[:starts]]).amax(0) / scale
    size = torch.maximum(max_norm(points).amax(0), 1e-3 * floor)
    distance = max_norm(points.amax(0) - points.amin(0)) / size
    reached = [solution.converged | (solution.status == Status.STAGNATED) for solution in solutions]
    converged = torch.stack(reached).all(0)
    if tolerance is None:
        residual = torch.stack([solution.residual for solution in solutions]).amax(0)
        limit = (ROOM * residual / size).clamp(1e-3, 1e-1)
    else:
        limit = torch.full_like(distance, tolerance)
    independent = converged & (distance <= limit)
    return PathIndependence(distance, _alignment(points), converged, independent, len(solutions))


@contextlib.contextmanager
def _evaluating(model: object) -> Iterator[None]:
    """Puts a module in evaluation mode and leaves failures to the statuses."""
    layers = list(model.modules()) if isinstance(model, nn.Module) else []
    saved = [(layer, name, layer.__dict__[name]) for layer in layers for name in _EVAL if name in layer.__dict__]
    for layer, name, _ in saved:
        setattr(layer, name, _EVAL[name])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            yield
    finally:
        for layer, name, value in saved:
            setattr(layer, name, value)


def _map(state: State, function: Any) -> State:
    return function(state) if isinstance(state, Tensor) else tuple(function(tensor) for tensor in state)


def _random(state: State, scale: float, generator: torch.Generator | None) -> State:
    """Draws normal states with the root mean square of every sample, tensor by tensor."""

    def draw(like: Tensor) -> Tensor:
        size = like.flatten(1).square().mean(1).sqrt()
        size = torch.where(size > 0, size, 1).reshape(-1, *[1] * (like.dim() - 1))
        device = like.device if generator is None else generator.device
        noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)
        return scale * size * noise.to(like.device)

    return _map(state, draw)


def _alignment(points: Tensor) -> Tensor:  # (B,), from (K, B, n)
    """Returns the smallest cosine between the first point and the others; that of two zeros is one."""
    lengths = torch.linalg.vector_norm(points, dim=2)
    products = (points[1:] * points[0]).sum(2)
    zero = (lengths[1:] == 0) | (lengths[0] == 0)
    both = (lengths[1:] == 0) & (lengths[0] == 0)
    cosines = torch.where(zero, both.to(products.dtype), products / (lengths[1:] * lengths[0]))
    return cosines.clamp(-1, 1).amin(0)
