"""The equilibrium as operators of torch, for everything that looks at graphs: torch.compile, autocast, profilers.

In eager mode models call the kernels through their own autograd function instead: a custom operator passes twice
through the dispatcher and through Python for every call, which costs as much as a small solve.
"""

import functools
import json
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation
from wellposed.activations.activation import same_map
from wellposed.equilibrium.affine import AffineProblem, differentiable_adjoint, eager_adjoint
from wellposed.equilibrium.method import Method, OnFailure, report_outputs
from wellposed.equilibrium.solvers import Anderson, Picard
from wellposed.equilibrium.stopping import Absolute, Relative, Settled, Steps
from wellposed.errors import InputError, UnknownNameError
from wellposed.kernels.engine import choose_loop, solve_adjoint
from wellposed.kernels.spec import kind_of, solver_problem, stop_problem

PARTS: dict[str, Any] = {part.__name__: part for part in (Anderson, Picard, Absolute, Relative, Settled, Steps)}


@dataclass(frozen=True)
class Description:
    """How an equation is solved, as a text that an operator can take."""

    activation: str
    forward: tuple[Any, ...]  # solver, stopping rule, the most steps
    backward: tuple[Any, ...]
    on_failure: OnFailure
    direct: int
    easy: int
    patience: int
    automatic: bool
    executor: str


def describe(problem: AffineProblem, executor: str) -> str | None:
    """Writes a problem down; None if there is no kernel for it."""
    methods = problem.forward, problem.backward
    name = _name(problem.activation)
    if not name or problem.damping != 1 or problem.bound is not None or problem.splitting is not None:
        return None
    if any(solver_problem(method.solver) or stop_problem(method.stop) for method in methods):
        return None
    forward, backward = ((_written(m.solver), _written(m.stop), m.max_steps) for m in methods)
    policy = problem.forward.on_failure
    counts = problem.direct, problem.easy, problem.patience
    automatic = getattr(problem.forward.loop, "automatic", False)
    found = Description(name, forward, backward, policy, *counts, automatic, executor)
    return json.dumps(asdict(found))


def _name(activation: Activation) -> str:
    """Returns the name of an activation that has a kernel; nothing if the name does not lead back to it."""
    try:
        found = kind_of(activation) is not None and same_map(get_activation(activation.name), activation)
    except (InputError, UnknownNameError):
        return ""
    return activation.name if found else ""


def _written(part: Any) -> list[Any]:
    assert is_dataclass(part) and not isinstance(part, type)
    return [type(part).__name__, asdict(part)]


@functools.lru_cache(maxsize=256)
def _read(text: str) -> tuple[Description, Activation, list[tuple[Any, Any, int]]]:
    found = Description(**json.loads(text))
    methods = [(_part(solver), _part(stop), steps) for solver, stop, steps in (found.forward, found.backward)]
    return found, get_activation(found.activation), methods


def _part(written: list[Any]) -> Any:
    name, fields = written
    return PARTS[name](**fields)


def _problem(text: str) -> AffineProblem:
    """Returns the problem behind a text; like every method, it serves one solve."""
    found, activation, methods = _read(text)
    loop = choose_loop(found.executor, trace=False, automatic=found.automatic)
    forward, backward = (
        Method(solver, stop, steps, found.on_failure, loop=loop) for solver, stop, steps in methods
    )
    return AffineProblem(
        activation, forward, backward, direct=found.direct, trace=False, easy=found.easy,
        shortcut=solve_adjoint, patience=found.patience,
    )  # fmt: skip


@torch.library.custom_op("wellposed::equilibrium", mutates_args=())
def equilibrium(v: Tensor, x0: Tensor, A: Tensor, problem: str) -> tuple[Tensor, Tensor, Tensor]:
    """Solves ``x = phi(Ax + v)``; returns states, statuses and steps."""
    found = _problem(problem).solve(v.contiguous(), x0, v, (A,))
    return found.value.contiguous().clone(), found.status, found.steps


@equilibrium.register_fake
def _(v: Tensor, x0: Tensor, A: Tensor, problem: str) -> tuple[Tensor, Tensor, Tensor]:
    rows = v.shape[:1]
    return v.new_empty(v.shape), v.new_empty(rows, dtype=torch.int8), v.new_empty(rows, dtype=torch.int64)


@torch.library.custom_op("wellposed::adjoint", mutates_args=())
def adjoint(x: Tensor, v: Tensor, gradient: Tensor, A: Tensor, problem: str) -> Tensor:
    """Solves ``y = d (A'y + g)`` with ``d = phi'(Ax + v)``."""
    return eager_adjoint(_problem(problem), x, v, gradient, (A,)).contiguous()


@adjoint.register_fake
def _(x: Tensor, v: Tensor, gradient: Tensor, A: Tensor, problem: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    v, _, A, ctx.problem = inputs
    ctx.save_for_backward(output[0], v, A)


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, v, A = ctx.saved_tensors
    y = adjoint(x, v, gradient, A, ctx.problem)
    return y, None, y.mT @ x, None


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.problem = inputs
    ctx.save_for_backward(*tensors)


def _second_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiates the adjoint by the differentiable path."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        x, v, g, A = leaves
        y = differentiable_adjoint(_problem(ctx.problem), x, v, g, (A,))
    return *torch.autograd.grad(y, leaves, gradient, allow_unused=True, materialize_grads=True), None


@torch.library.custom_op("wellposed::checked_outputs", mutates_args=())
def checked_outputs(y: Tensor, x: Tensor, on_failure: str) -> Tensor:
    """Returns outputs and tells of those that are not finite; a graph cannot look at values itself.

    Args:
        x: the states, empty where they are not at hand.
    """
    report_outputs(y, x if x.numel() else None, on_failure)  # type: ignore[arg-type]
    return y.clone()


@checked_outputs.register_fake
def _(y: Tensor, x: Tensor, on_failure: str) -> Tensor:
    return torch.empty_like(y)


def _unchanged(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None


checked_outputs.register_autograd(_unchanged)
equilibrium.register_autograd(_backward, setup_context=_keep)
adjoint.register_autograd(_second_backward, setup_context=_keep_all)
