"""Real P-wave picks of the ISC Bulletin: what stations recorded, and how ak135 compares."""

import csv
import gzip
import io
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.data.cache import DataFile, fetch
from wellposed.errors import FileFormatError
from wellposed.models.io.archives import open_unpacked
from wellposed_lab.experiments.earthquake.geometry import Subnet, distance
from wellposed_lab.experiments.earthquake.task import DEPTHS, FARTHEST, NEAREST
from wellposed_lab.experiments.earthquake.travel_times import TravelTimes

ISC_PICKS = DataFile(
    "earthquakes/isc_p_picks.csv.gz", "46c66cdc2055715cc139d6cb973d59fad0d5f43c0686bdb06e3aa64f2a994e99", 137479
)
COLUMNS = ("ev_lat", "ev_lon", "ev_depth_km", "sta_lat", "sta_lon", "tt_s")  # numbers that every pick needs
OUTLIER = 10.0  # seconds; picks further from ak135 are mistaken phases or clocks, not earthquakes


@dataclass(frozen=True, eq=False)
class Picks:
    """First P arrivals, one a row.

    Args:
        event: number of the event of each pick, in the order of the file, ``(N,)``.
        station: name of each station.
        latitude, longitude, depth: of the event, degrees and km, ``(N,)``.
        station_latitude, station_longitude: in degrees, ``(N,)``.
        seconds: travel time, ``(N,)``.
    """

    event: Tensor
    station: tuple[str, ...]
    latitude: Tensor
    longitude: Tensor
    depth: Tensor
    station_latitude: Tensor
    station_longitude: Tensor
    seconds: Tensor

    @property
    def distance(self) -> Tensor:  # (N,)
        """Degrees between event and station."""
        return distance(self.latitude, self.longitude, self.station_latitude, self.station_longitude)

    def chosen(self, rows: Tensor) -> "Picks":
        """Returns some of the picks, by number or mask."""
        numbers = torch.nonzero(rows)[:, 0] if rows.dtype == torch.bool else rows
        return Picks(
            self.event[numbers],
            tuple(self.station[j] for j in numbers.tolist()),
            self.latitude[numbers],
            self.longitude[numbers],
            self.depth[numbers],
            self.station_latitude[numbers],
            self.station_longitude[numbers],
            self.seconds[numbers],
        )


def isc_picks() -> Picks:
    """Returns the picks of the data folder (ISC, doi 10.31905/D808B830).

    Raises:
        MissingDataError: there are none; the message says how to get them.
    """
    hint = "the suites run without it; only the comparison with real picks is left out"
    _, paths = fetch("ISC picks", [[ISC_PICKS]], hint)
    return read_picks(paths[0])


def read_picks(path: str | os.PathLike[str]) -> Picks:
    """Reads picks from comma-separated values with a header, gzipped if the name ends with .gz.

    Needed are the columns event, sta, ev_lat, ev_lon, ev_depth_km, sta_lat, sta_lon (degrees, km) and tt_s
    (seconds); rows in which one of the numbers is empty are left out. Of several picks of an event at a station
    the earliest is kept.

    Raises:
        FileFormatError: a column is missing or a cell is not a number; the message names column and line.
    """
    name = os.fspath(path)
    try:
        with io.TextIOWrapper(open_unpacked(path), encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            missing = [column for column in ("event", "sta", *COLUMNS) if column not in (reader.fieldnames or ())]
            if missing:
                raise FileFormatError(
                    f"{name!r} lacks the columns {', '.join(missing)}; it has {', '.join(reader.fieldnames or ())}"
                )
            rows = [(row["event"], row["sta"], _numbers(row, name, reader.line_num)) for row in reader]
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error, csv.Error) as error:
        raise FileFormatError(f"{name!r} is damaged or no table: {error}; get the file again") from error
    return _picks([row for row in rows if not any(math.isnan(value) for value in row[2])], name)


def residuals(picks: Picks, times: TravelTimes) -> Tensor:  # (N,)
    """Computes observed minus predicted seconds; NaN where the table does not reach."""
    away, depth = picks.distance, picks.depth
    inside = (depth >= times.depths[0]) & (depth <= times.depths[-1]) & (away <= times.distances[-1])
    late = torch.full_like(away, torch.nan)
    late[inside] = picks.seconds[inside] - times(away[inside], depth[inside])
    return late


def subnets(picks: Picks, times: TravelTimes, stations: int, generator: torch.Generator) -> Subnet | None:
    """Makes one sample of every event with enough stations at 1 to 30 degrees; None if there is no such event.

    The stations are drawn at random, the first is the anchor. Picks that differ from ak135 by more than ten
    seconds are left out.
    """
    away, late = picks.distance, residuals(picks, times)
    deep = (picks.depth >= DEPTHS[0]) & (picks.depth <= DEPTHS[1])
    usable = picks.chosen((away >= NEAREST) & (away <= FARTHEST) & deep & (late.abs() <= OUTLIER))
    rows = []
    for event in usable.event.unique().tolist():
        own = torch.nonzero(usable.event == event)[:, 0]
        if len(own) >= stations:
            rows.append(own[torch.randperm(len(own), generator=generator)[:stations]])
    return _subnet(usable, torch.stack(rows)) if rows else None


def _subnet(picks: Picks, rows: Tensor) -> Subnet:
    first = rows[:, 0]
    longitude = picks.longitude[first] % 360
    turn = (picks.station_longitude[rows] - longitude[:, None] + 180) % 360 - 180
    return Subnet(
        longitude,
        picks.latitude[first],
        picks.depth[first],
        longitude[:, None] + turn,
        picks.station_latitude[rows],
        picks.seconds[rows],
    )


def _numbers(row: dict[str, str], name: str, line: int) -> list[float]:
    values = []
    for column in COLUMNS:
        text = (row[column] or "").strip()
        try:
            values.append(float(text) if text else math.nan)
        except ValueError as error:
            raise FileFormatError(
                f"{name!r} must have numbers in {column}; received {text!r} in line {line}"
            ) from error
    return values


def _picks(rows: Sequence[tuple[str, str, list[float]]], name: str) -> Picks:
    earliest: dict[tuple[str, str], list[float]] = {}
    for event, station, values in rows:
        known = earliest.setdefault((event, station), values)
        if values[-1] < known[-1]:
            earliest[event, station] = values
    if not earliest:
        raise FileFormatError(f"{name!r} has no complete pick; it needs numbers in {', '.join(COLUMNS)}")
    numbers = {event: number for number, event in enumerate(dict.fromkeys(event for event, _ in earliest))}
    latitude, longitude, depth, station_latitude, station_longitude, seconds = torch.tensor(
        list(earliest.values()), dtype=torch.float64
    ).T
    return Picks(
        torch.tensor([numbers[event] for event, _ in earliest]),
        tuple(station for _, station in earliest),
        latitude,
        longitude,
        depth,
        station_latitude,
        station_longitude,
        seconds,
    )
