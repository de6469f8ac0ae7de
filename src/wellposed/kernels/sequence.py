"""A recurrent implicit model over whole sequences: one compiled call forward, one backward through time.

With the hidden state h before an element s,

    ``x = phi(Ax + B (s, h) + b)``,  ``h' = Cx + D (s, h)``.

Inputs enter by one product for all times before the loop, gradients of matrices are one product each for all times
after it; in between nothing returns to Python. `run_sequences` makes the loops of an engine
differentiable.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import AffineSolve, differentiable_adjoint
from wellposed.kernels.spec import CellMatrices, SequenceResult, SequenceSpec


def run_sequences(spec: SequenceSpec, data: Tensor, h0: Tensor, cell: CellMatrices) -> SequenceResult:
    """Runs the model over packed sequences, differentiable any number of times.

    Args:
        spec: direction and options; `sequence_why_not` of its engine must be empty.
        data: ``(N, p)`` inputs, time after time.
        h0: ``(B, h)`` hidden states before the first elements.
        cell: the matrices.
    """
    tensors = data, h0, *cell
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return SequenceResult(*_Sequence.apply(spec, *tensors))
    return _forward(spec, data, h0, cell, keep=False)[0]


def _forward(
    spec: SequenceSpec, data: Tensor, h0: Tensor, cell: CellMatrices, *, keep: bool
) -> tuple[SequenceResult, Tensor, Tensor, Tensor, Tensor]:
    """Returns what `sequence_forward` does, A, and what its projection left."""
    A = levels = cell.A
    if spec.radius is not None:
        A, levels = spec.engine.project_rows(A, spec.radius)
        cell = cell._replace(A=A)
    with _threads(spec, cell, data):
        return *spec.engine.sequence_forward(spec, data, h0, cell, keep=keep), A, levels


def _threads(spec: SequenceSpec, cell: CellMatrices, data: Tensor) -> AbstractContextManager[None]:
    """Runs small products, counted over all times, on one thread."""
    n, both = cell.B.shape  # len(tensor) would take as long as a step
    return spec.engine.threads(data.shape[0] * (n + both) * (n + cell.C.shape[0]))


class _Sequence(torch.autograd.Function):
    """All hidden states and states of the sequences."""

    @staticmethod
    def forward(ctx: Any, spec: SequenceSpec, data: Tensor, h0: Tensor, *matrices: Any) -> Any:
        result, *saved = _forward(spec, data, h0, CellMatrices(*matrices), keep=True)
        ctx.spec = spec
        ctx.save_for_backward(result.hidden, result.states, *saved, data, h0, *matrices)
        ctx.mark_non_differentiable(*result[3:])
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        hidden, states, known, images, A, levels, data, h0, W, *others = ctx.saved_tensors
        spec, cell, twice = ctx.spec, CellMatrices(A, *others), torch.is_grad_enabled()
        if twice:
            cell = cell._replace(A=W if spec.radius is None else project_rows(W, spec.radius))
        with _threads(spec, cell, data):
            if twice:
                u = torch.cat([data, _previous(spec, hidden, h0)], -1)
                total = torch.zeros_like(hidden) if gradients[0] is None else gradients[0].clone()
                if gradients[1] is not None:
                    total[spec.last_rows()] += gradients[1]  # every row at most once
                outer = torch.zeros_like(states) if gradients[2] is None else gradients[2]
                y, total, first = _differentiable_backward(
                    spec, states, F.linear(u, cell.B, cell.bias), total, outer, cell
                )
                known, adjoint, check = torch.cat([states, u], 1).mT, torch.cat([y, total], 1).mT, None
            else:
                adjoint, first, check = spec.engine.sequence_backward(spec, images, known, gradients[:3], cell)
            collected = _collect(adjoint, first, known, cell, ctx.needs_input_grad[1:])
            by_A = collected[2]
            if by_A is not None and spec.radius is not None:
                if twice:
                    collected[2] = torch.autograd.grad(cell.A, W, by_A, create_graph=True)[0]
                else:
                    collected[2] = spec.engine.project_rows_backward(W, levels, by_A)
        if check is not None:
            check()
        return None, *collected


def _previous(spec: SequenceSpec, hidden: Tensor, h0: Tensor) -> Tensor:  # (N, h)
    """Returns the hidden states before all elements."""
    before: dict[int, Tensor] = {}
    h = h0[:0]
    for t in spec.times:
        before[t] = torch.cat([h[: spec.sizes[t]], h0[h.shape[0] : spec.sizes[t]]])
        h = hidden[spec.rows(t)]
    return torch.cat([before[t] for t in sorted(before)])


def _differentiable_backward(
    spec: SequenceSpec, states: Tensor, v: Tensor, gradient: Tensor, outer: Tensor, cell: CellMatrices
) -> tuple[Tensor, Tensor, Tensor]:
    """Does what `sequence_backward` does, with a result that can be differentiated.

    At each turn, in reverse order, `carry` is the gradient of the hidden states that the next time has read.
    """
    p, hidden = cell.inputs, len(cell.C)
    carry, first = states.new_zeros(0, hidden), states.new_zeros(spec.sizes[0], hidden)
    ys, totals = {}, {}
    run = AffineSolve(spec.affine, spec.engine, spec.solve, trace=False)
    order = list(spec.times)
    for turn in range(len(order) - 1, -1, -1):
        t, rows = order[turn], spec.rows(order[turn])
        lacking = spec.sizes[t] - carry.shape[0]
        total = totals[t] = gradient[rows] + F.pad(carry, (0, 0, 0, lacking))
        g = total @ cell.C + outer[rows]
        y = ys[t] = differentiable_adjoint(run, states[rows], v[rows], g, (cell.A,))
        back = y @ cell.B[:, p:] + (0 if cell.D is None else total @ cell.D[:, p:])
        continuing = min(spec.sizes[order[turn - 1]], spec.sizes[t]) if turn else 0
        carry, beginning = back[:continuing], back[continuing:]
        first = first + F.pad(beginning, (0, 0, continuing, spec.sizes[0] - spec.sizes[t]))
    return torch.cat([ys[t] for t in sorted(ys)]), torch.cat([totals[t] for t in sorted(totals)]), first


def _collect(
    adjoint: Tensor, first: Tensor, known: Tensor, cell: CellMatrices, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Returns the gradients of inputs, first hidden states, A, B, C, D and bias, as far as they are needed.

    Args:
        adjoint: ``(n + h, N)`` y and the total gradients of the hidden states.
        first: ``(B, h)`` gradients of the first hidden states.
        known: ``(n + p + h, N)`` states, inputs and hidden states before, perhaps with ones below.
        cell: the matrices.
        needed: which gradients are wanted.
    """
    n, p = cell.B.shape[0], cell.inputs
    y, rows = adjoint[:n], n + cell.B.shape[1]
    ones = known.shape[0] > rows
    product = adjoint @ known.mT if any(needed[2 : 7 if ones else 6]) else adjoint[:0]  # all matrices at once

    def inputs() -> Tensor:
        back = y.mT @ cell.B[:, :p]
        return back if cell.D is None else back + adjoint[n:].mT @ cell.D[:, :p]

    rules = (
        inputs,
        lambda: first,
        lambda: product[:n, :n],
        lambda: product[:n, n:rows],
        lambda: product[n:, :n],
        lambda: product[n:, n:rows],
        lambda: product[:n, rows] if ones else y.sum(1),
    )
    return [rule() if want else None for rule, want in zip(rules, needed, strict=True)]
