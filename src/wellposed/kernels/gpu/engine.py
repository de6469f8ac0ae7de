"""The engine of Triton: runs the kernels of CUDA devices on tensors, a whole solve as one launch.

Up to 128 states A stays on the chip (`solve_resident` in `gpu.solve`), up to 1024 it is streamed in tiles from the
cache of the device (`solve_streamed`), and beyond a step is a product of all samples and a launch for the rest
(`advance`); all end every sample as the reference loop does. On the chip float32 is multiplied by three TF32
products; elsewhere it is split into two float16 numbers, A by a small launch of its own. float64 is multiplied
directly; bfloat16 and float16 are storage formats, sums and iterates are float32.

Failures reach the host through a `FailureFlag`, the only wait of a pass; with ``on_failure="ignore"`` there is
none.

A call through Triton checks the type and alignment of every argument, all global constants and settings, which
takes longer than a small solve. `call` does that once for every kind of call; later ones hand numbers and
addresses straight to the compiled kernel.
"""

import contextlib
import functools
import importlib.util
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.equilibrium.affine import AffineSpec, Factors
from wellposed.equilibrium.gradients import row_scale
from wellposed.equilibrium.loop import PERIOD, Iterates
from wellposed.equilibrium.method import SolveOptions, report, report_outputs, require_finite
from wellposed.equilibrium.solvers import Anderson
from wellposed.errors import InputError, require
from wellposed.kernels.spec import (
    LINEAR,
    SLOPED,
    CellMatrices,
    KernelSpec,
    SequenceResult,
    SequenceSpec,
    common_why_not,
    finished,
    kernel_spec,
    kind_of,
    transform_why_not,
    unsupported,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
RESIDENT = {2: 128, 4: 128, 8: 32}  # states up to which A stays on the chip, by the bytes of a number
STATES = {2: 1024, 4: 16384, 8: 16384}  # most states of a solve
MEMORY = 6  # of Anderson's method; its least squares problem is in registers
SEQUENCE_STATES = 128  # states and hidden states of a block that stays on the chip


@functools.cache
def launcher(module: str = "launch") -> ModuleType:
    """Imports a module that needs Triton, on first use."""
    require("triton")
    return require(f"wellposed.kernels.gpu.{module}")


def interpreted() -> bool:
    """Tells whether Triton interprets kernels, on CPU tensors."""
    if importlib.util.find_spec("triton") is None:
        return False
    return bool(require("triton").knobs.runtime.interpret)


@functools.cache
def device_why_not(device: torch.device) -> str:
    """Says why a device has no kernels; empty if it has."""
    if device.type != "cuda":
        return f"device {device.type} has no kernel of triton"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need an NVIDIA GPU of compute capability 8.0 or more"
    return ""


@functools.cache
def no_flag(device: torch.device) -> Tensor:
    """Returns the flag of solves whose statuses are read anyway, or never."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _free_flags(device: torch.device) -> deque[tuple[Tensor, Any]]:
    """Returns flags and events that are free for reuse: making them takes longer than a launch."""
    return deque(maxlen=64)


class FailureFlag:
    """Tells the host whether a sample of a solve has failed.

    The kernel writes to host memory, so that waiting for the solve is enough: nothing is copied, and work launched
    after the solve goes on.
    """

    def __init__(self, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "a solve in a captured CUDA graph cannot report failures; build the model with "
                'on_failure="ignore" and look at the statuses of equilibrium(u) now and then'
            )
        try:
            self.flag, self.event = _free_flags(device).pop()
        except IndexError:
            self.flag, self.event = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
        self.device = device

    def record(self) -> None:
        """Marks the end of the solve in the stream."""
        self.event.record(torch.cuda.current_stream(self.device))

    def wait(self) -> bool:
        """Waits for the solve; tells whether a sample has failed. Called once."""
        self.event.synchronize()
        if self.flag.item():
            return True
        _free_flags(self.device).append((self.flag, self.event))
        return False


class ReplayedFlag:
    """The flag of captured solves, which all replays of a graph share: the host clears what the device sets."""

    def __init__(self, device: torch.device) -> None:
        self.flag, self.event = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
        self.device = device

    def record(self) -> None:
        """Does nothing: a capture has no end to wait for."""

    def wait(self) -> bool:
        """Waits for the latest replay; tells whether a sample has failed in it. Of a capture nothing is known."""
        if torch.cuda.is_current_stream_capturing():
            return False
        self.event.record(torch.cuda.current_stream(self.device))
        self.event.synchronize()
        failed = bool(self.flag.item())
        if failed:
            self.flag.zero_()
        return failed


class _HostFlag:
    """The same where Triton interprets kernels: they are finished when a launch returns."""

    def __init__(self) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32)

    def record(self) -> None:
        """Does nothing."""

    def wait(self) -> bool:
        """Tells whether a sample has failed."""
        return bool(self.flag[0])


Flag = FailureFlag | ReplayedFlag | _HostFlag


def failure_flag(options: SolveOptions, device: torch.device) -> Flag | None:
    """Returns a flag for a launch; None if failures are ignored."""
    if options.on_failure == "ignore":
        return None
    return FailureFlag(device) if device.type == "cuda" else _HostFlag()


def _passes(spec: AffineSpec, dtype: torch.dtype) -> tuple[KernelSpec, KernelSpec]:
    """Returns the two solves of an equation as the kernels take them."""
    key = "triton", dtype
    known: tuple[KernelSpec, KernelSpec] | None = spec.prepared.get(key)
    if known is None:
        kind = kind_of(spec.activation)
        assert kind is not None
        pairs = (kind, spec.forward), ((LINEAR, 0.0), spec.backward)
        first, second = (kernel_spec(*pair, dtype, points=spec.points) for pair in pairs)
        known = spec.prepared[key] = first, second
    return known


def run_kernel(
    A: Tensor, v: Tensor, d: Tensor | None, x0: Tensor | None, spec: KernelSpec, *, trace: bool,
    scaled: bool = False,
) -> Iterates:  # fmt: skip
    """Solves ``x = phi(Ax + v)``, or ``y = d (Ay) + v``; see `launch` in `kernels.gpu.launch`."""
    tensors = [None if tensor is None else tensor.detach() for tensor in (A, v, d, x0)]

    def solve(traced: bool) -> tuple[Iterates, Tensor]:
        out = launcher().launch(*tensors, spec, no_flag(v.device), trace=traced, scaled=scaled)
        retrace = lambda: solve(True)[1]  # noqa: E731
        return Iterates(out.value, out.status, out.steps, retrace), finished(out.residuals, out.steps)

    iterates, residuals = solve(trace)
    return Iterates(iterates.value, iterates.status, iterates.steps, lambda: residuals) if trace else iterates


class Launched:
    """A solve that was launched; `check` reports failures, once the work that needs its result is launched too."""

    def __init__(
        self, A: Tensor, v: Tensor, d: Tensor | None, spec: KernelSpec, options: SolveOptions, flag: Flag | None,
        *, saves: bool,
    ) -> None:  # fmt: skip
        self.operands, self.spec, self.options, self.scaled = (A, v, d, None), spec, options, d is not None
        self.flag = failure_flag(options, v.device) if flag is None else flag
        target = no_flag(v.device) if self.flag is None else self.flag.flag
        self.answer = launcher().launch(*self.operands, spec, target, saves=saves, scaled=self.scaled)
        self.value = self.answer.value
        self.saved: tuple[Tensor, ...] = (self.answer.slopes,) if saves else ()
        if self.flag is not None:
            self.flag.record()

    def check(self, u: Tensor | None = None, y: Tensor | None = None) -> None:
        """Warns or raises if samples or outputs have failed; blames the inputs where these are not finite."""
        if self.flag is None:
            return
        if y is not None:
            launcher().launch_output_check(y, self.flag.flag)
            self.flag.record()
        if not self.flag.wait():
            return
        if u is not None:
            require_finite("u", u)
        answer, policy = self.answer, self.options.on_failure
        retrace = lambda: run_kernel(*self.operands, self.spec, trace=True, scaled=self.scaled).residuals  # noqa: E731
        name = "adjoint solve" if self.scaled else "equilibrium"
        iterates = Iterates(answer.value, answer.status, answer.steps, retrace)
        report(iterates, policy, solve=name, max_steps=self.spec.max_steps)
        if y is not None:
            report_outputs(y, answer.value, policy)


@dataclass(frozen=True)
class Triton:
    """Solves by kernels of Triton, on CUDA devices.

    Attributes:
        flag: where the solves of models report failures; None for a flag of each solve.
    """

    flag: ReplayedFlag | None = None

    name = "triton"
    projects = torch.float32, torch.float64  # dtypes whose rows a kernel projects

    def why_not(self, spec: AffineSpec, factors: Factors) -> str:
        """Says why an equation has no kernel; empty if it has one."""
        reason, A, kind = transform_why_not() or unsupported(spec, factors), factors[0], kind_of(spec.activation)
        if reason:
            return reason
        if A.dtype not in DTYPES:
            return f"{str(A.dtype).removeprefix('torch.')} has no kernel"
        if A.shape[-1] > STATES[A.element_size()]:
            return f"more than {STATES[A.element_size()]} states have no kernel on the GPU"
        return self._limits(spec, kind) or device_why_not(A.device)

    def _limits(self, spec: AffineSpec, kind: tuple[int, float] | None) -> str:
        if kind is not None and kind[0] == SLOPED and kind[1] < 0:
            return "leaky_relu with a negative slope has no kernel on the GPU"
        for solver in (spec.forward.solver, spec.backward.solver):
            if isinstance(solver, Anderson) and solver.memory > MEMORY:
                return f"Anderson with a memory beyond {MEMORY} has no kernel on the GPU"
        return ""

    def describe(self, spec: AffineSpec, factors: Factors) -> str:
        """Says which solver is used, and where A is stored."""
        A = factors[0]
        shape = launcher().choose_shape(A.shape[1], 1, A.element_size())
        where = "a product of all samples a step" if shape.wide else "A in tiles from the cache"
        where = where if shape.tile else "A on the chip"
        return f"{type(spec.forward.solver).__name__}, {where}"

    def solve(
        self, spec: AffineSpec, factors: Factors, v: Tensor, x0: Tensor | None = None, *,
        context: Tensor | None = None, trace: bool = False,
    ) -> Iterates:  # fmt: skip
        """Solves the forward equation."""
        return run_kernel(factors[0], v, None, x0, _passes(spec, v.dtype)[0], trace=trace)

    def adjoint(
        self, spec: AffineSpec, factors: Factors, g: Tensor, *, slope: Tensor | None = None,
        z: Tensor | None = None, start: Tensor | None = None, trace: bool = False,
    ) -> Iterates:  # fmt: skip
        """Solves the backward equation."""
        if slope is None:
            assert z is not None
            slope = spec.activation.slope_at(z)
        kernel = _passes(spec, g.dtype)[1]
        if start is None:
            return run_kernel(factors[0], g, slope, None, kernel, trace=trace, scaled=True)
        scale = row_scale(g)
        iterates = run_kernel(factors[0], slope * g / scale, slope, start / scale, kernel, trace=trace)
        return replace(iterates, value=iterates.value * scale)

    # One node of the graph for a whole model, in `kernels.layer`.

    def threads(self, work: int) -> contextlib.AbstractContextManager[None]:
        """Does nothing: the device does the work."""
        return contextlib.nullcontext()

    def project_rows(self, W: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        """Projects rows on the l1 ball; returns A and what the backward pass needs."""
        A, levels = launcher("projection").project(W, radius)
        return A, levels

    def project_rows_backward(self, W: Tensor, levels: Tensor, g: Tensor) -> Tensor:
        """Returns the gradient by W from that by A."""
        gradient: Tensor = launcher("projection").project_backward(W, levels, g)
        return gradient

    def begin(self, spec: AffineSpec, radius: float | None, W: Tensor, v: Tensor, *, saves: bool) -> Launched:
        """Launches the solve of a model, after the projection of the rows of W where a radius is given."""
        A, levels = (W, W) if radius is None else self.project_rows(W, radius)
        solve = Launched(A, v, None, _passes(spec, v.dtype)[0], spec.forward, self.flag, saves=saves)
        solve.saved = A, levels, *solve.saved
        return solve

    def begin_adjoint(self, spec: AffineSpec, saved: Sequence[Tensor], x: Tensor, g: Tensor) -> Launched:
        """Launches the backward solve of a model."""
        A, _, slopes = saved
        return Launched(A.t(), g, slopes, _passes(spec, g.dtype)[1], spec.backward, self.flag, saves=False)

    # Sequences, in `kernels.sequence`.

    def sequence_why_not(self, spec: AffineSpec, factors: Factors, hidden: int, batch: int) -> str:
        """Says why sequences have no kernel; empty if they have one."""
        reason = common_why_not(spec, factors, batch) or self._limits(spec, kind_of(spec.activation))
        A = factors[0]
        if reason:
            return reason
        if A.dtype != torch.float32:
            return f"{str(A.dtype).removeprefix('torch.')} has no kernel on the GPU"
        if max(A.shape[0], hidden) > SEQUENCE_STATES:
            return (
                f"more than {SEQUENCE_STATES} states or hidden states have no kernel on the GPU; received "
                f"{A.shape[0]} and {hidden}"
            )
        return "" if A.device.type == "cpu" and interpreted() else device_why_not(A.device)

    def sequence_forward(
        self, spec: SequenceSpec, data: Tensor, h0: Tensor, cell: CellMatrices, *, keep: bool
    ) -> tuple[SequenceResult, Tensor, Tensor]:
        """Solves from the first time to the last; see `SequenceEngine`."""
        options = spec.affine.forward
        flag = failure_flag(options, data.device)
        target = no_flag(data.device) if flag is None else flag.flag
        result, known, images = _launch_forward(spec, data, h0, cell, target, keep=keep or spec.trace)
        if flag is not None:
            launcher().launch_output_check(result.hidden, target)
            flag.record()
        failed = flag is not None and flag.wait()
        if failed:
            require_finite("input", data)
            require_finite("h0", h0)
        if failed or spec.solve.logs:
            _report(spec, range(len(spec.sizes)), "equilibrium", result, options)
        if failed:
            report_outputs(result.hidden, None, options.on_failure, spec.solve.once)
        return result, known.mT, images.mT

    def sequence_backward(
        self, spec: SequenceSpec, images: Tensor, known: Tensor, gradients: tuple[Tensor | None, ...],
        cell: CellMatrices,
    ) -> tuple[Tensor, Tensor, Callable[[], None]]:  # fmt: skip
        """Launches the solves from the last time to the first; see `SequenceEngine`."""
        (n, elements), h, batch = images.shape, cell.C.shape[0], spec.sizes[0]
        options, kind = spec.affine.backward, kind_of(spec.affine.activation)
        assert kind is not None
        kernel = _passes(spec.affine, images.dtype)[1]
        every, ending, outer = (None if tensor is None else tensor.contiguous() for tensor in gradients)
        adjoints, first = images.new_empty(elements, n + h), images.new_empty(batch, h)
        residual = images.new_empty(elements)
        status = torch.empty(elements, dtype=torch.int8, device=images.device)
        steps = torch.empty(elements, dtype=torch.int64, device=images.device)
        flag = failure_flag(options, images.device)
        given = (first if tensor is None else tensor for tensor in (outer, every, ending))
        tensors = [
            *_matrices(cell), images.mT, *given, _offsets(spec, steps), adjoints, first, residual, status, steps
        ]  # fmt: skip
        even = spec.sizes[0] == spec.sizes[-1]
        flags = {
            "THROUGH": cell.D is not None, "OUTER": outer is not None, "EVERY": every is not None,
            "ENDING": ending is not None, "EVEN": even, "BACKWARDS": spec.backwards,
        }  # fmt: skip
        launch, whole = plan_sequence(kernel, kind, batch, n, h), (batch, len(spec.sizes), n, cell.inputs, h)
        target = no_flag(images.device) if flag is None else flag.flag
        launch.start(launcher("sequence").backward, tensors, whole, flags, target)
        if flag is not None:
            flag.record()

        def check() -> None:
            if (flag is not None and flag.wait()) or spec.solve.logs:
                turns = range(len(spec.sizes) - 1, -1, -1)
                result = SequenceResult(adjoints[:, n:], first, adjoints[:, :n], status, steps, residual)
                _report(spec, turns, "adjoint solve", result, options)

        return adjoints.mT, first, check


ROWS = 16  # sequences of a block, the fewest that tensor cores take
CHUNK = 64  # inputs that are read at once


class SequenceLaunch(NamedTuple):
    """What a launch over sequences needs besides tensors."""

    kernel: KernelSpec
    numbers: tuple[float, ...]  # in the order of the kernels' parameters
    rules: dict[str, Any]  # compiled in, before the flags of a call
    sizes: dict[str, Any]  # compiled in, after them
    options: dict[str, int]  # of the compiler
    blocks: int

    def start(
        self, kernel: Any, tensors: list[Tensor], whole: tuple[int, ...], flags: dict[str, Any], flag: Tensor
    ) -> None:
        """Launches a kernel on tensors and whole numbers: batch, times and three widths."""
        rows, width = self.blocks * ROWS, self.sizes["STATES"]
        points = (self.kernel.memory + 2) * rows * width if self.kernel.memory else 0
        scratch = tensors[0].new_empty(points + (self.kernel.max_steps // PERIOD + 1) * rows)
        constants = self.rules | flags | self.sizes
        kind = self.kernel, tuple(self.rules.values()), whole[2:], tuple(flags.values())
        call(
            kernel, self.blocks, kind, [*tensors, scratch], (*whole, *self.numbers), constants, self.options, flag
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def plan_sequence(spec: KernelSpec, kind: tuple[int, float], batch: int, n: int, h: int) -> SequenceLaunch:
    """Chooses blocks, and describes a solve as the kernels take it."""
    eps = torch.finfo(torch.float32).eps
    numbers = (
        float(kind[1]), spec.limit, spec.max_steps, spec.atol, spec.rtol, eps, spec.worth, spec.patience,
        spec.ridge, 0,
    )  # fmt: skip
    states, hidden = padded(n), padded(h)
    rules = {"KIND": kind[0], "RULE": spec.rule, "MEMORY": spec.memory, "FUSED": not interpreted()}
    sizes = {"ROWS": ROWS, "STATES": states, "HIDDEN": hidden}
    options = {"num_stages": 1, **_warps(max(states, hidden))}
    return SequenceLaunch(spec, numbers, rules, sizes, options, -(-batch // ROWS))


def padded(size: int) -> int:
    """Returns the power of two to which a size is padded, at least 16.

    Example:
        >>> padded(3), padded(33)
        (16, 64)
    """
    return max(16, 1 << (size - 1).bit_length())


def _warps(width: int) -> dict[str, int]:
    """Returns how many warps share a block: four were fastest up to 32 columns, on an H200."""
    # Without the second number the assembler stops at 128 registers and spills twice as much.
    return {"num_warps": 4} if width < 64 else {"num_warps": 8, "maxnreg": 255}


def _offsets(spec: SequenceSpec, like: Tensor) -> Tensor:  # (T + 1,) int64, or nothing where all times are alike
    if spec.sizes[0] == spec.sizes[-1]:
        return like
    return torch.from_numpy(spec.offsets).to(like.device, non_blocking=True)


def _matrices(cell: CellMatrices) -> list[Tensor]:
    """Returns contiguous A, B, C and D; B stands in for a D that is missing."""
    D = cell.B if cell.D is None else cell.D
    return [matrix.detach().contiguous() for matrix in (cell.A, cell.B, cell.C, D)]


def _launch_forward(
    spec: SequenceSpec, data: Tensor, h0: Tensor, cell: CellMatrices, flag: Tensor, *, keep: bool
) -> tuple[SequenceResult, Tensor, Tensor]:
    """Launches the loop forward; what is to `keep` are (N, n + p + h) known rows and (N, n) images."""
    (n, both), h, elements, batch = cell.B.shape, cell.C.shape[0], data.shape[0], spec.sizes[0]
    kind = kind_of(spec.affine.activation)
    assert kind is not None
    launch = plan_sequence(_passes(spec.affine, data.dtype)[0], kind, batch, n, h)
    data, h0, biased = data.detach().contiguous(), h0.detach().contiguous(), cell.bias is not None
    known = data.new_empty(elements if keep else 0, n + both + biased)
    images = data.new_empty(elements if keep else 0, n)
    hidden, last, residual = data.new_empty(elements, h), data.new_empty(batch, h), data.new_empty(elements)
    status = torch.empty(elements, dtype=torch.int8, device=data.device)
    steps = torch.empty(elements, dtype=torch.int64, device=data.device)
    bias = data if cell.bias is None else cell.bias.detach().contiguous()
    tensors = [
        *_matrices(cell), bias, data, h0, _offsets(spec, steps), known, images, hidden, last, residual, status,
        steps,
    ]  # fmt: skip
    flags = {
        "THROUGH": cell.D is not None, "BIASED": int(biased), "EVEN": spec.sizes[0] == spec.sizes[-1],
        "BACKWARDS": spec.backwards, "WARM": spec.warm_start, "KEEP": keep, "CHUNK": min(CHUNK, padded(both - h)),
    }  # fmt: skip
    launch.start(launcher("sequence").forward, tensors, (batch, len(spec.sizes), n, both - h, h), flags, flag)
    return SequenceResult(hidden, last, known[:, :n], status, steps, residual), known, images


def _report(spec: SequenceSpec, turns: range, solve: str, result: SequenceResult, options: SolveOptions) -> None:
    """Logs the solves of all times and reports the first that failed."""

    def trace(turn: int) -> Tensor:  # (B, K), of which only the last of a sample is read
        rows = spec.rows(spec.times[turn])
        return result.residual[rows, None].expand(-1, int(result.steps[rows].max()))

    iterates = Iterates(result.states, result.status, result.steps, lambda: result.residual)
    spec.report_times(turns, solve, iterates, options, trace)


ALIGNED = 16  # bytes, on which compiled kernels rely


@functools.cache
def _compiled() -> dict[Hashable, Any]:
    """Returns the kernels that were compiled so far, by the kind of call."""
    return {}


def call(
    kernel: Any, blocks: int, kind: Hashable, tensors: Sequence[Tensor], numbers: Sequence[Any],
    constants: dict[str, Any], options: dict[str, int], flag: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches a kernel.

    Args:
        kernel: whose parameters are the flag if there is one, the tensors, the numbers and the constants.
        blocks: of the grid.
        kind: everything but addresses and unspecialised numbers on which the compiled kernel depends.
        tensors: on the current device.
        numbers: integers and floats.
        constants: by name, in the order of the parameters.
        options: of the compiler.
        flag: a tensor that may be in host memory.
    """
    pointers = [tensor.data_ptr() for tensor in tensors]
    first = () if flag is None else (flag,)
    index = tensors[0].device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            kernel[(blocks, 1, 1)](*first, *tensors, *numbers, **constants, **options)
        return
    key = kernel, index, kind
    known = _compiled().get(key)
    if known is not None and not any(pointer % ALIGNED for pointer in pointers):
        known[(blocks, 1, 1)](*first, *pointers, *numbers, *constants.values())
        return
    known = kernel[(blocks, 1, 1)](*first, *tensors, *numbers, **constants, **options)
    if known is not None and not any(pointer % ALIGNED for pointer in pointers):
        _compiled()[key] = known
