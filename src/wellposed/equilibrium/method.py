"""How equations are solved, what happens when a sample does not converge, and how solves are observed.

`report` warns or raises as the policy on failure says, and so does `report_outputs` where outputs are not finite;
with `WarnOnce`, the solves of a sequence report their first failure only. `watch` collects the statuses and step
counts of all solves in a block of code in a `SolveLog`. `SolveOptions` say how an equation is solved, a `Solve` is
one such solve, and `SolveHooks` choose its start and see its result.
"""

import contextlib
import contextvars
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellposed.equilibrium.loop import Iterates, iterate
from wellposed.equilibrium.maps import Map
from wellposed.equilibrium.solution import Adjoint, Status, failed
from wellposed.equilibrium.solvers import SOLVERS, Anderson, Solver
from wellposed.equilibrium.stopping import STOPPINGS, Relative, Stopping
from wellposed.equilibrium.tracing import forward_rule, under_transform
from wellposed.errors import ConvergenceError, ConvergenceWarning, InputError, unknown_name

OnFailure = Literal["warn", "raise", "ignore"]
MAX_STEPS, MOST_STEPS = 200, 2**31 - 1


def check_policy(on_failure: str) -> None:
    """Raises unless `on_failure` is one of the three policies."""
    if on_failure not in get_args(OnFailure):
        raise unknown_name("on_failure", on_failure, get_args(OnFailure))


class WarnOnce:
    """Lets the solves of one sequence report their first failure only."""

    done = False


def report(
    iterates: Iterates, on_failure: OnFailure, *, solve: str, max_steps: int, once: WarnOnce | None = None
) -> None:
    """Warns or raises once for a whole solve.

    Args:
        iterates: the result of the solve.
        on_failure: the policy.
        solve: what was solved, for the message.
        max_steps: the limit the solve ran under.
        once: shared by solves of which only the first to fail reports.
    """
    if on_failure == "ignore" or (once is not None and once.done):
        return
    if iterates.worst < Status.MAX_STEPS or not bool((iterates.status >= Status.MAX_STEPS).any()):
        return
    if once is not None:
        once.done = True
    status, wrong = iterates.status, failed(iterates.status)
    worst = iterates.last_residual[wrong].nan_to_num(torch.inf).max()
    counts = torch.bincount(status.flatten().long(), minlength=len(Status))
    kinds = "; ".join(f"{int(counts[s])}: {s.text}" for s in Status if s.failed and counts[s])
    message = (
        f"{solve}: {int(wrong.sum())} of {status.numel()} samples did not reach an equilibrium "
        f"({kinds}); worst residual {float(worst):.1e}. "
        f"Raise max_steps (now {max_steps}) or loosen stop; Solution.status tells which samples"
    )
    if on_failure == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=callers_level())


def report_outputs(y: Tensor, x: Tensor | None, on_failure: OnFailure, once: WarnOnce | None = None) -> None:
    """Warns or raises if outputs are NaN or infinite and their states are not, which `report` covers.

    It costs one sum where all is well; on a GPU, reading it synchronises with the device.

    Args:
        y: outputs ``(B, ...)``.
        x: the states ``(B, n)`` they were computed from; None where they are not at hand.
        on_failure: the policy.
        once: shared with the solves; if it is done, they have already reported.

    Example:
        >>> report_outputs(torch.full((2, 1), torch.inf), torch.ones(2, 3), "raise")
        Traceback (most recent call last):
            ...
        wellposed.errors.ConvergenceError: outputs: 2 of 2 samples have NaN or infinite outputs; their states ...
    """
    if on_failure == "ignore" or (once is not None and once.done) or math.isfinite(y.sum()):
        return
    wrong = ~y.detach().flatten(1).isfinite().all(1)
    if x is not None:
        wrong &= x.detach().flatten(1).isfinite().all(1)
    if not bool(wrong.any()):
        return
    message = (
        f"outputs: {int(wrong.sum())} of {len(wrong)} samples have NaN or infinite outputs; their states are "
        f"finite. Look for such entries in C, D and a readout, or for products beyond {y.dtype}: scale the "
        "weights or use float64"
    )
    if on_failure == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=callers_level())


class NotFiniteError(Exception):
    """A fast check has met NaN or infinity; the caller finds out where and says so."""


def require_finite(name: str, value: Tensor) -> None:
    """Raises if a tensor holds NaN or infinity; does nothing where values cannot be read."""
    if not under_transform():
        require_all_finite({name: value})


def require_all_finite(values: dict[str, Tensor]) -> None:
    """Raises if one of several tensors on one device does."""
    sums = [value.detach().sum(dtype=torch.promote_types(value.dtype, torch.float32)) for value in values.values()]
    # A sum that is finite has finite terms. One read from a device, where each would be a wait.
    if all(map(math.isfinite, sums if sums[0].device.type == "cpu" else (sum(sums),))):
        return
    for name, value in values.items():
        bad = ~value.detach().isfinite()
        if bool(bad.any()):
            where = tuple(int(i) for i in bad.nonzero()[0])
            raise InputError(
                f"{name} must be finite; received {int(bad.sum())} of {value.numel()} entries NaN or infinite, "
                f"the first at {where}; clean the data before the solve"
            )


