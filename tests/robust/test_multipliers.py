"""The iteration of multipliers: where it ends, how soon, and that rows do not see each other."""

import pytest
import torch

from wellposed.forms import Dense
from wellposed.robust import crown
from wellposed.robust.crown import Multipliers

F64 = torch.float64


def loop(rows=6, n=12, kappa=0.9, positive=False):
    A = torch.rand(n, n, dtype=F64) if positive else torch.randn(n, n, dtype=F64)
    A = kappa * A / A.abs().sum(1, keepdim=True)
    lower = torch.rand(rows, n, dtype=F64).round()
    upper = torch.rand(rows, n, dtype=F64) if not positive else torch.ones(rows, n, dtype=F64)
    start = torch.randn(rows, n, dtype=F64) if not positive else torch.rand(rows, n, dtype=F64)
    return Multipliers({0: start}, {0: (lower, upper)}, {0: [(0, Dense(A.mT))]}), A


@pytest.mark.parametrize("positive", [False, True])
def test_it_ends_where_plain_steps_end(positive):
    found, A = loop(positive=positive)
    nu = found.start[0]
    for _ in range(2000):
        lower, upper = found.slopes[0]
        nu = found.start[0] + (torch.where(nu > 0, upper, lower) * nu) @ A
    torch.testing.assert_close(found.settled(200, 1e-12)[0][0], nu, rtol=1e-9, atol=1e-9)


def test_extrapolation_needs_fewer_steps(monkeypatch):
    found, _ = loop(kappa=0.97, positive=True)

    def left_over(steps):
        nu, image = found.settled(steps, 1e-12)
        torch.testing.assert_close(image[0], found.image(nu)[0], rtol=0, atol=0)
        return float((image[0] - nu[0]).abs().max())

    quick = left_over(25)
    monkeypatch.setattr(crown, "LATE", 10_000)
    assert quick < 1e-2 * left_over(25)


def test_a_row_does_not_depend_on_others():
    found, _ = loop(rows=6)
    whole = found.settled(60, 1e-6)[0][0]
    for row in range(6):
        part = slice(row, row + 1)
        slopes = {0: tuple(side[part] for side in found.slopes[0])}
        alone = Multipliers({0: found.start[0][part]}, slopes, found.links).settled(60, 1e-6)[0][0]
        torch.testing.assert_close(alone, whole[part], rtol=1e-12, atol=1e-12)


def test_no_step_and_gradients():
    found, _ = loop()
    assert found.settled(0, 1e-6)[0][0] is found.start[0]
    moving = Multipliers({0: found.start[0].clone().requires_grad_()}, found.slopes, found.links)
    nu = moving.settled(100, 1e-10)[0][0]
    assert nu.requires_grad
    torch.testing.assert_close(nu.detach(), found.settled(100, 1e-10)[0][0], rtol=1e-6, atol=1e-6)
