"""Block matrices of operators, of which zero blocks are not stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.forms.operators.base import Operator, Sparse
from wellposed.forms.operators.plain import Dense, Diagonal, Identity, Zero
from wellposed.forms.operators.structured import Accumulation, Selection


@dataclass(frozen=True, eq=False, repr=False)
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
        for (i, j), part in self.parts.items():
            if not (0 <= i < len(self.heights) and 0 <= j < len(self.widths)):
                raise InputError(f"{len(self.heights)} x {len(self.widths)} blocks have no block {i, j}")
            if part.shape != (expected := (self.heights[i], self.widths[j])):
                raise InputError(f"block {i, j} must have the shape {expected}; received {part.shape}")
        nonzero = {key: part for key, part in self.parts.items() if not isinstance(part, Zero)}
        object.__setattr__(self, "parts", nonzero)
        for part in nonzero.values():
            object.__setattr__(self, "kind", part.dtype)
            object.__setattr__(self, "place", part.device)
        object.__setattr__(self, "place", torch.device(self.place))

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.heights), sum(self.widths)

    @property
    def like(self) -> Tensor:
        return torch.empty(0, dtype=self.kind, device=self.place)

    def part(self, i: int, j: int) -> Operator:
        """Returns one block."""
        block = self.parts.get((i, j))
        return Zero((self.heights[i], self.widths[j]), self.dtype, self.device) if block is None else block

    def rows(self) -> list[dict[int, Operator]]:
        """Lists the non-zero blocks of every block row by their block column."""
        return self._rows

    @cached_property
    def _rows(self) -> list[dict[int, Operator]]:
        rows: list[dict[int, Operator]] = [{} for _ in self.heights]
        for (i, j), part in sorted(self.parts.items(), key=lambda item: item[0]):
            rows[i][j] = part
        return rows

    def apply(self, x: Tensor) -> Tensor:
        pieces = x.split(self.widths, dim=1)
        empty = [x.new_zeros(x.shape[0], height) for height in self.heights]
        rows = zip(self.rows(), empty, strict=True)
        return torch.cat([combine(row, pieces) if row else zero for row, zero in rows], dim=1)

    @property
    def T(self) -> "Block":
        return Block(
            self.widths, self.heights, {(j, i): part.T for (i, j), part in self.parts.items()}, *self._entry_type
        )

    def abs(self) -> "Block":
        return Block(
            self.heights, self.widths, {key: part.abs() for key, part in self.parts.items()}, *self._entry_type
        )

    def scaled(self, factor: float) -> "Block":
        blocks = {key: part.scaled(factor) for key, part in self.parts.items()}
        return Block(self.heights, self.widths, blocks, *self._entry_type)

    @property
    def _entry_type(self) -> tuple[torch.dtype, torch.device | str]:
        return self.kind, self.place

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        down, across = _starts(self.heights), _starts(self.widths)
        zero = Zero((0, 0), self.dtype, self.device).coordinates()
        blocks = [(i, j, part.coordinates()) for (i, j), part in self.parts.items()]
        triples = [zero, *((rows + down[i], columns + across[j], v) for i, j, (rows, columns, v) in blocks)]
        rows, columns, values = (torch.cat(pieces) for pieces in zip(*triples, strict=True))
        return rows, columns, values

    def nonzeros(self) -> int:
        return sum(part.nonzeros() for part in self.parts.values())

    def nonnegative(self) -> bool:
        return all(part.nonnegative() for part in self.parts.values())

    def band(self) -> tuple[int, int] | None:
        down, across = _starts(self.heights), _starts(self.widths)
        bands = {(i, j): part.band() for (i, j), part in self.parts.items()}
        shifted = [(across[j] - down[i], band) for (i, j), band in bands.items() if band is not None]
        if not shifted:
            return None
        return min(shift + band[0] for shift, band in shifted), max(shift + band[1] for shift, band in shifted)

    def chosen(self, rows: Sequence[int], columns: Sequence[int]) -> "Block":
        """Keeps some block rows and columns, in the given order."""
        down, across = {i: k for k, i in enumerate(rows)}, {j: k for k, j in enumerate(columns)}
        blocks = {(down[i], across[j]): part for (i, j), part in self.parts.items() if i in down and j in across}
        heights, widths = tuple(self.heights[i] for i in rows), tuple(self.widths[j] for j in columns)
        return Block(heights, widths, blocks, *self._entry_type)


def combine(row: Mapping[int, Operator], pieces: Sequence[Tensor | None], start: Tensor | None = None) -> Tensor:
    """Adds up what the blocks of one block row make of their pieces, and `start`."""
    total = start
    for j, part in row.items():
        piece = pieces[j]
        assert piece is not None
        total = part.apply(piece) if total is None else part.apply_add(total, piece)
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
    entry_type = operator.dtype, operator.device
    if isinstance(operator, Zero):
        return Block(heights, widths, {}, *entry_type)
    if len(heights) == len(widths) == 1:
        return Block(heights, widths, {(0, 0): operator}, *entry_type)
    down, across = _starts(heights), _starts(widths)
    cuts = {
        (i, j): _cut(operator, range(down[i], down[i + 1]), range(across[j], across[j + 1]))
        for i in range(len(heights))
        for j in range(len(widths))
    }
    if isinstance(operator, Dense | Sparse | Diagonal | Selection | Accumulation):  # whose entries are at hand
        cuts = {key: part for key, part in cuts.items() if part.nonzeros()}
    return Block(heights, widths, cuts, *entry_type)


def _cut(operator: Operator, rows: range, columns: range) -> Operator:
    """Keeps some consecutive rows and columns."""
    if isinstance(operator, Dense):
        return Dense(operator.matrix[rows.start : rows.stop, columns.start : columns.stop])
    if isinstance(operator, Sparse):
        i, j, values = operator.coordinates()
        inside = (i >= rows.start) & (i < rows.stop) & (j >= columns.start) & (j < columns.stop)
        index = torch.stack([i[inside] - rows.start, j[inside] - columns.start])
        size = (len(rows), len(columns))
        return Sparse(torch.sparse_coo_tensor(index, values[inside], size, check_invariants=False))
    return _run(rows, operator.shape[0], operator) @ operator @ _run(columns, operator.shape[1], operator).T


def _run(places: range, size: int, like: Operator) -> Operator:
    """Selects consecutive entries of a vector."""
    if len(places) == size:
        return Identity(size, like.dtype, like.device)
    return Selection(torch.arange(places.start, places.stop, device=like.device), size, like.dtype)


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return [0, *accumulate(sizes)]
