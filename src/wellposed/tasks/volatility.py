"""Forecasting volatility: from 60 minutes of prices to the variance of the next 10 (001 section 2.2)."""

import abc
import functools
import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.errors import InputError
from wellposed.tasks.cache import MissingDataError
from wellposed.tasks.market import REMEDY, futures, own_file, squeeze
from wellposed.tasks.minute_bars import Bars
from wellposed.tasks.price_window import Windows, stretches, windows
from wellposed.tasks.regimes import Regimes
from wellposed.tasks.task import Pair, Point, Task

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

    def pair(self, found: Windows) -> Pair:
        """Scales windows."""
        inputs = torch.from_numpy((found.past - self.mean) / self.deviation).float()
        return inputs, torch.from_numpy(found.variance / self.unit).float()[:, None]

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
            found = windows(self.days(seed, held), self.window, self.horizon, self.stride)
        else:
            found = windows(self._tested(seed, split), self.window, self.horizon, self.test_stride)
        if len(found) == 0:
            first, last = self.span() if split in ("train", "validation") else self.periods()[split]
            raise InputError(
                f"task {self.name!r} has no {self.window + self.horizon} minutes in a row from {first} to {last}; "
                "give it more bars, or fill the gaps"
            )
        return found

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
    found = task.windows(0, "train")
    unit, deviation = float(found.variance.mean()), float(found.past.std())
    if not unit > 0 or not deviation > 0:
        raise InputError(f"the training prices of task {task.name!r} do not move; give it other bars")
    return Scaling(float(found.past.mean()), deviation, unit, task.floor * float(np.median(found.variance)) / unit)


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
