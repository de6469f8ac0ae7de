"""Travel times of the first P wave: the ak135 earth as a table, and a homogeneous one in closed form.

`TravelTimes` is a table and how it is looked up. `tabulate` makes that of ak135 by TauP of obspy, branch by
branch: a source sends rays of parameter p upwards, or downwards, where they turn. Along a branch time and distance
grow together, and the slope is the ray parameter itself: dT/dDelta = p. Where the velocity jumps or grows fast,
distances go back for a while (a triplication), and another branch begins; the first arrival is the earliest of all
branches. Each of them is smooth, their minimum is not, so they are tabulated apart.

`save_table` and `read_table` use .npz files without pickled objects. `travel_times` returns the table of an earth
by name.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.atomic import atomic_write
from wellposed.data.cache import DataFile, MissingDataError, cache_folder, data_folder, fetch
from wellposed.errors import FileFormatError, InputError, MissingExtraError, require, unknown_name
from wellposed.models.io.arrays import read_arrays

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
        reach: first and last distance of each branch, the direct one first, ``(2, 1 + K, Z)``; None: everywhere.

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
        rows = _interval(self.depths.double(), depth.flatten(), "depth")
        columns = _interval(self.distances.double(), distance.flatten(), "distance")
        seconds = chord(distance, depth).flatten() * _bilinear(self.direct.double(), rows, columns)
        if self.turned is None or self.reach is None:
            return seconds.view_as(distance)
        seconds[~self._reached(0, distance.flatten(), rows)] = torch.inf
        for branch, table in enumerate(self.turned.double(), start=1):
            there = torch.nonzero(self._reached(branch, distance.flatten(), rows))[:, 0]
            cells = [(index[there], share[there]) for index, share in (rows, columns)]
            seconds[there] = torch.minimum(seconds[there], _bilinear(table, cells[0], cells[1]))
        return seconds.view_as(distance)

    def __str__(self) -> str:
        """Names the earth and where its times come from; records that differ in it must not be mixed."""
        return f"{self.name}: {self.source}"

    def longest(self, distance: float) -> float:
        """Returns the longest time up to a distance, from any depth."""
        grid = torch.linspace(0.0, distance, 301, dtype=torch.float64)
        return float(self(grid[:, None], self.depths.double()).max())

    def _reached(self, branch: int, distance: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:  # (N,)
        """Returns at which distances a branch exists."""
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
    """Divides times ``(Z, D)`` by the chord; at the source itself, 0 / 0, the next distance decides."""
    lengths = chord(distances, depths[:, None])
    ratio = seconds / lengths
    ratio[:, 0] = torch.where(lengths[:, 0] > 0, ratio[:, 0], ratio[:, 1])
    return ratio


def _bilinear(table: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> Tensor:  # (N,)
    (i, a), (j, b) = rows, columns
    near = table[i, j].lerp(table[i + 1, j], a)
    return near.lerp(table[i, j + 1].lerp(table[i + 1, j + 1], a), b)


def _interval(axis: Tensor, wanted: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns the interval of an axis that each number lies in, and its share of the way through it."""
    low, high = float(axis[0]), float(axis[-1])
    if wanted.numel() and not bool(((wanted >= low) & (wanted <= high)).all()):
        outside = wanted[~((wanted >= low) & (wanted <= high))][0]
        raise InputError(f"{name} must lie between {low:g} and {high:g}; received {float(outside):g}")
    index = (torch.searchsorted(axis, wanted.contiguous()) - 1).clamp(0, len(axis) - 2)
    return index, (wanted - axis[index]) / (axis[index + 1] - axis[index])


