"""Runs the compiled loops over time on tensors: memory, threads and reports."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.equilibrium.affine import AffineProblem
from wellposed.equilibrium.failure import report
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.problem import Method
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.executor import MEMORY, encode, kernels, lay_out, pack_matrix, run_kernel, share_out
from wellposed.kernels.recipe import LINEAR, Recipe, kind_of, make_recipe


@dataclass(frozen=True)
class Course:
    """How sequences are walked through.

    Attributes:
        problem: how the equation of an element is solved, forward and backward.
        sizes: sequences at each time, longest first.
        backwards: whether the last element comes first.
        warm_start: whether a solve starts from the state before, else from zero.
        trace: whether residuals are wanted.
        place: of this walk, for messages.
    """

    problem: AffineProblem
    sizes: tuple[int, ...]
    backwards: bool = False
    warm_start: bool = True
    trace: bool = False
    place: str = ""

    @functools.cached_property
    def offsets(self) -> Any:  # (T + 1,) int64
        """The first element of every time."""
        return np.cumsum([0, *self.sizes], dtype=np.int64)

    @property
    def times(self) -> range:
        """The times in the order in which they are walked through."""
        count = len(self.sizes)
        return range(count - 1, -1, -1) if self.backwards else range(count)

    def rows(self, time: int) -> slice:
        """Returns the elements of a time."""
        return slice(int(self.offsets[time]), int(self.offsets[time + 1]))

    def last_rows(self) -> slice | Tensor:
        """Tells where the last hidden states of the sequences are."""
        if self.backwards:
            return self.rows(0)
        if self.sizes[0] == self.sizes[-1]:
            return self.rows(len(self.sizes) - 1)
        lengths = (np.asarray(self.sizes)[:, None] > np.arange(self.sizes[0])).sum(0)
        return torch.from_numpy(self.offsets[lengths - 1] + np.arange(self.sizes[0]))


@dataclass(frozen=True)
class Parts:
    """The matrices of a cell; the last columns of B and D read the hidden state."""

    A: Tensor  # (n, n)
    B: Tensor  # (n, p + h)
    C: Tensor  # (h, n)
    D: Tensor | None  # (h, p + h)
    bias: Tensor | None  # (n,)

    @property
    def inputs(self) -> int:
        """The number p of inputs."""
        return self.B.shape[1] - self.C.shape[0]

    def hidden(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what takes hidden states to v, states to hidden states and hidden states to the next ones."""
        p = self.inputs
        return self.B[:, p:], self.C, self.C[:0] if self.D is None else self.D[:, p:]


@functools.cache
def loops() -> ModuleType:
    """Imports the compiled loops, on first use."""
    kernels()
    return require("wellposed.kernels.sequence_loops", extra="fast")


@dataclass(frozen=True)
class Walked:
    """What a walk through sequences found, element by element."""

    hidden: Tensor  # (N, h)
    last: Tensor  # (B, h): the last hidden states
    states: Tensor  # (N, n)
    status: Tensor  # (N,)
    steps: Tensor  # (N,)
    residual: Tensor  # (N,), or nothing where it is not wanted
    u: Tensor  # (N, p + h): inputs and hidden states before
    v: Tensor  # (N, n): Bu + b


def run_forward(course: Course, data: Tensor, h0: Tensor, parts: Parts) -> Walked:
    """Walks through the sequences."""
    p, method, kind = parts.inputs, course.problem.forward, kind_of(course.problem.activation)
    assert kind is not None
    v = F.linear(data, parts.B[:, :p], parts.bias)
    hidden = F.linear(data, parts.D[:, :p]) if parts.D is not None else v.new_zeros(v.shape[0], parts.C.shape[0])
    states, u = torch.empty_like(v), v.new_empty(v.shape[0], parts.B.shape[1])
    u[:, :p] = data
    matrices = [matrix.mT for matrix in parts.hidden()]
    recipe = make_recipe(*kind, method.solver, method.stop, method.max_steps, v.dtype)
    arrays = _arrays(v, states, hidden, u, h0, *matrices)
    status, steps = _run(loops().walk, course, parts.A, recipe, (*arrays, course.warm_start))

    def again(turn: int) -> Tensor:
        rows = course.rows(course.times[turn])
        start = torch.zeros_like(v[rows])
        if turn > 0 and course.warm_start:
            before = states[course.rows(course.times[turn - 1])][: len(start)]
            start[: len(before)] = before
        return run_kernel(parts.A, v[rows], None, start, recipe, trace=True)[3]

    turns = range(len(course.sizes))
    _tell(course, turns, method, "equilibrium", Iterates(states, status, steps, v.new_zeros), again)
    residual = v.new_empty(0)
    if course.trace:
        image = course.problem.activation.function(torch.addmm(v, states, parts.A.mT))
        residual = (image - states).abs().amax(1)
    return Walked(hidden, hidden[course.last_rows()].clone(), states, status, steps, residual, u, v)


