"""DEQ: a deep equilibrium model, the fixed point of any cell.

`CellFunction` is a cell as the function of one solve: with its injection, its weights and its masks computed once.
`reject_layers` and `require_independence` raise if the equilibrium of a sample would depend on its batch, or if
there would be none. `DEQ` is the model.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from wellposed.equilibrium.compiled import CompiledLoop
from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.gradients import GRADIENTS, Gradient, Implicit
from wellposed.equilibrium.maps import Packing, State, max_norm
from wellposed.equilibrium.method import OnFailure, SolveHooks, WeightCheck, make_options, no_equilibrium
from wellposed.equilibrium.solution import Solution, Status
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Steps, Stopping
from wellposed.equilibrium.tracing import check_traceable, under_transform
from wellposed.errors import ConvergenceError, InputError, MapError, not_a_tensor
from wellposed.kernels.graphs import GraphLoop, check_graph_executor
from wellposed.models.cells import Cell
from wellposed.models.noise import Noise, NoiseDraws, NoisyMap, disturbed_signals, nonlinearities
from wellposed.models.norms import VariationalDropout, hold_masks, select_rows

_PARAMETRISATION_LOCK = threading.RLock()


class CellFunction:
    """Evaluates ``x -> cell(x, u)`` given the inputs of a solve.

    Args:
        cell: the module; everything but `weights` is read from it directly.
        step: a step of the state, as returned by `split_injection`.
        single: whether the step takes one tensor rather than a tuple.
        masks: dropout layers that hold masks; the last input then numbers the samples.
        parametrised: layers and names of weights under a parametrisation.
        weights: these weights, computed once for the solve.
    """

    def __init__(
        self,
        cell: nn.Module,
        step: Callable[[Any, Any], State],
        single: bool,
        masks: tuple[VariationalDropout, ...],
        parametrised: tuple[tuple[nn.Module, str], ...],
        weights: tuple[Tensor, ...],
    ) -> None:
        self.cell, self.step, self.single, self.masks = cell, step, single, masks
        self.parametrised, self.weights = parametrised, weights

    def __call__(self, x: State, *arguments: Tensor) -> State:
        if self.masks:
            select_rows(self.masks, arguments[-1])
            arguments = arguments[:-1]
        return self.step(x, arguments[0] if self.single else arguments)

    def with_weights(self, weights: tuple[Tensor, ...]) -> "CellFunction":
        """Returns the function with other weights."""
        return CellFunction(self.cell, self.step, self.single, self.masks, self.parametrised, weights)

    def why_not(self) -> str:
        """Says why a captured step would not do what the cell does; empty if it would."""
        for layer in self.masks:
            if layer.training and layer.p > 0:
                return "VariationalDropout draws a mask for every solve"
        for name, layer in self.cell.named_modules():
            if layer._forward_hooks or layer._forward_pre_hooks:
                return f"the cell has a forward hook at {name!r}"
            if hasattr(layer, "equilibrium"):
                return f"the cell has an equilibrium of its own at {name!r}"
        return ""

    def why_not_compiled(self) -> str:
        """Says why compiled steps would not do what the cell does; empty if they would."""
        if self.parametrised:
            return "weights under a parametrisation are computed once a solve, which compiled steps cannot do"
        return self.why_not()

    def fingerprint(self) -> Hashable:
        """Returns the addresses of all tensors that the layers hold, and all their settings.

        Whatever a layer reads from elsewhere, such as a global variable, is not included and must not change.
        """
        transient = ("_masks", "_rows")  # of dropout, which does nothing in a captured solve
        return tuple(
            _print_of(value)
            for layer in self.cell.modules()
            for name, value in layer.__dict__.items()
            if not (name in transient and isinstance(layer, VariationalDropout))
        )

    @contextlib.contextmanager
    def using_weights(self) -> Iterator[None]:
        """Makes the cell read `weights` instead of its computed weights, in the block."""
        held = zip(self.parametrised, self.weights, strict=True)
        table = {(id(layer), name): weight for (layer, name), weight in held}
        # A parametrised layer has a class of its own.
        kinds = {(type(layer), name) for layer, name in self.parametrised}
        properties = [(kind, name, kind.__dict__[name]) for kind, name in kinds]
        for kind, name, computed in properties:
            setattr(kind, name, _overridden(table, name, computed))
        try:
            yield
        finally:
            for kind, name, computed in properties:
                setattr(kind, name, computed)


def _print_of(value: Any) -> Hashable:
    """Returns the address of a tensor, plain values as they are, containers by entry, the id of others."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_print_of(entry) for entry in value)
    if isinstance(value, dict):
        return tuple((key, _print_of(entry)) for key, entry in value.items())
    return id(value)


