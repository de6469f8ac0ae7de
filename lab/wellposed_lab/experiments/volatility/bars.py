"""Minute bars: prices by minute on the clock of an exchange, with everything odd counted or named.

`read_table` reads tables of minute bars, CSV or Parquet, cell by cell, and says where a cell is wrong. An
`Exchange` has a time zone, sessions and holidays (`NYSE`, `CFFEX`). `read_bars` returns `Bars` with their
`BarCounts`; `clean` adjusts them for splits, and counts or fills missing minutes.
"""

import csv
import gzip
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any, Literal, TextIO
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import FileFormatError, InputError, require

ALIASES = {
    "time": ("time", "timestamp", "datetime", "date", "t", "window_start", "__index_level_0__", "index"),
    "symbol": ("symbol", "ticker", "sym"),
    "vwap": ("vwap", "vw", "weighted_average", "volume_weighted_average_price"),
    "open": ("open", "o"),
    "high": ("high", "h"),
    "low": ("low", "l"),
    "close": ("close", "c"),
    "volume": ("volume", "v", "vol"),
    "amount": ("amount", "turnover", "money", "value"),
}
LARGEST, LONGEST_LINE, MOST_ROWS = 1 << 31, 1 << 20, 50_000_000
TICKS = (
    (11, 1),
    (14, 10**3),
    (17, 10**6),
    (20, 10**9),
)  # digits below which a time since 1970 has this many ticks a second


@dataclass(frozen=True)
class BarTable:
    """The cells of a file of bars, by what they mean.

    Args:
        path: of the file, for messages.
        unit: what `numbers` count: "line" in a CSV file, "row" in a Parquet file.
        numbers: of the line or row of each bar.
        columns: the cells by meaning: time, symbol, vwap, open, high, low, close, volume, amount.
        names: how the file calls these columns.
    """

    path: str
    unit: str
    numbers: Sequence[int]
    columns: dict[str, list[Any]]
    names: dict[str, str]

    def error(self, row: int, meaning: str, problem: str, remedy: str) -> FileFormatError:
        """Returns an error that names the file, the line and what to do."""
        column = f", column {self.names[meaning]!r}" if meaning in self.names else ""
        return FileFormatError(f"{self.path}, {self.unit} {self.numbers[row]}{column}: {problem}; {remedy}")

    def only(self, symbol: str | None) -> "BarTable":
        """Returns the bars of one symbol; None is enough where the file has one."""
        if "symbol" not in self.columns:
            return self
        known = sorted({str(cell) for cell in self.columns["symbol"]})
        if symbol is None and len(known) == 1:
            return self
        if symbol not in known:
            raise InputError(
                f"{self.path} has the symbols {', '.join(known)}; pass one as symbol=; got {symbol!r}"
            )
        rows = [row for row, cell in enumerate(self.columns["symbol"]) if str(cell) == symbol]
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return BarTable(self.path, self.unit, [self.numbers[row] for row in rows], columns, self.names)

    def floats(self, meaning: str) -> NDArray[np.float64]:  # (N,)
        """Returns a column as numbers; empty cells are NaN."""
        values = np.empty(len(self.numbers))
        for row, cell in enumerate(self.columns[meaning]):
            try:
                values[row] = math.nan if cell is None or cell == "" else float(cell)
            except (TypeError, ValueError):
                raise self.error(row, meaning, f"{cell!r} is not a number", "correct or delete the line") from None
        return values

    def moments(self, time_format: str | None = None) -> list[datetime]:
        """Returns the times, with or without a zone as the file has them; whole numbers count from 1970 in UTC."""
        times = []
        for row, cell in enumerate(self.columns["time"]):
            try:
                times.append(_moment(cell, time_format))
            except (TypeError, ValueError, OverflowError, OSError, StopIteration):
                wanted = time_format or "2021-01-27 09:30:00 or 2021-01-27T14:30:00Z"
                remedy = f"write times like {wanted}, or pass time_format="
                raise self.error(row, "time", f"{cell!r} is not a time", remedy) from None
        return times


