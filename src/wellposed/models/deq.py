"""DEQ: a deep equilibrium model, the fixed point of any cell.

`CellFunction` is a cell as the function of one solve: with its input half, its weights and its masks computed
once. `reject_layers` and `reject_coupling` raise on what a cell must not contain if it is to have an equilibrium
for each sample by itself. `DEQ` is the model.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from wellposed.equilibrium.fixed_point import fixed_point, make_options
from wellposed.equilibrium.gradients import GRADIENTS, Gradient, Implicit
from wellposed.equilibrium.maps import Packing, State, max_norm
from wellposed.equilibrium.method import OnFailure, SolveHooks, WeightCheck, no_equilibrium
from wellposed.equilibrium.solution import Solution, Status
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Steps, Stopping
from wellposed.equilibrium.tracing import check_traceable, under_transform
from wellposed.errors import ConvergenceError, InputError, MapError, not_a_tensor
from wellposed.kernels.graphs import GraphLoop, check_graph_executor
from wellposed.models.cells import Cell
from wellposed.models.noise import Noise, NoiseDraws, NoisyMap, disturbed_signals, nonlinearities
from wellposed.models.norms import VariationalDropout, hold_masks, select_rows

_TURN = threading.RLock()


class CellFunction:
    """Evaluates ``x -> cell(x, u)`` given the inputs of a solve.

    Args:
        cell: the module, of which everything but `weights` is read where it lies.
        step: a step of the state, given what `halves` made of the input.
        single: whether the step takes one tensor rather than a tuple.
        masks: dropout layers that hold masks; the last input then numbers the samples.
        places: layers and names of weights under a parametrisation.
        weights: these weights, computed once for the solve.
    """

    def __init__(
        self,
        cell: nn.Module,
        step: Callable[[Any, Any], State],
        single: bool,
        masks: tuple[VariationalDropout, ...],
        places: tuple[tuple[nn.Module, str], ...],
        weights: tuple[Tensor, ...],
    ) -> None:
        self.cell, self.step, self.single, self.masks = cell, step, single, masks
        self.places, self.weights = places, weights

    def __call__(self, x: State, *arguments: Tensor) -> State:
        if self.masks:
            select_rows(self.masks, arguments[-1])
            arguments = arguments[:-1]
        return self.step(x, arguments[0] if self.single else arguments)

    def holding(self, weights: tuple[Tensor, ...]) -> "CellFunction":
        """Returns the function with other weights."""
        return CellFunction(self.cell, self.step, self.single, self.masks, self.places, weights)

    def problem(self) -> str:
        """Says why a captured step would not do what the cell does; nothing if it would."""
        for layer in self.masks:
            if layer.training and layer.p > 0:
                return "VariationalDropout draws a mask for every solve"
        for name, layer in self.cell.named_modules():
            if layer._forward_hooks or layer._forward_pre_hooks:
                return f"the cell has a forward hook at {name!r}"
            if hasattr(layer, "equilibrium"):
                return f"the cell has an equilibrium of its own at {name!r}"
        return ""

    def fingerprint(self) -> Hashable:
        """Returns the addresses of all tensors that the layers hold, and all their settings.

        What a layer reads from elsewhere, such as a global variable, is not seen; it must stay as it is.
        """
        passing = ("_masks", "_rows")  # of dropout, which is the same for all solves where it is captured
        return tuple(
            _print_of(value)
            for layer in self.cell.modules()
            for name, value in layer.__dict__.items()
            if not (name in passing and isinstance(layer, VariationalDropout))
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Has the cell read `weights` for its computed weights, in the block."""
        held = zip(self.places, self.weights, strict=True)
        table = {(id(layer), name): weight for (layer, name), weight in held}
        kinds = {(type(layer), name) for layer, name in self.places}  # a parametrised layer has a class of its own
        properties = [(kind, name, kind.__dict__[name]) for kind, name in kinds]
        for kind, name, computed in properties:
            setattr(kind, name, _shown(table, name, computed))
        try:
            yield
        finally:
            for kind, name, computed in properties:
                setattr(kind, name, computed)


