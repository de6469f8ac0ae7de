"""The engine of numba: runs the compiled loops of the CPU on tensors.

A batch is divided among threads, each thread takes samples in groups of as many as fit in vector registers, and
every group has a workspace of its own:

    slots       memory + 2 points of n rows: the iterate and the history of Anderson's method
    v, d        offset and slope of the group, n rows each
    single      one row of numbers a sample: sizes, residuals, the Gram matrix
    solution    coefficients of the extrapolation
    minima      least residual of every period, by which stagnation is noticed

A row holds one number of each sample of the group. Samples that plain steps have not finished after a while go to
Newton's method, sample by sample: the step at which that happens depends on the number of states and on the most
steps alone (`handover_after`, a rule from `benchmarks.solve.solver_choice`), never on batch companions.
"""

import contextlib
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap, AffineSpec, Factors, TransposedMap
from wellposed.equilibrium.gradients import row_scale
from wellposed.equilibrium.loop import PERIOD, Iterates
from wellposed.equilibrium.method import NotFiniteError, OnFailure, SolveOptions, report, report_outputs
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Anderson
from wellposed.equilibrium.stopping import Absolute, Relative, Stopping
from wellposed.errors import require
from wellposed.kernels.cpu.background import MODEL, SEQUENCE, compiling, is_compiling
from wellposed.kernels.sparse import SparseRows
from wellposed.kernels.spec import (
    CHECKED,
    LINEAR,
    POINT,
    TOLERANCE,
    CellMatrices,
    KernelSpec,
    SequenceResult,
    SequenceSpec,
    common_why_not,
    finished,
    kernel_spec,
    kind_of,
    slopes,
    transform_why_not,
    unsupported,
)

DTYPES = (torch.float32, torch.float64)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
MEMORY = 5  # of the workspace where a solver needs none
SPLIT = 1 << 22  # multiplications of a step below which threads are not worth their start
FUSED = SPLIT  # multiplications of a step up to which a model is one call
NO_GRADIENTS = (None,) * 6  # of a forward pass
NO_NUMBERS = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0)}  # for the dtype of a kernel
DIRECT = 32  # states up to which samples that are slow or stagnated are finished by elimination in the kernels
COMPILED_EASY = 64  # steps of a kernel after which a small backward system is factorised

Matrix = Tensor | SparseRows


@functools.cache
def kernels(module: str = "solve") -> ModuleType:
    """Imports a module that needs numba, on first use."""
    require("numba", extra="fast")
    return require(f"wellposed.kernels.cpu.{module}", extra="fast")


