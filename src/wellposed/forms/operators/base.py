"""What every linear operator offers, and the algebra of operators: products and sums."""

import abc
import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InputError

_EXACT: ContextVar[bool] = ContextVar("exact", default=False)


@contextmanager
def exact_algebra() -> Iterator[None]:
    """Merges the entries of products and sums of operators only where nothing is rounded.

    Example:
        >>> from wellposed.forms import Dense, Diagonal
        >>> with exact_algebra():
        ...     print(Diagonal(torch.ones(2)) @ Dense(torch.ones(2, 3)))
        Product(2 x 3)
    """
    token = _EXACT.set(True)
    try:
        yield
    finally:
        _EXACT.reset(token)


class Operator(abc.ABC):
    """A matrix that knows how to be multiplied without being formed.

    ``operator @ x`` takes a batch ``(B, columns)`` to ``(B, rows)``; ``operator @ other`` and
    ``operator + other`` are operators again. Every operator is a frozen dataclass, so that it can be moved,
    stored and rebuilt by its fields.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""

    @property
    @abc.abstractmethod
    def like(self) -> Any:
        """A tensor or operator whose type and device it has."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the entries."""
        kind: torch.dtype = self.like.dtype
        return kind

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        device: torch.device = self.like.device
        return device

    @abc.abstractmethod
    def apply(self, x: Tensor) -> Tensor:  # (B, columns) -> (B, rows)
        """Multiplies every row of a batch of the right width."""

    def apply_add(self, start: Tensor, x: Tensor) -> Tensor:  # (B, rows), (B, columns) -> (B, rows)
        """Adds the product to what is there, in one operation where there is one."""
        return start + self.apply(x)

    @property
    @abc.abstractmethod
    def T(self) -> "Operator":
        """The transpose."""

    @abc.abstractmethod
    def abs(self) -> "Operator":
        """The entrywise absolute value."""

    @abc.abstractmethod
    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:  # (k,), (k,), (k,)
        """Lists rows, columns and values of the entries that may differ from zero; none twice."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape[0]} x {self.shape[1]})"

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Operator):
            return chain(self, other)
        if other.dim() != 2 or other.shape[1] != self.shape[1]:
            raise InputError(
                f"an operator of shape {self.shape} takes a batch of width {self.shape[1]}; "
                f"received {tuple(other.shape)}"
            )
        return self.apply(other)

    def __add__(self, other: "Operator") -> "Operator":
        if other.shape != self.shape:
            raise InputError(f"operators of shapes {self.shape} and {other.shape} cannot be added")
        total = self.try_add(other)
        total = other.try_add(self) if total is None else total
        rounds = (
            _EXACT.get() and total is not self and total is not other
        )  # zero plus an operator is that operator
        return Sum((*_terms(self), *_terms(other))) if total is None or rounds else total

    @abc.abstractmethod
    def scaled(self, factor: float) -> "Operator":
        """Multiplies every entry."""

    def to_dense(self) -> Tensor:
        """Forms the matrix."""
        rows, columns, values = self.coordinates()
        empty = torch.zeros(self.shape, dtype=values.dtype, device=values.device)
        return empty.index_put((rows, columns), values)

    def to_sparse(self) -> Tensor:
        """Forms the matrix in compressed rows, with its non-zero entries only."""
        with _quiet():
            return _coo(self).to_sparse_csr()

    def to(self, *args: Any, **kwargs: Any) -> "Operator":
        """Converts the entries, as `torch.Tensor.to` does."""
        changes = {f.name: _moved(getattr(self, f.name), args, kwargs) for f in _fields(self)}
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def row_sums(self) -> Tensor:  # (rows,)
        """Adds up the entries of every row."""
        return self.apply(torch.ones(1, self.shape[1], dtype=self.dtype, device=self.device))[0]

    def nonzeros(self) -> int:
        """Counts the entries that differ from zero."""
        return int(self.coordinates()[2].count_nonzero())

    def stored(self) -> int:
        """Counts the numbers in memory."""
        return sum(part.numel() for part in tensors(self))

    def band(self) -> tuple[int, int] | None:
        """Returns the lowest and the highest diagonal with an entry, 0 the main one; None if all is zero."""
        rows, columns, values = self.coordinates()
        diagonals = (columns - rows)[values != 0]
        return (int(diagonals.min()), int(diagonals.max())) if len(diagonals) else None

    def is_strictly_triangular(self) -> bool:
        """Returns whether all entries lie on one side of the diagonal."""
        band = self.band()
        return band is None or band[0] > 0 or band[1] < 0

    def nonnegative(self) -> bool:
        """Returns whether no entry is negative, as far as that is known without forming the matrix."""
        return False

    def one_entry_per(self) -> tuple[bool, bool]:
        """Returns whether every row and whether every column holds at most one entry."""
        return False, False

    @property
    def picks(self) -> bool:
        """Whether all entries are zero or one, as far as that is known without forming the matrix."""
        return False

    def try_matmul(self, right: "Operator") -> "Operator | None":
        """Returns ``self @ right`` as one operator where that is no larger than the two."""
        return None

    def try_rmatmul(self, left: "Operator") -> "Operator | None":
        """Returns ``left @ self`` as one operator where that is no larger than the two."""
        return None

    def try_add(self, other: "Operator") -> "Operator | None":
        """Returns ``self + other`` as one operator where that is no larger than the two."""
        return None


def _fields(operator: Operator) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(operator)  # type: ignore[arg-type]


def _moved(value: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(*args, **kwargs)
    if isinstance(value, Tensor):
        return value.to(value.new_empty(0).to(*args, **kwargs).device)
    if isinstance(value, Operator):
        return value.to(*args, **kwargs)
    if isinstance(value, tuple):
        return tuple(_moved(part, args, kwargs) for part in value)
    if isinstance(value, dict):
        return {key: _moved(part, args, kwargs) for key, part in value.items()}
    if isinstance(value, torch.dtype):
        return torch.empty(0, dtype=value).to(*args, **kwargs).dtype
    if isinstance(value, torch.device):
        return torch.empty(0, device=value).to(*args, **kwargs).device
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Lists the tensors an operator is made of, those of its parts included."""
    if isinstance(value, Tensor) and value.is_sparse:
        yield from (value.indices(), value.values())
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Operator):
        for part in _fields(value):
            yield from tensors(getattr(value, part.name))
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from calling compressed rows "beta", which it does once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _coo(operator: Operator) -> Tensor:
    rows, columns, values = operator.coordinates()
    nonzero = (values != 0).nonzero()[:, 0]
    index = torch.stack([rows[nonzero], columns[nonzero]])
    return torch.sparse_coo_tensor(index, values[nonzero], operator.shape, check_invariants=False).coalesce()


