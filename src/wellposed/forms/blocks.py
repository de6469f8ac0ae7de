"""The block matrices of a form cut alike, and how two of them are put together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.forms.block import Block
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operator import Operator
from wellposed.forms.operators import Identity, Zero


@dataclass(frozen=True)
class Blocks:
    """A, B, C and D of a form as block matrices: B and D have the same inputs, C and D the same outputs."""

    A: Block
    B: Block
    C: Block
    D: Block
    bias: Tensor | None
    output_bias: Tensor | None
    activations: tuple[Activation, ...]
    labels: tuple[str, ...]

    @classmethod
    def of(cls, form: ImplicitForm) -> "Blocks":
        """Reads a form; where D is not cut as B and C are, inputs and outputs are taken whole."""
        A, B, C = form.blocks
        D, cuts = form.D, (C.heights, B.widths)
        if isinstance(D, Block) and (D.heights, D.widths) == cuts:
            feedthrough = D
        elif isinstance(D, Zero):
            feedthrough = Block(*cuts, {}, form.dtype, form.device)
        else:
            B, C = one_column(B), one_row(C)
            feedthrough = Block(C.heights, B.widths, {(0, 0): D})
        return cls(A, B, C, feedthrough, form.bias, form.output_bias, form.activations, form.labels)

    def form(self, input_shape: tuple[int, ...]) -> ImplicitForm:
        """Builds the form; blocks without states are left out."""
        kept = [k for k, size in enumerate(self.A.heights) if size] or [0]
        inputs, outputs = range(len(self.B.widths)), range(len(self.C.heights))
        D = self.D if self.D.parts else Zero(self.D.shape, self.A.dtype, self.A.device)
        return ImplicitForm(
            self.A.chosen(kept, kept),
            self.B.chosen(kept, inputs),
            self.C.chosen(outputs, kept),
            D,
            self.bias,
            tuple(self.activations[k] for k in kept),
            input_shape,
            output_bias=self.output_bias,
            labels=tuple(self.labels[k] for k in kept) if self.labels else None,
        )


def one_column(block: Block) -> Block:
    """Takes the block columns together."""
    if len(block.widths) == 1:
        return block
    rows = {i: {(0, j): part for j, part in row.items()} for i, row in enumerate(block.rows()) if row}
    parts = {(i, 0): Block((block.heights[i],), block.widths, row) for i, row in rows.items()}
    return Block(block.heights, (block.shape[1],), dict(parts), block.kind, block.place)


def one_row(block: Block) -> Block:
    """Takes the block rows together."""
    if len(block.heights) == 1:
        return block
    columns: dict[int, dict] = {}
    for (i, j), part in block.parts.items():
        columns.setdefault(j, {})[i, 0] = part
    parts = {(0, j): Block(block.heights, (block.widths[j],), column) for j, column in columns.items()}
    return Block((block.shape[0],), block.widths, dict(parts), block.kind, block.place)


def identity(sizes: Sequence[int], like: Block) -> Block:
    """Returns the identity with blocks of the given sizes."""
    parts = {(k, k): Identity(size, like.dtype, like.device) for k, size in enumerate(sizes)}
    return Block(tuple(sizes), tuple(sizes), dict(parts), like.kind, like.place)


def times(left: Block, right: Block) -> Block:
    """Multiplies block by block; where the cuts between them differ, they are taken together.

    Example:
        >>> row = Block((1,), (1, 1), {(0, 0): Identity(1)})
        >>> times(row, row.T).to_dense()
        tensor([[1.]])
    """
    if left.widths != right.heights:
        left, right = one_column(left), one_row(right)
    rows = right.rows()
    parts: dict[tuple[int, int], Operator] = {}
    for (i, k), factor in sorted(left.parts.items(), key=lambda item: item[0]):
        for j, part in rows[k].items():
            term = factor @ part
            parts[i, j] = parts[i, j] + term if (i, j) in parts else term
    return Block(left.heights, right.widths, parts, left.kind, left.place)


def plus(left: Block, right: Block) -> Block:
    """Adds block by block; cuts that differ are taken together."""
    if left.heights != right.heights:
        left, right = one_row(left), one_row(right)
    if left.widths != right.widths:
        left, right = one_column(left), one_column(right)
    parts = dict(left.parts)
    for key, part in right.parts.items():
        parts[key] = parts[key] + part if key in parts else part
    return Block(left.heights, left.widths, parts, left.kind, left.place)


def diagonal(first: Block, second: Block) -> Block:
    """Puts two matrices on the diagonal."""
    return _placed(first, second, (len(first.heights), len(first.widths)))


def above(first: Block, second: Block) -> Block:
    """Puts a matrix on top of another; cuts of the columns that differ are taken together."""
    if first.widths != second.widths:
        first, second = one_column(first), one_column(second)
    return _placed(first, second, (len(first.heights), 0))


def beside(first: Block, second: Block) -> Block:
    """Puts a matrix to the left of another; cuts of the rows that differ are taken together."""
    if first.heights != second.heights:
        first, second = one_row(first), one_row(second)
    return _placed(first, second, (0, len(first.widths)))


def _placed(first: Block, second: Block, corner: tuple[int, int]) -> Block:
    down, across = corner
    parts = first.parts | {(i + down, j + across): part for (i, j), part in second.parts.items()}
    heights = first.heights + second.heights if down else first.heights
    widths = first.widths + second.widths if across else first.widths
    return Block(heights, widths, parts, first.kind, first.place)


def image(block: Block, vector: Tensor | None) -> Tensor | None:
    """Multiplies a vector; None is zero."""
    return None if vector is None or not block.parts else block.apply(vector[None])[0]


def total(*vectors: Tensor | None) -> Tensor | None:
    """Adds vectors of which some may be missing."""
    found = [vector for vector in vectors if vector is not None]
    return torch.stack(found).sum(0) if len(found) > 1 else (found[0] if found else None)


def joined(first: Tensor | None, second: Tensor | None, sizes: tuple[int, int], like: Block) -> Tensor | None:
    """Concatenates two vectors of which one may be missing."""
    if first is None and second is None:
        return None
    empty = [torch.zeros(size, dtype=like.dtype, device=like.device) for size in sizes]
    return torch.cat([zero if v is None else v for v, zero in zip((first, second), empty, strict=True)])


def joined_labels(first: Blocks, second: Blocks) -> tuple[str, ...]:
    """Lists all labels; blocks of a form without any are called by their activation."""
    if not first.labels and not second.labels:
        return ()
    parts = [part.labels or tuple(phi.name for phi in part.activations) for part in (first, second)]
    return parts[0] + parts[1]
