import pytest
import torch
from composed_forms import DOUBLE, KINDS, dense, evaluate, inputs, loop, pooled, same, same_forms
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed import ImplicitForm
from wellposed.forms import Block, Convolution, Dense, add, concatenate, linear, parallel, series, trim


def by_paths(A, B, C):
    """The states on a path from the input to the output, by powers of the pattern."""
    edges = (A != 0).double()
    reach, seen = (B != 0).any(1).double(), (C != 0).any(0).double()
    for _ in range(len(A)):
        reach, seen = ((reach + edges @ reach) > 0).double(), ((seen + edges.mT @ seen) > 0).double()
    return (reach * seen) > 0


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=25)
def test_exactly_the_states_on_a_path_stay(seed, sparse):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, dtype=DOUBLE, generator=generator)  # noqa: E731
    keep = lambda *shape: torch.rand(*shape, generator=generator) < 0.12  # noqa: E731
    A, B, C = draw(15, 15) * keep(15, 15), draw(15, 2) * keep(15, 2), draw(2, 15) * keep(2, 15)
    A = 0.9 * A / A.abs().sum(1, keepdim=True).clamp_min(1.0)
    given_A = A.to_sparse() if sparse else A
    form = ImplicitForm(given_A, B, C, draw(2, 2), draw(15), "tanh", output_bias=draw(2))
    small, u = trim(form), inputs(form)
    same(evaluate(small, u), evaluate(form, u))
    kept = by_paths(A, B, C)
    assert small.sizes[0] == int(kept.sum())
    assert torch.equal(small.A.to_dense(), A[kept][:, kept]) and torch.equal(small.B.to_dense(), B[kept])
    same_forms(trim(small), small, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_full_forms_stay_as_they_are(kind):
    form = KINDS[kind](3, 2, 0)
    if kind not in ("sparse", "pooled"):
        assert trim(form) is form
    u = inputs(form)
    same(evaluate(trim(form), u), evaluate(form, u))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_no_output_sees_go(kind):
    f, g = dense(3, 2, 0), KINDS[kind](3, 2, 5)
    first = linear(torch.cat([torch.eye(2), torch.zeros(2, 2)], 1).double())
    form = series(concatenate(f, g), first)
    blind = Block((2,), (2, 2), {(0, 0): Dense(torch.eye(2, dtype=DOUBLE))})
    for whole in (form, series(concatenate(f, g), linear(blind))):
        small, u = trim(whole), inputs(f)
        assert small.sizes[0] == f.sizes[0] and small.labels == f.labels
        same(small(u), f(u))


@pytest.mark.parametrize("kind", KINDS)
def test_constant_blocks_are_folded(kind):
    f, g = KINDS[kind](3, 2, 0), dense(3, 2, 5)
    still = series(linear(torch.zeros(3, 3, dtype=DOUBLE), torch.randn(3, dtype=DOUBLE)), f)
    form, u = series(add(still, g), dense(2, 2, 9)), inputs(g)
    small = trim(form)
    assert small.sizes[0] == g.sizes[0] + 7
    same(evaluate(small, u), evaluate(form, u))


def test_windows_stay_whole():
    form = pooled(3, 2, 0)
    C = torch.zeros(1, 12, dtype=DOUBLE)
    C[0, 2] = 1.0  # reads the middle window only
    small, u = trim(form.replaced(C=C, D=None)), torch.randn(4, 3, dtype=DOUBLE)
    assert small.partition == (2, 2)  # the window with its padded zero, and the two states that it reads
    same(small(u), form.replaced(C=C, D=None)(u))


def test_single_states_of_convolutions_go():
    kernel = Convolution(torch.randn(1, 1, 1, dtype=DOUBLE), (1, 6), (1,), (0,), (1,))
    stride = Convolution(torch.randn(1, 1, 1, dtype=DOUBLE), (1, 6), (2,), (0,), (1,))
    A = Block((3, 6), (3, 6), {(0, 1): stride})
    B = Block((3, 6), (6,), {(1, 0): kernel})
    C = Block((3,), (3, 6), {(0, 0): Dense(torch.randn(3, 3, dtype=DOUBLE))})
    form = ImplicitForm(A, B, C, activation=["relu", "relu"], labels=["second", "first"])
    small, u = trim(form), inputs(form)
    assert small.partition == (3, 3) and small.labels == ("second", "first")
    same(small(u), form(u))
    assert small.certificate().value == 0


def test_nothing_may_be_left():
    form = series(dense(3, 2, 0), linear(torch.zeros(2, 2, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)))
    u = inputs(form)
    constant = form.replaced(C=torch.zeros(2, 7, dtype=DOUBLE), D=None)
    small = trim(constant)
    assert small.sizes == (0, 3, 2) and torch.equal(small(u), torch.ones(4, 2, dtype=DOUBLE))


def test_only_halves_that_are_read_stay():
    both = parallel(dense(3, 2, 0), loop(3, 2, 0))
    half = series(both, linear(torch.cat([torch.zeros(2, 2), torch.eye(2)], 1).double()))
    assert trim(half).sizes == (5, 6, 2)
