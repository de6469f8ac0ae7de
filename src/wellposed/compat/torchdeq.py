"""torchdeq's way of calling, for code that moves over: ``z_out, info = get_deq(...)(f, z0)``.

The calls are those of torchdeq 0.1.0 (Geng and Kolter 2023). What differs is said where it differs: an unknown
option is an error, every sample stops by itself, and a sample without an equilibrium is reported. `Options` lists
the options that are understood; it refuses what has no counterpart and says what to do then.
"""

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.gradients import Gradient, Implicit, Phantom
from wellposed.equilibrium.maps import Packing, State
from wellposed.equilibrium.method import OnFailure
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Anderson, Broyden, Picard, Solver
from wellposed.equilibrium.stopping import Step, Steps, Stopping
from wellposed.errors import InputError, unknown_name
from wellposed.models.norms import Layer, VariationalDropout, remove_norms, spectral_norm, weight_norm

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


__all__ = ["Equilibrium", "apply_norm", "get_deq", "remove_norm", "reset_deq", "reset_norm"]

POWER_STEPS = 100  # of `spectral_radius`


def get_deq(args: Any = None, **options: Any) -> "Equilibrium":
    """Builds a module that is called as ``z_out, info = deq(f, z0)``.

    Options have the names and defaults of torchdeq: solvers ``f_solver``, ``b_solver``, tolerances ``f_tol``,
    ``b_tol``, ``f_stop_mode`` ... The gradient is `Phantom` with ``grad`` steps and damping ``tau``; with ``ift``
    or ``hook_ift`` it is `Implicit`. ``n_states``, ``indexing``, ``sup_gap`` and ``sup_loc``, which return states
    on the way, are refused.

    Args:
        args: a dict, or a parsed command line; options in it count unless given as keywords.
        options: see `wellposed.compat.torchdeq.Options`; ``on_failure`` is that of `fixed_point`.

    Raises:
        TypeError: an option is unknown; the message has the valid ones and the nearest.

    Example:
        >>> deq = get_deq(f_solver="anderson", f_tol=1e-6, ift=True)
        >>> z_out, info = deq(lambda z: 0.5 * torch.cos(z), torch.zeros(3, 2))
        >>> z_out[-1].shape, bool(info["abs_lowest"].max() < 1e-6)
        (torch.Size([3, 2]), True)
    """
    return Equilibrium(read_options(args, options))


class Equilibrium(nn.Module):
    """Solves ``z = f(z)`` for a function that holds its inputs itself; see `get_deq`."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.solution: Solution | None = None  # of the latest call; `.adjoint` knows the backward solve

    def forward(
        self,
        func: Callable[..., Any],
        z_init: Tensor | Sequence[Tensor],
        solver_kwargs: Mapping[str, Any] | None = None,
        sradius_mode: bool = False,
        backward_writer: Callable[..., Any] | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns a list with the equilibrium, and what torchdeq tells about a solve.

        Args:
            func: ``f(z)``; if the state is a list of tensors, ``f(*z)`` returning a list.
            z_init: where to start, batch-first.
            solver_kwargs: for this call, ``f_max_iter`` and ``m``, ``tau``, ``LBFGS_thres`` of the solver.
            sradius_mode: whether to estimate the spectral radius of the Jacobian, in eval mode.
            backward_writer: not supported; look at ``deq.solution.adjoint`` after ``backward()``.
        """
        if backward_writer is not None:
            raise InputError("backward_writer is not supported; look at deq.solution.adjoint after backward()")
        start: State = z_init if isinstance(z_init, Tensor) else tuple(z_init)
        recorded = _Recorded(func, start)
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            found = self._solve(recorded, start, dict(solver_kwargs or {}))
        self.solution = found
        info = recorded.info(found)
        if sradius_mode and not self.training:
            info["sradius"] = spectral_radius(recorded, found.value)
        value = found.value if isinstance(found.value, Tensor) else list(found.value)
        return [value], info

    def _solve(self, f: "_Recorded", start: State, extra: dict[str, Any]) -> Solution:
        options = self.options
        require_known("solver_kwargs", extra, ["f_max_iter", *_extra_names(options.f_solver)])
        most = options.f_max_iter if self.training else options.eval_f_max_iter
        most = extra.pop("f_max_iter", most or int(options.f_max_iter * options.eval_factor))
        return fixed_point(
            f,
            start,
            solver=make_solver(options.f_solver, extra),
            stop=make_stop(options.f_solver, options.f_tol, options.f_stop_mode, most),
            max_steps=most,
            gradient=self._gradient(),
            on_failure=options.on_failure,
        )

    def _gradient(self) -> Gradient:
        options = self.options
        if not (options.ift or options.hook_ift):
            return Phantom(options.phantom_steps, options.tau)
        stop = make_stop(options.b_solver, options.b_tol, options.b_stop_mode, options.b_max_iter)
        return Implicit(make_solver(options.b_solver), stop, stop.limit() or options.b_max_iter)

    def extra_repr(self) -> str:
        return str(self.options)


