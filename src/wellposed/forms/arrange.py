"""Other orders of the states of a form: permutations and the block-triangular form."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.errors import InputError
from wellposed.forms.evaluation import Stage
from wellposed.forms.form import ImplicitForm
from wellposed.forms.loop import strong_components
from wellposed.forms.regroup import Group, regroup


def permute(form: ImplicitForm, order: Sequence[int]) -> ImplicitForm:
    """Puts the blocks of a form in another order; outputs and certificates stay (003, Remark 4).

    Args:
        order: the number of the block that comes to each place.

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
        order: the number of the state that comes to each place.

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
    home = torch.arange(len(sizes), device=form.device).repeat_interleave(sizes)[order]
    starts = sizes.cumsum(0) - sizes
    runs, counts = torch.unique_consecutive(home, return_counts=True)
    pieces = (order - starts[home]).split(counts.tolist())
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
        >>> layered.partition, [stage.system is not None for stage in layered.plan.stages]
        ((2, 1), [False, True])
    """
    return regroup(form, [group for stage in _last_first(form) for group in reversed(_layers(form, stage))])


def _last_first(form: ImplicitForm) -> list[Stage]:
    """Orders the stages so that each comes after all that read it, else as their blocks are ordered."""
    stages = form.plan.stages
    home = {k: number for number, stage in enumerate(stages) for k in stage.blocks}
    reads = {(home[i], home[j]) for i, j in form.blocks[0].parts if home[i] != home[j]}
    sources: dict[int, list[int]] = {number: [] for number in range(len(stages))}
    readers = [0] * len(stages)
    for reader, source in reads:
        sources[reader].append(source)
        readers[source] += 1
    ready = [(min(stage.blocks), number) for number, stage in enumerate(stages) if not readers[number]]
    heapify(ready)
    found = []
    while ready:
        _, number = heappop(ready)
        found.append(stages[number])
        for source in sources[number]:
            readers[source] -= 1
            if not readers[source]:
                heappush(ready, (min(stages[source].blocks), source))
    return found


def _layers(form: ImplicitForm, stage: Stage) -> list[Group]:
    """Splits the blocks of a stage, those that others depend on first."""
    if stage.system is None:
        return [Group(k) for k in stage.blocks]
    numbers = units(form, stage.blocks)
    edges = _unit_edges(form, stage.blocks, numbers)
    depth: dict[int, int] = {}
    found: dict[tuple[int, int], list[int]] = {}
    for place, members in enumerate(strong_components(edges)):
        inside = set(members)
        level = 1 + max((depth[j] for i in members for j in edges[i] if j not in inside), default=-1)
        depth.update(dict.fromkeys(members, level))
        loop = len(members) > 1 or members[0] in edges[members[0]]
        # loops keep a block of their own; other states of one level do not depend on one another
        found.setdefault((level, place if loop else -1), []).extend(members)
    groups = []
    for _, chosen in sorted(found.items()):
        groups += _located(stage.blocks, numbers, torch.tensor(sorted(chosen), device=form.device))
    return groups


def units(form: ImplicitForm, blocks: Sequence[int]) -> list[Tensor]:
    """Numbers what must stay together: the states of componentwise maps one by one, else their windows."""
    found, start = [], 0
    for k in blocks:
        phi, size = form.activations[k], form.partition[k]
        width = 1 if phi.componentwise else (phi.block or size)
        found.append(start + torch.arange(size, device=form.device) // max(width, 1))
        start += -(-size // max(width, 1))
    return found


def _unit_edges(form: ImplicitForm, blocks: tuple[int, ...], numbers: list[Tensor]) -> dict[int, list[int]]:
    count = 1 + max(int(number.max()) for number in numbers if len(number))
    pairs = []
    for (i, j), part in form.blocks[0].chosen(blocks, blocks).parts.items():
        rows, columns, values = part.coordinates()
        kept = values != 0
        pairs.append(torch.stack([numbers[i][rows[kept]], numbers[j][columns[kept]]], dim=1))
    edges: dict[int, list[int]] = {unit: [] for unit in range(count)}
    for row, column in torch.cat(pairs).unique(dim=0).tolist():
        edges[row].append(column)
    return edges


def _located(blocks: tuple[int, ...], numbers: list[Tensor], chosen: Tensor) -> list[Group]:
    """Finds the states of some units in their blocks."""
    found = [(k, torch.isin(number, chosen)) for k, number in zip(blocks, numbers, strict=True)]
    return [Group(k, None if bool(m.all()) else m.nonzero()[:, 0]) for k, m in found if bool(m.any())]
