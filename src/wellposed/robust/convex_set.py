"""Further sets of inputs: few changed entries, a Euclidean ball, and whatever has a support function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.robust.uncertainty import Box, Uncertainty, finite_batch, radii


class SparseBox(Uncertainty):
    """All inputs that differ from the center in at most k entries, by at most a radius (003 eq. 4.2).

    Clipped to a range the set is not symmetric; its support function is the center's value and the k largest of
    ``max(lam_j up_j, -lam_j down_j)``, which is tight.

    Args:
        center: ``(B, *sample_shape)``.
        radius: one number, one a feature or one an entry.
        k: how many entries may change.
        lower, upper: the valid range; None does not clip.

    Example:
        >>> few = SparseBox(torch.tensor([[0.5, 0.9, 0.1]]), 0.2, k=1, lower=0.0, upper=1.0)
        >>> few.support(torch.tensor([[1.0, 3.0, 0.0]])).round(decimals=4)  # 3.2 + 3 * 0.1, and not 3 * 0.2
        tensor([[3.5000]])
    """

    def __init__(
        self,
        center: Tensor,
        radius: float | Tensor,
        k: int,
        lower: float | Tensor | None = None,
        upper: float | Tensor | None = None,
    ) -> None:
        around = Box.around(center, radius, lower, upper)
        self._center, self._box = center.flatten(1), around
        if not bool(((self._center >= around.lower) & (self._center <= around.upper)).all()):
            raise InputError("the center of a SparseBox must lie in the range it is clipped to; clip it first")
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= self._center.shape[1]:
            raise InputError(f"k counts entries, 0 to {self._center.shape[1]}; received {k!r}")
        self.k, self.sample_shape = k, around.sample_shape

    @property
    def center(self) -> Tensor:
        return self._center

    def box(self) -> Box:
        return self._box if self.k else Box(self._center, self._center)

    def support_rows(self, functionals: Tensor, sample: Tensor) -> Tensor:
        center = self._center[sample]
        up, down = self._box.upper[sample] - center, center - self._box.lower[sample]
        gains = functionals.clamp(min=0) * up - functionals.clamp(max=0) * down
        return (functionals * center).sum(1) + gains.topk(self.k, dim=1).values.sum(1)

    def deviation_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.deviation().topk(self.k, dim=1).values, dim=1)

    def weighted_rows(self, weights: Tensor, sample: Tensor) -> Tensor:
        return (weights * self.deviation()[sample]).topk(self.k, dim=1).values.sum(1)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        points = self._box.sample(count, generator)
        noise = torch.rand(points.shape, generator=generator, dtype=self.dtype, device=self.device)
        chosen = noise.argsort(dim=-1).argsort(dim=-1) < self.k
        return torch.where(chosen, points, self._center)

    def to(self, *args: Any, **kwargs: Any) -> "SparseBox":
        box = self._box.to(*args, **kwargs)
        center = self._center.to(*args, **kwargs)
        shape = (len(center), *self.sample_shape)
        spread = box.deviation_from(center).view(shape)
        return SparseBox(center.view(shape), spread, self.k, box.lower.view(shape), box.upper.view(shape))


class Ball(Uncertainty):
    """All inputs within a Euclidean distance of the center.

    Args:
        center: ``(B, *sample_shape)``.
        radius: one number or one a sample.

    Example:
        >>> Ball(torch.zeros(1, 2), 2.0).support(torch.tensor([[3.0, 4.0]]))
        tensor([[10.]])
    """

    def __init__(self, center: Tensor, radius: float | Tensor) -> None:
        self._center = finite_batch("center", center).flatten(1)
        given = torch.as_tensor(radius, dtype=center.dtype, device=center.device)
        if given.dim() > 1 or (given.dim() == 1 and len(given) != len(center)):
            raise InputError(f"the radius of a ball is one number or one a sample; received {tuple(given.shape)}")
        self.radius = radii(center.flatten(1)[:, :1], given.reshape(-1, 1))[:, 0]
        self.sample_shape = tuple(center.shape[1:])

    @property
    def center(self) -> Tensor:
        return self._center

    def box(self) -> Box:
        unit = 2 * torch.finfo(self.dtype).eps  # the ends must not be rounded inward
        spread = self.radius[:, None] * (1 + unit) + unit * self._center.abs()
        return Box(self._center - spread, self._center + spread)

    def support_rows(self, functionals: Tensor, sample: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(functionals, dim=1)
        return (functionals * self._center[sample]).sum(1) + self.radius[sample] * length

    def deviation_norm(self) -> Tensor:
        return self.radius

    def weighted_rows(self, weights: Tensor, sample: Tensor) -> Tensor:
        return self.radius[sample] * torch.linalg.vector_norm(weights, dim=1)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        shape = (count, *self._center.shape)
        direction = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        share = torch.rand(count, len(self), 1, generator=generator, dtype=self.dtype, device=self.device)
        share[::2] = 1 - 4 * torch.finfo(self.dtype).eps
        length = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        return self._center + share * self.radius[:, None] * direction / length

    def to(self, *args: Any, **kwargs: Any) -> "Ball":
        center = self._center.to(*args, **kwargs).view(len(self), *self.sample_shape)
        return Ball(center, self.radius.to(center))


class ConvexSet(Uncertainty):
    """A convex set given by its support function (003 eq. 4.11).

    Args:
        support: takes functionals ``(B, k, p)`` to their maxima over the samples' sets ``(B, k)``.
        box: a box around the set.
        center: a point of the set; the middle of the box if None.

    Example:
        >>> around = Box(-torch.ones(1, 2), torch.ones(1, 2))
        >>> diamond = ConvexSet(lambda lam: lam.abs().amax(-1), around)
        >>> diamond.support(torch.tensor([[3.0, -4.0]]))
        tensor([[4.]])
    """

    def __init__(self, support: Callable[[Tensor], Tensor], box: Box, center: Tensor | None = None) -> None:
        self._function, self._box, self.sample_shape = support, box, box.sample_shape
        self._center = box.center if center is None else finite_batch("center", center).flatten(1)
        if not callable(support) or self._center.shape != box.lower.shape:
            raise InputError("a ConvexSet takes a support function, a box and a center of the box's shape")

    @property
    def center(self) -> Tensor:
        return self._center

    def box(self) -> Box:
        return self._box

    def support(self, functionals: Tensor) -> Tensor:
        rows = functionals.expand(len(self), -1, -1)
        found = self._function(rows)
        if tuple(found.shape) != tuple(rows.shape[:2]) or not bool(found.isfinite().all()):
            raise InputError(
                f"the support function must return finite values of the shape {tuple(rows.shape[:2])}; "
                f"it returned the shape {tuple(found.shape)}"
            )
        return found

    def support_rows(self, functionals: Tensor, sample: Tensor) -> Tensor:
        counts = torch.bincount(sample, minlength=len(self))
        order = sample.argsort(stable=True)
        first = counts.cumsum(0) - counts
        place = torch.arange(len(sample), device=sample.device) - first[sample[order]]
        filled = functionals.new_zeros(len(self), int(counts.max()), functionals.shape[1])
        filled = filled.index_put((sample[order], place), functionals[order])
        found = self.support(filled)[sample[order], place]
        return torch.zeros_like(found).index_put((order,), found)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws extreme points, where random functionals are largest: the gradients of the support function."""
        shape = (len(self), count, self._center.shape[1])
        normals = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        with torch.enable_grad():
            normals.requires_grad_()
            (extreme,) = torch.autograd.grad(self.support(normals).sum(), normals)
        share = torch.rand(count, len(self), 1, generator=generator, dtype=self.dtype, device=self.device)
        share[::2] = 1.0
        return torch.lerp(self._center.expand(count, -1, -1), extreme.transpose(0, 1), share)

    def to(self, *args: Any, **kwargs: Any) -> "ConvexSet":
        return ConvexSet(self._function, self._box.to(*args, **kwargs), self._center.to(*args, **kwargs))
