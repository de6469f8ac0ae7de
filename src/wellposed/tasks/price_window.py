"""Windows of past prices and the variance of the next ones, within unbroken stretches of minutes."""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from wellposed.errors import InputError
from wellposed.tasks.minute_bars import MINUTE, Bars


@dataclass(frozen=True)
class Windows:
    """Past prices with the variance of those that follow.

    Attributes:
        past: the prices of a window.
        variance: of the prices that follow it, ``mean((p - mean(p))^2)``.
        begins: the first minute of each window.
    """

    past: NDArray[np.float64]  # (N, window)
    variance: NDArray[np.float64]  # (N,)
    begins: NDArray[np.datetime64]  # (N,)

    def __len__(self) -> int:
        return len(self.variance)


def stretches(minutes: NDArray[np.datetime64]) -> list[slice]:  # (N,)
    """Returns where minutes follow one another without a gap; a break, a night or a missing minute ends a stretch.

    Example:
        >>> stretches(np.array(["2021-01-27T09:30", "2021-01-27T09:31", "2021-01-27T09:33"], "M8[m]"))
        [slice(0, 2, None), slice(2, 3, None)]
    """
    if not len(minutes):
        return []
    edges = np.flatnonzero(np.diff(minutes) != MINUTE) + 1
    bounds = [0, *edges.tolist(), len(minutes)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def windows(bars: Bars, window: int = 60, horizon: int = 10, stride: int = 1) -> Windows:
    """Cuts bars into windows of `window` minutes and the variance of the next `horizon` prices.

    A window and what follows it lie in one unbroken stretch of minutes, hence in one session of one day: nothing
    is carried over a night, a break or a gap. The variance is that of the prices themselves (001 section 2.2,
    footnote 2), with the number of prices in the denominator, and not of returns.

    Args:
        stride: minutes from one window of a stretch to the next; the first begins with the stretch.

    Example:
        >>> minutes = np.datetime64("2021-01-27T09:30") + np.arange(5)
        >>> found = windows(Bars("made up", minutes, np.array([1.0, 2.0, 3.0, 5.0, 9.0])), window=2, horizon=2)
        >>> found.past.tolist(), found.variance.tolist()
        ([[1.0, 2.0], [2.0, 3.0]], [1.0, 4.0])
    """
    if window < 1 or horizon < 2 or stride < 1:
        raise InputError(
            f"window and stride must be at least 1 and horizon 2; received {window}, {stride} and {horizon}"
        )
    past, variance, begins = [np.empty((0, window))], [np.empty(0)], [np.empty(0, "datetime64[m]")]
    for stretch in stretches(bars.minutes):
        prices = bars.prices[stretch]
        if len(prices) < window + horizon:
            continue
        views = sliding_window_view(prices, window + horizon)[::stride]
        past.append(views[:, :window])
        variance.append(views[:, window:].var(axis=1))
        begins.append(bars.minutes[stretch][: len(prices) - window - horizon + 1 : stride])
    return Windows(np.concatenate(past), np.concatenate(variance), np.concatenate(begins))


def daily_variance(
    bars: Bars, horizon: int = 10
) -> tuple[NDArray[np.datetime64], NDArray[np.float64]]:  # (D,), (D,)
    """Returns the days that have one, and the mean variance of their blocks of `horizon` minutes.

    Example:
        >>> minutes = np.datetime64("2021-01-27T09:30") + np.arange(4)
        >>> daily_variance(Bars("made up", minutes, np.array([1.0, 3.0, 1.0, 5.0])), horizon=2)
        (array(['2021-01-27'], dtype='datetime64[D]'), array([2.5]))
    """
    days, values = [], []
    for stretch in stretches(bars.minutes):
        prices = bars.prices[stretch]
        blocks = prices[: len(prices) // horizon * horizon].reshape(-1, horizon).var(axis=1)
        days.append(np.repeat(bars.minutes[stretch][:1].astype("datetime64[D]"), len(blocks)))
        values.append(blocks)
    known, place = np.unique(np.concatenate(days), return_inverse=True)
    total = np.bincount(place, np.concatenate(values), len(known))
    return known, total / np.bincount(place, minlength=len(known))


def rolling_mean(
    values: NDArray[np.float64], length: int = 21
) -> NDArray[np.float64]:  # (D,) -> (D - length + 1,)
    """Returns the mean of every `length` values in a row (001 Figure 1: 21 days).

    Example:
        >>> rolling_mean(np.array([1.0, 2.0, 6.0]), 2)
        array([1.5, 4. ])
    """
    if not 1 <= length <= len(values):
        raise InputError(f"length must lie in 1..{len(values)}; received {length}")
    means: NDArray[np.float64] = sliding_window_view(values, length).mean(axis=1)
    return means