def _overridden(table: dict[tuple[int, str], Tensor], name: str, computed: property) -> property:
    """Returns a property that reads the tensor of the table where there is one."""

    def read(layer: nn.Module) -> Any:
        weight = table.get((id(layer), name))
        return computed.__get__(layer) if weight is None else weight

    return property(read)


def split_injection(cell: nn.Module, u: State) -> tuple[Callable[[Any, Any], State], State]:
    """Returns the step of a `Cell` and its injection, computed once; other cells and `u` as they are."""
    if not isinstance(cell, Cell) or cell._forward_hooks or cell._forward_pre_hooks:
        return cell, u
    return cell.step, cell.inject(u)


@contextlib.contextmanager
def weights_computed_once(cell: nn.Module) -> Iterator[dict[tuple[nn.Module, str], Tensor]]:
    """Holds parametrised weights fixed: spectral norm would otherwise move them at every step.

    They are computed here, in the caller's grad mode, since the steps of a solve run without one. Threads take
    turns: they share the cache of torch, but each has its own grad mode and graph.
    """
    parametrised = [
        (layer, name)
        for layer in cell.modules()
        if parametrize.is_parametrized(layer)
        for name in layer.parametrizations  # type: ignore[union-attr]
    ]
    if not parametrised:
        yield {}
        return
    with _PARAMETRISATION_LOCK, parametrize.cached():
        yield {(layer, name): getattr(layer, name) for layer, name in parametrised}


def reject_layers(cell: nn.Module) -> None:
    """Raises if a layer couples the samples of a batch or changes the map from step to step."""
    for name, layer in cell.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            raise InputError(
                f"the cell has a {_describe_layer(layer, name)} that normalises by the statistics of the batch, "
                "so the equilibrium of a sample would depend on its companions; use nn.GroupNorm in the cell, put "
                "the batch norm before or after it, or call .eval() on it to freeze its statistics"
            )
        if layer.training and _draws_every_step(layer):
            raise InputError(
                f"the cell has a {_describe_layer(layer, name)} that draws anew at every step, so there is no "
                "equilibrium; use wellposed.models.VariationalDropout, which holds its mask over a solve's steps"
            )


def _describe_layer(layer: nn.Module, name: str) -> str:
    return f"{type(layer).__name__} at {name!r}" if name else type(layer).__name__


def _draws_every_step(layer: nn.Module) -> bool:
    if isinstance(layer, nn.RReLU):
        return layer.lower != layer.upper
    if isinstance(layer, nn.MultiheadAttention):
        return layer.dropout > 0
    return isinstance(layer, _DropoutNd) and layer.p > 0


def require_independence(alone: State, in_batch: State) -> None:
    """Raises if the cell maps a sample differently alone than in a batch.

    Args:
        alone: the image of one sample, evaluated by itself.
        in_batch: the same, evaluated in a batch.
    """
    packing = Packing.of(in_batch)
    single, batched = packing.pack_result(packing.cast(alone)), packing.pack(in_batch)
    apart, size = float(max_norm(single - batched)), float(torch.maximum(max_norm(single), max_norm(batched)))
    if apart > 1e-2 * size:
        raise MapError(
            "the cell makes a sample depend on its batch: at its equilibrium the first sample goes elsewhere "
            f"alone than among its companions, {apart:.1e} apart where states have the size {size:.1e}; let the "
            "cell treat every sample by itself (no statistics over dimension 0)"
        )


def first_sample(state: State) -> State:
    """Returns the first sample of a state."""
    return state[:1] if isinstance(state, Tensor) else tuple(tensor[:1] for tensor in state)


Shape = Sequence[int] | Sequence[Sequence[int]]


