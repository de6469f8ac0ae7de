"""Chooses how ``x = phi(Ax + v)`` is computed, and says why."""

from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap
from wellposed.equilibrium.anderson import Anderson
from wellposed.equilibrium.gradient import Implicit
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.problem import Loop, Method
from wellposed.errors import InputError
from wellposed.kernels.executor import CompiledLoop, kernels
from wellposed.kernels.support import installation_problem, map_problem, solver_problem, stop_problem

EXECUTORS = ("auto", "numba", "reference")


def check_executor(executor: str) -> None:
    """Raises unless an executor of this name exists and can run here.

    Example:
        >>> check_executor("reference")
    """
    if executor not in EXECUTORS:
        raise InputError(f"executor must be one of {', '.join(EXECUTORS)}; received {executor!r}")
    if executor == "numba" and installation_problem():
        kernels()


def choose_loop(executor: str, *, trace: bool) -> Loop:
    """Returns what runs a solve.

    ``"auto"`` compiles whatever has a kernel and iterates the rest, ``"numba"`` raises where there is no kernel.
    """
    if executor == "reference":
        return iterate
    return _LOOPS[executor == "numba", trace]


_LOOPS = {(strict, trace): CompiledLoop(trace, strict) for strict in (False, True) for trace in (False, True)}


def explain(model: Any, u: Tensor) -> str:
    """Says which executor computes ``model(u)`` and why.

    Args:
        model: an `ImplicitModel`.
        u: inputs, of which only shape, dtype and device count.

    Example:
        >>> from wellposed import ImplicitModel
        >>> explain(ImplicitModel(3, 2, 8, executor="reference"), torch.zeros(5, 3))
        'reference: executor="reference" was asked for'
    """
    if model.executor == "reference":
        return 'reference: executor="reference" was asked for'
    method: Method = model.method()
    with torch.no_grad():
        system = model.state.system()
    v = torch.empty(u.shape[:-1].numel(), model.state_features, dtype=model.B.dtype, device=u.device)
    problem = _model_problem(model, system) or solver_problem(method.solver) or stop_problem(method.stop)
    problem = problem or map_problem(AffineMap(system.factors, v, model.activation, system.damping), v)
    if problem:
        return f"reference: {problem}"
    solver = "Anderson" if isinstance(method.solver, Anderson) else "Picard"
    dtype = str(v.dtype).removeprefix("torch.")
    return f"numba: {model.activation.name}, {dtype}, {v.shape[1]} states, batch {v.shape[0]}, {solver}"


def _model_problem(model: Any, system: Any) -> str:
    """Says why a whole model has no kernel; nothing if it may have one."""
    if not isinstance(model.gradient, Implicit):
        return f"gradient {type(model.gradient).__name__} has no kernel"
    if not model.activation.componentwise:
        return f"activation {model.activation.name} acts on blocks and has no kernel"
    return "" if system.splitting is None else "operator splitting (condition 'monotone') has no kernel"
