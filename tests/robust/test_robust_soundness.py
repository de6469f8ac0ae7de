"""No point of a set leaves any bound."""

import pytest
import torch
from robust_cases import F64, FORMS, exact, looped, mlp, points, two_loops

from wellposed import ImplicitForm, ImplicitModel
from wellposed.convert import to_implicit
from wellposed.robust import (
    Ball,
    Box,
    ConvexSet,
    Crown,
    MethodError,
    SparseBox,
    crown,
    intervals,
    margin_bounds,
    output_bounds,
    state_bounds,
)
from wellposed.robust.query import Query

METHODS = ["norm", "box", "interval", "l2", Crown(2), "best", Crown(1, slope_steps=2)]


def sets(u):
    yield Box.around(u, 0.1)
    yield SparseBox(u, 0.3, 2, lower=0.0, upper=1.0)
    yield Ball(u, 0.2)
    around = Box.around(u, 0.2, None, None)
    yield ConvexSet(lambda lam: (lam * u[:, None]).sum(-1) + 0.2 * lam.abs().amax(-1), around, u)


def check(form, inputs, methods, u, tolerance):
    x, y = exact(form, u.flatten(0, 1))
    x, y = x.view(len(u), len(inputs), -1), y.view(len(u), len(inputs), -1)
    target = torch.arange(len(inputs)) % form.sizes[2]
    margin = y - y.gather(2, target.expand(len(u), -1)[..., None])
    proved = 0
    for method in methods:
        try:
            bounds = output_bounds(form, inputs, method)
        except MethodError:
            continue
        proved += 1
        assert bounds.contains(y, tolerance).all(), method
        assert bounds.lower.dtype == form.dtype and (bounds.slack >= 0).all()
        if proved % 2 == len(methods) % 2:
            continue
        assert state_bounds(form, inputs, method).contains(x, tolerance).all(), method
        assert margin_bounds(form, inputs, target, method).contains(margin, tolerance).all(), method
    return proved


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two sets", "all sets"]
)
def test_points_of_a_set_stay_within_every_bound(name, dtype, every):
    form = FORMS[name]().to(dtype)
    u = torch.rand(2, form.sizes[1], dtype=dtype)
    second = 1 if dtype == torch.float32 else 1 + list(FORMS).index(name) % 3
    for number, inputs in enumerate(sets(u)):
        if number not in (0, second) and not (every and dtype == F64):
            continue
        methods = METHODS if number == 0 else ["box", "interval", Crown(1)]
        assert check(form, inputs, methods, points(form, inputs, 12), 1e-7) >= 2


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("name", ["relu loop", "tanh loop", "relu layers", "pooling network"])
def test_a_single_point_is_enclosed_in_spite_of_rounding(name, dtype):
    """The bounds of one input are as wide as their rounding, so without it they would miss the exact value."""
    form = FORMS[name]().to(dtype)
    u = torch.rand(50, form.sizes[1], dtype=dtype)
    _, y = exact(form, u)
    for method in ["box", "interval", "crown"]:
        found = output_bounds(form, Box(u, u), method)
        assert found.contains(y, 1e-9).all(), method
        assert found.width.max() < (2e-3 if dtype == torch.float32 else 1e-7)
        assert (found.slack > 0).all()


@pytest.mark.parametrize("make", [lambda: looped(12, kappa=0.98), two_loops])
def test_bounds_hold_wherever_iterations_are_cut(make, monkeypatch):
    form = make()
    u = torch.rand(3, form.sizes[1], dtype=F64)
    inputs = Box.around(u, 0.05)
    tried = points(form, inputs)
    widths = []
    for sweeps, steps in [(300, 60), (2, 2), (1, 1), (1, 0)]:
        monkeypatch.setattr(intervals, "MAX_SWEEPS", sweeps)
        monkeypatch.setattr(crown, "MAX_STEPS", steps)
        check(form, inputs, ["interval", Crown(1)], tried, 1e-8)  # with affine states eliminated
        with monkeypatch.context() as larger:
            larger.setattr(crown, "LARGEST_INVERSE", 0)
            check(form, inputs, [Crown(1)], tried, 1e-8)
            widths.append(float(output_bounds(form, inputs, Crown(1)).width.mean()))
    assert widths == sorted(widths) and widths[-1] > 1.05 * widths[0]


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "group_sort(2)"])
def test_a_badly_solved_center_widens_the_box_and_no_more(activation, monkeypatch):
    form = looped(8, activation)
    inputs = Box.around(torch.rand(3, 4, dtype=F64), 0.01)
    x, _ = exact(form, inputs.center)
    solved = ImplicitForm.equilibrium
    monkeypatch.setattr(
        ImplicitForm, "equilibrium", lambda *given, **options: solved(*given, **{**options, "max_steps": 2})
    )
    for method in ["norm", "box", "l2", "interval"]:
        assert state_bounds(form, inputs, method).contains(x, 1e-9).all(), method
    assert not torch.allclose(form.equilibrium(inputs.center, on_failure="ignore").value, x, atol=1e-3)


