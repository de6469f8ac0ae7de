"""States that do not matter: those that no input reaches, and those that no output sees."""

import torch
from torch import Tensor

from wellposed.forms.arrange import units
from wellposed.forms.blocks import Blocks, total
from wellposed.forms.cover import cover_block
from wellposed.forms.form import ImplicitForm
from wellposed.forms.regroup import Group, regroup


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
    seen = _spread(form, observed=True)
    if not all(bool(part.all()) for part in seen):
        form = regroup(form, _groups(seen))
    reached = _spread(form, observed=False)
    if all(bool(part.all()) for part in reached):
        return form
    return _without_constants(form, reached)


def _without_constants(form: ImplicitForm, reached: list[Tensor]) -> ImplicitForm:
    f = Blocks.of(form)
    constant = _constants(form, reached)[None]
    shift, offset = (None if not part.parts else part.apply(constant)[0] for part in (f.A, f.C))
    folded = form.replaced(bias=total(form.bias, shift), output_bias=total(form.output_bias, offset))
    return regroup(folded, _groups(reached))


def _constants(form: ImplicitForm, reached: list[Tensor]) -> Tensor:  # (n,)
    """Computes the states that no input reaches; the others are zero."""
    still = [~part for part in reached]
    u = torch.zeros(1, form.sizes[1], dtype=form.dtype, device=form.device)
    found = regroup(form, _groups(still)).equilibrium(u).value
    assert isinstance(found, Tensor)
    empty = torch.zeros(form.sizes[0], dtype=form.dtype, device=form.device)
    return empty.masked_scatter(torch.cat(still), found[0])


@torch.no_grad()
def _spread(form: ImplicitForm, observed: bool) -> list[Tensor]:  # (n_k,) of every block
    """Marks the states on a path from the input or, if `observed`, to the output."""
    f = Blocks.of(form)
    A, B, C = (cover_block(part, part.device, False) for part in (f.A, f.B, f.C))
    A, start = (A.T, C.T) if observed else (A, B)
    marked = _marks(start.apply(torch.ones(1, start.shape[1], dtype=A.dtype, device=A.device)), form)
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


def _marks(values: Tensor, form: ImplicitForm) -> list[Tensor]:
    return [_together(part > 0, form, k) for k, part in enumerate(values[0].split(form.partition))]


def _together(marks: Tensor, form: ImplicitForm, k: int) -> Tensor:
    """Marks all states of a window if one is marked."""
    if form.activations[k].componentwise or not len(marks):
        return marks
    (number,) = units(form, [k])
    count = torch.zeros(int(number.max()) + 1, dtype=torch.int64, device=marks.device)
    return (count.index_add(0, number, marks.to(torch.int64)) > 0)[number]


def _groups(kept: list[Tensor]) -> list[Group]:
    """Lists what is kept of every block; one empty block where nothing is."""
    found = [(k, part) for k, part in enumerate(kept) if bool(part.any())]
    if not found:
        return [Group(0, torch.zeros(0, dtype=torch.int64, device=kept[0].device))]
    return [Group(k, None if bool(part.all()) else part.nonzero()[:, 0]) for k, part in found]
