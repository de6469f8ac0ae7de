"""Sums of functions of single states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.robust.interval import Interval

HALVINGS = 60


@dataclass(frozen=True)
class Separable:
    """The sum ``sum_i f_i(x_i)`` of functions that are all convex or all concave.

    Args:
        function: takes ``(n,)`` states to their n values, entry by entry.
        curvature: linear functions are both.

    Example:
        >>> f = Separable(lambda x: -x.square(), "concave")
        >>> point, value = f.peak(torch.tensor([2.0]), Interval(torch.tensor([0.0]), torch.tensor([3.0])))
        >>> round(float(point), 5), round(float(value), 5)
        (1.0, 1.0)
    """

    function: Callable[[Tensor], Tensor]
    curvature: Literal["convex", "concave"]

    def __post_init__(self) -> None:
        if self.curvature not in ("convex", "concave"):
            raise InputError(f"the curvature is 'convex' or 'concave'; received {self.curvature!r}")

    @classmethod
    def linear(cls, coefficients: Tensor) -> "Separable":
        """Returns ``c' x``."""
        return cls(lambda x: coefficients.to(x) * x, "convex")

    def at(self, x: Tensor) -> Tensor:
        """Evaluates every f_i."""
        found = self.function(x)
        if found.shape != x.shape or not bool(found.isfinite().all()):
            raise InputError(
                f"a separable function takes {tuple(x.shape)} states to as many finite values; it returned the "
                f"shape {tuple(found.shape)}"
            )
        return found

    def peak(self, slope: Tensor, x: Interval) -> tuple[Tensor, Tensor]:
        """Finds the maxima of ``f_i(x) + slope_i x`` on intervals: points, and numbers that are no smaller."""
        if self.curvature == "convex":
            low, high = (self.at(end) + slope * end for end in x)
            return torch.where(low > high, x.lower, x.upper), torch.maximum(low, high)
        low, high = x.lower.clone(), x.upper.clone()
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            rising = self._derivative(middle) + slope > 0
            low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
        rise = (self._derivative(low) + slope).clamp(min=0) * (high - low)  # the tangent lies above
        return (low + high) / 2, self.at(low) + slope * low + rise

    def _derivative(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.at(point).sum(), point)
        return found
