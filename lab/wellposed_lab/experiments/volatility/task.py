"""Forecasting volatility: from 60 minutes of prices to the variance of the next 10 (001 section 2.2).

`windows` cuts windows of past prices with the variance of the next ones, within unbroken stretches of minutes.
`Regimes` is a market made up of two regimes, for those who have no minute bars. `Volatility` is the task;
`CSI300`, `CSI500`, `Squeeze`, `AMC` and `Generated` are its markets.
"""

import abc
import functools
import hashlib
import itertools
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from typing import ClassVar

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from wellposed.data.cache import MissingDataError
from wellposed.errors import InputError
from wellposed_lab.experiments.volatility.bars import MINUTE, BarCounts, Bars, us_open
from wellposed_lab.experiments.volatility.market import REMEDY, futures, own_file, squeeze
from wellposed_lab.tasks.task import Pair, Point, Task


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
        >>> cut = windows(Bars("made up", minutes, np.array([1.0, 2.0, 3.0, 5.0, 9.0])), window=2, horizon=2)
        >>> cut.past.tolist(), cut.variance.tolist()
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
    known, day = np.unique(np.concatenate(days), return_inverse=True)
    total = np.bincount(day, np.concatenate(values), len(known))
    return known, total / np.bincount(day, minlength=len(known))


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


@dataclass(frozen=True)
class Regimes:
    """Prices whose logarithm is a random walk that is calm or turbulent, as a Markov chain has it.

    ``log p_{t+1} = log p_t + s_t e_t`` with standard normal e, where ``s_t`` is `calm` or `turbulent` and the
    regime changes after each minute with probability one over the length it has on average. Nothing happens at
    night. Until `shift` calm prevails; from that day on turbulence does, and `level` multiplies the price as the
    squeeze of 2021 did with that of AMC.

    Args:
        first, days: the trading days, of 390 minutes each.
        shift: which of them is the first of the test period.
        calm, turbulent: standard deviation of the changes of the logarithm in a minute.
        long, short: mean minutes of the prevailing regime and of the other one.
        price: the first one.
        level: factor on the price at the shift.

    Example:
        >>> market = Regimes(days=4, shift=3)
        >>> bars = market.bars(torch.Generator().manual_seed(0))
        >>> len(bars.prices), str(bars.minutes[0])
        (1560, '2015-02-02T09:30')
    """

    first: str = "2015-02-02"
    days: int = 300
    shift: int = 240
    calm: float = 4e-4
    turbulent: float = 2.5e-3
    long: float = 900.0
    short: float = 90.0
    price: float = 10.0
    level: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.shift < self.days or min(self.long, self.short) < 1:
            raise InputError(
                f"shift must lie in 1..days - 1 and regimes last a minute at least; received {self.shift} of "
                f"{self.days} days, {self.long} and {self.short} minutes"
            )

    @property
    def calendar(self) -> list[date]:
        """The trading days."""
        days: list[date] = []
        day = date.fromisoformat(self.first)
        while len(days) < self.days:
            days += [day] if us_open(day) else []
            day += timedelta(1)
        return days

    def turbulence(self, generator: torch.Generator) -> NDArray[np.bool_]:  # (days * 390,)
        """Draws which minutes are turbulent."""
        draws = torch.rand(self.days * 390, generator=generator, dtype=torch.float64).tolist()
        leave = (1 / self.long, 1 / self.short)  # the prevailing regime, the other one
        shift, other, states = self.shift * 390, False, []
        for minute, draw in enumerate(draws):
            states.append(other != (minute >= shift))
            other ^= draw < leave[other]
        return np.array(states)

    def bars(self, generator: torch.Generator) -> Bars:
        """Draws the prices."""
        scale = np.where(self.turbulence(generator), self.turbulent, self.calm)
        steps = scale * torch.randn(len(scale), generator=generator, dtype=torch.float64).numpy()
        steps[self.shift * 390] += np.log(self.level)
        opening = np.array([datetime.combine(day, time(9, 30)) for day in self.calendar], "datetime64[m]")
        minutes: NDArray[np.datetime64] = np.add.outer(opening, np.arange(390) * MINUTE).ravel()
        counts = BarCounts(read=len(minutes), days=self.days)
        prices = self.price * np.exp(np.cumsum(steps))
        return Bars("two regimes, made up", minutes, prices, counts=counts)


Period = tuple[str, str]  # first and last day


