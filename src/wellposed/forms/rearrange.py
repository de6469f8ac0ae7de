"""Forms with the states in another order, or with fewer of them.

`regroup` picks states and cuts them into new blocks, which `permute`, `permute_states` and `block_triangular` use
to reorder. `trim` leaves out states that do not matter: those that no input reaches, and those that no output
sees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation
from wellposed.activations.blockwise import piecewise
from wellposed.errors import InputError
from wellposed.forms.compose import BlockForm, add_vectors
from wellposed.forms.evaluation import Stage, strong_components
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators.base import Operator, Sparse
from wellposed.forms.operators.block import Block
from wellposed.forms.operators.entries import abs_upper_bound_block
from wellposed.forms.operators.plain import Dense, Zero
from wellposed.forms.operators.structured import Selection


@dataclass(frozen=True)
class Group:
    """Some states of one block, in a new order; None takes them all as they are."""

    block: int
    states: Tensor | None = None


def regroup(form: ImplicitForm, groups: Sequence[Group]) -> ImplicitForm:
    """Builds the form whose blocks are the given groups of states; states in no group are left out."""
    f = BlockForm.of(form)
    inputs, outputs = ([Group(k) for k in range(len(cut))] for cut in (f.B.widths, f.C.heights))
    return BlockForm(
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
    blocks = {}
    for (k, m), part in block.parts.items():
        for i, j in _pairs(part, rows, columns, down.get(k, []), across.get(m, [])):
            blocks[i, j] = restricted(part, rows[i].states, columns[j].states)
    heights, widths = _sizes(block.heights, rows), _sizes(block.widths, columns)
    return Block(heights, widths, blocks, block.kind, block.place)


def _members(groups: Sequence[Group]) -> dict[int, list[int]]:
    """Lists the groups of every block."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group.block, []).append(number)
    return members


def _sizes(cut: tuple[int, ...], groups: Sequence[Group]) -> tuple[int, ...]:
    return tuple(cut[group.block] if group.states is None else len(group.states) for group in groups)


def _pairs(
    part: Operator, rows: Sequence[Group], columns: Sequence[Group], down: list[int], across: list[int]
) -> list[tuple[int, int]]:
    """Lists the groups between which a part may have entries; many are told apart by its entries."""
    if len(down) * len(across) <= 4 or not isinstance(part, Dense | Sparse):
        return [(i, j) for i in down for j in across]
    i, j, values = part.coordinates()
    nonzero = values != 0
    to, at = _owner(rows, down, part.shape[0], i), _owner(columns, across, part.shape[1], j)
    pairs = torch.stack([to[i[nonzero]], at[j[nonzero]]], dim=1).unique(dim=0)
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
    last_first = {
        number: position for numbers in members.values() for position, number in enumerate(numbers[::-1])
    }
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


def permute(form: ImplicitForm, order: Sequence[int]) -> ImplicitForm:
    """Puts the blocks of a form in another order; outputs and certificates stay (003, Remark 4).

    Args:
        order: the number of the block that comes to each position.

    Example:
        >>> from wellposed.forms.compose import linear, parallel, series
        >>> layer = ImplicitForm(torch.zeros(1, 1), torch.eye(1), torch.eye(1), labels=["a"])
        >>> permute(series(layer, layer.replaced(labels=["b"])), (1, 0)).labels
        ('a', 'b')
    """
    if sorted(order) != list(range(len(form.partition))):
        raise InputError(
            f"order must list each of the {len(form.partition)} blocks once; received {list(order)}; for single "
            "states use permute_states"
        )
    return regroup(form, [Group(k) for k in order])


