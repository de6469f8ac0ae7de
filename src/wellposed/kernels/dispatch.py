"""Chooses how ``x = phi(Ax + v)`` is computed, and says why."""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap
from wellposed.equilibrium.gradients import Implicit
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.method import Loop, Method
from wellposed.equilibrium.solvers import Anderson
from wellposed.errors import InputError, require
from wellposed.kernels.automatic import handover_step
from wellposed.kernels.executor import CompiledLoop, kernels, wrong_engine
from wellposed.kernels.gpu import RESIDENT
from wellposed.kernels.inference import explain_parts
from wellposed.kernels.sparse import SparseRows
from wellposed.kernels.support import engine_of, installation_problem, map_problem, solver_problem, stop_problem

EXECUTORS = ("auto", "numba", "triton", "reference")


def check_executor(executor: str) -> None:
    """Raises unless an executor of this name exists and can run here.

    Example:
        >>> check_executor("reference")
    """
    if executor not in EXECUTORS:
        raise InputError(f"executor must be one of {', '.join(EXECUTORS)}; received {executor!r}")
    if executor == "numba" and installation_problem():
        kernels()
    if executor == "triton":
        require("triton")


def choose_loop(executor: str, *, trace: bool, automatic: bool = False, sparse: SparseRows | None = None) -> Loop:
    """Returns what runs a solve.

    ``"auto"`` compiles whatever has a kernel and iterates the rest; ``"numba"``, on the CPU, and ``"triton"``, on
    CUDA devices, raise where there is no kernel. With `automatic` nobody has asked for a solver, and slow samples
    may go to Newton's method; `sparse` is the matrix of the maps to be solved, if it is known and sparse.
    """
    if executor == "reference":
        return iterate
    if sparse is not None:
        return CompiledLoop(trace, _ENGINES[executor], automatic, sparse)
    return _LOOPS[_ENGINES[executor], trace, automatic]


_ENGINES = {"auto": "", "numba": "numba", "triton": "triton"}
_LOOPS = {
    (only, trace, automatic): CompiledLoop(trace, only, automatic)
    for only, trace, automatic in product(_ENGINES.values(), (False, True), (False, True))
}


def explain(model: Any, u: Tensor) -> str:
    """Says which executor computes ``model(u)`` and why.

    Args:
        model: an `ImplicitModel`, also `Noisy`, an `ImplicitRNN`, or a `DEQ`, of which the latest solves are told.
        u: inputs, of which only shape, dtype, device and whether they require gradients count. The answer is for
            now: under ``torch.no_grad()`` sparse products may be taken that have no derivatives.

    Example:
        >>> from wellposed import ImplicitModel
        >>> explain(ImplicitModel(3, 2, 8, executor="reference"), torch.zeros(5, 3))
        'reference: executor="reference" was asked for'
    """
    if hasattr(model, "cells") or hasattr(model, "cell"):
        return str(model.explain())
    if hasattr(model, "noise"):
        return str(model.explain(u))
    if model.executor == "reference":
        return 'reference: executor="reference" was asked for'
    method: Method = model.method()
    with torch.no_grad():
        system = model.state.system()
    v = torch.empty(u.shape[:-1].numel(), model.state_features, dtype=model.B.dtype, device=u.device)
    device = u.device.type
    problem = _model_problem(model, system) or solver_problem(method.solver, device) or stop_problem(method.stop)
    f = AffineMap(system.factors, v, model.activation, system.damping)
    problem = problem or map_problem(f, v) or wrong_engine(model.executor, v)
    if problem:
        return f"reference: {problem}"
    dtype = str(v.dtype).removeprefix("torch.")
    size = f"{v.shape[1]} states, batch {v.shape[0]}"
    if engine_of(v) == "triton":
        parts = "A on the chip" if v.shape[1] <= RESIDENT[v.element_size()] else "A in tiles from the cache"
    else:
        parts = explain_parts(model, u)
    plan = f"{_plan(model, method, f)}{parts and f', {parts}'}"
    return f"{engine_of(v)}: {model.activation.name}, {dtype}, {size}, {plan}"


def _plan(model: Any, method: Method, f: AffineMap) -> str:
    """Says which solvers take part."""
    solver = "Anderson" if isinstance(method.solver, Anderson) else "Picard"
    limit = handover_step(f, method.stop, method.max_steps)
    if model.solver is not None or limit == method.max_steps or engine_of(f.v) == "triton":
        return solver
    return f"{solver}, after {limit} steps Newton for samples that are not finished"


def _model_problem(model: Any, system: Any) -> str:
    """Says why a whole model has no kernel; nothing if it may have one."""
    if not isinstance(model.gradient, Implicit):
        return f"gradient {type(model.gradient).__name__} has no kernel"
    if not model.activation.componentwise:
        return f"activation {model.activation.name} acts on blocks and has no kernel"
    return "" if system.splitting is None else "operator splitting (condition 'monotone') has no kernel"
