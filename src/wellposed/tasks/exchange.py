"""Exchanges: their time zone, their sessions and their holidays."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from wellposed.errors import InputError

Label = Literal["start", "end"]
Session = tuple[time, time]  # from, until


def weekday(day: date) -> bool:
    """Says whether a day is no Saturday or Sunday."""
    return day.weekday() < 5


def usual(day: date) -> time | None:
    """Says that no day closes early."""
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
        """Says whether a minute, by its beginning on the exchange's clock, belongs to a session."""
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
    """Says whether the exchanges of the United States trade; single days of mourning or storm are not known.

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
EXCHANGES = {exchange.name: exchange for exchange in (NYSE, CFFEX)}
