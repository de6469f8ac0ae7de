"""Runs the compiled loops over time on tensors: memory, threads or block sizes, and reports.

A `Course` says how sequences are walked through, `Parts` are the matrices of a cell, and `Walked` is what was
found. `run_forward` and `run_backward` call the loops of numba, `run_forward_device` and `run_backward_device`
those of Triton.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.equilibrium.affine import AffineProblem
from wellposed.equilibrium.fixed_point import require_finite
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.method import Method, report, report_outputs
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.device import Alarm, call, interpreted, launcher, unheard
from wellposed.kernels.engine import MEMORY, Layout, encode, kernels, lay_out, run_kernel, share_out
from wellposed.kernels.spec import LINEAR, SIGMOID, TANH, Recipe, kind_of, make_recipe


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
        device: whether the loops are those of `kernels.gpu.sequence`.
    """

    problem: AffineProblem
    sizes: tuple[int, ...]
    backwards: bool = False
    warm_start: bool = True
    trace: bool = False
    place: str = ""
    device: bool = False

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

    def whole(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns A, B, C and D, which has no rows if there is none."""
        return self.A, self.B, self.C, self.B[:0] if self.D is None else self.D


@functools.cache
def loops() -> ModuleType:
    """Imports the compiled loops, on first use."""
    kernels()
    return require("wellposed.kernels.cpu.sequence", extra="fast")


@dataclass(frozen=True)
class Walked:
    """What a walk through sequences found, element by element."""

    hidden: Tensor  # (N, h)
    last: Tensor  # (B, h): the last hidden states
    states: Tensor  # (N, n)
    status: Tensor  # (N,)
    steps: Tensor  # (N,)
    residual: Tensor  # (N,), or nothing where it is not wanted

    def to(self, dtype: torch.dtype) -> "Walked":
        """Converts hidden states, states and residuals."""
        names = ("hidden", "last", "states", "residual")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


def run_forward(
    course: Course, data: Tensor, h0: Tensor, parts: Parts, *, keep: bool
) -> tuple[Walked, Tensor, Tensor]:
    """Walks through the sequences.

    Returns:
        what was found, ``(n + p + h, N)`` states, inputs and hidden states before, and ``(n, N)`` images
        phi(Ax + v), which are nothing unless they are to `keep` for the backward pass.
    """
    (n, both), (h, elements), method = parts.B.shape, (parts.C.shape[0], data.shape[0]), course.problem.forward
    kind = kind_of(course.problem.activation)
    assert kind is not None
    sizes = n + both, h, n if keep or course.trace else 0
    known, H, images = (columns(rows, elements, data) for rows in sizes)
    known[n : n + both - h] = data.detach().mT
    recipe = make_recipe(*kind, method.solver, method.stop, method.max_steps, data.dtype)
    arrays = (
        *_arrays(*parts.whole(), data.new_empty(0) if parts.bias is None else parts.bias, h0),
        *_grids(known, images, H),
    )
    status, steps = _run(loops().walk, course, parts, recipe, (*arrays, course.warm_start))
    states = known[:n].mT

    def again(turn: int) -> Tensor:
        rows = course.rows(course.times[turn])
        v = F.linear(known[n:, rows].mT, parts.B, parts.bias)
        start = torch.zeros_like(v)
        if turn > 0 and course.warm_start:
            before = states[course.rows(course.times[turn - 1])][: len(start)]
            start[: len(before)] = before
        return run_kernel(parts.A, v, None, start, recipe, trace=True)[3]

    turns = range(len(course.sizes))
    tell(course, turns, method, "equilibrium", Iterates(states, status, steps, data.new_zeros), again)
    residual = (images - known[:n]).abs().amax(0) if course.trace else data.new_empty(0)
    hidden = H.mT.contiguous()
    last = hidden[course.last_rows()].clone()
    return Walked(hidden, last, states, status, steps, residual), known, images


def run_backward(
    course: Course, images: Tensor, found: Tensor, outer: Tensor | None, parts: Parts
) -> Tensor:  # (B, h)
    """Solves ``y = d (A'y + g)`` from the last time to the first.

    Args:
        course: of the forward pass.
        images: ``(n, N)`` phi(Ax + v).
        found: ``(n + h, N)`` of `columns`; its last rows are the gradients of the hidden states as outputs.
            Overwritten by y and the total gradients of the hidden states.
        outer: ``(n, N)`` gradients of the states as outputs.
        parts: the matrices.

    Returns:
        the gradients of the first hidden states.
    """
    problem, method, n = course.problem, course.problem.backward, images.shape[0]
    kind, direct = kind_of(problem.activation), n <= problem.direct
    assert kind is not None
    limit = min(problem.easy, method.max_steps) if direct else method.max_steps
    first = found.new_empty(course.sizes[0], found.shape[0] - n)
    outer = found.new_empty(0, 0) if outer is None else outer
    recipe = make_recipe(LINEAR, 0.0, method.solver, method.stop, limit, found.dtype)
    system = found.new_empty((n + 1, n) if direct else (0, 0))
    arrays = *_arrays(*parts.whole()), *_grids(images), *_arrays(outer), *_grids(found), *_arrays(first)
    status, steps = _run(loops().unwind, course, parts, recipe, (*arrays, *kind, *_arrays(system)))

    def again(turn: int) -> Tensor:
        rows = course.rows(course.times[turn])
        g = found[n:, rows].mT @ parts.C + (outer[:, rows].mT if len(outer) else 0)
        d = slopes(*kind, images[:, rows].mT)
        scale = g.abs().amax(1, keepdim=True)
        return run_kernel(parts.A.mT, d * g / scale.masked_fill(scale == 0, 1), d, None, recipe, trace=True)[3]

    turns = range(len(course.sizes) - 1, -1, -1)
    tell(course, turns, method, "adjoint solve", Iterates(found[:n].mT, status, steps, found.new_zeros), again)
    return first


def slopes(kind: int, slope: float, image: Tensor) -> Tensor:
    """Returns phi'(z) where `image` is phi(z).

    Example:
        >>> slopes(TANH, 0.0, torch.tensor([0.0, 0.5]))
        tensor([1.0000, 0.7500])
    """
    if kind == TANH:
        return 1 - image * image
    if kind == SIGMOID:
        return image * (1 - image)
    return torch.where(image > 0, 1.0, slope).to(image.dtype)


def columns(rows: int, elements: int, like: Tensor) -> Tensor:
    """Returns room for rows with one column an element.

    Rows are an odd number of cache lines apart: at powers of two they would drive each other out of the cache.

    Example:
        >>> columns(3, 32, torch.zeros(1)).stride()
        (48, 1)
    """
    line = 64 // like.element_size()
    return like.new_empty(rows, ((elements + line - 1) // line | 1) * line)[:, :elements]


def _grids(*tensors: Tensor) -> list[Any]:
    """Returns what `columns` made, with the unused ends of its rows."""
    shapes = ((tensor, tensor.shape[0], tensor.stride(0)) for tensor in tensors)
    return [tensor.as_strided((rows, stride), (stride, 1)).numpy() for tensor, rows, stride in shapes]


def _arrays(*tensors: Tensor) -> list[Any]:
    # After .numpy() torch could no longer free the storage of a parameter, as fully_shard does.
    return [np.from_dlpack(tensor.detach().contiguous()) for tensor in tensors]


def _run(
    loop: Callable[..., None], course: Course, parts: Parts, recipe: Recipe, arguments: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Runs a loop over all times, sequences shared out to threads; returns statuses and steps."""
    (n, both), h, elements = parts.B.shape, parts.C.shape[0], int(course.offsets[-1])
    dtype, memory = parts.B.dtype, recipe.memory or MEMORY
    layout = lay_out(n, memory, recipe.max_steps, dtype.itemsize)
    room, size, matrices = _plan(n, both, h, layout)
    counts, numbers = encode(recipe, dtype)
    status, steps = np.empty(elements, np.int8), np.empty(elements, np.int64)

    def part(low: int, high: int) -> None:
        work = torch.empty(size + matrices, dtype=dtype).numpy()  # torch aligns it to vectors
        lanes = np.empty(3 * layout.width, np.int64)
        buffers = work[:size], work[size:], lanes, layout.slots, layout.at, room, counts, numbers
        loop(*arguments, status, steps, *buffers, course.offsets, course.backwards, low, high)

    share_out(part, course.sizes[0], layout.width, elements * n * n)
    return torch.from_numpy(status), torch.from_numpy(steps)


@functools.lru_cache(maxsize=256)
def _plan(n: int, both: int, h: int, layout: Layout) -> tuple[tuple[int, ...], int, int]:
    """Returns where the rows of `kernels.cpu.sequence` lie, where they end, and the size of packed matrices."""
    ends = np.cumsum([layout.size, *(rows * layout.width for rows in (n + both, n, h, 1, 1))]).tolist()
    rows = kernels().ROWS
    return tuple(ends[:-1]), ends[-1], (n + h + 2 * rows) * (n + both)


def tell(
    course: Course,
    turns: range,
    method: Method,
    solve: str,
    found: Iterates,
    residuals: Callable[[int], Tensor],
) -> None:
    """Logs the solves of all times and reports the first that failed."""
    kept = [log.forward if solve == "equilibrium" else log.adjoint for log in method.logs]
    bad = method.on_failure != "ignore" and int(found.status.max()) >= Status.MAX_STEPS
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


ROWS = 16  # sequences of a block, the fewest that the units for products take
CHUNK = 64  # inputs that are read at once


@functools.cache
def device_loops() -> ModuleType:
    """Imports the Triton loops, on first use."""
    require("triton")
    return require("wellposed.kernels.gpu.sequence")


@dataclass(frozen=True, eq=False)
class Launch:
    """What a launch needs besides tensors."""

    numbers: tuple[float, ...]  # in the order of the kernels' parameters
    rules: dict[str, Any]  # compiled in, before the flags of a call
    sizes: dict[str, Any]  # compiled in, after them
    options: dict[str, int]  # of the compiler
    blocks: int

    def start(
        self, kernel: Any, tensors: list[Tensor], whole: tuple[int, ...], flags: dict[str, Any], flag: Tensor
    ) -> None:
        """Launches a kernel on tensors and whole numbers: batch, times and three widths."""
        constants = self.rules | flags | self.sizes
        kind = self, whole[2:], tuple(flags.values())
        call(kernel, self.blocks, kind, tensors, (*whole, *self.numbers), constants, self.options, flag)


@functools.lru_cache(maxsize=256)
def plan(recipe: Recipe, kind: tuple[int, float], batch: int, n: int, h: int) -> Launch:
    """Chooses blocks, and writes a recipe down as the kernels take it."""
    noise = 4 * (4 + math.sqrt(n)) * torch.finfo(torch.float32).eps
    slope = float(kind[1])
    numbers = (
        slope, recipe.limit, recipe.max_steps, recipe.atol, recipe.rtol, noise, recipe.worth, recipe.patience,
        recipe.ridge, 0,
    )  # fmt: skip
    states, hidden = padded(n), padded(h)
    rules = {"KIND": kind[0], "RULE": recipe.rule, "ANDERSON": recipe.memory > 0, "FUSED": not interpreted()}
    sizes = {"ROWS": ROWS, "STATES": states, "HIDDEN": hidden}
    return Launch(numbers, rules, sizes, {"num_stages": 1, **_shape(max(states, hidden))}, -(-batch // ROWS))


def padded(size: int) -> int:
    """Returns the power of two to which a size is padded, at least 16.

    Example:
        >>> padded(3), padded(33)
        (16, 64)
    """
    return max(16, 1 << (size - 1).bit_length())


def _shape(width: int) -> dict[str, int]:
    """Returns how many warps share a block: four were fastest up to 64 columns, on an H200."""
    # Without the second number the assembler stops at 128 registers and spills twice as much.
    return {"num_warps": 4} if width <= 64 else {"num_warps": 8, "maxnreg": 255}


def _offsets(course: Course, like: Tensor) -> Tensor:  # (T + 1,) int64, or nothing where all times are alike
    if course.sizes[0] == course.sizes[-1]:
        return like
    return torch.from_numpy(course.offsets).to(like.device, non_blocking=True)


def _matrices(parts: Parts) -> list[Tensor]:
    """Returns A, B, C and D as they lie in memory; B stands in for a D that is not there."""
    D = parts.B if parts.D is None else parts.D
    return [matrix.detach().contiguous() for matrix in (parts.A, parts.B, parts.C, D)]


class _Watch:
    """Looks for failures of a launch: on a GPU through an `Alarm`, the only wait of a pass."""

    def __init__(self, method: Method, device: torch.device) -> None:
        self.heard = method.on_failure != "ignore"
        self.alarm = Alarm(device) if self.heard and device.type == "cuda" else None
        if self.alarm is not None:
            self.flag = self.alarm.flag
        else:
            self.flag = torch.zeros(1, dtype=torch.int32) if device.type == "cpu" else unheard(device)

    def arm(self) -> None:
        """Marks the end of the launch."""
        if self.alarm is not None:
            self.alarm.arm()

    def rings(self) -> bool:
        """Waits for the launch, and tells whether there is a failure to report."""
        return self.heard and bool(self.flag[0]) if self.alarm is None else self.alarm.rings()


def _walk(
    course: Course, data: Tensor, h0: Tensor, parts: Parts, flag: Tensor, *, keep: bool
) -> tuple[Walked, Tensor, Tensor]:
    """Launches the loop forward; what is to `keep` are (N, n + p + h) known rows and (N, n) images."""
    (n, both), h, elements, batch = parts.B.shape, parts.C.shape[0], data.shape[0], course.sizes[0]
    method, kind = course.problem.forward, kind_of(course.problem.activation)
    assert kind is not None
    recipe = make_recipe(*kind, method.solver, method.stop, method.max_steps, data.dtype)
    launch = plan(recipe, kind, batch, n, h)
    data, h0, biased = data.detach().contiguous(), h0.detach().contiguous(), parts.bias is not None
    known = data.new_empty(elements if keep else 0, n + both + biased)
    images = data.new_empty(elements if keep else 0, n)
    hidden, last = data.new_empty(elements, h), data.new_empty(batch, h)
    status = torch.empty(elements, dtype=torch.int8, device=data.device)
    steps = torch.empty(elements, dtype=torch.int64, device=data.device)
    bias = data if parts.bias is None else parts.bias.detach().contiguous()
    tensors = [
        *_matrices(parts), bias, data, h0, _offsets(course, steps), known, images, hidden, last, status, steps
    ]  # fmt: skip
    flags = {
        "THROUGH": parts.D is not None, "BIASED": int(biased), "EVEN": course.sizes[0] == course.sizes[-1],
        "BACKWARDS": course.backwards, "WARM": course.warm_start, "KEEP": keep,
        "CHUNK": min(CHUNK, padded(both - h)),
    }  # fmt: skip
    launch.start(device_loops().walk, tensors, (batch, len(course.sizes), n, both - h, h), flags, flag)
    return Walked(hidden, last, known[:, :n], status, steps, data.new_empty(0)), known, images


def run_forward_device(
    course: Course, data: Tensor, h0: Tensor, parts: Parts, *, keep: bool
) -> tuple[Walked, Tensor, Tensor]:
    """Walks through the sequences.

    Returns:
        what was found, ``(n + p + h, N)`` states, inputs and hidden states before (and ones, where there is a
        bias), and ``(n, N)`` images phi(Ax + v); the last two are nothing unless they are to `keep`.
    """
    method, wanted = course.problem.forward, keep or course.trace
    watch = _Watch(method, data.device)
    found, known, images = _walk(course, data, h0, parts, watch.flag, keep=wanted)
    if watch.heard:
        launcher().launch_output_check(found.hidden, watch.flag)
    watch.arm()

    def residual() -> Tensor:  # (N,)
        again = (found, known, images) if wanted else _walk(course, data, h0, parts, watch.flag, keep=True)
        return (again[2] - again[0].states).abs().amax(1)

    failed = watch.rings()
    if failed:
        require_finite("input", data)
        require_finite("h0", h0)
    if failed or method.logs:
        _tell(course, range(len(course.sizes)), method, "equilibrium", found, residual)
    if failed:
        report_outputs(found.hidden, None, method.on_failure, method.once)
    if course.trace:
        found = replace(found, residual=residual())
    return found, known.mT, images.mT


def run_backward_device(
    course: Course, images: Tensor, gradients: tuple[Tensor | None, ...], parts: Parts
) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """Launches ``y = d (A'y + g)`` from the last time to the first.

    Args:
        course: of the forward pass.
        images: ``(n, N)`` phi(Ax + v).
        gradients: of all hidden states ``(N, h)``, of the last ones ``(B, h)`` and of the states ``(N, n)``.
        parts: the matrices.

    Returns:
        ``(n + h, N)`` y and the total gradients of the hidden states, the gradients of the first ones, and what
        waits for the solves and reports failures: to be called when all that needs them has been launched.
    """
    (n, elements), h, batch = images.shape, parts.C.shape[0], course.sizes[0]
    method, kind = course.problem.backward, kind_of(course.problem.activation)
    assert kind is not None
    recipe = make_recipe(LINEAR, 0.0, method.solver, method.stop, method.max_steps, images.dtype)
    launch = plan(recipe, kind, batch, n, h)
    every, ending, outer = (None if part is None else part.contiguous() for part in gradients)
    found, first = images.new_empty(elements, n + h), images.new_empty(batch, h)
    status = torch.empty(elements, dtype=torch.int8, device=images.device)
    steps = torch.empty(elements, dtype=torch.int64, device=images.device)
    watch = _Watch(method, images.device)
    given = (first if part is None else part for part in (outer, every, ending))
    tensors = [
        *_matrices(parts), images.mT, *given, _offsets(course, steps), found, first, status, steps
    ]  # fmt: skip
    flags = {
        "THROUGH": parts.D is not None, "OUTER": outer is not None, "EVERY": every is not None,
        "ENDING": ending is not None, "EVEN": course.sizes[0] == course.sizes[-1], "BACKWARDS": course.backwards,
    }  # fmt: skip
    launch.start(device_loops().unwind, tensors, (batch, len(course.sizes), n, parts.inputs, h), flags, watch.flag)
    watch.arm()
    y, total = found[:, :n], found[:, n:]

    def residual() -> Tensor:  # (N,)
        g = total @ parts.C + (0 if outer is None else outer)
        scale = g.abs().amax(1, keepdim=True)
        gap = slopes(*kind, images.mT) * (y @ parts.A + g) - y
        return (gap / scale.masked_fill(scale == 0, 1)).abs().amax(1)

    def settle() -> None:
        if watch.rings() or method.logs:
            turns = range(len(course.sizes) - 1, -1, -1)
            _tell(course, turns, method, "adjoint solve", Walked(total, first, y, status, steps, total), residual)

    return found.mT, first, settle


def _tell(
    course: Course, turns: range, method: Method, solve: str, found: Walked, residual: Callable[[], Tensor]
) -> None:
    """Logs the solves of all times and reports the first that failed."""
    residuals = functools.cache(residual)

    def again(turn: int) -> Tensor:  # (B, K), of which only the last of a sample is looked at
        rows = course.rows(course.times[turn])
        return residuals()[rows, None].expand(-1, int(found.steps[rows].max()))

    tell(course, turns, method, solve, Iterates(found.states, found.status, found.steps, residual), again)
