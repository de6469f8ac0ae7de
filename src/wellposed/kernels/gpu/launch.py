"""Launches the kernels: memory, grids and the table of block sizes."""

import functools
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.loop import PERIOD
from wellposed.kernels.gpu.engine import RESIDENT, call, interpreted
from wellposed.kernels.gpu.solve import (
    advance,
    begin_wide,
    flag_nonfinite,
    solve_resident,
    solve_streamed,
    split_float16,
    wide_product,
)
from wellposed.kernels.spec import KernelSpec

OUTPUTS = 1024  # that a program checks
FILLING = 2048  # samples that keep a device busy in blocks of 16
STREAMED = 1024  # states up to which the whole solve is one launch
ROWS = 4  # samples of a program that takes one step
AHEAD = 2  # steps that are launched before it is known whether a sample needs them


def launch_output_check(y: Tensor, flag: Tensor) -> None:
    """Launches a check of outputs, which sets the flag of a solve if one of them is NaN or infinite."""
    y = y.detach().contiguous()
    if y.numel():
        blocks = (y.numel() + OUTPUTS - 1) // OUTPUTS
        call(flag_nonfinite, blocks, y.dtype, (y,), (y.numel(),), {"BLOCK": OUTPUTS}, {"num_warps": 4}, flag)


@dataclass(frozen=True)
class Shape:
    """How a solve is divided into blocks and tiles.

    Attributes:
        block: rows of a program.
        tile, depth: of A, where it is streamed; zero where it is resident.
        chunk: states of a point that a jump reads together.
        warps, stages: of a program, and how many tiles are loaded ahead.
        wide: whether every step is a product of all samples and a launch for the rest; blocks and tiles are those
            of the product then.
    """

    block: int
    tile: int
    depth: int
    chunk: int
    warps: int
    stages: int
    wide: bool = False


@functools.lru_cache(maxsize=256)
def choose_shape(n: int, batch: int, item: int) -> Shape:
    """Returns the measured best for a number of states and a batch (`benchmarks.gpu.block_sizes`, on an H200).

    Tiles depend on the number of states alone, so that a sample is computed alike in every batch; batches that
    would leave processors idle get smaller blocks.

    Example:
        >>> choose_shape(64, 4096, 4), choose_shape(1024, 4096, 4)
        (Shape(block=16, tile=0, depth=0, chunk=32, warps=4, stages=1, wide=False),
         Shape(block=32, tile=128, depth=64, chunk=32, warps=8, stages=3, wide=False))
    """
    many = batch > FILLING
    if n > STREAMED:
        return Shape(128 if batch > 64 else 64, 128, 64, 256, 8, 3, wide=True)
    if n <= RESIDENT[item]:
        return Shape(32 if many and n > 64 else 16, 0, 0, 32, 4 if n <= 64 else 8, 1)
    if item > 4:
        return Shape(16, 32, 32, 16, 4, 2)
    if n <= 256:
        return Shape(16, 64, 64, 32, 4, 3)
    return Shape(32, 128, 64, 32, 8, 3) if many else Shape(16, 128, 64, 32, 4, 3)


@dataclass(frozen=True)
class Answer:
    """What a launch will have written once the device is done.

    Attributes:
        value: states, in the dtype of the inputs.
        slopes: phi' at the states, if asked for.
        status, steps: of every sample.
        residuals: ``(max_steps, B)``, empty unless asked for.
    """

    value: Tensor  # (B, n)
    slopes: Tensor  # (B, n)
    status: Tensor  # (B,) int8
    steps: Tensor  # (B,) int64
    residuals: Tensor  # (K, B)