def read_table(path: str | os.PathLike[str]) -> BarTable:
    """Reads a file of bars: .csv, .csv.gz or .parquet.

    Args:
        path: the file; columns may have any order and any of the usual names.

    Raises:
        FileFormatError: it is empty, damaged or lacks columns; the message says which and where.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "bars.csv"
        >>> _ = path.write_text("Timestamp,VW\\n2021-01-27 09:30,19.5\\n")
        >>> read_table(path).columns
        {'time': ['2021-01-27 09:30'], 'vwap': ['19.5']}
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(
            f"there is no file {os.fspath(path)!r}; pass the path of a .csv, .csv.gz or .parquet file"
        )
    name = file.name.lower()
    if name.endswith((".parquet", ".pq")):
        return _read_parquet(file)
    if name.endswith((".csv", ".csv.gz", ".txt")):
        return _read_csv(file)
    raise InputError(f"bars are read from .csv, .csv.gz or .parquet files; received {os.fspath(path)!r}")


def _read_csv(path: Path) -> BarTable:
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(_lines(stream, path))
            header = next(reader, None)
            lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path} is cut off or no CSV file ({error}); fetch it again") from error
    if header is None or not lines:
        raise FileFormatError(f"{path} is empty; it must have a line of column names and a line for every bar")
    for number, row in lines:
        if len(row) != len(header):
            raise FileFormatError(
                f"{path}, line {number}: {len(row)} cells instead of {len(header)}; the line is cut off or has a "
                "comma too many: correct or delete it"
            )
    cells = {name: [row[column].strip() for _, row in lines] for column, name in enumerate(header)}
    return _table(str(path), "line", [number for number, _ in lines], cells)


def _lines(stream: TextIO, path: Path) -> Iterator[str]:
    """Yields lines of a file whose unpacked size nobody knows beforehand."""
    left = LARGEST
    while line := stream.readline(LONGEST_LINE):
        left -= len(line)
        if left < 0 or len(line) >= LONGEST_LINE:
            raise FileFormatError(
                f"{path} has a line of more than {LONGEST_LINE} letters, or more than {LARGEST} letters in all; "
                "split the file by symbol or year"
            )
        yield line


def _read_parquet(path: Path) -> BarTable:
    parquet = require("pyarrow.parquet", extra="lab")
    try:
        with parquet.ParquetFile(path) as file:
            about = file.metadata
            size = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
            if not 0 <= about.num_rows <= MOST_ROWS or not 0 <= size <= LARGEST:
                raise ValueError(f"it declares {about.num_rows} rows and {size} bytes, too many for bars")
            table = file.read()
        cells = {name: table.column(name).to_pylist() for name in table.column_names}
    except (OSError, ValueError) as error:  # what pyarrow raises derives from these
        reason = str(error).partition("\n")[0]
        raise FileFormatError(f"{path} is cut off or no Parquet file ({reason}); fetch it again") from error
    if table.num_rows == 0:
        raise FileFormatError(f"{path} is empty; it must have a row for every bar")
    return _table(str(path), "row", range(1, table.num_rows + 1), cells)


def _table(path: str, unit: str, numbers: Sequence[int], cells: dict[str, list[Any]]) -> BarTable:
    """Assigns columns their meaning by their names."""
    lower = {name.strip().lower(): name for name in cells}
    matches = {meaning: [lower[name] for name in names if name in lower] for meaning, names in ALIASES.items()}
    names = {meaning: known[0] for meaning, known in matches.items() if known}
    priced = "vwap" in names or {"amount", "volume"} <= names.keys() or {"high", "low", "close"} <= names.keys()
    if "time" not in names or not priced:
        missing = (
            "'time'" if "time" not in names else "'vwap', or 'amount' and 'volume', or 'high', 'low' and 'close'"
        )
        raise FileFormatError(
            f"{path} has the columns {', '.join(map(repr, cells))} and lacks {missing}; name the columns in its "
            "first line"
        )
    return BarTable(path, unit, numbers, {meaning: cells[name] for meaning, name in names.items()}, names)


def _moment(cell: Any, time_format: str | None) -> datetime:
    if isinstance(cell, datetime):
        return cell
    if time_format is not None:
        return datetime.strptime(str(cell), time_format)
    if isinstance(cell, int) or (str(cell).isdigit() and len(str(cell)) > 8):  # 20210127 is a day
        ticks = next(ticks for digits, ticks in TICKS if abs(int(cell)) < 10**digits)
        return datetime.fromtimestamp(int(cell) // ticks, UTC)
    return datetime.fromisoformat(str(cell))


Label = Literal["start", "end"]
Session = tuple[time, time]  # from, until


def weekday(day: date) -> bool:
    """Returns whether a day is no Saturday or Sunday."""
    return day.weekday() < 5


def usual(day: date) -> time | None:
    """Returns None: no day closes early."""
    return None


@dataclass(frozen=True)
class Exchange:
    """When an exchange trades.

    Args:
        name: of the exchange.
        zone: of its clock, as in the IANA data base.
        sessions: of a day, in order; between two of them is a break, in which nothing is traded.
        is_open: whether it trades on a day.
        early: when it closes on a day that ends early, else None.

    Example:
        >>> NYSE.contains(datetime(2021, 1, 27, 9, 30)), NYSE.contains(datetime(2021, 1, 27, 16, 0))
        (True, False)
        >>> CFFEX.contains(datetime(2021, 1, 27, 12, 0))
        False
    """

    name: str
    zone: str
    sessions: tuple[Session, ...]
    is_open: Callable[[date], bool] = weekday
    early: Callable[[date], time | None] = usual

    def __post_init__(self) -> None:
        zone_of(self.zone)
        ends = [edge for session in self.sessions for edge in session]
        if not ends or ends != sorted(ends) or len(set(ends)) < len(ends):
            raise InputError(f"sessions must follow one another without overlap; received {self.sessions}")

    def contains(self, moment: datetime) -> bool:
        """Returns whether a minute, by its beginning on the exchange's clock, belongs to a session."""
        return any(begin <= moment.time() < end for begin, end in self.hours(moment.date()))

    def hours(self, day: date) -> tuple[Session, ...]:
        """Returns the sessions of a day; none on a holiday.

        Example:
            >>> NYSE.hours(date(2021, 11, 26))  # the day after Thanksgiving
            ((datetime.time(9, 30), datetime.time(13, 0)),)
        """
        if not self.is_open(day):
            return ()
        close = self.early(day)
        if close is None:
            return self.sessions
        return tuple((begin, min(end, close)) for begin, end in self.sessions if begin < close)

    def minutes(self, day: date) -> int:
        """Returns how many minutes a day trades.

        Example:
            >>> CFFEX.minutes(date(2021, 1, 27)), NYSE.minutes(date(2021, 12, 25))
            (240, 0)
        """
        return sum(60 * (end.hour - begin.hour) + end.minute - begin.minute for begin, end in self.hours(day))


