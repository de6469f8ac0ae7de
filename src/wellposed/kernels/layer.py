"""A whole model ``x = phi(Ax + Bu + b)``, ``y = Cx + Du`` as one node of the graph, for small solves.

What torch does around a solve (a node for every product, a report for every solve) costs more than it takes to
solve a hundred samples of twenty states. Here the forward and the backward pass are one function each. Whatever is
not a first derivative goes the general way, through `affine_equilibrium`. `run_layer` and `run_sparse_layer` are
for the CPU, `run_device_layer` for CUDA devices.

On a device the forward pass is five launches, the backward pass about eight, whatever the number of steps; the
row-wise projection of A is part of the node. Failures are noticed through an `Alarm`, the only wait of a pass;
with ``on_failure="ignore"`` there is none.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.activations import Activation
from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import AffineMap, AffineProblem, TransposedMap, affine_equilibrium
from wellposed.equilibrium.fixed_point import require_finite
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.method import Method, OnFailure, report, report_outputs
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.errors import require
from wellposed.kernels.device import Alarm, launcher, run_recipe, unheard
from wellposed.kernels.engine import CompiledLoop, multiply_sparse, prepare_adjoint, run_kernel, wrong_engine
from wellposed.kernels.handover import adjoint_step, hand_over, stop_is_plain
from wellposed.kernels.sparse import SparseModel, SparseRows
from wellposed.kernels.spec import (
    LINEAR,
    Recipe,
    engine_problem,
    kind_of,
    make_recipe,
    solver_problem,
    stop_problem,
)

Matrix = Tensor | None


@dataclass(frozen=True)
class Pass:
    """One of the two solves."""

    solver: Solver
    stop: Stopping
    max_steps: int
    recipe: Recipe
    hands_over: bool

    def finish(self, found: Iterates, f: AffineMap | TransposedMap, policy: OnFailure, name: str) -> Tensor:
        """Sees to samples that are not finished and reports those that remain so."""
        if self.hands_over:
            found = hand_over(f, found, self.stop, self.recipe.max_steps, self.max_steps)
        report(found, policy, solve=name, max_steps=self.max_steps)
        return found.value


@dataclass(frozen=True)
class Plan:
    """How the equations of a model are solved, in the terms of the kernels."""

    activation: Activation
    kind: tuple[int, float]
    forward: Pass
    backward: Pass
    on_failure: OnFailure
    general: AffineProblem  # a template: its methods serve one solve
    dtype: torch.dtype  # of the solves
    automatic: bool = False  # whether nobody has asked for a solver

    def problem(self) -> AffineProblem:
        """Returns the same for the general way, with methods of its own."""
        forward, backward = (
            Method(old.solver, old.stop, old.max_steps, old.on_failure, loop=old.loop)
            for old in (self.general.forward, self.general.backward)
        )
        return replace(self.general, forward=forward, backward=backward)


def make_plan(problem: AffineProblem, like: Tensor) -> Plan | None:
    """Turns a problem into a plan for states like `like` ``(B, n)``; None where some part has no kernel."""
    kind, loop = kind_of(problem.activation), problem.forward.loop
    methods, dtype, device = (problem.forward, problem.backward), like.dtype, like.device.type
    if kind is None or not isinstance(loop, CompiledLoop) or problem.bound is not None:
        return None
    if engine_problem(like, *kind) or wrong_engine(loop.only, like):
        return None
    if problem.damping != 1 or problem.splitting is not None or problem.forward.logs:
        return None
    if any(solver_problem(m.solver, device) or stop_problem(m.stop) or m.logs for m in methods):
        return None
    first, second = methods
    limit = first.max_steps
    if loop.automatic and problem.activation.homogeneous and device == "cpu":
        limit = adjoint_step(like.shape[1], first.stop, first.max_steps)
    forward = _pass(first, *kind, limit, limit < first.max_steps, dtype)
    patience = problem.patience if device == "cpu" else 0
    turns, patience = patience > 0 and stop_is_plain(second.stop), patience or second.max_steps
    backward = _pass(second, LINEAR, 0.0, min(patience, second.max_steps), turns, dtype)
    return Plan(problem.activation, kind, forward, backward, first.on_failure, problem, dtype, loop.automatic)


def _pass(method: Method, kind: int, slope: float, limit: int, hands_over: bool, dtype: torch.dtype) -> Pass:
    recipe = make_recipe(kind, slope, method.solver, method.stop, limit, dtype)
    return Pass(method.solver, method.stop, method.max_steps, recipe, hands_over)


def run_layer(plan: Plan, u: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Matrix, bias: Matrix) -> Tensor:
    """Computes the outputs ``(B, q)`` of a model."""
    if torch.is_grad_enabled():
        output: Tensor = _Layer.apply(plan, u, A, B, C, D, bias)
        return output
    return _forward(plan, u, A, B, C, D, bias)[0]


def _forward(
    plan: Plan, u: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Matrix, bias: Matrix
) -> tuple[Tensor, Tensor, Tensor]:
    v = F.linear(u, B, bias)
    x = _states(plan, v, A, lambda: A)
    y = F.linear(x, C)
    if D is not None:
        y = torch.addmm(y, u, D.mT)
    report_outputs(y, x, plan.on_failure)
    return y, x, v


def _states(plan: Plan, v: Tensor, A: Tensor | SparseRows, dense: Callable[[], Tensor]) -> Tensor:
    """Solves the equation; the dense A is asked for only where samples are not finished."""
    x, status, steps, _ = run_kernel(A, v, None, None, plan.forward.recipe, trace=False)
    if int(status.numpy().max(initial=0)) >= Status.MAX_STEPS:
        again = lambda: run_kernel(A, v, None, None, plan.forward.recipe, trace=True)[3]  # noqa: E731
        f = AffineMap((dense(),), v, plan.activation)
        x = plan.forward.finish(Iterates(x, status, steps, again), f, plan.on_failure, "equilibrium")
    return x


def run_sparse_layer(
    plan: Plan, u: Tensor, sparse: SparseModel, dense: Callable[[], Tensor], others: tuple[Matrix, ...]
) -> Tensor:
    """Computes the outputs ``(B, q)`` of a model without derivatives, with sparse products where they pay.

    Args:
        plan: how.
        u: inputs ``(B, p)``.
        sparse: the matrices whose sparse products pay for this batch.
        dense: computes A.
        others: B, C, D and the bias.
    """
    B, C, D, bias = others
    v = _product(u, sparse.B, B, bias)
    A = dense() if sparse.A is None else sparse.A if plan.automatic else sparse.A.plain
    x = _states(plan, v, A, dense)
    y = _product(x, sparse.C, C, None)
    if D is not None:
        y.add_(_product(u, sparse.D, D, None))
    report_outputs(y, x, plan.on_failure)
    return y


def _product(u: Tensor, sparse: SparseRows | None, dense: Matrix, bias: Matrix) -> Tensor:
    if sparse is not None:
        return multiply_sparse(u, sparse, bias)
    assert dense is not None
    return F.linear(u, dense, bias)


class _Layer(torch.autograd.Function):
    """The outputs of a model; the backward pass is that of `_Equilibrium` between those of two products."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Tensor:
        y, x, v = _forward(plan, *tensors)
        ctx.plan = plan
        ctx.save_for_backward(x, v, *tensors)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        x, v, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx.plan, tensors, gradients[0], ctx.needs_input_grad[1:])
        return None, *_backward(ctx.plan, x, v, tensors, gradients[0], ctx.needs_input_grad[1:])


