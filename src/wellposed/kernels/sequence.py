"""A recurrent implicit model over whole sequences: one compiled call forward, one backward through time.

With the hidden state h before an element s,

    ``x = phi(Ax + B (s, h) + b)``,  ``h' = Cx + D (s, h)``.

What inputs contribute is one product for all times before the loop, gradients of matrices are one product each for
all times after it; between them nothing returns to Python.
"""

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap, AffineProblem, Factors, differentiable_adjoint
from wellposed.kernels.sequence_runs import Course, Parts, Walked, run_backward, run_forward
from wellposed.kernels.support import map_problem, solver_problem, stop_problem


def sequence_problem(problem: AffineProblem, factors: Factors, batch: int) -> str:
    """Says why sequences must be walked through time by time; nothing if there is a kernel for them."""
    if problem.bound is not None or problem.splitting is not None:
        return "error bounds and operator splitting have no kernel"
    if batch == 0:
        return "the batch is empty"
    f = AffineMap(factors, factors[0], problem.activation, problem.damping)
    for method in (problem.forward, problem.backward):
        said = solver_problem(method.solver) or stop_problem(method.stop)
        if said:
            return said
    return map_problem(f, factors[0])


def walk(course: Course, data: Tensor, h0: Tensor, parts: Parts) -> Walked:
    """Walks through sequences in the layout of a packed sequence, differentiably any number of times.

    Args:
        course: which way and how; `sequence_problem` must have nothing to say against it.
        data: ``(N, p)`` inputs, time after time.
        h0: ``(B, h)`` hidden states before the first elements.
        parts: the matrices.
    """
    if torch.is_grad_enabled():
        tensors = data, h0, parts.A, parts.B, parts.C, parts.D, parts.bias
        return Walked(*_Sequence.apply(course, *tensors))
    return run_forward(course, data, h0, parts)


class _Sequence(torch.autograd.Function):
    """All hidden states and states of the sequences."""

    @staticmethod
    def forward(ctx: Any, course: Course, data: Tensor, h0: Tensor, *matrices: Any) -> Any:
        found = run_forward(course, data, h0, Parts(*matrices))
        ctx.course = course
        ctx.save_for_backward(found.hidden, found.states, found.u, found.v, data, h0, *matrices)
        outputs = tuple(getattr(found, field.name) for field in fields(found))
        ctx.mark_non_differentiable(*outputs[3:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        hidden, states, u, v, data, h0, *matrices = ctx.saved_tensors
        course, parts = ctx.course, Parts(*matrices)
        total = _total(course, gradients[0], gradients[1], hidden)
        if torch.is_grad_enabled():
            u = torch.cat([data, _previous(course, hidden, h0)], -1)
            outer = torch.zeros_like(states) if gradients[2] is None else gradients[2]
            found = _differentiable_backward(course, states, F.linear(u, parts.B, parts.bias), total, outer, parts)
        else:
            outer = None if gradients[2] is None else gradients[2].clone(memory_format=torch.contiguous_format)
            found = run_backward(course, torch.addmm(v, states, parts.A.mT), total, outer, parts)
        return None, *_collect(found, u, states, parts, ctx.needs_input_grad[1:])


def _total(course: Course, every: Tensor | None, last: Tensor | None, hidden: Tensor) -> Tensor:
    """Returns the gradient of the hidden states from that of all and of the last ones, in memory of its own."""
    total = torch.zeros_like(hidden) if every is None else every.clone(memory_format=torch.contiguous_format)
    if last is None:
        return total
    rows = course.last_rows()
    total[rows] += last  # every row at most once
    return total


def _previous(course: Course, hidden: Tensor, h0: Tensor) -> Tensor:  # (N, h)
    """Returns the hidden states before all elements."""
    found: dict[int, Tensor] = {}
    h = h0[:0]
    for t in course.times:
        found[t] = torch.cat([h[: course.sizes[t]], h0[h.shape[0] : course.sizes[t]]])
        h = hidden[course.rows(t)]
    return torch.cat([found[t] for t in sorted(found)])


def _differentiable_backward(
    course: Course, states: Tensor, v: Tensor, gradient: Tensor, outer: Tensor, parts: Parts
) -> tuple[Tensor, Tensor, Tensor]:
    """Does what `run_backward` does, so that the result can be differentiated."""
    recurrent, readout, feedthrough = parts.hidden()
    carry = states.new_zeros(0, readout.shape[0])
    first = states.new_zeros(course.sizes[0], readout.shape[0])
    ys, totals = {}, {}
    order = list(course.times)
    for turn in range(len(order) - 1, -1, -1):
        t, rows = order[turn], course.rows(order[turn])
        lacking = course.sizes[t] - carry.shape[0]
        total = totals[t] = gradient[rows] + F.pad(carry, (0, 0, 0, lacking))
        g = total @ readout + outer[rows]
        y = ys[t] = differentiable_adjoint(course.problem, states[rows], v[rows], g, (parts.A,))
        back = y @ recurrent + (total @ feedthrough if parts.D is not None else 0)
        known = min(course.sizes[order[turn - 1]], course.sizes[t]) if turn else 0
        carry, born = back[:known], back[known:]
        first = first + F.pad(born, (0, 0, known, course.sizes[0] - course.sizes[t]))
    return torch.cat([ys[t] for t in sorted(ys)]), torch.cat([totals[t] for t in sorted(totals)]), first


def _collect(
    found: tuple[Tensor, Tensor, Tensor], u: Tensor, states: Tensor, parts: Parts, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Returns the gradients of inputs, first hidden states, A, B, C, D and bias, as far as they are needed."""
    (y, total, first), p = found, parts.inputs

    def inputs() -> Tensor:
        back = y @ parts.B[:, :p]
        return back if parts.D is None else back + total @ parts.D[:, :p]

    rules = (
        inputs,
        lambda: first,
        lambda: y.mT @ states,
        lambda: y.mT @ u,
        lambda: total.mT @ states,
        lambda: total.mT @ u,
        lambda: y.sum(0),
    )
    return [rule() if want else None for rule, want in zip(rules, needed, strict=True)]
