"""Repeated solves on a CUDA device: steps captured as CUDA graphs and replayed in place of the loop.

`Program` is the loop with masks instead of branches, in chunks of a few steps: what a CUDA graph can hold.
`CapturedSolve` is one equation of fixed shapes as CUDA graphs: buffers to copy into, and a graph for every chunk.
`GraphLoop` replaces the loop and captures an equation that comes again; `why_not` says why one cannot be captured.
"""

import contextlib
import functools
import gc
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor

from wellposed.equilibrium.gradients import LinearMap, vector_jacobian
from wellposed.equilibrium.loop import PERIOD, RUN_OFF, Iterates, flat_rows, iterate
from wellposed.equilibrium.maps import FunctionMap, Map, State, piece_norms
from wellposed.equilibrium.method import Loop
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Newton, Solver
from wellposed.equilibrium.stopping import Absolute, Relative, Settled, Step, Stopping
from wellposed.equilibrium.tracing import no_host_reads, under_transform
from wellposed.errors import InputError

CHUNK = 4  # steps between two reads of the results


class Program:
    """Does what `iterate` does but reads no value on the host: every sample is computed until all are finished.

    Steps are taken in chunks whose lengths are known beforehand, and judged at the end of a chunk. A sample's
    result is that of the first step that its rule accepts, stored in buffers of fixed address; later values of its
    row are ignored. The number of a step is part of the program: a chunk is for its own steps only.

    Args:
        f: the map.
        x: where to start, ``(B, n)``.
        memo: what ``stop.begin(x)`` returned.
        solver, stop, max_steps: as in `iterate`.
        chunk: steps of a chunk, at most.
    """

    def __init__(
        self,
        f: Map,
        x: Tensor,
        memo: tuple[Tensor, ...],
        solver: Solver,
        stop: Stopping,
        max_steps: int,
        chunk: int = CHUNK,
    ) -> None:
        self.f, self.solver, self.stop, self.max_steps, self.chunk = f, solver, stop, max_steps, chunk
        self.index, self.x, self.memo = 0, x, memo
        self.fx: Tensor | None = None
        self.state: tuple[Tensor, ...] = ()
        self.first: Tensor | None = None  # as in the loop
        self.reach: tuple[Tensor, Tensor] | None = None  # as in the loop, the first times RUN_OFF
        self.by_norms = isinstance(stop, Absolute | Settled) or (isinstance(stop, Relative) and stop.norm == "inf")
        self.value = torch.empty_like(x)
        self.status = torch.zeros(x.shape[0], dtype=torch.int8, device=x.device)
        self.steps = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)  # 0: not finished
        self.trace = x.new_empty(max_steps, x.shape[0])
        self.since = self.steps  # as in the loop
        self.record = torch.zeros(3, dtype=torch.int64, device=x.device)  # least and most steps, largest status

    @property
    def ends(self) -> bool:
        """Whether the last step has been taken."""
        return self.index >= self.max_steps

    @torch.no_grad()
    def advance(self) -> None:
        """Takes the steps of the next chunk and records the samples that finished in it."""
        begin = self.index
        end = min(begin + self.chunk, self.max_steps, begin - begin % PERIOD + PERIOD)
        with no_host_reads():
            if begin == 0:
                self.status.zero_()
                self.steps.zero_()
                self.state = self.solver.init(self.x)
                self.since = torch.zeros_like(self.steps)
            taken, values, verdicts, sizes = [], [], [], []
            for index in range(begin, end):  # all of them, whichever samples are finished
                step, norms = self._take(index)
                taken.append(step)
                sizes += norms
                if not self.by_norms:
                    step = replace(step, residual=step.residual.amax(-1))
                    verdict, self.memo = self.stop.check(step, self.memo)
                    verdicts.append(verdict)
                values.append(self.stop.accept(step, self.memo))
            self.index = end
            residuals, before, after = torch.stack(sizes).amax(-1).unflatten(0, (-1, 3)).unbind(1)  # (K, B) each
            self.trace[begin:end] = residuals
            if self.by_norms:  # rows of one number have the norms that the rule asks for
                stacked = Step(before[..., None], after[..., None], self.f, residuals, begin, self.first)
                event = self.stop.check(stacked, ())[0]
            else:
                event = torch.stack(verdicts)
            self._record_finished(begin, taken[-1], event, residuals, before, values)
            torch.stack([*self.steps.aminmax(), self.status.amax().long()], out=self.record)

    def _take(self, index: int) -> tuple[Step, list[Tensor]]:
        """Takes one step; returns it, its residual still in pieces, and the norms of ``f(x) - x``, x and f(x)."""
        old = self.fx
        if old is not None:
            self.x, self.state = self.solver.step(self.f, self.x, old, self.state)
        if old is None or self.x is not old:
            self.size = piece_norms(self.x)
        self.fx = self.f(self.x)
        residual, before, self.size = piece_norms(self.fx - self.x), self.size, piece_norms(self.fx)
        if index == 0 and self.f.may_decay:
            self.first = residual.amax(-1)
        return Step(self.x, self.fx, self.f, residual, index, self.first), [residual, before, self.size]

    def _record_finished(
        self, begin: int, last: Step, event: Tensor, residuals: Tensor, sizes: Tensor, values: list[Tensor]
    ) -> None:
        """Writes the results of samples that finished in a chunk; those of earlier chunks stay as they are."""
        finite = residuals < torch.inf
        event, astray = event | ~finite, None
        if self.stop.certifies:
            astray = self._runs_off(residuals, sizes, finite)
            event = event & ~astray
        event = event & (self.steps == 0)
        first = event & (event.cumsum(0) == 1)  # (K, B)
        for chosen, value in zip(first, values, strict=True):
            _masked_copy(chosen, value, self.value)
        accepted = Status.CONVERGED if self.stop.certifies else Status.STEPS_DONE
        status = (first * (int(Status.NONFINITE) - finite * int(Status.NONFINITE - accepted))).sum(0)
        numbers = torch.arange(begin + 1, self.index + 1, device=first.device)[:, None]
        self.status += status.to(torch.int8)
        self.steps += (first * numbers).sum(0)
        if astray is not None and self.index % PERIOD == 0:
            self._stagnate(replace(last, residual=residuals[-1]), astray[-1], values[-1])
        if self.ends:
            grown = residuals[-1] > 1e3 * self.trace[0]
            level = residuals[-1] <= 4 * self.f.rounding(last.x, last.fx)
            status = torch.where(level & (self.since > 0), int(Status.STAGNATED), grown + int(Status.MAX_STEPS))
            self._close(self.steps == 0, status, values[-1])

    def _close(self, rows: Tensor, status: Tensor, value: Tensor) -> None:
        """Ends samples that no stopping rule has accepted, at the last step of a chunk."""
        _masked_copy(rows, value, self.value)
        self.status += (rows * status).to(torch.int8)
        self.steps += rows * self.index

    def _runs_off(self, residuals: Tensor, sizes: Tensor, finite: Tensor) -> Tensor:  # (K, B)
        """Marks iterates whose residual is small only beside a state that has grown beyond all measure."""
        start, largest = self.reach or (RUN_OFF * sizes[0], residuals[0])
        history = torch.cat([largest[None], residuals.masked_fill(~finite, 0)])
        peaks = history.cummax(0).values  # (K + 1, B)
        beyond = sizes > torch.add(start, peaks[:-1], alpha=RUN_OFF)
        beyond = beyond.cumsum(0) > 0  # a sample that has left stays away until the chunk ends
        peaks = history.masked_fill(torch.cat([beyond[:1] & False, beyond]), 0).cummax(0).values
        self.reach = start, peaks[-1]
        resolved = torch.maximum(residuals, self.f.eps(self.x) * sizes)
        return (resolved > 0.1 * peaks[1:]) & finite & beyond

    def _stagnate(self, last: Step, astray: Tensor, value: Tensor) -> None:
        """Ends samples whose residual stopped falling at the rounding level of the map, as the loop does."""
        minima = self.trace[: self.index].unflatten(0, (-1, PERIOD)).amin(1)
        stuck = flat_rows(minima, len(minima), self.since) & (self.steps == 0)
        stuck = stuck & (last.residual <= 4 * self.f.rounding(last.x, last.fx)) & ~astray
        fresh = stuck & (self.since == 0)
        plain = self.solver.only_plain(self.state, fresh)
        if plain is not None:
            self.state, self.since = plain, torch.where(fresh, len(minima), self.since)
            stuck = stuck & ~fresh
        self._close(stuck, torch.full_like(self.status, int(Status.STAGNATED)), value)

    def result(self, most: int, worst: int) -> Iterates:
        """Copies the results out of the buffers, given what the record says of them."""
        steps = self.steps.clone()
        trace = self.trace[:most].mT
        after = torch.arange(most, device=trace.device) >= steps[:, None]
        trace = trace.masked_fill(after, torch.nan)
        return Iterates(self.value.clone(), self.status.clone(), steps, lambda: trace, worst)