def _backward(
    plan: Plan, x: Tensor, v: Tensor, tensors: list[Any], g: Tensor, needs: tuple[bool, ...]
) -> list[Any]:
    u, A, B, C, D, _ = tensors
    du, dA, dB, dC, dD, db = needs
    across = g.mT
    found: list[Any] = [None, None, None, across @ x if dC else None, across @ u if dD else None, None]
    if dA or dB or db or du:
        y = _adjoint(plan, x, v, g @ C, A)
        turned = y.mT
        found[1], found[2] = turned @ x if dA else None, turned @ u if dB else None
        found[5] = y.sum(0) if db else None
        if du:
            found[0] = y @ B if D is None else torch.addmm(g @ D, y, B)
    return found


def _adjoint(plan: Plan, x: Tensor, v: Tensor, g: Tensor, A: Tensor) -> Tensor:
    d, offset, scale = prepare_adjoint(plan.kind, torch.addmm(v, x, A.mT), g)
    recipe, turned = plan.backward.recipe, A.mT
    y, status, steps, _ = run_kernel(turned, offset, d, None, recipe, trace=False)
    if int(status.numpy().max(initial=0)) >= Status.MAX_STEPS:
        again = lambda: run_kernel(turned, offset, d, None, recipe, trace=True)[3]  # noqa: E731
        f = TransposedMap((turned,), d, offset, 1.0)
        y = plan.backward.finish(Iterates(y, status, steps, again), f, plan.on_failure, "adjoint solve")
    return y.mul_(scale)


