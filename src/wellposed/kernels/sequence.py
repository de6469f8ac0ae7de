"""A recurrent implicit model over whole sequences: one compiled call forward, one backward through time.

With the hidden state h before an element s,

    ``x = phi(Ax + B (s, h) + b)``,  ``h' = Cx + D (s, h)``.

What inputs contribute is one product for all times before the loop, gradients of matrices are one product each for
all times after it; between them nothing returns to Python. `sequence_device_problem` and `sequence_problem` say
what the loops in Triton and in numba cannot do, `projected` computes A in one launch, and `walk` runs over the
sequences.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import AffineMap, AffineProblem, Factors, differentiable_adjoint
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import require
from wellposed.kernels import sequence_run
from wellposed.kernels.device import interpreted
from wellposed.kernels.engine import few_threads
from wellposed.kernels.sequence_run import Course, Parts, Walked, columns, run_backward, run_forward
from wellposed.kernels.spec import SLOPED, device_problem, kind_of, map_problem, solver_problem, stop_problem

LARGEST = 128  # states and hidden states of a block that stays on the chip


def wanted(executor: str, like: Tensor) -> bool:
    """Tells whether an executor computes tensors like this one by Triton, if it can."""
    return executor == "triton" or (executor == "auto" and like.is_cuda)


def sequence_device_problem(f: AffineMap, hidden: int) -> str:
    """Says why sequences of a map have no kernel in Triton; nothing if they have one."""
    A = f.factors[0]
    if under_transform():
        return "values cannot be looked at under vmap, torch.func and torch.compile"
    if f.damping != 1:
        return "damped maps have no kernel"
    if len(f.factors) != 1:
        return "low-rank matrices have no kernel"
    kind = kind_of(f.activation)
    if kind is None:
        return f"activation {f.activation.name} has no kernel"
    if kind[0] == SLOPED and kind[1] < 0:
        return "leaky_relu with a negative slope has no kernel on the GPU"
    if A.dtype != torch.float32:
        return f"{str(A.dtype).removeprefix('torch.')} has no kernel on the GPU"
    return size_problem(A.shape[0], hidden) or place_problem(A.device)


def size_problem(states: int, hidden: int) -> str:
    """Says why sequences are too wide for a kernel; nothing if they are not.

    Example:
        >>> size_problem(300, 4)
        'more than 128 states or hidden states have no kernel on the GPU; received 300 and 4'
    """
    if max(states, hidden) <= LARGEST:
        return ""
    return f"more than {LARGEST} states or hidden states have no kernel on the GPU; received {states} and {hidden}"


def place_problem(device: torch.device) -> str:
    """Says why no kernel can run on a device; nothing if one can."""
    if device.type == "cuda":
        return device_problem(device)
    return "" if interpreted() else f"device {device.type} has no kernel of triton"


@functools.cache
def _projection() -> ModuleType:
    return require("wellposed.kernels.gpu.projection")


def projected(W: Tensor, radius: float) -> Tensor:
    """Does what `project_rows` does, in one launch."""
    found: Tensor = _Projected.apply(W, radius)
    return found


class _Projected(torch.autograd.Function):
    """The projection of rows on the l1 ball."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, radius: float) -> Tensor:
        A, levels = _projection().project(W, radius)
        ctx.save_for_backward(W, levels)
        ctx.radius = radius
        return A

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        W, levels = ctx.saved_tensors
        if torch.is_grad_enabled():
            A = project_rows(W, ctx.radius)
            return torch.autograd.grad(A, W, gradients[0], create_graph=True)[0], None
        return _projection().project_backward(W, levels, gradients[0]), None


def sequence_problem(problem: AffineProblem, factors: Factors, batch: int, hidden: int, *, device: bool) -> str:
    """Says why sequences must be walked through time by time; nothing if there is a kernel for them.

    Args:
        problem: how the equation of an element is solved.
        factors: of A.
        batch, hidden: numbers of sequences and of hidden states.
        device: whether the kernel is that for GPUs.
    """
    if problem.bound is not None or problem.splitting is not None:
        return "error bounds and operator splitting have no kernel"
    if batch == 0:
        return "the batch is empty"
    f = AffineMap(factors, factors[0], problem.activation, problem.damping)
    for method in (problem.forward, problem.backward):
        said = solver_problem(method.solver) or stop_problem(method.stop)
        if said:
            return said
    if device:
        return sequence_device_problem(f, hidden)
    return map_problem(f, factors[0])


