"""Products, sums and partitions of operators: every rule by which they simplify, and random expressions."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_cases import (
    F64,
    OPERATORS,
    check_claims,
    check_pattern,
    close,
    dense,
    diagonal,
    image,
    one_sided,
    per_channel,
    repeated,
    selection,
)

from wellposed.errors import InputError
from wellposed.forms import (
    Block,
    Convolution,
    Dense,
    Diagonal,
    Identity,
    LowRank,
    Product,
    Repeated,
    Selection,
    Sparse,
    Sum,
    Zero,
)
from wellposed.forms.operators.base import chain
from wellposed.forms.operators.block import partitioned
from wellposed.forms.operators.structured import Accumulation

PRODUCTS = {
    "identity, right": (lambda: (dense(2, 3), Identity(3, F64)), Dense),
    "identity, left": (lambda: (Identity(32, F64), image()), Convolution),
    "identities": (lambda: (Identity(3, F64), Identity(3, F64)), Identity),
    "zero, right": (lambda: (image(), Zero((32, 5), F64)), Zero),
    "zero, left": (lambda: (Zero((5, 32), F64), image()), Zero),
    "dense, smaller": (lambda: (dense(2, 5), dense(5, 3)), Dense),
    "dense, larger": (lambda: (dense(5, 1), dense(1, 5)), Product),
    "diagonals": (lambda: (diagonal(3), diagonal(3)), Diagonal),
    "diagonal and dense": (lambda: (diagonal(3), dense(3, 4)), Dense),
    "dense and diagonal": (lambda: (dense(4, 3), diagonal(3)), Dense),
    "diagonal and sparse": (lambda: (diagonal(2), Sparse(torch.eye(2, dtype=F64).to_sparse())), Product),
    "selections": (lambda: (selection(2, -1, 0, columns=3), selection(-1, 4, 4, columns=5)), Selection),
    "selections of nothing": (lambda: (selection(-1, columns=0), selection(columns=4)), Zero),
    "selections that miss": (lambda: (selection(0, -1, columns=2), selection(-1, 1, columns=3)), Zero),
    "permutations": (lambda: (selection(2, 0, 1, columns=3), selection(2, 0, 1, columns=3)), Selection),
    "permutation and its inverse": (
        lambda: (selection(2, 0, 1, columns=3), selection(1, 2, 0, columns=3)),
        Identity,
    ),
    "permutation and its transpose": (
        lambda: (selection(2, 0, 1, columns=3), selection(2, 0, 1, columns=3).T),
        Identity,
    ),
    "selection and distinct accumulation": (
        lambda: (selection(0, 3, 3, -1, columns=4), selection(3, -1, 1, columns=4).T),
        Selection,
    ),
    "selection that misses an accumulation": (lambda: (selection(0, columns=2), selection(1, columns=2).T), Zero),
    "accumulations": (
        lambda: (selection(1, 1, 0, columns=2).T, selection(2, 0, -1, 2, columns=3).T),
        Accumulation,
    ),
    "selection and diagonal": (lambda: (selection(2, -1, columns=3), diagonal(3)), Product),
    "wide selection and diagonal": (lambda: (selection(0, 0, 1, columns=2), diagonal(2)), Product),
    "selection of rows": (lambda: (selection(3, -1, 0, columns=4), dense(4, 2)), Dense),
    "selection that repeats rows": (lambda: (selection(3, 0, 0, 1, 2, columns=4), dense(4, 2)), Product),
    "dense and selection": (lambda: (dense(2, 4), selection(0, 0, -1, 1, columns=3)), Dense),
    "dense and wide selection": (lambda: (dense(2, 2), selection(0, 3, columns=4)), Product),
    "dense and accumulation": (lambda: (dense(2, 4), selection(3, -1, 0, columns=4).T), Dense),
    "dense and wide accumulation": (lambda: (dense(2, 2), selection(0, 1, 1, columns=2).T), Product),
    "selection and accumulation": (lambda: (selection(1, columns=2), selection(0, 1, 1, columns=2).T), Product),
    "channels and convolution": (lambda: (per_channel(2, 16), image()), Convolution),
    "channels and grouped convolution": (lambda: (per_channel(4, 16), image(4, 2)), Convolution),
    "places and convolution": (lambda: (diagonal(32), image()), Product),
    "channels and transposed convolution": (lambda: (per_channel(2, 16), image().T), Product),
    "convolutions": (lambda: (image(), image()), Product),
    "repeated": (lambda: (repeated(2, 5), repeated(5, 3)), Repeated),
    "repeated, larger": (lambda: (repeated(5, 1), repeated(1, 5)), Product),
    "repeated and diagonal": (lambda: (Repeated(diagonal(2), 3), Repeated(dense(2, 2), 3)), Repeated),
    "dense and repeated diagonal": (lambda: (Repeated(dense(2, 2), 3), Repeated(diagonal(2), 3)), Repeated),
    "repeated by another count": (lambda: (Repeated(dense(1, 2), 3), Repeated(dense(3, 1), 2)), Product),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_rules(name):
    build, kind = PRODUCTS[name]
    left, right = build()
    expected = left.to_dense() @ right.to_dense()
    found = chain(left, right)
    assert type(found) is kind
    assert found.shape == tuple(expected.shape) and found.dtype == F64
    close(found.to_dense(), expected)
    assert found.stored() <= left.stored() + right.stored()


SUMS = {
    "zero, right": (lambda: (image(), Zero((32, 32), F64)), Convolution),
    "zero, left": (lambda: (Zero((32, 32), F64), image()), Convolution),
    "zeros": (lambda: (Zero((2, 3), F64), Zero((2, 3), F64)), Zero),
    "dense": (lambda: (dense(2, 3), dense(2, 3)), Dense),
    "diagonals": (lambda: (diagonal(3), diagonal(3)), Diagonal),
    "diagonal and identity": (lambda: (diagonal(3), Identity(3, F64)), Diagonal),
    "identity and diagonal": (lambda: (Identity(3, F64), diagonal(3)), Diagonal),
    "identities": (lambda: (Identity(3, F64), Identity(3, F64)), Sum),
    "convolution and identity": (lambda: (image(), Identity(32, F64)), Sum),
}


@pytest.mark.parametrize("name", SUMS)
def test_sum_rules(name):
    build, kind = SUMS[name]
    left, right = build()
    found = left + right
    assert type(found) is kind
    close(found.to_dense(), left.to_dense() + right.to_dense())
    assert found.stored() <= left.stored() + right.stored()


def test_chains_simplify_at_every_junction():
    inner = image()
    turn = selection(*range(1, 32), 0, columns=32)
    found = Product((inner, turn)) @ Product((turn, inner.T))
    assert [type(factor) for factor in found.factors] == [Convolution, Selection, Convolution]
    close(found.to_dense(), inner.to_dense().roll(2, 1) @ inner.T.to_dense())
    undone = Product((inner, turn)) @ Product((turn.T, inner.T))
    assert [type(factor) for factor in undone.factors] == [Convolution, Convolution]
    close(undone.to_dense(), inner.to_dense() @ inner.T.to_dense())
    scaled = Product((dense(2, 32), inner)) @ Product((inner.T, dense(32, 2)))
    assert len(scaled.factors) == 4
    nothing = Product((dense(2, 3), selection(*range(3), columns=3))) @ Zero((3, 4), F64)
    assert isinstance(nothing, Zero) and nothing.shape == (2, 4)
    flat = Sum((inner, Identity(32, F64))) + Sum((inner.T, diagonal(32)))
    assert len(flat.terms) == 4


def small(rng, rows, columns):
    """A random operator of that shape with small integers, so that all arithmetic is exact."""

    def whole(*shape):
        return torch.tensor([rng.randint(-2, 2) for _ in range(max(1, torch.Size(shape).numel()))], dtype=F64)[
            : torch.Size(shape).numel()
        ].reshape(shape)

    index = torch.tensor([rng.randint(-1, columns - 1) for _ in range(rows)], dtype=torch.int64)
    turned = torch.tensor([rng.randint(-1, rows - 1) for _ in range(columns)], dtype=torch.int64)
    matrix = whole(rows, columns)
    choices = [Dense(matrix), Sparse(matrix.to_sparse()), Zero((rows, columns), F64)]
    choices += [LowRank(whole(rows, 2), whole(columns, 2)), Selection(index, columns, F64)]
    choices += [Selection(turned, rows, F64).T]
    if rows == columns:
        choices += [Identity(rows, F64), Diagonal(whole(rows))]
    if 0 < rows <= columns:
        choices += [Convolution(whole(1, 1, columns - rows + 1), (1, columns), (1,), (0,), (1,))]
    if 0 < columns <= rows:
        choices += [Convolution(whole(1, 1, rows - columns + 1), (1, rows), (1,), (0,), (1,)).T]
    if rows and rows % 2 == 0 == columns % 2:
        choices += [Repeated(Dense(whole(rows // 2, columns // 2)), 2)]
    found = rng.choice(choices)
    return found, found.to_dense()


def expression(rng, rows, columns, depth):
    """A random tree of products, sums, transposes, blocks and absolute values, and the same with matrices."""
    kind = rng.choice(["leaf", "product", "product", "sum", "transpose", "block", "abs", "scaled"])
    if depth == 0 or kind == "leaf":
        return small(rng, rows, columns)
    if kind == "product":
        middle = rng.randint(0, 4)
        left, right = expression(rng, rows, middle, depth - 1), expression(rng, middle, columns, depth - 1)
        return left[0] @ right[0], left[1] @ right[1]
    if kind == "sum":
        left, right = expression(rng, rows, columns, depth - 1), expression(rng, rows, columns, depth - 1)
        return left[0] + right[0], left[1] + right[1]
    if kind == "transpose":
        inner, matrix = expression(rng, columns, rows, depth - 1)
        return inner.T, matrix.mT
    if kind == "block":
        cut = rng.randint(0, rows)
        top, below = expression(rng, cut, columns, depth - 1), expression(rng, rows - cut, columns, depth - 1)
        stacked = Block((cut, rows - cut), (columns,), {(0, 0): top[0], (1, 0): below[0]}, F64)
        return stacked, torch.cat([top[1], below[1]])
    inner, matrix = expression(rng, rows, columns, depth - 1)
    return (inner.abs(), matrix.abs()) if kind == "abs" else (inner.scaled(-2.0), -2 * matrix)


@given(seed=st.integers(0, 10**6), rows=st.integers(0, 4), columns=st.integers(0, 4), depth=st.integers(1, 4))
def test_expressions_agree_with_matrix_algebra(seed, rows, columns, depth):
    operator, matrix = expression(random.Random(seed), rows, columns, depth)
    x = torch.arange(2 * columns, dtype=F64).reshape(2, columns) - 3
    assert operator.shape == (rows, columns) and operator.dtype == F64
    assert torch.equal(operator @ x, x @ matrix.mT)
    assert torch.equal(operator.to_dense(), matrix)
    assert torch.equal(operator.T.to_dense(), matrix.mT)
    assert torch.equal(operator.abs().to_dense(), matrix.abs())
    assert torch.equal(operator.row_sums(), matrix.sum(1))
    assert operator.nonzeros() == int(matrix.count_nonzero())
    check_pattern(operator, matrix)
    check_claims(operator, matrix)
    if operator.is_strictly_triangular():
        assert one_sided(matrix)


@given(
    seed=st.integers(0, 10**6),
    heights=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    widths=st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
def test_partitions_keep_the_matrix_and_drop_zero_blocks(seed, heights, widths):
    operator, matrix = expression(random.Random(seed), sum(heights), sum(widths), 2)
    found = partitioned(operator, heights, widths)
    assert (found.heights, found.widths) == (tuple(heights), tuple(widths))
    assert torch.equal(found.to_dense(), matrix)
    x = torch.ones(2, sum(widths), dtype=F64)
    assert torch.equal(found @ x, x @ matrix.mT)
    explicit = isinstance(operator, Dense | Sparse | Identity | Diagonal | Selection | Accumulation | Zero)
    if explicit and len(heights) + len(widths) > 2:
        assert all(part.nonzeros() for part in found.parts.values())


def test_partition_keeps_what_fits_and_refuses_what_does_not():
    whole = OPERATORS["block"].pair()[0]
    assert partitioned(whole, (2, 1, 3, 0), [3, 2]) is whole
    conv = image()
    assert partitioned(conv, [32], [32]).part(0, 0) is conv
    rows = partitioned(conv, [8, 24], [32])
    close(rows.part(1, 0).to_dense(), conv.to_dense()[8:])
    with pytest.raises(InputError, match="do not make up"):
        partitioned(conv, (30,), (32,))


def test_products_keep_their_factors_where_nothing_cancels():
    conv = image()
    order = Selection(torch.randperm(32), 32, F64)
    for product in (order @ conv, conv @ order, conv @ order.T, conv.abs() @ conv.abs(), diagonal(32) @ conv):
        assert isinstance(product.abs(), Product)
    close((conv @ conv).abs().to_dense(), (conv.to_dense() @ conv.to_dense()).abs())
