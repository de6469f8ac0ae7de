"""The loop, compiled: by the kernels of ``x = phi(Ax + v)`` where a function has this form, else by torch.compile.

Under torch.compile evaluations, steps and verdicts of a chunk are one program. A chunk is a whole number of the
solver's cycles, so that one program serves all chunks of a solve. It does what the plain loop does for samples
that converge, leave the range of numbers or run out of steps. Before anything else, a residual that stagnates or
a state that runs off, the plain loop takes over where the chunk began.
"""

import functools
import itertools
import threading
import time
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from wellposed.equilibrium.gradients import LinearMap
from wellposed.equilibrium.loop import CHEAP, PERIOD, RUN_OFF, Iterates, Progress, flat_rows, iterate
from wellposed.equilibrium.maps import FunctionMap, Map, Packing, max_norm
from wellposed.equilibrium.method import Loop, callers_level
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import ErrorBound, Step, Steps, Stopping
from wellposed.equilibrium.tracing import under_forward_mode, under_transform
from wellposed.errors import InputError, require

KEEP = 64  # programs of a loop, the most recently used
NUMBERS = itertools.count()  # of programs

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
    ) -> tuple[Carry, tuple[Tensor, Tensor], Tensor, Tensor]:
        """Takes the steps of a chunk.

        Args:
            function, inputs: of the map, or of the map whose derivative is solved with.
            point: nothing, or where the derivative is taken and what is added to its product.
            carry: what the chunk before returned.

        Returns:
            what the next chunk needs; the residuals ``(K, B)`` and where they are near the rounding of the map;
            how many samples are left, whether a state runs off or a residual may stagnate, and the worst status;
            and the last image.
        """
        x, solver_state, value, counts, scales, index = carry
        f = self._map(function, inputs, point)
        first, start, largest, least = scales.unbind()
        status, steps = counts.unbind()
        running, residuals, near, before = status == 0, [], [], least
        strays = stuck = torch.zeros_like(running)
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
            strays = strays | (running & (size > bound))
            running = running & ~accepted
            near.append(running & (residual <= 4 * f.rounding(x, fx)))
            stuck = stuck | (near[-1] & (residual >= before))
            largest = torch.maximum(largest, torch.where(residual.isfinite(), residual, 0))
            least = torch.minimum(least, residual)
            residuals.append(residual)
            if self.solver is not None:
                x, solver_state = self.solver.step(f, x, fx, solver_state)
        counts, scales = torch.stack([status, steps]), torch.stack([first, start, largest, least])
        record = torch.stack([running.sum(), strays.any(), stuck.any(), status.amax()])
        history = torch.stack(residuals), torch.stack(near)
        return (x, solver_state, value, counts, scales, index + self.size), history, record, fx

    def _map(self, function: Callable, inputs: tuple[Tensor, ...], point: tuple[Tensor, ...]) -> Map:
        primal = _Evaluated(function, inputs, self.packing, self.precision)
        primal.known_eps = self.eps
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
        assert step.first is not None
        grown = step.residual > 1e3 * step.first
        given_up = torch.where(grown, int(Status.DIVERGED), int(Status.MAX_STEPS))
        outcome = torch.where(finite, torch.where(accepted, done, given_up), int(Status.NONFINITE))
        return accepted | ~finite | last, outcome


class _Evaluated(FunctionMap):
    """A map on whole batches: none of its rows is dropped. Its rounding unit is known."""

    known_eps: float

    def eps(self, x: Tensor) -> float:
        return self.known_eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._evaluate(x)


def _begin(x: Tensor, solver: Solver) -> Carry:
    """Returns the state of a solve that begins."""
    counts = torch.zeros(2, x.shape[0], dtype=torch.int64, device=x.device)  # status and steps
    scales = x.new_full((4, x.shape[0]), torch.inf)  # first residual, size of the start, largest, least residual
    state = tuple(value.clone() for value in solver.init(x))  # one tensor twice would make a program of its own
    # A view would make a program of its own as well.
    return x.clone(), state, torch.empty_like(x), counts, scales, counts.new_zeros(())


class _Recorder(threading.local):
    """A backend of torch.compile that remembers the latest call of what it has compiled."""

    def __init__(self, backend: str | Callable, **options: Any) -> None:
        self.backend, self.options = torch._dynamo.lookup_backend(backend), options
        self.latest: tuple[Callable, Sequence[Any], Sequence[Any]] | None = None

    def __call__(self, graph: Any, inputs: Any) -> Callable:
        run = self.backend(graph, inputs, **self.options)

        def call(*arguments: Any) -> Any:
            outputs = run(*arguments)
            self.latest = run, arguments, outputs
            return outputs

        return call