@functools.cache
def installation_why_not() -> str:
    """Says what is missing to run the kernels at all; empty if they can run."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install 'wellposed[fast]'"
    return ""


def tensor_why_not(x: Tensor) -> str:
    """Says why tensors of this device and dtype have no kernel; empty if they have one.

    Example:
        >>> tensor_why_not(torch.zeros(2, 3, dtype=torch.float16))
        'float16 has no kernel'
    """
    if x.device.type != "cpu":
        return f"device {x.device.type} has no kernel of numba"
    return "" if x.dtype in DTYPES else f"{str(x.dtype).removeprefix('torch.')} has no kernel"


def handover_after(states: int) -> int:
    """Returns after how many steps a sample that is still not finished goes to Newton's method.

    About the steps that Newton's forward pass costs at a usual batch, so that a sample takes at most about twice
    as long as it would have with the better of the two, whatever its rate (the ski-rental argument). It depends on
    the number of states alone: how a sample is solved does not depend on its batch companions.

    Measured in float32 on one thread, ReLU, contractions 0.99 and 0.999: forward and backward Newton's method
    costs 1500 to 2700 plain steps at n = 20 and batch 128, 280 to 1100 at (64, 512), 130 to 740 at (190, 500),
    170 to 590 at (300, 256) and 90 to 530 at (512, 64). Small equations are eliminated by the kernels, as long as
    about 50, 130, 190 and 340 steps at 8, 16, 20 and 32 states take.

    Example:
        >>> handover_after(20), handover_after(64), handover_after(300)
        (160, 262, 115)
    """
    return max(8 * states, 64) if states <= DIRECT else 75 + 12000 // states


LARGEST = 512  # states up to which factorising was measured to pay off
RESERVE = 48  # evaluations that are left to Newton's method; it seldom needs ten
FEWEST = 2 * RESERVE  # whoever sets a lower limit on steps wants to see few steps


def handover_step(states: int, options: SolveOptions) -> int:
    """Returns the step at which unfinished samples may go to Newton's method; `max_steps` if none do.

    Newton's method obeys stopping rules for which one step is enough to certify.

    Example:
        >>> from wellposed.equilibrium.solvers import Picard
        >>> [handover_step(64, SolveOptions(Picard(), Relative(), steps)) for steps in (200, 4000, 50)]
        [152, 262, 50]
    """
    limit = options.max_steps
    if states > LARGEST or limit < FEWEST or type(options.stop) not in (Absolute, Relative):
        return limit
    return min(handover_after(states), limit - RESERVE)


class Passes(NamedTuple):
    """The two solves of an equation as the kernels take them, with the steps after which Newton takes over."""

    forward: KernelSpec
    backward: KernelSpec
    forward_hands_over: bool
    backward_hands_over: bool
    kind: tuple[int, float]  # of the activation, and its slope


def _passes(spec: AffineSpec, states: int, dtype: torch.dtype) -> Passes:
    key = "numba", states, dtype
    known: Passes | None = spec.prepared.get(key)
    if known is not None:
        return known
    kind, first, second = kind_of(spec.activation), spec.forward, spec.backward
    assert kind is not None
    limit = first.max_steps
    if spec.automatic and spec.activation.homogeneous:
        limit = handover_step(states, first)
    turns = _adjoint_limit(spec, states)
    passes = Passes(
        kernel_spec(kind, first, dtype, limit, points=spec.points, checked=spec.checked),
        kernel_spec(
            (LINEAR, 0.0), second, dtype, turns or second.max_steps, points=spec.points, checked=spec.checked
        ),
        limit < first.max_steps,
        turns > 0,
        kind,
    )
    spec.prepared[key] = passes
    return passes


def _sequence_passes(spec: AffineSpec, states: int, dtype: torch.dtype) -> Passes:
    """Returns the solves of a time: small backward systems that are slow are factorised by the kernel itself."""
    key = "sequences of numba", states, dtype
    known: Passes | None = spec.prepared.get(key)
    if known is not None:
        return known
    kind, direct, most = kind_of(spec.activation), states <= spec.direct, spec.backward.max_steps
    assert kind is not None
    forward = kernel_spec(kind, spec.forward, dtype)
    limit = min(COMPILED_EASY, most) if direct else most
    backward = kernel_spec((LINEAR, 0.0), spec.backward, dtype, limit)
    known = spec.prepared[key] = Passes(forward, backward, False, direct, kind)
    return known


def not_compiled_yet(name: str, spec: AffineSpec, dtype: torch.dtype) -> str:
    """Says that the kernels of a family are being compiled; empty if they are there or were asked for by name."""
    if spec.executor != "auto":
        return ""
    solvers = spec.forward.solver, spec.backward.solver
    return compiling(
        name, dtype, [solver.memory if isinstance(solver, Anderson) else MEMORY for solver in solvers]
    )


def _adjoint_limit(spec: AffineSpec, states: int) -> int:
    """Returns after how many steps backward systems are factorised; 0 for never."""
    options = spec.backward
    if spec.direct == 0 or type(options.stop) not in (Absolute, Relative):
        return 0
    limit = handover_step(states, options)
    if spec.automatic and limit < options.max_steps:
        return limit
    return min(COMPILED_EASY, options.max_steps) if states <= spec.direct else 0


def newton_handover(
    f: AffineMap | TransposedMap, iterates: Iterates, stop: Stopping, limit: int, max_steps: int
) -> Iterates:
    """Solves the samples that are not finished after `limit` steps by Newton's method.

    Newton's method counts its evaluations as steps and leaves no residuals but the last.
    """
    status = iterates.status
    rest = ((status == Status.MAX_STEPS) | (status == Status.DIVERGED)).nonzero()[:, 0]
    if not len(rest):
        return iterates
    A, x, remaining = f.factors[0].detach(), iterates.value[rest], max(max_steps - limit, 1)
    with torch.no_grad():
        if isinstance(f, AffineMap):
            system = replace(f, factors=(A,), v=f.v.detach()[rest])
            answer = kernels("newton").finish_forward(system, x, stop, remaining)
        else:
            transposed = TransposedMap(f.factors, f.slope[rest], f.offset[rest], 1.0)
            answer = kernels("newton").finish_adjoint(A.mT, transposed, x, stop, remaining)
    steps = iterates.steps.index_add(0, rest, answer.steps)
    value = iterates.value.index_copy(0, rest, answer.value)
    final = status.index_copy(0, rest, answer.status)
    return Iterates(value, final, steps, lambda: _extend(iterates.residuals, rest, answer.residual, steps))


def finish_directly(A: Tensor, v: Tensor, d: Tensor | None, iterates: Iterates, spec: KernelSpec) -> Iterates:
    """Solves small equations whose samples are slow or stagnated by elimination in float64.

    Forward this is Newton's method without a safeguard; a sample that it does not solve stays as it is.
    """
    (batch, n), layer = v.shape, kernels("layer")
    if iterates.worst < Status.STAGNATED or n > DIRECT:
        return iterates
    residual, arrays = np.full(batch, np.nan), []
    for tensor in (v, v if d is None else d):
        arrays.append(tensor.detach().contiguous().numpy())
    matrix, own = (
        np.from_dlpack(A.detach().contiguous()),
        plan_kernel(spec, n, v.dtype).parameters,
    )  # as in `pack_matrix`
    results = (tensor.numpy() for tensor in (iterates.value, iterates.status, iterates.steps))
    worst = layer.finish(matrix, d is not None, *arrays, *results, residual, own)
    (solved,) = torch.from_numpy(residual).isfinite().nonzero(as_tuple=True)
    last = torch.from_numpy(residual)[solved].to(v.dtype)
    trace = lambda: _extend(iterates.residuals, solved, last, iterates.steps)  # noqa: E731
    return Iterates(iterates.value, iterates.status, iterates.steps, trace, worst)


def _extend(before: Tensor, rest: Tensor, last: Tensor, steps: Tensor) -> Tensor:  # (B, K)
    """Appends the last residuals of samples that were handed over."""
    wide = before.new_full((before.shape[0], max(int(steps.max()), before.shape[1])), torch.nan)
    wide[:, : before.shape[1]] = before
    wide[rest, steps[rest] - 1] = last
    return wide


class Rows(NamedTuple):
    """Offsets of the rows of a group behind the points of its solver."""

    v: int
    d: int
    single: int
    solution: int
    minima: int


class SequenceRows(NamedTuple):
    """Offsets of the rows of `kernels.cpu.sequence`, behind those of a solve."""

    point: int
    image: int
    out: int
    scale: int


class Workspace(NamedTuple):
    """Offsets into the buffer of a group, in numbers."""

    slots: tuple[int, ...]
    at: Rows
    size: int
    width: int  # samples of a group


def plan_workspace(n: int, memory: int, max_steps: int, itemsize: int) -> Workspace:
    """Plans the memory of one group of samples."""
    lanes = kernels()
    width = lanes.VECTORS * lanes.VECTOR_BYTES // itemsize
    slots = tuple(point * n * width for point in range(memory + 2))
    v = (memory + 2) * n * width
    single = v + 2 * n * width
    solution = single + (lanes.PROBLEM + memory * (memory + 3) // 2 + 1) * width
    minima = solution + (memory + 1) * width
    size = minima + (max_steps // PERIOD + 1) * width
    return Workspace(slots, Rows(v, v + n * width, single, solution, minima), size, width)


class Counts(NamedTuple):
    """The whole numbers of a `KernelSpec`."""

    kind: int
    memory: int
    rule: int
    limit: int
    max_steps: int
    goes_on: bool


class Numbers(NamedTuple):
    """The other numbers of a `KernelSpec`, in the dtype of the states."""

    slope: Any
    worth: Any
    patience: Any
    ridge: Any
    atol: Any
    rtol: Any
    eps: Any


class Plan(NamedTuple):
    """A `KernelSpec` as the kernels take it, for a number of states and a dtype."""

    space: Workspace
    counts: Counts
    numbers: Numbers
    none: Any  # (0, n): where there is no array
    layout: Any  # int64: offsets of the rows, counts, samples and size of a group
    parameters: Any  # the numbers as an array, which is unpacked faster


def plan_kernel(spec: KernelSpec, n: int, dtype: torch.dtype) -> Plan:
    """Returns what the kernels take besides matrices and vectors, from the cache of the spec."""
    plan: Plan | None = spec.prepared.get((n, dtype))
    if plan is not None:
        return plan
    numbers = spec.slope, spec.worth, spec.patience, spec.ridge, spec.atol, spec.rtol, EPS[dtype]
    scalar = np.float32 if dtype == torch.float32 else np.float64
    space = plan_workspace(n, spec.memory or MEMORY, spec.max_steps, dtype.itemsize)
    counts = Counts(spec.kind, spec.memory, spec.rule, spec.limit, spec.max_steps, spec.goes_on)
    plan = spec.prepared[n, dtype] = Plan(
        space,
        counts,
        Numbers(*(scalar(number) for number in numbers)),
        np.empty((0, n), scalar),
        np.array([*space.at, *counts, space.width, space.size], np.int64),
        np.array(numbers, scalar),
    )
    return plan


def run_kernel(
    A: Matrix, v: Tensor, d: Tensor | None, x0: Tensor | None, spec: KernelSpec, *, trace: bool
) -> Iterates:
    """Solves ``x = phi(Ax + v)``, or ``y = d (Ay) + v`` where `d` is given, from `x0` or from zero.

    Args:
        A: dense or, without `d`, sparse.
        v, d, x0: ``(B, n)``.
        spec: how.
        trace: whether residuals are wanted; else they are computed by a second solve when asked for.
    """
    (batch, n), dtype = v.shape, v.dtype
    space, counts, numbers, none, *_ = plan_kernel(spec, n, dtype)
    cpu = kernels()
    packed, entries = (A.arrays, A.stored) if isinstance(A, SparseRows) else (pack_matrix(A, cpu), n * n)
    value = torch.empty(batch, n, dtype=dtype)
    status, steps = np.empty(batch, np.int8), np.empty(batch, np.int64)
    residuals = np.empty((spec.max_steps, batch), none.dtype) if trace else none
    inputs = [none if tensor is None else tensor.detach().contiguous().numpy() for tensor in (v, d, x0)]
    outputs = value.numpy(), status, steps, residuals

    def solve_range(begin: int, end: int) -> int:
        work = torch.empty(space.size, dtype=dtype).numpy()  # torch aligns it to vectors
        lanes = np.empty(2 * space.width, np.int64)
        worst: int = cpu.solve(
            packed, *inputs, *outputs, work, lanes, space.slots, space.at, counts, numbers, begin, end
        )
        return worst

    worst = run_threads(solve_range, batch, space.width, batch * entries)
    reports = torch.from_numpy(status), torch.from_numpy(steps)
    if trace:
        known = finished(torch.from_numpy(residuals), reports[1])
        return Iterates(value, *reports, lambda: known, worst)
    retrace = lambda: run_kernel(A, v, d, x0, spec, trace=True).residuals  # noqa: E731
    return Iterates(value, *reports, retrace, worst)


def multiply_sparse(u: Tensor, W: SparseRows, bias: Tensor | None) -> Tensor:  # (B, columns) -> (B, rows)
    """Computes ``Wu + b`` for every row of a batch."""
    cpu, batch = kernels(), u.shape[0]
    width = cpu.VECTORS * cpu.VECTOR_BYTES // u.element_size()
    y = torch.empty(batch, W.shape[0], dtype=u.dtype)
    added = y.new_empty(0) if bias is None else bias.detach().contiguous()
    arrays = [tensor.numpy() for tensor in (u.detach().contiguous(), added, y)]

    def multiply_range(begin: int, end: int) -> int:
        work = torch.empty(sum(W.shape) * width, dtype=u.dtype).numpy()
        cpu.multiply_batch(W.arrays, *arrays, work, width, begin, end)
        return 0

    run_threads(multiply_range, batch, width, batch * W.stored)
    return y


def pack_matrix(A: Tensor, cpu: ModuleType) -> Any:
    """Copies A in tiles; a transposed matrix is read without a copy."""
    n = A.shape[0]
    flipped = n > 1 and A.stride() == (1, n)
    # After .numpy() torch could no longer free the storage of a parameter, as fully_shard does.
    matrix = np.from_dlpack((A.mT if flipped else A.contiguous()).detach())
    packed = np.empty(-(-n // cpu.ROWS) * cpu.ROWS * n, matrix.dtype)
    cpu.pack(matrix, flipped, packed)
    return packed


@functools.cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Returns a pool of threads beside the calling one; a forked process has its own."""
    return ThreadPoolExecutor(count, thread_name_prefix="wellposed")