def _differentiable(plan: Plan, tensors: list[Any], g: Tensor, needs: tuple[bool, ...]) -> list[Any]:
    """Computes gradients that can be differentiated, by solving once more."""
    u, A, B, C, D, bias = tensors
    v = F.linear(u, B, bias)
    x = affine_equilibrium(plan.problem(), v, torch.zeros_like(v), v.detach(), A)[0]
    y = F.linear(x, C) if D is None else F.linear(x, C) + F.linear(u, D)
    wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


PROJECTED = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Source:
    """Where A comes from.

    Attributes:
        parameter: A itself, or what is projected.
        radius: of the l1 ball on which rows are projected; None where `parameter` is A.
    """

    parameter: Tensor
    radius: float | None


def source_of(state: Any) -> Source:
    """Returns how the A of a model is computed: by a kernel where only rows are projected."""
    if state.condition.name == "inf" and state.raw.dtype in PROJECTED:
        radius = state.condition.check_kappa(state.kappa, state.activation)
        return Source(state.raw, radius)
    return Source(state.dense(), None)


def run_device_layer(
    plan: Plan, u: Tensor, source: Source, B: Tensor, C: Tensor, D: Matrix, bias: Matrix
) -> Tensor:  # (B, p) -> (B, q)
    """Computes the outputs of a model whose A comes from a source."""
    if torch.is_grad_enabled():
        output: Tensor = _DeviceLayer.apply(plan, source, u, source.parameter, B, C, D, bias)
        return output
    return _device_forward(plan, source.radius, False, u, source.parameter, B, C, D, bias)[0]


class _Pending:
    """A solve that was launched; `settle` sees to failures when what needs its answer is under way too."""

    def __init__(self, plan: Plan, A: Tensor, v: Tensor, d: Tensor | None, *, saves: bool = False) -> None:
        self.plan, self.operands = plan, (A, v, d, None)
        self.recipe = (plan.forward if d is None else plan.backward).recipe
        self.alarm = None if plan.on_failure == "ignore" else Alarm(v.device)
        flag = unheard(v.device) if self.alarm is None else self.alarm.flag
        self.scaled = d is not None
        self.found = launcher().launch(*self.operands, self.recipe, flag, saves=saves, scaled=self.scaled)
        if self.alarm is not None:
            self.alarm.arm()

    def look_at(self, y: Tensor) -> None:
        """Has outputs that are not finite count as failures."""
        if self.alarm is not None:
            launcher().launch_output_check(y, self.alarm.flag)
            self.alarm.arm()

    def settle(self, name: str, u: Tensor | None = None, y: Tensor | None = None) -> None:
        """Warns or raises if samples or outputs have failed; blames the inputs where these are not finite."""
        if self.alarm is None or not self.alarm.rings():
            return
        if u is not None:
            require_finite("u", u)
        seen = Iterates(self.found.value, self.found.status, self.found.steps, self._trace)
        report(seen, self.plan.on_failure, solve=name, max_steps=self.recipe.max_steps)
        if y is not None:
            report_outputs(y, self.found.value, self.plan.on_failure)

    def _trace(self) -> Tensor:
        return run_recipe(*self.operands, self.recipe, trace=True, scaled=self.scaled).residuals


