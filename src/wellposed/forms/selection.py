"""Selections: slicing, permuting, repeating and padding as a matrix with one entry a row."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.forms.operator import Operator, Product
from wellposed.forms.operators import Dense, Diagonal, Identity, Zero


@dataclass(frozen=True, eq=False, repr=False)
class Selection(Operator):
    """The matrix whose row i has a one in the column ``index[i]``, and no entry where that is -1.

    The transpose of a selection adds up what it would have picked.

    Example:
        >>> Selection(torch.tensor([2, -1, 0, 0]), 3) @ torch.tensor([[5.0, 6.0, 7.0]])
        tensor([[7., 0., 5., 5.]])
    """

    index: Tensor  # (rows,)
    columns: int
    kind: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.index.dim() != 1 or self.index.is_floating_point():
            raise InputError(
                f"a selection has one index a row, whole numbers; received {self.index.dtype} of shape "
                f"{tuple(self.index.shape)}"
            )
        object.__setattr__(self, "index", self.index.long())
        if len(self.index) and not -1 <= int(self.index.min()) <= int(self.index.max()) < self.columns:
            raise InputError(
                f"a selection from {self.columns} columns has indices from -1 to {self.columns - 1}; received "
                f"{int(self.index.min())} to {int(self.index.max())}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.index), self.columns

    @property
    def home(self) -> Tensor:
        return torch.empty(0, dtype=self.kind, device=self.index.device)

    @cached_property
    def _holes(self) -> bool:
        return bool((self.index < 0).any())

    @cached_property
    def _start(self) -> int | None:
        """Where the selection begins if it is a slice."""
        if self._holes or not len(self.index):
            return None
        start = int(self.index[0])
        run = torch.arange(start, start + len(self.index), device=self.device)
        return start if torch.equal(self.index, run) else None

    def apply(self, x: Tensor) -> Tensor:
        if self._start is not None:
            return x.narrow(1, self._start, len(self.index))
        if not self._holes:
            return x.index_select(1, self.index)
        rows, columns = self._pairs
        return x.new_zeros(len(x), len(self.index)).index_copy(1, rows, x.index_select(1, columns))

    def onto(self, start: Tensor, x: Tensor) -> Tensor:
        if not self._holes:
            return start + self.apply(x)
        rows, columns = self._pairs
        return start.index_add(1, rows, x.index_select(1, columns))

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        """The rows that hold an entry, and where."""
        rows = (self.index >= 0).nonzero()[:, 0]
        return rows, self.index[rows]

    @property
    def T(self) -> "Accumulation":
        return Accumulation(self)

    def abs(self) -> "Selection":
        return self

    def scaled(self, factor: float) -> Operator:
        values = torch.full((len(self.index),), factor, dtype=self.kind, device=self.device)
        return Product((Diagonal(values), self))

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = self._pairs
        return rows, columns, torch.ones(len(rows), dtype=self.kind, device=self.device)

    def nonnegative(self) -> bool:
        return True

    @cached_property
    def _distinct(self) -> bool:
        chosen = self.index[self.index >= 0]
        return len(chosen.unique()) == len(chosen)

    def monomial(self) -> tuple[bool, bool]:
        return True, self._distinct

    def merged(self, right: Operator) -> Operator | None:
        if isinstance(right, Selection):
            return self._then(right.index, right.columns)
        if isinstance(right, Accumulation) and right.selection._distinct:
            return self._then(right.selection._inverse(), right.shape[1])
        if isinstance(right, Diagonal) and len(self.index) <= self.columns:
            return Product((Diagonal(self.apply(right.values[None])[0]), self))
        if isinstance(right, Dense) and len(self.index) <= right.shape[0]:
            return Dense(self.apply(right.matrix.mT).mT)
        return None

    def _then(self, index: Tensor, columns: int) -> Operator:
        """Selects from what a selection with that index has picked."""
        found = index[self.index.clamp(min=0)] if len(index) else self.index
        found = torch.where(self.index < 0, -1, found)
        if not bool((found >= 0).any()):
            return Zero((len(found), columns), self.kind, self.device)
        picked = Selection(found, columns, self.kind)
        whole = picked._start == 0 and len(found) == columns
        return Identity(columns, self.kind, self.device) if whole else picked

    def _inverse(self) -> Tensor:
        """Returns the row that picks each column, -1 where none does."""
        rows = (self.index >= 0).nonzero()[:, 0]
        return self.index.new_full((self.columns,), -1).index_put((self.index[rows],), rows)

    def absorbed(self, left: Operator) -> Operator | None:
        if isinstance(left, Dense) and self.columns <= len(self.index):
            return Dense(self.T.apply(left.matrix))
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Accumulation(Operator):
    """The transpose of a selection: adds entry i to position ``index[i]``.

    Example:
        >>> Accumulation(Selection(torch.tensor([2, 0, 0]), 3)) @ torch.tensor([[5.0, 6.0, 7.0]])
        tensor([[13.,  0.,  5.]])
    """

    selection: Selection

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.selection.shape
        return columns, rows

    @property
    def home(self) -> Any:
        return self.selection

    def apply(self, x: Tensor) -> Tensor:
        rows = (self.selection.index >= 0).nonzero()[:, 0]
        empty = x.new_zeros(x.shape[0], self.selection.columns)
        return empty.index_add(1, self.selection.index[rows], x[:, rows])

    @property
    def T(self) -> Selection:
        return self.selection

    def abs(self) -> "Accumulation":
        return self

    def scaled(self, factor: float) -> Operator:
        values = torch.full((self.shape[0],), factor, dtype=self.dtype, device=self.device)
        return Product((Diagonal(values), self))

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns, values = self.selection.coordinates()
        return columns, rows, values

    def nonnegative(self) -> bool:
        return True

    def monomial(self) -> tuple[bool, bool]:
        rows, columns = self.selection.monomial()
        return columns, rows

    def merged(self, right: Operator) -> Operator | None:
        if not isinstance(right, Accumulation):
            return None
        found = right.selection.merged(self.selection)
        return None if found is None else found.T

    def absorbed(self, left: Operator) -> Operator | None:
        if isinstance(left, Dense) and self.shape[1] <= left.shape[1]:
            return Dense(self.selection.apply(left.matrix))
        return None
