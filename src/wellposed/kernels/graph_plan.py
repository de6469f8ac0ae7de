"""One equation of fixed shapes as CUDA graphs: buffers to copy into, and a graph for every chunk of steps."""

import contextlib
import gc
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor

from wellposed.equilibrium.gradients import LinearMap, vector_jacobian
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.maps import FunctionMap, Map, State
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.kernels.graph_program import Program


@runtime_checkable
class Capturable(Protocol):
    """A function of state and inputs of which a captured program may be replayed."""

    def __call__(self, x: State, *inputs: Tensor) -> State:
        """Evaluates the function."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Tensors that are new in every solve; all others are read where they lie."""

    def problem(self) -> str:
        """Says why a replay would not do what the function does; nothing if it would."""

    def fingerprint(self) -> Hashable:
        """Returns what must be the same for a replay: addresses and settings."""

    def holding(self, weights: tuple[Tensor, ...]) -> Self:
        """Returns the function with other weights."""

    def reading(self) -> AbstractContextManager[None]:
        """Has evaluations in the block read `weights`."""


class Linearisation(Map):
    """The map ``w -> J' w + g`` with J the derivative of `f` at `x`, taken at the first evaluation."""

    def __init__(self, f: Map, x: Tensor, offset: Tensor, unit: float) -> None:
        self.f, self.x, self.offset, self._unit = f, x, offset, unit
        self.linear: LinearMap | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.linear is None:
            with torch.enable_grad():
                point = self.x.detach().requires_grad_()
                self.linear = LinearMap(vector_jacobian(self.f(point), point), self.offset, self._unit)
        return self.linear(x)

    def unit(self, x: Tensor) -> float:
        return self._unit


def origin(f: Map) -> Map:
    """Returns the map itself, or the one of which it is a derivative."""
    return f.origin[0] if isinstance(f, LinearMap) and f.origin else f


def source(f: Map) -> tuple[FunctionMap, Capturable]:
    """Returns the map behind an equation and its function; of those that `equation_problem` lets pass."""
    primal = cast(FunctionMap, origin(f))
    return primal, cast(Capturable, primal.function)


def given(f: Map, x: Tensor, memo: tuple[Tensor, ...]) -> list[Tensor]:
    """Lists the tensors that are new in every solve."""
    primal, function = source(f)
    point = (f.offset, f.origin[1]) if isinstance(f, LinearMap) and f.origin else ()
    parts = [x, *point, *memo, *primal.inputs, *function.weights]
    return [part.detach() for part in parts]


def rebuilt(f: Map, buffers: list[Tensor], memo: int) -> tuple[Map, Tensor, tuple[Tensor, ...], Capturable]:
    """Returns the map, the start, the memo and the function that read buffers in the order of `given`."""
    (primal, capturable), rest = source(f), list(buffers)
    take = lambda count: tuple(rest.pop(0) for _ in range(count))  # noqa: E731
    (x,), point = take(1), take(2 if f is not primal else 0)
    held, inputs = take(memo), take(len(primal.inputs))
    function = capturable.holding(tuple(rest))
    static: Map = FunctionMap(function, inputs, primal.packing, primal.precision)
    if point:
        static = Linearisation(static, point[1], point[0], f.unit(x))
    return static, x, held, function


class Plan:
    """Solves one kind of equation by replays; a chunk is captured when it is first needed.

    All graphs share their memory: they are captured and replayed in the same order. How many chunks the latest
    solve needed tells when to look at results: before the last but one of them there is nothing to see.
    """

    def __init__(self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, chunk: int) -> None:
        memo = stop.begin(x)
        self.buffers = [torch.empty_like(part) for part in given(f, x, memo)]
        torch._foreach_copy_(self.buffers, given(f, x, memo))
        static, start, held, self.function = rebuilt(f, self.buffers, len(memo))
        self.program = Program(static, start, held, solver, stop, max_steps, chunk)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.stream, self.pool = torch.cuda.Stream(x.device), torch.cuda.graph_pool_handle()
        self.seen = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self.event, self.expected, self.steps = torch.cuda.Event(), 1, 0
        rehearsal = rebuilt(f, self.buffers, len(memo))
        self._prepare(Program(*rehearsal[:3], solver, stop, max_steps, chunk))

    def _prepare(self, rehearsal: Program) -> None:
        """Takes a few steps on the stream of the capture: libraries allocate at their first use."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), self.function.reading(), _fresh_casts():
            rehearsal.advance()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.stream.synchronize()

    def solve(self, f: Map, x: Tensor, stop: Stopping) -> Iterates:
        """Solves an equation that differs from that of the capture in values only."""
        torch._foreach_copy_(self.buffers, given(f, x, stop.begin(x)))
        least, most, worst, place = 0, 0, 0, 0
        while least == 0:
            if place == len(self.graphs):
                self.graphs.append(self._capture())
            self.graphs[place].replay()
            place += 1
            if place >= self.expected or (self.program.ends and place == len(self.graphs)):
                least, most, worst = self._look()
        self.expected, self.steps = max(1, place - 1), most
        return self.program.result(most, worst)

    def _look(self) -> list[int]:
        """Waits for the results so far; the least number of steps is 0 where a sample is not finished."""
        self.seen.copy_(self.program.record, non_blocking=True)
        self.event.record()
        self.event.synchronize()
        return self.seen.tolist()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), _no_collection(), _fresh_casts():
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                with self.function.reading():
                    self.program.advance()
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                self._recover()
                raise
        return graph

    def _recover(self) -> None:
        """Captures something that cannot fail: a capture that did leaves random generators waiting for its end."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.program.record.device)
        with torch.cuda.stream(stream), contextlib.suppress(RuntimeError):
            graph.capture_begin(capture_error_mode="thread_local")
            self.program.record.zero_()
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
    """Has autocast convert weights anew: a graph must not read a conversion that was made outside of it."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
