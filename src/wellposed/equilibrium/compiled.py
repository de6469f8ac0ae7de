"""The loop under torch.compile: evaluations, steps and verdicts of a chunk as one program.

A chunk is a whole number of the solver's cycles, so that one program serves all chunks of a solve. It does what the
plain loop does for samples that converge, leave the range of numbers or run out of steps. Before anything else, a
residual that stagnates or a state that runs off, the plain loop takes over from the last chunk on.
"""

import time
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.gradients import LinearMap
from wellposed.equilibrium.loop import CHEAP, PERIOD, RUN_OFF, Iterates, Progress, iterate
from wellposed.equilibrium.maps import FunctionMap, Map, Packing, max_norm
from wellposed.equilibrium.method import Loop
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import ErrorBound, Step, Steps, Stopping
from wellposed.equilibrium.tracing import under_forward_mode, under_transform
from wellposed.errors import InputError

KEEP = 64  # programs of a loop, the most recently used

# x, the state of the solver, value, status and steps (2, B), scales (4, B) and the number of steps taken
Carry = tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Chunk:
    """A program that takes `size` steps: what is constant in it. Called, it is traced.

    Args:
        solver: None if the caller takes the steps, one after every evaluation.
        packing, precision: of the map.
        eps: rounding unit of the map.
    """

    solver: Solver | None
    stop: Stopping
    max_steps: int
    size: int
    packing: Packing
    precision: torch.dtype | None
    eps: float

    def __call__(
        self, function: Callable, inputs: tuple[Tensor, ...], point: tuple[Tensor, ...], carry: Carry
    ) -> tuple[Carry, Tensor, Tensor, Tensor]:
        """Returns what the next chunk needs, the residuals ``(K, B)``, a record of three numbers, and the last image.

        Args:
            function, inputs: of the map, or of the map whose derivative is solved with.
            point: nothing, or where the derivative is taken and what is added to its product.
            carry: what the chunk before returned.
        """
        x, solver_state, value, counts, scales, index = carry
        f = self._map(function, inputs, point)
        first, start, largest, least = scales.unbind()
        status, steps = counts.unbind()
        running, odd, residuals, before = status == 0, torch.zeros_like(status, dtype=torch.bool), [], least
        for k in range(self.size):
            fx = f(x)
            residual, size = max_norm(fx - x), max_norm(x)
            if k == 0:
                begins = index == 0
                first = torch.where(begins, residual, first)
                start, largest = torch.where(begins, size, start), torch.where(begins, residual, largest)
                bound = RUN_OFF * (start + largest)
            accepted, outcome = self._verdict(Step(x, fx, f, residual, 0, first), index + k)
            event = running & accepted
            value = torch.where(event[:, None], x, value)
            status, steps = torch.where(event, outcome, status), torch.where(event, index + (k + 1), steps)
            if self.stop.certifies:
                stuck = (residual >= before) & (residual <= 4 * f.rounding(x, fx)) & ~accepted
                odd = odd | (running & (stuck | (size > bound)))
            running = running & ~accepted
            largest = torch.maximum(largest, torch.where(residual.isfinite(), residual, 0))
            least = torch.minimum(least, residual)
            residuals.append(residual)
            if self.solver is not None:
                x, solver_state = self.solver.step(f, x, fx, solver_state)
        counts, scales = torch.stack([status, steps]), torch.stack([first, start, largest, least])
        record = torch.stack([running.sum(), odd.any().long(), status.amax()])
        return (x, solver_state, value, counts, scales, index + self.size), torch.stack(residuals), record, fx

    def _map(self, function: Callable, inputs: tuple[Tensor, ...], point: tuple[Tensor, ...]) -> Map:
        primal = _Evaluated(function, inputs, self.packing, self.precision)
        if not point:
            return primal
        transposed = torch.func.vjp(primal.__call__, point[0])[1]
        return LinearMap(lambda w: transposed(w)[0], point[1], self.eps)

    def _verdict(self, step: Step, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the samples that end with a step, and the status of those that do."""
        last, finite = index == self.max_steps - 1, step.residual.isfinite()
        if isinstance(self.stop, Steps):
            accepted, done = last | torch.zeros_like(finite), int(Status.STEPS_DONE)
        else:
            accepted, done = self.stop.check(step, ())[0], int(Status.CONVERGED)
        grown = step.residual > 1e3 * step.first
        given_up = torch.where(grown, int(Status.DIVERGED), int(Status.MAX_STEPS))
        outcome = torch.where(finite, torch.where(accepted, done, given_up), int(Status.NONFINITE))
        return accepted | ~finite | last, outcome




class _Evaluated(FunctionMap):
    """A map on whole batches: none of its rows is dropped."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._evaluate(x)


def _begin(x: Tensor, solver: Solver) -> Carry:
    """Returns the state of a solve that begins."""
    batch, device = x.shape[0], x.device
    counts = torch.zeros(2, batch, dtype=torch.int64, device=device)  # status and steps
    scales = x.new_full((4, batch), torch.inf)  # first residual, size of the start, largest and least residual
    return x, solver.init(x), x, counts, scales, torch.zeros((), dtype=torch.int64, device=device)


class _Program:
    """A chunk that has been compiled, and whether its steps are taken outside it."""

    def __init__(self, chunk: Chunk, solver: Solver, given: bool, backend: str) -> None:
        self.size, self.solver, self.given, self.stepped = chunk.size, solver, given, chunk.solver is None
        call = Chunk.__call__
        # A code object of its own, since torch keeps and searches the programs of one code together.
        own = types.FunctionType(call.__code__.replace(), call.__globals__, "chunk")
        self.compiled = torch.compile(types.MethodType(own, chunk), fullgraph=True, backend=backend)

    def solve(self, f: Map, x: Tensor, stop: Stopping, max_steps: int) -> tuple[Iterates, str]:
        """Solves an equation; returns the result and how it was computed."""
        carry, residuals, left, worst, taken = _begin(x, self.solver), [], 1, 0, 0
        source, point = (f, ()) if isinstance(f, FunctionMap) else (f.origin[0], (f.origin[1], f.offset))
        inputs = tuple(value.detach() for value in source.inputs)
        while left > 0:
            # Where the steps are taken outside, the program must not see how the solver's state changes its shapes.
            given = (carry[0], (), *carry[2:]) if self.stepped else carry
            if self.given:
                after, norms, record, fx = self.compiled(_image, (f(carry[0]),), (), given)
            else:
                after, norms, record, fx = self.compiled(source.function, inputs, point, given)
            left, odd, worst = record.tolist()
            if odd:
                return self._go_on(f, carry, residuals, stop, max_steps), f"{taken} steps, then the plain loop"
            residuals.append(norms)
            taken += self.size
            if self.stepped and left > 0:
                new, state = self.solver.step(f, carry[0], fx, carry[1])
                after = new, state, *after[2:]
            carry = after
        status, steps = carry[3].unbind()

        def trace() -> Tensor:  # (B, K)
            whole = torch.cat(residuals)[: int(steps.max())].mT
            after = torch.arange(whole.shape[1], device=x.device) >= steps[:, None]
            return whole.masked_fill(after, torch.nan)

        return Iterates(carry[2], status.to(torch.int8), steps, trace, worst), f"{taken} steps by {self.size}"

    def _go_on(
        self, f: Map, carry: Carry, residuals: list[Tensor], stop: Stopping, max_steps: int
    ) -> Iterates:
        """Leaves the rest of a solve to the plain loop."""
        x, state, value, (status, steps), (_, *scale, _), _ = carry
        if not residuals:
            return iterate(f, x, self.solver, stop, max_steps)
        progress = Progress(x, state, value, status, steps, torch.cat(residuals), tuple(scale))
        return iterate(f, x, self.solver, stop, max_steps, progress=progress)


def _image(x: Tensor, image: Tensor) -> Tensor:
    """Stands for a map that has been evaluated."""
    return image


class CompiledLoop:
    """Solves like `iterate`, by programs of torch.compile; where one cannot be had it warns once and says why.

    A program is compiled at the first solve of its kind: for a solver, a stopping rule, shapes and dtype, forward
    and backward. Where evaluations are cheap a program takes a whole cycle of steps and a few may be in vain; where
    they are not, it evaluates once. Torch keeps compiled code on disk for other processes.

    Args:
        backend: of torch.compile.

    Example:
        >>> loop = CompiledLoop(backend="eager")
        >>> solution = fixed_point(torch.cos, torch.zeros(1, 1), loop=loop)
    """

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend
        self.programs: OrderedDict[Hashable, _Program] = OrderedDict()
        self.reasons: dict[Hashable, str] = {}
        self.latest: dict[str, str] = {}
        self.warned: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.backend,)  # a copy compiles for itself

    def explain(self) -> str:
        """Says how the latest solves were run."""
        return "\n".join(f"{kind} {text}" for kind, text in self.latest.items()) or "compiled at the first solve"

    def __call__(
        self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, *, otherwise: Loop = iterate
    ) -> Iterates:
        kind, key, reason = "forward" if isinstance(f, FunctionMap) else "backward", None, why_not(f, x, stop)
        if not reason:
            try:
                key = self._key(f, x, solver, stop, max_steps)
                reason = self.reasons.get(key, "")
                if not reason:
                    program = self.programs.get(key) or self._compile(key, f, x, solver, stop, max_steps)
                    iterates, text = program.solve(f, x, stop, max_steps)
                    self.latest[kind] = f"compiled: {text}"
                    return iterates
            except Exception as error:  # whatever is wrong with the map itself, the plain loop will say
                reason = _summary(error)
        iterates = otherwise(f, x, solver, stop, max_steps)
        if key is not None:
            self.reasons[key] = reason
        self.latest[kind] = f"not compiled: {reason}"
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(f"compile=True: the {kind} solve runs in the plain loop: {reason}", stacklevel=2)
        return iterates

    @staticmethod
    def _key(f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int) -> Hashable:
        source = f if isinstance(f, FunctionMap) else f.origin[0]
        packing = replace(source.packing, batch=0)
        return f is source, solver, stop, max_steps, packing, source.precision, f.eps(x), x.device

    def _compile(
        self, key: Hashable, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> _Program:
        """Makes a program of one step or of a cycle, whatever pays for a map of its cost."""
        forward, *_, packing, precision, eps, _ = key
        whole = solver.cycle > 0 and _seconds(f, x) < CHEAP
        size = solver.cycle * max(1, PERIOD // solver.cycle) if whole else 1
        given = not forward and not whole
        if given:
            packing, precision = Packing.of(x), None
        chunk = Chunk(solver if whole else None, stop, max_steps, size, packing, precision, eps)
        self.programs[key] = _Program(chunk, solver, given, self.backend)
        while len(self.programs) > KEEP:
            self.programs.popitem(last=False)
        return self.programs[key]


def _summary(error: Exception) -> str:
    """Returns an error in one line, with torch's explanation where it gives one."""
    lines = [line.strip() for line in str(error).splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return f"{type(error).__name__}: {(explained or lines or [''])[0]}"


def _seconds(f: Map, x: Tensor) -> float:
    """Returns the time of an evaluation; raises if it draws random numbers."""
    before, best = torch.get_rng_state(), float("inf")
    for _ in range(3):
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        begin = time.perf_counter()
        f(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        best = min(best, time.perf_counter() - begin)
    if not torch.equal(before, torch.get_rng_state()):
        raise InputError("the map draws random numbers, which makes every step another map")
    return best


def why_not(f: Map, x: Tensor, stop: Stopping) -> str:
    """Says why an equation cannot be compiled, whatever its values; empty if it may be."""
    source = f.origin[0] if isinstance(f, LinearMap) and f.origin else f
    if not isinstance(source, FunctionMap):
        return "the map is not a function of the user"
    if x.shape[0] == 0:
        return "the batch is empty"
    if torch.is_grad_enabled():
        return "its steps are to be differentiated"
    if under_transform() or under_forward_mode():
        return "inside a transform of torch.func, forward mode or a captured program"
    if not (stop.stateless or isinstance(stop, ErrorBound | Steps)):
        return f"the stopping rule {type(stop).__name__} judges steps one by one"
    if hasattr(source.function, "noiseless"):
        return "the map is noisy"
    check = getattr(source.function, "why_not_compiled", None)
    return "" if check is None else check()


_LOOPS: "weakref.WeakKeyDictionary[Any, CompiledLoop]" = weakref.WeakKeyDictionary()


def loop_of(function: Callable) -> CompiledLoop:
    """Returns the loop that keeps the programs of a function; functions of the same code share one."""
    inner = getattr(function, "function", function)  # of a declared contraction
    owner = getattr(getattr(inner, "__func__", inner), "__code__", inner)
    try:
        return _LOOPS.setdefault(owner, CompiledLoop())
    except TypeError:  # neither hashable nor weakly referable
        return _LOOPS.setdefault(type(owner), CompiledLoop())
