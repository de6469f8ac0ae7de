"""Runs the Triton loops over time on tensors: sizes of blocks, memory and reports."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.fixed_point import require_finite
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.method import Method
from wellposed.errors import require
from wellposed.kernels.gpu import Alarm, interpreted, unheard
from wellposed.kernels.gpu_calls import call
from wellposed.kernels.recipe import LINEAR, Recipe, kind_of, make_recipe
from wellposed.kernels.sequence_runs import Course, Parts, Walked, slopes, tell

ROWS = 16  # sequences of a block, the fewest that the units for products take
CHUNK = 64  # inputs that are read at once


@functools.cache
def device_loops() -> ModuleType:
    """Imports the Triton loops, on first use."""
    require("triton")
    return require("wellposed.kernels.gpu_sequence_loops")


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
