"""Runs of the volatility suite: models on windows of prices, and the volatility itself over the years."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wellposed.errors import InputError
from wellposed.training import History
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Result, Value
from wellposed_lab.engine.training import TrainingRun
from wellposed_lab.experiments.volatility.market import DAILY, amc_daily
from wellposed_lab.experiments.volatility.models import CLOSED, own
from wellposed_lab.experiments.volatility.task import Volatility, daily_variance, rolling_mean
from wellposed_lab.networks.by_name import build
from wellposed_lab.tasks.task import Pair

DAYS = 21  # of the rolling mean (001 Figure 1)
EVERY = 5  # days between points of the picture
DAY_MINUTES = 390


@dataclass(frozen=True, kw_only=True)
class VolatilityRun(TrainingRun):
    """Trains or fits one model on windows of prices; its record says of which."""

    task: Volatility

    @property
    def batch_seeds(self) -> bool:
        return own(self.model.name) is None and super().batch_seeds

    @property
    def trained(self) -> bool:
        return self.model.name not in CLOSED and (own(self.model.name) is not None or super().trained)

    def make_model(self, train: Pair) -> nn.Module:
        make = own(self.model.name)
        if make is not None:
            return make(self.task, self.seed, train, self.model)
        return build("volatility", (train[0].shape[-1], train[1].shape[-1]), self.model)

    def held_out(self, samples: int, fold: int) -> Tensor:
        """Marks consecutive samples: windows overlap, so every fifth one would leak from its neighbours."""
        return torch.arange(samples) * self.folds // samples == fold

    def measure(
        self, model: nn.Module, pair: tuple[Pair, Pair], seed: int, history: History | None, member: int | None
    ) -> Result:
        result = super().measure(model, pair, seed, history, member)
        return replace(result, facts={**result.facts, "data": self.task.about(seed)})


@dataclass(frozen=True, kw_only=True)
class HistoryRun(Run):
    """Records the volatility of a task's data over time, as a rolling mean, and the true values of its picture."""

    task: Volatility

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.task.name, "data", None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        bars = self.task.bars(self.seed)
        days, values = daily_variance(bars, self.task.horizon)
        cut = np.datetime64(self.task.span()[1], "D")
        result = history(days, values, cut, DAYS if len(days) >= 3 * DAYS else 1, self.seed == 0)
        if self.seed == 0:
            y = self.task.test(0, self.task.points[0])[1][self.task.excerpt(0), 0]
            result.series["prediction"] = [float(f"{value:.4g}") for value in y.tolist()]
        return [replace(result, facts={"data": str(bars)})]


@dataclass(frozen=True, kw_only=True)
class DailyRun(Run):
    """Records the volatility of AMC from 2015 to 2021, estimated from the daily high and low.

    Minute bars of those years are not free, daily ones are. The range of a day estimates the variance of its
    returns, ``log(high / low)^2 / (4 log 2)`` (Parkinson 1980). Of a random walk of 390 minutes with that
    variance, n = 10 prices in a row have 1/390 of it times ``(n^2 - 1) / (6 n)`` as variance on average; times the
    square of the price this is in squared dollars.
    """

    name: ClassVar[str] = "amc-daily"

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.name, "data", None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        days, prices = amc_daily()
        recent = days >= np.datetime64("2015-02-01")
        values = range_variance(*prices[recent].T)
        result = history(days[recent], values, np.datetime64("2020-12-31"), DAYS, self.seed == 0)
        about = (
            f"AMC, {DAILY.path.rpartition('/')[2]}: estimated from the range of every day, for want of minute bars"
        )
        return [replace(result, facts={"data": about})]


def range_variance(
    high: NDArray[np.float64], low: NDArray[np.float64], close: NDArray[np.float64], horizon: int = 10
) -> NDArray[np.float64]:  # (D,), (D,), (D,) -> (D,)
    """Estimates the mean variance of `horizon` minutes in a row from the range of a day; see `DailyRun`.

    Example:
        >>> one = np.ones(1)
        >>> range_variance(math.e * one, one, 10 * one).round(5)  # 100 * 1 / (4 log 2) / 390 * 1.65
        array([0.15259])
    """
    daily = np.log(high / low) ** 2 / (4 * math.log(2))
    variance: NDArray[np.float64] = close**2 * daily / DAY_MINUTES * (horizon**2 - 1) / (6 * horizon)
    return variance


def history(
    days: NDArray[np.datetime64], values: NDArray[np.float64], cut: np.datetime64, length: int, drawn: bool
) -> Result:
    """Summarises daily volatility: its mean until the cut and after it, and its rolling mean if that is drawn."""
    before, after = values[days <= cut], values[days > cut]
    if not len(before) or not len(after):
        raise InputError(f"there are no days {'after' if len(before) else 'until'} {cut}; give it more bars")
    means = [
        Value("volatility", float(before.mean()), "training"),
        Value("volatility", float(after.mean()), "test"),
    ]
    if not drawn:
        return Result(tuple(means))
    ends, smooth = days[length - 1 :: EVERY if length > 1 else 1], rolling_mean(values, length)
    smooth = smooth[:: EVERY if length > 1 else 1]
    years = ends.astype("datetime64[Y]")
    begin, end = (edge.astype("datetime64[D]") for edge in (years, years + 1))
    share = (ends - begin) / (end - begin)
    series = {
        "year": [round(float(x), 4) for x in years.astype(np.int64) + 1970 + share],
        "rolling_volatility": [float(f"{value:.4g}") for value in smooth],
    }
    return Result(tuple(means), series)
