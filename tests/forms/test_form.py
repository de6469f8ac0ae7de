import pytest
import torch
from form_cases import F64, FORMS, build, feed_forward, loop_inside, rows
from problems import state_matrix

from wellposed import ImplicitForm, ImplicitModel, Relative
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Block, Dense, Diagonal, Selection, Sparse, Zero


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


@pytest.mark.parametrize("case", FORMS)
def test_dense_twin(case):
    form, u = case(), torch.randn(4, 3, dtype=F64)
    twin = form.to_dense()
    torch.testing.assert_close(twin(u), form(u), rtol=1e-4, atol=1e-4)
    assert torch.equal(twin.A.to_dense(), form.A.to_dense())
    assert all(isinstance(getattr(twin, name), Dense) for name in "BCD")
    if len({phi.name for phi in form.activations}) > 1:
        assert all(isinstance(part, Dense) for part in twin.A.parts.values())
        assert set(twin.A.parts) <= set(form.A.parts) and twin.partition == form.partition
        assert len(twin.order.loops) == len(form.order.loops)
    else:
        assert isinstance(twin.A, Dense)


def test_dense_twin_keeps_substitution_exact():
    form, u = feed_forward(), torch.randn(4, 3, dtype=F64)
    twin = form.to_dense()
    assert twin.certificate().condition == "triangular" and (twin.equilibrium(u).steps == 1).all()
    torch.testing.assert_close(twin(u), form(u), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("case", FORMS)
def test_conversion_to_another_dtype(case):
    form, u = case(), torch.randn(4, 3, dtype=F64)
    single = form.to(torch.float32)
    assert single.dtype == single.B.dtype == single.C.dtype == single.D.dtype == torch.float32
    assert single.bias.dtype == single.output_bias.dtype == torch.float32
    assert single.partition == form.partition
    torch.testing.assert_close(single(u.float()).double(), form(u), rtol=1e-3, atol=1e-3)
    back = single.to(F64)
    torch.testing.assert_close(back(u), form(u), rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match=r"float64.*float32"):
        single(u)


def test_copies_with_changes():
    form, u = loop_inside(), torch.randn(4, 3, dtype=F64)
    assert torch.equal(form.replaced()(u), form(u))
    shifted = form.replaced(output_bias=form.output_bias + 1)
    torch.testing.assert_close(shifted(u), form(u) + 1)
    plain = form.replaced(output_bias=None, D=None)
    torch.testing.assert_close(plain(u) + (form.D @ u) + form.output_bias, form(u))
    assert isinstance(plain.D, Zero) and plain.D.shape == (2, 3) and plain.D.dtype == F64
    named = form.replaced(labels=list("abcdef"))
    assert named.labels == tuple("abcdef") and named.replaced(bias=None).labels == named.labels
    assert named.to(torch.float32).labels == named.labels
    shaped = form.replaced(input_shape=(1, 3))
    assert torch.equal(shaped(u[:, None]), form(u)) and torch.equal(shaped(u), form(u))
    with pytest.raises(InputError, match="6 blocks need as many labels; received 2"):
        form.replaced(labels=["a", "b"])
    with pytest.raises(InputError, match="6 blocks; received 5 activations"):
        form.replaced(activation=["relu"] * 5)


def test_one_activation_serves_all_blocks():
    parts = {(0, 1): rows(4, 2, 1.0)}
    form = build((4, 2), parts, ["relu", "relu"])
    same = form.replaced(activation="relu")
    u = torch.randn(3, 3, dtype=F64)
    assert same.partition == (4, 2) and torch.equal(same(u), form(u))
    assert repr(same) == "ImplicitForm(6 states, 3 inputs, 2 outputs, relu)"
    whole = form.replaced(activation="softmax")  # acts on all states at once
    assert whole.partition == (6,)
    x = whole.equilibrium(u, stop=Relative(1e-12)).value
    torch.testing.assert_close(x.sum(1), torch.ones(3, dtype=F64))
    pairs = form.replaced(activation="max_pool(2)")
    assert pairs.partition == (4, 2) and len(pairs.activations) == 2
    triples = form.replaced(activation="max_pool(3)")  # whose blocks are not those of A
    assert triples.partition == (6,)
    z = (triples.A @ (x := triples.equilibrium(u, stop=Relative(1e-12)).value)) + (triples.B @ u) + triples.bias
    torch.testing.assert_close(x[:, 0], z[:, :3].amax(1))


def test_inputs_and_outputs_in_blocks_of_their_own():
    """B and C may be cut otherwise than A, or not at all."""
    form, u = loop_inside(), torch.randn(4, 3, dtype=F64)
    B, C = form.B.to_dense(), form.C.to_dense()
    cut = {
        "dense": (Dense(B), Dense(C)),
        "sparse": (Sparse(B.to_sparse()), Sparse(C.to_sparse())),
        "by columns": (
            Block((21,), (1, 2), {(0, 0): Dense(B[:, :1]), (0, 1): Dense(B[:, 1:])}),
            Block((1, 1), (21,), {(0, 0): Dense(C[:1]), (1, 0): Dense(C[1:])}),
        ),
        "elsewhere": (
            Block((10, 11), (3,), {(0, 0): Dense(B[:10]), (1, 0): Dense(B[10:])}),
            Block((2,), (20, 1), {(0, 0): Dense(C[:, :20]), (0, 1): Dense(C[:, 20:])}),
        ),
    }
    for B, C in cut.values():
        torch.testing.assert_close(form.replaced(B=B, C=C)(u), form(u), rtol=1e-12, atol=1e-12)


def test_inputs_by_selection_and_states_without_input():
    B = Selection(torch.tensor([2, -1, 0]), 3, F64)
    A = Block((1, 2), (1, 2), {(0, 1): Dense(torch.tensor([[1.0, 1.0]], dtype=F64))})
    form = ImplicitForm(A, B, Diagonal(torch.tensor([1.0, 2.0, 3.0], dtype=F64)), activation=["relu", "tanh"])
    u = torch.tensor([[1.0, 5.0, -9.0]], dtype=F64)
    bottom = torch.tanh(torch.tensor([0.0, 1.0], dtype=F64))
    top = torch.relu(bottom.sum() - 9.0)
    torch.testing.assert_close(form(u), torch.tensor([[float(top), 0.0, 3 * float(bottom[1])]], dtype=F64))


def test_bad_blocks():
    eye = torch.eye(2)
    with pytest.raises(InputError, match="A must have the shape"):
        ImplicitForm(torch.zeros(2, 3), eye, eye)
    with pytest.raises(InputError, match="bias must have the shape"):
        ImplicitForm(eye, eye, eye, bias=torch.zeros(3))
    with pytest.raises(InputError, match="output_bias must have the shape"):
        ImplicitForm(eye, eye, eye, output_bias=torch.zeros(3))
    with pytest.raises(InputError, match=r"bias is torch.float64 and A torch.float32"):
        ImplicitForm(eye, eye, eye, bias=torch.zeros(2).double())
    with pytest.raises(InputError, match=r"C is torch.float64 and A torch.float32"):
        ImplicitForm(eye, eye, eye.double())
    with pytest.raises(InputError, match="blocks of 2; received a block of 3 states"):
        ImplicitForm(Block((1, 3), (1, 3), {}), torch.eye(4), torch.eye(4), activation=["relu", "max_pool(2)"])
    with pytest.raises(InputError, match="blocks of 4 got 2"):
        ImplicitForm(0 * eye, eye, eye, activation="max_pool(4)")(torch.zeros(1, 2))
    with pytest.raises(InputError, match="1 blocks; received 2 activations"):
        ImplicitForm(eye, eye, eye, activation=["relu", "tanh"])
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