def run_backward(
    course: Course, z: Tensor, hidden: Tensor, outer: Tensor | None, parts: Parts
) -> tuple[Tensor, Tensor, Tensor]:
    """Solves ``y = d (A'y + g)`` from the last time to the first.

    Args:
        course: of the forward pass.
        z: ``(N, n)`` Ax + v; overwritten.
        hidden: ``(N, h)`` gradients of the hidden states as outputs; overwritten.
        outer: ``(N, n)`` gradients of the states as outputs; overwritten.
        parts: the matrices.

    Returns:
        y, the total gradients of the hidden states, and those of the first ones.
    """
    problem, method, n = course.problem, course.problem.backward, z.shape[1]
    kind, direct = kind_of(problem.activation), n <= problem.direct
    assert kind is not None
    limit = min(problem.easy, method.max_steps) if direct else method.max_steps
    y, offset, scale = (
        torch.empty_like(z),
        torch.empty_like(z) if outer is None else outer,
        z.new_empty(z.shape[0]),
    )
    first, system = hidden.new_empty(course.sizes[0], hidden.shape[1]), z.new_empty((n, n) if direct else (0, 0))
    recipe = make_recipe(LINEAR, 0.0, method.solver, method.stop, limit, z.dtype)
    arrays = _arrays(parts.A, z, offset, y, hidden, first, scale, *parts.hidden(), system)
    A = parts.A.mT
    status, steps = _run(loops().unwind, course, A, recipe, (*arrays, outer is None, *kind))

    def again(turn: int) -> Tensor:
        rows = course.rows(course.times[turn])
        return run_kernel(A, offset[rows], z[rows], None, recipe, trace=True)[3]

    turns = range(len(course.sizes) - 1, -1, -1)
    _tell(course, turns, method, "adjoint solve", Iterates(y, status, steps, z.new_zeros), again)
    return y, hidden, first


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def _run(
    loop: Callable[..., None], course: Course, A: Tensor, recipe: Recipe, arguments: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Runs a loop over all times, sequences shared out to threads; returns statuses and steps."""
    n, elements = A.shape[0], int(course.offsets[-1])
    layout = lay_out(n, recipe.memory or MEMORY, recipe.max_steps, A.element_size())
    packed, (counts, numbers) = pack_matrix(A, kernels()), encode(recipe, A.dtype)
    status, steps = torch.empty(elements, dtype=torch.int8), torch.empty(elements, dtype=torch.int64)
    fixed = *arguments, packed[:0].reshape(0, n), status.numpy(), steps.numpy()

    def part(low: int, high: int) -> None:
        work = torch.empty(layout.size, dtype=A.dtype).numpy()  # torch aligns it to vectors
        lanes = np.empty(3 * layout.width, np.int64)
        buffers = work, lanes, layout.slots, layout.at, counts, numbers
        loop(packed, *fixed, *buffers, course.offsets, course.backwards, low, high)

    share_out(part, course.sizes[0], layout.width, elements * n * n)
    return status, steps


def _tell(
    course: Course,
    turns: range,
    method: Method,
    solve: str,
    found: Iterates,
    residuals: Callable[[int], Tensor],
) -> None:
    """Logs the solves of all times and reports the first that failed."""
    kept = [log.forward if solve == "equilibrium" else log.adjoint for log in method.logs]
    bad = method.on_failure != "ignore" and bool((found.status >= Status.MAX_STEPS).any())
    if not kept and not bad:
        return
    for turn in turns:
        t = course.times[turn]
        rows = course.rows(t)
        status, steps = found.status[rows], found.steps[rows]
        for log in kept:
            log.append((status, steps))
        if bad:
            part = Iterates(found.value[rows], status, steps, functools.partial(residuals, turn))
            name = f"{solve} at time step {t}{course.place}"
            report(part, method.on_failure, solve=name, max_steps=method.max_steps, once=method.once)
