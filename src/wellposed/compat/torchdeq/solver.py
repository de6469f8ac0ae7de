"""torchdeq's solvers by name: functions ``solver(f, x0, max_iter, tol, ...)`` on top of `fixed_point`.

Each returns the equilibrium, the states asked for by ``indexing``, and what torchdeq tells about a solve, besides
the whole `Solution` as ``info["solution"]``. A registered one has the same signature and takes one tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.compat.torchdeq.utils.config import require_known
from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.method import OnFailure
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Anderson, Broyden, Picard, Solver
from wellposed.equilibrium.stopping import Step, Steps, Stopping
from wellposed.errors import InputError
from wellposed.registry import Registry

__all__ = ["get_solver", "register_solver", "solver_stat_from_final_step"]

Function = Callable[..., tuple[Tensor, list[Tensor], dict[str, Any]]]
SOLVER_OPTIONS = {
    "anderson": ("m", "lam", "tau"),
    "broyden": ("LBFGS_thres", "ls"),
    "fixed_point_iter": ("tau",),
    "simple_fixed_point_iter": ("tau",),
}


@dataclass(frozen=True)
class Length(Stopping):
    """Accepts when ``|f(x) - x|_2 < tol``, or when that divided by ``|f(x)|_2`` is."""

    tol: float
    relative: bool = False
    stateless = True

    def check(self, step: Step, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        residual = torch.linalg.vector_norm(step.fx - step.x, dim=-1)
        size = torch.linalg.vector_norm(step.fx, dim=-1) if self.relative else 1.0
        return residual < self.tol * size, state


def make_solver(name: str, options: Mapping[str, Any] | None = None) -> Solver:
    """Builds the solver behind a name of torchdeq.

    Example:
        >>> make_solver("anderson", {"m": 4})
        Anderson(memory=3, damping=1.0, worth=2.0, patience=12.0, ridge=None)
    """
    options = options or {}
    require_known(name, options, SOLVER_OPTIONS[name])
    if options.get("ls"):
        raise InputError(
            "the solver option 'ls' is not supported: wellposed.Broyden takes back steps that make things worse, "
            "without a line search"
        )
    if name == "anderson":
        return Anderson(options.get("m", 6) - 1, options.get("tau", 1.0), ridge=options.get("lam"))
    if name == "broyden":
        return Broyden() if options.get("LBFGS_thres") is None else Broyden(memory=options["LBFGS_thres"])
    return Picard(damping=options.get("tau", 1.0))


def make_stop(tol: float, mode: str, max_iter: int, all_steps: bool) -> Stopping:
    """Builds the rule behind a tolerance, or counts steps."""
    return Steps(max_iter) if all_steps else Length(tol, mode == "rel")


class Recorded:
    """A function with the lengths of its residuals and, if asked for, the step from the best state so far."""

    def __init__(
        self, func: Callable[..., Tensor], shape: torch.Size, indexing: Sequence[int], tau: float | None
    ) -> None:
        self.func, self.shape, self.indexing, self.tau = func, shape, indexing, tau
        self.residuals: list[Tensor] = []
        self.sizes: list[Tensor] = []
        self.best: Tensor | None = None
        self.lowest: Tensor | None = None
        self.states: dict[int, Tensor] = {}

    def __call__(self, z: Tensor) -> Tensor:  # (B, ...)
        image = self.func(z.reshape(self.shape))
        if image.shape != self.shape:
            raise InputError(
                f"f must return the shape {tuple(self.shape)} of its state; received {tuple(image.shape)}"
            )
        image = image.reshape(z.shape)
        residual, size = (_lengths(part) for part in (image - z, image))
        self.residuals.append(residual)
        self.sizes.append(size)
        if self.indexing or self.tau is not None:
            self._keep_best(image if self.tau in (None, 1) else torch.lerp(z, image, self.tau), residual)
        return image

    def _keep_best(self, step: Tensor, residual: Tensor) -> None:
        if self.best is None or self.lowest is None:
            self.best, self.lowest = step, residual
        better = (residual < self.lowest) | self.lowest.isnan()
        self.best = torch.where(better.reshape(-1, *(1 for _ in step.shape[1:])), step, self.best)
        self.lowest = torch.where(better, residual, self.lowest)
        if len(self.residuals) in self.indexing:
            self.states[len(self.residuals)] = self.best

    def sampled(self, last: Tensor) -> list[Tensor]:
        """Returns the states asked for; after the end of the solve that is its result."""
        states = [last if step >= len(self.residuals) else self.states.get(step, last) for step in self.indexing]
        return [state.reshape(self.shape) for state in states]

    def info(self, solution: Solution, max_iter: int) -> dict[str, Any]:
        """Returns the entries of torchdeq, and the whole solution; a trace stays where its sample ended."""
        last = int(solution.steps.max())
        residuals, sizes = (torch.stack(part[:last], dim=1) for part in (self.residuals, self.sizes))  # (B, K)
        index = torch.arange(last, device=residuals.device).minimum(solution.steps[:, None] - 1)
        absolute = residuals.gather(1, index)
        relative = absolute / (sizes.gather(1, index) + 1e-9)
        return {
            "abs_lowest": absolute.amin(1),
            "rel_lowest": relative.amin(1),
            "abs_trace": absolute,
            "rel_trace": relative,
            "nstep": solution.steps.clamp_max(max_iter).to(torch.get_default_dtype()),
            "sradius": residuals.new_full((1,), -1.0),
            "solution": solution,
        }


def _lengths(z: Tensor) -> Tensor:  # (B,), from (B, ...)
    return torch.linalg.vector_norm(z.reshape(len(z), -1), dim=1)


def _solve(
    name: str,
    func: Callable[..., Tensor],
    x0: Tensor,
    max_iter: float,
    rule: tuple[float, str],
    indexing: Sequence[int] | None,
    all_steps: bool,
    on_failure: OnFailure,
    **options: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    most, start = int(max_iter), x0 if x0.dim() else x0.reshape(1)
    counted = all_steps or most < 1
    # The plain iteration returns the last step it took, as torchdeq does; the others the point they accepted.
    stepping = options["tau"] if name == "fixed_point_iter" and not counted else None
    recorded = Recorded(func, x0.shape, list(indexing or ()), stepping)
    with torch.no_grad():
        solution = fixed_point(
            recorded,
            start,
            solver=make_solver(name, options),
            stop=make_stop(*rule, most, counted),
            max_steps=max(most, 1),
            on_failure=on_failure,
        )
        value = solution.value if stepping is None else recorded.best
        assert isinstance(value, Tensor)
        return value.reshape(x0.shape), recorded.sampled(value), recorded.info(solution, most)


def anderson_solver(
    func: Callable[..., Tensor],
    x0: Tensor,
    max_iter: float = 50,
    tol: float = 1e-3,
    stop_mode: str = "abs",
    indexing: Sequence[int] | None = None,
    m: int = 6,
    lam: float | None = None,
    tau: float = 1.0,
    return_final: bool = False,
    on_failure: OnFailure = "warn",
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """Solves by Anderson acceleration with m states; `lam` regularises, here relative to the residuals.

    Example:
        >>> z, _, info = anderson_solver(torch.cos, torch.tensor(0.0))
        >>> abs(float(z - torch.cos(z))) < 1e-3
        True
    """
    rule = (tol, stop_mode)
    return _solve("anderson", func, x0, max_iter, rule, indexing, return_final, on_failure, m=m, lam=lam, tau=tau)


def broyden_solver(
    func: Callable[..., Tensor],
    x0: Tensor,
    max_iter: float = 50,
    tol: float = 1e-3,
    stop_mode: str = "abs",
    indexing: Sequence[int] | None = None,
    LBFGS_thres: int | None = None,
    ls: bool = False,
    return_final: bool = False,
    on_failure: OnFailure = "warn",
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """Solves by Broyden's method with at most `LBFGS_thres` updates in memory; `ls` is refused."""
    options = {"LBFGS_thres": LBFGS_thres, "ls": ls}
    return _solve("broyden", func, x0, max_iter, (tol, stop_mode), indexing, return_final, on_failure, **options)