class _Repeated:
    """A call of a compiled program, to be repeated within a solve, where nothing changes but some tensors.

    What torch checks before it runs a program takes longer than a chunk of cheap steps. Within a solve it holds
    for all chunks if it holds for the first and tensors keep their layouts.

    Args:
        latest: what the recorder remembers of the call.
        given, returned: the tensors that change between calls, and what the program returned.
    """

    def __init__(
        self,
        latest: tuple[Callable, Sequence[Any], Sequence[Any]],
        given: list[Tensor],
        returned: list[Tensor],
    ) -> None:
        self.run, arguments, outputs = latest
        self.arguments, self.layouts = list(arguments), [tensor.stride() for tensor in given]
        numbers = {id(tensor): k for k, tensor in enumerate(given)}
        self.changing = [(k, numbers[id(one)]) for k, one in enumerate(arguments) if id(one) in numbers]
        # What passes through the program unchanged is none of its outputs.
        sources = {id(one): k for k, one in enumerate([*given, *outputs])}
        self.sources = [sources.get(id(one), -1) for one in returned]

    def __call__(self, given: list[Tensor]) -> list[Tensor] | None:
        """Returns what the program returns; None if it must be called with all checks."""
        if min(self.sources) < 0 or [tensor.stride() for tensor in given] != self.layouts:
            return None
        for position, number in self.changing:
            self.arguments[position] = given[number]
        known = [*given, *self.run(*self.arguments)]
        return [known[source] for source in self.sources]


class _Program:
    """A chunk that has been compiled, and whether its steps are taken outside it."""

    def __init__(self, chunk: Chunk, solver: Solver, given: bool, backend: str | Callable) -> None:
        self.size, self.solver, self.given, self.stepped = chunk.size, solver, given, chunk.solver is None
        self.rows = 0  # of the first batch
        call = Chunk.__call__
        # A code of its own: torch keeps and searches the programs of one code together, and where codes of one
        # name and line were called with several sizes, it makes these variables of every later program.
        name = f"chunk_{next(NUMBERS)}"
        own = types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name)
        # Calls of many small kernels from Python would cost most.
        options = {"config_patches": {"cpp_wrapper": not self.stepped}} if backend == "inductor" else {}
        self.recorder, bound = _Recorder(backend, **options), types.MethodType(own, chunk)
        guards: dict[str, Any] = {"guard_filter_fn": _guards_of_user}
        self.compiled = torch.compile(bound, fullgraph=True, backend=self.recorder, options=guards)

    def solve(self, f: Map, x: Tensor, stop: Stopping, max_steps: int) -> tuple[Iterates, str]:
        """Solves an equation; returns the result and how it was computed."""
        source, point = _source(f)
        inputs, count = tuple(value.detach() for value in source.inputs), len(x)
        self.rows = self.rows or count
        if inputs and not self.given and count < self.rows <= 4 * count:  # as at the end of an epoch
            inputs, point = (
                tuple(_repeat_last(value, self.rows) for value in values) for values in (inputs, point)
            )
            x = _repeat_last(x, self.rows)
        carry, residuals, left, worst, taken = _begin(x, self.solver), [], 1, 0, 0
        run = self._runner(source.function, inputs, point)
        while left > 0:
            after, norms, near, record, fx = run((f(carry[0]),) if self.given else (), carry)
            left, strays, stuck, worst = record.tolist()
            residuals.append(norms)
            if stop.certifies and (strays or (stuck and _stagnates(residuals, near))):
                rest = self._go_on(f, carry, residuals[:-1], stop, max_steps, count)
                return rest, f"{taken} steps by {self.size}, then the plain loop"
            taken += self.size
            if self.stepped and left > 0:
                new, state = self.solver.step(f, carry[0], fx, carry[1])
                after = new, state, *after[2:]
            carry = after
        status, steps = carry[3][:, :count].unbind()

        def trace() -> Tensor:  # (B, K)
            whole = torch.cat(residuals)[: int(steps.max()), :count].mT
            after = torch.arange(whole.shape[1], device=x.device) >= steps[:, None]
            return whole.masked_fill(after, torch.nan)

        iterates = Iterates(carry[2][:count], status.to(torch.int8), steps, trace, worst)
        return iterates, f"{taken} steps by {self.size}"

    def _runner(
        self, function: Callable, inputs: tuple[Tensor, ...], point: tuple[Tensor, ...]
    ) -> Callable[[tuple[Tensor, ...], Carry], tuple[Carry, Tensor, Tensor, Tensor, Tensor]]:
        """Returns what runs the chunks of one solve: the first with all checks of torch, the others without."""
        repeated: _Repeated | None = None

        def run(image: tuple[Tensor, ...], carry: Carry) -> tuple[Carry, Tensor, Tensor, Tensor, Tensor]:
            nonlocal repeated
            # Where steps are taken outside, the program must not see the solver's state change its shapes.
            state = () if self.stepped else carry[1]
            given = [carry[0], *state, *carry[2:], *image]
            returned = None if repeated is None else repeated(given)
            if returned is None:
                arguments = (_image, image, ()) if self.given else (function, inputs, point)
                after, history, *others = self.compiled(*arguments, (carry[0], state, *carry[2:]))
                returned = [after[0], *after[1], *after[2:], *history, *others]
                if self.recorder.latest is not None:
                    repeated, self.recorder.latest = _Repeated(self.recorder.latest, given, returned), None
            x, *others, value, counts, scales, index, norms, near, record, fx = returned
            return (x, tuple(others), value, counts, scales, index), norms, near, record, fx

        return run

    def _go_on(
        self, f: Map, carry: Carry, residuals: list[Tensor], stop: Stopping, max_steps: int, count: int
    ) -> Iterates:
        """Leaves the rest of a solve of `count` samples to the plain loop."""
        x, state, value = carry[0][:count], tuple(part[:count] for part in carry[1]), carry[2][:count]
        (status, steps), (_, *scale, _) = carry[3][:, :count], carry[4][:, :count]
        if not residuals:
            return iterate(f, x, self.solver, stop, max_steps)
        progress = Progress(x, state, value, status, steps, torch.cat(residuals)[:, :count], tuple(scale))
        return iterate(f, x, self.solver, stop, max_steps, progress=progress)


