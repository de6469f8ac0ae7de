"""One operator applied to every piece of a vector, such as a linear layer to every token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.forms.operator import Operator


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
    def home(self) -> Any:
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

    def monomial(self) -> tuple[bool, bool]:
        return self.inner.monomial()

    def merged(self, right: Operator) -> Operator | None:
        if not isinstance(right, Repeated) or right.count != self.count:
            return None
        found = self.inner.merged(right.inner)
        found = right.inner.absorbed(self.inner) if found is None else found
        return None if found is None else Repeated(found, self.count)