class WeightCheck:
    """Reports weights that are NaN or infinite, with which no input has an equilibrium.

    Weights are read again when torch counts a change, and in every forward pass that is differentiated, since
    changes by fused optimisers are not counted. On a GPU reading them would synchronise with the device; there a
    failed solve reports.
    """

    def __init__(self) -> None:
        self._seen: tuple[tuple[int, int], ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCheck, ()

    def failed(self, weights: Sequence[tuple[str, Tensor]], on_failure: OnFailure) -> bool:
        """Warns or raises, and returns True, if a weight holds NaN or infinity.

        Example:
            >>> WeightCheck().failed([("B", torch.tensor([[1.0, torch.nan]]))], "raise")
            Traceback (most recent call last):
                ...
            wellposed.errors.ConvergenceError: weights: 'B' holds 1 of 2 entries that are NaN or infinite, the ...
        """
        plain = all(type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu" for _, value in weights)
        if under_transform() or not plain or any(value.is_inference() for _, value in weights):
            return False
        seen = tuple((value._version, value.data_ptr()) for _, value in weights)
        if seen == self._seen and not torch.is_grad_enabled():
            return False
        if all(math.isfinite(value.detach().sum()) for _, value in weights):
            self._seen = seen
            return False
        wrong = {name: ~value.detach().isfinite() for name, value in weights}
        nonfinite = {name: where for name, where in wrong.items() if bool(where.any())}
        if not nonfinite:  # the sum was too large, not its terms
            self._seen = seen
            return False
        holders = [
            f"{name!r} holds {int(where.sum())} of {where.numel()} entries" for name, where in nonfinite.items()
        ]
        first = tuple(int(k) for k in next(iter(nonfinite.values())).nonzero()[0])
        message = (
            f"weights: {', '.join(holders)} that are NaN or infinite, the first at {first}; no input has an "
            "equilibrium, so all outputs are NaN. Go back to weights from before, and lower the learning rate"
        )
        if on_failure == "raise":
            raise ConvergenceError(message)
        if on_failure == "warn":
            warnings.warn(message, ConvergenceWarning, stacklevel=callers_level())
        return True


def no_equilibrium(like: Tensor, weights: Sequence[tuple[str, Tensor]]) -> Tensor:
    """Returns NaN in the shape of a tensor, which makes the gradients of the weights NaN as well."""
    return torch.full_like(like, torch.nan) * sum(value.sum() for _, value in weights)


class _Checked(torch.autograd.Function):
    """The identity, which checks values once vmap and derivatives have unwrapped them."""

    @staticmethod
    def forward(y: Tensor, x: Tensor, on_failure: OnFailure) -> Tensor:
        report_outputs(y.detach(), x, on_failure)
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, OnFailure], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None

    @staticmethod
    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], y: Tensor, x: Tensor, on_failure: OnFailure) -> tuple[Any, int]:
        y, x = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in ((y, in_dims[0]), (x, in_dims[1]))
        )
        return _Checked.apply(y, x, on_failure), 0


def checked_under_functorch(y: Tensor, x: Tensor, on_failure: OnFailure) -> Tensor:
    """Does what `report_outputs` does inside vmap and derivatives of functions, and returns the outputs."""
    checked: Tensor = _Checked.apply(y, x.detach(), on_failure)
    return checked


