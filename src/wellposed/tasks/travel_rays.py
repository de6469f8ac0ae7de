"""First P waves of ak135 by TauP of obspy, branch by branch.

A source sends rays of parameter p upwards, or downwards, where they turn. Along a branch time and distance grow
together, and the slope is the ray parameter itself: dT/dDelta = p. Where the velocity jumps or grows fast,
distances go back for a while (a triplication), and another branch begins; the first arrival is the earliest of all
branches. Each of them is smooth, their minimum is not, so they are tabulated apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import require

Array = NDArray[np.float64]
Traced = tuple[Array, Array, Array]  # ray parameters in s/degree, distances in degrees, times in s
NEVER = 1e3  # degrees; where a branch begins that there is not
DIFFRACTED = 60.0  # degrees that TauP follows a wave along the core
CLOSE = 2e-3  # relative, of ray parameters that mean the same: TauP approximates velocities within its layers


@dataclass(frozen=True)
class Rays:
    """Rays of one branch, by growing distance.

    Args:
        distance: in degrees, ``(K,)``.
        time: in seconds, ``(K,)``.
        slope: ray parameters in s/degree, ``(K,)``.
    """

    distance: Array
    time: Array
    slope: Array

    def at(self, distance: Array) -> Array:  # (D,)
        """Interpolates by cubics that have the slopes of the rays; beyond the ends times go on straight.

        Example:
            >>> rays = Rays(np.array([1.0, 2.0]), np.array([1.0, 4.0]), np.array([2.0, 4.0]))
            >>> rays.at(np.array([0.0, 1.5, 3.0])).tolist()
            [-1.0, 2.25, 8.0]
        """
        inside = distance.clip(self.distance[0], self.distance[-1])
        left = (np.searchsorted(self.distance, inside) - 1).clip(0, len(self.distance) - 2)
        width, rise = (part[left + 1] - part[left] for part in (self.distance, self.time))
        s = (inside - self.distance[left]) / width
        inner = (1 - s) * (width * self.slope[left] - rise) - s * (width * self.slope[left + 1] - rise)
        ends = np.where(distance < inside, self.slope[0], self.slope[-1])
        times: Array = self.time[left] + s * rise + s * (1 - s) * inner + ends * (distance - inside)
        return times


class Earth:
    """The model of TauP, cut into the layers in which the rays of one branch turn.

    Attributes:
        parameters: ray parameters between the branches, falling, from that of the surface to that of the core.
        depths: where rays with these turn.
    """

    def __init__(self, name: str = "ak135") -> None:
        self.model = require("obspy.taup", extra="lab").TauPyModel(name).model
        self.phase = require("obspy.taup.seismic_phase", extra="lab").SeismicPhase
        self.parameters = self._between()
        self.depths = [self._turning(p) for p in self.parameters]

    def rays(self, depth: float, *names: str) -> list[Traced]:
        """Traces phases from a depth."""
        model, traced = self.model.depth_correct(depth) if depth > 0 else self.model, []
        for found in (self.phase(name, model) for name in names):
            p, distance, time = (np.asarray(part, float) for part in (found.ray_param, found.dist, found.time))
            traced.append((np.deg2rad(p), np.rad2deg(distance), time))
        return traced

    def largest(self, depth: float, below: bool) -> float:
        """Returns the parameter of the ray that leaves horizontally, just above or below a depth, in s/degree."""
        velocities = self.model.s_mod.v_mod
        look = velocities.evaluate_below if below else velocities.evaluate_above
        speed = float(np.ravel(look(np.array([depth]), "P"))[0])
        return float(np.deg2rad((self.model.radius_of_planet - depth) / speed))

    def _between(self) -> list[float]:
        """Returns the middles of the ranges in which distances go back, for a source on the surface."""
        p, distance, _ = self.rays(0.0, "P")[0]
        back = np.flatnonzero(np.diff(distance) < 0)
        runs = np.split(back, np.flatnonzero(np.diff(back) > 1) + 1)
        middles = [float(p[run[0]] + p[run[-1] + 1]) / 2 for run in runs if len(run)]
        return [float(p[0]), *middles, float(p[-1])]

    def _turning(self, parameter: float) -> float:
        """Finds the depth at which the ray of a parameter is horizontal, by bisection."""
        low, high = 0.0, float(self.model.cmb_depth)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.largest(middle, below=True) > parameter else (low, middle)
        return round(high, 6)


def tabulate(earth: Earth, distances: Array, depths: Sequence[float]) -> tuple[list[float], Array, Array, Array]:
    """Tabulates all branches, layer by layer; a depth between two layers comes twice.

    Args:
        earth: with its layers.
        distances: in degrees, ``(D,)``.
        depths: in km, growing from zero; those between layers are added.

    Returns:
        depths ``(Z,)``, times of direct rays in s ``(Z, D)`` and of turned ones ``(K, Z, D)``, and the distances
        from which and to which direct and turned rays are found ``(2, 1 + K, Z)``.
    """
    rows, times, reach = [], [], []
    for layer, (top, bottom) in enumerate(pairwise(earth.depths)):
        last = min(bottom, depths[-1])
        for depth in sorted({top, *(z for z in depths if top < z < bottom), last}) if top < last else ():
            direct, turned = branches(earth, depth, layer)
            found = [direct, *turned]
            rows.append(depth)
            times.append([np.zeros_like(distances) if rays is None else rays.at(distances) for rays in found])
            reach.append([_ends(rays, _end(earth, layer, k)) for k, rays in enumerate(found)])
    every = np.array(times).transpose(1, 0, 2)
    return rows, every[0], every[1:], np.array(reach).transpose(2, 1, 0)


def branches(earth: Earth, depth: float, layer: int) -> tuple[Rays, list[Rays | None]]:
    """Returns the rays from a source up to those that turn beneath it, and the rays that turn in each layer.

    Args:
        earth: with its layers.
        depth: of the source, in km, within the layer or at one of its ends.
        layer: counted from the top; the last branch of all goes through the inner core.
    """
    bottom = depth >= earth.depths[layer + 1]
    top = earth.largest(depth, below=not bottom)
    up, down, through = earth.rays(depth, "p", "P", "PKIKP")
    turned = [
        None if k < layer or (bottom and k == layer) else _longest(down, low, min(high, top))
        for k, (high, low) in enumerate(pairwise(earth.parameters))
    ]
    core = Rays(through[1], through[2], through[0])
    return _direct(up, down, top, earth.parameters[layer + 1], bottom), [*turned, core]


def _direct(up: Traced, down: Traced, top: float, lowest: float, bottom: bool) -> Rays:
    """Joins the rays that go up, down to the horizontal one, with those that turn right beneath the source."""
    rising = np.flatnonzero(up[0] <= top * (1 + CLOSE))[::-1]
    parts = [[part[rising] for part in up]]
    if not bottom:
        turning = np.flatnonzero(down[0] >= lowest * (1 - CLOSE))
        first = _runs(down[1], turning)[0] if len(turning) > 1 else turning
        parts.append([part[first[len(rising) > 0 :]] for part in down])
    p, distance, time = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Rays(distance, time, p)


def _longest(rays: Traced, lowest: float, highest: float) -> Rays | None:
    """Returns the longest run of rays in a range of parameters along which distances grow, and a ray more."""
    p, distance, time = rays
    inside = np.flatnonzero((p <= highest * (1 + CLOSE)) & (p >= lowest * (1 - CLOSE)))
    if len(inside) == 0:
        return None
    runs = _runs(distance, np.arange(max(inside[0] - 1, 0), min(inside[-1] + 2, len(p))))
    run = max(runs, key=lambda rows: distance[rows[-1]] - distance[rows[0]], default=inside[:1])
    return Rays(distance[run], time[run], p[run]) if len(run) > 1 else None


def _runs(distance: Array, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Splits neighbouring rays into runs along which distances grow."""
    return np.split(rows, np.flatnonzero(np.diff(distance[rows]) <= 0) + 1)


def _ends(rays: Rays | None, further: float) -> tuple[float, float]:
    """Returns the distances between which a branch is found, the last one with what is added to it."""
    return (NEVER, NEVER) if rays is None else (float(rays.distance[0]), float(rays.distance[-1]) + further)


def _end(earth: Earth, layer: int, branch: int) -> float:
    """Returns how far a branch goes on straight: along the core, or without end where others are earlier."""
    lowest = len(earth.depths) - 1
    if branch == lowest or (branch == 0 and layer == lowest - 1):
        return DIFFRACTED
    return 0.0 if branch == lowest + 1 else NEVER
