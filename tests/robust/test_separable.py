"""Theorem 7 by its dual: equal to the programs it implies, and never below what is attained."""

import pytest
import torch
from robust_cases import F64, looped

from wellposed.convert import to_implicit
from wellposed.errors import InputError, UnknownNameError
from wellposed.robust import (
    Ball,
    Box,
    ConvexSet,
    MethodError,
    Separable,
    SparseBox,
    output_bounds,
    separable_bound,
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def plain(n=9):
    """A loop whose outputs are functions of the states alone."""
    return looped(n).replaced(D=None, output_bias=None)


def sets(u):
    yield Box.around(u, 0.05)
    yield SparseBox(u, 0.2, 2, lower=0.0, upper=1.0)


def sampled(form, inputs, count=300):  # (count, B, n)
    tried = inputs.sample(count)
    return form.equilibrium(tried.flatten(0, 1)).value.view(*tried.shape[:2], -1)


@pytest.mark.parametrize("sign", [1, -1])
def test_linear_functions_equal_the_triangle_program(sign):
    form, u = plain(), torch.rand(2, 4, dtype=F64)
    f = Separable.linear(sign * form.C.to_dense()[0])
    for inputs in sets(u):
        triangle = output_bounds(form, inputs, "triangle")
        expected = triangle.upper[:, 0] if sign > 0 else -triangle.lower[:, 0]
        assert torch.allclose(separable_bound(form, inputs, f), expected, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_theorem_lies_between_the_triangle_and_the_printed_program(sign):
    form, u = plain(), torch.rand(3, 4, dtype=F64)
    f = Separable.linear(sign * form.C.to_dense()[0])
    inputs = Box.around(u, 0.05)
    theorem = separable_bound(form, inputs, f, "theorem")
    printed, triangle = (output_bounds(form, inputs, name) for name in ("lp", "triangle"))
    above = printed.upper[:, 0] if sign > 0 else -printed.lower[:, 0]
    below = triangle.upper[:, 0] if sign > 0 else -triangle.lower[:, 0]
    assert (theorem <= above + 1e-6).all() and (theorem >= below - 1e-6).all()


def test_printed_program_forgets_that_active_states_equal_their_argument():
    form = looped(6).replaced(D=None, output_bias=None, bias=torch.full((6,), 9.0, dtype=F64))
    inputs = Box.around(torch.rand(1, 4, dtype=F64), 0.01)
    f = Separable.linear(form.C.to_dense()[0])
    exact = output_bounds(form, inputs, "triangle").upper[:, 0]  # all states are active: the model is affine
    assert torch.allclose(separable_bound(form, inputs, f, "theorem"), exact, atol=1e-6)
    assert (output_bounds(form, inputs, "lp").upper[:, 0] > exact + 1e-3).all()


def test_balls_are_bounded_by_their_support_and_not_by_their_box():
    form, ball = plain(), Ball(torch.rand(2, 4, dtype=F64), 0.1)
    f = Separable.linear(form.C.to_dense()[0])
    found = separable_bound(form, ball, f)
    assert (found < output_bounds(form, ball, "triangle").upper[:, 0]).all()
    assert (found >= (sampled(form, ball) * form.C.to_dense()[0]).sum(-1).amax(0) - 1e-8).all()
    user = ConvexSet(ball.support, ball.box(), ball.center)
    assert torch.allclose(separable_bound(form, user, f), found, atol=1e-5)


@pytest.mark.parametrize("relaxation", ["theorem", "triangle"])
@pytest.mark.parametrize("curvature", ["convex", "concave"])
def test_curved_functions_are_bounded_closely(relaxation, curvature):
    form, inputs = plain(), Box.around(torch.rand(2, 4, dtype=F64), 0.02)
    x0 = form.equilibrium(inputs.center).value[0]
    sign = 1 if curvature == "convex" else -1
    f = Separable(lambda x: sign * (x - x0 - 0.05).square(), curvature)
    found = separable_bound(form, inputs, f, relaxation)
    attained = f.function(sampled(form, inputs)).sum(-1).amax(0)
    assert (found >= attained).all()
    if relaxation == "triangle":
        assert (found - attained <= 0.05 + 0.2 * attained.abs()).all()


def test_concave_maximum_of_an_affine_model_is_exact():
    """With all states active ``max -(x - t)^2`` is a least-squares problem, here with an optimum inside."""
    form = looped(5).replaced(D=None, output_bias=None, bias=torch.full((5,), 9.0, dtype=F64))
    inputs = Box.around(torch.full((1, 4), 0.5, dtype=F64), 0.1)
    goal = form.equilibrium(torch.tensor([[0.55, 0.45, 0.52, 0.5]], dtype=F64)).value[0]
    f = Separable(lambda x: -(x - goal).square(), "concave")
    assert float(separable_bound(form, inputs, f)) == pytest.approx(0.0, abs=1e-5)


def test_bound_holds_after_one_round():
    form, inputs = plain(), Box.around(torch.rand(2, 4, dtype=F64), 0.05)
    f = Separable(lambda x: -(x - 0.3).square(), "concave")
    early, late = (separable_bound(form, inputs, f, rounds=rounds) for rounds in (1, 60))
    attained = f.function(sampled(form, inputs)).sum(-1).amax(0)
    assert (early >= late - 1e-9).all() and (late >= attained).all()


def test_float32_is_rounded_up():
    form, inputs = plain(), Box.around(torch.rand(2, 4, dtype=F64), 0.05)
    f = Separable.linear(form.C.to_dense()[0])
    narrow = separable_bound(form.to(torch.float32), inputs.to(torch.float32), f)
    assert narrow.dtype == torch.float32
    assert (narrow.double() - separable_bound(form, inputs, f)).abs().max() < 1e-4


def test_layers_have_the_same_bound_as_the_triangle_program():
    network = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.ReLU(), torch.nn.Linear(7, 6), torch.nn.ReLU(),
                                  torch.nn.Linear(6, 2, bias=False)).double()  # fmt: skip
    form = to_implicit(network, (4,))
    inputs = Box.around(torch.rand(2, 4, dtype=F64), 0.1)
    f = Separable.linear(form.C.to_dense()[1])
    assert torch.allclose(
        separable_bound(form, inputs, f), output_bounds(form, inputs, "triangle").upper[:, 1], atol=1e-6
    )


def test_no_samples_have_no_bounds():
    form, none = looped(4).replaced(bias=None), torch.zeros(0, 4, dtype=F64)
    assert separable_bound(form, Box(none, none), Separable.linear(torch.ones(4))).shape == (0,)


def test_bad_input_is_refused():
    form, inputs = plain(), Box.around(torch.rand(1, 4, dtype=F64), 0.05)
    with pytest.raises(InputError, match="curvature"):
        Separable(torch.square, "wavy")
    with pytest.raises(UnknownNameError, match="relaxation"):
        separable_bound(form, inputs, Separable(torch.square, "convex"), "square")
    with pytest.raises(InputError, match="as many finite values"):
        separable_bound(form, inputs, Separable(torch.sum, "convex"))
    with pytest.raises(MethodError, match="tanh"):
        separable_bound(looped(5, "tanh"), inputs, Separable(torch.square, "convex"))
