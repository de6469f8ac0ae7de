"""Sessions, holidays and early closes of exchanges."""

from datetime import date, datetime, time

import pytest
from wellposed_lab.experiments.volatility.bars import CFFEX, NYSE, Exchange

from wellposed.errors import InputError

# From the calendars that the exchange published.
CLOSED = {
    2015: "01-01 01-19 02-16 04-03 05-25 07-03 09-07 11-26 12-25",
    2020: "01-01 01-20 02-17 04-10 05-25 07-03 09-07 11-26 12-25",
    2021: "01-01 01-18 02-15 04-02 05-31 07-05 09-06 11-25 12-24",
    2022: "01-17 02-21 04-15 05-30 06-20 07-04 09-05 11-24 12-26",
    2023: "01-02 01-16 02-20 04-07 05-29 06-19 07-04 09-04 11-23 12-25",
}
EARLY = ["2015-11-27", "2015-12-24", "2018-07-03", "2019-12-24", "2020-11-27", "2021-11-26", "2023-07-03"]


@pytest.mark.parametrize("year", CLOSED)
def test_holidays_of_new_york_are_those_that_were_published(year):
    days = [date.fromordinal(n) for n in range(date(year, 1, 1).toordinal(), date(year + 1, 1, 1).toordinal())]
    closed = [f"{day:%m-%d}" for day in days if day.weekday() < 5 and not NYSE.hours(day)]
    assert " ".join(closed) == CLOSED[year]


def test_early_closes_of_new_york():
    assert all(NYSE.minutes(date.fromisoformat(day)) == 210 for day in EARLY)
    assert NYSE.minutes(date(2020, 7, 2)) == 390  # the third was the holiday
    assert NYSE.contains(datetime(2021, 11, 26, 12, 59)) and not NYSE.contains(datetime(2021, 11, 26, 13, 0))


def test_the_chinese_day_has_a_break():
    day = date(2021, 1, 27)
    inside = [minute for minute in range(24 * 60) if CFFEX.contains(datetime(2021, 1, 27, *divmod(minute, 60)))]
    assert inside == [*range(9 * 60 + 30, 11 * 60 + 30), *range(13 * 60, 15 * 60)]
    assert CFFEX.minutes(day) == len(inside) and CFFEX.minutes(date(2021, 1, 30)) == 0


def test_sessions_that_overlap_and_unknown_zones_are_refused():
    with pytest.raises(InputError, match="without overlap"):
        Exchange("X", "UTC", ((time(9), time(12)), (time(11), time(15))))
    with pytest.raises(InputError, match="unknown time zone 'Beijing'"):
        Exchange("X", "Beijing", ((time(9), time(12)),))
