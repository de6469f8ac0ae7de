"""Lines above and below an activation on an interval, and the exact intercepts that make them sound.

For any coefficient nu and slope-times-coefficient lam, ``nu phi(z) <= lam z + g`` holds on [l, h] with
``g = max_z (nu phi(z) - lam z)``. The maximum is attained at an end, at a kink, or where ``phi' = lam / nu``, so
it is computed from points of the interval for whatever slopes were chosen; no slope can make a bound unsound.
"""

import abc
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.robust.interval import Interval


class Slopes(NamedTuple):
    """Slopes of the lines below and above, and where others would do as well and may be optimised."""

    lower: Tensor
    upper: Tensor
    free_lower: Tensor
    free_upper: Tensor


@dataclass(frozen=True)
class Lines(abc.ABC):
    """How an activation is enclosed between lines."""

    phi: Activation

    @abc.abstractmethod
    def unstable(self, z: Interval) -> Tensor:
        """Tells where phi is not affine on the interval."""

    @abc.abstractmethod
    def slopes(self, z: Interval) -> Slopes:
        """Chooses slopes."""

    @abc.abstractmethod
    def touching(self, nu: Tensor, lam: Tensor, z: Interval) -> list[Tensor]:
        """Lists points of the interval inside of which ``nu phi(z) - lam z`` may be largest."""

    def intercept(self, nu: Tensor, lam: Tensor, z: Interval) -> Tensor:
        """Returns ``max_z (nu phi(z) - lam z)`` over the interval."""
        found = torch.maximum(self._gap(nu, lam, z.lower), self._gap(nu, lam, z.upper))
        for point in self.touching(nu, lam, z):
            found = torch.maximum(found, self._gap(nu, lam, point))
        return found

    def _gap(self, nu: Tensor, lam: Tensor, point: Tensor) -> Tensor:
        return nu * self.phi.function(point) - lam * point

    def chord(self, z: Interval) -> Tensor:
        """Returns the slope of the line through the ends."""
        width = z.upper - z.lower
        rise = self.phi.function(z.upper) - self.phi.function(z.lower)
        wide = width > 64 * torch.finfo(width.dtype).eps * z.magnitude
        slope = rise / torch.where(wide, width, 1.0)
        low, high = self.phi.slope
        return torch.where(wide, slope, self.phi.slope_at(z.center)).clamp(low, high)


@dataclass(frozen=True)
class Kinked(Lines):
    """Lines of a piecewise linear map: ReLU, leaky ReLU, hardtanh and their like."""

    kinks: tuple[float, ...]

    def unstable(self, z: Interval) -> Tensor:
        inside = torch.zeros_like(z.lower, dtype=torch.bool)
        for kink in self.kinks:
            inside = inside | ((z.lower < kink) & (z.upper > kink))
        return inside

    def slopes(self, z: Interval) -> Slopes:
        """Takes the chord on one side and the slope at the middle, which leaves the smaller area, on the other."""
        left, right = self.phi.slope_at(z.lower), self.phi.slope_at(z.upper)
        chord, middle, unstable = self.chord(z), self.phi.slope_at(z.center), self.unstable(z)
        convex, concave = unstable & (left < right), unstable & (left > right)
        return Slopes(torch.where(convex, middle, chord), torch.where(concave, middle, chord), convex, concave)

    def touching(self, nu: Tensor, lam: Tensor, z: Interval) -> list[Tensor]:
        return [torch.clamp(torch.full_like(z.lower, kink), z.lower, z.upper) for kink in self.kinks]


@dataclass(frozen=True)
class Sigmoidal(Lines):
    """Lines of a map that is convex below zero and concave above, ``phi(s z) = scaled tanh``: tanh and sigmoid."""

    stretch: float  # phi'(z) = phi'(0) / cosh(stretch z)^2

    def unstable(self, z: Interval) -> Tensor:
        return z.upper > z.lower

    def slopes(self, z: Interval) -> Slopes:
        lower, upper = -z.upper, -z.lower  # phi(-z) is phi(0) - phi(z) up to a constant
        return Slopes(self._above(Interval(lower, upper)), self._above(z), (z.upper <= 0), (z.lower >= 0))

    def _above(self, z: Interval) -> Tensor:
        """Chooses the slope of the line above: tangent in the middle, tangent through the left end, or chord."""
        concave, convex = z.lower >= 0, z.upper <= 0
        point = self._tangent(z)
        mixed = torch.where(point < z.upper, self.phi.slope_at(point), self.chord(z))
        return torch.where(concave, self.phi.slope_at(z.center), torch.where(convex, self.chord(z), mixed))

    @torch.no_grad()
    def _tangent(self, z: Interval) -> Tensor:
        """Finds the point d >= 0 at which the line through the left end touches, by bisection."""
        low, high = torch.zeros_like(z.lower), z.upper.clamp(min=0)
        value = self.phi.function(z.lower)
        for _ in range(24):
            point = (low + high) / 2
            steep = self.phi.slope_at(point) * (point - z.lower) > self.phi.function(point) - value
            low, high = torch.where(steep, point, low), torch.where(steep, high, point)
        return high

    def touching(self, nu: Tensor, lam: Tensor, z: Interval) -> list[Tensor]:
        """Solves ``phi'(z) = lam / nu``: z = +- log((1 + sqrt(1 - r)) / sqrt(r)) / stretch, r = lam/nu/phi'(0)."""
        with torch.no_grad():
            ratio = torch.where(nu != 0, lam / (torch.where(nu != 0, nu, 1.0) * self.phi.slope[1]), 1.0)
            ratio = ratio.clamp(torch.finfo(ratio.dtype).tiny, 1.0)
            point = ((1 - ratio).sqrt().log1p() - ratio.log() / 2) / self.stretch
        return [torch.clamp(point, z.lower, z.upper), torch.clamp(-point, z.lower, z.upper)]


def lines_of(phi: Activation) -> Lines | None:
    """Returns how an activation is enclosed between lines; None if that is not known.

    Example:
        >>> from wellposed.activations import get_activation
        >>> lines_of(get_activation("leaky_relu(0.1)")).kinks, lines_of(get_activation("gelu"))
        ((0.0,), None)
    """
    kind = phi.name.partition("(")[0]
    kinks = {"identity": (), "relu": (0.0,), "leaky_relu": (0.0,), "relu6": (0.0, 6.0), "hardsigmoid": (-3.0, 3.0)}
    kinks["hardtanh"] = phi.image
    if kind in kinks and phi.componentwise:
        return Kinked(phi, kinks[kind])
    stretches = {"tanh": 1.0, "sigmoid": 0.5}
    return Sigmoidal(phi, stretches[kind]) if kind in stretches else None
