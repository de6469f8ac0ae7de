"""Steps against scale: the law of homogeneous models, by hand-written iterations."""

import math

import pytest
import torch
from wellposed_lab.experiments.depth.run import (
    ABSOLUTE,
    RELATIVE,
    active_states,
    by_decile,
    homogeneity_error,
    local_rates,
    predicted_slope,
    sample_steps,
    scaled_steps,
    slope,
    with_rule,
)

from wellposed.errors import InputError
from wellposed.models.implicit import ImplicitModel

SCALES = [10.0**power for power in range(6)]


def make(bias=False, states=12, seed=0, **options):
    torch.manual_seed(seed)
    model = ImplicitModel(6, 3, states, kappa=0.9, bias=bias, **options).double()
    with torch.no_grad():
        model.state.raw.abs_().mul_(3.0)  # loops of one sign are slow
        if bias:
            model.bias.normal_()
    return model, torch.randn(60, 6, dtype=torch.float64)


def residuals(model, u, steps):
    """The residuals of a plain iteration from zero, one column a step."""
    x = torch.zeros(len(u), model.state_features, dtype=u.dtype)
    v = u @ model.B.T + (0 if model.bias is None else model.bias)
    found = []
    for _ in range(steps):
        new = (x @ model.A.T + v).relu()
        found.append((new - x).abs().amax(1))
        x = new
    return torch.stack(found, dim=1), x


@torch.no_grad()
def test_steps_are_those_of_a_plain_iteration():
    model, u = make()
    found, _ = residuals(model, u, 400)
    expected = (found <= 3e-6).double().argmax(1) + 1
    assert torch.equal(sample_steps(model, u, ABSOLUTE), expected.double())
    assert sample_steps(model, 1e3 * u, ABSOLUTE).mean() > expected.double().mean() + 5


@torch.no_grad()
def test_the_local_rate_is_how_fast_residuals_fall():
    model, u = make()
    found, x = residuals(model, u, 150)
    fall = (found[:, 120] / found[:, 60]) ** (1 / 60)
    usable = found[:, 120] > 1e-12
    assert usable.sum() > 20
    assert torch.allclose(local_rates(model, u)[usable], fall[usable], rtol=0.03)
    assert torch.equal(active_states(model, u), (x > 1e-9).sum(1).double())


def test_steps_grow_with_the_logarithm_of_the_scale_under_an_absolute_tolerance():
    model, u = make()
    fitted = slope(SCALES, scaled_steps(model, u, ABSOLUTE, SCALES))
    assert fitted == pytest.approx(predicted_slope(local_rates(model, u)), rel=0.02)
    assert fitted > 1


def test_steps_do_not_grow_under_a_relative_tolerance():
    model, u = make()
    steps = scaled_steps(model, u, RELATIVE, SCALES)
    assert max(steps) / min(steps) - 1 < 1e-3 and min(steps) > 10


def test_a_model_without_bias_is_homogeneous_and_one_with_it_is_not():
    model, u = make()
    assert homogeneity_error(model, u, SCALES) < 1e-10
    biased, u = make(bias=True)
    assert homogeneity_error(biased, u, SCALES) > 1e-3


def test_a_bias_breaks_the_law():
    model, u = make(bias=True)
    steps = scaled_steps(model, u, RELATIVE, [1e-3, *SCALES])
    assert max(steps) / min(steps) - 1 > 0.05


def test_the_rule_is_changed_on_a_copy_with_the_same_weights():
    model, _ = make(solver="anderson", max_steps=7)
    other = with_rule(model, ABSOLUTE)
    assert (model.solver, model.stop, model.max_steps) == ("anderson", None, 7)
    assert other.stop == ABSOLUTE and other.B is model.B


def test_samples_that_end_early_have_no_slope():
    half = 1 / math.log(2)
    assert predicted_slope(torch.tensor([0.5, 0.25, 0.0])) == pytest.approx(half * (1 + 0.5 + 0) / 3)


def test_deciles_follow_the_order():
    order = torch.randperm(50).double()
    assert by_decile(2 * order, order) == [2 * (5 * part + 2.0) for part in range(10)]


def test_slopes_of_other_activations_are_refused():
    with pytest.raises(InputError, match=r"'relu'.*'tanh'"):
        local_rates(ImplicitModel(2, 1, 3, activation="tanh"), torch.zeros(1, 2))
