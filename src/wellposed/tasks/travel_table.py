"""A table of travel times, and how it is looked up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InputError

RADIUS = 6371.0  # of the earth, km


@dataclass(frozen=True, eq=False)
class TravelTimes:
    """Seconds from a source to a station on the surface, by distance and depth.

    The first arrival is the earliest of several branches. Each is interpolated linearly in both directions; the
    direct one, whose times form a cone above the source, as seconds for a km of the straight line. A depth that is
    listed twice lies between two layers: cells end there.

    Args:
        name: of the earth.
        source: where the numbers come from, in words.
        distances: in degrees, growing, ``(D,)``.
        depths: in km, never falling, ``(Z,)``.
        direct: seconds of the direct branch for a km of the chord, ``(Z, D)``.
        turned: seconds of the others, ``(K, Z, D)``; None: there are no others.
        reach: distances from which and to which the direct and the other branches are found, ``(2, 1 + K, Z)``;
            None: everywhere.

    Example:
        >>> axis = torch.tensor([0.0, 10.0])
        >>> line = TravelTimes("flat", "made up", axis, 10 * axis, torch.full((2, 2), 0.1))
        >>> round(float(line(torch.tensor(0.0), torch.tensor(70.0))), 6)
        7.0
    """

    name: str
    source: str
    distances: Tensor
    depths: Tensor
    direct: Tensor
    turned: Tensor | None = None
    reach: Tensor | None = None

    def __call__(self, distance: Tensor, depth: Tensor) -> Tensor:
        """Looks times up; distances in degrees, depths in km, of shapes that go together."""
        distance, depth = torch.broadcast_tensors(distance.double(), depth.double())
        rows = _place(self.depths.double(), depth.flatten(), "depth")
        columns = _place(self.distances.double(), distance.flatten(), "distance")
        seconds = chord(distance, depth).flatten() * _bilinear(self.direct.double(), rows, columns)
        if self.turned is None or self.reach is None:
            return seconds.view_as(distance)
        seconds[~self._found(0, distance.flatten(), rows)] = torch.inf
        for branch, table in enumerate(self.turned.double(), start=1):
            there = torch.nonzero(self._found(branch, distance.flatten(), rows))[:, 0]
            place = [(index[there], share[there]) for index, share in (rows, columns)]
            seconds[there] = torch.minimum(seconds[there], _bilinear(table, place[0], place[1]))
        return seconds.view_as(distance)

    def __str__(self) -> str:
        """Names the earth and where its times come from; records that differ in it must not be mixed."""
        return f"{self.name}: {self.source}"

    def longest(self, distance: float) -> float:
        """Returns the longest time up to a distance, from any depth."""
        grid = torch.linspace(0.0, distance, 301, dtype=torch.float64)
        return float(self(grid[:, None], self.depths.double()).max())

    def _found(self, branch: int, distance: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:  # (N,)
        """Says at which distances a branch exists."""
        assert self.reach is not None
        index, share = rows
        first, last = (ends[index].lerp(ends[index + 1], share) for ends in self.reach.double()[:, branch])
        return (distance >= first) & (distance <= last)


def chord(distance: Tensor, depth: Tensor) -> Tensor:
    """Computes km along the straight line from a source to a station on the surface.

    Example:
        >>> [round(float(chord(torch.tensor(d), torch.tensor(z)))) for d, z in ((0.0, 10.0), (180.0, 0.0))]
        [10, 12742]
    """
    half = torch.sin(torch.deg2rad(distance) / 2)
    return (depth.square() + 4 * RADIUS * (RADIUS - depth) * half.square()).sqrt()


def slowness(seconds: Tensor, distances: Tensor, depths: Tensor) -> Tensor:  # (Z, D)
    """Divides times ``(Z, D)`` by the chord; at the source itself, 0 / 0, the nearest distance serves."""
    lengths = chord(distances, depths[:, None])
    found = seconds / lengths
    found[:, 0] = torch.where(lengths[:, 0] > 0, found[:, 0], found[:, 1])
    return found


def _bilinear(table: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> Tensor:  # (N,)
    (i, a), (j, b) = rows, columns
    near = table[i, j].lerp(table[i + 1, j], a)
    return near.lerp(table[i, j + 1].lerp(table[i + 1, j + 1], a), b)


def _place(axis: Tensor, wanted: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns the interval of an axis in which each number lies, and where in it."""
    low, high = float(axis[0]), float(axis[-1])
    if wanted.numel() and not bool(((wanted >= low) & (wanted <= high)).all()):
        outside = wanted[~((wanted >= low) & (wanted <= high))][0]
        raise InputError(f"{name} must lie between {low:g} and {high:g}; received {float(outside):g}")
    index = (torch.searchsorted(axis, wanted.contiguous()) - 1).clamp(0, len(axis) - 2)
    return index, (wanted - axis[index]) / (axis[index + 1] - axis[index])
