"""Block matrices of operators, of which zero blocks are not stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.forms.operator import Operator
from wellposed.forms.operators import Zero
from wellposed.forms.selection import Selection


@dataclass(frozen=True, eq=False)
class Block(Operator):
    """A matrix of operators; what is not given is zero.

    Args:
        heights, widths: sizes of the block rows and block columns.
        parts: operators by block row and block column.

    Example:
        >>> from wellposed.forms import Dense
        >>> Block((1, 2), (2,), {(1, 0): Dense(torch.eye(2))}).to_dense()
        tensor([[0., 0.],
                [1., 0.],
                [0., 1.]])
    """

    heights: tuple[int, ...]
    widths: tuple[int, ...]
    parts: dict[tuple[int, int], Operator]
    kind: torch.dtype = torch.float32
    place: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        kept = {key: part for key, part in self.parts.items() if not isinstance(part, Zero)}
        object.__setattr__(self, "parts", kept)
        for part in kept.values():
            object.__setattr__(self, "kind", part.dtype)
            object.__setattr__(self, "place", part.device)
        for (i, j), part in kept.items():
            if part.shape != (expected := (self.heights[i], self.widths[j])):
                raise InputError(f"block {i, j} must have the shape {expected}; received {part.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.heights), sum(self.widths)

    @property
    def dtype(self) -> torch.dtype:
        return self.kind

    @property
    def device(self) -> torch.device:
        return torch.device(self.place)

    def part(self, i: int, j: int) -> Operator:
        """Returns one block."""
        found = self.parts.get((i, j))
        return Zero((self.heights[i], self.widths[j]), self.dtype, self.device) if found is None else found

    def rows(self) -> list[dict[int, Operator]]:
        """Lists the non-zero blocks of every block row by their block column."""
        found: list[dict[int, Operator]] = [{} for _ in self.heights]
        for (i, j), part in sorted(self.parts.items(), key=lambda item: item[0]):
            found[i][j] = part
        return found

    def apply(self, x: Tensor) -> Tensor:
        pieces = x.split(self.widths, dim=1)
        empty = [x.new_zeros(x.shape[0], height) for height in self.heights]
        rows = zip(self.rows(), empty, strict=True)
        return torch.cat([combine(row, pieces) if row else zero for row, zero in rows], dim=1)

    @property
    def T(self) -> "Block":
        return Block(
            self.widths, self.heights, {(j, i): part.T for (i, j), part in self.parts.items()}, *self._home
        )

    def abs(self) -> "Block":
        return Block(self.heights, self.widths, {key: part.abs() for key, part in self.parts.items()}, *self._home)

    def scaled(self, factor: float) -> "Block":
        parts = {key: part.scaled(factor) for key, part in self.parts.items()}
        return Block(self.heights, self.widths, parts, *self._home)

    @property
    def _home(self) -> tuple[torch.dtype, torch.device | str]:
        return self.kind, self.place

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        down, across = _starts(self.heights), _starts(self.widths)
        zero = Zero((0, 0), self.dtype, self.device).coordinates()
        found = [(i, j, part.coordinates()) for (i, j), part in self.parts.items()]
        triples = [zero, *((rows + down[i], columns + across[j], v) for i, j, (rows, columns, v) in found)]
        rows, columns, values = (torch.cat(parts) for parts in zip(*triples, strict=True))
        return rows, columns, values

    def nonzeros(self) -> int:
        return sum(part.nonzeros() for part in self.parts.values())

    def nonnegative(self) -> bool:
        return all(part.nonnegative() for part in self.parts.values())

    def is_strictly_triangular(self) -> bool:
        if self.heights != self.widths:
            return super().is_strictly_triangular()
        sides = {(j > i) - (j < i) for i, j in self.parts}
        if 0 not in sides:
            return len(sides) <= 1
        return super().is_strictly_triangular()

    def chosen(self, rows: Sequence[int], columns: Sequence[int]) -> "Block":
        """Keeps some block rows and columns, in the given order."""
        down, across = {i: k for k, i in enumerate(rows)}, {j: k for k, j in enumerate(columns)}
        parts = {(down[i], across[j]): part for (i, j), part in self.parts.items() if i in down and j in across}
        heights, widths = tuple(self.heights[i] for i in rows), tuple(self.widths[j] for j in columns)
        return Block(heights, widths, parts, *self._home)


def combine(row: Mapping[int, Operator], pieces: Sequence[Tensor | None], start: Tensor | None = None) -> Tensor:
    """Adds up what the blocks of one block row make of their pieces, and `start`."""
    total = start
    for j, part in row.items():
        piece = pieces[j]
        assert piece is not None
        term = part.apply(piece)
        total = term if total is None else total + term
    assert total is not None
    return total


def partitioned(operator: Operator, heights: Sequence[int], widths: Sequence[int]) -> Block:
    """Reads an operator as a block matrix of the given sizes.

    Example:
        >>> from wellposed.forms import Dense
        >>> sorted(partitioned(Dense(torch.eye(3)), (1, 2), (3,)).parts)
        [(0, 0), (1, 0)]
    """
    heights, widths = tuple(heights), tuple(widths)
    if isinstance(operator, Block) and (operator.heights, operator.widths) == (heights, widths):
        return operator
    if operator.shape != (sum(heights), sum(widths)):
        raise InputError(f"blocks of {heights} rows and {widths} columns do not make up {operator.shape}")
    home = operator.dtype, operator.device
    if isinstance(operator, Zero):
        return Block(heights, widths, {}, *home)
    if len(heights) == len(widths) == 1:
        return Block(heights, widths, {(0, 0): operator}, *home)
    down, across = _starts(heights), _starts(widths)
    parts = {}
    for i, height in enumerate(heights):
        row = Selection(torch.arange(down[i], down[i] + height, device=operator.device), down[-1], operator.dtype)
        for j, width in enumerate(widths):
            place = torch.arange(across[j], across[j] + width, device=operator.device)
            column = Selection(place, across[-1], operator.dtype).T
            parts[i, j] = row @ operator @ column
    return Block(heights, widths, parts, *home)


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return [0, *accumulate(sizes)]
