"""A solve as plain numbers, the way compiled kernels and custom operators take it."""

from dataclasses import dataclass

import torch

from wellposed.activations import Activation, get_activation
from wellposed.equilibrium.solvers import Anderson, Solver, default_ridge
from wellposed.equilibrium.stopping import Absolute, Relative, Settled, Steps, Stopping, default_tolerance

RELU, SLOPED, LINEAR, TANH, SIGMOID = range(5)  # kinds of maps; LINEAR is the adjoint
TOLERANCE, SETTLED, COUNTED = range(3)  # stopping rules
KINDS = {"relu": (RELU, 0.0), "identity": (SLOPED, 1.0), "tanh": (TANH, 0.0), "sigmoid": (SIGMOID, 0.0)}


@dataclass(frozen=True)
class Recipe:
    """What a kernel must know besides matrices and vectors.

    Attributes:
        kind, slope: the activation; the slope is that of leaky ReLU below zero.
        memory: of Anderson's extrapolation, 0 for plain steps; `worth`, `patience` and `ridge` as there.
        rule: accept a residual below ``max(atol, rtol |f(x)|)``, when nothing changes any more or after `limit`
            steps, or exactly after `limit` steps.
    """

    kind: int
    slope: float
    memory: int
    worth: float
    patience: float
    ridge: float
    rule: int
    atol: float
    rtol: float
    limit: int
    max_steps: int


def kind_of(activation: Activation) -> tuple[int, float] | None:
    """Returns the kind and slope of an activation; None if no kernel knows it.

    Example:
        >>> kind_of(get_activation("relu")), kind_of(get_activation("gelu"))
        ((0, 0.0), None)
    """
    if activation.name in KINDS and activation.function is get_activation(activation.name).function:
        return KINDS[activation.name]
    slope = getattr(activation.function, "keywords", {}).get("negative_slope")
    return None if slope is None or not activation.name.startswith("leaky_relu") else (SLOPED, float(slope))


def make_recipe(
    kind: int, slope: float, solver: Solver, stop: Stopping, max_steps: int, dtype: torch.dtype
) -> Recipe:
    """Writes a solve down in numbers; the solver and the rule must have kernels."""
    eps = torch.finfo(dtype).eps
    atol = rtol = 0.0
    rule = limit = 0
    if isinstance(stop, Absolute):
        atol = stop.atol
    elif isinstance(stop, Relative):
        rtol = max(default_tolerance(dtype) if stop.rtol is None else stop.rtol, 4 * eps)
        atol = 1e-3 * (default_tolerance(dtype) if stop.rtol is None else stop.rtol)
        atol = atol if stop.atol is None else stop.atol
    elif isinstance(stop, Settled):
        rule, limit = SETTLED, stop.depth
    elif isinstance(stop, Steps):
        rule, limit = COUNTED, stop.n
    if not isinstance(solver, Anderson):
        return Recipe(kind, slope, 0, 0.0, 0.0, 0.0, rule, atol, rtol, limit, max_steps)
    ridge = default_ridge(dtype) if solver.ridge is None else solver.ridge
    parts = solver.memory, solver.worth, solver.patience, ridge
    return Recipe(kind, slope, *parts, rule, atol, rtol, limit, max_steps)