def callers_level() -> int:
    """Counts the frames up to the first one outside the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("wellposed.", "torch.")):
        frame, level = frame.f_back, level + 1
    return level


@dataclass
class SolveLog:
    """Steps and failures of the solves in a `watch` block, forward and adjoint apart."""

    forward: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)  # (status, steps)
    adjoint: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    @property
    def mean_steps(self) -> float:
        """Mean number of forward steps of a sample; NaN when nothing was solved."""
        return _mean([steps.flatten() for _, steps in self.forward])

    @property
    def failed_share(self) -> float:
        """Share of samples whose forward or adjoint solve did not reach an equilibrium."""
        return _mean([failed(status).flatten() for status, _ in self.forward + self.adjoint])


def _mean(solves: list[Tensor]) -> float:
    return float(torch.cat(solves).double().mean()) if solves else float("nan")


_LOGS: contextvars.ContextVar[tuple[SolveLog, ...]] = contextvars.ContextVar("wellposed_logs", default=())


def active_logs() -> tuple[SolveLog, ...]:
    """Returns the logs of all enclosing `watch` blocks."""
    return _LOGS.get()


@contextlib.contextmanager
def watch() -> Iterator[SolveLog]:
    """Collects the statuses and step counts of every solve in the block.

    Example:
        >>> from wellposed.equilibrium.fixed_point import fixed_point
        >>> with watch() as log:
        ...     _ = fixed_point(lambda x: 0.5 * x + 1, torch.zeros(3, 1))
        >>> log.failed_share
        0.0
    """
    log = SolveLog()
    token = _LOGS.set((*_LOGS.get(), log))
    try:
        yield log
    finally:
        _LOGS.reset(token)


Loop = Callable[[Map, Tensor, Solver, Stopping, int], Iterates]


@dataclass(frozen=True)
class SolveOptions:
    """How an equation is solved, and what happens when that fails."""

    solver: Solver
    stop: Stopping
    max_steps: int
    on_failure: OnFailure = "warn"


def make_options(
    solver: Solver | str | None,
    stop: Stopping | str | None,
    max_steps: int | None,
    on_failure: OnFailure,
    generator: torch.Generator | None = None,
) -> SolveOptions:
    """Fills in defaults, resolves names and checks the options of a solve."""
    steps = MAX_STEPS if max_steps is None else max_steps
    if not hasattr(steps, "__index__") or not 1 <= steps <= MOST_STEPS:
        raise InputError(f"max_steps must be at least 1, a whole number below 2^31; received {max_steps!r}")
    check_policy(on_failure)
    chosen = Anderson() if solver is None else SOLVERS.get(solver)
    rule = Relative() if stop is None else STOPPINGS.get(stop).seeded(generator)
    limit = rule.limit()
    return SolveOptions(chosen, rule, steps if limit is None else limit, on_failure)


class SolveHooks:
    """Chooses where the solves of a model start and receives their results; this base class does neither.

    The last two methods are for the first backward solve. A hook that stores its result must ignore later ones:
    second derivatives solve another equation.
    """

    def start(self, zeros: Tensor) -> Tensor:
        """Returns where to start a solve that would otherwise start from zero."""
        return zeros

    def on_result(self, iterates: Iterates) -> None:
        """Receives the result of a solve."""

    def adjoint_start(self, like: Tensor) -> Tensor | None:
        """Returns where the backward solve starts; None for zero."""
        return None

    def on_adjoint(self, iterates: Iterates) -> None:
        """Receives the result of the backward solve."""


@dataclass(frozen=True)
class Solve:
    """One solve: its options, and where its outcome is logged and reported.

    Make a new one for every solve: it carries the record of the backward pass.
    """

    options: SolveOptions
    loop: Loop = iterate  # or a faster one that does the same
    logs: tuple[SolveLog, ...] = field(default_factory=active_logs)
    adjoint: Adjoint = field(default_factory=Adjoint)
    label: str = ""  # of the solve in a sequence, for messages
    once: WarnOnce | None = None
    hooks: SolveHooks | None = None

    def forward(self, f: Map, x0: Tensor) -> Iterates:
        """Solves the forward equation, logs it and applies the failure policy."""
        options = self.options
        if under_transform():
            return iterate(f, x0, options.solver, options.stop, options.max_steps, masked=True)
        iterates = self.run(f, x0)
        self.note(iterates)
        return iterates

    def run(self, f: Map, x0: Tensor) -> Iterates:
        """Solves an equation without logging or reporting."""
        return self.loop(f, x0, self.options.solver, self.options.stop, self.options.max_steps)

    def note(self, iterates: Iterates) -> None:
        """Logs a forward solve, reports failures and calls the hooks."""
        for log in self.logs:
            log.forward.append((iterates.status, iterates.steps))
        self._report(iterates, "equilibrium", self.options)
        if self.hooks is not None:
            self.hooks.on_result(iterates)

    def backward(self, f: Map, zeros: Tensor, options: SolveOptions) -> Iterates:
        """Solves the equation of the backward pass, from zero unless the hooks say otherwise; leaves a record."""
        start = self.adjoint_start(zeros)
        iterates = replace(self, options=options).run(f, zeros if start is None else start)
        self.note_adjoint(iterates, options)
        return iterates

    def adjoint_start(self, like: Tensor) -> Tensor | None:
        """Returns where the backward solve starts; None for zero."""
        if self.hooks is None or under_transform():
            return None
        return self.hooks.adjoint_start(like)

    def note_adjoint(self, iterates: Iterates, options: SolveOptions) -> None:
        """Records a backward solve, reports failures and calls the hooks."""
        self.adjoint.iterates = iterates
        for log in self.logs:
            log.adjoint.append((iterates.status, iterates.steps))
        self._report(iterates, "adjoint solve", options)
        if self.hooks is not None and not under_transform():
            self.hooks.on_adjoint(iterates)

    def _report(self, iterates: Iterates, solve: str, options: SolveOptions) -> None:
        report(iterates, options.on_failure, solve=solve + self.label, max_steps=options.max_steps, once=self.once)
