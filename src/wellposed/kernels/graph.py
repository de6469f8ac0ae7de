"""Takes the place of the loop for repeated solves on a CUDA device: steps captured as graphs and replayed."""

import contextlib
import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.loop import Iterates, iterate
from wellposed.equilibrium.maps import FunctionMap, Map
from wellposed.equilibrium.method import Loop
from wellposed.equilibrium.solvers import Newton, Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import InputError
from wellposed.kernels.graph_plan import Capturable, Plan, given, origin, rebuilt, source
from wellposed.kernels.graph_program import CHUNK, Program

GRAPH_EXECUTORS = ("auto", "graph", "reference")
SIGHTINGS = 256  # kinds of equations that are remembered
PATIENCE = 8  # solves of a kind that has lost its graphs before it is captured again


def check_graph_executor(executor: str) -> None:
    """Raises unless an executor of this name exists.

    Example:
        >>> check_graph_executor("auto")
    """
    if executor not in GRAPH_EXECUTORS:
        raise InputError(f"executor must be one of {', '.join(GRAPH_EXECUTORS)}; received {executor!r}")


class GraphLoop:
    """Solves like `iterate`, by CUDA graphs where an equation comes again with the same shapes and settings.

    The first solve of a kind takes its steps one by one and watches whether anything waits for the device or
    draws random numbers; the second captures chunks of steps, later ones replay them. Weights are read where they
    lie, so an optimiser may change them in place; a weight that has moved makes another kind. Whatever cannot be
    captured is iterated as ever, and `explain` says why.

    Args:
        chunk: steps between two looks at the results.
        keep: kinds of equations whose graphs are kept, the latest used.

    Example:
        >>> from wellposed.equilibrium import Picard, Relative
        >>> from wellposed.equilibrium.gradients import LinearMap
        >>> loop, x = GraphLoop(), torch.zeros(1, 1)
        >>> _ = loop(LinearMap(lambda x: 0.5 * x, x + 1, 1e-7), x, Picard(), Relative(), 100)
        >>> loop.explain("auto")
        'forward reference: the state is on the cpu, and graphs are for CUDA devices'
    """

    def __init__(self, chunk: int = CHUNK, keep: int = 6) -> None:
        self.chunk, self.keep = chunk, keep
        self.plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self.refused: OrderedDict[Hashable, str] = OrderedDict()
        self.sightings: OrderedDict[Hashable, int] = OrderedDict()
        self.latest: dict[str, str] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.chunk, self.keep)  # graphs cannot be copied; a copy begins without them

    def asked(self, executor: str) -> Loop:
        """Returns what runs a solve for the name of an executor."""
        return iterate if executor == "reference" else functools.partial(self, strict=executor == "graph")

    def explain(self, executor: str) -> str:
        """Says how the latest solves were carried out and why."""
        if executor == "reference":
            return 'reference: executor="reference" was asked for'
        return "; ".join(f"{kind} {text}" for kind, text in self.latest.items()) or "nothing has been solved yet"

    def __call__(
        self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, *, strict: bool = False
    ) -> Iterates:
        kind = "forward" if origin(f) is f else "backward"
        found, text = None, equation_problem(f, x, solver)
        if not text:
            with self._lock:
                found, text = self._attempt(f, x, solver, stop, max_steps)
        self.latest[kind] = f"reference: {text}" if found is None else f"graph: {text}"
        if found is not None:
            return found
        if strict:
            raise InputError(f'executor="graph" cannot compute this {kind} solve: {text}; use executor="auto"')
        return iterate(f, x, solver, stop, max_steps)

    def _attempt(
        self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> tuple[Iterates | None, str]:
        """Returns what a replay or a rehearsal found, None where neither is possible, and a text about it."""
        try:
            same = source(f)[1].fingerprint(), solver  # forward and backward: what one does, the other does
            kind = same, _circumstances(f, x, stop, max_steps)
            hash(kind)
        except (TypeError, AttributeError, RuntimeError) as error:
            return None, f"the equation cannot be recognised when it comes again: {error}"
        if same in self.refused:
            return None, self.refused[same]
        try:
            if kind in self.plans or self._sight(kind) > 0:
                return self._replay(kind, f, x, solver, stop, max_steps)
            found, text = self._rehearse(f, x, solver, stop, max_steps)
        except Exception as error:  # whatever is wrong with the map itself, the plain loop will say
            self.plans.pop(kind, None)
            found, text = None, f"{type(error).__name__}: {error}".splitlines()[0]
        return found, text if found is not None else self._refuse(same, text)

    def _sight(self, kind: Hashable) -> int:
        """Counts solves of a kind before this one."""
        count = self.sightings.pop(kind, 0)
        self.sightings[kind] = count + 1
        while len(self.sightings) > SIGHTINGS:
            self.sightings.popitem(last=False)
        return count

    def _refuse(self, kind: Hashable, text: str) -> str:
        self.refused[kind] = text
        while len(self.refused) > SIGHTINGS:
            self.refused.popitem(last=False)
        return text

    def _replay(
        self, kind: Hashable, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> tuple[Iterates, str]:
        if kind not in self.plans:
            while len(self.plans) >= self.keep:
                lost, _ = self.plans.popitem(last=False)
                self.sightings[lost] = -PATIENCE
            self.plans[kind] = Plan(f, x, solver, stop, max_steps, self.chunk)
        plan = self.plans[kind]
        self.plans.move_to_end(kind)
        found = plan.solve(f, x, stop)
        return found, f"{plan.steps} steps in chunks of {self.chunk}, {len(plan.graphs)} chunks captured"

    def _rehearse(
        self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int
    ) -> tuple[Iterates | None, str]:
        """Carries the program out without a capture and watches what the map does."""
        memo = stop.begin(x)
        static, start, held, function = rebuilt(f, given(f, x, memo), len(memo))
        program = Program(static, start, held, solver, stop, max_steps, self.chunk)
        least, most, worst = 0, 0, 0
        while least == 0:
            before = _random_state(x.device)
            with function.reading(), _waiting_forbidden():
                program.advance()
            if before != _random_state(x.device):
                return None, "the map draws random numbers, which makes every step another map"
            least, most, worst = program.record.tolist()
        return program.result(most, worst), "the first solve of its kind, taken without a capture"


def equation_problem(f: Map, x: Tensor, solver: Solver) -> str:
    """Says why an equation cannot be captured whatever its values; nothing if it may be."""
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
    return primal.function.problem()


def _circumstances(f: Map, x: Tensor, stop: Stopping, max_steps: int) -> Hashable:
    """Returns what two equations of one map must share to be solved by the same graphs."""
    primal, _ = source(f)
    inputs = tuple((part.shape, part.stride(), part.dtype) for part in primal.inputs)
    place = x.device, torch.cuda.current_stream(x.device).cuda_stream
    precision = (
        primal.precision,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
    )
    return primal is f, primal.packing, inputs, place, precision, stop, max_steps


@contextlib.contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Makes everything raise that would wait for the device."""
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