def fixed_point_iter(
    func: Callable[..., Tensor],
    x0: Tensor,
    max_iter: float = 50,
    tol: float = 1e-3,
    stop_mode: str = "abs",
    indexing: Sequence[int] | None = None,
    tau: float = 1.0,
    return_final: bool = False,
    on_failure: OnFailure = "warn",
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """Solves by ``z <- tau f(z) + (1 - tau) z``."""
    rule = (tol, stop_mode)
    return _solve("fixed_point_iter", func, x0, max_iter, rule, indexing, return_final, on_failure, tau=tau)


def simple_fixed_point_iter(
    func: Callable[..., Tensor],
    x0: Tensor,
    max_iter: float = 50,
    tau: float = 1.0,
    indexing: Sequence[int] | None = None,
    tol: float = 1e-3,
    stop_mode: str = "abs",
    on_failure: OnFailure = "warn",
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """Takes `max_iter` steps ``z <- tau f(z) + (1 - tau) z``, whatever `tol` is."""
    name, rule = "simple_fixed_point_iter", (tol, stop_mode)
    return _solve(name, func, x0, max_iter, rule, indexing, True, on_failure, tau=tau)


BUILT_IN: dict[str, Function] = {
    "anderson": anderson_solver,
    "broyden": broyden_solver,
    "fixed_point_iter": fixed_point_iter,
    "simple_fixed_point_iter": simple_fixed_point_iter,
}
SOLVERS: Registry[Function] = Registry.of("solver", Callable, BUILT_IN)


def get_solver(key: str) -> Function:
    """Returns a solver by its name.

    Example:
        >>> z, states, info = get_solver("fixed_point_iter")(torch.cos, torch.zeros(2, 1))
        >>> [round(float(entry), 2) for entry in z]
        [0.74, 0.74]
    """
    return SOLVERS[key]


def register_solver(solver_type: str, solver: Function) -> None:
    """Adds a solver for ``f_solver`` and ``b_solver``: a function as `fixed_point_iter`."""
    if not callable(solver):
        raise InputError(f"a solver is a function (f, x0, max_iter, tol, ...); received {type(solver).__name__}")
    SOLVERS.register(solver_type, lambda: solver)


def solver_stat_from_final_step(
    z: Tensor | Sequence[Tensor], fz: Tensor | Sequence[Tensor], nstep: float = 0
) -> dict[str, Any]:
    """Returns what a solve tells, from the last state and its image alone.

    Example:
        >>> solver_stat_from_final_step(torch.zeros(2, 3), torch.ones(2, 3), 7)["nstep"]
        tensor([7., 7.])
    """
    states = [[tensor] if isinstance(tensor, Tensor) else tensor for tensor in (z, fz)]
    first, second = (torch.cat([part.reshape(len(part), -1) for part in state], dim=1) for state in states)
    absolute, size = _lengths(second - first), _lengths(second)
    relative = absolute / (size + 1e-8)
    return {
        "abs_lowest": absolute,
        "rel_lowest": relative,
        "abs_trace": absolute[:, None],
        "rel_trace": relative[:, None],
        "nstep": torch.full_like(absolute, nstep),
        "sradius": absolute.new_full((1,), -1.0),
    }