def _masked_copy(rows: Tensor, value: Tensor, target: Tensor) -> None:
    """Writes some rows, in elements of 16 bytes if possible: a masked kernel takes time by the element."""
    numbers = 16 // value.element_size()
    if value.is_contiguous() and value.shape[1] % numbers == 0 and value.data_ptr() % 16 == 0:
        value, target = value.view(torch.complex128), target.view(torch.complex128)
    torch.where(rows[:, None], value, target, out=target)


@runtime_checkable
class Capturable(Protocol):
    """A function of state and inputs whose evaluations may be captured and replayed."""

    def __call__(self, x: State, *inputs: Tensor) -> State:
        """Evaluates the function."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Tensors that are new in every solve; all others are read at their fixed addresses."""

    def why_not(self) -> str:
        """Says why a replay would not do what the function does; empty if it would."""

    def fingerprint(self) -> Hashable:
        """Returns what must be the same for a replay: addresses and settings."""

    def with_weights(self, weights: tuple[Tensor, ...]) -> Self:
        """Returns the function with other weights."""

    def using_weights(self) -> AbstractContextManager[None]:
        """Makes evaluations inside the block read `weights`."""


class Linearisation(Map):
    """The map ``w -> J' w + g`` with J the derivative of `f` at `x`, taken at the first evaluation."""

    def __init__(self, f: Map, x: Tensor, offset: Tensor, eps: float) -> None:
        self.f, self.x, self.offset, self._eps = f, x, offset, eps
        self.linear: LinearMap | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.linear is None:
            with torch.enable_grad():
                point = self.x.detach().requires_grad_()
                self.linear = LinearMap(vector_jacobian(self.f(point), point), self.offset, self._eps)
        return self.linear(x)

    def eps(self, x: Tensor) -> float:
        return self._eps