def permute_states(form: ImplicitForm, order: Sequence[int] | Tensor) -> ImplicitForm:
    """Puts single states in another order, ``A -> P A P'``; outputs and certificates stay (003, Remark 4).

    Neighbours that come from one block make up a block again. The windows of a map on blocks must stay whole.

    Args:
        order: the number of the state that comes to each position.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.eye(2), torch.eye(2))
        >>> permute_states(form, [1, 0]).A.to_dense()
        tensor([[0., 0.],
                [2., 0.]])
    """
    order = torch.as_tensor(order, device=form.device).to(torch.int64)
    n = form.sizes[0]
    if not torch.equal(order.sort().values, torch.arange(n, device=form.device)):
        raise InputError(f"order must list each of the {n} states once; received {tuple(order.shape)} numbers")
    sizes = torch.tensor(form.partition, device=form.device)
    block_of = torch.arange(len(sizes), device=form.device).repeat_interleave(sizes)[order]
    starts = sizes.cumsum(0) - sizes
    runs, counts = torch.unique_consecutive(block_of, return_counts=True)
    pieces = (order - starts[block_of]).split(counts.tolist())
    groups = [Group(int(k), piece) for k, piece in zip(runs, pieces, strict=True)]
    for group in groups:
        _require_whole(form.activations[group.block], group, form.partition[group.block])
    return regroup(form, groups)