def _print_of(value: Any) -> Hashable:
    """Returns the address of a tensor, plain values as they are, containers entry by entry, and who others are."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_print_of(part) for part in value)
    if isinstance(value, dict):
        return tuple((key, _print_of(part)) for key, part in value.items())
    return id(value)


def _shown(table: dict[tuple[int, str], Tensor], name: str, computed: property) -> property:
    """Returns a property that shows the tensor of the table where there is one."""

    def show(layer: nn.Module) -> Any:
        held = table.get((id(layer), name))
        return computed.__get__(layer) if held is None else held

    return property(show)


def halves(cell: nn.Module, u: State) -> tuple[Callable[[Any, Any], State], State]:
    """Returns the map and its input; of a `Cell`, a step and what the input adds to it, computed once."""
    if not isinstance(cell, Cell) or cell._forward_hooks or cell._forward_pre_hooks:
        return cell, u
    return cell.step, cell.inject(u)


@contextlib.contextmanager
def weights_computed_once(cell: nn.Module) -> Iterator[dict[tuple[nn.Module, str], Tensor]]:
    """Holds parametrised weights fixed: spectral norm would otherwise move them at every step.

    They are computed here, in the caller's grad mode, since the steps of a solve run without one. Threads take
    turns: what holds the weights is shared by all of them, and each has a grad mode and a graph of its own.
    """
    places = [
        (layer, name)
        for layer in cell.modules()
        if parametrize.is_parametrized(layer)
        for name in layer.parametrizations  # type: ignore[union-attr]
    ]
    if not places:
        yield {}
        return
    with _TURN, parametrize.cached():
        yield {(layer, name): getattr(layer, name) for layer, name in places}


def reject_layers(cell: nn.Module) -> None:
    """Raises if a layer couples the samples of a batch or makes every step another map."""
    for name, layer in cell.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            raise InputError(
                f"the cell has a {_place(layer, name)} that normalises by the statistics of the batch, so the "
                "equilibrium of a sample would depend on its companions; use nn.GroupNorm in the cell, put the "
                "batch norm before or after it, or call .eval() on it to freeze its statistics"
            )
        if layer.training and _random(layer):
            raise InputError(
                f"the cell has a {_place(layer, name)} that draws anew at every step, so there is no equilibrium; "
                "use wellposed.models.VariationalDropout, which holds its mask over the steps of a solve"
            )


def _place(layer: nn.Module, name: str) -> str:
    return f"{type(layer).__name__} at {name!r}" if name else type(layer).__name__


def _random(layer: nn.Module) -> bool:
    if isinstance(layer, nn.RReLU):
        return layer.lower != layer.upper
    if isinstance(layer, nn.MultiheadAttention):
        return layer.dropout > 0
    return isinstance(layer, _DropoutNd) and layer.p > 0


def reject_coupling(alone: State, among: State) -> None:
    """Raises if a sample moves elsewhere when it is alone than among others.

    Args:
        alone: the map of one sample, evaluated for that sample only.
        among: the same, evaluated in company.
    """
    packing = Packing.of(among)
    single, together = packing.pack_result(packing.cast(alone)), packing.pack(among)
    apart, size = float(max_norm(single - together)), float(torch.maximum(max_norm(single), max_norm(together)))
    if apart > 1e-2 * size:
        raise MapError(
            "the cell makes a sample depend on its batch: at its equilibrium the first sample goes elsewhere "
            f"alone than among its companions, {apart:.1e} apart where states have the size {size:.1e}; let the "
            "cell treat every sample by itself (no statistics over dimension 0)"
        )


def first(state: State) -> State:
    """Returns the first sample of a state."""
    return state[:1] if isinstance(state, Tensor) else tuple(part[:1] for part in state)


Shape = Sequence[int] | Sequence[Sequence[int]]


class DEQ(nn.Module):
    """Returns the equilibrium ``x = cell(x, u)`` (Bai et al. 2019; 004 eq. 1).

    Unlike `ImplicitModel` it promises no well-posedness: that is up to the cell. What it does promise is that
    the answer says for every sample whether an equilibrium was reached, and that a sample's answer does not
    depend on its companions. Weights under a parametrisation (weight norm, spectral norm) and the input half of
    a ready cell are computed once a solve; `VariationalDropout` holds its masks over the solve.

    Args:
        cell: a module with ``cell(x, u) -> x``; ``x`` is a batch-first tensor or a tuple of them, ``u`` what
            `forward` was given.
        state_shape: shape of the state without the batch dimension, or a tuple of shapes. If None, what
            ``cell.state_shape(u)`` says, else the shape of u.
        solver, stop, max_steps, gradient, on_failure: as in `fixed_point`; may be reassigned at any time.
        executor: ``"auto"`` captures the steps of repeated solves on a CUDA device as graphs where that is
            possible, ``"graph"`` raises where it is not, ``"reference"`` takes every step by itself. `explain`
            tells what happened.
        noise: what disturbs every solve; may be reassigned at any time. No iterate of a noisy map is at rest, so
            stop by `MeanRelative`, which looks at means over some of them.

    Example:
        >>> class Cell(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.state, self.input = nn.Linear(8, 8), nn.Linear(3, 8)
        ...     def forward(self, x, u):
        ...         return torch.tanh(0.5 * self.state(x) + self.input(u))
        >>> DEQ(Cell(), state_shape=(8,))(torch.zeros(5, 3)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        cell: nn.Module,
        *,
        state_shape: Shape | int | None = None,
        solver: Solver | str | None = None,
        stop: Stopping | str | None = None,
        max_steps: int | None = None,
        gradient: Gradient | str | None = None,
        on_failure: OnFailure = "warn",
        executor: str = "auto",
        noise: Noise | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(cell, nn.Module):
            raise InputError(
                f"cell must be an nn.Module; received {type(cell).__name__}. For a plain function use fixed_point"
            )
        self.cell, self.state_shape = cell, _normalised(state_shape)
        self.solver, self.stop, self.max_steps, self.on_failure = solver, stop, max_steps, on_failure
        self.gradient = GRADIENTS.get(Implicit() if gradient is None else gradient)
        check_graph_executor(executor)
        self.executor, self._graphs, self.weight_check = executor, GraphLoop(), WeightCheck()
        self.hooks: Callable[[], SolveHooks] | None = None  # makes those of every solve
        make_options(solver, stop, max_steps, on_failure)  # checks them here, not at the first call
        self.noise, self._looked_at = noise, False

    def forward(self, u: State, x0: State | None = None) -> State:
        """Returns the equilibrium.

        Args:
            u: batch-first tensor or tuple of tensors, handed to the cell as it is.
            x0: where to start; zeros if None.
        """
        return self.equilibrium(u, x0).value

    def equilibrium(self, u: State, x0: State | None = None) -> Solution:
        """Returns the equilibrium and tells, per sample, how it was reached."""
        check_traceable("a DEQ", isinstance(self.stop, Steps))
        reject_layers(self.cell)
        batch, start = _inputs(u)[0], self.start(u) if x0 is None else x0
        parameters = [pair for pair in self.cell.named_parameters() if pair[1].is_floating_point()]
        hooks = None if self.hooks is None else self.hooks()
        if self.weight_check.failed(parameters, self.on_failure):
            return self._none(start, parameters)
        hooks = None if x0 is not None or under_transform() else hooks
        if hooks is not None:
            packing = Packing.of(start)
            start = packing.unpack(hooks.start(packing.pack(start)))
        masks = [layer for layer in self.cell.modules() if isinstance(layer, VariationalDropout)]
        rows = torch.arange(batch.shape[0], device=batch.device)
        disturbance = NoiseDraws(self.noise or Noise(), batch.shape[0])
        points = [] if disturbance.silent else nonlinearities(self.cell)
        with (
            hold_masks(masks),
            weights_computed_once(self.cell) as weights,
            disturbed_signals(points, disturbance),
        ):
            step, given = halves(self.cell, disturbance.input(u))
            computed = tuple(weights), tuple(weights.values())
            f = CellFunction(self.cell, step, isinstance(given, Tensor), tuple(masks), *computed)
            inputs = (*_inputs(given), rows) if masks else _inputs(given)
            if not disturbance.silent:
                return self._solve(NoisyMap(f, disturbance), start, (*inputs, rows), hooks)
            found = self._solve(f, start, inputs, hooks)
            self._look_at(f, found, inputs)
        return found

    def _solve(self, f: Any, start: State, inputs: tuple[Tensor, ...], hooks: SolveHooks | None) -> Solution:
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("solver", "stop", "max_steps", "gradient")
        }
        try:
            loop = self._graphs.asked(self.executor)
            return fixed_point(f, start, *inputs, on_failure=self.on_failure, loop=loop, hooks=hooks, **options)
        except (RuntimeError, AttributeError, TypeError) as error:
            if self._shape_is_known() or isinstance(error, torch.OutOfMemoryError | ConvergenceError):
                raise
            raise MapError(
                f"{error}. The state was given the shape of u, {_describe(start)}; if the cell's state has "
                "another one, say DEQ(cell, state_shape=...) or give the cell a method state_shape(u)"
            ) from error

    def explain(self, u: State) -> str:
        """Says how ``model(u)`` is computed and why: what the latest solves tell, or what a first one would do.

        Args:
            u: inputs, of which only the device counts.
        """
        return self._graphs.explain(self.executor, _inputs(u)[0])

    def _shape_is_known(self) -> bool:
        return self.state_shape is not None or hasattr(self.cell, "state_shape")

    def start(self, u: State) -> State:
        """Returns the zeros from which a solve begins."""
        inputs, shape = _inputs(u), self.state_shape
        if shape is None and hasattr(self.cell, "state_shape"):
            shape = _normalised(self.cell.state_shape(u))  # type: ignore[operator]
        if shape is None:
            shape = tuple(inputs[0].shape[1:]) if len(inputs) == 1 else tuple(tuple(p.shape[1:]) for p in inputs)
        if any(part.is_complex() for part in (*inputs, *self.cell.parameters())):
            raise InputError("equilibria are real; received complex numbers: give real and imaginary parts as two")
        dtype = next((p.dtype for p in self.cell.parameters() if p.is_floating_point()), None)
        if dtype is None:
            dtype = inputs[0].dtype if inputs[0].is_floating_point() else torch.get_default_dtype()
        parts = (shape,) if _is_single(shape) else shape
        zeros = tuple(torch.zeros(inputs[0].shape[0], *p, dtype=dtype, device=inputs[0].device) for p in parts)
        return zeros[0] if _is_single(shape) else zeros

    @torch.no_grad()
    def _look_at(self, f: Any, found: Solution, inputs: tuple[Tensor, ...]) -> None:
        """Checks once, at the first solve with company, that the first sample is at rest alone too."""
        if self._looked_at or under_transform() or found.status.shape[0] < 2:
            return
        self._looked_at = True
        if Status(int(found.status[0])) == Status.CONVERGED:
            alone = f(first(found.value), *(part[:1] for part in inputs))
            reject_coupling(alone, first(f(found.value, *inputs)))

    @staticmethod
    def _none(start: State, weights: Sequence[tuple[str, Tensor]]) -> Solution:
        parts = tuple(no_equilibrium(part, weights) for part in ((start,) if isinstance(start, Tensor) else start))
        told = Solution.none(parts[0])
        return told if isinstance(start, Tensor) else replace(told, value=parts)

    def extra_repr(self) -> str:
        shape = "" if self.state_shape is None else f"state_shape={self.state_shape}, "
        return f"{shape}solver={self.solver}, stop={self.stop}, gradient={self.gradient}"


def _inputs(u: State) -> tuple[Tensor, ...]:
    parts: Any = (u,) if isinstance(u, Tensor) else u
    if not isinstance(parts, tuple | list) or not parts:
        raise not_a_tensor("u", u)
    for part in parts:
        if not isinstance(part, Tensor):
            raise not_a_tensor("u", u if isinstance(part, int | float | list) else part)
    if any(part.dim() == 0 for part in parts):
        raise InputError("u must be batch-first; received a tensor without dimensions")
    return tuple(parts)


def _is_single(shape: Any) -> bool:
    return all(isinstance(size, SupportsIndex) for size in shape)


def _normalised(shape: Any) -> Any:
    """Returns a shape as a tuple of integers, or a tuple of such tuples."""
    if shape is None:
        return None
    try:
        sizes = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
        given = (sizes,) if _is_single(sizes) else tuple(tuple(part) for part in sizes)
        parts = tuple(tuple(size.__index__() for size in part) for part in given)
    except (TypeError, AttributeError):
        parts = ((-1,),)
    if any(size < 0 for part in parts for size in part):
        raise InputError(f"state_shape is a tuple of sizes or a tuple of such tuples; received {shape!r}")
    return parts[0] if _is_single(sizes) else parts


def _describe(state: State) -> str:
    parts = (state,) if isinstance(state, Tensor) else state
    return ", ".join(str(tuple(part.shape)) for part in parts)