@dataclass(frozen=True)
class Scaling:
    """How prices and variances become inputs and targets; fitted on the training windows.

    Attributes:
        mean, deviation: of the training prices; an input is ``(price - mean) / deviation``.
        unit: the mean variance in training; a target is ``variance / unit``.
        floor: the least target by which an error is divided, on the scale of targets.
    """

    mean: float
    deviation: float
    unit: float
    floor: float

    def pair(self, windows: Windows) -> Pair:
        """Scales windows."""
        inputs = torch.from_numpy((windows.past - self.mean) / self.deviation).float()
        return inputs, torch.from_numpy(windows.variance / self.unit).float()[:, None]

    def prices(self, u: Tensor) -> Tensor:  # (B, T) -> (B, T)
        """Turns inputs back into prices, in float64."""
        return u.double() * self.deviation + self.mean


@dataclass(frozen=True)
class Volatility(Task):
    """Predicts the variance of the next prices from a window of past ones.

    What is predicted is the variance of raw prices and not the deviation of returns (001 section 2.2, footnote).
    A window and what follows it lie in one session of one day. Every tenth day of the training period is held out
    whole for validation; the test periods come after it. Scales are fitted on the training windows.

    The score is the MAPE in ones, ``mean(|prediction - y| / max(y, floor))``, the median of the same, and the RMSE
    in squared units of the price. The floor is `floor` times the median variance in training: without one a window
    in which no price moves has an infinite error. Predicting zero has a MAPE of at most 1.

    Args:
        window, horizon: minutes that are seen, and whose variance is asked for.
        stride: minutes between windows in training; `test_stride` in the tests.
        floor: share of the median training variance below which errors are divided by that.
    """

    window: int = 60
    horizon: int = 10
    stride: int = 25
    test_stride: int = 25
    floor: float = 0.01
    points: tuple[Point, ...] = (None,)
    training: ClassVar[Period]
    tests: ClassVar[dict[Point, Period]]

    @abc.abstractmethod
    def bars(self, seed: int) -> Bars:
        """Returns all prices."""

    def train(self, seed: int) -> Pair:
        return self.scaling().pair(self.windows(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self.scaling().pair(self.windows(seed, "validation"))

    def test(self, seed: int, at: Point = None) -> Pair:
        return self.scaling().pair(self.windows(seed, at))

    def windows(self, seed: int, split: Point) -> Windows:
        """Returns the windows of "train", "validation" or a point of the axis, in raw prices."""
        if split in ("train", "validation"):
            held = split == "validation"
            cut = windows(self.days(seed, held), self.window, self.horizon, self.stride)
        else:
            cut = windows(self._tested(seed, split), self.window, self.horizon, self.test_stride)
        if len(cut) == 0:
            first, last = self.span() if split in ("train", "validation") else self.periods()[split]
            raise InputError(
                f"task {self.name!r} has no {self.window + self.horizon} minutes in a row from {first} to {last}; "
                "give it more bars, or fill the gaps"
            )
        return cut

    def periods(self) -> dict[Point, Period]:
        """Returns the test periods by point of the axis."""
        return self.tests

    def span(self) -> Period:
        """Returns the training period."""
        return self.training

    def _tested(self, seed: int, at: Point) -> Bars:
        if at not in self.periods():
            raise InputError(f"task {self.name!r} is tested at {tuple(self.periods())}; received {at!r}")
        return self.bars(seed).between(*self.periods()[at])

    def days(self, seed: int, held: bool) -> Bars:
        """Returns the bars of the training period that are held out, or the others."""
        bars = self.bars(seed).between(*self.span())
        _, number = np.unique(bars.minutes.astype("datetime64[D]"), return_inverse=True)
        chosen = (number % 10 == 9) == held
        return Bars(bars.name, bars.minutes[chosen], bars.prices[chosen], bars.price, bars.counts)

    def series(self, seed: int) -> list[NDArray[np.float64]]:
        """Returns the training prices, one unbroken stretch after the other."""
        bars = self.days(seed, held=False)
        return [bars.prices[stretch] for stretch in stretches(bars.minutes)]

    def scaling(self) -> Scaling:
        """Returns the scales, of the first seed's training windows for all seeds."""
        return _scaling(self)

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes MAPE, median absolute relative error and RMSE."""
        scaling = self.scaling()
        error = (prediction.double() - target.double()).abs()
        relative = error / target.double().clamp_min(scaling.floor)
        return {
            "mape": float(relative.mean()),
            "median_ape": float(relative.median()),
            "test_rmse": float(error.square().mean().sqrt()) * scaling.unit,
        }

    def excerpt(self, seed: int) -> slice:
        """Returns which test samples a picture shows: the first of them."""
        return slice(0, 160)

    def about(self, seed: int) -> str:
        """Says which data these are and how they are used."""
        scaling, counts = self.scaling(), [len(self.windows(seed, split)) for split in ("train", *self.points)]
        tests = ", ".join(
            f"{count:,} from {' to '.join(self.periods()[at])}"
            for at, count in zip(self.points, counts[1:], strict=True)
        )
        return (
            f"{self.bars(seed)}; {counts[0]:,} training windows from {' to '.join(self.span())} "
            f"(stride {self.stride} min), test windows: {tests} (stride {self.test_stride} min); MAPE divides by "
            f"{scaling.floor * scaling.unit:.3g} at least"
        )


@functools.lru_cache(maxsize=8)
def _scaling(task: Volatility) -> Scaling:
    training = task.windows(0, "train")
    unit, deviation = float(training.variance.mean()), float(training.past.std())
    if not unit > 0 or not deviation > 0:
        raise InputError(f"the training prices of task {task.name!r} do not move; give it other bars")
    return Scaling(
        float(training.past.mean()), deviation, unit, task.floor * float(np.median(training.variance)) / unit
    )


@dataclass(frozen=True)
class CSI300(Volatility):
    """The volatility of the CSI 300 index future: trained on 2016 to 2020, tested on 2021 and early 2022."""

    points: tuple[Point, ...] = (None, "2022")
    name: ClassVar[str] = "volatility-csi300"
    symbol: ClassVar[str] = "IF"
    training: ClassVar[Period] = ("2016-01-01", "2020-12-31")
    tests: ClassVar[dict[Point, Period]] = {
        None: ("2021-01-01", "2021-12-31"),
        "2022": ("2022-01-01", "2022-12-31"),
    }

    def bars(self, seed: int) -> Bars:
        return futures(self.symbol)


@dataclass(frozen=True)
class CSI500(CSI300):
    """The volatility of the CSI 500 index future; see `CSI300`."""

    name: ClassVar[str] = "volatility-csi500"
    symbol: ClassVar[str] = "IC"


@dataclass(frozen=True)
class Squeeze(Volatility):
    """The volatility of AMC: trained on the calm days of January 2021, tested on the squeeze that followed.

    The second test is that of March and April 2022.
    """

    stride: int = 1
    test_stride: int = 5
    points: tuple[Point, ...] = (None, "2022")
    name: ClassVar[str] = "volatility-squeeze"
    training: ClassVar[Period] = ("2021-01-14", "2021-01-22")
    tests: ClassVar[dict[Point, Period]] = {
        None: ("2021-01-25", "2021-01-27"),
        "2022": ("2022-03-14", "2022-04-18"),
    }

    def bars(self, seed: int) -> Bars:
        return squeeze()

    def days(self, seed: int, held: bool) -> Bars:
        """Holds out the fifth of the six days: every tenth would be none."""
        bars = self.bars(seed).between(*self.span())
        chosen = (bars.minutes.astype("datetime64[D]") == np.datetime64("2021-01-21")) == held
        return Bars(bars.name, bars.minutes[chosen], bars.prices[chosen], bars.price, bars.counts)


@dataclass(frozen=True)
class AMC(Volatility):
    """The published task: AMC from February 2015 to 2020, tested on 2021, from bars that you supply.

    Args:
        digest: of the file, so that records of different files are told apart; see `own_amc_digest`.
    """

    stride: int = 60
    test_stride: int = 60
    digest: str = ""
    name: ClassVar[str] = "volatility"
    training: ClassVar[Period] = ("2015-02-01", "2020-12-31")
    tests: ClassVar[dict[Point, Period]] = {None: ("2021-01-01", "2021-12-31")}

    def bars(self, seed: int) -> Bars:
        file = own_file()
        if file is None:
            raise MissingDataError(f"your bars of AMC are not in the data folder any more; {REMEDY}")
        return file.bars()


def own_amc_digest() -> str | None:
    """Returns the first digits of the checksum of a user's own bars and settings; None where there are none."""
    file = own_file()
    if file is None:
        return None
    whole = hashlib.sha256()
    for path in filter(None, (file.path, file.settings)):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


@dataclass(frozen=True)
class Generated(Volatility):
    """The volatility of a made-up market that turns turbulent after its training period; see `Regimes`.

    Example:
        >>> task = Generated(market=Regimes(days=12, shift=10))
        >>> u, y = task.train(seed=0)
        >>> u.shape, y.shape
        (torch.Size([117, 60]), torch.Size([117, 1]))
    """

    market: Regimes = field(default_factory=Regimes)
    name: ClassVar[str] = "volatility-generated"

    def bars(self, seed: int) -> Bars:
        return _drawn(self, seed)

    def span(self) -> Period:
        calendar = self.market.calendar
        return calendar[0].isoformat(), calendar[self.market.shift - 1].isoformat()

    def periods(self) -> dict[Point, Period]:
        calendar = self.market.calendar
        return {None: (calendar[self.market.shift].isoformat(), calendar[-1].isoformat())}


@functools.lru_cache(maxsize=4)
def _drawn(task: Generated, seed: int) -> Bars:
    return task.market.bars(task.generator(seed, "market"))
