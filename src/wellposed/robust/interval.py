"""Intervals of tensors, and what a linear operator makes of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.conditions.rounding import outward, unit_roundoff


class Interval(NamedTuple):
    """All tensors between two.

    Example:
        >>> Interval(torch.tensor([-1.0]), torch.tensor([3.0])).magnitude
        tensor([3.])
    """

    lower: Tensor
    upper: Tensor

    @classmethod
    def around(cls, center: Tensor, radius: Tensor, dtype: torch.dtype) -> "Interval":
        """Encloses ``center +- radius`` given in float64 by an interval of another type."""
        lower, below = outward(center - radius, dtype)
        upper, above = outward(center + radius, dtype)
        return cls(lower - below, upper + above)

    @property
    def center(self) -> Tensor:
        """The middle."""
        return (self.lower + self.upper) / 2

    @property
    def radius(self) -> Tensor:
        """How far the ends are from the computed center, rounded up."""
        middle = self.center
        widest = torch.maximum(self.upper - middle, middle - self.lower)
        return widest * (1 + 4 * unit_roundoff(widest.dtype))

    @property
    def magnitude(self) -> Tensor:
        """The largest absolute value."""
        return torch.maximum(self.lower.abs(), self.upper.abs())

    @property
    def width(self) -> Tensor:
        """The distance of the ends."""
        return self.upper - self.lower

    def widened(self, slack: Tensor) -> "Interval":
        """Moves both ends outward."""
        return Interval(self.lower - slack, self.upper + slack)

    def cut(self, low: float, high: float) -> "Interval":
        """Cuts off what lies outside of a range that is known to hold the exact values.

        Example:
            >>> Interval(torch.tensor([-1.0]), torch.tensor([2.0])).cut(0.0, float("inf"))
            Interval(lower=tensor([0.]), upper=tensor([2.]))
        """
        return Interval(self.lower.clamp(low, high), self.upper.clamp(low, high))

    def within(self, other: "Interval | None") -> "Interval":
        """Returns the intersection."""
        if other is None:
            return self
        return Interval(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    def at(self, sample: Tensor) -> "Interval":
        """Takes the rows of some samples."""
        return Interval(self.lower[sample], self.upper[sample])

    def largest(self, coefficients: Tensor) -> Tensor:  # (R, n) -> (R,)
        """Returns the largest value of ``coefficients' x`` for x in the row's interval."""
        ends = coefficients.clamp(min=0) * self.upper + coefficients.clamp(max=0) * self.lower
        return ends.sum(1)

    def where(self, mask: Tensor, other: "Interval") -> "Interval":
        """Keeps the interval where the mask holds and takes the other elsewhere."""
        return Interval(torch.where(mask, self.lower, other.lower), torch.where(mask, self.upper, other.upper))
