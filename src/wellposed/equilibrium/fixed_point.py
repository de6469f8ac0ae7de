"""fixed_point(): solves ``x = f(x, *inputs)`` for any function f."""

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.equilibrium.compiled import loop_of
from wellposed.equilibrium.gradients import GRADIENTS, Gradient, Implicit
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.maps import FunctionMap, Map, Packing, State
from wellposed.equilibrium.method import (
    Loop,
    OnFailure,
    Solve,
    SolveHooks,
    make_options,
    require_all_finite,
    require_finite,
)
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Anderson, Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.equilibrium.tracing import outside_compile, under_transform
from wellposed.errors import InputError


def _check_values(x0: Tensor, inputs: tuple[Tensor, ...]) -> None:
    for index, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            raise InputError(
                f"inputs of f are batch-first tensors; input {index} is a {type(value).__name__}; "
                "let f capture what does not depend on the sample"
            )
        if value.dim() == 0 or value.shape[0] != x0.shape[0]:
            raise InputError(
                f"inputs of f are batch-first with the batch size {x0.shape[0]} of x0; input {index} has shape "
                f"{tuple(value.shape)}; let f capture what does not depend on the sample"
            )
    if under_transform():
        return
    floating = {f"input {index}": value for index, value in enumerate(inputs) if value.is_floating_point()}
    if {value.device for value in floating.values()} <= {x0.device}:
        return require_all_finite({"x0": x0, **floating})
    for name, value in {"x0": x0, **floating}.items():
        require_finite(name, value)


@outside_compile
def fixed_point(
    f: Callable[..., State] | Map,
    x0: State,
    *inputs: Tensor,
    solver: Solver | str | None = None,
    stop: Stopping | str | None = None,
    max_steps: int | None = None,
    gradient: Gradient | str | None = None,
    on_failure: OnFailure = "warn",
    generator: torch.Generator | None = None,
    compile: bool = False,
    loop: Loop = iterate,
    hooks: SolveHooks | None = None,
) -> Solution:
    """Finds ``x = f(x, *inputs)`` for every sample of a batch.

    Args:
        f: takes a state in the shape of `x0` and the inputs; must treat every sample by itself.
        x0: start, a batch-first tensor or a tuple of them.
        inputs: everything that f needs per sample. Inputs are gathered when samples have converged;
            a tensor that f captures must not have a batch dimension if inputs are given.
        solver: object or name; if None `Anderson` with a `patience` of 24, which equals `Picard` where some twenty
            plain steps suffice: on maps of which nothing is known, jumps gain little there.
        stop: object or name; `Relative` if None.
        max_steps: the most evaluations of f; 200 if None.
        gradient: object or name; `Implicit` if None.
        on_failure: ``"warn"``, ``"raise"`` or ``"ignore"`` samples that reach no equilibrium.
        generator: randomness of the stopping rule.
        compile: runs the loop as compiled code: ``phi(Ax + v)`` by the kernels of `ImplicitModel` on the CPU, all
            else under torch.compile, for equations that return. What cannot be compiled warns once, and runs.
        loop: runs the steps, forward and backward; another implementation of the same loop may be given.
        hooks: receive the results, and choose where the backward solve starts.

    Example:
        >>> solution = fixed_point(torch.cos, torch.zeros(1, 1, dtype=torch.float64))
        >>> round(float(solution.value), 6), bool(solution.converged.all())
        (0.739085, True)
    """
    packing = Packing.of(x0)
    packed = packing.pack(x0)
    _check_values(packed, inputs)
    loop = functools.partial(loop_of(f), otherwise=loop) if compile else loop
    solver = Anderson(patience=24) if solver is None else solver
    solve = Solve(make_options(solver, stop, max_steps, on_failure, generator), loop, hooks=hooks)
    rule = GRADIENTS.get(Implicit() if gradient is None else gradient)
    kind = packed.device.type
    mixed = torch.is_autocast_enabled(kind)
    bound_map = FunctionMap(f, inputs, packing, torch.get_autocast_dtype(kind) if mixed else None)
    # Off for the solver; f is evaluated with the caller's autocast.
    with torch.autocast(kind, enabled=False) if mixed else contextlib.nullcontext():
        value, iterates = rule.solve(bound_map, packed, solve)
    final = iterates.value.detach()

    def bound() -> Tensor | None:
        with torch.no_grad():
            return bound_map.error_bound(final, bound_map(final))

    if under_transform():
        _ = iterates.residuals  # assembled now: tensors of a transform do not outlive it
    trace = lambda: iterates.residuals  # noqa: E731
    return Solution(packing.unpack(value), iterates.status, iterates.steps, trace, bound, solve.adjoint)
