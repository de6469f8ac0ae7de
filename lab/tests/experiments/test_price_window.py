"""Windows of prices: an oracle by a plain loop, no look-ahead over a boundary, what scaling and shifting do."""

from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wellposed_lab.experiments.volatility.bars import Bars
from wellposed_lab.experiments.volatility.task import daily_variance, rolling_mean, stretches, windows

from wellposed.errors import InputError


@st.composite
def markets(draw):
    """Draws bars of several days, with gaps of a minute up to a night."""
    minutes, moment = [], datetime(2021, 1, 4, 9, 30)
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 25))
        minutes += [moment + timedelta(minutes=m) for m in range(length)]
        moment = minutes[-1] + timedelta(minutes=draw(st.sampled_from([2, 3, 90, 1050, 4000])))
    seed = draw(st.integers(0, 2**32 - 1))
    prices = 100 + np.random.default_rng(seed).normal(size=len(minutes)).cumsum()
    return Bars("drawn", np.array(minutes, "datetime64[m]"), prices)


SIZES = st.tuples(st.integers(1, 6), st.integers(2, 4), st.integers(1, 5))


def by_hand(bars, window, horizon, stride):
    """Cuts windows in a plain loop over minutes, with the mean and variance written out."""
    price = dict(zip(bars.minutes.tolist(), bars.prices.tolist(), strict=True))
    minute, found = timedelta(minutes=1), []
    for begin in price:
        first = begin  # of the stretch
        while first - minute in price:
            first -= minute
        if int((begin - first) / minute) % stride:
            continue
        wanted = [begin + step * minute for step in range(window + horizon)]
        if all(moment in price for moment in wanted):
            values = [price[moment] for moment in wanted]
            future = values[window:]
            mean = sum(future) / horizon
            found.append((values[:window], sum((p - mean) ** 2 for p in future) / horizon, begin))
    return found


@given(markets(), SIZES)
@settings(deadline=None)
def test_windows_equal_a_plain_loop(bars, sizes):
    found, expected = windows(bars, *sizes), by_hand(bars, *sizes)
    assert found.begins.tolist() == [begin for *_, begin in expected]
    for row, (past, variance, _) in enumerate(expected):
        assert found.past[row].tolist() == past
        assert found.variance[row] == pytest.approx(variance, rel=1e-9, abs=1e-12)


@given(markets(), SIZES)
@settings(deadline=None)
def test_no_window_crosses_a_day_or_a_gap(bars, sizes):
    window, horizon, _ = sizes
    for begin in windows(bars, *sizes).begins.tolist():
        end = begin + timedelta(minutes=window + horizon - 1)
        assert begin.date() == end.date()
        place = bars.minutes.tolist().index(begin)
        assert bars.minutes[place + window + horizon - 1].item() == end


@given(markets(), SIZES, st.integers(0, 4))
@settings(deadline=None)
def test_what_comes_after_a_window_does_not_change_it(bars, sizes, cut):
    window, horizon, _ = sizes
    found = windows(bars, *sizes)
    if len(found) <= cut:
        return
    last = np.searchsorted(bars.minutes, found.begins[cut]) + window + horizon
    prices = bars.prices.copy()
    prices[last:] = 1e6
    again = windows(Bars("changed", bars.minutes, prices), *sizes)
    assert np.array_equal(again.past[: cut + 1], found.past[: cut + 1])
    assert np.array_equal(again.variance[: cut + 1], found.variance[: cut + 1])


@given(markets(), SIZES, st.floats(0.1, 10), st.floats(-50, 50))
@settings(deadline=None)
def test_variance_ignores_a_shift_and_squares_a_factor(bars, sizes, factor, shift):
    found = windows(bars, *sizes)
    moved = windows(Bars("moved", bars.minutes, factor * bars.prices + shift), *sizes)
    assert np.allclose(moved.variance, factor**2 * found.variance, rtol=1e-7, atol=1e-9)
    assert np.allclose(moved.past, factor * found.past + shift)


@given(markets(), SIZES, st.integers(1, 5000))
@settings(deadline=None)
def test_shifting_the_minutes_shifts_the_windows(bars, sizes, minutes):
    later = Bars("later", bars.minutes + np.timedelta64(minutes, "m"), bars.prices)
    found, moved = windows(bars, *sizes), windows(later, *sizes)
    assert np.array_equal(moved.begins, found.begins + np.timedelta64(minutes, "m"))
    assert np.array_equal(moved.variance, found.variance)


def test_too_few_bars_give_no_windows_and_bad_sizes_an_error():
    bars = Bars("short", np.datetime64("2021-01-27T09:30") + np.arange(5), np.arange(5.0))
    assert len(windows(bars)) == 0 and windows(bars).past.shape == (0, 60)
    assert stretches(bars.minutes[:0]) == []
    with pytest.raises(
        InputError, match="window and stride must be at least 1 and horizon 2; received 0, 1 and 10"
    ):
        windows(bars, 0)
    with pytest.raises(InputError, match="received 60, 1 and 1"):
        windows(bars, horizon=1)


def test_daily_variance_averages_whole_blocks_of_each_day():
    minutes = np.concatenate(
        [np.datetime64(day) + np.arange(5) for day in ("2021-01-27T09:30", "2021-01-28T09:30")]
    )
    prices = np.array([1.0, 3.0, 1.0, 5.0, 99.0, 2.0, 2.0, 0.0, 8.0, 99.0])
    days, values = daily_variance(Bars("x", minutes, prices), 2)
    assert days.astype(str).tolist() == ["2021-01-27", "2021-01-28"] and values.tolist() == [2.5, 8.0]
    with pytest.raises(InputError, match=r"length must lie in 1\.\.2; received 3"):
        rolling_mean(values, 3)
