"""Edges of bounds and attacks: direct paths, ties, empty budgets, and what is drawn."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from attack_cases import linear
from torch import nn

from wellposed.activations import Activation, get_activation, leaky_relu
from wellposed.activations.blockwise import piecewise
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Dense, ImplicitForm
from wellposed.robust import Ball, Box, MethodError, Separable, linear_programs, output_bounds, separable_bound
from wellposed.robust.attacks import Threat, jsma, pgd, train_surrogate
from wellposed.robust.attacks.attack import under_attack
from wellposed.robust.attacks.sparse import _slopes, _step, entries
from wellposed.robust.bounds import _reach
from wellposed.robust.boxes import _one_residual, box_bounds
from wellposed.robust.crown import Multipliers, lines_of
from wellposed.robust.draw import bound_projection, gallery
from wellposed.robust.linear_programs import LinearProgram
from wellposed.robust.query import Query
from wellposed.robust.sensitivity import differentiable_form
from wellposed.robust.sets import Interval, radii
from wellposed.robust.training import TradesLoss

F64 = torch.float64


def test_intervals_of_another_type_hold_what_they_are_made_of():
    generator = torch.Generator().manual_seed(0)
    center = torch.randn(1000, generator=generator, dtype=F64)
    radius = torch.rand(1000, generator=generator, dtype=F64) * 1e-7
    found = Interval.around(center, radius, torch.float32)
    assert (found.upper.double() >= center + radius).all() and (found.lower.double() <= center - radius).all()
    assert (found.upper.double() - found.lower.double() <= 2 * radius + 1e-6 * center.abs() + 1e-30).all()


@pytest.mark.parametrize("method", ["l2", "box", "interval", "crown"])
def test_bounds_count_the_path_past_the_states(method):
    D = torch.tensor([[2.0, -1.0]], dtype=F64)
    form = ImplicitForm(torch.zeros(1, 1, dtype=F64), torch.zeros(1, 2, dtype=F64), torch.ones(1, 1, dtype=F64), D)
    found = output_bounds(form, Box.around(torch.tensor([[0.5, 0.25]], dtype=F64), 0.1), method)
    torch.testing.assert_close(found.lower, torch.tensor([[0.45]], dtype=F64), atol=1e-9, rtol=0)
    torch.testing.assert_close(found.upper, torch.tensor([[1.05]], dtype=F64), atol=1e-9, rtol=0)


def test_residuals_of_states_count_the_rounding_of_the_activation():
    z = 3 * torch.randn(500, 1, dtype=F64)
    x, zero = torch.tanh(z), torch.zeros_like(z)
    bounds = _one_residual(get_activation("tanh"), x, z, z.abs(), zero)
    with mpmath.workdps(40):
        for state, point, bound in zip(x.tolist(), z.tolist(), bounds.tolist(), strict=True):
            assert abs(state[0] - mpmath.tanh(mpmath.mpf(point[0]))) <= bound[0]


def test_residuals_of_large_states_are_not_bounded_from_below():
    z = 1000 + torch.rand(100, 1, dtype=F64)
    x = z + 2.0**-20  # exactly
    assert (_one_residual(get_activation("relu"), x, z, z, torch.zeros_like(z)) >= 2.0**-20).all()


def test_bounds_of_a_ball_count_the_rounding_of_a_large_output_bias():
    """The output of a ball of no radius is the bias; the sum of its entries nearly cancels."""
    zero, bias = torch.zeros(1, 2, dtype=F64), 1e8 * torch.randn(64, dtype=F64)
    bias[0] -= bias.sum()
    form = ImplicitForm(zero[:, :1], zero, torch.zeros(64, 1, dtype=F64), output_bias=bias)
    found = box_bounds(Query(form, Ball(zero, 0.0), torch.ones(1, 1, 64, dtype=F64)))
    exact = sum(Fraction(entry) for entry in bias.tolist())
    assert Fraction(found.lower.item()) <= exact <= Fraction(found.upper.item())
    assert found.upper - found.lower < 1e-3


def test_the_norm_bound_is_finite_or_refused_where_the_norm_is_nearly_one():
    """The norm is raised by a few roundings, so that it is exactly one for one of these matrices without loop."""
    eye, outcomes = torch.eye(2, dtype=F64), set()
    for k in range(1, 60):
        form = ImplicitForm((1 - k * 2.0**-53) * eye.roll(1, 0).triu(), eye, eye)
        try:
            outcomes.add(bool(output_bounds(form, Box.around(0 * eye[:1], 0.1), "norm").upper.isfinite().all()))
        except MethodError:
            outcomes.add("refused")
    assert outcomes == {True, "refused"}


def test_range_over_a_box_is_that_of_its_corners():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(3, 2, generator=generator, dtype=F64)
    lower = torch.randn(4, 2, generator=generator, dtype=F64)
    upper = lower + torch.rand(4, 2, generator=generator, dtype=F64)
    corners = torch.stack([torch.stack([a[:, 0], b[:, 1]], 1) for a in (lower, upper) for b in (lower, upper)])
    images = corners @ matrix.mT
    low, high, size = _reach(matrix, lower, upper)
    torch.testing.assert_close(low, images.amin(0))
    torch.testing.assert_close(high, images.amax(0))
    assert (size >= (corners.abs() @ matrix.abs().mT).amax(0) - 1e-12).all()


def test_a_radius_is_nowhere_negative():
    with pytest.raises(InputError):
        radii(torch.zeros(1, 2), torch.tensor([0.1, -0.1]))
    assert radii(torch.zeros(1, 2), torch.tensor([0.1, 0.0])).shape == (1, 2)


def test_nothing_may_change_where_the_count_is_zero():
    assert entries(0.0, torch.zeros(1, 5)) == 0 and entries(1.0, torch.zeros(1, 5)) == 5
    for share in (-0.1, 1.1):
        with pytest.raises(InputError):
            entries(share, torch.zeros(1, 5))
    u, target = torch.full((1, 6), 0.5, dtype=F64), torch.tensor([0])
    assert Threat(u, 0.1, count=0).count == 0
    assert torch.equal(pgd(linear()[0], u, target, 0.1, count=0).inputs, u)


class Window(nn.Module):
    """Class 1 wins where the input is near a point, class 0 elsewhere."""

    def __init__(self, point: float, width: float) -> None:
        super().__init__()
        self.point, self.width = point, width

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(u), self.width**2 - (u - self.point).square()], 1)


@pytest.mark.parametrize(("steps", "share", "point", "width"), [(1, 0.2, 0.31, 0.1), (4, 0.1, 0.385, 0.02)])
def test_the_last_point_of_a_climb_counts_and_late_steps_are_shorter(steps, share, point, width):
    u = torch.full((1, 1), 0.2, dtype=F64)
    found = pgd(Window(point, width), u, torch.tensor([0]), 0.5, steps=steps, step_size=share)
    reached = 0.2 + 0.5 * share * (1.0 if steps == 1 else 3.5)  # 1 + 1 + 1 + 1/2 steps of four
    assert found.success.all() and float(found.inputs) == pytest.approx(reached)


def test_steps_of_a_climb_are_whole_and_positive():
    u, target = torch.full((1, 6), 0.5, dtype=F64), torch.tensor([0])
    wrong = (
        {"steps": 1.5},
        {"restarts": 0.5},
        {"steps": 0},
        {"restarts": -1},
        {"step_size": 0.0},
        {"momentum": 1.0},
    )
    for options in wrong:
        with pytest.raises(InputError):
            pgd(linear()[0], u, target, 0.1, **options)
    assert pgd(linear()[0], u, target, 0.1, steps=1, restarts=0, step_size=1.0).inputs.shape == u.shape


def test_surrogates_need_a_step():
    with pytest.raises(InputError):
        train_surrogate(linear()[0], torch.rand(4, 6, dtype=F64), step=0.0)


def test_saliency_is_that_of_a_linear_model():
    model, W, _ = linear(4, 3)
    u, target, goals = torch.rand(2, 4, dtype=F64), torch.tensor([0, 2]), torch.tensor([1, 0])
    with under_attack(model, u, target) as victim:
        rise, others, lead = _slopes(victim, u, goals)
    torch.testing.assert_close(rise, W[goals])
    torch.testing.assert_close(others, W.sum(0) - W[goals])
    torch.testing.assert_close(lead, W[goals] - W[target])


def test_saliency_moves_what_can_still_move():
    threat = Threat(torch.tensor([[1.0, 0.5, 0.0]], dtype=F64), 1.0)
    slopes = tuple(
        torch.tensor([row], dtype=F64) for row in ([3.0, 1.0, -2.0], [-3.0, -1.0, 2.0], [1.0, 1.0, 1.0])
    )
    points, free = _step(threat, threat.u, torch.ones(1, 3, dtype=torch.bool), slopes)
    assert points.tolist() == [[1.0, 1.0, 0.0]] and free.tolist() == [[True, False, True]]


def test_saliency_keeps_to_its_count():
    u = torch.rand(3, 6, dtype=F64)
    found = jsma(linear()[0], u, torch.tensor([0, 1, 0]), 2, 0.3)
    assert ((found.inputs != u).sum(1) <= 2).all()


def test_trades_is_the_clean_loss_without_radius_or_weight():
    torch.manual_seed(0)
    model, u, target = nn.Linear(2, 2), torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    clean = nn.functional.cross_entropy(model(u), target)
    for radius, weight in ((0.0, 6.0), (0.1, 0.0)):
        assert torch.equal(TradesLoss(model, radius, weight=weight)(model(u), target), clean)
    for radius, weight in ((1.0, 6.0), (0.1, 1.0)):
        assert TradesLoss(model, radius, weight=weight)(model(u), target) > clean
    with pytest.raises(InputError):
        TradesLoss(model, 0.1, weight=-1.0)


def test_entries_must_be_numbers_and_loops_well_posed():
    box = Box.around(torch.zeros(1, 1), 0.1)
    one, three = torch.ones(1, 1), torch.full((1, 1), 3.0)
    with pytest.raises(InputError):
        output_bounds(ImplicitForm(torch.zeros(1, 1), torch.nan * one, one), box, "interval")
    with pytest.raises(IllPosedError):
        output_bounds(ImplicitForm(three, one, one, activation="tanh"), box, "box")
    assert output_bounds(ImplicitForm(three, one, one, activation="tanh"), box, "interval").branch is not None
    with pytest.raises(InputError):
        separable_bound(ImplicitForm(0.5 * one, one, one), box, Separable(torch.square, "convex"), tolerance=0.0)


def test_multipliers_that_have_settled_stay():
    start = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=F64)
    ones = torch.ones(2, 2, dtype=F64)
    loop = Multipliers({0: start}, {0: (ones, ones)}, {0: [(0, Dense(0.1 * torch.eye(2, dtype=F64)))]})
    nu, image = loop.settled(50, 0.5)
    assert torch.equal(nu[0], start)
    torch.testing.assert_close(image[0], 1.1 * start)
    nu, _ = loop.settled(50, 1e-12)
    torch.testing.assert_close(nu[0], start / 0.9)


def test_a_known_argument_needs_no_lines():
    z = Interval(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.6]))
    assert lines_of(get_activation("tanh")).unstable(z).tolist() == [False, True]


def test_a_network_is_converted_for_a_shape():
    with pytest.raises(InputError, match="give input_shape"):
        differentiable_form(nn.Sequential(nn.Linear(2, 2)))


def test_programs_say_nothing(capfd):
    whole = np.array([-np.inf]), np.array([1.0])
    program = LinearProgram(np.ones((1, 2)), *whole, np.zeros(2), np.ones(2))
    assert program.maximum(np.ones(2)).bound == pytest.approx(1.0)
    assert capfd.readouterr() == ("", "")


def test_programs_are_refused_by_the_size_of_their_matrix(monkeypatch):
    form = ImplicitForm(torch.zeros(2, 2, dtype=F64), torch.ones(2, 3, dtype=F64), torch.ones(1, 2, dtype=F64))
    monkeypatch.setattr(linear_programs, "LARGEST", 28)  # 4 x (4 + 3)
    assert linear_programs.ReluConstraints.of(form, "lp").terms > 0
    monkeypatch.setattr(linear_programs, "LARGEST", 27)
    with pytest.raises(MethodError, match="4 x 7 entries"):
        linear_programs.ReluConstraints.of(form, "lp")


@pytest.mark.parametrize(("width", "aspect"), [(4, 1.0), (5, "auto")])
def test_galleries_have_no_ticks_and_strips_fill_their_place(width, aspect):
    form = ImplicitForm(torch.zeros(2, 2), torch.eye(2, width), torch.eye(2))
    u, target = torch.full((2, width), 0.5), torch.tensor([0, 1])
    figure = gallery(form, u, pgd(form, u, target, 0.1), target)
    for axes in figure.axes:
        assert not len(axes.get_xticks()) and not len(axes.get_yticks())
        assert axes.get_aspect() == aspect


def test_galleries_print_the_scale_of_the_difference():
    form = ImplicitForm(torch.zeros(2, 2), torch.eye(2, 4), torch.eye(2))
    u, target = torch.full((2, 4), 0.5), torch.tensor([0, 1])
    for radius, scale in ((0.25, "0.25"), (0.0, "1e-12")):
        figure = gallery(form, u, pgd(form, u, target, radius), target)
        assert scale in figure.axes[4].get_ylabel()


def test_boxes_have_a_legend():
    form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
    figure = bound_projection(form, Box.around(torch.zeros(1, 2), 0.1), methods=("interval", "box"), samples=20)
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert any("interval" in name for name in names) and any("box" in name for name in names)


MISNAMED = [
    Activation("tanh(steep)", lambda z: torch.tanh(3 * z), (0.0, 3.0), image=(-1.0, 1.0)),
    Activation("tanh", lambda z: torch.tanh(3 * z), (0.0, 3.0), image=(-1.0, 1.0)),
    Activation("sigmoid(2)", lambda z: torch.sigmoid(2 * z), (0.0, 0.5), image=(0.0, 1.0)),
    Activation("relu(shifted)", lambda z: torch.relu(z - 1), (0.0, 1.0)),
    Activation("relu", lambda z: torch.relu(z - 1), (0.0, 1.0)),
    Activation("hardtanh(steep)", lambda z: (2 * z).clamp(-1, 1), (0.0, 2.0), image=(-1.0, 1.0)),
    Activation("leaky_relu(bent)", lambda z: torch.where(z > 1, z, 0.5 * z + 0.5), (0.0, 1.0)),
    Activation("max_pool(abs)", lambda z: z.abs(), (-1.0, 1.0), block=2, constants={"inf": 1.0}),
    Activation("group_sort(mirrored)", lambda z: -z, (-1.0, -1.0), block=2, constants={"inf": 1.0}),
    piecewise([leaky_relu(0.1), get_activation("tanh")], [1, 1]),
]


@pytest.mark.parametrize("method", ["interval", "crown", "optimised", "lp"])
@pytest.mark.parametrize("phi", MISNAMED, ids=lambda phi: phi.name)
def test_bounds_hold_whatever_an_activation_is_called(phi, method):
    """Every output that is computed on a grid, without any of the code of bounds, lies within them."""
    eye = torch.eye(2, dtype=F64)
    D = torch.tensor([[-0.5, -1.0], [0.5, 1.0]], dtype=F64)
    form = ImplicitForm(torch.zeros(2, 2, dtype=F64), eye, torch.ones(2, 2, dtype=F64), D, activation=phi)
    side = torch.linspace(-3, 3, 101, dtype=F64)
    u = torch.cartesian_prod(side, side)
    y = phi(u) @ torch.ones(2, 2, dtype=F64) + u @ D.mT
    box = Box(torch.full((1, 2), -3.0, dtype=F64), torch.full((1, 2), 3.0, dtype=F64))
    try:
        found = output_bounds(form, box, method)
    except MethodError:  # says that it does not know the activation
        return
    assert (found.lower <= y + 1e-9).all() and (found.upper >= y - 1e-9).all()