def zone_of(name: str) -> ZoneInfo:
    """Returns a time zone, or says what its name should look like.

    Example:
        >>> zone_of("New York")
        Traceback (most recent call last):
            ...
        wellposed.errors.InputError: unknown time zone 'New York'; use a name such as 'America/New_York' or 'UTC'
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InputError(f"unknown time zone {name!r}; use a name such as 'America/New_York' or 'UTC'") from error


def us_open(day: date) -> bool:
    """Returns whether the exchanges of the United States trade; single days of mourning or storm are not known.

    Example:
        >>> us_open(date(2021, 4, 2)), us_open(date(2021, 6, 18)), us_open(date(2022, 6, 20))  # Good Friday first
        (False, True, False)
    """
    return weekday(day) and day not in _us_holidays(day.year)


def us_early(day: date) -> time | None:
    """Returns 13:00 for the days before or after a holiday that end there."""
    thanksgiving = _nth(day.year, 11, 3, 4)
    eve = (day.month, day.day) in ((7, 3), (12, 24)) and day.weekday() < 4
    return time(13) if eve or day == thanksgiving + timedelta(1) else None


def _us_holidays(year: int) -> set[date]:
    fixed = [date(year, 7, 4), date(year, 12, 25), *([date(year, 6, 19)] if year >= 2022 else [])]
    moved = {_observed(day) for day in fixed}
    new_year = date(year, 1, 1)
    moved |= {new_year + timedelta(1)} if new_year.weekday() == 6 else {new_year}  # a Saturday is not moved
    mondays = {_nth(year, 1, 0, 3), _nth(year, 2, 0, 3), _nth(year, 9, 0, 1), _last_monday_of_may(year)}
    return moved | mondays | {_nth(year, 11, 3, 4), _easter(year) - timedelta(2)}


def _observed(day: date) -> date:
    """Moves a Saturday to Friday and a Sunday to Monday."""
    return day + timedelta({5: -1, 6: 1}.get(day.weekday(), 0))


def _nth(year: int, month: int, weekday: int, count: int) -> date:
    first = date(year, month, 1)
    return first + timedelta((weekday - first.weekday()) % 7 + 7 * (count - 1))


def _last_monday_of_may(year: int) -> date:
    last = date(year, 5, 31)
    return last - timedelta(last.weekday())


def _easter(year: int) -> date:
    """Computes Easter Sunday by the Gregorian rule (Meeus)."""
    a, (b, c) = year % 19, divmod(year, 100)
    d, e = divmod(b, 4)
    g = (8 * b + 13) // 25
    h = (19 * a + b - d - g + 15) % 30
    i, k = divmod(c, 4)
    m = (32 + 2 * e + 2 * i - h - k) % 7
    n = (a + 11 * h + 22 * m) // 451
    month, day = divmod(h + m - 7 * n + 114, 31)
    return date(year, month, day + 1)


NYSE = Exchange("NYSE", "America/New_York", ((time(9, 30), time(16)),), us_open, us_early)
CFFEX = Exchange("CFFEX", "Asia/Shanghai", ((time(9, 30), time(11, 30)), (time(13), time(15))))


Gaps = Literal["keep", "fill"]
Split = tuple[date, float]  # from which day on, new shares for an old one
MINUTE = np.timedelta64(1, "m")


@dataclass(frozen=True)
class BarCounts:
    """What was found in a file.

    Attributes:
        read: bars of the symbol.
        outside: bars outside the sessions, left out.
        repeated: bars that say again what another one said, left out.
        untraded: bars without a price because nothing was traded, left out.
        missing: minutes of the sessions, on days that have bars, without one.
        filled: how many of these were given the price before them.
        days: with at least one bar.
    """

    read: int = 0
    outside: int = 0
    repeated: int = 0
    untraded: int = 0
    missing: int = 0
    filled: int = 0
    days: int = 0

    def __str__(self) -> str:
        counts = [
            f"{self.days:,} days",
            f"{self.read:,} bars read",
            f"{self.outside:,} outside the sessions",
            f"{self.repeated:,} repeated",
            f"{self.untraded:,} without a trade",
            f"{self.missing:,} minutes missing" + (f" of which {self.filled:,} filled" if self.filled else ""),
        ]
        return ", ".join(counts)


@dataclass(frozen=True)
class Bars:
    """Prices by minute, in order.

    Args:
        name: what they are of, for records.
        minutes: the beginning of each minute on the clock of the exchange.
        prices: the volume-weighted average price of that minute, or its substitute.
        price: what the prices are: "vwap", "amount / volume" or "(high + low + close) / 3".
        counts: what was found in the file.
    """

    name: str
    minutes: NDArray[np.datetime64]  # (N,)
    prices: NDArray[np.float64]  # (N,)
    price: str = "vwap"
    counts: BarCounts = BarCounts()

    def __str__(self) -> str:
        first, last = (str(moment.astype("datetime64[D]")) for moment in (self.minutes[0], self.minutes[-1]))
        return f"{self.name}, {first} to {last}, price {self.price}; {self.counts}"

    def between(self, first: str | date, last: str | date) -> "Bars":
        """Returns the bars of the days from the first to the last, both included."""
        days = self.minutes.astype("datetime64[D]")
        within = (days >= np.datetime64(first, "D")) & (days <= np.datetime64(last, "D"))
        return replace(self, minutes=self.minutes[within], prices=self.prices[within])


def read_bars(
    path: str | os.PathLike[str],
    exchange: Exchange = NYSE,
    *,
    symbol: str | None = None,
    zone: str | None = None,
    label: Label = "start",
    time_format: str | None = None,
    splits: Sequence[Split] = (),
    gaps: Gaps = "keep",
    multiplier: float = 1.0,
) -> Bars:
    """Reads minute bars from a CSV or Parquet file.

    The file has a column of times and either `vwap`, or `amount` and `volume` (the price is their ratio), or
    `high`, `low` and `close` (their mean, the typical price, is used); the first that is there is taken. Bars
    outside the sessions of the exchange are left out, so is one that repeats another; two that contradict each
    other are an error, and so are times out of order.

    Args:
        path: a .csv, .csv.gz or .parquet file (the latter needs the extra "lab").
        exchange: whose sessions and clock count.
        symbol: which one, where the file has several.
        zone: of times that are written without one; None is the zone of the exchange.
        label: whether a bar is named after the beginning or the end of its minute.
        time_format: of the times, as `datetime.strptime` has it; None is ISO 8601, or seconds, milli-, micro- or
            nanoseconds since 1970.
        splits: prices before each day are divided by its ratio: ``(date(2020, 8, 31), 4.0)`` is four new shares
            for an old one.
        gaps: "keep" leaves missing minutes out, "fill" repeats the price before them within the session.
        multiplier: of a futures contract: amount over volume is divided by it.

    Raises:
        FileFormatError: the file is malformed; the message says where and what to do.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "bars.csv"
        >>> _ = path.write_text("time,vwap\\n2021-01-27T14:29:00Z,19.1\\n2021-01-27T14:30:00Z,19.5\\n")
        >>> bars = read_bars(path)
        >>> bars.minutes.tolist(), bars.prices.tolist(), bars.counts.outside
        ([datetime.datetime(2021, 1, 27, 9, 30)], [19.5], 1)
    """
    table = read_table(path).only(symbol)
    prices, kind = _prices(table, multiplier)
    minutes, inside = _minutes(table, exchange, zone, label, time_format)
    if not inside.any():
        raise FileFormatError(
            f"{table.path}: none of {len(inside)} bars lies in a session of {exchange.name}, the first is at "
            f"{minutes[0]} of its clock; pass the right exchange=, zone= or label="
        )
    _require_prices(table, prices, inside)
    rows, repeated = _in_order(table, minutes, prices, inside)
    traded = rows[~np.isnan(prices[rows])]
    counts = BarCounts(len(inside), int((~inside).sum()), repeated, len(rows) - len(traded))
    name = " ".join(filter(None, (symbol, "of" if symbol else "", os.path.basename(table.path))))
    return clean(Bars(name, minutes[traded], prices[traded], kind, counts), exchange, splits, gaps)


def clean(bars: Bars, exchange: Exchange, splits: Sequence[Split] = (), gaps: Gaps = "keep") -> Bars:
    """Adjusts bars for splits, counts the missing minutes of their days and fills them if asked to."""
    if gaps not in ("keep", "fill"):
        raise InputError(f"gaps must be 'keep' or 'fill'; received {gaps!r}")
    adjusted = bars.prices / split_factors(bars.minutes, splits)
    days = np.unique(bars.minutes.astype("datetime64[D]"))
    expected = np.concatenate([_session_minutes(exchange, day.item()) for day in days])
    missing = len(expected) - len(bars.minutes)
    counts = replace(bars.counts, missing=missing, days=len(days))
    if gaps == "keep" or not missing:
        return replace(bars, prices=adjusted, counts=counts)
    latest = np.searchsorted(bars.minutes, expected, side="right") - 1
    usable = latest >= 0
    usable[usable] = _session(exchange, expected[usable]) == _session(exchange, bars.minutes[latest[usable]])
    counts = replace(counts, filled=int(usable.sum()) - len(bars.minutes))
    return replace(bars, minutes=expected[usable], prices=adjusted[latest[usable]], counts=counts)


def split_factors(minutes: NDArray[np.datetime64], splits: Sequence[Split]) -> NDArray[np.float64]:  # (N,) -> (N,)
    """Returns by what the price of each minute is divided: the product of the ratios of all later splits.

    Example:
        >>> split_factors(np.array(["2020-08-28T09:30", "2020-08-31T09:30"], "M8[m]"), [(date(2020, 8, 31), 4.0)])
        array([4., 1.])
    """
    factors = np.ones(len(minutes))
    for day, ratio in splits:
        if not 0 < ratio < float("inf"):
            raise InputError(f"the ratio of a split is a positive number; received {ratio} on {day}")
        factors[minutes < np.datetime64(day, "D")] *= ratio
    return factors


def _prices(table: BarTable, multiplier: float) -> tuple[NDArray[np.float64], str]:
    """Returns prices, NaN where nothing was traded."""
    columns = table.columns
    if "vwap" in columns:
        prices, kind = table.floats("vwap"), "vwap"
    elif {"amount", "volume"} <= columns.keys():
        with np.errstate(invalid="ignore", divide="ignore"):
            prices, kind = table.floats("amount") / (table.floats("volume") * multiplier), "amount / volume"
    else:
        high, low, close = (table.floats(name) for name in ("high", "low", "close"))
        for row in np.flatnonzero(low > high)[:1]:
            raise table.error(row, "low", f"low {low[row]:g} is above high {high[row]:g}", "correct the line")
        prices, kind = (high + low + close) / 3, "(high + low + close) / 3"
    if "volume" in columns and kind != "(high + low + close) / 3":
        prices[(table.floats("volume") == 0) & (prices == 0)] = np.nan  # some vendors write 0 for no trade
    return prices, kind


def _require_prices(table: BarTable, prices: NDArray[np.float64], inside: NDArray[np.bool_]) -> None:
    untraded = table.floats("volume") == 0 if "volume" in table.columns else np.zeros(len(prices), bool)
    column = next(name for name in ("vwap", "amount", "close") if name in table.columns)
    remedy = "delete the line: a missing minute is a gap, a wrong price is an error"
    for row in np.flatnonzero(inside & ~(prices > 0) & ~(np.isnan(prices) & untraded))[:1]:
        problem = "no price" if np.isnan(prices[row]) else f"the price {prices[row]:g} is not positive"
        raise table.error(row, column, problem, remedy)
    for row in np.flatnonzero(inside & np.isinf(prices))[:1]:
        raise table.error(row, column, "the price is infinite", remedy)


def _minutes(
    table: BarTable, exchange: Exchange, zone: str | None, label: Label, time_format: str | None
) -> tuple[NDArray[np.datetime64], NDArray[np.bool_]]:
    """Returns the beginnings of the minutes on the clock of the exchange, and which lie in a session."""
    if label not in ("start", "end"):
        raise InputError(f"label must be 'start' or 'end'; received {label!r}")
    written, here = zone_of(zone or exchange.zone), zone_of(exchange.zone)
    shift = timedelta(minutes=1 if label == "end" else 0)
    local_times, inside = [], np.zeros(len(table.numbers), bool)
    for row, moment in enumerate(table.moments(time_format)):
        readings = [_local(reading, written, here) - shift for reading in _readings(moment, written)]
        local = readings[0]
        inside[row] = any(exchange.contains(reading) for reading in readings)
        if len(readings) > 1 and inside[row]:
            problem = f"{moment} does not exist or is there twice in {written.key}, where the clock is changed"
            raise table.error(row, "time", problem, "write times with their offset from UTC")
        if inside[row] and (local.second or local.microsecond):
            raise table.error(row, "time", f"{moment} is not a whole minute", "round it, or pass minute bars")
        local_times.append(local)
    return np.array(local_times, "datetime64[m]"), inside


def _readings(moment: datetime, written: ZoneInfo) -> list[datetime]:
    """Returns what a time can mean: two things where it has no offset and the clock is being changed."""
    if moment.tzinfo is not None:
        return [moment]
    first, second = (moment.replace(tzinfo=written, fold=fold) for fold in (0, 1))
    return [first] if first.utcoffset() == second.utcoffset() else [first, second]


def _local(moment: datetime, written: ZoneInfo, here: ZoneInfo) -> datetime:
    known = moment if moment.tzinfo is written and written is here else moment.astimezone(here)
    return known.replace(tzinfo=None, fold=0)


def _in_order(
    table: BarTable, minutes: NDArray[np.datetime64], prices: NDArray[np.float64], inside: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], int]:
    """Returns the rows of the bars without repetitions, and how many only repeat the one before."""
    rows = np.flatnonzero(inside)
    steps = np.diff(minutes[rows])
    for k in np.flatnonzero(steps < np.timedelta64(0, "m"))[:1]:
        problem = f"{minutes[rows[k + 1]]} comes after {minutes[rows[k]]}"
        raise table.error(rows[k + 1], "time", problem, "sort the file by time")
    again = np.flatnonzero(steps == np.timedelta64(0, "m")) + 1
    before, after = prices[rows[again - 1]], prices[rows[again]]
    for k in again[~((before == after) | (np.isnan(before) & np.isnan(after)))][:1]:
        here, there = rows[k], rows[k - 1]
        problem = f"{minutes[here]} has the price {prices[here]:g} and, in {table.unit} {table.numbers[there]}, "
        raise table.error(here, "time", f"{problem}{prices[there]:g}", "keep the one that is right")
    return np.delete(rows, again), len(again)


def _session_minutes(exchange: Exchange, day: date) -> NDArray[np.datetime64]:
    edges = [
        [np.datetime64(datetime.combine(day, edge), "m") for edge in session] for session in exchange.hours(day)
    ]
    return np.concatenate([np.arange(begin, end) for begin, end in edges])


def _session(exchange: Exchange, minutes: NDArray[np.datetime64]) -> NDArray[np.int64]:  # (N,)
    """Numbers the sessions, so that two minutes of one session have one number."""
    days = minutes.astype("datetime64[D]")
    begins = [60 * begin.hour + begin.minute for begin, _ in exchange.sessions]
    within = np.searchsorted(begins, (minutes - days).astype(np.int64), side="right")
    return days.astype(np.int64) * (len(begins) + 1) + within
