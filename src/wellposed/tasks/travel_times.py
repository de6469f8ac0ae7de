"""Travel times of the first P wave: the ak135 earth as a table, and a homogeneous one in closed form."""

import functools
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InputError, MissingExtraError, unknown_name
from wellposed.tasks.cache import DataFile, MissingDataError, cache_folder, data_folder, fetch
from wellposed.tasks.travel_file import VERSION, read_plain_table, read_table, save_table
from wellposed.tasks.travel_rays import Earth, tabulate
from wellposed.tasks.travel_table import TravelTimes, slowness

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


def build_ak135(distances: Tensor | None = None, depths: Tensor | None = None) -> TravelTimes:
    """Tabulates the first P wave by TauP, branch by branch; see `travel_rays`.

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
        torch.as_tensor(np.asarray(part)) for part in tabulate(Earth("ak135"), wanted.numpy(), levels.tolist())
    )
    return TravelTimes("ak135", SOURCE, wanted, rows, slowness(direct, wanted, rows), turned, reach)


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
        return read_table(place, SOURCE)
    try:
        table = build_ak135()
    except MissingExtraError as error:
        return _from_data_folder(error)
    if place is not None:
        save_table(table, place)
        table = read_table(place, SOURCE)  # rounded, as every later process reads it
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
    """Returns an axis whose step changes: pairs of where and how wide."""
    parts = [
        first + step * torch.arange(round((last - first) / step), dtype=torch.float64)
        for (first, step), (last, _) in pairwise(steps)
    ]
    return torch.cat([*parts, torch.tensor([steps[-1][0]], dtype=torch.float64)])
