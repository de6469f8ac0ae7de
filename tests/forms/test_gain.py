from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from composed_forms import DOUBLE, KINDS, evaluate, inputs
from problems import state_matrix

from wellposed import ImplicitForm
from wellposed.errors import IllPosedError
from wellposed.forms import Block, Convolution, Dense, LowRank, Product, Repeated, Selection, Sum, gains, series
from wellposed.forms.operators.entries import abs_upper_bound


def network(*sizes, activations=None, dtype=DOUBLE):
    """A feed-forward form and its weights, first layer first."""
    weights = [torch.randn(m, n, dtype=dtype) for n, m in pairwise(sizes)]
    states, hidden = sizes[-2:0:-1], weights[-2:0:-1]
    A = Block(states, states, {(k, k + 1): Dense(W) for k, W in enumerate(hidden)}, dtype)
    B = Block(states, sizes[:1], {(len(states) - 1, 0): Dense(weights[0])})
    C = Block(sizes[-1:], states, {(0, 0): Dense(weights[-1])})
    return ImplicitForm(A, B, C, activation=activations or ["relu"] * len(states)), weights


def magnitude(weights):
    return torch.linalg.multi_dot([W.double().abs() for W in reversed(weights)])


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_gains_of_a_network_are_the_product_of_absolute_weights(dtype):
    form, weights = network(3, 6, 5, 4, 2, dtype=dtype)
    found, expected = gains(form), magnitude(weights)
    assert found.dtype == DOUBLE and (found >= expected * (1 - 1e-15)).all()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(gains(form, columns=2), found, rtol=1e-13, atol=0)
    mixed, weights = network(3, 6, 5, 2, activations=["sigmoid", "tanh"])
    torch.testing.assert_close(gains(mixed), magnitude(weights) / 4, rtol=1e-11, atol=0)


@pytest.mark.parametrize("kind", [*KINDS, "sorted loop", "negative loop", "two blocks"])
def test_gains_bound_difference_quotients(kind):
    form = LOOPS[kind]() if kind in LOOPS else KINDS[kind](3, 2, 0)
    S = gains(form)
    for scale in (1e-2, 10.0):
        u = 2 * inputs(form, 50)
        step = scale * torch.randn_like(u)
        change = (evaluate(form, u + step) - evaluate(form, u)).abs()
        assert (change <= step.abs() @ S.mT + 1e-9).all()
        for j in range(3):
            one = torch.zeros_like(step).index_copy(1, torch.tensor([j]), step[:, [j]])
            change = (evaluate(form, u + one) - evaluate(form, u)).abs()
            assert (change <= one.abs() @ S.mT + 1e-9).all()


def _ends(n):
    return torch.randn(n, 3, dtype=DOUBLE), torch.randn(2, n, dtype=DOUBLE)


def sorted_loop():
    A = 0.9 * torch.nn.functional.normalize(torch.randn(6, 6, dtype=DOUBLE), p=1)
    return ImplicitForm(A, *_ends(6), activation="group_sort(3)")


def negative_loop():
    return ImplicitForm(torch.randn(4, 4, dtype=DOUBLE).triu(1) - 3 * torch.eye(4, dtype=DOUBLE), *_ends(4))


def two_blocks():
    down, up = Dense(torch.rand(3, 2, dtype=DOUBLE)), Dense(-0.1 * torch.rand(2, 3, dtype=DOUBLE))
    A = Block((3, 2), (3, 2), {(0, 1): down, (1, 0): up})
    return ImplicitForm(A, *_ends(5), activation=["tanh", "softmax(2)"])


LOOPS = {"sorted loop": sorted_loop, "negative loop": negative_loop, "two blocks": two_blocks}


@pytest.mark.parametrize("kind", ["positive", "shift", "sparse", "nilpotent"])
@pytest.mark.parametrize("radius", [0.5, 0.999])
def test_gains_of_a_loop_are_never_below_the_solution(kind, radius):
    A = state_matrix(kind, 30, radius, torch.Generator().manual_seed(0)).abs()
    form = ImplicitForm(A, *_ends(30))
    B, C = form.B.to_dense().abs(), form.C.to_dense().abs()
    # a non-negative diagonal leaves nothing to gain over (I - |A|)^-1
    exact = C @ torch.linalg.solve(torch.eye(30, dtype=DOUBLE) - A, B)
    found = gains(form)
    assert (found >= exact * (1 - 1e-11)).all()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def test_windows_in_a_loop_are_bounded_by_iteration():
    weights, eye = torch.full((2, 2), 0.495, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE)
    form = ImplicitForm(weights, eye, eye, activation="group_sort(2)")
    # every column moves both states by at most d = 0.99 d + 1
    found = gains(form)
    assert (found >= 100).all() and (found <= 100 * (1 + 1e-5)).all()


