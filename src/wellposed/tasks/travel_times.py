"""Travel times of the first P wave: the ak135 earth as a table, and a homogeneous one in closed form."""

import functools
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import FileFormatError, InputError, MissingExtraError, require, unknown_name
from wellposed.tasks.cache import DataFile, MissingDataError, cache_folder, data_folder, fetch

RADIUS = 6371.0  # of the earth, km
DEEPEST = 700.0  # source, km
PHASES = ("p", "P", "Pn", "Pdiff", "PKP", "PKIKP")
VERSION = 1  # of the table in the cache; a change of phases, grid or method raises it
STEPS = {"distance": 0.1, "depth": 5.0}  # of the grid; the velocities of ak135 jump at 20, 35, 410 and 660 km
SMALL_TABLE = DataFile(
    "earthquakes/ak135_first_P_table.npz",
    "7c8b0cb0f17113d959645aa25fc85edb9c4ece7067596f627b5f56cba924e1d1",
    24319,
)


@dataclass(frozen=True, eq=False)
class TravelTimes:
    """Seconds from a source to a station on the surface, by distance and depth.

    Between the points of a table times are interpolated linearly in both directions. From one degree on that of
    ak135 is right to 1 ms at its points and to about 20 ms between them, where two branches cross.

    Args:
        name: of the earth.
        source: where the numbers come from, in words.
        distances: in degrees, growing, ``(D,)``.
        depths: in km, growing, ``(Z,)``.
        seconds: ``(Z, D)``.

    Example:
        >>> line = TravelTimes("flat", "made up", torch.tensor([0.0, 10.0]), torch.tensor([0.0, 700.0]),
        ...                    torch.tensor([[0.0, 100.0], [70.0, 170.0]]))
        >>> float(line(torch.tensor(5.0), torch.tensor(70.0)))
        57.0
    """

    name: str
    source: str
    distances: Tensor
    depths: Tensor
    seconds: Tensor

    def __call__(self, distance: Tensor, depth: Tensor) -> Tensor:
        """Looks times up; distances in degrees, depths in km, of shapes that go together."""
        distance, depth = torch.broadcast_tensors(distance.double(), depth.double())
        i, a = _place(self.depths.double(), depth, "depth")
        j, b = _place(self.distances.double(), distance, "distance")
        table = self.seconds.double()
        near = table[i, j].lerp(table[i + 1, j], a)
        far = table[i, j + 1].lerp(table[i + 1, j + 1], a)
        return near.lerp(far, b)

    def longest(self, distance: float) -> float:
        """Returns the longest time up to a distance, from any depth."""
        grid = torch.linspace(0.0, distance, 301, dtype=torch.float64)
        return float(self(grid[:, None], self.depths.double()).max())


def travel_times(earth: str = "ak135") -> TravelTimes:
    """Returns the travel times of an earth.

    "ak135" (Kennett et al. 1995) is computed once by TauP of obspy and kept in the cache; without obspy the table
    of the data folder serves. "homogeneous" is a sphere of 9 km/s, in which rays are straight; it needs nothing
    and is for tests.

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


def build_ak135(distances: Tensor, depths: Tensor) -> TravelTimes:
    """Computes the first P wave on a grid by TauP.

    A phase is traced once a depth, over all its ray parameters; between two rays the time is a cubic, whose slopes
    are the ray parameters themselves (dT/dDelta = p). Asking TauP point by point gives the same to about a
    millisecond and takes far longer.

    Args:
        distances: in degrees, ``(D,)``.
        depths: in km, ``(Z,)``.
    """
    taup = require("obspy.taup", extra="seismic")
    phase = require("obspy.taup.seismic_phase", extra="seismic").SeismicPhase
    model = taup.TauPyModel("ak135").model
    angles = np.deg2rad(distances.double().numpy())
    rows = [_curve(phase, model.depth_correct(z) if z > 0 else model, angles) for z in depths.tolist()]
    seconds = torch.from_numpy(np.stack(rows))
    if not bool(torch.isfinite(seconds).all()):
        raise InputError("some distances have no P wave; ask for distances between 0 and 180 degrees")
    return TravelTimes("ak135", "TauP of obspy", distances.double(), depths.double(), seconds)


def save_table(table: TravelTimes, path: Path) -> None:
    """Writes a table as .npz, in one piece: whoever reads sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            np.savez_compressed(
                stream,
                dist_deg=table.distances.numpy(),
                depth_km=table.depths.numpy(),
                time_s=table.seconds.float().numpy(),
            )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_table(path: str | os.PathLike[str], source: str) -> TravelTimes:
    """Reads a table from .npz with dist_deg (D,), depth_km (Z,) and time_s (Z, D).

    Raises:
        FileFormatError: the file is damaged, or lacks one of the three, or their shapes do not go together.
    """
    remedy = "delete it, so that it is computed or fetched again"
    try:
        with np.load(path, allow_pickle=False) as stored:
            parts = [torch.from_numpy(stored[name]).double() for name in ("dist_deg", "depth_km", "time_s")]
    except (ValueError, KeyError, EOFError, OSError, TypeError, zipfile.BadZipFile) as error:
        raise FileFormatError(f"{os.fspath(path)!r} is no travel-time table ({error}); {remedy}") from error
    distances, depths, seconds = parts
    fits = distances.dim() == depths.dim() == 1 and seconds.shape == (len(depths), len(distances))
    if not fits or min(len(distances), len(depths)) < 2:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise FileFormatError(f"{os.fspath(path)!r} has shapes that do not fit: {shapes}; {remedy}")
    growing = bool((distances.diff() > 0).all() and (depths.diff() > 0).all())
    if not growing or not bool(torch.isfinite(seconds).all()):
        raise FileFormatError(
            f"{os.fspath(path)!r} has axes that do not grow or times that are no numbers; {remedy}"
        )
    return TravelTimes("ak135", source, distances, depths, seconds)


