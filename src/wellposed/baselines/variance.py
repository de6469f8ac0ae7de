"""Forecasts of the variance of the next prices that a model of volatility has to beat."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wellposed.baselines.linear import LinearRegression
from wellposed.errors import InputError, require

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
        found = torch.cat([recent(prices.double()) for recent in self.recent], 1)
        return found.clamp_min(self.least).log()


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
        found = model.fit(disp="off", show_warning=False).params
        known = found["omega"], found["alpha[1]"], found["beta[1]"]
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
