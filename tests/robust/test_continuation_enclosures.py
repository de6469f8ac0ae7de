"""Boxes of loops proven by continuation: they hold all equilibria, are tight, and are refused with a reason."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from tests.campaigns.continuation import Tally, case_of, trial
from tests.robust.robust_cases import F64, exact_maximum, looped
from wellposed.errors import IllPosedError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel
from wellposed.robust import Ball, Box, ConvexSet, Crown, SparseBox, certified, crown, output_bounds, state_bounds
from wellposed.robust.boxes import CenterSolve
from wellposed.robust.sets import Interval

NUMBERS = (0, 1, 2, 3, 4, 6, 9, 10, 17, 18)  # every certificate, set and position in a form; quickly solved


def rotating(n=8, p=3, turn=1.0, margin=0.5, bias=1.0):
    """A monotone loop of which no norm proves anything."""
    S = torch.randn(n, n, dtype=F64)
    A = (1 - margin) * torch.eye(n, dtype=F64) + turn * (S - S.mT) / n**0.5
    B, C = torch.randn(n, p, dtype=F64), torch.randn(2, n, dtype=F64)
    return ImplicitForm(A, B, C, bias=bias * torch.rand(n, dtype=F64))


def without():
    return mock.patch.object(crown.Continuation, "why_not", return_value="switched off")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_equilibrium_lies_outside(dtype):
    """One form of every certificate and every kind of set, against equilibria that numpy finds."""
    tally = Tally()
    for number in NUMBERS:
        trial(7, number, dtype, tally, count=40)
    assert not tally.violations
    assert tally.trials["proven by continuation"] >= 4
    assert tally.points["unsolved"] < 0.1 * sum(tally.points.values())


def test_boxes_that_are_not_proven_would_be_caught():
    """The points above do tell a guess that is too small: every box is accepted here, proven or not."""
    tally = Tally()
    with (
        mock.patch.object(crown, "_within", lambda inner, outer: torch.ones(len(inner.lower), dtype=torch.bool)),
        mock.patch.object(crown, "GROWTH", -0.1),
    ):
        for number in NUMBERS:
            trial(7, number, F64, tally, count=40)
    assert tally.violations


@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_the_exact_range_and_are_near_it(seed):
    torch.manual_seed(seed)
    form = rotating(6)
    box = Box.around(torch.rand(1, 3, dtype=F64), 0.05)
    bounds = state_bounds(form, box)
    for row in range(6):
        unit, none = np.eye(6)[row], np.zeros(3)
        low, high = -exact_maximum(form, box, -unit, none), exact_maximum(form, box, unit, none)
        assert bounds.lower[0, row] <= low + 1e-7 and bounds.upper[0, row] >= high - 1e-7
        assert bounds.width[0, row] <= 2.0 * (high - low) + 1e-6


def test_loops_that_no_norm_bounds_become_tight():
    form = rotating(24, 8, 1.5, bias=0.0)
    box = Box.around(torch.rand(3, 8, dtype=F64), 0.02)
    with without():
        before = output_bounds(form, box)
    after = output_bounds(form, box)
    assert (after.width < 0.4 * before.width).all() and before.method == after.method == "crown"
    for method in ("optimised", "triangle", "best"):
        assert (output_bounds(form, box, method).width < 0.4 * before.width).all()


@pytest.mark.parametrize("make", [rotating, lambda: looped(9, kappa=0.97), lambda: looped(8, "tanh", 0.95)])
@pytest.mark.parametrize("eps", [1e-3, 0.05, 0.5])
def test_bounds_are_never_looser_than_without(make, eps):
    form = make()
    box = Box.around(torch.rand(4, form.sizes[1], dtype=F64), eps)
    for bounded in (output_bounds, state_bounds):
        with without():
            before = bounded(form, box)
        after, room = bounded(form, box), 1e-9 * before.width
        assert (after.upper <= before.upper + room).all() and (after.lower >= before.lower - room).all()


def test_loops_that_had_no_bounds_have_them_now():
    """Strong damping of each state by itself is proven by "mu" alone; tanh could be cut to (-1, 1), ReLU not."""
    A = torch.tensor([[-9.0, 8.0, 1.5], [-8.0, -9.0, 1.5], [6.0, 6.0, -12.0]], dtype=F64)
    form = ImplicitForm(A, torch.eye(3, dtype=F64), torch.ones(1, 3, dtype=F64), activation="leaky_relu(0.1)")
    assert form.certificate().condition == "mu"
    u = torch.rand(2, 3, dtype=F64)
    for inputs in (Box.around(u, 0.05), SparseBox(u, 0.1, 1), Ball(u, 0.1)):
        with without(), pytest.raises(IllPosedError, match="switched off"):
            state_bounds(form, inputs)
        bounds = state_bounds(form, inputs)
        x = form.equilibrium(inputs.sample(50).flatten(0, 1)).value.view(50, 2, 3)
        assert bounds.contains(x, 1e-9).all() and bounds.width.max() < 0.5
    anything = ConvexSet(Box.around(u, 0.05).support, Box.around(u, 0.05))
    with pytest.raises(IllPosedError, match="center, which a ConvexSet need not hold"):
        state_bounds(form, anything)


def test_loops_without_an_equilibrium_are_not_bounded():
    """x = relu(1.5 x + v) has none where v is positive."""
    form = rotating().replaced(A=1.5 * torch.eye(8, dtype=F64), B=torch.ones(8, 3, dtype=F64))
    bounds = state_bounds(form, Box.around(torch.rand(1, 3, dtype=F64), 0.01))
    assert not bounds.branch.proven.any() and not bounds.lower.isfinite().any()


def test_a_sample_whose_box_is_not_proven_keeps_what_was_known():
    """And it does not keep its neighbour from being proven."""
    form = rotating(12)
    u = torch.rand(2, 3, dtype=F64)
    radius = torch.tensor([[0.01], [30.0]], dtype=F64).expand(2, 3)
    both = Box(u - radius, u + radius)
    together = output_bounds(form, both, Crown(2))
    with without():
        before = output_bounds(form, both, Crown(2))
    assert (together.upper <= before.upper + 1e-9).all()
    for k in range(2):
        alone = output_bounds(form, Box(both.lower[k : k + 1], both.upper[k : k + 1]), Crown(2))
        torch.testing.assert_close(alone.upper[0], together.upper[k], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [5, 6, 10])
def test_a_sample_does_not_depend_on_its_companions(seed):
    """Some of these boxes are proven and some are not; the latter must not gain by what is done for the former."""
    torch.manual_seed(seed)
    form = looped(6, kappa=0.9)
    u, radius = torch.rand(4, form.sizes[1], dtype=F64), torch.tensor([[0.01], [0.05], [0.2], [1.0]], dtype=F64)
    together = output_bounds(form, Box(u - radius, u + radius))
    for k in range(4):
        alone = output_bounds(form, Box(u[k : k + 1] - radius[k], u[k : k + 1] + radius[k]))
        torch.testing.assert_close(alone.upper[0], together.upper[k], rtol=1e-6, atol=1e-6)


def test_a_second_pass_from_norms_is_for_those_samples_that_need_it():
    """The second sample was 30 times tighter beside the fifth than it was alone."""
    form = case_of(99, 12, torch.float32).form
    torch.manual_seed(12)
    u, radius = torch.rand(5, form.sizes[1]), 10 ** -(torch.rand(5, 1) * 4)
    pair = Box(u[[1, 4]] - radius[[1, 4]], u[[1, 4]] + radius[[1, 4]])
    alone = output_bounds(form, Box(pair.lower[:1], pair.upper[:1]))
    torch.testing.assert_close(alone.upper[0], output_bounds(form, pair).upper[0], rtol=1e-4, atol=1e-4)


def test_the_interior_is_strict():
    inner, outer = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 3.0]])
    assert not crown._within(Interval(inner, outer), Interval(inner, outer + 1)).any()
    assert crown._within(Interval(inner, outer), Interval(inner - 1, outer + 1)).all()


def test_the_center_is_enclosed_whatever_the_certificate():
    for form in (rotating(), looped(6), looped(6, "tanh")):
        box = Box.around(torch.rand(3, form.sizes[1], dtype=F64), 0.1)
        query = crown.Query(form, box, None)
        (z,) = crown.center_preactivations(query)
        x = form.equilibrium(box.center, max_steps=5000).value
        exact = form.A.apply(x) + form.B.apply(box.center) + form.bias
        assert (z.lower <= exact + 1e-8).all() and (z.upper >= exact - 1e-8).all() and z.width.max() < 1e-6


def test_bounds_of_monotone_models_have_gradients_that_tighten_them():
    model = ImplicitModel(3, 2, 8, condition="monotone", bias=True).double()
    with torch.no_grad():
        model.state.raw.copy_(3 * torch.randn(8, 8))
    box = Box.around(torch.rand(4, 3, dtype=F64), 0.05)
    loss = output_bounds(model, box).width.mean()
    loss.backward()
    gradients = [part.grad for part in model.parameters() if part.grad is not None]
    assert any(bool((one != 0).any()) for one in gradients) and all(
        bool(one.isfinite().all()) for one in gradients
    )
    with torch.no_grad():
        for part in model.parameters():
            if part.grad is not None:
                part -= 1e-4 * part.grad
        assert output_bounds(model, box).width.mean() < loss


def test_classes_are_certified_where_norms_certify_none():
    torch.manual_seed(3)
    form = rotating(24, 8, turn=1.0, bias=0.0)
    u = torch.rand(8, 8, dtype=F64)
    target = form(u).argmax(1)
    box = Box.around(u, 0.03)
    with without():
        before = certified(form, box, target)
    assert int(certified(form, box, target).sum()) > int(before.sum())


def test_loops_inside_networks_that_plain_steps_do_not_solve():
    """The center is solved by splitting, and layers before and after the loop are bounded with it."""
    torch.manual_seed(0)
    loop = ImplicitModel(12, 8, 20, condition="monotone", bias=True, on_failure="ignore")
    with torch.no_grad():
        loop.state.raw.copy_(1.5 * torch.randn(20, 20))
    network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), loop, nn.ReLU(), nn.Linear(8, 3)).eval()
    box = Box.around(torch.rand(3, 6), 0.02)
    with torch.no_grad():
        bounds, y = output_bounds(network, box), network(box.sample(200).flatten(0, 1)).view(200, 3, 3)
    assert bounds.contains(y, 1e-4).all()
    assert bounds.width.mean() < 2 * (y.amax(0) - y.amin(0)).mean()


def test_hard_loops_are_solved_at_the_center():
    form = rotating(20, turn=4.0, margin=0.05)
    box = Box.around(torch.rand(4, 3, dtype=F64), 0.01)
    center = CenterSolve.of(crown.Query(form, box, None))
    assert float(torch.cat(center.residual).max()) < 1e-10
    unsolved = form.equilibrium(box.center, on_failure="ignore")
    assert not unsolved.converged.all()