def _repeat_last(value: Tensor, rows: int) -> Tensor:
    """Repeats the last row up to a number of rows."""
    return torch.cat([value, value[-1:].expand(rows - len(value), *value.shape[1:])])


def _stagnates(residuals: list[Tensor], near: Tensor) -> bool:
    """Tells whether the plain loop would find a row stagnated in the last chunk."""
    begin = sum(map(len, residuals)) - len(near)
    ends = range(begin - begin % PERIOD + PERIOD, begin + len(near) + 1, PERIOD)
    for end in (end for end in ends if end > PERIOD and bool(near[end - 1 - begin].any())):
        minima = torch.cat(residuals)[:end].unflatten(0, (-1, PERIOD)).amin(1)
        if bool((flat_rows(minima, len(minima), None) & near[end - 1 - begin]).any()):
            return True
    return False


def _guards_of_user(guards: Sequence[Any]) -> list[bool]:
    """Chooses what torch checks before a program runs: not its constants, nor torch and this package."""
    constant = ("self", "dict(type(self", "G['__import_torch", "G['__import_wellposed_dot_equilibrium")
    inside = "__import__('torch')", "G['"  # torch itself, and globals of this module
    return [
        not guard.name.startswith(constant)
        and (guard.name.startswith("G['__import_") or not any(name in guard.name for name in inside))
        for guard in guards
    ]


def _image(x: Tensor, image: Tensor) -> Tensor:
    """Stands for a map that has been evaluated."""
    return image


