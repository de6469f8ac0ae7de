"""Linear operators as the blocks of a form: dense, sparse, low-rank or zero."""

import abc

import torch
from torch import Tensor

from wellposed.errors import InputError


class Operator(abc.ABC):
    """A matrix that knows how to be multiplied without being formed."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device

    @abc.abstractmethod
    def __matmul__(self, x: Tensor) -> Tensor:  # (B, columns) -> (B, rows)
        """Multiplies every row of a batch."""

    @property
    @abc.abstractmethod
    def T(self) -> "Operator":
        """The transpose."""

    @abc.abstractmethod
    def abs(self) -> "Operator":
        """The entrywise absolute value."""

    @abc.abstractmethod
    def to_dense(self) -> Tensor:
        """Forms the matrix."""

    def to_sparse(self) -> Tensor:
        """Forms the matrix in compressed rows."""
        return self.to_dense().to_sparse_csr()

    def is_strictly_triangular(self) -> bool:
        """Tells whether all entries lie on one side of the diagonal."""
        rows, columns = self.to_dense().nonzero(as_tuple=True)
        return bool((rows < columns).all() or (rows > columns).all())

    def row_sums(self) -> Tensor:  # (rows,)
        """Adds up the entries of every row."""
        one = torch.ones(1, self.shape[1], dtype=self.dtype, device=self.device)
        return (self @ one)[0]

    def _check(self, x: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.shape[1]:
            raise InputError(
                f"an operator of shape {self.shape} takes a batch of width {self.shape[1]}; "
                f"received {tuple(x.shape)}"
            )


class Dense(Operator):
    """A matrix stored in full.

    Example:
        >>> Dense(torch.tensor([[1.0, 2.0]])) @ torch.tensor([[3.0, 4.0]])
        tensor([[11.]])
    """

    def __init__(self, matrix: Tensor) -> None:
        if matrix.dim() != 2:
            raise InputError(f"a matrix has two dimensions; received the shape {tuple(matrix.shape)}")
        super().__init__((matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device)
        self.matrix = matrix

    def __matmul__(self, x: Tensor) -> Tensor:
        self._check(x)
        return x @ self.matrix.mT

    @property
    def T(self) -> "Dense":
        return Dense(self.matrix.mT)

    def abs(self) -> "Dense":
        return Dense(self.matrix.abs())

    def to_dense(self) -> Tensor:
        return self.matrix


class Sparse(Operator):
    """A matrix stored by its non-zero entries.

    Example:
        >>> Sparse(torch.eye(2).to_sparse()) @ torch.tensor([[3.0, 4.0]])
        tensor([[3., 4.]])
    """

    def __init__(self, matrix: Tensor) -> None:
        super().__init__((matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device)
        self.matrix = matrix.to_sparse().coalesce()

    def __matmul__(self, x: Tensor) -> Tensor:
        self._check(x)
        return torch.sparse.mm(self.matrix, x.mT).mT

    @property
    def T(self) -> "Sparse":
        return Sparse(self.matrix.t())

    def abs(self) -> "Sparse":
        values = self.matrix.values().abs()
        return Sparse(torch.sparse_coo_tensor(self.matrix.indices(), values, self.shape, check_invariants=False))

    def to_dense(self) -> Tensor:
        return self.matrix.to_dense()

    def to_sparse(self) -> Tensor:
        return self.matrix.to_sparse_csr()

    def is_strictly_triangular(self) -> bool:
        rows, columns = self.matrix.indices()
        return bool((rows < columns).all() or (rows > columns).all())


class LowRank(Operator):
    """A matrix L R' given by its factors.

    Example:
        >>> LowRank(torch.ones(3, 1), torch.ones(2, 1)).shape
        (3, 2)
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[1]:
            raise InputError(
                f"factors have the shapes (n, r) and (m, r); received {tuple(left.shape)}, {tuple(right.shape)}"
            )
        super().__init__((left.shape[0], right.shape[0]), left.dtype, left.device)
        self.left, self.right = left, right

    def __matmul__(self, x: Tensor) -> Tensor:
        self._check(x)
        return (x @ self.right) @ self.left.mT

    @property
    def T(self) -> "LowRank":
        return LowRank(self.right, self.left)

    def abs(self) -> Dense:
        return Dense(self.to_dense().abs())

    def to_dense(self) -> Tensor:
        return self.left @ self.right.mT


class Zero(Operator):
    """A matrix of zeros, of which nothing is stored.

    Example:
        >>> Zero((2, 3)) @ torch.ones(1, 3)
        tensor([[0., 0.]])
    """

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(shape, dtype, torch.device(device))

    def __matmul__(self, x: Tensor) -> Tensor:
        self._check(x)
        return x.new_zeros(x.shape[0], self.shape[0])

    @property
    def T(self) -> "Zero":
        return Zero((self.shape[1], self.shape[0]), self.dtype, self.device)

    def abs(self) -> "Zero":
        return self

    def to_dense(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def as_operator(matrix: Operator | Tensor) -> Operator:
    """Wraps a tensor by its layout.

    Example:
        >>> type(as_operator(torch.eye(2).to_sparse())).__name__
        'Sparse'
    """
    if isinstance(matrix, Operator):
        return matrix
    return Dense(matrix) if matrix.layout == torch.strided else Sparse(matrix)