def _device_forward(
    plan: Plan,
    radius: float | None,
    saves: bool,
    u: Tensor,
    W: Tensor,
    B: Tensor,
    C: Tensor,
    D: Matrix,
    bias: Matrix,
) -> tuple[Tensor, ...]:
    """Returns outputs, states, slopes, A and the levels of its projection."""
    A, levels = (W, W) if radius is None else _projection().project(W, radius)
    solve = _Pending(plan, A, F.linear(u, B, bias), None, saves=saves)
    x = solve.found.value
    y = F.linear(x, C) if D is None else torch.addmm(F.linear(x, C), u, D.mT)
    solve.look_at(y)
    solve.settle("equilibrium", u, y)
    return y, x, solve.found.slopes, A, levels


@functools.cache
def _projection() -> ModuleType:
    """Imports what needs Triton, on first use."""
    return require("wellposed.kernels.gpu.projection")


class _DeviceLayer(torch.autograd.Function):
    """The outputs of a model; with slopes d the backward pass is ``y = d (A'y + C'g)``."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, source: Source, *tensors: Any) -> Tensor:
        y, *kept = _device_forward(plan, source.radius, True, *tensors)
        ctx.plan, ctx.source = plan, source
        ctx.save_for_backward(*kept, *tensors)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        x, d, A, levels, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_device_differentiable(ctx.plan, ctx.source, tensors, gradients[0], needs)
        found, solve = _device_backward(ctx.plan, x, d, A, tensors, gradients[0], needs)
        if found[1] is not None and ctx.source.radius is not None:
            found[1] = _projection().project_backward(tensors[1], levels, found[1])
        if solve is not None:
            solve.settle("adjoint solve")
        return None, None, *found


def _device_backward(
    plan: Plan, x: Tensor, d: Tensor, A: Tensor, tensors: list[Any], g: Tensor, needs: tuple[bool, ...]
) -> tuple[list[Any], _Pending | None]:
    """Launches the gradients by u, A, B, C, D and the bias; what solves for them is still to be settled."""
    u, _, B, C, D, _ = tensors
    du, dA, dB, dC, dD, db = needs
    mm, across = torch.mm, g.t()  # without the detours of `@`, which take as long as a launch
    solve = _Pending(plan, A.t(), mm(g, C), d) if du or dA or dB or db else None
    found: list[Any] = [None, None, None, mm(across, x) if dC else None, mm(across, u) if dD else None, None]
    if solve is not None:
        y = solve.found.value
        turned = y.t()
        found[1], found[2] = mm(turned, x) if dA else None, mm(turned, u) if dB else None
        found[5] = y.sum(0) if db else None
        if du:
            found[0] = mm(y, B) if D is None else torch.addmm(mm(g, D), y, B)
    return found, solve


def _device_differentiable(
    plan: Plan, source: Source, tensors: list[Any], g: Tensor, needs: tuple[bool, ...]
) -> list[Any]:
    """Computes gradients that can be differentiated, by solving once more."""
    u, W, B, C, D, bias = tensors
    v = F.linear(u, B, bias)
    A = W if source.radius is None else project_rows(W, source.radius)
    x = affine_equilibrium(plan.problem(), v, torch.zeros_like(v), v.detach(), A)[0]
    y = F.linear(x, C) if D is None else F.linear(x, C) + F.linear(u, D)
    wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]