def cached_table() -> Path | None:
    """Returns where the ak135 table is kept; None where there is no cache."""
    try:
        return cache_folder() / "travel-times" / f"ak135-v{VERSION}.npz"
    except MissingExtraError:
        return None


@functools.lru_cache(maxsize=4)
def _ak135(key: str) -> TravelTimes:
    place = cached_table()
    if place is not None and place.is_file():
        return read_table(place, "TauP of obspy, from the cache")
    try:
        table = build_ak135(_axis(180.0, STEPS["distance"]), _axis(DEEPEST, STEPS["depth"]))
    except MissingExtraError as error:
        return _from_data_folder(error)
    if place is not None:
        save_table(table, place)
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
    return read_table(paths[0], "the table of the data folder, coarser than our own")


@functools.lru_cache(maxsize=1)
def _homogeneous(key: str) -> TravelTimes:
    """Straight rays: ``sqrt(R^2 + r^2 - 2 R r cos Delta) / v`` with ``r = R - depth``."""
    distances, depths = _axis(180.0, 0.1), _axis(DEEPEST, 5.0)
    r = RADIUS - depths[:, None]
    square = RADIUS**2 + r.square() - 2 * RADIUS * r * torch.deg2rad(distances).cos()
    return TravelTimes(
        "homogeneous", "straight rays at 9 km/s", distances, depths, square.clamp(min=0).sqrt() / 9.0
    )


EARTHS: dict[str, Callable[[str], TravelTimes]] = {"ak135": _ak135, "homogeneous": _homogeneous}


def _axis(last: float, step: float) -> Tensor:
    return torch.linspace(0.0, last, round(last / step) + 1, dtype=torch.float64)


def _place(axis: Tensor, wanted: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns the interval of an axis in which each number lies, and where in it."""
    low, high = float(axis[0]), float(axis[-1])
    if wanted.numel() and not bool(((wanted >= low) & (wanted <= high)).all()):
        outside = wanted[~((wanted >= low) & (wanted <= high))][0]
        raise InputError(f"{name} must lie between {low:g} and {high:g}; received {float(outside):g}")
    index = (torch.searchsorted(axis, wanted.contiguous()) - 1).clamp(0, len(axis) - 2)
    return index, (wanted - axis[index]) / (axis[index + 1] - axis[index])


def _curve(phase: Any, model: Any, angles: np.ndarray) -> np.ndarray:
    """Computes the earliest time at growing distances from one depth."""
    best = np.full(len(angles), np.inf)
    for name in PHASES:
        rays = phase(name, model)
        distance, time, slope = (np.asarray(part, dtype=float) for part in (rays.dist, rays.time, rays.ray_param))
        for low, high in _pieces(distance):
            first = np.searchsorted(angles, distance[low] - 1e-12, "left")
            last = np.searchsorted(angles, distance[high] + 1e-12, "right")
            if last > first:
                values = _hermite(angles[first:last], *(part[[low, high]] for part in (distance, time, slope)))
                best[first:last] = np.minimum(best[first:last], values)
    return best


def _pieces(distance: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields neighbouring rays, the nearer one first."""
    for left in range(len(distance) - 1):
        if distance[left] < distance[left + 1]:
            yield left, left + 1
        elif distance[left] > distance[left + 1]:
            yield left + 1, left


def _hermite(at: np.ndarray, ends: np.ndarray, values: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Evaluates the cubic with given values and slopes at both ends."""
    width = ends[1] - ends[0]
    s = (at - ends[0]) / width
    rise = values[1] - values[0]
    inner = (1 - s) * (width * slopes[0] - rise) - s * (width * slopes[1] - rise)
    result: np.ndarray = values[0] + s * rise + s * (1 - s) * inner
    return result
