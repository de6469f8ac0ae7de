"""Forecasts of variance: the GARCH control against its recursion by hand, `arch` and a simulation; the others."""

import itertools
import math

import numpy as np
import pytest
import torch
from wellposed_lab.networks.simple import Garch, LogHAR, RecentVariance, ZeroVariance

from wellposed.errors import InputError


def walk(seed, shape, scale=5e-4):
    steps = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 50 * steps.cumsum(-1).exp()


def by_hand(prices, omega, alpha, beta, horizon):
    """Follows the recursion in plain Python, and sums covariances instead of the closed form."""
    returns = [1e4 * math.log(b / a) for a, b in itertools.pairwise(prices)]
    variance = omega / (1 - alpha - beta)
    for value in returns:
        variance = omega + alpha * value**2 + beta * variance
    ahead = []
    for _ in range(horizon):
        ahead.append(variance)
        variance = omega + (alpha + beta) * variance
    # cov(S_k, S_l) of the sums of returns is the sum of the first min(k, l) variances
    covariance = [[sum(ahead[: min(k, l) + 1]) for l in range(horizon)] for k in range(horizon)]  # noqa: E741
    diagonal = sum(covariance[k][k] for k in range(horizon)) / horizon
    return prices[-1] ** 2 * (diagonal - sum(map(sum, covariance)) / horizon**2) / 1e8


@pytest.mark.parametrize(("omega", "alpha", "beta"), [(1.0, 0.0, 0.0), (0.3, 0.1, 0.85), (2.0, 0.3, 0.2)])
@pytest.mark.parametrize("horizon", [2, 10])
def test_garch_equals_the_recursion_by_hand(omega, alpha, beta, horizon):
    prices = walk(0, (5, 60))
    found = Garch(horizon).set(omega, alpha, beta)(prices)
    expected = [by_hand(row, omega, alpha, beta, horizon) for row in prices.tolist()]
    assert found.shape == (5, 1) and np.allclose(found.detach()[:, 0], expected, rtol=1e-10)
    assert torch.allclose(Garch(horizon).set(omega, alpha, beta, 2.5)(prices), 2.5 * found)


def test_garch_forecasts_what_a_simulation_of_constant_variance_gives():
    generator = torch.Generator().manual_seed(1)
    steps = 3e-4 * torch.randn(40_000, 10, generator=generator, dtype=torch.float64)
    simulated = (20 * steps.cumsum(1).exp()).var(1, correction=0).mean()
    forecast = Garch(10).set(9.0, 0.0, 0.0)(torch.full((1, 60), 20.0))  # 3 basis points a minute
    assert forecast.item() == pytest.approx(float(simulated), rel=0.02)


def test_garch_without_a_long_run_level_starts_from_the_window():
    prices = walk(2, (3, 60))
    calm, wild = Garch(10).set(0.0, 0.1, 0.9)(prices), Garch(10).set(0.0, 0.1, 0.9)(prices**3 / 2500)
    assert torch.isfinite(calm).all() and bool((wild > 5 * calm).all())


def simulate(omega, alpha, beta, count):
    draws = torch.randn(count, generator=torch.Generator().manual_seed(4), dtype=torch.float64).tolist()
    variance, returns = omega / (1 - alpha - beta), []
    for draw in draws:
        returns.append(math.sqrt(variance) * draw)
        variance = omega + alpha * returns[-1] ** 2 + beta * variance
    return np.array(returns)


def test_garch_is_fitted_by_arch_within_stretches_and_calibrated():
    arch = pytest.importorskip("arch")
    returns = simulate(0.4, 0.1, 0.8, 6_000)
    stretches = [100 * np.exp(np.cumsum(np.append(0, part)) / 1e4) for part in np.split(returns, 10)]
    prices, target = walk(3, (30, 60)), torch.rand(30, 1) + 1
    model = Garch(10, stretches).fit(prices, target)
    reference = arch.arch_model(returns, mean="Zero", rescale=False).fit(disp="off").params.tolist()
    assert np.allclose(model.coefficients.detach()[:3], reference, rtol=1e-3)
    assert np.allclose(reference, [0.4, 0.1, 0.8], atol=0.2)
    assert float(model(prices).mean()) == pytest.approx(float(target.mean()), rel=1e-6)
    with pytest.raises(InputError, match="pass them as series="):
        Garch().fit(prices, target)


def test_recent_variance_is_that_of_numpy():
    prices = walk(5, (4, 60))
    for minutes in (2, 10, 60):
        expected = prices.numpy()[:, -minutes:].var(axis=1)
        assert np.allclose(RecentVariance(minutes)(prices)[:, 0], expected, rtol=1e-9)
    with pytest.raises(InputError, match="minutes=1"):
        RecentVariance(1)
    assert ZeroVariance().fit(prices, prices)(prices).tolist() == [[0.0]] * 4


def test_log_har_finds_its_own_weights():
    prices = torch.cat([walk(seed, (50, 60), 10.0**-seed) for seed in (2, 3, 4)])
    logs = torch.cat([RecentVariance(minutes)(prices).log() for minutes in (10, 30, 60)], 1)
    target = (logs @ torch.tensor([0.5, -0.2, 0.6], dtype=torch.float64) - 1).exp()[:, None]
    model = LogHAR().fit(prices, target)
    assert model.regression.linear.weight[0].tolist() == pytest.approx([0.5, -0.2, 0.6], abs=1e-6)
    assert torch.allclose(model(prices), target)
    still = torch.full((1, 60), 50.0)
    assert torch.isfinite(model(still)).all()  # no price moves: counts as the least variance
