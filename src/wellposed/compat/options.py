"""The options of torchdeq 0.1.0: which are understood, which have no counterpart, and what to do then."""

import argparse
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.method import OnFailure
from wellposed.equilibrium.solvers import Anderson, Broyden, Picard, Solver
from wellposed.equilibrium.stopping import Step, Steps, Stopping
from wellposed.errors import InputError, unknown_name

STATES = "only the equilibrium is returned; states on the way come from fixed_point(..., stop=Steps(n))"
SOLVERS = ("anderson", "broyden", "fixed_point_iter", "simple_fixed_point_iter")
SOLVER_OPTIONS = {
    "anderson": ("m", "tau"),
    "broyden": ("LBFGS_thres",),
    "fixed_point_iter": ("tau",),
    "simple_fixed_point_iter": ("tau",),
}


@dataclass(frozen=True)
class Options:
    """What `get_deq` understands, with the defaults of torchdeq; `on_failure` is new."""

    core: str = "sliced"
    f_solver: str = "fixed_point_iter"
    b_solver: str = "fixed_point_iter"
    f_max_iter: int = 40
    b_max_iter: int = 40
    f_tol: float = 1e-3
    b_tol: float = 1e-6
    f_stop_mode: str = "abs"
    b_stop_mode: str = "abs"
    eval_factor: float = 1.0
    eval_f_max_iter: int = 0
    ift: bool = False
    hook_ift: bool = False
    grad: int | list[int] | tuple[int, ...] = 1
    tau: float = 1.0
    no_stat: bool | None = None
    n_states: int = 1
    indexing: list[int] | tuple[int, ...] | None = None
    sup_gap: int = -1
    sup_loc: list[int] | tuple[int, ...] | None = None
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        for kind, name, valid in (
            ("core", self.core, ("indexing", "sliced")),
            *(("solver", name, SOLVERS) for name in (self.f_solver, self.b_solver)),
            *(("stop mode", name, ("abs", "rel")) for name in (self.f_stop_mode, self.b_stop_mode)),
        ):
            if name not in valid:
                raise unknown_name(kind, name, valid)
        asked = {"n_states": self.n_states > 1, "indexing": self.indexing, "sup_loc": self.sup_loc}
        for name, wanted in {**asked, "sup_gap": self.sup_gap > 0}.items():
            if wanted:
                raise InputError(f"{name}={getattr(self, name)!r} is not supported: {STATES}")
        if not isinstance(self.grad, int) and len(self.grad) != 1:
            raise InputError(f"grad={self.grad!r} is not supported: {STATES}; give one number of steps")

    @property
    def phantom_steps(self) -> int:
        """Steps that are differentiated without `ift`."""
        return self.grad if isinstance(self.grad, int) else self.grad[0]


def read_options(args: Any, given: Mapping[str, Any]) -> Options:
    """Collects options from what torchdeq takes: a mapping or a parsed command line, and keywords, which win.

    A command line may hold options of the program; one that merely looks like an option here is an error.
    """
    valid = [field.name for field in fields(Options)]
    if args is None or isinstance(args, Mapping):
        found = {**(args or {}), **given}
        require_known("get_deq", found, valid)
        return Options(**found)
    if not isinstance(args, argparse.Namespace):
        raise InputError(f"args is a dict or an argparse.Namespace; received {type(args).__name__}")
    require_known("get_deq", given, valid)
    own = {name: value for name, value in vars(args).items() if name in valid}
    strange = [name for name in vars(args) if name not in valid and _looks_like(name, valid)]
    require_known("get_deq", strange, valid)
    return Options(**{**own, **given})


def _looks_like(name: str, valid: list[str]) -> bool:
    return bool(difflib.get_close_matches(name, valid, n=1, cutoff=0.85))


def require_known(function: str, found: Iterable[str], valid: Iterable[str]) -> None:
    """Raises TypeError at the first option that is not one.

    Example:
        >>> require_known("get_deq", {"f_max_iters": 3}, ["f_max_iter", "f_tol"])
        Traceback (most recent call last):
        ...
        TypeError: get_deq: unknown option 'f_max_iters'; valid: f_max_iter, f_tol; did you mean 'f_max_iter'?
    """
    names = list(valid)
    for name in found:
        if name not in names:
            raise TypeError(f"{function}: {unknown_name('option', name, names)}")


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
    if name not in SOLVERS:
        raise unknown_name("solver", name, SOLVERS)
    options = options or {}
    for option, instead in {
        "lam": "Anderson(ridge=...) is relative to the residuals, another scale; use wellposed.DEQ",
        "ls": "Broyden takes back steps that make things worse, without a line search",
        "return_final": "say f_solver='simple_fixed_point_iter' to take all steps",
        "indexing": STATES,
    }.items():
        if options.get(option):
            raise InputError(f"the solver option {option!r} is not supported: {instead}")
    require_known(name, options, SOLVER_OPTIONS[name])
    if name == "anderson":
        return Anderson(memory=options.get("m", 6) - 1, damping=options.get("tau", 1.0))
    if name == "broyden":
        return Broyden() if options.get("LBFGS_thres") is None else Broyden(memory=options["LBFGS_thres"])
    return Picard(damping=options.get("tau", 1.0))


def make_stop(solver: str, tol: float, mode: str, max_iter: int) -> Stopping:
    """Builds the rule behind a tolerance; the simple iteration has none and counts."""
    return Steps(max_iter) if solver == "simple_fixed_point_iter" else Length(tol, mode == "rel")
