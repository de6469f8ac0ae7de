"""Simple rules that a model has to beat.

`LinearRegression` is the control that every task with a linear target needs. `Mean`, `Persistence` and
`CopyLastLabel` learn nothing or next to nothing of a series. `RecentVariance`, `ZeroVariance`, `LogHAR` and
`Garch` forecast the variance of the next prices.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from wellposed.errors import InputError, require


class LinearRegression(nn.Module):
    """Predicts ``Wu + c``, in closed form by `fit` or trained by gradients like any other module.

    It starts at zero, so that gradient descent on the squared error converges to the answer of `fit`, the
    least-squares solution of minimum norm. 001 (Table 4) lists "SGD Linear Regression" among the volatility
    models and prints no settings for it; this module under `torch.optim.SGD` is that control.

    Args:
        intercept: whether there is a c.

    Example:
        >>> u = torch.tensor([[0.0], [1.0], [2.0]])
        >>> model = LinearRegression(1, 1).fit(u, 3 * u + 1)
        >>> model(torch.tensor([[10.0]])).round(decimals=4).tolist()
        [[31.0]]
    """

    def __init__(self, in_features: int, out_features: int, intercept: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, intercept)
        self.intercept = intercept
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        y: Tensor = self.linear(u)
        return y

    @torch.no_grad()
    def fit(self, u: Tensor, y: Tensor) -> "LinearRegression":  # (m, p), (m, q)
        """Solves ``min |Wu + c - y|^2``, among the solutions that of least ``|W|``, in float64."""
        self._require_data(u, y)
        inputs, targets = u.detach().cpu().double(), y.detach().cpu().double()
        if not self.intercept:
            self.linear.weight.copy_(_least_squares(inputs, targets).mT)
            return self
        mean, target = inputs.mean(0), targets.mean(0)
        weight = _least_squares(inputs - mean, targets - target).mT
        self.linear.weight.copy_(weight)
        self.linear.bias.copy_(target - weight @ mean)
        return self

    def _require_data(self, u: Tensor, y: Tensor) -> None:
        inputs, outputs = self.linear.in_features, self.linear.out_features
        good = u.dim() == y.dim() == 2 and len(u) == len(y) > 0
        if not good or u.shape[1] != inputs or y.shape[1] != outputs:
            raise InputError(
                f"u and y must be (m, {inputs}) and (m, {outputs}) with one m > 0; "
                f"received {tuple(u.shape)} and {tuple(y.shape)}"
            )
        if not (u.isfinite().all() and y.isfinite().all()):
            raise InputError("u or y has entries that are NaN or infinite; leave those samples out")


def _least_squares(inputs: Tensor, targets: Tensor) -> Tensor:
    # Only this driver copes with dependent columns.
    return torch.linalg.lstsq(inputs, targets, driver="gelsd").solution


class Mean(nn.Module):
    """Predicts the mean of the training targets, whatever it sees.

    Example:
        >>> model = Mean(1).fit(torch.zeros(2, 10), torch.tensor([[1.0], [3.0]]))
        >>> model(torch.ones(1, 10)).tolist()
        [[2.0]]
    """

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(out_features))

    @torch.no_grad()
    def fit(self, u: Tensor, y: Tensor) -> Self:  # (m, p), (m, q)
        """Takes the mean of the targets."""
        self.mean.copy_(y.double().mean(0))
        return self

    def forward(self, u: Tensor) -> Tensor:  # (B, p) -> (B, q)
        """Repeats the mean."""
        return self.mean.expand(len(u), -1)


class Persistence(nn.Module):
    """Predicts that the next value of a series is its last one.

    Example:
        >>> Persistence()(torch.tensor([[1.0, 5.0]])).tolist()
        [[5.0]]
    """

    def fit(self, u: Tensor, y: Tensor) -> Self:
        """Has nothing to learn."""
        return self

    def forward(self, u: Tensor) -> Tensor:  # (B, T) -> (B, 1)
        """Repeats the last value."""
        return u[:, -1:]


class CopyLastLabel(nn.Module):
    """Answers the rolling argmax with the label of the step before, shown to transformers (001 section 3.1).

    It is wrong only where the last of T elements is the largest, so it is right with probability 1 - 1/T.

    Example:
        >>> CopyLastLabel()(torch.tensor([[0.2, 0.9, 0.4], [0.2, 0.3, 0.4]])).tolist()
        [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    """

    def fit(self, u: Tensor, y: Tensor) -> Self:
        """Has nothing to learn."""
        return self

    def forward(self, u: Tensor) -> Tensor:  # (B, T) -> (B, T)
        """Marks the largest element before the last."""
        return F.one_hot(u[:, :-1].argmax(1), u.shape[1]).to(u)


BASIS_POINTS = 1e4


class RecentVariance(nn.Module):
    """Predicts that the variance of the next prices is that of the last ones.

    Args:
        minutes: how many prices, the last of the window, count.

    Example:
        >>> RecentVariance(2)(torch.tensor([[9.0, 1.0, 3.0]])).tolist()
        [[1.0]]
    """

    def __init__(self, minutes: int) -> None:
        super().__init__()
        if minutes < 2:
            raise InputError(f"a variance needs 2 prices at least; received minutes={minutes}")
        self.minutes = minutes

    def fit(self, prices: Tensor, variance: Tensor) -> Self:
        """Has nothing to learn."""
        return self

    def forward(self, prices: Tensor) -> Tensor:  # (B, T) -> (B, 1)
        """Computes the variance, with the number of prices in the denominator."""
        return prices[:, -self.minutes :].var(1, correction=0, keepdim=True)


class ZeroVariance(nn.Module):
    """Predicts that no price will move, which has a relative error of one wherever one does.

    Example:
        >>> ZeroVariance()(torch.ones(2, 60)).tolist()
        [[0.0], [0.0]]
    """

    def fit(self, prices: Tensor, variance: Tensor) -> Self:
        """Has nothing to learn."""
        return self

    def forward(self, prices: Tensor) -> Tensor:  # (B, T) -> (B, 1)
        """Returns zeros."""
        return torch.zeros_like(prices[:, :1])


class LogHAR(nn.Module):
    """Predicts the logarithm of the variance linearly from those over the last 10, 30 and 60 minutes.

    It is a heterogeneous autoregression (Corsi 2009) of minutes instead of days, fitted by least squares:
    ``log y = c + sum_m w_m log(variance of the last m minutes)``. Variances below a thousandth of the median
    training variance count as that.

    Example:
        >>> prices = 10 + torch.randn(50, 60, dtype=torch.float64)
        >>> LogHAR().fit(prices, torch.ones(50, 1))(prices)[0].round(decimals=3).tolist()
        [1.0]
    """

    def __init__(self, minutes: Sequence[int] = (10, 30, 60)) -> None:
        super().__init__()
        self.recent = nn.ModuleList(RecentVariance(count) for count in minutes)
        self.regression = LinearRegression(len(minutes), 1).double()
        self.register_buffer("least", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def fit(self, prices: Tensor, variance: Tensor) -> Self:  # (m, T), (m, 1)
        """Fits the weights."""
        self.least = 1e-3 * variance.double().median()
        self.regression.fit(self._features(prices), variance.double().clamp_min(self.least).log())
        return self

    def forward(self, prices: Tensor) -> Tensor:  # (B, T) -> (B, 1)
        """Computes the forecast."""
        y: Tensor = self.regression(self._features(prices)).exp()
        return y

    def _features(self, prices: Tensor) -> Tensor:  # (B, T) -> (B, 3)
        averages = torch.cat([recent(prices.double()) for recent in self.recent], 1)
        return averages.clamp_min(self.least).log()


class Garch(nn.Module):
    """Predicts the variance of the next prices by a GARCH(1,1) model of their one-minute returns.

    With ``s_{t+1}^2 = omega + alpha r_t^2 + beta s_t^2`` for log returns r in basis points, the variance is
    followed over the window from its long-run level, then forecast: ``s_{t+1}^2, ..., s_{t+n}^2`` go back to that
    level like ``(alpha + beta)^h``. Return j moves the last n - j + 1 of the n next prices, so that to first order

        ``E var(p_{t+1}, ..., p_{t+n}) = p_t^2 sum_j s_{t+j}^2 q_j (1 - q_j)``,  ``q_j = (n - j + 1) / n``.

    The coefficients are fitted by `arch` to the returns within the training stretches, one after the other. The
    formula takes returns to be uncorrelated, which those of average prices are not; a factor, mean variance over
    mean forecast of the training windows, makes up for it.

    Args:
        horizon: how many prices lie ahead.
        series: training prices, each an unbroken stretch of minutes.

    Example:
        >>> model = Garch(horizon=2)
        >>> model.set(omega=1.0, alpha=0.0, beta=0.0)(torch.full((1, 60), 100.0)).item()  # 100^2 * 1e-8 / 4
        2.5e-05
    """

    def __init__(self, horizon: int = 10, series: Sequence[NDArray[np.float64]] = ()) -> None:
        super().__init__()
        self.horizon, self._series = horizon, series
        self.coefficients = nn.Parameter(torch.tensor([1.0, 0.05, 0.9, 1.0], dtype=torch.float64))

    @torch.no_grad()
    def set(self, omega: float, alpha: float, beta: float, factor: float = 1.0) -> Self:
        """Takes coefficients that are known."""
        self.coefficients.copy_(torch.tensor([omega, alpha, beta, factor]))
        return self

    @torch.no_grad()
    def fit(self, prices: Tensor, variance: Tensor) -> Self:  # (m, T), (m, 1)
        """Fits the coefficients to the returns of `series`, and the factor to windows of prices."""
        returns = [BASIS_POINTS * np.diff(np.log(stretch)) for stretch in self._series if len(stretch) > 1]
        if not returns:
            raise InputError("a GARCH model is fitted to stretches of prices; pass them as series=")
        model = require("arch", extra="lab").arch_model(
            np.concatenate(returns), mean="Zero", vol="GARCH", p=1, q=1, rescale=False
        )
        fitted = model.fit(disp="off", show_warning=False).params
        known = fitted["omega"], fitted["alpha[1]"], fitted["beta[1]"]
        factor = variance.double().mean() / self.set(*known)(prices).mean()
        return self.set(*known, float(factor))

    def forward(self, prices: Tensor) -> Tensor:  # (B, T) -> (B, 1)
        """Computes the forecast, in float64."""
        omega, alpha, beta, factor = self.coefficients.double()
        returns = BASIS_POINTS * prices.double().log().diff(dim=1)
        variance = self._level(returns)
        for step in returns.unbind(1):
            variance = omega + alpha * step.square() + beta * variance
        total = torch.zeros_like(variance)
        for left in range(self.horizon, 0, -1):
            share = left / self.horizon
            total = total + variance * share * (1 - share)
            variance = omega + (alpha + beta) * variance
        return (factor * prices[:, -1].double().square() * total / BASIS_POINTS**2)[:, None]

    def _level(self, returns: Tensor) -> Tensor:  # (B, T - 1) -> (B,)
        """Returns where the recursion starts: the long-run variance, or that of the window where there is none."""
        omega, alpha, beta, _ = self.coefficients.double()
        if alpha + beta < 1:
            return (omega / (1 - alpha - beta)).expand(len(returns))
        return returns.square().mean(1)