def walk(course: Course, data: Tensor, h0: Tensor, parts: Parts) -> Walked:
    """Walks through sequences in the layout of a packed sequence, differentiably any number of times.

    Args:
        course: which way and how; `sequence_problem` must have nothing to say against it.
        data: ``(N, p)`` inputs, time after time.
        h0: ``(B, h)`` hidden states before the first elements.
        parts: the matrices.
    """
    tensors = data, h0, parts.A, parts.B, parts.C, parts.D, parts.bias
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return Walked(*_Sequence.apply(course, *tensors))
    return _forward(course, data, h0, parts, keep=False)[0]


def _forward(
    course: Course, data: Tensor, h0: Tensor, parts: Parts, *, keep: bool
) -> tuple[Walked, Tensor, Tensor]:
    if course.device:
        return sequence_run.run_forward_device(course, data, h0, parts, keep=keep)
    with few_threads(_work(parts, len(data))):
        return run_forward(course, data, h0, parts, keep=keep)


def _work(parts: Parts, elements: int) -> int:
    """Counts the multiplications of the products over all times."""
    return elements * (len(parts.A) + parts.B.shape[1]) * (len(parts.A) + len(parts.C))


def _backward(
    course: Course, images: Tensor, known: Tensor, gradients: tuple[Tensor | None, ...], parts: Parts
) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """Returns ``(n + h, N)`` y and total gradients of the hidden states, those of the first, and a last call."""
    if course.device:
        return sequence_run.run_backward_device(course, images, gradients, parts)
    n, elements = images.shape
    every, last, outer = gradients
    found = columns(n + parts.C.shape[0], elements, known)
    _total(course, every, last, found[n:].mT)
    first = run_backward(course, images, found, None if outer is None else outer.mT, parts)
    return found, first, _settled


def _settled() -> None:
    """Does nothing: solves on the CPU have been waited for."""


class _Sequence(torch.autograd.Function):
    """All hidden states and states of the sequences."""

    @staticmethod
    def forward(ctx: Any, course: Course, data: Tensor, h0: Tensor, *matrices: Any) -> Any:
        found, known, images = _forward(course, data, h0, Parts(*matrices), keep=True)
        ctx.course = course
        ctx.save_for_backward(found.hidden, found.states, known, images, data, h0, *matrices)
        outputs = tuple(getattr(found, field.name) for field in fields(found))
        ctx.mark_non_differentiable(*outputs[3:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        hidden, states, known, images, data, h0, *matrices = ctx.saved_tensors
        course, parts, settle = ctx.course, Parts(*matrices), _settled
        with nullcontext() if course.device else few_threads(_work(parts, len(data))):
            if torch.is_grad_enabled():
                u = torch.cat([data, _previous(course, hidden, h0)], -1)
                total = _total(course, gradients[0], gradients[1], torch.empty_like(hidden))
                outer = torch.zeros_like(states) if gradients[2] is None else gradients[2]
                y, total, first = _differentiable_backward(
                    course, states, F.linear(u, parts.B, parts.bias), total, outer, parts
                )
                known, found = torch.cat([states, u], 1).mT, torch.cat([y, total], 1).mT
            else:
                found, first, settle = _backward(course, images, known, gradients[:3], parts)
            collected = _collect(found, first, known, parts, ctx.needs_input_grad[1:])
        settle()
        return None, *collected


def _total(course: Course, every: Tensor | None, last: Tensor | None, out: Tensor) -> Tensor:
    """Writes the gradient of the hidden states from that of all and of the last ones."""
    total = out.zero_() if every is None else out.copy_(every)
    if last is not None:
        total[course.last_rows()] += last  # every row at most once
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
    found: Tensor, first: Tensor, known: Tensor, parts: Parts, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Returns the gradients of inputs, first hidden states, A, B, C, D and bias, as far as they are needed.

    Args:
        found: ``(n + h, N)`` y and the total gradients of the hidden states.
        first: ``(B, h)`` gradients of the first hidden states.
        known: ``(n + p + h, N)`` states, inputs and hidden states before, perhaps with ones below.
        parts: the matrices.
        needed: which gradients are wanted.
    """
    n, p = len(parts.A), parts.inputs
    y, rows = found[:n], n + parts.B.shape[1]
    ones = len(known) > rows
    product = found @ known.mT if any(needed[2 : 7 if ones else 6]) else found[:0]  # all matrices at once

    def inputs() -> Tensor:
        back = y.mT @ parts.B[:, :p]
        return back if parts.D is None else back + found[n:].mT @ parts.D[:, :p]

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
