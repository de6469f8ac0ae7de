"""What torchdeq and the papers behind it claim of equilibrium models, asserted of our solvers and gradients.

torchdeq (locuslab/torchdeq 0.1.0) has no tests. Restated are the examples in the docstrings of its solvers
(`torchdeq/solver/fp_iter.py`, `anderson.py`), what `torchdeq/grad.py` says of implicit and phantom
gradients and `torchdeq/core.py` of statistics and of states that are lists of tensors, and the claims of

- Bai, Kolter and Koltun 2019, "Deep Equilibrium Models", Theorem 1 (the implicit gradient is that of the
  unrolled network in the limit) and section 3 (a deeper network comes closer to the equilibrium);
- Bai, Koltun and Kolter 2020, "Multiscale Deep Equilibrium Models" (several scales, one equilibrium);
- Geng et al. 2021, "On Training Implicit Models", eq. 10 to 12 (the phantom gradient is a damped, truncated
  Neumann series that tends to the implicit gradient);
- Fung et al. 2022, "JFB", Theorem 3.1 (one step gives a descent direction).

Constant memory is claimed too; `tests/test_memory.py` asserts it. Differences by intent: torchdeq returns
the best iterate of a solve and decides on the whole batch, here each sample ends at its accepted iterate.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from problems import state_matrix
from torch import nn

from wellposed.equilibrium import (
    SOLVERS,
    Absolute,
    Implicit,
    MeanRelative,
    Newton,
    Phantom,
    Picard,
    RandomSteps,
    Relative,
    Status,
    Steps,
    Unrolled,
    fixed_point,
)

SOLVER_LIST = [*SOLVERS.factories, Newton(dense=0)]
TIGHT = {"stop": Relative(1e-14), "max_steps": 500}


# The examples of the solvers: fixed points of cos and of the rule of Hero for the root of two.
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
@pytest.mark.parametrize(
    ("f", "start", "solution"),
    [(torch.cos, 0.0, 0.7390851332151607), (lambda z: 0.5 * (z + 2 / z), 1.0, 2**0.5)],
    ids=["cos", "Hero"],
)
def test_docstring_examples(solver, f, start, solution):
    found = fixed_point(f, torch.full((1,), start, dtype=torch.float64), solver=solver)
    assert found.converged.all() and float(found.value) == pytest.approx(solution, abs=1e-9)


@pytest.fixture
def cell():
    """A tanh cell whose W is not symmetric, with its equilibrium, cotangent and dense Jacobian factors."""
    generator = torch.Generator().manual_seed(0)
    W = state_matrix("random", 8, 0.9, generator).requires_grad_()
    u = torch.randn(5, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    cotangent = torch.randn(5, 8, dtype=torch.float64, generator=generator)

    def f(x, u):
        return torch.tanh(x @ W.mT + u)

    x = torch.zeros_like(u)
    with torch.no_grad():
        for _ in range(2000):
            x = f(x, u)
    return f, W, u, x, cotangent


def adjoint_by_neumann(W, x, cotangent, steps, damping):
    """Sums ``damping (I + K' + ... + K'^(steps - 1)) g`` with ``K = (1 - damping) I + damping J``, row by row."""
    slope = 1 - x**2
    total, term = torch.zeros_like(cotangent), cotangent
    for _ in range(steps):
        total = total + damping * term
        term = (1 - damping) * term + damping * (slope * term) @ W.detach()
    return slope * total


# Geng et al. eq. 10 to 12
@pytest.mark.parametrize("solver", SOLVERS.factories)
@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (1, 0.5), (4, 1.0), (5, 0.5), (20, 0.7)])
def test_phantom_is_a_damped_truncated_neumann_series(cell, solver, steps, damping):
    f, W, u, x, cotangent = cell
    found = fixed_point(f, torch.zeros_like(u), u, solver=solver, gradient=Phantom(steps, damping), **TIGHT)
    by_weight, by_input = torch.autograd.grad(found.value, (W, u), cotangent)
    adjoint = adjoint_by_neumann(W, x, cotangent, steps, damping)
    torch.testing.assert_close(by_input, adjoint, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(by_weight, adjoint.mT @ x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("solver", SOLVERS.factories)
def test_phantom_tends_to_the_implicit_gradient(cell, solver):
    f, W, u, _, cotangent = cell

    def gradient_with(gradient):
        found = fixed_point(f, torch.zeros_like(u), u, solver=solver, gradient=gradient, **TIGHT)
        return torch.cat([g.flatten() for g in torch.autograd.grad(found.value, (W, u), cotangent)])

    implicit = gradient_with(Implicit())
    errors = [
        float((gradient_with(Phantom(steps)) - implicit).norm() / implicit.norm()) for steps in (1, 2, 4, 8, 16)
    ]
    assert all(later < 0.7 * earlier for earlier, later in pairwise(errors))
    assert errors[0] > 1e-2 and errors[-1] < 1e-4


# Fung et al. Theorem 3.1, on draws in which W halves every distance
@pytest.mark.parametrize("seed", range(5))
def test_one_step_is_a_descent_direction(seed):
    generator = torch.Generator().manual_seed(seed)
    W = state_matrix("random", 6, 0.5, generator).requires_grad_()
    u, target = torch.randn(2, 32, 6, dtype=torch.float64, generator=generator)

    def loss(gradient):
        def f(x, u):
            return torch.tanh(x @ W.mT + u)

        return ((fixed_point(f, torch.zeros_like(u), u, gradient=gradient, **TIGHT).value - target) ** 2).mean()

    (one_step,) = torch.autograd.grad(loss(Phantom(steps=1)), W)
    (implicit,) = torch.autograd.grad(loss(Implicit()), W)
    assert float((one_step * implicit).sum()) > 0
    assert not torch.allclose(one_step, implicit, rtol=1e-3)
    with torch.no_grad():
        before = loss(Implicit())
        W -= 1e-2 * one_step
        assert loss(Implicit()) < before


# Bai, Kolter and Koltun, section 3: more layers come closer. Picard contracts by 0.9 at least at every step.
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_error_falls_with_the_number_of_steps(cell, solver):
    f, _, u, x, _ = cell
    with torch.no_grad():
        values = [fixed_point(f, torch.zeros_like(u), u, solver=solver, stop=Steps(n)) for n in (0, 1, 4, 12)]
    assert all((found.status == Status.STEPS_DONE).all() for found in values)
    assert [found.steps.tolist() for found in values] == [[n + 1] * 5 for n in (0, 1, 4, 12)]
    errors = [float((found.value - x).abs().max()) for found in values]
    assert errors[0] == pytest.approx(float(x.abs().max()), rel=1e-12)
    assert all(later < 0.9 * earlier or later < 1e-13 for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-3 if solver == "picard" else errors[-1] < 1e-6


# f_max_iter with a tolerance of zero does all its steps in torchdeq.
def test_steps_are_all_done_even_at_rounding_level(cell):
    f, _, u, _, _ = cell
    with torch.no_grad():
        found = fixed_point(f, torch.zeros_like(u), u, solver="picard", stop=Steps(200))
    assert found.steps.tolist() == [201] * 5 and (found.status == Status.STEPS_DONE).all()


def relative_error_of_unrolled(cell, solver, **options):
    f, W, u, _, cotangent = cell

    def gradient_of(found):
        return torch.cat([g.flatten() for g in torch.autograd.grad(found.value, (W, u), cotangent)])

    implicit = gradient_of(fixed_point(f, torch.zeros_like(u), u, **TIGHT))
    unrolled = fixed_point(f, torch.zeros_like(u), u, solver=solver, gradient=Unrolled(), **options)
    return float((gradient_of(unrolled) - implicit).norm() / implicit.norm())


# Theorem 1: the gradient of a network of so many layers with tied weights tends to the implicit one. A tolerance
# of zero is never met, so the budget is the number of layers.
@pytest.mark.parametrize("solver", SOLVERS.factories)
def test_unrolled_tends_to_the_implicit_gradient(cell, solver):
    never = {"stop": Absolute(0.0), "on_failure": "ignore"}
    errors = [relative_error_of_unrolled(cell, solver, max_steps=n, **never) for n in (1, 3, 6, 12, 24)]
    assert all(later < 0.9 * earlier or later < 1e-10 for earlier, later in pairwise(errors))
    assert errors[0] > 1e-1 and errors[-1] < 1e-6


@pytest.mark.parametrize("stop", [Steps(60), RandomSteps(60, 60), MeanRelative(1e-9)], ids=str)
def test_unrolled_differentiates_every_step_under_any_stopping_rule(cell, stop):
    assert relative_error_of_unrolled(cell, Picard(), stop=stop) < 1e-6


class TwoScales(nn.Module):
    """A cell with a fine and a coarse map, each fed by both (a small MDEQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
        self.coarse = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)
        self.down = nn.Conv2d(2, 3, 3, stride=2, padding=1, dtype=torch.float64)
        self.up = nn.Conv2d(3, 2, 1, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.4)

    def forward(self, state, u):
        fine, coarse = state
        lifted = F.interpolate(self.up(coarse), scale_factor=2)
        return torch.tanh(self.fine(fine) + lifted + u), torch.tanh(self.coarse(coarse) + self.down(fine))