Array = NDArray[np.float64]
Traced = tuple[Array, Array, Array]  # ray parameters in s/degree, distances in degrees, times in s
NEVER = 1e3  # degrees; where a branch begins that does not exist
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
        """Interpolates by cubics that have the slopes of the rays; beyond the ends times are linear.

        Example:
            >>> rays = Rays(np.array([1.0, 2.0]), np.array([1.0, 4.0]), np.array([2.0, 4.0]))
            >>> rays.at(np.array([0.0, 1.5, 3.0])).tolist()
            [-1.0, 2.25, 8.0]
        """
        inside = distance.clip(self.distance[0], self.distance[-1])
        left = (np.searchsorted(self.distance, inside) - 1).clip(0, len(self.distance) - 2)
        width, rise = (column[left + 1] - column[left] for column in (self.distance, self.time))
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
        for phase in (self.phase(name, model) for name in names):
            p, distance, time = (np.asarray(column, float) for column in (phase.ray_param, phase.dist, phase.time))
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
        depths ``(Z,)``, times of direct rays in s ``(Z, D)`` and of turned ones ``(K, Z, D)``, and the first and
        last distance of each branch ``(2, 1 + K, Z)``.
    """
    rows, times, reach = [], [], []
    for layer, (top, bottom) in enumerate(pairwise(earth.depths)):
        last = min(bottom, depths[-1])
        for depth in sorted({top, *(z for z in depths if top < z < bottom), last}) if top < last else ():
            direct, turned = branches(earth, depth, layer)
            branch_rays = [direct, *turned]
            rows.append(depth)
            times.append(
                [np.zeros_like(distances) if rays is None else rays.at(distances) for rays in branch_rays]
            )
            reach.append([_ends(rays, _end(earth, layer, k)) for k, rays in enumerate(branch_rays)])
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
    pieces = [[column[rising] for column in up]]
    if not bottom:
        turning = np.flatnonzero(down[0] >= lowest * (1 - CLOSE))
        first = _runs(down[1], turning)[0] if len(turning) > 1 else turning
        pieces.append([column[first[len(rising) > 0 :]] for column in down])
    p, distance, time = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
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
    """Returns the first and last distance of a branch; `further` is added to the last."""
    return (NEVER, NEVER) if rays is None else (float(rays.distance[0]), float(rays.distance[-1]) + further)


def _end(earth: Earth, layer: int, branch: int) -> float:
    """Returns how far a branch is extended linearly: along the core, or without end where others are earlier."""
    lowest = len(earth.depths) - 1
    if branch == lowest or (branch == 0 and layer == lowest - 1):
        return DIFFRACTED
    return 0.0 if branch == lowest + 1 else NEVER


VERSION = 2  # of the table in the cache; a change of phases, grid or method raises it
ARRAYS = ("distances", "depths", "direct", "turned", "reach")
LARGEST = 1 << 30  # bytes of all arrays
REMEDY = "delete it, so that it is computed or fetched again"


def save_table(table: TravelTimes, path: Path) -> None:
    """Writes a table atomically."""
    shape = table.direct.shape
    turned = torch.zeros(0, *shape) if table.turned is None else table.turned
    reach = torch.tensor([0.0, 180.0]).view(2, 1, 1).expand(2, 1, shape[0]) if table.reach is None else table.reach
    tables = {"direct": table.direct.float(), "turned": turned.float(), "reach": reach.double()}
    axes = {"distances": table.distances.double(), "depths": table.depths.double()}
    arrays: dict[str, Any] = {name: array.numpy() for name, array in (axes | tables).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, version=np.array(VERSION), **arrays)


def read_table(path: str | os.PathLike[str], source: str) -> TravelTimes:
    """Reads a table of ak135 that `save_table` has written.

    Raises:
        FileFormatError: the file is damaged, of another version, or its arrays do not go together.
    """
    version, *arrays = _read(path, ("version", *ARRAYS))
    if version.tolist() != [VERSION]:
        raise FileFormatError(
            f"{os.fspath(path)!r} must be a travel-time table of version {VERSION}; received version "
            f"{version.flatten()[0]:g}; {REMEDY}"
        )
    distances, depths, direct, turned, reach = arrays
    grid = (len(depths), len(distances))
    fits = direct.shape == grid and turned.shape[1:] == grid and reach.shape == (2, 1 + len(turned), grid[0])
    _check(path, distances, depths, fits, arrays)
    return TravelTimes("ak135", source, distances, depths, direct, turned, reach)


def read_plain_table(path: str | os.PathLike[str], source: str) -> TravelTimes:
    """Reads a table from .npz with dist_deg (D,), depth_km (Z,) and time_s (Z, D), the first arrivals of ak135.

    Raises:
        FileFormatError: the file is damaged, or lacks one of the three, or their shapes do not go together.
    """
    distances, depths, seconds = arrays = _read(path, ("dist_deg", "depth_km", "time_s"))
    _check(path, distances, depths, seconds.shape == (len(depths), len(distances)), arrays)
    return TravelTimes("ak135", source, distances, depths, slowness(seconds, distances, depths))


def _read(path: str | os.PathLike[str], names: tuple[str, ...]) -> list[Tensor]:
    try:
        stored = read_arrays(path, LARGEST)
        return [torch.from_numpy(np.atleast_1d(stored[name])).double() for name in names]
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise FileFormatError(f"{os.fspath(path)!r} is no travel-time table ({error}); {REMEDY}") from error


def _check(
    path: str | os.PathLike[str], distances: Tensor, depths: Tensor, fits: bool, arrays: list[Tensor]
) -> None:
    name = os.fspath(path)
    if not fits or distances.dim() != 1 or depths.dim() != 1 or min(len(distances), len(depths)) < 2:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays)
        raise FileFormatError(f"{name!r} has shapes that do not fit: {shapes}; {REMEDY}")
    growing = bool((distances.diff() > 0).all() and (depths.diff() >= 0).all())
    if not growing or not all(bool(torch.isfinite(array).all()) for array in arrays):
        raise FileFormatError(f"{name!r} has axes that do not grow or times that are no numbers; {REMEDY}")


DEEPEST = 700.0  # source, km
PHASES = ("p", "P", "Pn", "Pdiff", "PKP", "PKIKP")  # of which the first arrival is meant
DISTANCES = ((0.0, 0.02), (3.0, 0.05), (10.0, 0.1), (30.0, 0.2), (180.0, 0.0))  # from where on which step, degrees
DEPTHS = ((0.0, 5.0), (20.0, 1.0), (50.0, 2.5), (120.0, 5.0), (DEEPEST, 0.0))  # km
SOURCE = f"TauP of obspy, table {VERSION}"
SMALL_TABLE = DataFile(
    "earthquakes/ak135_first_P_table.npz",
    "7c8b0cb0f17113d959645aa25fc85edb9c4ece7067596f627b5f56cba924e1d1",
    24319,
)


def travel_times(earth: str = "ak135") -> TravelTimes:
    """Returns the travel times of an earth.

    "ak135" (Kennett et al. 1995) is computed once by TauP of obspy and cached; without obspy the table of the data
    folder is used. "homogeneous" is a sphere of 9 km/s, in which rays are straight; it needs no data and is for
    tests.

    Raises:
        MissingDataError: "ak135" is neither in the cache nor in the data folder, and obspy is not installed.

    Example:
        >>> times = travel_times("homogeneous")
        >>> antipode = times(torch.tensor(180.0), torch.tensor(0.0))
        >>> round(float(antipode * 9 / 2))
        6371
    """
    if earth not in EARTHS:
        raise unknown_name("earth", earth, EARTHS)
    return EARTHS[earth](str(cache_key()))


def cache_key() -> tuple[str, str]:
    """Returns the folders that decide where a table is read from; they may change within a process."""
    return os.environ.get("WELLPOSED_CACHE", ""), os.environ.get("WELLPOSED_DATA", "")


def build_ak135(distances: Tensor | None = None, depths: Tensor | None = None) -> TravelTimes:
    """Tabulates the first P wave by TauP, branch by branch; see `tabulate`.

    Args:
        distances: in degrees, growing, ``(D,)``; by default finer where waves are near their source.
        depths: in km, growing from zero, ``(Z,)``; by default finer in the crust.
    """
    wanted = _axis(DISTANCES) if distances is None else distances.double()
    levels = _axis(DEPTHS) if depths is None else depths.double()
    if float(wanted[0]) < 0 or float(wanted[-1]) > 180 or float(levels[0]) != 0:
        raise InputError(
            "distances must lie between 0 and 180 degrees and depths begin with 0; received distances from "
            f"{float(wanted[0]):g} to {float(wanted[-1]):g} and depths from {float(levels[0]):g}"
        )
    rows, direct, turned, reach = (
        torch.as_tensor(np.asarray(array)) for array in tabulate(Earth("ak135"), wanted.numpy(), levels.tolist())
    )
    return TravelTimes("ak135", SOURCE, wanted, rows, slowness(direct, wanted, rows), turned, reach)


def cached_table() -> Path | None:
    """Returns the path of the cached ak135 table; None where there is no cache."""
    try:
        return cache_folder() / "travel-times" / f"ak135-v{VERSION}.npz"
    except MissingExtraError:
        return None


@functools.lru_cache(maxsize=4)
def _ak135(key: str) -> TravelTimes:
    path = cached_table()
    if path is not None and path.is_file():
        return read_table(path, SOURCE)
    try:
        table = build_ak135()
    except MissingExtraError as error:
        return _from_data_folder(error)
    if path is not None:
        save_table(table, path)
        table = read_table(path, SOURCE)  # rounded, as every later process reads it
    return table


def _from_data_folder(reason: MissingExtraError) -> TravelTimes:
    try:
        _, paths = fetch("ak135 travel times", [[SMALL_TABLE]], "", download=False)
    except MissingDataError as error:
        folder = data_folder()
        where = f"{folder}/{SMALL_TABLE.path}" if folder else f"$WELLPOSED_DATA/{SMALL_TABLE.path}"
        raise MissingDataError(
            f"there are no travel times of ak135 here. Install obspy, which computes them in seconds ({reason}); "
            f"or put a table at {where}; or copy a table from a machine with obspy to "
            f"$WELLPOSED_CACHE/travel-times/ak135-v{VERSION}.npz"
        ) from error
    return read_plain_table(paths[0], "the table of the data folder, coarser than our own")


@functools.lru_cache(maxsize=1)
def _homogeneous(key: str) -> TravelTimes:
    """Straight rays at 9 km/s."""
    distances, depths = (torch.tensor([0.0, last], dtype=torch.float64) for last in (180.0, DEEPEST))
    direct = torch.full((2, 2), 1 / 9.0, dtype=torch.float64)
    return TravelTimes("homogeneous", "straight rays at 9 km/s", distances, depths, direct)


EARTHS: dict[str, Callable[[str], TravelTimes]] = {"ak135": _ak135, "homogeneous": _homogeneous}


def _axis(steps: tuple[tuple[float, float], ...]) -> Tensor:
    """Returns an axis whose step changes: pairs of the first point and the step from there on."""
    pieces = [
        first + step * torch.arange(round((last - first) / step), dtype=torch.float64)
        for (first, step), (last, _) in pairwise(steps)
    ]
    return torch.cat([*pieces, torch.tensor([steps[-1][0]], dtype=torch.float64)])