@dataclass(frozen=True, eq=False, repr=False)
class Sparse(Operator):
    """A matrix stored by its non-zero entries.

    Example:
        >>> Sparse(torch.eye(2).to_sparse()) @ torch.tensor([[3.0, 4.0]])
        tensor([[3., 4.]])
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        if self.matrix.dim() != 2:
            raise InputError(f"a matrix has two dimensions; received the shape {tuple(self.matrix.shape)}")
        object.__setattr__(self, "matrix", self.matrix.to_sparse().coalesce())

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def like(self) -> Any:
        return self.matrix

    def apply(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.matrix, x.mT).mT

    @property
    def T(self) -> "Sparse":
        return Sparse(self.matrix.t())

    def abs(self) -> "Sparse":
        values = self.matrix.values().abs()
        return Sparse(torch.sparse_coo_tensor(self.matrix.indices(), values, self.shape, check_invariants=False))

    def scaled(self, factor: float) -> "Sparse":
        return Sparse(self.matrix * factor)

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = self.matrix.indices()
        return rows, columns, self.matrix.values()


def chain(left: Operator, right: Operator) -> Operator:
    """Multiplies two operators without forming the product, and simplifies where nothing is lost.

    Example:
        >>> from wellposed.forms import Dense, Identity
        >>> type(chain(Dense(torch.ones(2, 3)), Identity(3))).__name__
        'Dense'
    """
    if left.shape[1] != right.shape[0]:
        raise InputError(f"operators of shapes {left.shape} and {right.shape} cannot be multiplied")
    *outer, inner = _factors(left)
    first, *rest = _factors(right)
    product, exact = None, _EXACT.get()
    # Where every entry of the product is an entry of one factor, forming it rounds nothing.
    if not exact or (inner.picks and inner.one_entry_per()[0]) or (first.picks and first.one_entry_per()[1]):
        product = inner.try_matmul(first)
        product = first.try_rmatmul(inner) if product is None else product
    if product is None:
        return Product((*outer, inner, first, *rest))
    for factor in rest:
        product = chain(product, factor)
    for factor in reversed(outer):
        product = chain(factor, product)
    return product


def _factors(operator: Operator) -> tuple[Operator, ...]:
    return operator.factors if isinstance(operator, Product) else (operator,)


def _terms(operator: Operator) -> tuple[Operator, ...]:
    return operator.terms if isinstance(operator, Sum) else (operator,)


@dataclass(frozen=True, eq=False, repr=False)
class Product(Operator):
    """A product of operators, applied one after the other, the last one first."""

    factors: tuple[Operator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.factors[0].shape[0], self.factors[-1].shape[1]

    @property
    def like(self) -> Any:
        return self.factors[0]

    def apply(self, x: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            x = factor.apply(x)
        return x

    @property
    def T(self) -> "Product":
        return Product(tuple(factor.T for factor in reversed(self.factors)))

    def abs(self) -> Operator:
        """Returns ``|PQ|``: the product of absolute values where no terms can cancel, else the formed matrix."""
        left, *rest = self.factors
        right = rest[0] if len(rest) == 1 else Product(tuple(rest))
        single = left.one_entry_per()[0] or right.one_entry_per()[1]
        if single or (left.nonnegative() and right.nonnegative()):
            return chain(left.abs(), right.abs())
        return Sparse(_coo(self)).abs()

    def scaled(self, factor: float) -> Operator:
        first, *rest = self.factors
        return Product((first.scaled(factor), *rest))

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        matrix = _coo(self.factors[0])
        for factor in self.factors[1:]:
            with _quiet():
                matrix = torch.sparse.mm(matrix, _coo(factor)).coalesce()
        rows, columns = matrix.indices()
        return rows, columns, matrix.values()

    def nonnegative(self) -> bool:
        return all(factor.nonnegative() for factor in self.factors)

    def one_entry_per(self) -> tuple[bool, bool]:
        each = [factor.one_entry_per() for factor in self.factors]
        return all(row for row, _ in each), all(column for _, column in each)


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Operator):
    """A sum of operators."""

    terms: tuple[Operator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.terms[0].shape

    @property
    def like(self) -> Any:
        return self.terms[0]

    def apply(self, x: Tensor) -> Tensor:
        total = self.terms[0].apply(x)
        for term in self.terms[1:]:
            total = total + term.apply(x)
        return total

    @property
    def T(self) -> "Sum":
        return Sum(tuple(term.T for term in self.terms))

    def abs(self) -> Operator:
        """Returns the absolute value of the formed matrix, since terms may cancel."""
        if self.nonnegative():
            return self
        return Sparse(_coo(self)).abs()

    def scaled(self, factor: float) -> Operator:
        return Sum(tuple(term.scaled(factor) for term in self.terms))

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        triples = [term.coordinates() for term in self.terms]
        rows, columns, values = (torch.cat(part) for part in zip(*triples, strict=True))
        index = torch.stack([rows, columns])
        matrix = torch.sparse_coo_tensor(index, values, self.shape, check_invariants=False).coalesce()
        return *matrix.indices(), matrix.values()

    def nonnegative(self) -> bool:
        return all(term.nonnegative() for term in self.terms)
