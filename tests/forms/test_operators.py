"""What every operator must satisfy. A new operator joins by an example in OPERATORS."""

import pytest
import torch
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
    Operator,
    Selection,
    Sparse,
    Zero,
)
from wellposed.forms.operators.plain import as_operator

EVERY = pytest.mark.parametrize("name", OPERATORS)


@pytest.mark.covering(strength=1)
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


@pytest.mark.covering(strength=1)
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


def test_what_is_known_without_looking():
    """Operators that always answer "I do not know" would pass the other tests."""
    assert Identity(2).nonnegative() and Zero((2, 2)).nonnegative() and selection(1, -1, columns=2).nonnegative()
    assert image().abs().nonnegative() and not image().nonnegative()
    assert Diagonal(torch.ones(2)).nonnegative() and not Diagonal(-torch.ones(2)).nonnegative()
    assert selection(0, 0, columns=2).one_entry_per() == (True, False)
    assert selection(0, 0, columns=2).T.one_entry_per() == (False, True)
    assert selection(0, -1, -1, 1, columns=2).one_entry_per() == (True, True)
    assert Identity(2).one_entry_per() == diagonal(2).one_entry_per() == (True, True)
    assert (image() @ image()).one_entry_per() == (False, False)


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