def run_threads(run: Callable[[int, int], int], batch: int, width: int, work: int) -> int:
    """Splits samples among threads, one thread if there are few; returns the largest ``run(begin, end)``."""
    count = min(torch.get_num_threads(), batch // width) if work > SPLIT else 1
    if count <= 1:
        return run(0, batch)
    ends = [batch * k // count for k in range(count + 1)]
    pool = _threads(os.getpid(), count - 1)
    others = [pool.submit(run, *ends[k : k + 2]) for k in range(1, count)]
    return max(run(*ends[:2]), *(other.result() for other in others))


class few_threads:  # noqa: N801
    """Runs the products of a block on the calling thread where there is too little to do for several.

    The library behind torch's products starts threads for the smallest of them, and on a busy machine waits for
    threads that have no core. The number of threads is each thread's own; only a thread that first calls torch
    while another is in such a block begins with one.

    Args:
        work: multiplications of the products.
    """

    def __init__(self, work: int) -> None:
        count = torch.get_num_threads()
        self.count = 1 if work > SPLIT else count

    def __enter__(self) -> None:
        if self.count > 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self.count > 1:
            torch.set_num_threads(self.count)


@dataclass(frozen=True)
class Finished:
    """A finished solve whose failures have been reported; see `wellposed.kernels.layer`."""

    value: Tensor
    saved: tuple[Any, ...]  # A, what its projection left, and v
    on_failure: OnFailure

    def check(self, u: Tensor | None = None, y: Tensor | None = None) -> None:
        """Warns or raises if outputs are not finite and their states are."""
        if y is not None:
            report_outputs(y, self.value, self.on_failure)


@dataclass(frozen=True)
class Numba:
    """Solves by kernels of numba, on the CPU.

    Args:
        sparse: the matrix of the equations to come, as sparse rows, where these are faster.
    """

    sparse: SparseRows | None = None
    name = "numba"
    projects: ClassVar[tuple[torch.dtype, ...]] = DTYPES  # whose rows a kernel projects

    def why_not(self, spec: AffineSpec, factors: Factors) -> str:
        """Says why an equation has no kernel, or none yet; empty if it has one."""
        reason = transform_why_not() or self.no_kernel(spec, factors)
        return reason or not_compiled_yet(MODEL, spec, factors[0].dtype)

    @property
    def is_compiling(self) -> bool:
        """Whether kernels are being compiled, so that it may soon solve what it refuses now."""
        return is_compiling()

    def no_kernel(self, spec: AffineSpec, factors: Factors) -> str:
        """Says the same of an equation inside an operator of torch, which transforms do not enter."""
        A = factors[0]
        key = "no kernel of numba", len(factors), A.dim(), A.dtype, A.device
        reason: str | None = spec.prepared.get(key)
        if reason is None:
            reason = unsupported(spec, factors) or tensor_why_not(A) or installation_why_not()
            spec.prepared[key] = reason
        return reason

    def describe(self, spec: AffineSpec, factors: Factors) -> str:
        """Says which solvers are used."""
        solver, n = type(spec.forward.solver).__name__, factors[0].shape[0]
        passes = _passes(spec, n, factors[0].dtype)
        if not passes.forward_hands_over:
            return solver
        return f"{solver}, after {passes.forward.max_steps} steps Newton for samples that are not finished"

    def solve(
        self, spec: AffineSpec, factors: Factors, v: Tensor, x0: Tensor | None = None, *,
        context: Tensor | None = None, trace: bool = False,
    ) -> Iterates:  # fmt: skip
        """Solves the forward equation."""
        A = factors[0] if self.sparse is None else self.sparse if spec.automatic else self.sparse.plain
        return self._forward(spec, A, v, x0, trace=trace)

    def _forward(self, spec: AffineSpec, A: Matrix, v: Tensor, x0: Tensor | None, *, trace: bool) -> Iterates:
        iterates = run_kernel(A, v, None, x0, _passes(spec, v.shape[1], v.dtype).forward, trace=trace)
        return self._finish_forward(spec, A, v, iterates)

    def _finish_forward(self, spec: AffineSpec, A: Matrix, v: Tensor, iterates: Iterates) -> Iterates:
        """Hands samples that are not finished over to Newton's method, where that was planned."""
        passes = _passes(spec, v.shape[1], v.dtype)
        if isinstance(A, Tensor) and passes.forward_hands_over:
            iterates = finish_directly(A, v, None, iterates, passes.forward)
        if iterates.worst < Status.MAX_STEPS or not passes.forward_hands_over:
            return iterates
        dense = A.to_dense() if isinstance(A, SparseRows) else A
        f, limit = AffineMap((dense,), v, spec.activation), passes.forward.max_steps
        return newton_handover(f, iterates, spec.forward.stop, limit, spec.forward.max_steps)

    def adjoint(
        self, spec: AffineSpec, factors: Factors, g: Tensor, *, slope: Tensor | None = None,
        z: Tensor | None = None, start: Tensor | None = None, trace: bool = False,
    ) -> Iterates:  # fmt: skip
        """Solves the backward equation; samples that are slow are factorised."""
        M, passes, g = factors[0], _passes(spec, g.shape[1], g.dtype), g.contiguous()
        if slope is None:
            assert z is not None
            d, offset, scale = torch.empty_like(z), torch.empty_like(z), z.new_empty(z.shape[0], 1)
            arrays = d.numpy(), offset.numpy(), scale.numpy()
            kernels().prepare_adjoint(z.contiguous().numpy(), g.numpy(), *passes.kind, *arrays)
        else:
            d, scale = slope.contiguous(), row_scale(g)
            offset = d * g / scale
        y0 = None if start is None else start / scale
        iterates = run_kernel(M, offset, d, y0, passes.backward, trace=trace)
        return self._finish_adjoint(spec, M, d, offset, scale, iterates)

    def _finish_adjoint(
        self, spec: AffineSpec, M: Tensor, d: Tensor, offset: Tensor, scale: Tensor, iterates: Iterates
    ) -> Iterates:
        """Factorises the systems of samples that are not finished, and undoes the scaling of g."""
        passes = _passes(spec, d.shape[1], d.dtype)
        if passes.backward_hands_over:
            iterates = finish_directly(M.mT, offset, d, iterates, passes.backward)
        if iterates.worst >= Status.MAX_STEPS and passes.backward_hands_over:
            f, limit = TransposedMap((M,), d, offset, 1.0), passes.backward.max_steps
            iterates = newton_handover(f, iterates, spec.backward.stop, limit, spec.backward.max_steps)
        iterates.value.mul_(scale)  # not shared yet
        return iterates

    # One node of the graph for a whole model, in `kernels.layer`.

    def threads(self, work: int) -> contextlib.AbstractContextManager[None]:
        """Runs small products on the calling thread."""
        return few_threads(work)

    def project_rows(self, W: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        """Projects rows on the l1 ball; returns A and what the backward pass needs."""
        W, shape, eps = W.contiguous(), tuple(W.shape), EPS[W.dtype]
        P, levels = torch.empty(shape, dtype=W.dtype), torch.empty(shape[0], dtype=W.dtype)
        addresses = W.data_ptr(), P.data_ptr(), levels.data_ptr()
        kernels("projection").project(*addresses, shape, NO_NUMBERS[W.dtype], radius, eps)
        return P, levels

    def project_rows_backward(self, W: Tensor, levels: Tensor, g: Tensor) -> Tensor:
        """Returns the gradient by W from that by A."""
        W, g, shape, eps = W.contiguous(), g.contiguous(), tuple(W.shape), EPS[W.dtype]
        gradient = torch.empty(shape, dtype=W.dtype)
        addresses = W.data_ptr(), levels.data_ptr(), g.data_ptr(), gradient.data_ptr()
        kernels("projection").project_backward(*addresses, shape, NO_NUMBERS[W.dtype], eps)
        return gradient

    def begin(self, spec: AffineSpec, radius: float | None, W: Matrix, v: Tensor, *, saves: bool) -> Finished:
        """Solves the equation of a model and reports failures; rows of W are projected where there is a radius."""
        A = levels = W.plain if isinstance(W, SparseRows) and not spec.automatic else W
        if radius is not None and isinstance(W, Tensor):
            A, levels = self.project_rows(W, radius)
        iterates = self._forward(spec, A, v, None, trace=False)
        return self._report(iterates, (A, levels, v), spec.forward, "equilibrium")

    def begin_adjoint(self, spec: AffineSpec, saved: Sequence[Tensor], x: Tensor, g: Tensor) -> Finished:
        """Solves the backward equation of a model and reports failures."""
        A, _, v = saved
        iterates = self.adjoint(spec, (A.t(),), g, z=torch.addmm(v, x, A.t()))
        return self._report(iterates, (), spec.backward, "adjoint solve")

    # A small model in one call each way.

    def fuses(self, tensors: Sequence[Any]) -> bool:
        """Tells whether a model with these tensors is small enough for `forward_layer` and `backward_layer`."""
        (batch, inputs), (outputs, states) = tensors[0].shape, tensors[3].shape
        return batch * max(states, inputs) * max(states, outputs) <= FUSED

    def forward_layer(self, spec: AffineSpec, radius: float, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Computes the outputs of a small model, checks its values and reports failures.

        Returns:
            the outputs, and what `backward_layer` needs: x, v, A and what its projection left.

        Raises:
            NotFiniteError: inputs or weights of the states hold NaN or infinity, or there are no samples.
        """
        u, _, _, C, D, _ = tensors
        (batch, p), (q, n), dtype, options = u.shape, C.shape, u.dtype, spec.forward
        plan, sizes = _plan_layer(spec, n, dtype), (batch, n, p, q)
        y, saved = torch.empty(batch, q, dtype=dtype), torch.empty((2 * batch + n + 1) * n, dtype=dtype)
        outcome, work = run_fused(plan, plan.forward, sizes, radius, tensors, NO_GRADIENTS, y, saved)
        if outcome < Status.MAX_STEPS:
            return y, saved
        x, v, A = saved_matrices(saved, batch, n)
        if outcome < kernels("layer").OUTPUTS:
            iterates = _iterates(work, lambda: (A, v, None), x, plan.passes.forward)
            iterates = self._finish_forward(spec, A, v, iterates)
            report(iterates, options.on_failure, solve="equilibrium", max_steps=options.max_steps)
            x.copy_(iterates.value)
            y = F.linear(x, C) if D is None else F.linear(x, C) + F.linear(u, D)
        report_outputs(y, x, options.on_failure)
        return y, saved

    def backward_layer(
        self, spec: AffineSpec, radius: float, tensors: Sequence[Any], saved: Tensor, g: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """Computes the gradients of a small model, as far as they are needed, and reports failures."""
        u, W, B, C, D, _ = tensors
        (batch, p), (q, n), options, g = u.shape, C.shape, spec.backward, g.contiguous()
        plan, sizes = _plan_layer(spec, n, g.dtype), (batch, n, p, q)
        gradients = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else None
            for tensor, need in zip(tensors, needs, strict=True)
        ]
        outcome, work = run_fused(plan, plan.backward, sizes, radius, tensors, gradients, g, saved)
        if outcome < Status.MAX_STEPS:
            return gradients
        (x, _, A), levels = saved_matrices(saved, batch, n), saved[-n:]
        offset, d, y, scale = adjoint_parts(work, batch, n, g.dtype)
        iterates = _iterates(work, lambda: (A.t(), offset, d), y, plan.passes.backward)
        iterates = self._finish_adjoint(spec, A.t(), d, offset, scale, iterates)
        report(iterates, options.on_failure, solve="adjoint solve", max_steps=options.max_steps)
        y, products = iterates.value, list[Callable[[], Tensor]]()
        products += [lambda: torch.mm(y, B) if D is None else torch.addmm(torch.mm(g, D), y, B)]
        products += [lambda: self.project_rows_backward(W, levels, torch.mm(y.t(), x))]
        products += [lambda: y.t() @ u, lambda: g.t() @ x, lambda: g.t() @ u, lambda: y.sum(0)]
        return [product() if need else None for product, need in zip(products, needs, strict=True)]

    def norm(self, A: Tensor) -> float:
        """Returns ``|A|_inf``, NaN where A holds it."""
        A = A.contiguous()
        return float(kernels("layer").largest_row_sum(A.data_ptr(), tuple(A.shape), NO_NUMBERS[A.dtype]))

    def accepts(self, spec: AffineSpec, x: Tensor, fx: Tensor) -> bool:
        """Tells whether the kernel would accept all points from these images, given a tolerance."""
        kernel = _passes(spec, x.shape[1], x.dtype).forward
        if kernel.rule not in (TOLERANCE, CHECKED, POINT) or not (x.is_contiguous() and fx.is_contiguous()):
            return False
        numbers = plan_kernel(kernel, x.shape[1], x.dtype).parameters
        return bool(kernels("layer").accepts(x.data_ptr(), fx.data_ptr(), tuple(x.shape), numbers))

    # A small equation alone: a model whose inputs are v and whose outputs are its states.

    def solve_small(self, spec: AffineSpec, A: Tensor, v: Tensor) -> tuple[Iterates, Tensor]:
        """Solves a small equation from zero; returns also what `adjoint_small` needs.

        Raises:
            NotFiniteError: as `forward_layer`.
        """
        (batch, n), plan = v.shape, _plan_layer(spec, v.shape[1], v.dtype)
        saved, sizes = torch.empty((2 * batch + n + 1) * n, dtype=v.dtype), (batch, n, n, n)
        # Not part of `saved`: whoever writes the value to a file would write the whole buffer.
        value, tensors = torch.empty(batch, n, dtype=v.dtype), (v, A, None, None, None, None)
        counts = torch.empty(batch, dtype=torch.int64), torch.empty(batch, dtype=torch.int8)
        rest = plan.forward, sizes, math.inf, tensors, NO_GRADIENTS, value, saved
        outcome, _ = run_fused(plan, *rest, counts)

        def trace() -> Tensor:
            _, v, A = saved_matrices(saved, batch, n)
            return run_kernel(A, v, None, None, plan.passes.forward, trace=True).residuals

        steps, status = counts
        return Iterates(value, status, steps, trace, outcome), saved

    def adjoint_small(
        self, spec: AffineSpec, saved: Tensor, g: Tensor, by_matrix: bool
    ) -> tuple[Tensor, Tensor | None, int, Callable[[], Iterates]]:  # fmt: skip
        """Solves the backward equation of `solve_small`.

        Returns:
            the gradient by v, that by A if it is wanted, the largest status, and what makes the iterates
            ``w = A'dw + g`` on scaled rows of g, which few ask for.
        """
        (batch, n), plan, g = g.shape, _plan_layer(spec, g.shape[1], g.dtype), g.contiguous()
        by_v, by_A = torch.empty_like(g), g.new_empty(n, n) if by_matrix else None
        tensors, wanted = (saved, saved[2 * batch * n :], *4 * [None]), (by_v, by_A, *4 * [None])
        outcome, work = run_fused(plan, plan.backward, (batch, n, n, n), math.inf, tensors, wanted, g, saved)
        if outcome >= Status.MAX_STEPS:  # products were not computed
            *_, y, scale = adjoint_parts(work, batch, n, g.dtype)
            torch.mul(y, scale, out=by_v)
            by_A = by_v.t() @ saved_matrices(saved, batch, n)[0] if by_matrix else None

        def iterates() -> Iterates:
            A = saved_matrices(saved, batch, n)[2]
            offset, d, _, scale = adjoint_parts(work, batch, n, g.dtype)
            w = torch.addmm(g, by_v, A).div_(scale)
            return _iterates(work, lambda: (A.t(), offset, d), w, plan.passes.backward, outcome)

        return by_v, by_A, outcome, iterates

    def _report(self, iterates: Iterates, saved: tuple[Any, ...], options: SolveOptions, solve: str) -> Finished:
        if iterates.worst >= Status.MAX_STEPS:
            report(iterates, options.on_failure, solve=solve, max_steps=options.max_steps)
        return Finished(iterates.value, saved, options.on_failure)

    # Sequences, in `kernels.sequence`.

    def sequence_why_not(self, spec: AffineSpec, factors: Factors, hidden: int, batch: int) -> str:
        """Says why sequences have no kernel; empty if they have one."""
        reason = common_why_not(spec, factors, batch) or tensor_why_not(factors[0]) or installation_why_not()
        return reason or not_compiled_yet(SEQUENCE, spec, factors[0].dtype)

    def sequence_forward(
        self, spec: SequenceSpec, data: Tensor, h0: Tensor, cell: CellMatrices, *, keep: bool
    ) -> tuple[SequenceResult, Tensor, Tensor]:
        """Solves from the first time to the last; see `SequenceEngine`."""
        (n, both), (h, elements), options = cell.B.shape, (cell.C.shape[0], data.shape[0]), spec.affine.forward
        kernel, hidden = _sequence_passes(spec.affine, n, data.dtype).forward, data.new_empty(elements, h)
        known, images = columns(n + both, elements, data), None
        if keep or spec.trace:
            images = columns(n + 1, elements, data)  # the last row has residuals
        given = _contiguous(*cell, data, h0)
        loop, rest = kernels("sequence").forward, (spec.warm_start,)
        status, steps, worst = _run_times(loop, spec, cell, kernel, (*given, known, images, hidden), rest)
        states = known[:n].mT

        def retrace(turn: int) -> Tensor:
            rows = spec.rows(spec.times[turn])
            v = F.linear(known[n:, rows].mT, cell.B, cell.bias)
            start = torch.zeros_like(v)
            if turn > 0 and spec.warm_start:
                before = states[spec.rows(spec.times[turn - 1])][: len(start)]
                start[: len(before)] = before
            return run_kernel(cell.A, v, None, start, kernel, trace=True).residuals

        iterates = Iterates(states, status, steps, data.new_zeros, worst)
        spec.report_times(range(len(spec.sizes)), "equilibrium", iterates, options, retrace)
        residual = data.new_empty(0) if images is None or not spec.trace else images[n]
        last = hidden[spec.last_rows()].clone()
        result = SequenceResult(hidden, last, states, status, steps, residual)
        return result, known, known[:0] if images is None else images[:n]

    def sequence_backward(
        self, spec: SequenceSpec, images: Tensor, known: Tensor, gradients: tuple[Tensor | None, ...],
        cell: CellMatrices,
    ) -> tuple[Tensor, Tensor, Callable[[], None]]:  # fmt: skip
        """Solves from the last time to the first; see `SequenceEngine`."""
        options, (n, elements), outer = spec.affine.backward, images.shape, gradients[2]
        adjoint = columns(n + cell.C.shape[0], elements, known)
        passes = _sequence_passes(spec.affine, n, adjoint.dtype)
        kernel, kind = passes.backward, passes.kind
        first = adjoint.new_empty(spec.sizes[0], adjoint.shape[0] - n)
        given = *_contiguous(*cell[:4]), images, *_contiguous(*gradients)
        loop, rest = kernels("sequence").backward, (*kind, passes.backward_hands_over)
        status, steps, worst = _run_times(loop, spec, cell, kernel, (*given, adjoint, first), rest)

        def retrace(turn: int) -> Tensor:
            rows = spec.rows(spec.times[turn])
            g = adjoint[n:, rows].mT @ cell.C + (0 if outer is None else outer[rows])
            d, scale = slopes(*kind, images[:, rows].mT), row_scale(g)
            return run_kernel(cell.A.mT, d * g / scale, d, None, kernel, trace=True).residuals

        turns = range(len(spec.sizes) - 1, -1, -1)
        iterates = Iterates(adjoint[:n].mT, status, steps, adjoint.new_zeros, worst)
        spec.report_times(turns, "adjoint solve", iterates, options, retrace)
        return adjoint, first, lambda: None  # solves on the CPU are finished


class LayerPlan(NamedTuple):
    """What `cpu.layer` takes besides tensors, for a model of some size."""

    passes: Passes
    work: int  # bytes of its buffer without samples
    sample: int  # bytes of a sample
    forward: tuple[Any, ...]
    backward: tuple[Any, ...]


def _plan_layer(spec: AffineSpec, n: int, dtype: torch.dtype) -> LayerPlan:
    key = "layer of numba", n, dtype
    known: LayerPlan | None = spec.prepared.get(key)
    if known is not None:
        return known
    passes = _passes(spec, n, dtype)
    plans = [plan_kernel(kernel, n, dtype) for kernel in (passes.forward, passes.backward)]
    size = max(plan.space.size for plan in plans)
    work = kernels("layer").work_bytes(n, size, plans[0].space.width, dtype.itemsize)
    rest = [(plan.space.slots, plan.layout, plan.parameters, *passes.kind) for plan in plans]
    known = spec.prepared[key] = LayerPlan(passes, *work, *rest)
    return known


def run_fused(
    plan: LayerPlan, rest: tuple[Any, ...], sizes: tuple[int, ...], radius: float, tensors: Sequence[Any],
    gradients: Sequence[Any], y: Tensor, saved: Tensor, counts: Sequence[Tensor] = (),
) -> tuple[int, Tensor]:  # fmt: skip
    """Calls `cpu.layer.layer`; returns what it returns, and its buffer `work`, where steps and statuses begin it.

    Args:
        counts: where steps and statuses are to be written instead.
    """
    tensors = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    work = torch.empty(plan.work + sizes[0] * plan.sample, dtype=torch.uint8)
    given = tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    wanted = tuple([0 if tensor is None else tensor.data_ptr() for tensor in gradients])
    start, backward = work.data_ptr(), gradients is not NO_GRADIENTS
    reports = (start, start + 8 * sizes[0]) if not counts else (counts[0].data_ptr(), counts[1].data_ptr())
    buffers = y.data_ptr(), saved.data_ptr(), start, reports
    outcome = kernels("layer").layer(backward, given, wanted, *buffers, sizes, *rest, radius)
    if outcome < 0:
        raise NotFiniteError
    return outcome, work


def saved_matrices(saved: Tensor, batch: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the states, v and A that `cpu.layer` has saved."""
    x, v, A, _ = saved.view(-1, n).split([batch, batch, n, 1])
    return x, v, A


def adjoint_parts(work: Tensor, batch: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns offset, d and y of the backward solve inside `cpu.layer`, and what the rows were scaled by."""
    start, size = kernels("layer").aligned(9 * batch), batch * (3 * n + 1) * dtype.itemsize
    parts = work[start : start + size].view(dtype).split([batch * n] * 3 + [batch])
    return [part.view(batch, -1) for part in parts]


def _iterates(
    work: Tensor, equation: Callable[[], tuple[Tensor, Tensor, Tensor | None]], value: Tensor, spec: KernelSpec,
    worst: int = Status.NONFINITE,
) -> Iterates:  # fmt: skip
    """Returns the result of the solve inside `cpu.layer` of the equation with some A, v and d."""

    def retrace() -> Tensor:
        A, v, d = equation()
        return run_kernel(A, v, d, None, spec, trace=True).residuals

    batch = len(value)
    status, steps = work[8 * batch : 9 * batch].view(torch.int8), work[: 8 * batch].view(torch.int64)
    return Iterates(value, status.clone(), steps.clone(), retrace, worst)  # `work` is not kept


def row_stride(elements: int, itemsize: int) -> int:
    """Returns how far rows of elements are apart in memory.

    It is an odd number of cache lines: at powers of two rows would evict each other from the cache.

    Example:
        >>> row_stride(32, 4)
        48
    """
    line = 64 // itemsize
    return ((elements + line - 1) // line | 1) * line


def columns(rows: int, elements: int, like: Tensor) -> Tensor:
    """Allocates rows with one column an element."""
    return like.new_empty(rows, row_stride(elements, like.element_size()))[:, :elements]


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _run_times(
    loop: Callable[..., int], spec: SequenceSpec, cell: CellMatrices, kernel: KernelSpec,
    tensors: Sequence[Tensor | None], rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """Runs a loop over all times, with sequences split among threads.

    Returns:
        statuses, steps, and the largest status.

    Args:
        loop: forward or backward.
        spec, cell: what is computed.
        kernel: how a time is solved.
        tensors: without gaps, or from `columns`.
        rest: of the arguments of the loop.
    """
    (n, both), h, batch, elements = cell.B.shape, cell.C.shape[0], spec.sizes[0], int(spec.offsets[-1])
    dtype = cell.B.dtype
    plan = plan_kernel(kernel, n, dtype)
    rows, width = _sequence_rows(n, both, h, plan.space), plan.space.width
    status, steps = torch.empty(elements, dtype=torch.int8), torch.empty(elements, dtype=torch.int64)
    addresses = tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    sizes = n, both - h, h, batch, elements, row_stride(elements, dtype.itemsize)
    how = plan.space.slots, plan.layout, rows, plan.parameters, spec.offsets, spec.backwards

    def run_range(low: int, high: int) -> int:
        # torch aligns it to vectors; a lane has two whole numbers of eight bytes
        work = torch.empty(rows[4] + rows[5] + 16 // dtype.itemsize * width, dtype=dtype)
        pointers = status.data_ptr(), steps.data_ptr(), work.data_ptr()
        worst: int = loop(addresses, sizes, *rest, *pointers, *how, low, high)
        return worst

    return status, steps, run_threads(run_range, batch, width, elements * n * n)


@functools.lru_cache(maxsize=256)
def _sequence_rows(n: int, both: int, h: int, space: Workspace) -> tuple[int, ...]:
    """Returns the rows of `kernels.cpu.sequence`, where they end, and the size of packed matrices."""
    ends = np.cumsum([space.size, *(rows * space.width for rows in (n + both, n + 1, h, 1))]).tolist()
    matrices = (n + h + 2 * kernels().ROWS) * (n + both)
    return *ends, -(-matrices // space.width) * space.width