def origin(f: Map) -> Map:
    """Returns the map itself, or the one of which it is a derivative."""
    return f.origin[0] if isinstance(f, LinearMap) and f.origin else f


def source(f: Map) -> tuple[FunctionMap, Capturable]:
    """Returns the map behind an equation and its function; for equations that pass `why_not`."""
    primal = cast(FunctionMap, origin(f))
    return primal, cast(Capturable, primal.function)


def solve_inputs(f: Map, x: Tensor, memo: tuple[Tensor, ...]) -> list[Tensor]:
    """Lists the tensors that are new in every solve."""
    primal, function = source(f)
    point = (f.offset, f.origin[1]) if isinstance(f, LinearMap) and f.origin else ()
    tensors = [x, *point, *memo, *primal.inputs, *function.weights]
    return [tensor.detach() for tensor in tensors]


def rebuild(f: Map, buffers: list[Tensor], memo: int) -> tuple[Map, Tensor, tuple[Tensor, ...], Capturable]:
    """Returns the map, the start, the memo and the function that read buffers in the order of `solve_inputs`."""
    (primal, capturable), rest = source(f), list(buffers)
    take = lambda count: tuple(rest.pop(0) for _ in range(count))  # noqa: E731
    (x,), point = take(1), take(2 if f is not primal else 0)
    memo_buffers, inputs = take(memo), take(len(primal.inputs))
    function = capturable.with_weights(tuple(rest))
    static: Map = FunctionMap(function, inputs, primal.packing, primal.precision)
    if point:
        static = Linearisation(static, point[1], point[0], f.eps(x))
    return static, x, memo_buffers, function


