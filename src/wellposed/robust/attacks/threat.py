"""What an attacker may do to an input: how far to go, in which norm, within which range."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.robust.convex_set import Ball, SparseBox
from wellposed.robust.uncertainty import Box, Uncertainty, finite_batch


@dataclass(frozen=True)
class Threat:
    """All inputs near clean ones that are valid.

    Args:
        u: clean inputs, in the valid range.
        epsilon: the largest change, of every entry or of the Euclidean length; for entries also one a feature.
        norm: ``"inf"`` or ``"2"``.
        lower, upper: the valid range, [0, 1] by default.
        count: how many entries may change, all if None.

    Example:
        >>> threat = Threat(torch.tensor([[0.5, 0.95]]), 0.1)
        >>> threat.project(torch.tensor([[0.0, 2.0]]))
        tensor([[0.4000, 1.0000]])
    """

    u: Tensor
    epsilon: float | Tensor
    norm: str = "inf"
    lower: float = 0.0
    upper: float = 1.0
    count: int | None = None

    def __post_init__(self) -> None:
        finite_batch("u", self.u)
        if self.norm not in ("inf", "2"):
            raise InputError(f"the norm is 'inf' or '2'; received {self.norm!r}")
        if not self.lower < self.upper or bool(((self.u < self.lower) | (self.u > self.upper)).any()):
            raise InputError(
                f"clean inputs lie in the valid range [{self.lower}, {self.upper}]; received entries from "
                f"{float(self.u.min()):.4g} to {float(self.u.max()):.4g}: scale them, or give lower and upper"
            )
        if self.norm == "2" and (isinstance(self.epsilon, Tensor) or self.count is not None):
            raise InputError(
                "in the 2-norm epsilon is one number, and the count of changed entries is not limited"
            )
        size = self.u[0].numel() if len(self.u) else 0
        if self.count is not None and (isinstance(self.count, bool) or not 0 <= self.count <= size):
            raise InputError(f"count is how many of {size} entries may change; received {self.count!r}")
        self.set()  # raises for a radius that is negative or not finite

    def set(self) -> Uncertainty:
        """The set to give to bounds; a ball is not cut to the valid range, which makes it larger."""
        if self.norm == "2":
            assert not isinstance(self.epsilon, Tensor)
            return Ball(self.u, float(self.epsilon))
        if self.count is None:
            return self._box
        return SparseBox(self.u, self.epsilon, self.count, self.lower, self.upper)

    @property
    def _box(self) -> Box:
        return Box.around(self.u, self.epsilon, self.lower, self.upper)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The least and the largest valid value of every entry."""
        if self.norm == "2":
            return torch.full_like(self.u, self.lower), torch.full_like(self.u, self.upper)
        box = self._box
        return box.lower.view_as(self.u), box.upper.view_as(self.u)

    def of(self, rows: Tensor) -> "Threat":
        """The threat to some samples."""
        epsilon = self.epsilon
        if isinstance(epsilon, Tensor) and epsilon.shape == self.u.shape:
            epsilon = epsilon[rows]
        return Threat(self.u[rows], epsilon, self.norm, self.lower, self.upper, self.count)

    def project(self, points: Tensor) -> Tensor:
        """Takes points to the nearest ones in the set, in the 2-norm to near ones: shortened, then cut."""
        if self.norm == "2":
            change = (points - self.u).flatten(1)
            length = torch.linalg.vector_norm(change, dim=1)
            most = float(self.epsilon) * (1 - 8 * torch.finfo(points.dtype).eps)
            factor = torch.where(length > most, most / length.clamp(min=torch.finfo(length.dtype).tiny), 1.0)
            points = self.u + (change * factor[:, None]).view_as(self.u)
        lower, upper = self.ends
        points = torch.minimum(torch.maximum(points, lower), upper)
        return points if self.count is None else self._fewest(points)

    def _fewest(self, points: Tensor) -> Tensor:
        """Keeps the largest changes."""
        change = (points - self.u).abs().flatten(1)
        kept = torch.zeros_like(change, dtype=torch.bool)
        kept.scatter_(1, change.topk(self.count or 0, dim=1).indices, True)
        return torch.where(kept.view_as(self.u), points, self.u)

    def steepest(self, gradient: Tensor) -> Tensor:
        """Returns the direction of length one in which a linear function rises fastest."""
        if self.norm == "inf":
            return gradient.sign()
        flat = gradient.flatten(1)
        length = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=torch.finfo(flat.dtype).tiny)
        return (flat / length).view_as(gradient)

    def extreme(self, gradient: Tensor) -> Tensor:
        """Returns where a linear function is largest; exact for boxes, also with few changed entries."""
        if self.norm == "2":
            return self.project(self.u + float(self.epsilon) * self.steepest(gradient))
        lower, upper = self.ends
        points = torch.where(gradient > 0, upper, torch.where(gradient < 0, lower, self.u))
        if self.count is None:
            return points
        gain = (gradient * (points - self.u)).flatten(1)
        kept = torch.zeros_like(gain, dtype=torch.bool).scatter_(1, gain.topk(self.count, dim=1).indices, True)
        return torch.where(kept.view_as(points), points, self.u)

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Draws a point of the set for every sample."""
        noise = torch.rand(self.u.shape, generator=generator, dtype=self.u.dtype, device=self.u.device)
        if self.norm == "2":
            direction = self.steepest(
                torch.randn(self.u.shape, generator=generator, dtype=self.u.dtype, device=self.u.device)
            )
            share = noise.flatten(1)[:, 0].view(-1, *[1] * (self.u.dim() - 1))
            return self.project(self.u + share * float(self.epsilon) * direction)
        lower, upper = self.ends
        return self.project(torch.lerp(lower, upper, noise))