def test_inputs_that_do_not_reach_a_loop_have_no_gain():
    B = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=DOUBLE)
    form = ImplicitForm(0.3 * torch.ones(2, 2, dtype=DOUBLE), B, torch.eye(2, dtype=DOUBLE))
    assert (gains(form)[:, 1] == 0).all() and (gains(form)[:, 0] > 1).all()


def test_loops_without_a_bound_are_refused():
    eye = torch.eye(2, dtype=DOUBLE)
    rotation = 0.95 * torch.tensor([[0.6, 0.8], [-0.8, 0.6]], dtype=DOUBLE)
    form = ImplicitForm(rotation, eye, eye, activation="tanh")
    assert form.certificate().holds  # by the spectral norm, which says nothing entry by entry
    with pytest.raises(IllPosedError, match="loop of 2 states"):
        gains(form)
    with pytest.raises(IllPosedError, match="loop of 2 states"):
        gains(ImplicitForm(0.6 * torch.ones(2, 2, dtype=DOUBLE), eye, eye, activation="group_sort(2)"))
    pairs = ImplicitForm(torch.zeros(2, 2, dtype=DOUBLE), eye, eye, activation="multiply()")
    with pytest.raises(IllPosedError, match="no Lipschitz constant"):
        gains(pairs)


def operators():
    left, right = torch.randn(4, 30, dtype=DOUBLE), torch.randn(30, 5, dtype=DOUBLE)
    kernel = Convolution(torch.randn(2, 1, 3, dtype=DOUBLE), (1, 5), (1,), (1,), (1,))
    narrow = Selection(torch.tensor([1, -1, 4, 0]), 5, DOUBLE)
    return {
        "product": Product((Dense(left), Dense(right))),
        "convolutions": Product((kernel.T, kernel)),
        "sum": Sum((Dense(left @ right), narrow, Dense(-left @ right))),
        "low rank": LowRank(left, right.mT.contiguous()),
        "repeated": Repeated(Product((Dense(left), Dense(right))), 2),
        "block": Block((4, 10), (5,), {(0, 0): narrow, (1, 0): kernel}),
    }


@pytest.mark.parametrize("kind", operators())
@pytest.mark.parametrize("formed", [True, False])
def test_covers_are_nowhere_below(kind, formed):
    operator = operators()[kind]
    exact, found = operator.to_dense().abs(), abs_upper_bound(operator, formed).to_dense()
    assert (found >= exact).all()
    if formed:
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


def test_covers_pay_for_cancellation():
    left, right = torch.randn(4, 30, dtype=DOUBLE), torch.randn(30, 5, dtype=DOUBLE)
    pairs = [[zip(row, column, strict=True) for column in right.mT.tolist()] for row in left.tolist()]
    exact = [[abs(sum(Fraction(a) * Fraction(b) for a, b in pair)) for pair in row] for row in pairs]
    for operator in (Product((Dense(left), Dense(right))), LowRank(left, right.mT.contiguous())):
        plain, found = operator.abs().to_dense().tolist(), abs_upper_bound(operator).to_dense().tolist()
        assert any(Fraction(plain[i][j]) < exact[i][j] for i in range(4) for j in range(5))
        assert all(Fraction(found[i][j]) >= exact[i][j] for i in range(4) for j in range(5))


def test_cancelling_layers_have_no_gain():
    ones, sign = torch.ones(1, 2, dtype=DOUBLE), torch.tensor([[1.0, -1.0]], dtype=DOUBLE)
    D = Product((Dense(sign), Dense(ones.mT)))
    form = ImplicitForm(torch.zeros(2, 2, dtype=DOUBLE), ones.mT, 0 * ones, D)
    assert float(gains(form)) < 1e-13
    first = ImplicitForm(torch.zeros(2, 2, dtype=DOUBLE), ones.mT, torch.eye(2, dtype=DOUBLE))
    second = ImplicitForm(torch.zeros(1, 1, dtype=DOUBLE), sign, ones[:, :1])
    assert float(gains(series(first, second))) == pytest.approx(2)  # ReLU in between: nothing cancels
