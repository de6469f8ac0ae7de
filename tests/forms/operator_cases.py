"""One example of every operator, with a dense matrix that is built without it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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

F64 = torch.float64
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Case:
    """An operator and its matrix as functions of the same weights."""

    shapes: tuple[tuple[int, ...], ...]
    operator: Callable[..., Operator]
    dense: Callable[..., Tensor]

    def weights(self) -> list[Tensor]:
        return [torch.randn(shape, dtype=F64) for shape in self.shapes]

    def pair(self) -> tuple[Operator, Tensor]:
        weights = self.weights()
        return self.operator(*weights), self.dense(*weights)


def convolution(
    weight: tuple[int, ...],
    image: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int = 1,
    transposed: bool = False,
) -> Case:
    def operator(w: Tensor) -> Operator:
        return Convolution(w, image, stride, padding, dilation, groups, transposed)

    def dense(w: Tensor) -> Tensor:
        units = torch.eye(math.prod(image), dtype=F64).reshape(-1, *image)
        columns = CONVOLVE[len(image) - 1](units, w, None, stride, padding, dilation, groups).flatten(1)
        return columns if transposed else columns.mT

    return Case((weight,), operator, dense)


def fixed(operator: Callable[[], Operator], rows: list[list[float]], columns: int = 0) -> Case:
    shape = (len(rows), columns or len(rows[0]) if rows else columns)
    return Case((), operator, lambda: torch.tensor(rows, dtype=F64).reshape(shape))


def half(w: Tensor) -> Tensor:
    """Sets every other entry to zero."""
    mask = torch.arange(w.numel()).reshape(w.shape) % 2
    return w * mask.to(w)


def selection(*index: int, columns: int) -> Selection:
    return Selection(torch.tensor(index, dtype=torch.int64), columns, F64)


def scattered(w: Tensor) -> Tensor:
    """A sparse matrix with one entry given twice, to be added up."""
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 0, 3], [1, 0, 1, 2]]), w, (4, 3), check_invariants=True)


def scattered_dense(w: Tensor) -> Tensor:
    rows, columns = torch.tensor([0, 2, 0, 3]), torch.tensor([1, 0, 1, 2])
    return torch.zeros(4, 3, dtype=F64).index_put((rows, columns), w, accumulate=True)


def block(a: Tensor, b: Tensor, c: Tensor) -> Block:
    """The second of four block rows is empty."""
    return Block((2, 1, 3, 0), (3, 2), {(0, 0): Dense(a), (2, 1): Dense(b), (0, 1): Diagonal(c)})


def block_dense(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    top = torch.cat([a, c.diag()], 1)
    bottom = torch.cat([torch.zeros(3, 3, dtype=F64), b], 1)
    return torch.cat([top, torch.zeros(1, 5, dtype=F64), bottom])


def nested(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Block:
    return Block((6, 2), (2, 5), {(0, 1): block(a, b, c), (1, 0): LowRank(d, d)})


def nested_dense(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    top = torch.cat([torch.zeros(6, 2, dtype=F64), block_dense(a, b, c)], 1)
    return torch.cat([top, torch.cat([d @ d.mT, torch.zeros(2, 5, dtype=F64)], 1)])


PARTS = ((2, 3), (3, 2), (2,))
HOLES = [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
HOLED = (2, -1, 0, 0, -1)

OPERATORS: dict[str, Case] = {
    "dense": Case(((4, 3),), Dense, lambda w: w),
    "dense with zeros": Case(((3, 3),), lambda w: Dense(half(w)), half),
    "dense upper": Case(((4, 4),), lambda w: Dense(w.triu(1)), lambda w: w.triu(1)),
    "dense lower": Case(((4, 4),), lambda w: Dense(w.tril(-1)), lambda w: w.tril(-1)),
    "dense without rows": Case(((0, 3),), Dense, lambda w: w),
    "dense without columns": Case(((3, 0),), Dense, lambda w: w),
    "sparse": Case(((4, 3),), lambda w: Sparse(half(w).to_sparse()), half),
    "sparse twice": Case(((4,),), lambda w: Sparse(scattered(w)), scattered_dense),
    "sparse compressed": Case(((4, 3),), lambda w: Sparse(half(w).to_sparse_csr()), half),
    "sparse upper": Case(((4, 4),), lambda w: Sparse(w.triu(1).to_sparse()), lambda w: w.triu(1)),
    "sparse zero": Case(((3, 4),), lambda w: Sparse((0 * w).to_sparse()), lambda w: 0 * w),
    "sparse without rows": Case(((0, 3),), lambda w: Sparse(w.to_sparse()), lambda w: w),
    "low rank": Case(((4, 2), (3, 2)), LowRank, lambda a, b: a @ b.mT),
    "rank zero": Case(((4, 0), (3, 0)), LowRank, lambda a, b: a @ b.mT),
    "zero": fixed(lambda: Zero((2, 3), F64), [[0, 0, 0], [0, 0, 0]]),
    "zero without rows": fixed(lambda: Zero((0, 3), F64), [], 3),
    "identity": fixed(lambda: Identity(3, F64), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    "identity of nothing": fixed(lambda: Identity(0, F64), [], 0),
    "diagonal": Case(((4,),), Diagonal, torch.diag),
    "diagonal of nothing": Case(((0,),), Diagonal, torch.diag),
    "diagonal positive": Case(((4,),), lambda w: Diagonal(w.square()), lambda w: w.square().diag()),
    "convolution": convolution((4, 3, 3, 2), (3, 5, 4), (1, 1), (1, 0), (1, 1)),
    "convolution strided": convolution((2, 3, 2, 3), (3, 6, 7), (2, 3), (1, 2), (1, 1)),
    "convolution left over": convolution((2, 2, 2, 2), (2, 6, 5), (3, 2), (0, 0), (1, 1)),
    "convolution dilated": convolution((2, 2, 3, 2), (2, 7, 5), (2, 1), (2, 1), (2, 3)),
    "convolution grouped": convolution((4, 2, 2, 2), (4, 4, 4), (1, 2), (0, 1), (1, 1), 2),
    "convolution by depth": convolution((6, 1, 3, 3), (3, 4, 4), (2, 2), (1, 1), (1, 1), 3),
    "convolution all padding": convolution((2, 1, 1, 1), (1, 2, 2), (1, 1), (2, 2), (1, 1)),
    "convolution in one": convolution((3, 2, 3), (2, 9), (2,), (1,), (2,)),
    "convolution in one, left over": convolution((1, 2, 2), (2, 8), (3,), (0,), (1,), 1),
    "convolution in three": convolution((2, 1, 2, 1, 2), (2, 3, 2, 4), (1, 1, 2), (1, 0, 1), (1, 1, 2), 2),
    "convolution upper": Case(
        ((1, 1, 3),),
        lambda w: Convolution(w * torch.tensor([0.0, 0.0, 1.0]), (1, 5), (1,), (1,), (1,)),
        lambda w: w[0, 0, 2] * torch.ones(4, dtype=F64).diag(1),
    ),
    "transposed convolution": convolution((4, 3, 3, 2), (3, 5, 4), (1, 1), (1, 0), (1, 1), 1, True),
    "transposed left over": convolution((2, 2, 2, 2), (2, 6, 5), (3, 2), (0, 0), (1, 1), 1, True),
    "transposed dilated groups": convolution((4, 2, 2, 3), (4, 6, 8), (2, 3), (1, 2), (3, 1), 2, True),
    "transposed in one": convolution((3, 2, 3), (2, 8), (3,), (1,), (1,), 1, True),
    "transposed in three": convolution((2, 2, 2, 1, 2), (2, 3, 2, 4), (2, 1, 3), (0, 0, 1), (1, 1, 1), 1, True),
    "selection": fixed(lambda: selection(*HOLED, columns=4), HOLES),
    "selection of a slice": fixed(lambda: selection(1, 2, columns=4), [[0, 1, 0, 0], [0, 0, 1, 0]]),
    "selection of holes": fixed(lambda: selection(-1, -1, columns=2), [[0, 0], [0, 0]]),
    "selection from nothing": fixed(lambda: selection(-1, -1, columns=0), [[], []], 0),
    "selection of nothing": fixed(lambda: selection(columns=3), [], 3),
    "shift": fixed(lambda: selection(1, 2, -1, columns=3), [[0, 1, 0], [0, 0, 1], [0, 0, 0]]),
    "accumulation": Case((), lambda: selection(*HOLED, columns=4).T, lambda: torch.tensor(HOLES, dtype=F64).mT),
    "accumulation of nothing": fixed(lambda: selection(columns=2).T, [[], []], 0),
    "repeated": Case(((2, 3),), lambda w: Repeated(Dense(w), 3), lambda w: torch.block_diag(w, w, w)),
    "repeated upper": Case(
        ((2, 2),), lambda w: Repeated(Dense(w.triu(1)), 2), lambda w: torch.block_diag(w.triu(1), w.triu(1))
    ),
    "block": Case(PARTS, block, block_dense),
    "block without parts": fixed(lambda: Block((1, 2), (2,), {}, F64), [[0, 0], [0, 0], [0, 0]]),
    "block upper": Case(
        ((2, 3), (2, 2)),
        lambda a, b: Block((2, 3), (2, 3), {(0, 1): Dense(a), (0, 0): Dense(b.triu(1))}),
        lambda a, b: torch.cat([torch.cat([b.triu(1), a], 1), torch.zeros(3, 5, dtype=F64)]),
    ),
    "block on both sides": Case(
        ((2, 2), (2, 2)),
        lambda a, b: Block((2, 2), (2, 2), {(0, 1): Dense(a), (1, 1): Dense(b.tril(-1))}),
        lambda a, b: torch.cat(
            [torch.cat([0 * a, a], 1), torch.cat([0 * a, b.tril(-1)], 1)],
        ),
    ),
    "nested block": Case((*PARTS, (2, 1)), nested, nested_dense),
    "product": Case(((2, 4), (4, 3)), lambda a, b: Product((Dense(a), Sparse(b.to_sparse()))), lambda a, b: a @ b),
    "product of three": Case(
        ((3,), (1, 1, 2), (4, 2)),
        lambda d, w, a: Product((Diagonal(d), Convolution(w, (1, 4), (1,), (0,), (1,)), Dense(a))),
        lambda d, w, a: (a[:-1] * w[0, 0, 0] + a[1:] * w[0, 0, 1]) * d[:, None],
    ),
    "product of a selection": Case(
        ((2, 1, 2, 2),),
        lambda w: Product((Convolution(w, (1, 2, 2), (1, 1), (0, 0), (1, 1)), selection(3, 0, -1, 1, columns=5))),
        lambda w: (
            w.reshape(2, 4)
            @ torch.tensor([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]], dtype=F64)
        ),
    ),
    "sum": Case(
        ((3, 3), (3,), (1, 1, 3)),
        lambda a, d, w: Sum((Dense(a), Diagonal(d), Convolution(w, (1, 3), (1,), (1,), (1,)))),
        lambda a, d, w: (
            a + d.diag() + sum(w[0, 0, k] * torch.ones(3 - abs(k - 1), dtype=F64).diag(k - 1) for k in range(3))
        ),
    ),
    "sum that cancels": Case(((2, 3),), lambda a: Sum((Dense(a), Dense(half(-a)))), lambda a: a - half(a)),
}


def close(actual: Tensor, expected: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, **(tolerance or {"rtol": 1e-12, "atol": 1e-12}))


def check_pattern(operator: Operator, dense: Tensor) -> None:
    """Rows, columns and values: each place once, and the matrix itself."""
    rows, columns, values = operator.coordinates()
    assert rows.shape == columns.shape == values.shape
    assert rows.dtype == columns.dtype == torch.int64
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == len(rows)
    matrix = torch.zeros(dense.shape, dtype=F64)
    matrix[rows, columns] = values.detach()
    close(matrix, dense.detach())


def check_claims(operator: Operator, dense: Tensor) -> None:
    """What an operator says about its entries is true; it may know less than is true."""
    if operator.nonnegative():
        assert (dense >= 0).all()
    rows, columns = operator.one_entry_per()
    assert not rows or bool(((dense != 0).sum(1) <= 1).all())
    assert not columns or bool(((dense != 0).sum(0) <= 1).all())


def one_sided(dense: Tensor) -> bool:
    return bool((dense.tril() == 0).all() or (dense.triu() == 0).all())


def image(out: int = 2, groups: int = 1) -> Convolution:
    return Convolution(torch.randn(out, 2 // groups, 3, 3, dtype=F64), (2, 4, 4), (1, 1), (1, 1), (1, 1), groups)


def dense(rows: int, columns: int) -> Dense:
    return Dense(torch.randn(rows, columns, dtype=F64))


def diagonal(size: int) -> Diagonal:
    return Diagonal(torch.randn(size, dtype=F64))


def per_channel(channels: int, size: int) -> Diagonal:
    return Diagonal(torch.randn(channels, 1, dtype=F64).expand(channels, size).reshape(-1))


def repeated(rows: int, columns: int, count: int = 2) -> Repeated:
    return Repeated(dense(rows, columns), count)
