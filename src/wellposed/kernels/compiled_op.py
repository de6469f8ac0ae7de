"""The equilibrium as operators of torch, for everything that reads graphs: torch.compile, autocast, profilers.

In eager mode models call the kernels through their own autograd function instead: every call of a custom operator
passes twice through the dispatcher and through Python, which costs as much as a small solve.
"""

import functools
import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation
from wellposed.activations.activation import same_map
from wellposed.equilibrium.affine import AffineSolve, AffineSpec, differentiable_adjoint, fast_adjoint
from wellposed.equilibrium.gradients import Implicit
from wellposed.equilibrium.method import OnFailure, Solve, SolveOptions, checked_under_functorch, report_outputs
from wellposed.equilibrium.solvers import Anderson, Picard
from wellposed.equilibrium.stopping import Absolute, Relative, Settled, Steps
from wellposed.equilibrium.tracing import under_functorch, under_transform
from wellposed.errors import InputError, UnknownNameError
from wellposed.kernels.engine import choose

RULES: dict[str, Any] = {rule.__name__: rule for rule in (Anderson, Picard, Absolute, Relative, Settled, Steps)}


def write_spec(spec: AffineSpec) -> str | None:
    """Writes a spec for which some engine has a kernel as text, which an operator can take.

    Returns:
        None if the name of the activation does not lead back to it.
    """
    rule = spec.gradient
    assert isinstance(rule, Implicit)
    if not _is_known(spec.activation):
        return None
    forward = _written(spec.forward.solver), _written(spec.forward.stop), spec.forward.max_steps
    gradient = _written(rule.solver), _written(rule.stop), rule.max_steps
    return json.dumps(
        [spec.activation.name, forward, spec.forward.on_failure, gradient, spec.automatic, spec.executor]
    )


def _is_known(activation: Activation) -> bool:
    try:
        return same_map(get_activation(activation.name), activation)
    except (InputError, UnknownNameError):
        return False


def _written(rule: Any) -> Any:
    return None if rule is None else [type(rule).__name__, asdict(rule)]


@functools.lru_cache(maxsize=256)
def read_spec(text: str) -> AffineSpec:
    """Returns the spec behind a text."""
    name, forward, policy, gradient, automatic, executor = json.loads(text)
    solver, stop, steps = (_read(field) for field in forward)
    rule = Implicit(*(_read(field) for field in gradient))
    options = SolveOptions(solver, stop, steps, policy)
    return AffineSpec(get_activation(name), options, rule, automatic=automatic, executor=executor)


def _read(written: Any) -> Any:
    return RULES[written[0]](**written[1]) if isinstance(written, list) else written


def _run(text: str, A: Tensor) -> AffineSolve:
    spec = read_spec(text)
    return AffineSolve(spec, choose(spec, (A,)), Solve(spec.forward), trace=False)


@torch.library.custom_op("wellposed::equilibrium", mutates_args=())
def equilibrium_op(v: Tensor, x0: Tensor, A: Tensor, spec: str) -> tuple[Tensor, Tensor, Tensor]:
    """Solves ``x = phi(Ax + v)``; returns states, statuses and steps."""
    run = _run(spec, A)
    iterates = run.engine.solve(run.spec, (A,), v.contiguous(), x0)
    run.solve.note(iterates)
    return iterates.value.contiguous().clone(), iterates.status, iterates.steps


@equilibrium_op.register_fake
def _(v: Tensor, x0: Tensor, A: Tensor, spec: str) -> tuple[Tensor, Tensor, Tensor]:
    rows = v.shape[:1]
    return v.new_empty(v.shape), v.new_empty(rows, dtype=torch.int8), v.new_empty(rows, dtype=torch.int64)


@torch.library.custom_op("wellposed::adjoint", mutates_args=())
def adjoint(x: Tensor, v: Tensor, gradient: Tensor, A: Tensor, spec: str) -> Tensor:
    """Solves ``y = d (A'y + g)`` with ``d = phi'(Ax + v)``."""
    return fast_adjoint(_run(spec, A), x, v, gradient, (A,)).contiguous()


@adjoint.register_fake
def _(x: Tensor, v: Tensor, gradient: Tensor, A: Tensor, spec: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    v, _, A, ctx.spec = inputs
    ctx.save_for_backward(output[0], v, A)


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, v, A = ctx.saved_tensors
    y = adjoint(x, v, gradient, A, ctx.spec)
    return y, None, y.mT @ x, None


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.spec = inputs
    ctx.save_for_backward(*tensors)


def _second_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiates the adjoint by the differentiable path."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        x, v, g, A = leaves
        y = differentiable_adjoint(_run(ctx.spec, A), x, v, g, (A,))
    return *torch.autograd.grad(y, leaves, gradient, allow_unused=True, materialize_grads=True), None


def check_outputs(y: Tensor, x: Tensor, on_failure: OnFailure) -> Tensor:
    """Returns outputs and reports those that are not finite and whose states are, where values can be read."""
    if on_failure == "ignore" or torch.compiler.is_exporting():
        return y
    if torch.compiler.is_compiling():
        return y if y.is_cuda else checked_outputs(y, x.detach(), on_failure)
    if under_functorch():
        return y if y.is_cuda else checked_under_functorch(y, x, on_failure)
    if not under_transform():
        report_outputs(y.detach(), x, on_failure)
    return y


@torch.library.custom_op("wellposed::checked_outputs", mutates_args=())
def checked_outputs(y: Tensor, x: Tensor, on_failure: str) -> Tensor:
    """Returns outputs and reports those that are not finite; a graph cannot read values itself."""
    report_outputs(y, x, on_failure)  # type: ignore[arg-type]
    return y.clone()


@checked_outputs.register_fake
def _(y: Tensor, x: Tensor, on_failure: str) -> Tensor:
    return torch.empty_like(y)


def _unchanged(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None


checked_outputs.register_autograd(_unchanged)
equilibrium_op.register_autograd(_backward, setup_context=_keep)
adjoint.register_autograd(_second_backward, setup_context=_keep_all)
