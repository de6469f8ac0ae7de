"""The minute bars that a data folder may hold: CSI index futures, two short windows of AMC, and your own."""

import functools
import io
import json
import zlib
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellposed.data.cache import DataFile, MissingDataError, data_folder, fetch
from wellposed.errors import FileFormatError
from wellposed.models.io.archives import open_unpacked
from wellposed.models.io.arrays import read_arrays
from wellposed_lab.experiments.volatility.bars import CFFEX, MINUTE, BarCounts, Bars, clean, read_bars

FUTURES = DataFile(
    "minute_bars/cffex_IF_IC_1min_2016_2022.npz",
    "3c37efc2d7e3906945902739269305da3bba68c19ac344dfafa727e1f0b97e96",
)
JANUARY = DataFile(
    "minute_bars/meme6_1min_2021-01-14_27.csv.gz",
    "0806254333eaf449ee1540552ebb806e0901e5cbf27145d8e03876c42a08d9e1",
)
MARCH = DataFile(
    "minute_bars/AMC_1min_2022-03-14_04-18.csv.gz",
    "2b1299ec4ee96b59a8d32f14bf5afb5b6d9135150a9f2b1bdb36caf42ad77460",
)
DAILY = DataFile(
    "minute_bars/AMC_daily_2013_2021.csv.gz",
    "257a9144c7ccda323e760cb2834f4540f0acdaded750dd46b9fbb57dbba186ed",
)
OWN = "minute_bars/AMC_1min_2015_2021"  # with an ending of ENDINGS, and .json for the arguments of read_bars
ENDINGS = (".parquet", ".csv.gz", ".csv")
REMEDY = (
    "minute bars are sold by market-data vendors and are not downloaded here: set WELLPOSED_DATA to a folder and "
    f"put your own bars of AMC there as {OWN}.csv (columns time and vwap) or .parquet; without any bars the suite "
    "runs on made-up ones"
)


def is_here(*files: DataFile) -> bool:
    """Returns whether all files are in the data folder or the cache; a damaged one raises a ChecksumError."""
    try:
        fetch("minute bars", [list(files)], "", download=False)
    except MissingDataError:
        return False
    return True


def _paths(*files: DataFile) -> list[Path]:
    try:
        return fetch("minute bars", [list(files)], "", download=False)[1]
    except MissingDataError as error:
        names = ", ".join(file.path for file in files)
        raise MissingDataError(f"{names} is not in the data folder; {REMEDY}") from error


@functools.lru_cache(maxsize=2)
def futures(symbol: str) -> Bars:
    """Returns the main contract of the future on the CSI 300 ("IF") or CSI 500 ("IC"), 2016 to February 2022.

    Prices are VWAPs scaled day by day onto the roll-adjusted contract; a minute without a trade has none.
    """
    (path,) = _paths(FUTURES)
    try:
        arrays = read_arrays(path)
        column = arrays["symbols"].tolist().index(symbol)
        ends = np.datetime64("2016-01-01T00:00") + arrays["minutes_since_2016"].astype("timedelta64[m]")
        prices = arrays["vwap_adj"][:, column].astype(np.float64)
    except (KeyError, ValueError, OSError) as error:
        raise FileFormatError(f"{path} is damaged ({error}); fetch it again") from error
    traded = ~np.isnan(prices)
    counts = BarCounts(read=len(prices), untraded=int((~traded).sum()))
    return clean(Bars(f"{symbol} of {path.name}", ends[traded] - MINUTE, prices[traded], counts=counts), CFFEX)


@functools.lru_cache(maxsize=1)
def squeeze() -> Bars:
    """Returns AMC from 14 to 27 January 2021 and from 14 March to 18 April 2022, in regular hours.

    Prices are typical ones, the mean of high, low and close: the files have no VWAP. The first file names a bar
    after the end of its minute, the second after its beginning.
    """
    january, march = _paths(JANUARY, MARCH)
    windows = read_bars(january, symbol="AMC", label="end"), read_bars(march)
    fields = ("read", "outside", "repeated", "untraded", "missing", "filled", "days")
    counts = BarCounts(*(sum(getattr(window.counts, field) for window in windows) for field in fields))
    minutes, prices = (
        np.concatenate([getattr(window, name) for window in windows]) for name in ("minutes", "prices")
    )
    name = " and ".join(window.name for window in windows)
    return replace(windows[0], name=name, minutes=minutes, prices=prices, counts=counts)


@functools.lru_cache(maxsize=1)
def amc_daily() -> tuple[NDArray[np.datetime64], NDArray[np.float64]]:  # (D,), (D, 3)
    """Returns the days of AMC from December 2013 to October 2021, with high, low and close."""
    (path,) = _paths(DAILY)
    try:
        with io.TextIOWrapper(open_unpacked(path), encoding="utf-8") as stream:
            names = stream.readline().strip().split(",")
            lines = [line.strip().split(",") for line in stream]
        columns = [names.index(name) for name in ("High", "Low", "Close")]
        days = np.array([line[names.index("Date")] for line in lines], "datetime64[D]")
        return days, np.array([[float(line[column]) for column in columns] for line in lines])
    except (ValueError, IndexError, EOFError, OSError, zlib.error) as error:
        raise FileFormatError(f"{path} is damaged ({error}); fetch it again") from error


@dataclass(frozen=True)
class OwnFile:
    """A file of your own, known by size and time of change, with the arguments of `read_bars` beside it."""

    path: Path
    settings: Path | None = None

    def bars(self) -> Bars:
        """Reads the file."""
        status, settings = self.path.stat(), self.settings and self.settings.read_text(encoding="utf-8")
        return _own(self, status.st_size, status.st_mtime_ns, settings)

    def arguments(self) -> dict[str, Any]:
        """Returns what the settings file says: zone, label, symbol, time_format, gaps, splits."""
        if self.settings is None:
            return {}
        try:
            given = json.loads(self.settings.read_text(encoding="utf-8"))
            splits = [(date.fromisoformat(day), float(ratio)) for day, ratio in given.pop("splits", [])]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise FileFormatError(
                f"{self.settings} must hold arguments of read_bars as JSON, such as "
                f'{{"zone": "UTC", "splits": [["2023-08-24", 0.1]]}}; {error}'
            ) from error
        known = ("zone", "label", "symbol", "time_format", "gaps")
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise FileFormatError(
                f"{self.settings}: unknown {', '.join(unknown)}; valid: splits, {', '.join(known)}"
            )
        return {**given, "splits": splits}


def own_file() -> OwnFile | None:
    """Returns the bars of AMC that a user has put into the data folder; None where there are none."""
    folder = data_folder()
    if folder is None:
        return None
    settings = folder / f"{OWN}.json"
    paths = [folder / f"{OWN}{ending}" for ending in ENDINGS if (folder / f"{OWN}{ending}").is_file()]
    return OwnFile(paths[0], settings if settings.is_file() else None) if paths else None


@functools.lru_cache(maxsize=1)
def _own(file: OwnFile, size: int, modified: int, settings: str | None) -> Bars:
    """Reads a file again only if it has changed; all arguments but the first are keys of the cache."""
    return read_bars(file.path, **file.arguments())