def _require_whole(phi: Activation, group: Group, size: int) -> None:
    if phi.componentwise or group.states is None:
        return
    width = phi.block or size
    windows = group.states[: len(group.states) // width * width].view(-1, width)
    steps = windows - windows[:, :1]
    whole = len(group.states) % width == 0 and bool((windows[:, 0] % width == 0).all())
    if not whole or not torch.equal(steps, torch.arange(width, device=steps.device).expand_as(steps)):
        raise InputError(f"{phi.name!r} acts on windows of {width} states, which must stay together and in order")


def block_triangular(form: ImplicitForm) -> ImplicitForm:
    """Orders the states last layer first, so that A is upper triangular by blocks (003 eq. 2.10).

    Blocks come after what they feed. Blocks that feed themselves or one another are split further: states (or the
    windows of a map on blocks) that reach one another stay together as a loop, the others become layers that are
    computed by substitution. Without loops A is strictly triangular. A chain of n states becomes n blocks. What is
    triangular already stays in its order.

    Example:
        >>> A = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.5], [0.0, 0.5, 0.0]])
        >>> layered = block_triangular(ImplicitForm(A, torch.eye(3), torch.eye(3)))
        >>> layered.partition, [stage.loop is not None for stage in layered.order.stages]
        ((2, 1), [False, True])
    """
    return regroup(form, [group for stage in _last_first(form) for group in reversed(_layers(form, stage))])


def _last_first(form: ImplicitForm) -> list[Stage]:
    """Orders the stages so that each comes after all that read it, else as their blocks are ordered."""
    stages = form.order.stages
    stage_of = {k: number for number, stage in enumerate(stages) for k in stage.blocks}
    reads = {(stage_of[i], stage_of[j]) for i, j in form.blocks[0].parts if stage_of[i] != stage_of[j]}
    sources: dict[int, list[int]] = {number: [] for number in range(len(stages))}
    readers = [0] * len(stages)
    for reader, source in reads:
        sources[reader].append(source)
        readers[source] += 1
    ready = [(min(stage.blocks), number) for number, stage in enumerate(stages) if not readers[number]]
    heapify(ready)
    ordered = []
    while ready:
        _, number = heappop(ready)
        ordered.append(stages[number])
        for source in sources[number]:
            readers[source] -= 1
            if not readers[source]:
                heappush(ready, (min(stages[source].blocks), source))
    return ordered


def _layers(form: ImplicitForm, stage: Stage) -> list[Group]:
    """Splits the blocks of a stage, those that others depend on first."""
    if stage.loop is None:
        return [Group(k) for k in stage.blocks]
    numbers = units(form, stage.blocks)
    edges = _unit_edges(form, stage.blocks, numbers)
    depth: dict[int, int] = {}
    layers: dict[tuple[int, int], list[int]] = {}
    for component, members in enumerate(strong_components(edges)):
        inside = set(members)
        level = 1 + max((depth[j] for i in members for j in edges[i] if j not in inside), default=-1)
        depth.update(dict.fromkeys(members, level))
        loop = len(members) > 1 or members[0] in edges[members[0]]
        # loops keep a block of their own; other states of one level do not depend on one another
        layers.setdefault((level, component if loop else -1), []).extend(members)
    groups = []
    for _, chosen in sorted(layers.items()):
        wanted = torch.tensor(sorted(chosen), device=form.device)
        masks = [(k, torch.isin(number, wanted)) for k, number in zip(stage.blocks, numbers, strict=True)]
        groups += [_group(k, mask) for k, mask in masks if bool(mask.any())]
    return groups


def units(form: ImplicitForm, blocks: Sequence[int]) -> list[Tensor]:
    """Numbers what must stay together: the states of componentwise maps one by one, else their windows."""
    numbers, start = [], 0
    for k in blocks:
        phi, size = form.activations[k], form.partition[k]
        width = 1 if phi.componentwise else (phi.block or size)
        numbers.append(start + torch.arange(size, device=form.device) // max(width, 1))
        start += -(-size // max(width, 1))
    return numbers


def _unit_edges(form: ImplicitForm, blocks: tuple[int, ...], numbers: list[Tensor]) -> dict[int, list[int]]:
    count = 1 + max(int(number.max()) for number in numbers if len(number))
    pairs = []
    for (i, j), part in form.blocks[0].chosen(blocks, blocks).parts.items():
        rows, columns, values = part.coordinates()
        nonzero = values != 0
        pairs.append(torch.stack([numbers[i][rows[nonzero]], numbers[j][columns[nonzero]]], dim=1))
    edges: dict[int, list[int]] = {unit: [] for unit in range(count)}
    for row, column in torch.cat(pairs).unique(dim=0).tolist():
        edges[row].append(column)
    return edges


def _group(k: int, mask: Tensor) -> Group:
    return Group(k, None if bool(mask.all()) else mask.nonzero()[:, 0])


def trim(form: ImplicitForm) -> ImplicitForm:
    """Leaves out the states that do not change the outputs, and folds constant ones into the biases.

    A state goes if no path of non-zero entries leads from it to an output. A state that no path leads to from the
    input has one value for all inputs, which is computed once and carried to the biases of what reads it. What a
    map on blocks holds together (a pooling window with its padded zeros) stays or goes together. Paths are
    followed through the factors of products, so that nothing is formed.

    Example:
        >>> A = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
        >>> B, bias = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([0.0, 5.0, 0.0])
        >>> small = trim(ImplicitForm(A, B, torch.tensor([[1.0, 0.0, 0.0]]), bias=bias))
        >>> small.partition, small.bias
        ((1,), tensor([10.]))
    """
    seen = _connected(form, observed=True)
    if not all(bool(part.all()) for part in seen):
        form = regroup(form, _groups(seen))
    reached = _connected(form, observed=False)
    if all(bool(part.all()) for part in reached):
        return form
    return _without_constants(form, reached)


def _without_constants(form: ImplicitForm, reached: list[Tensor]) -> ImplicitForm:
    f = BlockForm.of(form)
    constant = _constants(form, reached)[None]
    shift, offset = (None if not part.parts else part.apply(constant)[0] for part in (f.A, f.C))
    folded = form.replaced(bias=add_vectors(form.bias, shift), output_bias=add_vectors(form.output_bias, offset))
    return regroup(folded, _groups(reached))


def _constants(form: ImplicitForm, reached: list[Tensor]) -> Tensor:  # (n,)
    """Computes the states that no input reaches; the others are zero."""
    still = [~part for part in reached]
    u = torch.zeros(1, form.sizes[1], dtype=form.dtype, device=form.device)
    values = regroup(form, _groups(still)).equilibrium(u).value
    assert isinstance(values, Tensor)
    empty = torch.zeros(form.sizes[0], dtype=form.dtype, device=form.device)
    return empty.masked_scatter(torch.cat(still), values[0])


@torch.no_grad()
def _connected(form: ImplicitForm, observed: bool) -> list[Tensor]:  # (n_k,) of every block
    """Marks the states on a path from the input or, if `observed`, to the output."""
    f = BlockForm.of(form)
    A, B, C = (abs_upper_bound_block(part, part.device, False) for part in (f.A, f.B, f.C))
    A, start = (A.T, C.T) if observed else (A, B)
    first = start.apply(torch.ones(1, start.shape[1], dtype=A.dtype, device=A.device))[0]
    marked = [_together(piece > 0, form, k) for k, piece in enumerate(first.split(form.partition))]
    queue = {k for k, part in enumerate(marked) if bool(part.any())}
    while queue:
        j = queue.pop()
        for (i, source), part in A.parts.items():
            if source != j:
                continue
            further = _together(part.apply(marked[j].to(A.dtype)[None])[0] > 0, form, i) | marked[i]
            if not torch.equal(further, marked[i]):
                marked[i] = further
                queue.add(i)
    return marked


def _together(marks: Tensor, form: ImplicitForm, k: int) -> Tensor:
    """Marks all states of a window if one is marked."""
    if form.activations[k].componentwise or not len(marks):
        return marks
    (number,) = units(form, [k])
    count = torch.zeros(int(number.max()) + 1, dtype=torch.int64, device=marks.device)
    return (count.index_add(0, number, marks.to(torch.int64)) > 0)[number]


def _groups(chosen: list[Tensor]) -> list[Group]:
    """Lists the chosen states of every block; one empty block where there are none."""
    groups = [_group(k, mask) for k, mask in enumerate(chosen) if bool(mask.any())]
    return groups or [Group(0, torch.zeros(0, dtype=torch.int64, device=chosen[0].device))]


def cap_rows(form: ImplicitForm, kappa: float | None = None) -> ImplicitForm:
    """Rescales a form without loops where the rows of A are not below a cap.

    Args:
        form: whose outputs stay the same (003, section 2.5).
        kappa: the cap; 0.95 over the Lipschitz constant of phi if None.
    """
    constant = form.activation.lipschitz()
    if math.isinf(constant):
        raise InputError(
            f"{form.activation.name} has no Lipschitz constant, so no cap on A keeps a model well-posed; the form "
            "itself can be evaluated and saved"
        )
    cap = 0.95 / max(1.0, constant) if kappa is None else kappa
    return form if float(form.A.abs().row_sums().max()) < cap else form.rescale(cap)


def absorb_output_bias(form: ImplicitForm) -> ImplicitForm:
    """Turns an output bias into a state of constant value, which C multiplies by it; A, B and C become dense.

    Example:
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), output_bias=torch.ones(1))
        >>> absorb_output_bias(form).sizes, absorb_output_bias(form)(torch.ones(1, 1))
        ((2, 1, 1), tensor([[2.]]))
    """
    if form.output_bias is None or not bool(form.output_bias.any()):
        return form
    A, B, C = (block.to_dense() for block in (form.A, form.B, form.C))
    phi, value = form.activation, torch.ones(1, dtype=A.dtype, device=A.device)
    single = phi.componentwise and len(set(form.activations)) == 1
    if single and float(phi(value)) != 0:
        value = phi(value)
    else:
        phi = piecewise((*form.activations, get_activation("identity")), (*form.partition, 1))
    bias = A.new_zeros(len(A)) if form.bias is None else form.bias
    A, B = torch.nn.functional.pad(A, (0, 1, 0, 1)), torch.nn.functional.pad(B, (0, 0, 0, 1))
    C = torch.cat([C, (form.output_bias / value)[:, None]], dim=1)
    return ImplicitForm(A, B, C, form.D, torch.cat([bias, torch.ones_like(value)]), phi, form.input_shape)
