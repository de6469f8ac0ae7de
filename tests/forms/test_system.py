"""Certificates of forms: from the loops alone, and never about more than is true."""

import pytest
import torch
from form_cases import (
    F64,
    FORMS,
    LOOPS,
    build,
    dense_states,
    feed_forward,
    loop_inside,
    rows,
    two_blocks,
    two_loops,
)
from hypothesis import given
from hypothesis import strategies as st

from wellposed import Relative
from wellposed.activations import get_activation
from wellposed.conditions.rounding import EPS
from wellposed.errors import IllPosedError
from wellposed.forms import (
    Block,
    Convolution,
    Dense,
    Diagonal,
    Identity,
    ImplicitForm,
    LowRank,
    Operator,
    Product,
    Selection,
    Sparse,
    Zero,
    evaluation,
)
from wellposed.forms.evaluation import LoopEquation, block_certificate, block_norms

KINDS = {
    "feed_forward": "triangular",
    "reversed_layers": "triangular",
    "self_loop": "inf",
    "low_rank_loop": "inf",
    "convolution_loop": "inf",
    "two_blocks": "blocks",
    "pooled_loop": "blocks",
    "softmax_loop": "blocks",
    "loop_inside": "components",
    "two_loops": "components",
    "negative_loop": "components",
    "nested_loop": "components",
}


@pytest.mark.parametrize("case", FORMS)
def test_kind_of_proof(case):
    proof = case().certificate()
    assert proof.condition == KINDS[case.__name__]
    assert proof.holds and proof.value < 1


def test_a_form_without_loops_has_the_eigenvalue_zero():
    proof = feed_forward().certificate()
    assert proof.value == 0 and proof.margin > 0.999
    assert "4 blocks and no loop" in proof.note and "eigenvalue is 0" in proof.note


def test_the_worst_loop_decides():
    form = two_loops()
    proof = form.certificate()
    assert proof.value == pytest.approx(0.9, abs=1e-9) and proof.value > 0.9
    assert "2 of 3 parts have a loop" in proof.note and "inf" in proof.note
    negative = build((2, 2), {(0, 0): Dense(torch.tensor([[-4.0, 2.0], [0.3, 0.0]]).double())}, ["relu", "relu"])
    assert "proven by mu" in negative.certificate().note


@pytest.mark.parametrize("place", range(6))
def test_one_ill_posed_loop_is_enough(place):
    form = loop_inside()
    size = form.partition[place]
    bad = Block(
        form.partition,
        form.partition,
        {**form.A.parts, (place, place): Diagonal(torch.full((size,), 1.5).double())},
    )
    ill = form.replaced(A=bad)
    for use in (
        ill.certificate,
        lambda: ill(torch.ones(1, 3, dtype=F64)),
        lambda: ill.equilibrium(torch.ones(1, 3, dtype=F64)),
    ):
        with pytest.raises(IllPosedError):
            use()


def test_a_gain_of_one_is_not_proven():
    """x = relu(x + b) has no solution for b > 0."""
    form = ImplicitForm(Identity(2, F64), torch.eye(2, dtype=F64), torch.eye(2, dtype=F64))
    with pytest.raises(IllPosedError):
        form.certificate()


def refuse(*args):
    raise AssertionError("a matrix was formed")


@pytest.mark.parametrize("case", [two_blocks, loop_inside, two_loops])
def test_loops_are_proven_without_the_big_matrix(case, monkeypatch):
    form = case()
    monkeypatch.setattr(Operator, "to_dense", refuse)
    monkeypatch.setattr(Dense, "to_dense", refuse)
    monkeypatch.setattr(evaluation, "LARGEST_DENSE", 0)
    assert form.certificate().holds
    assert form(torch.ones(1, 3, dtype=F64)).isfinite().all()


def test_a_loop_of_convolutions_forms_nothing(monkeypatch):
    kernel = torch.randn(3, 3, 3, 3, dtype=F64)
    kernel = 0.5 * kernel / kernel.abs().sum((1, 2, 3)).max()
    conv = Convolution(kernel, (3, 8, 8), (1, 1), (1, 1), (1, 1))
    shuffle = Selection(torch.randperm(192), 192, F64)
    sizes = (192, 192)
    A = Block(sizes, sizes, {(0, 1): conv, (1, 0): conv @ shuffle, (0, 0): conv.T})
    B = Block(sizes, (3,), {(1, 0): rows(192, 3, 1.0)})
    form = ImplicitForm(A, B, Block((2,), sizes, {(0, 0): rows(2, 192, 1.0)}))
    expected = form.to_dense()(torch.ones(2, 3, dtype=F64))
    monkeypatch.setattr(Operator, "to_dense", refuse)
    monkeypatch.setattr(Convolution, "coordinates", refuse)
    monkeypatch.setattr(evaluation, "LARGEST_DENSE", 0)
    with torch.no_grad():
        torch.testing.assert_close(form(torch.ones(2, 3, dtype=F64)), expected, rtol=1e-4, atol=1e-4)
    assert form.certificate().holds


def test_large_loops_that_blocks_do_not_prove_are_refused(monkeypatch):
    form = build((2, 3), {(0, 0): Dense(torch.tensor([[-4.0, 2.0], [0.3, 0.0]]).double())}, ["relu", "tanh"])
    assert form.certificate().holds
    monkeypatch.setattr(evaluation, "LARGEST_DENSE", 1)
    with pytest.raises(IllPosedError, match="loop of 2 states"):
        build((2, 3), dict(form.A.parts), ["relu", "tanh"]).certificate()


