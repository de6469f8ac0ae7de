"""Some states of a form, in another order and other blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.forms.block import Block
from wellposed.forms.blocks import Blocks
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operator import Operator, Sparse
from wellposed.forms.operators import Dense, Zero
from wellposed.forms.selection import Selection


@dataclass(frozen=True)
class Group:
    """Some states of one block, in a new order; None takes them all as they are."""

    block: int
    states: Tensor | None = None


def regroup(form: ImplicitForm, groups: Sequence[Group]) -> ImplicitForm:
    """Builds the form whose blocks are the given groups of states; states in no group are left out."""
    f = Blocks.of(form)
    inputs, outputs = ([Group(k) for k in range(len(cut))] for cut in (f.B.widths, f.C.heights))
    return Blocks(
        _rearranged(f.A, groups, groups),
        _rearranged(f.B, groups, inputs),
        _rearranged(f.C, outputs, groups),
        f.D,
        _gathered(f.bias, form.partition, groups),
        f.output_bias,
        tuple(form.activations[group.block] for group in groups),
        _labels(f.labels, groups),
    ).form(form.input_shape)


def _rearranged(block: Block, rows: Sequence[Group], columns: Sequence[Group]) -> Block:
    down, across = _members(rows), _members(columns)
    parts = {}
    for (k, m), part in block.parts.items():
        for i, j in _pairs(part, rows, columns, down.get(k, []), across.get(m, [])):
            parts[i, j] = restricted(part, rows[i].states, columns[j].states)
    heights, widths = _sizes(block.heights, rows), _sizes(block.widths, columns)
    return Block(heights, widths, parts, block.kind, block.place)


def _members(groups: Sequence[Group]) -> dict[int, list[int]]:
    """Lists the groups of every block."""
    found: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault(group.block, []).append(number)
    return found


def _sizes(cut: tuple[int, ...], groups: Sequence[Group]) -> tuple[int, ...]:
    return tuple(cut[group.block] if group.states is None else len(group.states) for group in groups)


def _pairs(
    part: Operator, rows: Sequence[Group], columns: Sequence[Group], down: list[int], across: list[int]
) -> list[tuple[int, int]]:
    """Lists the groups between which a part may have entries; many are told apart by its entries."""
    if len(down) * len(across) <= 4 or not isinstance(part, Dense | Sparse):
        return [(i, j) for i in down for j in across]
    i, j, values = part.coordinates()
    kept = values != 0
    to, at = _owner(rows, down, part.shape[0], i), _owner(columns, across, part.shape[1], j)
    pairs = torch.stack([to[i[kept]], at[j[kept]]], dim=1).unique(dim=0)
    return [(a, b) for a, b in pairs.tolist() if a >= 0 and b >= 0]


def _owner(groups: Sequence[Group], members: list[int], size: int, like: Tensor) -> Tensor:
    """Tells the group of every state of a block, -1 for none."""
    owner = torch.full((size,), -1, dtype=torch.int64, device=like.device)
    for number in members:
        states = groups[number].states
        owner[slice(None) if states is None else states] = number
    return owner


def _gathered(vector: Tensor | None, sizes: tuple[int, ...], groups: Sequence[Group]) -> Tensor | None:
    if vector is None:
        return None
    pieces = vector.split(sizes)
    return torch.cat([pieces[g.block] if g.states is None else pieces[g.block][g.states] for g in groups])


def _labels(labels: tuple[str, ...], groups: Sequence[Group]) -> tuple[str, ...]:
    """Numbers the pieces of a block that was split, from the last to the first as the states are."""
    if not labels:
        return ()
    members = _members(groups)
    count = {k: len(numbers) for k, numbers in members.items()}
    last_first = {number: place for numbers in members.values() for place, number in enumerate(numbers[::-1])}
    places = enumerate(group.block for group in groups)
    return tuple(labels[k] if count[k] == 1 else f"{labels[k]}[{last_first[number]}]" for number, k in places)


def restricted(operator: Operator, rows: Tensor | None, columns: Tensor | None) -> Operator:
    """Picks rows and columns, None being all; zero where nothing is left of a stored matrix.

    Example:
        >>> restricted(Dense(torch.eye(3)), torch.tensor([0]), torch.tensor([1, 2]))
        Zero(1 x 2)
    """
    if isinstance(operator, Dense | Sparse):
        matrix = operator.matrix
        matrix = matrix if rows is None else matrix.index_select(0, rows)
        matrix = matrix if columns is None else matrix.index_select(1, columns)
        stored = matrix.coalesce().values() if matrix.is_sparse else matrix
        if not bool(stored.any()):
            return Zero((matrix.shape[0], matrix.shape[1]), operator.dtype, operator.device)
        return type(operator)(matrix)
    if rows is not None:
        operator = Selection(rows, operator.shape[0], operator.dtype) @ operator
    if columns is not None:
        operator = operator @ Selection(columns, operator.shape[1], operator.dtype).T
    return operator