class CompiledLoop:
    """Solves like `iterate`, by compiled code; where that cannot be had it warns once and says why.

    A function ``phi(Ax + v)`` of rows, with a phi and a dtype that have kernels on the CPU, is recognised at every
    solve (`kernels.recognise`), so its weights may change. Other functions become programs of torch.compile. A
    program is compiled at the first solve of its kind: for a solver, a stopping rule, shapes and dtype, forward
    and backward. Batches down to a quarter of the first one are filled up with their last sample; the first batch
    of another size makes torch compile once more, for all sizes, and one sample is a size of its own. Where
    evaluations are cheap a program takes a whole cycle of steps, of which the last may be in vain; where they are
    not, it evaluates once. No rows are dropped. Torch keeps compiled code on disk for other processes.

    Args:
        backend: of torch.compile.
        recognises: whether kernels may solve.

    Example:
        >>> from wellposed.equilibrium.fixed_point import fixed_point
        >>> loop = CompiledLoop(backend="eager")  # traces, and generates no code
        >>> solution = fixed_point(lambda x: x.cos() / 2, torch.zeros(1, 1), solver="picard", loop=loop)
        >>> print(loop.explain())
        forward compiled: 16 steps by 8
    """

    def __init__(self, backend: str = "inductor", *, recognises: bool = True) -> None:
        self.backend, self.recognises = backend, recognises
        self.programs: OrderedDict[Hashable, _Program] = OrderedDict()
        self.reasons: dict[Hashable, str] = {}
        self.latest: dict[str, str] = {}
        self.warned: set[str] = set()
        self.not_affine: dict[Hashable, str] = {}  # why the function has not the form phi(Ax + v)
        self.recognised = 0  # how often it had, in solves to be differentiated

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(type(self), recognises=self.recognises)
        return make, (self.backend,)  # a copy compiles for itself

    def explain(self) -> str:
        """Says how the latest solves were run."""
        return "\n".join(f"{kind} {text}" for kind, text in self.latest.items()) or "compiled at the first solve"

    def __call__(
        self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, *, otherwise: Loop = iterate
    ) -> Iterates:
        kind, key, reason = "forward" if isinstance(f, FunctionMap) else "backward", None, why_not(f, x, stop)
        if not reason:
            try:
                iterates = self._affine(kind, f, x, solver, stop, max_steps, otherwise)
                if iterates is not None:
                    return iterates
                source, point = _source(f)
                packing, cycle = replace(source.packing, batch=0), max(1, solver.cycle)
                size = cycle * max(1, PERIOD // cycle)
                chunk = Chunk(solver, stop, max_steps, size, packing, source.precision, f.eps(x))
                key = chunk, not point, x.device
                reason = self.reasons.get(key, "")
                if not reason:
                    program = self.programs.get(key) or self._compile(key, f, x)
                    try:
                        iterates, text = program.solve(f, x, stop, max_steps)
                    except Exception:
                        if program.given or not point:
                            raise
                        program = self._compile(key, f, x, derives=False)  # the derivative may be the obstacle
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
            message = f"compile=True: the {kind} solve is not compiled: {reason}"
            warnings.warn(message, stacklevel=callers_level())
        return iterates

    def _affine(
        self, kind: str, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, otherwise: Loop
    ) -> Iterates | None:
        """Solves an equation ``x = phi(Ax + v)`` by the kernels for it; None if it has another form."""
        source, point = _source(f)
        key = x.shape[1:], x.dtype, x.device, source.plain, solver, stop
        if not self.recognises or key in self.not_affine:
            return None
        # The one question to a higher part (ARCHITECTURE.md): kernels are made of what is defined here.
        kernels = require("wellposed.kernels.recognise")
        try:
            options = solver, stop, max_steps
            if source.equation is None:
                source.equation = kernels.affine_equation(source, x, *options)
                self.recognised += source.differentiated
                source.equation.compares = source.differentiated and self.recognised.bit_count() == 1
            equation = source.equation
            iterates = equation.adjoint(f, point[0], x, *options) if point else equation.solve(source, x, *options)
        except kernels.NotAffineError as error:
            source.equation = None
            if not error.passing:
                self.not_affine[key] = str(error)
                return None
            self.latest[kind] = f"not compiled: {error}"
            return otherwise(f, x, *options)
        if iterates is None:
            source.equation = None
            return None
        self.latest[kind] = f"compiled: as {equation}"
        if equation.saved is not None and source.differentiated:
            self.latest["backward"] = self.latest[kind]  # unless it goes another way
        return cast(Iterates, iterates)

    def _compile(
        self, key: tuple[Chunk, bool, torch.device], f: Map, x: Tensor, *, derives: bool = True
    ) -> _Program:
        """Makes a program of a cycle of steps or of one evaluation, whatever pays for a map of its cost.

        Args:
            derives: whether a program may compute derivatives.
        """
        chunk, forward, _ = key
        solver, given = chunk.solver, False
        assert solver is not None
        if not forward:
            source, point = _source(f)
            _seconds(source, point[0], 1)
        # A program of several steps saves what torch does around a step; backward it computes the derivative anew.
        if solver.cycle == 0 or not derives or _seconds(f, x) >= (CHEAP if forward else CHEAP / 2):
            chunk, given = replace(chunk, solver=None, size=1), not forward
        if given:  # products with the derivative reuse what autograd has stored, and only the verdict is compiled
            chunk = replace(chunk, packing=replace(Packing.of(x), batch=0), precision=None)
        self.programs[key] = program = _Program(chunk, solver, given, self.backend)
        while len(self.programs) > KEEP:
            self.programs.popitem(last=False)
        return program


def _source(f: Map) -> tuple[FunctionMap, tuple[Tensor, ...]]:
    """Returns the map behind an equation and, for the backward one, its point and offset."""
    if isinstance(f, LinearMap) and f.origin:
        primal, x = f.origin
        return cast(FunctionMap, primal), (x.detach(), f.offset)
    return cast(FunctionMap, f), ()


def _summary(error: Exception) -> str:
    """Returns an error in one line, with torch's explanation where it gives one."""
    if isinstance(error, InputError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {explained[0] if explained else first}"


def _seconds(f: Map, x: Tensor, trials: int = 3) -> float:
    """Returns the time of an evaluation; raises if it draws random numbers."""
    before, best = torch.get_rng_state(), float("inf")
    for _ in range(trials):
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
    if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        return "inside a dispatch mode of torch, which sees operations one by one"
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
