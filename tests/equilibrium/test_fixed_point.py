import warnings

import pytest
import torch

from wellposed.equilibrium import Contraction, Newton, Status, Steps, fixed_point, watch
from wellposed.errors import ConvergenceError, ConvergenceWarning, InputError, MapError, UnknownNameError


def halve(x, u):
    return 0.5 * x + u


ONE = torch.ones(2, 1)


def test_diverging_map_is_reported():
    with pytest.warns(ConvergenceWarning, match="2 of 2 samples.*max_steps.*stop"):
        found = fixed_point(lambda x: 2 * x + 1, ONE, solver="picard", max_steps=40)
    assert found.status.tolist() == [Status.DIVERGED] * 2
    assert found.steps.tolist() == [40, 40]


def test_one_warning_a_solve_that_points_at_the_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fixed_point(lambda x: x + 1, ONE, max_steps=5)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_raise_and_ignore(recwarn):
    with pytest.raises(ConvergenceError, match="worst residual"):
        fixed_point(lambda x: x + 1, ONE, max_steps=5, on_failure="raise")
    assert fixed_point(lambda x: x + 1, ONE, max_steps=5, on_failure="ignore").failed.all()
    assert not recwarn


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_input_is_refused(value):
    bad = torch.tensor([[1.0], [value]])
    with pytest.raises(ValueError, match=r"x0 must be finite.*\(1, 0\)"):
        fixed_point(halve, bad, ONE)
    with pytest.raises(ValueError, match="input 0 must be finite"):
        fixed_point(halve, ONE, bad)


def test_options_are_checked():
    with pytest.raises(TypeError, match="sovler"):
        fixed_point(halve, ONE, ONE, sovler="picard")
    with pytest.raises(UnknownNameError, match="did you mean 'anderson'"):
        fixed_point(halve, ONE, ONE, solver="andersen")
    with pytest.raises(UnknownNameError, match="unknown gradient 'exact'; valid: implicit, phantom, unrolled"):
        fixed_point(halve, ONE, ONE, gradient="exact")
    with pytest.raises(UnknownNameError, match="on_failure"):
        fixed_point(halve, ONE, ONE, on_failure="explode")
    with pytest.raises(InputError, match=r"max_steps must be at least 1, .* received 0"):
        fixed_point(halve, ONE, ONE, max_steps=0)
    with pytest.raises(InputError, match="batch size 2 of x0"):
        fixed_point(halve, ONE, torch.ones(3, 1))
    with pytest.raises(InputError, match="is a float"):
        fixed_point(halve, ONE, 3.0)
    with pytest.raises(InputError, match="floating point"):
        fixed_point(halve, torch.ones(2, 1, dtype=torch.int64), ONE)
    with pytest.raises(InputError, match="tuple of tensors; received nothing"):
        fixed_point(halve, (), ONE)


def test_a_map_that_changes_shape_or_dtype():
    with pytest.raises(MapError, match=r"\(2, 1\).*received \[\(2, 2\)\]"):
        fixed_point(lambda x: x.repeat(1, 2), ONE)
    with pytest.raises(MapError, match=r"received .*float64"):
        fixed_point(lambda x: x.double(), ONE)
    with pytest.raises(MapError, match="NoneType"):
        fixed_point(lambda x: None, ONE)


def test_a_captured_batch_tensor_is_explained():
    u = torch.linspace(0, 1, 8)[:, None]
    rate = torch.tensor([0.0] * 7 + [0.9])[:, None]
    with pytest.raises(MapError, match="must be one of its inputs"):
        fixed_point(lambda x, u: rate * x + u, torch.zeros_like(u), u, solver="picard")


def test_a_map_without_inputs_may_capture_anything():
    rate = torch.tensor([[0.0], [0.5], [0.9]])
    found = fixed_point(lambda x: rate * x + 1, torch.zeros(3, 1))
    torch.testing.assert_close(found.value, 1 / (1 - rate), rtol=1e-4, atol=0)


def test_error_bound_of_a_declared_contraction():
    found = fixed_point(Contraction(halve, 0.5), torch.zeros(2, 1), ONE)
    assert ((found.value - 2).abs()[:, 0] <= found.error_bound).all()
    assert fixed_point(halve, torch.zeros(2, 1), ONE).error_bound is None
    with pytest.raises(InputError, match=r"received 1\.0"):
        Contraction(halve, 1.0)


def test_newton_above_the_dense_limit_cannot_be_unrolled():
    with pytest.raises(InputError, match=r"gradient=Implicit\(\)"):
        fixed_point(
            halve,
            torch.zeros(2, 1),
            ONE.clone().requires_grad_(),
            solver=Newton(dense=0),
            gradient="unrolled",
        )


def test_watch_counts_forward_and_adjoint_solves():
    u = ONE.clone().requires_grad_()
    with watch() as outer:
        with watch() as inner:
            fixed_point(halve, torch.zeros(2, 1), u).value.sum().backward()
        fixed_point(lambda x: x + 1, ONE, max_steps=5, on_failure="ignore")
    assert len(inner.forward) == len(inner.adjoint) == 1 and inner.failed_share == 0
    assert len(outer.forward) == 2 and outer.failed_share == pytest.approx(2 / 6)
    assert inner.mean_steps > 1


def test_solution_prints_what_happened():
    text = str(fixed_point(halve, torch.zeros(2, 1), ONE))
    assert "2 samples: 2 converged; steps" in text and "residual" in text
    assert str(fixed_point(halve, torch.zeros(0, 1), torch.zeros(0, 1))) == "empty batch"


def test_runs_under_vmap_with_statuses_instead_of_errors():
    u = torch.tensor([[[1.0]], [[torch.nan]]])

    def solve(u):
        found = fixed_point(halve, torch.zeros_like(u), u, solver="picard", stop=Steps(30), gradient="unrolled")
        return found.value, found.status

    value, status = torch.func.vmap(solve)(u)
    torch.testing.assert_close(value[0], torch.full((1, 1), 2.0))
    assert status.flatten().tolist() == [Status.STEPS_DONE, Status.NONFINITE]


def test_runs_under_torch_compile():
    layer = torch.nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.mul_(0.3)

    def run(u):
        return fixed_point(lambda x, u: torch.tanh(layer(x) + u), torch.zeros_like(u), u).value * 2

    u = torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(run, backend="eager")(u), run(u))