def _extra_names(solver: str) -> tuple[str, ...]:
    return (*SOLVER_OPTIONS[solver], "lam", "ls", "return_final", "indexing")


class _Recorded:
    """A function of torchdeq's kind as one of ours, with the lengths of the residuals of a solve."""

    def __init__(self, func: Callable[..., Any], start: State) -> None:
        self.func, self.packing = func, Packing.of(start)
        self.residuals: list[Tensor] = []
        self.sizes: list[Tensor] = []

    def __call__(self, z: State) -> State:
        image = self.func(z) if isinstance(z, Tensor) else tuple(self.func(*z))
        if not torch.is_grad_enabled():  # the steps of a solve; those that are differentiated come after it
            x, fx = self.packing.pack(z), self.packing.pack_result(image, batch=None)
            self.residuals.append(torch.linalg.vector_norm(fx - x, dim=1))
            self.sizes.append(torch.linalg.vector_norm(fx, dim=1))
        return image

    def info(self, found: Solution) -> dict[str, Any]:
        """Returns the entries of torchdeq, and the whole solution; a trace stays where its sample ended."""
        last = int(found.steps.max())
        residuals, sizes = (torch.stack(part[:last], dim=1) for part in (self.residuals, self.sizes))  # (B, K)
        place = torch.arange(last, device=residuals.device).minimum(found.steps[:, None] - 1)
        absolute = residuals.gather(1, place)
        relative = absolute / (sizes.gather(1, place) + 1e-9)
        return {
            "abs_lowest": absolute.amin(1),
            "rel_lowest": relative.amin(1),
            "abs_trace": absolute,
            "rel_trace": relative,
            "nstep": found.steps,
            "sradius": torch.zeros(1, device=residuals.device),
            "solution": found,
        }


def spectral_radius(f: Callable[[Any], State], z: State, steps: int = POWER_STEPS) -> Tensor:  # (B,)
    """Estimates the largest modulus among the eigenvalues of the Jacobian, per sample, by power iteration.

    ``v <- J' v / |J' v|``; the estimate is the geometric mean of the growth over the later half, which also
    settles where the largest eigenvalues are a complex pair.

    Example:
        >>> quarter_turn = torch.tensor([[0.0, 0.5], [-0.5, 0.0]])
        >>> round(float(spectral_radius(lambda z: z @ quarter_turn, torch.ones(1, 2))), 4)
        0.5
    """
    packing = Packing.of(z)
    x = packing.pack(z).detach().requires_grad_()
    with torch.enable_grad():
        fx = packing.pack_result(f(packing.unpack(x)))
    generator = torch.Generator(device="cpu").manual_seed(0)
    v = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    growth = []
    for _ in range(steps):
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        (v,) = torch.autograd.grad(fx, x, v, retain_graph=True)
        growth.append(torch.linalg.vector_norm(v, dim=1))
    later = torch.stack(growth[steps // 2 :])
    return later.log().mean(0).exp()


def reset_deq(model: nn.Module) -> None:
    """Lets every `VariationalDropout` draw a new mask at its next call and keep it until the next reset.

    Norms need no reset: those of `apply_norm` are functions of the weights.
    """
    for layer in model.modules():
        if isinstance(layer, VariationalDropout):
            layer._masks, layer._rows = {}, None


def apply_norm(
    model: nn.Module,
    norm_type: str = "weight_norm",
    prefix_filter_out: str | Sequence[str] | None = None,
    filter_out: str | Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Puts linear and convolutional layers under `weight_norm` or `spectral_norm`, in place.

    Args:
        norm_type: ``"weight_norm"``, ``"spectral_norm"`` or ``"none"``.
        prefix_filter_out, filter_out: layers whose name begins with, or contains, one of these are left alone.
        options: ``norm_target_norm``, the bound of the spectral norm.

    Example:
        >>> layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        >>> apply_norm(layers, "spectral_norm", prefix_filter_out="1", norm_target_norm=0.5)
        >>> [nn.utils.parametrize.is_parametrized(layer) for layer in layers]
        [True, False]
    """
    if norm_type not in ("weight_norm", "spectral_norm", "none"):
        raise unknown_name("norm_type", norm_type, ("weight_norm", "spectral_norm", "none"))
    require_known(
        f"apply_norm ({norm_type})", options, ["norm_target_norm"] if norm_type == "spectral_norm" else []
    )
    prefixes, parts = _names(prefix_filter_out), _names(filter_out)
    for name, layer in list(model.named_modules()):
        skipped = name.startswith(prefixes) or any(part in name for part in parts)
        if not isinstance(layer, Layer) or skipped or norm_type == "none":
            continue
        if norm_type == "weight_norm":
            weight_norm(layer)
        else:
            spectral_norm(layer, options.get("norm_target_norm", 1.0))


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def reset_norm(model: nn.Module) -> None:
    """Does nothing: the norms of `apply_norm` are functions of the weights and are never out of date."""


def remove_norm(model: nn.Module) -> None:
    """Turns weights under a norm into plain parameters with the same values, in place."""
    remove_norms(model)