class CapturedSolve:
    """Solves one kind of equation by replays; a chunk is captured when it is first needed.

    All graphs share one memory pool: they are captured and replayed in the same order. The number of chunks of the
    latest solve says when to read results first: one chunk before it ended, since reading synchronises.
    """

    def __init__(self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, chunk: int) -> None:
        memo = stop.begin(x)
        self.buffers = [torch.empty_like(tensor) for tensor in solve_inputs(f, x, memo)]
        torch._foreach_copy_(self.buffers, solve_inputs(f, x, memo))
        static, start, memo_buffers, self.function = rebuild(f, self.buffers, len(memo))
        self.program = Program(static, start, memo_buffers, solver, stop, max_steps, chunk)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.stream, self.pool = torch.cuda.Stream(x.device), torch.cuda.graph_pool_handle()
        self.host_record = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self.event, self.expected, self.steps = torch.cuda.Event(), 1, 0
        warm_up = rebuild(f, self.buffers, len(memo))
        self._warm_up(Program(*warm_up[:3], solver, stop, max_steps, chunk))

    def _warm_up(self, program: Program) -> None:
        """Takes a few steps on the capture stream: libraries allocate at their first use."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), self.function.using_weights(), _fresh_casts():
            program.advance()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.stream.synchronize()

    def solve(self, f: Map, x: Tensor, stop: Stopping) -> Iterates:
        """Solves an equation that differs from that of the capture in values only."""
        torch._foreach_copy_(self.buffers, solve_inputs(f, x, stop.begin(x)))
        least, most, worst, chunk = 0, 0, 0, 0
        while least == 0:  # `chunk` graphs have been replayed; the record was not read, or a sample is running
            if chunk == len(self.graphs):
                self.graphs.append(self._capture())
            self.graphs[chunk].replay()
            chunk += 1
            if chunk >= self.expected or (self.program.ends and chunk == len(self.graphs)):
                least, most, worst = self._synchronise()
        self.expected, self.steps = max(1, chunk - 1), most
        return self.program.result(most, worst)

    def _synchronise(self) -> list[int]:
        """Waits for the record of the latest chunk; its least number of steps is 0 while a sample is running."""
        self.host_record.copy_(self.program.record, non_blocking=True)
        self.event.record()
        self.event.synchronize()
        return self.host_record.tolist()

    def _capture(self) -> torch.cuda.CUDAGraph:
        with self.function.using_weights():
            return capture(self.program.advance, self.stream, self.pool)


def capture(run: Callable[[], object], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """Captures on a stream of its own what a function launches; the function must not wait for the device."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream), _no_collection(), _fresh_casts():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            _recover(stream.device)
            raise
    return graph