class DEQ(nn.Module):
    """Returns the equilibrium ``x = cell(x, u)`` (Bai et al. 2019; 004 eq. 1).

    Unlike `ImplicitModel` it promises no well-posedness: that is up to the cell. What it does promise is that
    the answer says for every sample whether an equilibrium was reached, and that a sample's answer does not
    depend on its companions. Weights under a parametrisation (weight norm, spectral norm) and the injection of a
    ready cell are computed once a solve; `VariationalDropout` holds its masks over the solve.

    Args:
        cell: a module with ``cell(x, u) -> x``; ``x`` is a batch-first tensor or a tuple of them, ``u`` what
            `forward` was given.
        state_shape: shape of the state without the batch dimension, or a tuple of shapes. If None, what
            ``cell.state_shape(u)`` says, else the shape of u.
        solver, stop, max_steps, gradient, on_failure: as in `fixed_point`; may be reassigned at any time.
        executor: ``"auto"`` captures the steps of repeated solves on a CUDA device as graphs where that is
            possible, ``"graph"`` raises where it is not, ``"reference"`` launches every step by itself. `explain`
            says what happened.
        compile: runs the loop, forward and backward, as compiled code; see `fixed_point`. Where the cell cannot be
            compiled, warns once and solves by the executor; `explain` says why.
        noise: what disturbs every solve; may be reassigned at any time. No iterate of a noisy map is at rest, so
            stop by `MeanRelative`, which tests the mean of several.

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
        compile: bool = False,
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
        self.compile_loop, self._compiled = compile, CompiledLoop()
        self.hooks: Callable[[], SolveHooks] | None = None  # makes those of every solve
        make_options(solver, stop, max_steps, on_failure)  # checks them here, not at the first call
        self.noise, self._independence_checked = noise, False

    def forward(self, u: State, x0: State | None = None) -> State:
        """Returns the equilibrium.

        Args:
            u: batch-first tensor or tuple of tensors, handed to the cell as it is.
            x0: where to start; zeros if None.
        """
        return self.equilibrium(u, x0).value

    def equilibrium(self, u: State, x0: State | None = None) -> Solution:
        """Returns the equilibrium and, per sample, how it was reached."""
        check_traceable("a DEQ", isinstance(self.stop, Steps))
        reject_layers(self.cell)
        batch, start = _inputs(u)[0], self.start(u) if x0 is None else x0
        parameters = [pair for pair in self.cell.named_parameters() if pair[1].is_floating_point()]
        hooks = None if self.hooks is None else self.hooks()
        if self.weight_check.failed(parameters, self.on_failure):
            return self._no_solution(start, parameters)
        hooks = None if x0 is not None or under_transform() else hooks
        if hooks is not None:
            packing = Packing.of(start)
            start = packing.unpack(hooks.start(packing.pack(start)))
        masks = [layer for layer in self.cell.modules() if isinstance(layer, VariationalDropout)]
        rows = torch.arange(batch.shape[0], device=batch.device)
        draws = NoiseDraws(self.noise or Noise(), batch.shape[0])
        noisy_layers = [] if draws.silent else nonlinearities(self.cell)
        with (
            hold_masks(masks),
            weights_computed_once(self.cell) as weights,
            disturbed_signals(noisy_layers, draws),
        ):
            step, injection = split_injection(self.cell, draws.input(u))
            computed = tuple(weights), tuple(weights.values())
            f = CellFunction(self.cell, step, isinstance(injection, Tensor), tuple(masks), *computed)
            inputs = (*_inputs(injection), rows) if masks else _inputs(injection)
            if not draws.silent:
                return self._solve(NoisyMap(f, draws), start, (*inputs, rows), hooks)
            solution = self._solve(f, start, inputs, hooks)
            self._check_independence(f, solution, inputs)
        return solution

    def _solve(self, f: Any, start: State, inputs: tuple[Tensor, ...], hooks: SolveHooks | None) -> Solution:
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("solver", "stop", "max_steps", "gradient")
        }
        try:
            loop = self._graphs.loop_for(self.executor)
            if self.compile_loop:
                loop = functools.partial(self._compiled, otherwise=loop)
            return fixed_point(f, start, *inputs, on_failure=self.on_failure, loop=loop, hooks=hooks, **options)
        except (RuntimeError, AttributeError, TypeError) as error:
            known_shape = self.state_shape is not None or hasattr(self.cell, "state_shape")
            if known_shape or isinstance(error, torch.OutOfMemoryError | ConvergenceError):
                raise
            states = (start,) if isinstance(start, Tensor) else start
            shapes = ", ".join(str(tuple(state.shape)) for state in states)
            raise MapError(
                f"{error}. The state was given the shape of u, {shapes}; if the cell's state has "
                "another one, say DEQ(cell, state_shape=...) or give the cell a method state_shape(u)"
            ) from error

    def explain(self, u: State) -> str:
        """Says how ``model(u)`` is computed and why, from the latest solves or, before any, for a first one.

        Args:
            u: inputs, of which only the device counts.
        """
        if self.compile_loop and "not compiled" not in (text := self._compiled.explain()):
            return text
        graphs = self._graphs.explain(self.executor, _inputs(u)[0])
        return f"{text}\n{graphs}" if self.compile_loop else graphs

    def start(self, u: State) -> State:
        """Returns the zeros from which a solve begins."""
        inputs, shape = _inputs(u), self.state_shape
        if shape is None and hasattr(self.cell, "state_shape"):
            shape = _normalised(self.cell.state_shape(u))  # type: ignore[operator]
        if shape is None:
            shape = tuple(inputs[0].shape[1:]) if len(inputs) == 1 else tuple(tuple(p.shape[1:]) for p in inputs)
        if any(tensor.is_complex() for tensor in (*inputs, *self.cell.parameters())):
            raise InputError("equilibria are real; received complex numbers: give real and imaginary parts as two")
        dtype = next((p.dtype for p in self.cell.parameters() if p.is_floating_point()), None)
        if dtype is None:
            dtype = inputs[0].dtype if inputs[0].is_floating_point() else torch.get_default_dtype()
        shapes = (shape,) if _is_single(shape) else shape
        zeros = tuple(torch.zeros(inputs[0].shape[0], *s, dtype=dtype, device=inputs[0].device) for s in shapes)
        return zeros[0] if _is_single(shape) else zeros

    @torch.no_grad()
    def _check_independence(self, f: Any, solution: Solution, inputs: tuple[Tensor, ...]) -> None:
        """Checks, at the first solve of a batch, that the first sample has the same equilibrium by itself."""
        if self._independence_checked or under_transform() or solution.status.shape[0] < 2:
            return
        self._independence_checked = True
        if Status(int(solution.status[0])) == Status.CONVERGED:
            alone = f(first_sample(solution.value), *(tensor[:1] for tensor in inputs))
            require_independence(alone, first_sample(f(solution.value, *inputs)))

    @staticmethod
    def _no_solution(start: State, weights: Sequence[tuple[str, Tensor]]) -> Solution:
        states = (start,) if isinstance(start, Tensor) else start
        values = tuple(no_equilibrium(state, weights) for state in states)
        solution = Solution.none(values[0])
        return solution if isinstance(start, Tensor) else replace(solution, value=values)

    def extra_repr(self) -> str:
        shape = "" if self.state_shape is None else f"state_shape={self.state_shape}, "
        return f"{shape}solver={self.solver}, stop={self.stop}, gradient={self.gradient}"


def _inputs(u: State) -> tuple[Tensor, ...]:
    tensors: Any = (u,) if isinstance(u, Tensor) else u
    if not isinstance(tensors, tuple | list) or not tensors:
        raise not_a_tensor("u", u)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise not_a_tensor("u", u if isinstance(tensor, int | float | list) else tensor)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise InputError("u must be batch-first; received a tensor without dimensions")
    return tuple(tensors)


def _is_single(shape: Any) -> bool:
    return all(isinstance(size, SupportsIndex) for size in shape)


def _normalised(shape: Any) -> Any:
    """Returns a shape as a tuple of integers, or a tuple of such tuples."""
    if shape is None:
        return None
    try:
        sizes = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
        given = (sizes,) if _is_single(sizes) else tuple(tuple(one) for one in sizes)
        shapes = tuple(tuple(size.__index__() for size in one) for one in given)
    except (TypeError, AttributeError):
        shapes = ((-1,),)
    if any(size < 0 for one in shapes for size in one):
        raise InputError(f"state_shape is a tuple of sizes or a tuple of such tuples; received {shape!r}")
    return shapes[0] if _is_single(sizes) else shapes
