import pytest
import torch
from robust_cases import F64, FORMS, cnn, exact, looped, mlp

from wellposed.convert import to_implicit
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import gains
from wellposed.robust import lipschitz, sensitivity


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_sensitivity_of_a_loop_is_the_formula(activation):
    form = looped(8, activation)
    gamma = 0.25 if activation == "sigmoid" else 1.0
    A, B, C, D = (getattr(form, name).to_dense().abs() for name in "ABCD")
    expected = C @ torch.linalg.solve(torch.eye(8, dtype=F64) - gamma * A, gamma * B) + D
    found = sensitivity(form)
    assert (found >= expected * (1 - 1e-13)).all()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(sensitivity(form.to(torch.float32)), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", FORMS)
def test_rows_found_backwards_are_the_columns_found_forwards(name):
    form = FORMS[name]()
    torch.testing.assert_close(sensitivity(form), gains(form, self_loops=False), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_outputs_move_no_further(name):
    form = FORMS[name]()
    u = torch.rand(40, form.sizes[1], dtype=F64)
    S = sensitivity(form)
    for scale in (1e-3, 1.0):
        step = scale * torch.randn_like(u)
        change = (exact(form, u + step)[1] - exact(form, u)[1]).abs()
        assert (change <= step.abs() @ S.mT + 1e-8).all()


def test_network_needs_no_matrix():
    network = cnn(False)
    S = sensitivity(network, (1, 6, 6))
    dense = to_implicit(network, (1, 6, 6)).to_dense()
    A, B, C = (getattr(dense, name).to_dense().abs() for name in "ABC")
    torch.testing.assert_close(S, C @ torch.linalg.solve(torch.eye(len(A), dtype=F64) - A, B), rtol=1e-9, atol=0)


def test_lipschitz_constants_bound_quotients():
    form = to_implicit(mlp(), (4,))
    u = torch.rand(200, 4, dtype=F64)
    step = 0.1 * torch.randn_like(u)
    change = form(u + step) - form(u)
    S = sensitivity(form)
    assert lipschitz(form) == pytest.approx(float(S.sum(1).max()))
    assert lipschitz(form, "2") == pytest.approx(float(torch.linalg.matrix_norm(S, 2)))
    for norm in ("1", "2", "inf"):
        sizes = [torch.linalg.vector_norm(part, float(norm), dim=1) for part in (change, step)]
        assert (sizes[0] <= lipschitz(form, norm) * sizes[1]).all()


def test_bad_questions():
    with pytest.raises(InputError, match="give input_shape"):
        sensitivity(mlp())
    with pytest.raises(InputError, match="norm is"):
        lipschitz(looped(4), "3")
    with pytest.raises(IllPosedError, match="Perron"):
        sensitivity(looped(4).replaced(A=torch.ones(4, 4, dtype=F64)))
