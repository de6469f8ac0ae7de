"""Minute bars: prices by minute on the clock of an exchange, with everything odd counted or named."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import FileFormatError, InputError
from wellposed.tasks.bar_file import BarTable, read_table
from wellposed.tasks.exchange import NYSE, Exchange, Label, zone_of

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
        filled: of these, how many got the price before them.
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
        parts = [
            f"{self.days:,} days",
            f"{self.read:,} bars read",
            f"{self.outside:,} outside the sessions",
            f"{self.repeated:,} repeated",
            f"{self.untraded:,} without a trade",
            f"{self.missing:,} minutes missing" + (f" of which {self.filled:,} filled" if self.filled else ""),
        ]
        return ", ".join(parts)


@dataclass(frozen=True)
class Bars:
    """Prices by minute, in order.

    Args:
        name: what they are of, for records.
        minutes: the beginning of each minute on the clock of the exchange.
        prices: the volume-weighted average price of that minute, or what stands in for it.
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
        kept = (days >= np.datetime64(first, "D")) & (days <= np.datetime64(last, "D"))
        return replace(self, minutes=self.minutes[kept], prices=self.prices[kept])


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
    `high`, `low` and `close` (their mean, the typical price, stands in); the first that is there is taken. Bars
    outside the sessions of the exchange are left out, so is one that repeats another; two that contradict each
    other are an error, and so are times out of order.

    Args:
        path: a .csv, .csv.gz or .parquet file (the latter needs the extra "finance").
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
        >>> place = pathlib.Path(tempfile.mkdtemp()) / "bars.csv"
        >>> _ = place.write_text("time,vwap\\n2021-01-27T14:29:00Z,19.1\\n2021-01-27T14:30:00Z,19.5\\n")
        >>> bars = read_bars(place)
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
    kept, repeated = _in_order(table, minutes, prices, inside)
    traded = kept[~np.isnan(prices[kept])]
    counts = BarCounts(len(inside), int((~inside).sum()), repeated, len(kept) - len(traded))
    name = " ".join(filter(None, (symbol, "of" if symbol else "", os.path.basename(table.path))))
    return clean(Bars(name, minutes[traded], prices[traded], kind, counts), exchange, splits, gaps)


def clean(bars: Bars, exchange: Exchange, splits: Sequence[Split] = (), gaps: Gaps = "keep") -> Bars:
    """Adjusts bars for splits, counts the missing minutes of their days and fills them if that is wanted."""
    if gaps not in ("keep", "fill"):
        raise InputError(f"gaps must be 'keep' or 'fill'; received {gaps!r}")
    adjusted = bars.prices / split_factors(bars.minutes, splits)
    days = np.unique(bars.minutes.astype("datetime64[D]"))
    expected = np.concatenate([_session_minutes(exchange, day.item()) for day in days])
    missing = len(expected) - len(bars.minutes)
    counts = replace(bars.counts, missing=missing, days=len(days))
    if gaps == "keep" or not missing:
        return replace(bars, prices=adjusted, counts=counts)
    place = np.searchsorted(bars.minutes, expected, side="right") - 1
    usable = place >= 0
    usable[usable] = _session(exchange, expected[usable]) == _session(exchange, bars.minutes[place[usable]])
    counts = replace(counts, filled=int(usable.sum()) - len(bars.minutes))
    return replace(bars, minutes=expected[usable], prices=adjusted[place[usable]], counts=counts)


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
    found, inside = [], np.zeros(len(table.numbers), bool)
    for row, moment in enumerate(table.moments(time_format)):
        readings = [_local(reading, written, here) - shift for reading in _readings(moment, written)]
        local = readings[0]
        inside[row] = any(exchange.contains(reading) for reading in readings)
        if len(readings) > 1 and inside[row]:
            problem = f"{moment} does not exist or is there twice in {written.key}, where the clock is changed"
            raise table.error(row, "time", problem, "write times with their offset from UTC")
        if inside[row] and (local.second or local.microsecond):
            raise table.error(row, "time", f"{moment} is not a whole minute", "round it, or pass minute bars")
        found.append(local)
    return np.array(found, "datetime64[m]"), inside


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
    """Returns which bars are kept, and how many only repeat the one before."""
    rows = np.flatnonzero(inside)
    steps = np.diff(minutes[rows])
    for place in np.flatnonzero(steps < np.timedelta64(0, "m"))[:1]:
        problem = f"{minutes[rows[place + 1]]} comes after {minutes[rows[place]]}"
        raise table.error(rows[place + 1], "time", problem, "sort the file by time")
    again = np.flatnonzero(steps == np.timedelta64(0, "m")) + 1
    before, after = prices[rows[again - 1]], prices[rows[again]]
    for place in again[~((before == after) | (np.isnan(before) & np.isnan(after)))][:1]:
        here, there = rows[place], rows[place - 1]
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