def launch(
    A: Tensor, v: Tensor, d: Tensor | None, x0: Tensor | None, spec: KernelSpec, flag: Tensor, *,
    trace: bool = False, saves: bool = False, scaled: bool = False, shape: Shape | None = None,
) -> Answer:  # fmt: skip
    """Launches a solve without waiting for it.

    Args:
        A: ``(n, n)``, in any strides.
        v: ``(B, n)``; with `scaled` the gradient g of an adjoint ``y = d (Ay + g)``.
        d: slopes of an adjoint.
        x0: start; zeros if None.
        spec: how.
        flag: one int32 that the device can reach; becomes 1 if a sample has failed.
        trace: whether residuals are wanted.
        saves: whether slopes are.
        scaled: whether rows of g are divided by their size, and y multiplied by it.
        shape: blocks and tiles; None for the table.
    """
    batch, n = v.shape
    v, d, x0 = v.contiguous(), v if d is None else d.contiguous(), x0 if x0 is None else x0.contiguous()
    plan = plan_launch(n, batch, v.dtype, spec, shape)
    scratch = v.new_empty(plan.scratch, dtype=plan.wide)
    residuals = v.new_empty((spec.max_steps if trace else 0, batch), dtype=plan.wide)
    value, slopes = torch.empty_like(v), torch.empty_like(v) if saves else v
    status, steps = v.new_empty(batch, dtype=torch.int8), v.new_empty(batch, dtype=torch.int64)
    answer = Answer(value, slopes, status, steps, residuals)
    if batch == 0:
        return answer
    if plan.shape.wide:
        _launch_wide(A, (v, d, x0), answer, spec, plan, scratch, flag, trace=trace, saves=saves, scaled=scaled)
        return answer
    flags = {"STARTS": x0 is not None, "SAVES": saves, "SCALED": scaled, "TRACED": trace}
    tensors = v, d, v if x0 is None else x0, value, slopes, status, steps, scratch, residuals
    strides = A.stride()
    kind = spec, plan.shape, n, strides, x0 is None, saves, scaled, trace, v.dtype
    numbers = batch, n, *strides, *plan.numbers
    constants = plan.front | flags | plan.back
    kernel, matrices = solve_resident, [A]
    if plan.shape.tile:
        kernel, matrices = solve_streamed, [*split_matrix(A, plan.width)] if v.dtype == torch.float32 else [A] * 3
    call(kernel, plan.blocks(batch), kind, (*matrices, *tensors), numbers, constants, plan.options, flag)
    return answer


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """Everything about a launch that does not change from call to call.

    Attributes:
        shape: blocks and tiles.
        width: states with their padding.
        wide: dtype of the iterates.
        scratch: numbers of the scratch buffer.
        numbers: of the spec, as the kernels take them.
        front, back: constants of the kernels, before and after the flags of a call.
        options: of the compiler.
    """

    shape: Shape
    width: int
    wide: torch.dtype
    scratch: int
    numbers: tuple[float, ...]
    front: dict[str, Any]
    back: dict[str, Any]
    options: dict[str, int]

    def blocks(self, batch: int) -> int:
        """Returns the programs of a batch."""
        return -(-batch // self.shape.block)


@functools.lru_cache(maxsize=256)
def plan_launch(n: int, batch: int, dtype: torch.dtype, spec: KernelSpec, shape: Shape | None) -> LaunchPlan:
    """Plans launches of one kind."""
    shape = choose_shape(n, batch, dtype.itemsize) if shape is None else shape
    width, blocks = _width(n, shape), -(-batch // shape.block)
    points = (spec.memory + 2) * blocks * shape.block * width
    numbers = (
        spec.atol, spec.rtol, torch.finfo(dtype).eps, spec.limit, spec.max_steps, spec.worth,
        spec.patience, spec.ridge,
    )  # fmt: skip
    front = {"KIND": spec.kind, "SLOPE": spec.slope, "RULE": spec.rule, "MEMORY": spec.memory}
    back: dict[str, Any] = {"WIDTH": width, "BLOCK": shape.block}
    if shape.wide:
        back = {}
    elif shape.tile:
        back |= {"TILE": shape.tile, "DEPTH": shape.depth, "CHUNK": min(shape.chunk, width)}
        back["SPLIT"] = dtype == torch.float32
    else:
        back |= {"CHUNK": min(shape.chunk, width), "SPLIT": dtype == torch.float32, "FUSED": not interpreted()}
    return LaunchPlan(
        shape, width, torch.float64 if dtype == torch.float64 else torch.float32,
        points + (spec.max_steps // PERIOD + 1) * batch, numbers, front, back,
        {"num_warps": shape.warps, "num_stages": shape.stages},
    )  # fmt: skip


def _launch_wide(
    A: Tensor, operands: tuple[Tensor, Tensor, Tensor | None], answer: Answer, spec: KernelSpec, plan: LaunchPlan,
    scratch: Tensor, flag: Tensor, *, trace: bool, saves: bool, scaled: bool,
) -> None:  # fmt: skip
    """Launches a solve step by step, until no sample needs another; returns with the last steps still running.

    In a captured CUDA graph no sample can be asked: there all steps are launched, and those not needed do nothing.
    """
    (v, d, x0), (batch, n), width, shape = operands, operands[0].shape, plan.width, plan.shape
    blocks, split = plan.blocks(batch), v.dtype == torch.float32
    height = blocks * shape.block  # rows with their padding
    points = scratch[: (spec.memory + 2) * height * width].view(-1, height, width)
    product, state = v.new_zeros(height, width), v.new_empty(7, height)  # padding stays zero
    counts = v.new_empty(4, height, dtype=torch.int32)
    high, low = v.new_empty(2, height, width, dtype=torch.float16) if split else (product, product)
    running = torch.zeros(spec.max_steps + 1, dtype=torch.int32, device=v.device)
    rows = {"WIDTH": width, "BLOCK": ROWS, "TILE": min(1024, width & -width)}
    kind = spec, shape, n, v.dtype
    call(
        begin_wide, height // ROWS, (*kind, x0 is None, scaled),
        (v, v if x0 is None else x0, answer.status, points, state, counts, high, low, running), (height, batch, n),
        {"STARTS": x0 is not None, "SCALED": scaled, **rows, "SPLIT": split}, {"num_warps": 4},
    )  # fmt: skip
    halves = split_matrix(A, width) if split else ()
    tiles = {"WIDTH": width, "BLOCK": shape.block, "TILE": shape.tile, "DEPTH": shape.depth, "GROUP": 8}
    flags = {"SAVES": saves, "SCALED": scaled, "TRACED": trace}
    tensors = (
        product, v, d, answer.value, answer.slopes, answer.status, answer.steps, points, answer.residuals, state,
        counts, high, low, running,
    )  # fmt: skip
    needed = _Needed(running)
    for index in range(spec.max_steps):
        phase = index % (spec.memory + 2)
        origin = phase if phase <= spec.memory or not spec.memory else 0
        if split:
            factors = high, low, *halves, state[5]
            call(
                wide_product, blocks * (width // shape.tile), kind, (running, *factors, product), (index,), tiles,
                plan.options,
            )  # fmt: skip
        else:
            torch.mm(points[origin, :batch, :n], A.t(), out=product[:batch, :n])
        call(
            advance, -(-batch // ROWS), (*kind, saves, scaled, trace), tensors,
            (index, phase, origin, height, batch, n, *plan.numbers),
            plan.front | flags | rows | {"CHUNK": min(shape.chunk, rows["TILE"]), "SPLIT": split},
            {"num_warps": 4}, flag,
        )  # fmt: skip
        if not needed.after(index):
            return


class _Needed:
    """Tells whether samples need another step, as far as the device has come."""

    def __init__(self, running: Tensor) -> None:
        self.running, self.answers = running, deque[tuple[Tensor, Any]]()
        self.captured = running.is_cuda and torch.cuda.is_current_stream_capturing()

    def after(self, index: int) -> bool:
        """Says so after a step was launched; waits for the step `AHEAD` before it."""
        if self.captured:
            return True
        if not self.running.is_cuda:
            return bool(self.running[index + 1])
        answer, event = torch.empty(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
        answer.copy_(self.running[index + 1 : index + 2], non_blocking=True)
        event.record(torch.cuda.current_stream(self.running.device))
        self.answers.append((answer, event))
        if len(self.answers) <= AHEAD:
            return True
        answer, event = self.answers.popleft()
        event.synchronize()
        return bool(answer.item())


def split_matrix(A: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns A as float16 numbers, the rest in float16 numbers, and the units of rows, with padding."""
    high, low = (A.new_empty(width, width, dtype=torch.float16) for _ in range(2))
    units, n, strides = A.new_empty(width), A.shape[0], A.stride()
    constants = {"WIDTH": width, "POWER": 1 << (width - 1).bit_length()}
    warps = {"num_warps": 1 if width <= STREAMED else 8}
    call(split_float16, width, (width, n), (A, high, low, units), (n, *strides), constants, warps)
    return high, low, units


def _width(n: int, shape: Shape) -> int:
    """Returns the states with their padding: a power of two on the chip, whole tiles beyond."""
    if not shape.tile:
        return max(16, 1 << (n - 1).bit_length())
    unit = max(shape.tile, shape.depth)
    return -(-n // unit) * unit
