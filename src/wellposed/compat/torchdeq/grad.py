"""How a state is differentiated: by steps from it, or by the implicit function theorem."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.compat.torchdeq.solver import BUILT_IN, Function, make_solver, make_stop
from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.gradients import Implicit
from wellposed.equilibrium.method import OnFailure
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Picard
from wellposed.equilibrium.stopping import Steps
from wellposed.errors import InputError

__all__ = ["backward_factory"]

Writer = Callable[[dict[str, Any]], Any]
Produce = Callable[..., list[Tensor]]


def backward_factory(
    grad_type: str | int = "ift",
    hook_ift: bool = False,
    b_solver: Function | None = None,
    b_solver_kwargs: Mapping[str, Any] | None = None,
    sup_gap: int = -1,
    sup_loc: Sequence[int] | None = None,
    tau: float = 1.0,
) -> Produce:
    """Returns a function ``(trainer, f, z, writer=None)`` that connects a state to what f depends on.

    Args:
        grad_type: ``"ift"``, or the number of damped steps ``z <- tau f(z) + (1 - tau) z`` to differentiate.
        hook_ift: no different from ``"ift"`` here.
        b_solver, b_solver_kwargs: of the backward solve, from `get_solver`.
        sup_gap: if positive, every such step is returned.
        sup_loc: steps that are returned besides the last.
        tau: damping.
    """
    if grad_type != "ift":
        if not isinstance(grad_type, int) or grad_type < 1:
            raise InputError(f"grad_type is 'ift' or a number of steps, at least 1; received {grad_type!r}")
        chosen = [k for k in range(1, grad_type + 1) if sup_gap > 0 and k % sup_gap == 0]
        if sup_gap <= 0:
            chosen = [*sorted(k for k in set(sup_loc or ()) if 1 <= k <= grad_type), grad_type]
        return lambda trainer, func, z_pred, writer=None: take_steps(func, z_pred, chosen, tau)
    if b_solver is None:
        raise InputError("grad_type='ift' needs b_solver, from get_solver")
    solver, settings = b_solver, dict(b_solver_kwargs or {})

    def implicit(
        trainer: Any, func: Callable[..., Tensor], z_pred: Tensor, writer: Writer | None = None
    ) -> list[Tensor]:
        name = next((name for name, function in BUILT_IN.items() if function is solver), None)
        if name is None or writer is not None:
            return [solve_in_hook(func, z_pred, solver, settings, writer)]
        solution = attach(func, z_pred, name, **settings)
        if trainer is not None:
            trainer.adjoint_record = solution.adjoint_record
        assert isinstance(solution.value, Tensor)
        return [solution.value]

    return implicit


def take_steps(func: Callable[..., Tensor], z: Tensor, chosen: Sequence[int], tau: float) -> list[Tensor]:
    """Returns the states after some of the damped steps; a step may be chosen twice."""
    states = [z]
    for _ in range(max(chosen)):
        z = func(z) if tau == 1 else torch.lerp(z, func(z), tau)
        states.append(z)
    return [states[k] for k in chosen]


def attach(
    func: Callable[..., Tensor],
    z: Tensor,
    b_solver: str,
    max_iter: int = 50,
    tol: float = 1e-3,
    stop_mode: str = "abs",
    on_failure: OnFailure = "warn",
) -> Solution:
    """Takes one step from a state, whose derivative is that of an equilibrium."""
    stop = make_stop(tol, stop_mode, max_iter, b_solver == "simple_fixed_point_iter")
    gradient = Implicit(make_solver(b_solver), stop, stop.limit() or max_iter)
    return fixed_point(
        func, z, solver=Picard(), stop=Steps(1), max_steps=1, gradient=gradient, on_failure=on_failure
    )


def solve_in_hook(
    func: Callable[..., Tensor], z: Tensor, solver: Function, settings: Mapping[str, Any], writer: Writer | None
) -> Tensor:
    """Takes one step from a state and lets a function solve ``w = J' w + g`` in its backward pass."""
    point = z.detach().requires_grad_()
    with torch.enable_grad():
        image = func(point)
    step = func(z.detach())
    options = settings if solver in BUILT_IN.values() else {k: v for k, v in settings.items() if k != "on_failure"}

    def adjoint(gradient: Tensor) -> Tensor:
        def product(w: Tensor) -> Tensor:
            (result,) = torch.autograd.grad(image, point, w, retain_graph=True)
            return result + gradient

        w, _, info = solver(product, torch.zeros_like(gradient), **options)
        if writer is not None:
            writer(info)
        return w

    if step.requires_grad:
        step.register_hook(adjoint)
    return step