# Multiscale equilibria, and gradients of parameters that the map captures
@pytest.mark.parametrize("gradient", [Implicit(), Phantom(steps=40), Unrolled()], ids=str)
@pytest.mark.parametrize("solver", SOLVERS.factories)
def test_two_scales_and_the_gradients_of_captured_parameters(solver, gradient):
    torch.manual_seed(0)
    cell, u = TwoScales(), torch.randn(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    x0 = (torch.zeros_like(u), torch.zeros(3, 3, 2, 2, dtype=torch.float64))
    found = fixed_point(cell, x0, u, solver=solver, gradient=gradient, **TIGHT)
    assert found.value[0].shape == u.shape and found.value[1].shape == (3, 3, 2, 2)
    state = x0
    for _ in range(60):
        state = cell(state, u)
    leaves = [u, *cell.parameters()]
    torch.testing.assert_close(found.value, state, rtol=1e-10, atol=1e-10)
    cotangents = [torch.randn_like(part) for part in state]
    mine = torch.autograd.grad(found.value, leaves, cotangents)
    for one, other in zip(mine, torch.autograd.grad(state, leaves, cotangents), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


# SolverStat of torchdeq: trace, lowest residual and the step at which it was reached
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_statistics_describe_the_value_that_is_returned(cell, solver):
    f, _, u, _, _ = cell
    with torch.no_grad():
        found = fixed_point(f, torch.zeros_like(u), u, solver=solver)
        residual = (f(found.value, u) - found.value).abs().amax(1)
    torch.testing.assert_close(found.residual, residual, rtol=1e-6, atol=1e-15)
    assert found.residuals.isfinite().sum(1).tolist() == found.steps.tolist()
    assert torch.equal(found.residuals.nan_to_num(torch.inf).amin(1), found.residual)  # accepted = lowest so far


def test_a_solve_cut_off_returns_its_last_iterate_and_not_the_best_unlike_in_torchdeq():
    def f(x):  # the residuals are 1/2, 1/4, ... and, far down, large again
        return torch.where(x < 0.9, 0.5 + 0.5 * x, x - 3)

    x0 = torch.zeros(1, 1, dtype=torch.float64)
    found = fixed_point(f, x0, solver=Picard(), stop=Relative(1e-9), max_steps=5, on_failure="ignore")
    assert found.status.tolist() == [Status.MAX_STEPS]
    assert found.residuals.tolist() == [[0.5, 0.25, 0.125, 0.0625, 3.0]]
    assert float(found.value) == 0.9375 and float(found.residual) == 3.0
