"""Travel-time tables as files: .npz without pickled objects."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import FileFormatError
from wellposed.tasks.arrays import read_arrays
from wellposed.tasks.travel_table import TravelTimes, slowness

VERSION = 2  # of the table in the cache; a change of phases, grid or method raises it
PARTS = ("distances", "depths", "direct", "turned", "reach")
LARGEST = 1 << 30  # bytes of all parts
REMEDY = "delete it, so that it is computed or fetched again"


def save_table(table: TravelTimes, path: Path) -> None:
    """Writes a table in one piece: whoever reads sees the whole file or none."""
    shape = table.direct.shape
    turned = torch.zeros(0, *shape) if table.turned is None else table.turned
    reach = torch.tensor([0.0, 180.0]).view(2, 1, 1).expand(2, 1, shape[0]) if table.reach is None else table.reach
    tables = {"direct": table.direct.float(), "turned": turned.float(), "reach": reach.double()}
    axes = {"distances": table.distances.double(), "depths": table.depths.double()}
    arrays: dict[str, Any] = {name: part.numpy() for name, part in (axes | tables).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            np.savez_compressed(stream, version=np.array(VERSION), **arrays)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_table(path: str | os.PathLike[str], source: str) -> TravelTimes:
    """Reads a table of ak135 that `save_table` has written.

    Raises:
        FileFormatError: the file is damaged, of another version, or its parts do not go together.
    """
    version, *parts = _read(path, ("version", *PARTS))
    if version.tolist() != [VERSION]:
        raise FileFormatError(
            f"{os.fspath(path)!r} must be a travel-time table of version {VERSION}; received version "
            f"{version.flatten()[0]:g}; {REMEDY}"
        )
    distances, depths, direct, turned, reach = parts
    grid = (len(depths), len(distances))
    fits = direct.shape == grid and turned.shape[1:] == grid and reach.shape == (2, 1 + len(turned), grid[0])
    _check(path, distances, depths, fits, parts)
    return TravelTimes("ak135", source, distances, depths, direct, turned, reach)


def read_plain_table(path: str | os.PathLike[str], source: str) -> TravelTimes:
    """Reads a table from .npz with dist_deg (D,), depth_km (Z,) and time_s (Z, D), the first arrivals of ak135.

    Raises:
        FileFormatError: the file is damaged, or lacks one of the three, or their shapes do not go together.
    """
    distances, depths, seconds = parts = _read(path, ("dist_deg", "depth_km", "time_s"))
    _check(path, distances, depths, seconds.shape == (len(depths), len(distances)), parts)
    return TravelTimes("ak135", source, distances, depths, slowness(seconds, distances, depths))


def _read(path: str | os.PathLike[str], names: tuple[str, ...]) -> list[Tensor]:
    try:
        stored = read_arrays(path, LARGEST)
        return [torch.from_numpy(np.atleast_1d(stored[name])).double() for name in names]
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise FileFormatError(f"{os.fspath(path)!r} is no travel-time table ({error}); {REMEDY}") from error


def _check(
    path: str | os.PathLike[str], distances: Tensor, depths: Tensor, fits: bool, parts: list[Tensor]
) -> None:
    name = os.fspath(path)
    if not fits or distances.dim() != 1 or depths.dim() != 1 or min(len(distances), len(depths)) < 2:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise FileFormatError(f"{name!r} has shapes that do not fit: {shapes}; {REMEDY}")
    growing = bool((distances.diff() > 0).all() and (depths.diff() >= 0).all())
    if not growing or not all(bool(torch.isfinite(part).all()) for part in parts):
        raise FileFormatError(f"{name!r} has axes that do not grow or times that are no numbers; {REMEDY}")