def test_trained_model_in_float32():
    model = ImplicitModel(4, 2, 10, bias=True)
    u, y = torch.rand(64, 4), torch.rand(64, 2)
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(30):
        optimiser.zero_grad()
        (model(u) - y).square().mean().backward()
        optimiser.step()
    inputs = Box.around(u[:3], 0.1)
    form = model.form()
    check(form, inputs, METHODS, points(form, inputs), 1e-7)
    with torch.no_grad():
        torch.testing.assert_close(output_bounds(model, inputs).upper, output_bounds(form, inputs).upper)


def test_network_is_converted_for_the_shape_of_the_set():
    network = mlp((12, 6, 3)).float()
    shaped = torch.nn.Sequential(torch.nn.Flatten(), network)
    box = Box.around(torch.rand(2, 3, 4), 0.1)
    found = output_bounds(shaped, box)
    torch.testing.assert_close(found.upper, output_bounds(to_implicit(network, 12), box).upper)


def test_loop_without_a_perron_certificate_starts_from_the_euclidean_norm():
    """A strongly rotating loop is monotone although rho(|A|) > 1."""
    S = torch.randn(6, 6, dtype=F64)
    form = looped(6).replaced(A=2 * (S - S.mT) - 0.5 * torch.eye(6, dtype=F64))
    inputs = Box.around(torch.rand(2, 4, dtype=F64), 0.05)
    assert check(form, inputs, ["l2", "interval", Crown(2)], points(form, inputs), 1e-7) == 3


@pytest.mark.parametrize("name", ["relu loop", "two loops", "relu layers"])
def test_a_sample_does_not_depend_on_its_batch(name):
    form = FORMS[name]()
    u = torch.rand(4, form.sizes[1], dtype=F64)
    for method in ["box", "interval", "l2", Crown(2)]:
        whole = output_bounds(form, Box.around(u, 0.1), method)
        alone = output_bounds(form, Box.around(u[2:3], 0.1), method)
        torch.testing.assert_close(whole.upper[2:3], alone.upper, rtol=1e-10, atol=1e-10)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "hardtanh", "gelu"])
@pytest.mark.parametrize("method", ["interval", "l2", "crown", "best"])
def test_bounds_of_states_stay_in_what_an_activation_returns(activation, method):
    form = looped(8, activation, 0.5)
    inputs = Box.around(torch.rand(3, 4, dtype=F64), 0.4)
    found, phi = state_bounds(form, inputs, method), form.activations[0]
    assert (found.lower >= phi.image[0]).all() and (found.upper <= phi.image[1]).all()
    x = torch.stack([exact(form, u)[0] for u in points(form, inputs)])
    assert found.contains(x, 1e-8).all()


def test_euclidean_bounds_are_cut_and_not_only_clamped():
    """Where the ball reaches below zero the lower bound of a ReLU state is zero, elsewhere it is the ball's."""
    form = looped(8)
    inputs = Box.around(torch.rand(3, 4, dtype=F64), 0.05)
    found = state_bounds(form, inputs, "l2")
    x, _ = exact(form, inputs.center)
    radius = found.upper - x
    torch.testing.assert_close(found.lower, (x - radius).clamp(min=0), rtol=1e-6, atol=1e-8)
    assert (found.lower == 0).any() and (found.lower > 0).any()


def test_late_refinement_is_skipped_and_sound():
    form = looped(9)
    inputs = Box.around(torch.rand(2, 4, dtype=F64), 0.1)
    unit = torch.eye(3, dtype=F64).expand(2, 3, 3)
    late = Crown(3)(Query(form, inputs, unit, deadline=0.0))
    timely = Crown(3)(Query(form, inputs, unit))
    assert late.width.mean() > 1.05 * timely.width.mean()  # one bound may be tighter, as slopes are chosen anew
    y = torch.stack([exact(form, u)[1] for u in points(form, inputs)])
    assert late.contains(y, 1e-8).all()