def test_large_triangles_in_one_block_are_solved():
    """Nine thousand states, two layers, gains of five."""
    n = 9000
    index = torch.stack([torch.arange(n // 2), torch.arange(n // 2, n)])
    A = torch.sparse_coo_tensor(index, torch.full((n // 2,), 5.0), (n, n), check_invariants=True)
    B, C = Sparse(torch.ones(n, 1).to_sparse()), Selection(torch.tensor([0, n - 1]), n)
    form = ImplicitForm(A, B, C, activation="tanh")
    assert form.certificate().condition == "triangular" and form.certificate().value == 0
    top = torch.tanh(5 * torch.tanh(torch.ones(1)) + 1)
    torch.testing.assert_close(form(torch.ones(1, 1)), torch.stack([top, torch.tanh(torch.ones(1))], 1))


def test_strictly_triangular_blocks_are_solved_exactly():
    """Gains of nine over eight layers in one dense block, where a tolerance would show."""
    A = torch.zeros(8, 8, dtype=F64)
    A[range(7), range(1, 8)] = 9.0
    form = ImplicitForm(A, torch.eye(8, dtype=F64)[:, -1:], torch.eye(8, dtype=F64))
    assert form(torch.ones(1, 1, dtype=F64)).tolist() == [[9.0**k for k in range(7, -1, -1)]]
    small = ImplicitForm(2.0**-9 * A / 9, torch.eye(8, dtype=F64)[:, -1:], torch.eye(8, dtype=F64))
    found = small.equilibrium(torch.ones(1, 1, dtype=F64))
    assert small.certificate().condition == "inf" and float(found.residual) == 0
    assert found.value.tolist() == [[2.0 ** (-9 * k) for k in range(7, -1, -1)]]


@given(seed=st.integers(0, 10_000), gain=st.floats(0.05, 0.97), count=st.integers(1, 3))
def test_proofs_are_true(seed, gain, count):
    """The value bounds the contraction that the dense matrix has in some weighted norm."""
    generator = torch.Generator().manual_seed(seed)
    sizes = tuple(int(k) for k in torch.randint(1, 4, (count,), generator=generator))
    keys = [(i, j) for i in range(count) for j in range(count)]
    scale = 10.0 ** torch.randn(count, generator=generator, dtype=F64)
    parts = {}
    for i, j in keys:
        matrix = torch.randn(sizes[i], sizes[j], generator=generator, dtype=F64)
        parts[i, j] = Dense(gain / count * matrix / matrix.abs().sum(1, keepdim=True) * scale[i] / scale[j])
    phi = tuple(get_activation(("relu", "sigmoid", "selu")[(seed + k) % 3]) for k in range(count))
    gamma = torch.tensor([part.lipschitz() for part in phi], dtype=F64)
    A = Block(sizes, sizes, {(i, j): part.scaled(1 / float(gamma[i])) for (i, j), part in parts.items()})
    proof = block_certificate(A, phi)
    assert proof.holds and proof.value < 1
    dense = A.to_dense().abs() * gamma.repeat_interleave(torch.tensor(sizes))[:, None]
    radius = float(torch.linalg.eigvals(dense).abs().max())
    assert radius <= proof.value
    weights = proof.weights.repeat_interleave(torch.tensor(sizes))
    assert float(((dense @ weights) / weights).max()) <= proof.value


def test_block_norms_are_the_row_sums_of_the_blocks():
    parts = {
        (0, 0): LowRank(torch.randn(3, 1), torch.randn(3, 1)),
        (0, 1): Convolution(torch.randn(1, 1, 2), (1, 4), (1,), (0,), (1,)),
        (1, 0): Product((Dense(torch.randn(4, 2)), Dense(torch.randn(2, 3)))),
        (1, 1): Zero((4, 4)),
    }
    A = Block((3, 4), (3, 4), parts)
    norms = block_norms(A)
    for (i, j), part in parts.items():
        exact = float(part.to(torch.float64).to_dense().abs().sum(1).max())
        assert exact <= float(norms[i, j]) <= exact * (1 + 40 * EPS)


def test_constants_of_activations_count():
    sizes, loop = (1, 1), {(0, 1): Dense(torch.full((1, 1), 3.0)), (1, 0): Dense(torch.full((1, 1), 1.0))}
    A = Block(sizes, sizes, loop)
    sigmoid, relu, selu = (get_activation(name) for name in ("sigmoid", "relu", "selu"))
    assert not block_certificate(A, (relu, relu)).holds
    assert block_certificate(A, (sigmoid, relu)).value == pytest.approx(0.75**0.5, rel=0.2)
    assert block_certificate(A, (sigmoid, relu)).holds and not block_certificate(A, (sigmoid, selu)).holds
    unbounded = block_certificate(A, (get_activation("multiply()"), relu))
    assert not unbounded.holds and "no Lipschitz constant" in unbounded.note
    assert LoopEquation(Dense(torch.full((2, 2), 1.9)), sigmoid, (sigmoid,)).certificate.value == pytest.approx(
        0.95
    )
    with pytest.raises(IllPosedError):  # |A| < 1, and three solutions for some v
        LoopEquation(Dense(torch.full((1, 1), 0.9)), selu, (selu,)).certificate  # noqa: B018


@pytest.mark.parametrize("case", [case for case in LOOPS if KINDS[case.__name__] in ("inf", "blocks")])
def test_error_bounds_of_a_single_loop(case):
    form, u = case(), torch.randn(4, 3, dtype=F64)
    found = form.equilibrium(u, stop=Relative(1e-3))
    error = (found.value - dense_states(form, u)).abs().amax(1)
    if KINDS[case.__name__] == "blocks":
        assert found.error_bound is None
    else:
        assert (
            (error > 1e-9).any() and (error <= found.error_bound + 1e-12).all() and (found.error_bound < 1.0).all()
        )
