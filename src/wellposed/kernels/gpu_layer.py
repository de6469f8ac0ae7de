"""A whole model on a CUDA device as one node of the graph: see `kernels.layer`, which does it on the CPU.

The forward pass is five launches, the backward pass about eight, whatever the number of steps; the row-wise
projection of A is part of the node. Failures are noticed through an `Alarm`, the only wait of a pass; with
``on_failure="ignore"`` there is none.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import affine_equilibrium
from wellposed.equilibrium.fixed_point import require_finite
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.method import report
from wellposed.errors import require
from wellposed.kernels.gpu import Alarm, launcher, run_recipe, unheard
from wellposed.kernels.layer import Matrix, Plan

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
    plan: Plan, u: Tensor, state: Any, B: Tensor, C: Tensor, D: Matrix, bias: Matrix
) -> Tensor:  # (B, p) -> (B, q)
    """Computes the outputs of a model whose A is that of `state`."""
    source = source_of(state)
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

    def settle(self, name: str, u: Tensor | None = None) -> None:
        """Warns or raises if samples have failed; blames the inputs where these are not finite."""
        if self.alarm is None or not self.alarm.rings():
            return
        if u is not None:
            require_finite("u", u)
        seen = Iterates(self.found.value, self.found.status, self.found.steps, self._trace)
        report(seen, self.plan.on_failure, solve=name, max_steps=self.recipe.max_steps)

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
    solve.settle("equilibrium", u)
    return y, x, solve.found.slopes, A, levels


@functools.cache
def _projection() -> ModuleType:
    """Imports what needs Triton, on first use."""
    return require("wellposed.kernels.gpu_projection")


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