def _recover(device: torch.device) -> None:
    """Captures something that cannot fail: after a failed capture random generators still wait for its end."""
    graph, stream, one = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), torch.zeros(1, device=device)
    with torch.cuda.stream(stream), contextlib.suppress(RuntimeError):
        graph.capture_begin(capture_error_mode="thread_local")
        one.zero_()
        graph.capture_end()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector from freeing device memory in the middle of a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _fresh_casts() -> Iterator[None]:
    """Makes autocast convert weights again: a graph must not read a conversion made outside it."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


GRAPH_EXECUTORS = ("auto", "graph", "reference")
REMEMBERED = 256  # kinds of equations whose solves are counted
RECAPTURE_AFTER = 8  # solves of a kind whose graphs were dropped, before it is captured again


def check_graph_executor(executor: str) -> None:
    """Raises unless an executor of this name exists.

    Example:
        >>> check_graph_executor("auto")
    """
    if executor not in GRAPH_EXECUTORS:
        raise InputError(f"executor must be one of {', '.join(GRAPH_EXECUTORS)}; received {executor!r}")


class GraphLoop:
    """Solves like `iterate`, by CUDA graphs when an equation comes again with the same shapes and settings.

    The first solve of a kind runs without a capture and checks whether anything synchronises with the device or
    draws random numbers; the second captures chunks of steps, later ones replay them. Weights are read at their
    addresses, so an optimiser may change them in place; a weight that has moved makes another kind. What cannot be
    captured runs in the plain loop, and `explain` says why.

    Args:
        chunk: steps between two reads of the results.
        keep: how many kinds of equations have graphs, the most recently used.

    Example:
        >>> from wellposed.equilibrium import Picard, Relative
        >>> from wellposed.equilibrium.gradients import LinearMap
        >>> loop, x = GraphLoop(), torch.zeros(1, 1)
        >>> _ = loop(LinearMap(lambda x: 0.5 * x, x + 1, 1e-7), x, Picard(), Relative(), 100)
        >>> print(loop.explain("auto", x))
        reference: the plain loop
        not graph: the state is on the cpu, and graphs are for CUDA devices
    """

    def __init__(self, chunk: int = CHUNK, keep: int = 6) -> None:
        self.chunk, self.keep = chunk, keep
        self.captured: OrderedDict[Hashable, CapturedSolve] = OrderedDict()
        self.reasons: OrderedDict[Hashable, str] = OrderedDict()
        self.solve_counts: OrderedDict[Hashable, int] = OrderedDict()
        self.latest: dict[str, str] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.chunk, self.keep)  # graphs cannot be copied; a copy begins without them

    def loop_for(self, executor: str) -> Loop:
        """Returns the loop that runs a solve for the name of an executor."""
        return iterate if executor == "reference" else functools.partial(self, strict=executor == "graph")

    def explain(self, executor: str, like: Tensor) -> str:
        """Says how the latest solves on the device of `like` were run, and why."""
        if executor == "reference":
            return 'reference: executor="reference" was asked for'
        if not like.is_cuda:
            where = f"the state is on the {like.device.type}, and graphs are for CUDA devices"
            return f"reference: the plain loop\nnot graph: {where}"
        solves = "; ".join(f"{kind} {text}" for kind, text in self.latest.items())
        return solves or "reference: the first solve of its kind, taken without a capture"

    def __call__(
        self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, *, strict: bool = False
    ) -> Iterates:
        kind = "forward" if origin(f) is f else "backward"
        iterates, text = None, why_not(f, x, solver)
        if not text:
            with self._lock:
                iterates, text = self._attempt(f, x, solver, stop, max_steps)
        self.latest[kind] = f"reference: {text}" if iterates is None else f"graph: {text}"
        if iterates is not None:
            return iterates
        if strict:
            raise InputError(f'executor="graph" cannot compute this {kind} solve: {text}; use executor="auto"')
        return iterate(f, x, solver, stop, max_steps)

    def _attempt(
        self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> tuple[Iterates | None, str]:
        """Returns the result of a replay or a trial run, None if neither is possible, and a text about it."""
        try:
            same = source(f)[1].fingerprint(), solver  # forward and backward: what one does, the other does
            kind = same, _solve_key(f, x, stop, max_steps)
            hash(kind)
        except (TypeError, AttributeError, RuntimeError) as error:
            return None, f"the equation cannot be recognised when it comes again: {error}"
        if same in self.reasons:
            return None, self.reasons[same]
        try:
            if kind in self.captured or self._count(kind) > 0:
                return self._replay(kind, f, x, solver, stop, max_steps)
            iterates, text = self._trial_run(f, x, solver, stop, max_steps)
        except Exception as error:  # whatever is wrong with the map itself, the plain loop will say
            self.captured.pop(kind, None)
            iterates, text = None, f"{type(error).__name__}: {error}".splitlines()[0]
        if iterates is None:
            self.reasons[same] = text
            while len(self.reasons) > REMEMBERED:
                self.reasons.popitem(last=False)
        return iterates, text

    def _count(self, kind: Hashable) -> int:
        """Counts solves of a kind before this one."""
        count = self.solve_counts.pop(kind, 0)
        self.solve_counts[kind] = count + 1
        while len(self.solve_counts) > REMEMBERED:
            self.solve_counts.popitem(last=False)
        return count

    def _replay(
        self, kind: Hashable, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> tuple[Iterates, str]:
        if kind not in self.captured:
            while len(self.captured) >= self.keep:
                evicted, _ = self.captured.popitem(last=False)
                self.solve_counts[evicted] = -RECAPTURE_AFTER
            self.captured[kind] = CapturedSolve(f, x, solver, stop, max_steps, self.chunk)
        entry = self.captured[kind]
        self.captured.move_to_end(kind)
        iterates = entry.solve(f, x, stop)
        return iterates, f"{entry.steps} steps in chunks of {self.chunk}, {len(entry.graphs)} chunks captured"

    def _trial_run(
        self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> tuple[Iterates | None, str]:
        """Runs the program without a capture and checks that the map can be captured."""
        memo = stop.begin(x)
        static, start, memo_buffers, function = rebuild(f, solve_inputs(f, x, memo), len(memo))
        program = Program(static, start, memo_buffers, solver, stop, max_steps, self.chunk)
        least, most, worst = 0, 0, 0
        while least == 0:
            before = _random_state(x.device)
            with function.using_weights(), _forbid_synchronisation():
                program.advance()
            if before != _random_state(x.device):
                return None, "the map draws random numbers, which makes every step another map"
            least, most, worst = program.record.tolist()
        return program.result(most, worst), "the first solve of its kind, taken without a capture"


def why_not(f: Map, x: Tensor, solver: Solver) -> str:
    """Says why an equation cannot be captured, whatever its values; empty if it may be."""
    if not x.is_cuda:
        return f"the state is on the {x.device.type}, and graphs are for CUDA devices"
    if torch.is_grad_enabled():
        return "the steps are to be differentiated"
    if under_transform() or torch.cuda.is_current_stream_capturing():
        return "inside a transform or a capture"
    if x.shape[0] == 0:
        return "the batch is empty"
    if isinstance(solver, Newton):
        return "solver Newton factorises matrices"
    primal = origin(f)
    if not isinstance(primal, FunctionMap) or not isinstance(primal.function, Capturable):
        return "the map is not the cell of a DEQ"
    return primal.function.why_not()


def _solve_key(f: Map, x: Tensor, stop: Stopping, max_steps: int) -> Hashable:
    """Returns what two equations of one map must share to be solved by the same graphs."""
    primal, _ = source(f)
    inputs = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in primal.inputs)
    stream = x.device, torch.cuda.current_stream(x.device).cuda_stream
    precision = (
        primal.precision,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
    )
    return primal is f, primal.packing, inputs, stream, precision, stop, max_steps


@contextlib.contextmanager
def _forbid_synchronisation() -> Iterator[None]:
    """Makes everything raise that would synchronise with the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _random_state(device: torch.device) -> tuple[bytes, bytes]:
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return states[0].numpy().tobytes(), states[1].numpy().tobytes()
