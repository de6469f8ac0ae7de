"""The models of the volatility suite beside those of the zoo: controls in prices, models of centred windows."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from wellposed_lab.config import Choice
from wellposed_lab.experiments.volatility.task import Scaling, Volatility
from wellposed_lab.networks.by_name import build
from wellposed_lab.networks.simple import Garch, LinearRegression, LogHAR, RecentVariance, ZeroVariance
from wellposed_lab.tasks.task import Pair

Shape = tuple[int, int]


class InPrices(nn.Module):
    """Applies a forecast made from prices to scaled inputs and targets.

    Args:
        inner: from prices (B, T) to variances (B, 1), with a method ``fit(prices, variance)``.
        scaling: of the task.
    """

    def __init__(self, inner: nn.Module, scaling: Scaling) -> None:
        super().__init__()
        self.inner, self.scaling = inner, scaling

    def fit(self, u: Tensor, y: Tensor) -> Self:  # (m, T), (m, 1)
        """Fits the forecast."""
        self.inner.fit(self.scaling.prices(u), y.double() * self.scaling.unit)  # type: ignore[operator]
        return self

    def forward(self, u: Tensor) -> Tensor:  # (B, T) -> (B, 1)
        """Computes the scaled forecast."""
        y: Tensor = self.inner(self.scaling.prices(u)) / self.scaling.unit
        return y


class Centred(nn.Module):
    """Subtracts the last price of a window from all of it, so that the level of the price does not matter.

    Args:
        inner: from (B, T) to (B, 1).
        deviation: of the centred training inputs, by which they are divided.

    Example:
        >>> import torch
        >>> Centred(nn.Identity(), deviation=2.0)(torch.tensor([[7.0, 3.0]])).tolist()
        [[2.0, 0.0]]
    """

    def __init__(self, inner: nn.Module, deviation: float) -> None:
        super().__init__()
        self.inner, self.deviation = inner, deviation

    def forward(self, u: Tensor) -> Tensor:  # (B, T)
        """Computes the outputs."""
        y: Tensor = self.inner((u - u[:, -1:]) / self.deviation)
        return y


def _centred(inner: str) -> Callable[[Volatility, int, Pair, Choice], nn.Module]:
    def make(task: Volatility, seed: int, train: Pair, choice: Choice) -> Centred:
        deviation = float((train[0] - train[0][:, -1:]).std())
        return Centred(build("volatility", _shape(train), Choice(inner, choice.size, choice.options)), deviation)

    return make


def _in_prices(forecast: Callable[[Volatility, int], nn.Module]) -> Callable[..., nn.Module]:
    def make(task: Volatility, seed: int, *_: Any) -> InPrices:
        return InPrices(forecast(task, seed), task.scaling())

    return make


def _shape(train: Pair) -> Shape:
    return train[0].shape[-1], train[1].shape[-1]


CLOSED: dict[str, Callable[..., nn.Module]] = {
    "recent-variance": _in_prices(lambda task, seed: RecentVariance(task.horizon)),
    "rolling-variance": _in_prices(lambda task, seed: RecentVariance(task.window)),
    "garch": _in_prices(lambda task, seed: Garch(task.horizon, task.series(seed))),
    "log-har": _in_prices(lambda task, seed: LogHAR((task.horizon, task.window // 2, task.window))),
    "zero": _in_prices(lambda task, seed: ZeroVariance()),
}
TRAINED: dict[str, Callable[..., nn.Module]] = {
    "linear-sgd": lambda task, seed, train, choice: LinearRegression(*_shape(train)),
    "implicit-centred": _centred("implicit"),
    "implicit-rnn-centred": _centred("implicit-rnn"),
    "mlp-centred": _centred("mlp"),
}


def own(name: str) -> Callable[..., nn.Module] | None:
    """Returns how a model of this suite is made, from task, seed, training samples and choice; None if elsewhere.

    Example:
        >>> own("garch") is None, own("lstm") is None
        (False, True)
    """
    return CLOSED.get(name) or TRAINED.get(name)
