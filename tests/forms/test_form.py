import pytest
import torch
from problems import state_matrix

from wellposed import ImplicitForm, ImplicitModel, Relative
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Dense, LowRank, Sparse, Zero

OPERATORS = {
    "dense": lambda: Dense(torch.randn(4, 3, dtype=torch.float64)),
    "sparse": lambda: Sparse(torch.randn(4, 3, dtype=torch.float64).relu().to_sparse()),
    "low rank": lambda: LowRank(torch.randn(4, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)),
    "zero": lambda: Zero((4, 3), torch.float64),
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_agree_with_their_dense_matrix(kind):
    operator, x = OPERATORS[kind](), torch.randn(5, 3, dtype=torch.float64)
    matrix = operator.to_dense()
    torch.testing.assert_close(operator @ x, x @ matrix.mT)
    torch.testing.assert_close(operator.T @ (operator @ x), (x @ matrix.mT) @ matrix)
    torch.testing.assert_close(operator.abs().to_dense(), matrix.abs())
    torch.testing.assert_close(operator.row_sums(), matrix.sum(1))
    torch.testing.assert_close(operator.to_sparse().to_dense(), matrix)
    with pytest.raises(InputError, match="width 3"):
        operator @ torch.zeros(5, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"rank": 3}, {"activation": "tanh"}, {"feedthrough": False}]
)
def test_form_of_a_model_and_back(options):
    model = ImplicitModel(3, 2, 8, stop=Relative(1e-12), **options).double()
    u = torch.randn(6, 3, dtype=torch.float64)
    form = model.form()
    torch.testing.assert_close(form(u), model(u).detach(), rtol=1e-8, atol=1e-9)
    twin = form.to_model()
    assert torch.equal(twin.A, model.A) and torch.equal(twin.B, model.B)
    found = form.equilibrium(u, stop=Relative(1e-3))
    exact = model.equilibrium(u).value
    assert ((found.value - exact).abs().amax(1) <= found.error_bound).all()
    assert found.converged.all() and form.certificate().holds


def test_sparse_form_equals_dense_form():
    generator = torch.Generator().manual_seed(0)
    A = state_matrix("sparse", 50, 0.9, generator)
    B, C = torch.randn(50, 4, dtype=torch.float64), torch.randn(2, 50, dtype=torch.float64)
    sparse = ImplicitForm(A.to_sparse(), B, C, input_shape=(2, 2))
    u = torch.randn(3, 2, 2, dtype=torch.float64)
    assert isinstance(sparse.A, Sparse)
    torch.testing.assert_close(sparse(u), sparse.to_dense()(u.flatten(1)))
    assert isinstance(sparse.to_dense().A, Dense)


def test_rescaling_keeps_outputs():
    generator = torch.Generator().manual_seed(0)
    A = 3 * torch.randn(12, 12, dtype=torch.float64, generator=generator).triu(1)
    B, C = torch.randn(12, 4, dtype=torch.float64), torch.randn(2, 12, dtype=torch.float64)
    form, u = ImplicitForm(A, B, C), torch.randn(5, 4, dtype=torch.float64)
    small = form.rescale(0.5)
    assert float(small.A.abs().row_sums().max()) < 0.5
    assert form.certificate().condition == "triangular" and small.certificate().condition == "inf"
    torch.testing.assert_close(small(u), form(u), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["mu", "triangular", "weighted"])
def test_forms_that_plain_iteration_would_not_solve(kind):
    A = {
        "mu": torch.tensor([[-4.0, 2.0], [0.3, 0.0]]),
        "triangular": torch.tensor([[-3.0, 9.0], [0.0, 0.5]]),
        "weighted": torch.tensor([[0.0, 4.0], [0.1, 0.0]]),
    }[kind]
    form, u = ImplicitForm(A, torch.eye(2), torch.eye(2)), torch.randn(6, 2)
    assert form.certificate().condition == kind
    x = form(u)
    torch.testing.assert_close(x, torch.relu(x @ A.mT + u), rtol=1e-4, atol=1e-4)


def test_bad_blocks():
    eye = torch.eye(2)
    with pytest.raises(InputError, match="A must have the shape"):
        ImplicitForm(torch.zeros(2, 3), eye, eye)
    with pytest.raises(InputError, match="bias must have the shape"):
        ImplicitForm(eye, eye, eye, bias=torch.zeros(3))
    with pytest.raises(InputError, match="input_shape"):
        ImplicitForm(eye, eye, eye, input_shape=(3,))
    form = ImplicitForm(0.5 * eye, eye, eye)
    with pytest.raises(InputError, match="received \\(4, 3\\)"):
        form(torch.zeros(4, 3))
    with pytest.raises(InputError, match="float64"):
        form(torch.zeros(4, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="finite"):
        form(torch.full((1, 2), torch.nan))
    with pytest.raises(IllPosedError, match="fails"):
        ImplicitForm(2 * eye + 0.1, eye, eye)(torch.zeros(1, 2))
