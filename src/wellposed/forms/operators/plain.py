"""The plain operators: dense, low-rank, diagonal, identity, zero, and copies of one operator.

`Dense`, `LowRank`, `Zero`, `Identity` and `Diagonal` are matrices; `as_operator` wraps a tensor in one of them.
`Repeated` applies one operator to every piece of a vector, such as a linear layer to every token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.forms.operators.base import Operator, Sparse


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Operator):
    """A matrix stored in full.

    Example:
        >>> Dense(torch.tensor([[1.0, 2.0]])) @ torch.tensor([[3.0, 4.0]])
        tensor([[11.]])
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        if self.matrix.dim() != 2:
            raise InputError(f"a matrix has two dimensions; received the shape {tuple(self.matrix.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def like(self) -> Any:
        return self.matrix

    def apply(self, x: Tensor) -> Tensor:
        return x @ self.matrix.mT

    def apply_add(self, start: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(start, x, self.matrix.mT)

    @property
    def T(self) -> "Dense":
        return Dense(self.matrix.mT)

    def abs(self) -> "Dense":
        return Dense(self.matrix.abs())

    def scaled(self, factor: float) -> "Dense":
        return Dense(self.matrix * factor)

    def to_dense(self) -> Tensor:
        return self.matrix

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = self.matrix.nonzero(as_tuple=True)
        return rows, columns, self.matrix[rows, columns]

    def try_matmul(self, right: Operator) -> Operator | None:
        if not isinstance(right, Dense):
            return None
        small = self.matrix.shape[0] * right.matrix.shape[1] <= self.matrix.numel() + right.matrix.numel()
        return Dense(self.matrix @ right.matrix) if small else None

    def try_add(self, other: Operator) -> Operator | None:
        return Dense(self.matrix + other.matrix) if isinstance(other, Dense) else None


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Operator):
    """A matrix L R' given by its factors.

    Example:
        >>> LowRank(torch.ones(3, 1), torch.ones(2, 1)).shape
        (3, 2)
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        left, right = self.left, self.right
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[1]:
            raise InputError(
                f"factors have the shapes (n, r) and (m, r); received {tuple(left.shape)}, {tuple(right.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[0]

    @property
    def like(self) -> Any:
        return self.left

    def apply(self, x: Tensor) -> Tensor:
        return (x @ self.right) @ self.left.mT

    @property
    def T(self) -> "LowRank":
        return LowRank(self.right, self.left)

    def abs(self) -> Dense:
        return Dense(self.to_dense().abs())

    def scaled(self, factor: float) -> "LowRank":
        return LowRank(self.left * factor, self.right)

    def to_dense(self) -> Tensor:
        return self.left @ self.right.mT

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        return Dense(self.to_dense()).coordinates()


@dataclass(frozen=True, eq=False, repr=False)
class Zero(Operator):
    """A matrix of zeros, of which nothing is stored.

    Example:
        >>> Zero((2, 3)) @ torch.ones(1, 3)
        tensor([[0., 0.]])
    """

    size: tuple[int, int]
    kind: torch.dtype = torch.float32
    place: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", torch.device(self.place))

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    @property
    def like(self) -> Tensor:
        return torch.empty(0, dtype=self.kind, device=self.place)

    def apply(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], self.size[0])

    @property
    def T(self) -> "Zero":
        return Zero((self.size[1], self.size[0]), self.kind, self.place)

    def abs(self) -> "Zero":
        return self

    def scaled(self, factor: float) -> "Zero":
        return self

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        none = torch.zeros(0, dtype=torch.int64, device=self.place)
        return none, none, torch.zeros(0, dtype=self.kind, device=self.place)

    def nonnegative(self) -> bool:
        return True

    def one_entry_per(self) -> tuple[bool, bool]:
        return True, True

    @property
    def picks(self) -> bool:
        return True

    def try_matmul(self, right: Operator) -> "Zero":
        return Zero((self.size[0], right.shape[1]), self.kind, self.place)

    def try_rmatmul(self, left: Operator) -> "Zero":
        return Zero((left.shape[0], self.size[1]), self.kind, self.place)

    def try_add(self, other: Operator) -> Operator:
        return other


@dataclass(frozen=True, eq=False, repr=False)
class Identity(Operator):
    """The identity, of which nothing is stored.

    Example:
        >>> Identity(2) @ torch.tensor([[3.0, 4.0]])
        tensor([[3., 4.]])
    """

    size: int
    kind: torch.dtype = torch.float32
    place: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", torch.device(self.place))

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    @property
    def like(self) -> Tensor:
        return torch.empty(0, dtype=self.kind, device=self.place)

    def apply(self, x: Tensor) -> Tensor:
        return x

    @property
    def T(self) -> "Identity":
        return self

    def abs(self) -> "Identity":
        return self

    def scaled(self, factor: float) -> "Diagonal":
        return Diagonal(torch.full((self.size,), factor, dtype=self.kind, device=self.place))

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.arange(self.size, device=self.place)
        return index, index, torch.ones(self.size, dtype=self.kind, device=self.place)

    def nonnegative(self) -> bool:
        return True

    def one_entry_per(self) -> tuple[bool, bool]:
        return True, True

    @property
    def picks(self) -> bool:
        return True

    def try_matmul(self, right: Operator) -> Operator:
        return right

    def try_rmatmul(self, left: Operator) -> Operator:
        return left


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Operator):
    """A diagonal matrix.

    Example:
        >>> Diagonal(torch.tensor([2.0, -1.0])) @ torch.tensor([[3.0, 4.0]])
        tensor([[ 6., -4.]])
    """

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1:
            raise InputError(f"a diagonal has one value a row; received the shape {tuple(self.values.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), len(self.values)

    @property
    def like(self) -> Any:
        return self.values

    def apply(self, x: Tensor) -> Tensor:
        return x * self.values

    @property
    def T(self) -> "Diagonal":
        return self

    def abs(self) -> "Diagonal":
        return Diagonal(self.values.abs())

    def scaled(self, factor: float) -> "Diagonal":
        return Diagonal(self.values * factor)

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.arange(len(self.values), device=self.device)
        return index, index, self.values

    def nonnegative(self) -> bool:
        return bool((self.values >= 0).all())

    def one_entry_per(self) -> tuple[bool, bool]:
        return True, True

    def try_matmul(self, right: Operator) -> Operator | None:
        if isinstance(right, Diagonal):
            return Diagonal(self.values * right.values)
        if isinstance(right, Dense):
            return Dense(self.values[:, None] * right.matrix)
        return None

    def try_rmatmul(self, left: Operator) -> Operator | None:
        return Dense(left.matrix * self.values) if isinstance(left, Dense) else None

    def try_add(self, other: Operator) -> Operator | None:
        if isinstance(other, Identity):
            return Diagonal(self.values + 1)
        return Diagonal(self.values + other.values) if isinstance(other, Diagonal) else None


def as_operator(matrix: Operator | Tensor) -> Operator:
    """Wraps a tensor by its layout.

    Example:
        >>> type(as_operator(torch.eye(2).to_sparse())).__name__
        'Sparse'
    """
    if isinstance(matrix, Operator):
        return matrix
    return Dense(matrix) if matrix.layout == torch.strided else Sparse(matrix)


@dataclass(frozen=True, eq=False, repr=False)
class Repeated(Operator):
    """The block-diagonal matrix of `count` copies of one operator.

    Example:
        >>> from wellposed.forms import Dense
        >>> Repeated(Dense(torch.tensor([[1.0, 2.0]])), 2) @ torch.tensor([[1.0, 1.0, 3.0, 0.0]])
        tensor([[3., 3.]])
    """

    inner: Operator
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.inner.shape
        return self.count * rows, self.count * columns

    @property
    def like(self) -> Any:
        return self.inner

    def apply(self, x: Tensor) -> Tensor:
        pieces = x.reshape(x.shape[0] * self.count, self.inner.shape[1])
        return self.inner.apply(pieces).reshape(x.shape[0], self.shape[0])

    @property
    def T(self) -> "Repeated":
        return Repeated(self.inner.T, self.count)

    def abs(self) -> "Repeated":
        return Repeated(self.inner.abs(), self.count)

    def scaled(self, factor: float) -> "Repeated":
        return Repeated(self.inner.scaled(factor), self.count)

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns, values = self.inner.coordinates()
        copy = torch.arange(self.count, device=self.device)[:, None]
        down, across = copy * self.inner.shape[0], copy * self.inner.shape[1]
        return (rows + down).flatten(), (columns + across).flatten(), values.repeat(self.count)

    def nonzeros(self) -> int:
        return self.count * self.inner.nonzeros()

    def nonnegative(self) -> bool:
        return self.inner.nonnegative()

    def one_entry_per(self) -> tuple[bool, bool]:
        return self.inner.one_entry_per()

    @property
    def picks(self) -> bool:
        return self.inner.picks

    def try_matmul(self, right: Operator) -> Operator | None:
        if not isinstance(right, Repeated) or right.count != self.count:
            return None
        product = self.inner.try_matmul(right.inner)
        product = right.inner.try_rmatmul(self.inner) if product is None else product
        return None if product is None else Repeated(product, self.count)
