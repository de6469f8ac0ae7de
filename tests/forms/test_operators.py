"""What every operator must satisfy. A new operator joins by an example in OPERATORS."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_cases import F64, OPERATORS, selection

from wellposed.errors import InputError
from wellposed.forms import (
    Block,
    Convolution,
    Dense,
    Diagonal,
    Identity,
    LowRank,
    Operator,
    Product,
    Repeated,
    Selection,
    Sparse,
    Sum,
    Zero,
)
from wellposed.forms.block import partitioned
from wellposed.forms.operator import chain
from wellposed.forms.operators import as_operator
from wellposed.forms.selection import Accumulation

EVERY = pytest.mark.parametrize("name", OPERATORS)


def close(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 1e-12, "atol": 1e-12}))


def check_pattern(operator, dense):
    """Rows, columns and values: each place once, and the matrix itself."""
    rows, columns, values = operator.coordinates()
    assert rows.shape == columns.shape == values.shape
    assert rows.dtype == columns.dtype == torch.int64
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == len(rows)
    found = torch.zeros(dense.shape, dtype=F64)
    found[rows, columns] = values.detach()
    close(found, dense.detach())


def check_claims(operator, dense):
    """What an operator says about its entries is true; it may know less than is true."""
    if operator.nonnegative():
        assert (dense >= 0).all()
    rows, columns = operator.monomial()
    assert not rows or bool(((dense != 0).sum(1) <= 1).all())
    assert not columns or bool(((dense != 0).sum(0) <= 1).all())


def one_sided(dense):
    return bool((dense.tril() == 0).all() or (dense.triu() == 0).all())


@EVERY
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_multiplies_a_batch(name, batch):
    operator, dense = OPERATORS[name].pair()
    assert operator.shape == tuple(dense.shape) and operator.dtype == F64
    assert operator.device == torch.device("cpu")
    x = torch.randn(batch, dense.shape[1], dtype=F64)
    close(operator @ x, x @ dense.mT)


@EVERY
def test_transposes(name):
    operator, dense = OPERATORS[name].pair()
    for turned, expected in ((operator.T, dense.mT), (operator.T.T, dense)):
        x = torch.randn(3, expected.shape[1], dtype=F64)
        assert turned.shape == tuple(expected.shape)
        close(turned @ x, x @ expected.mT)
        close(turned.to_dense(), expected)
        check_claims(turned, expected)


@EVERY
def test_absolute_value_and_row_sums(name):
    operator, dense = OPERATORS[name].pair()
    x = torch.randn(3, dense.shape[1], dtype=F64)
    size = operator.abs()
    close(size @ x, x @ dense.abs().mT)
    close(size.to_dense(), dense.abs())
    close(size.row_sums(), dense.abs().sum(1))
    close(operator.row_sums(), dense.sum(1))
    check_claims(size, dense.abs())


@EVERY
def test_forms_its_matrix(name):
    operator, dense = OPERATORS[name].pair()
    close(operator.to_dense(), dense)
    sparse = operator.to_sparse()
    assert sparse.layout == torch.sparse_csr and sparse.shape == dense.shape
    assert int((sparse.values() == 0).sum()) == 0
    close(sparse.to_dense(), dense)
    assert operator.nonzeros() == int(dense.count_nonzero()) == len(sparse.values())
    check_pattern(operator, dense)
    check_pattern(operator.T, dense.mT)
    check_claims(operator, dense)


@EVERY
def test_sees_triangles(name):
    operator, dense = OPERATORS[name].pair()
    for turned, matrix in ((operator, dense), (operator.T, dense.mT)):
        assert turned.is_strictly_triangular() == one_sided(matrix)
        rows, columns = matrix.nonzero(as_tuple=True)
        diagonals = (columns - rows).tolist()
        assert turned.band() == ((min(diagonals), max(diagonals)) if diagonals else None)


def test_examples_hold_triangles_of_both_kinds():
    found = {name for name, case in OPERATORS.items() if one_sided(case.pair()[1])}
    assert {"dense upper", "dense lower", "sparse upper", "convolution upper", "shift"} <= found
    assert {"block upper", "repeated upper"} <= found and not {"dense", "block on both sides"} & found


@EVERY
@pytest.mark.parametrize("factor", [0.5, -3.0, 0.0])
def test_scales(name, factor):
    operator, dense = OPERATORS[name].pair()
    scaled = operator.scaled(factor)
    x = torch.randn(3, dense.shape[1], dtype=F64)
    close(scaled @ x, factor * (x @ dense.mT))
    close(scaled.to_dense(), factor * dense)
    close(scaled.abs().to_dense(), abs(factor) * dense.abs())
    check_claims(scaled, factor * dense)


@EVERY
def test_converts_its_entries(name):
    operator, dense = OPERATORS[name].pair()
    single = operator.to(torch.float32)
    x = torch.randn(3, dense.shape[1])
    assert single.dtype == torch.float32 and type(single) is type(operator)
    assert (single @ x).dtype == single.to_dense().dtype == single.coordinates()[2].dtype == torch.float32
    close(single @ x, x @ dense.float().mT, rtol=1e-5, atol=1e-5)
    again = single.to(F64)
    assert again.dtype == F64 and (again @ x.double()).dtype == F64
    close(again.to_dense(), dense, rtol=1e-6, atol=1e-6)
    assert operator.dtype == F64


@EVERY
def test_differentiates_through_state_and_weights(name):
    case = OPERATORS[name]
    weights = [weight.requires_grad_() for weight in case.weights()]
    dense = case.dense(*weights)
    x = torch.randn(3, dense.shape[1], dtype=F64, requires_grad=True)
    pull = torch.randn(3, dense.shape[0], dtype=F64)
    operator = case.operator(*weights)
    expected = gradients(x @ dense.mT, pull, x, *weights)
    for found, wanted in zip(gradients(operator @ x, pull, x, *weights), expected, strict=True):
        close(found, wanted)
    spread = torch.randn(dense.shape, dtype=F64)
    for matrix, reference in ((operator.to_dense(), dense), (operator.T.to_dense().mT, dense)):
        for found, wanted in zip(
            gradients(matrix, spread, *weights), gradients(reference, spread, *weights), strict=True
        ):
            close(found, wanted)


def gradients(value, pull, *leaves):
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad((value * pull).sum(), leaves, retain_graph=True, materialize_grads=True)


@EVERY
def test_refuses_wrong_widths(name):
    operator, dense = OPERATORS[name].pair()
    rows, columns = dense.shape
    for x in (torch.zeros(2, columns + 1), torch.zeros(columns), torch.zeros(2, 2, columns)):
        with pytest.raises(InputError, match=f"width {columns}"):
            operator @ x.double()
    with pytest.raises(InputError, match="cannot be multiplied"):
        operator @ Zero((columns + 1, 2), F64)
    with pytest.raises(InputError, match="cannot be added"):
        operator + Zero((rows, columns + 1), F64)


@EVERY
def test_zero_and_identity_change_nothing(name):
    operator, dense = OPERATORS[name].pair()
    rows, columns = dense.shape
    for same in (
        operator @ Identity(columns, F64),
        Identity(rows, F64) @ operator,
        operator + Zero((rows, columns), F64),
        Zero((rows, columns), F64) + operator,
    ):
        close(same.to_dense(), dense)
        assert same.stored() <= operator.stored()
    assert isinstance(operator @ Zero((columns, 7), F64), Zero)
    assert (Zero((7, rows), F64) @ operator).shape == (7, columns)


@EVERY
def test_multiplies_and_adds_with_every_other(name):
    """Each pair that fits, whatever rule applies."""
    operator, dense = OPERATORS[name].pair()
    for case in OPERATORS.values():
        other, matrix = case.pair()
        if other.shape[0] == operator.shape[1]:
            found = operator @ other
            x = torch.randn(2, matrix.shape[1], dtype=F64)
            close(found @ x, x @ (dense @ matrix).mT)
            close(found.abs().to_dense(), (dense @ matrix).abs())
            assert found.stored() <= operator.stored() + other.stored()
        if other.shape == operator.shape:
            close((operator + other).to_dense(), dense + matrix)
            close((operator + other).abs().to_dense(), (dense + matrix).abs())


def image(out=2, groups=1):
    return Convolution(torch.randn(out, 2 // groups, 3, 3, dtype=F64), (2, 4, 4), (1, 1), (1, 1), (1, 1), groups)


def dense(rows, columns):
    return Dense(torch.randn(rows, columns, dtype=F64))


def diagonal(size):
    return Diagonal(torch.randn(size, dtype=F64))


def per_channel(channels, size):
    return Diagonal(torch.randn(channels, 1, dtype=F64).expand(channels, size).reshape(-1))


def repeated(rows, columns, count=2):
    return Repeated(dense(rows, columns), count)


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


@pytest.mark.parametrize("name", [name for name in OPERATORS if "convolution" in name or "transposed" in name])
def test_convolutions_form_nothing(name, monkeypatch):
    operator, dense = OPERATORS[name].pair()

    def refuse(self, *args):
        raise AssertionError("a matrix was formed")

    monkeypatch.setattr(Operator, "to_dense", refuse)
    monkeypatch.setattr(Convolution, "coordinates", refuse)
    x, z = torch.randn(2, dense.shape[1], dtype=F64), torch.randn(2, dense.shape[0], dtype=F64)
    close(operator.abs().row_sums(), dense.abs().sum(1))
    close(operator.T @ z, z @ dense)
    close(operator.T.abs() @ z, z @ dense.abs())
    close(operator.scaled(2.0) @ x, 2 * x @ dense.mT)
    assert operator.nonzeros() == operator.T.nonzeros() == int(dense.count_nonzero())
    assert not operator.nonnegative() or bool((dense >= 0).all())
    assert operator.is_strictly_triangular() == one_sided(dense)
    picked = operator @ Selection(torch.randperm(dense.shape[1]), dense.shape[1], F64)
    close((selection(0, columns=dense.shape[0]) @ picked).abs().row_sums(), dense[:1].abs().sum(1))
    stacked = Block((dense.shape[0],) * 2, (dense.shape[1],), {(0, 0): operator, (1, 0): operator}, F64)
    close(stacked.abs().row_sums(), dense.abs().sum(1).repeat(2))
    assert not stacked.is_strictly_triangular() or one_sided(torch.cat([dense, dense]))


def test_products_keep_their_factors_where_nothing_cancels():
    conv = image()
    order = Selection(torch.randperm(32), 32, F64)
    for product in (order @ conv, conv @ order, conv @ order.T, conv.abs() @ conv.abs(), diagonal(32) @ conv):
        assert isinstance(product.abs(), Product)
    close((conv @ conv).abs().to_dense(), (conv.to_dense() @ conv.to_dense()).abs())


def test_what_is_known_without_looking():
    """Operators that always answer "I do not know" would pass the other tests."""
    assert Identity(2).nonnegative() and Zero((2, 2)).nonnegative() and selection(1, -1, columns=2).nonnegative()
    assert image().abs().nonnegative() and not image().nonnegative()
    assert Diagonal(torch.ones(2)).nonnegative() and not Diagonal(-torch.ones(2)).nonnegative()
    assert selection(0, 0, columns=2).monomial() == (True, False)
    assert selection(0, 0, columns=2).T.monomial() == (False, True)
    assert selection(0, -1, -1, 1, columns=2).monomial() == (True, True)
    assert Identity(2).monomial() == diagonal(2).monomial() == (True, True)
    assert (image() @ image()).monomial() == (False, False)


def test_counts_what_it_stores():
    assert Zero((50, 50)).stored() == Identity(50).stored() == 0
    assert dense(3, 4).stored() == 12 and image().stored() == 36
    assert LowRank(torch.ones(5, 2), torch.ones(4, 2)).stored() == 18
    assert Sparse(torch.eye(3).to_sparse()).stored() == 9
    assert Block((3, 32), (4, 32), {(0, 0): dense(3, 4), (1, 1): image()}, F64).stored() == 48


@pytest.mark.parametrize(
    "operator", [Zero((2, 3)), Identity(2), Block((2,), (3,), {}), Dense(torch.zeros(2, 3)), image()], ids=repr
)
def test_moves_to_another_device(operator):
    moved = operator.to("meta")
    assert moved.device == torch.device("meta") and moved.dtype == operator.dtype
    assert operator.device == torch.device("cpu")


def test_conversion_keeps_places_as_integers():
    picked = Selection(torch.tensor([1, 0], dtype=torch.int32), 2).to(torch.float64)
    assert not picked.index.is_floating_point()
    assert torch.equal(picked.T.to_dense(), torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64))


def test_block_access():
    whole, matrix = OPERATORS["block"].pair()
    assert isinstance(whole.part(1, 0), Zero) and whole.part(1, 0).shape == (1, 3)
    assert whole.part(0, 1) is whole.parts[0, 1]
    assert [sorted(row) for row in whole.rows()] == [[0, 1], [], [1], []]
    chosen = whole.chosen([2, 0], [1])
    close(chosen.to_dense(), torch.cat([matrix[3:, 3:], matrix[:2, 3:]]))
    assert not Block((2,), (3,), {(0, 0): Zero((2, 3))}).parts


BAD = {
    "matrix has two dimensions": lambda: Dense(torch.zeros(3)),
    "two dimensions": lambda: as_operator(torch.zeros(2, 2, 2).to_sparse()),
    "one value": lambda: Diagonal(torch.zeros(2, 2)),
    "factors have the shapes": lambda: LowRank(torch.zeros(3, 2), torch.zeros(3, 1)),
    "indices from -1 to 2; received -2 to 3": lambda: Selection(torch.tensor([-2, 3]), 3),
    "whole numbers": lambda: Selection(torch.tensor([0.0, 1.0]), 3),
    "one to three dimensions": lambda: Convolution(torch.ones(1, 1), (1,), (), (), ()),
    "received \\(1, 1, 2\\) and": lambda: Convolution(torch.ones(1, 1, 2), (1, 3, 3), (1, 1), (0, 0), (1, 1)),
    "takes 2 channels; received 3": lambda: Convolution(torch.ones(2, 1, 2), (3, 4), (1,), (0,), (1,), 2),
    "3 output channels": lambda: Convolution(torch.ones(3, 1, 2), (2, 4), (1,), (0,), (1,), 2),
    "smaller than the kernel": lambda: Convolution(torch.ones(1, 1, 5), (1, 3), (1,), (0,), (1,)),
    "stride": lambda: Convolution(torch.ones(1, 1, 2), (1, 3), (1, 1), (0,), (1,)),
    "one positive number": lambda: Convolution(torch.ones(1, 1, 2), (1, 3), (0,), (0,), (1,)),
    "must have the shape \\(1, 2\\)": lambda: Block((1,), (2,), {(0, 0): Dense(torch.zeros(2, 2))}),
    "no block \\(1, 0\\)": lambda: Block((1,), (2,), {(1, 0): Dense(torch.zeros(1, 2))}),
    "no block \\(-1, 0\\)": lambda: Block((1,), (2,), {(-1, 0): Dense(torch.zeros(1, 2))}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_parts_are_refused(message):
    with pytest.raises(InputError, match=message):
        BAD[message]()


def test_tensors_become_operators_by_their_layout():
    matrix = torch.eye(3)
    assert type(as_operator(matrix)) is Dense and type(as_operator(matrix.to_sparse())) is Sparse
    assert type(as_operator(matrix.to_sparse_csr())) is Sparse
    kept = Identity(3)
    assert as_operator(kept) is kept
