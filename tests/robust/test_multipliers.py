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


def test_elimination_solves_the_equation_of_loops_that_do_not_contract(monkeypatch):
    """Also in several parts, and beside rows that need Newton's method."""
    S = torch.randn(9, 9, dtype=F64)
    A = 0.5 * torch.eye(9, dtype=F64) + 2 * (S - S.mT)
    lower, upper = torch.rand(4, 9, dtype=F64).round(), torch.rand(4, 9, dtype=F64)
    upper[:, :3], lower[:, :3] = 1.0, 1.0  # affine states
    sample = torch.tensor([0, 1, 1, 2, 0, 3, 1])
    start = torch.randn(7, 9, dtype=F64)
    found = Multipliers({0: start}, {0: (lower[sample], upper[sample])}, {0: [(0, Dense(A.mT))]})
    nu = found.eliminated(A, sample, 60, 1e-12)
    torch.testing.assert_close(found.image(nu)[0], nu[0], rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(crown, "LARGEST_BATCH", 9 * 20)
    torch.testing.assert_close(found.eliminated(A, sample, 60, 1e-12)[0], nu[0], rtol=1e-9, atol=1e-9)


def test_elimination_has_the_gradients_of_the_linear_system():
    found, A = loop()
    A = A.clone().requires_grad_()
    nu = found.eliminated(A.detach(), torch.zeros(6, dtype=torch.int64), 60, 1e-12)
    (slope,) = torch.autograd.grad(found.with_gradient(A, nu)[0].sum(), A)
    change = 1e-6 * torch.randn_like(A)
    moved = [found.with_gradient((A + sign * change).detach(), nu)[0].sum() for sign in (1, -1)]
    torch.testing.assert_close((slope * change).sum(), (moved[0] - moved[1]).detach() / 2, rtol=1e-5, atol=1e-12)
