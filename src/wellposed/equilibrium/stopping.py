"""Rules that accept an iterate, one verdict per sample."""

import abc
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from wellposed.equilibrium.maps import Map, max_norm
from wellposed.errors import InputError
from wellposed.registry import Registry

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """One step of a solve as a stopping rule sees it."""

    x: Tensor  # (B, n)
    fx: Tensor  # (B, n)
    f: Map
    residual: Tensor  # (B,) |fx - x|_inf
    index: int  # 0 at the first evaluation; where steps are stacked, that of the first
    first: Tensor | None = None  # (B,) residual of the first evaluation, where it sets the scale


class Stopping(abc.ABC):
    """Decides which samples are finished.

    The state a rule carries is a tuple of batch-first tensors, so that the loop can drop finished rows.
    """

    certifies: bool = True  # False: counts steps and claims no equilibrium
    stateless: bool = False  # True: `check` keeps no state and also takes several steps stacked in front

    def begin(self, x0: Tensor) -> State:
        """Returns the rule's own state for a solve that starts at `x0`."""
        return ()

    @abc.abstractmethod
    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        """Returns a ``(B,)`` verdict and the next state."""

    def accept(self, step: Step, state: State) -> Tensor:
        """Returns the value to report for accepted samples."""
        return step.x

    def seeded(self, generator: torch.Generator | None) -> "Stopping":
        """Returns the rule with its randomness drawn from `generator`."""
        return self

    def limit(self) -> int | None:
        """Returns how many evaluations the rule itself asks for; None if that depends on the solve."""
        return None

    def adjoint(self) -> "Stopping":
        """Returns the rule for the linear equation of the backward pass."""
        return self


def _check_nonnegative(name: str, value: float | None) -> None:
    if value is not None and not value >= 0:
        raise InputError(f"{name} must not be negative; received {value}")


@dataclass(frozen=True)
class Absolute(Stopping):
    """Accepts when ``|f(x) - x|_inf <= atol``, the rule of the papers (001 section 1.2, atol = 3e-6).

    It has no floor: at a large scale or in a short dtype it may never fire, and the solve then ends with the
    status `STAGNATED`, after plain steps have brought nothing either. `Relative` is the default for that reason.
    """

    atol: float = 3e-6
    stateless = True

    def __post_init__(self) -> None:
        _check_nonnegative("atol", self.atol)

    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        return step.residual <= self.atol, state

    def adjoint(self) -> Stopping:
        """Returns an eighth of the tolerance: incoming gradients are scaled to size one, inputs are mostly larger.

        Gradients are then as exact as those of plain steps, which a whole batch takes until its last sample is
        finished (`benchmarks.rivals`).
        """
        return Absolute(self.atol / 8)


def default_tolerance(dtype: torch.dtype) -> float:
    """Returns about 1e-5 in float32 and 1e-10 in float64; 16 units of rounding in shorter dtypes."""
    if dtype == torch.float64:
        return 1e-10
    return max(1e-5, 16 * torch.finfo(dtype).eps)


def smallest_tolerance(dtype: torch.dtype) -> float:
    """Returns four times the smallest positive number: below it no difference means anything."""
    info = torch.finfo(dtype)
    return 4 * info.smallest_normal * info.eps


@dataclass(frozen=True)
class Relative(Stopping):
    """Accepts when ``|f(x) - x| <= max(atol, rtol |f(x)|, rounding of the map)``.

    It does not depend on the size of the state: a solution of size 1e-30 is as accurate as one of size 1. Models
    that know how much their equilibrium may amplify a residual divide `rtol` by that gain, so that it bounds the
    relative error (`bound_error`).

    Args:
        rtol: None means about 1e-5 in float32 and 1e-10 in float64.
        atol: None means none, except for a few of the smallest numbers of the dtype and, for a general map,
            ``1e-3 rtol`` times the first residual: states may decay to zero, beside which no residual is small.
        norm: ``"inf"`` or ``"2"``.
    """

    rtol: float | None = None
    atol: float | None = None
    norm: Literal["inf", "2"] = "inf"
    stateless = True

    def __post_init__(self) -> None:
        _check_nonnegative("rtol", self.rtol)
        _check_nonnegative("atol", self.atol)
        if self.norm not in ("inf", "2"):
            raise InputError(f"norm must be 'inf' or '2'; received {self.norm!r}")

    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        rtol = default_tolerance(step.x.dtype) if self.rtol is None else self.rtol
        atol = smallest_tolerance(step.x.dtype) if self.atol is None else self.atol
        if self.norm == "inf":
            residual, scale = step.residual, max_norm(step.fx)
        else:
            residual = torch.linalg.vector_norm(step.fx - step.x, dim=-1)
            scale = torch.linalg.vector_norm(step.fx, dim=-1)
        floor = 8 * step.f.eps(step.x)
        limit = (scale * max(rtol, floor)).clamp_min(atol)
        if step.first is not None and self.atol is None:
            limit = torch.maximum(limit, 1e-3 * rtol * step.first)
        return residual <= limit, state


def bound_error(stop: Stopping, gain: float, dtype: torch.dtype) -> tuple[Stopping, torch.dtype]:
    """Tightens `Relative` to bound the error of a map whose errors are at most `gain` times its residuals.

    Rounding is amplified like residuals. Where that is too much for float32, the solve must run in float64, to the
    last digit of float32, so that later steps, as in sequences, lose nothing.

    Returns:
        the rule with its tolerance divided by the gain, and the dtype to compute in; other rules unchanged.

    Example:
        >>> bound_error(Relative(1e-5), 8.0, torch.float32)
        (Relative(rtol=1.25e-06, atol=None, norm='inf'), torch.float32)
        >>> bound_error(Relative(1e-5), 100.0, torch.float32)[1]
        torch.float64
    """
    if type(stop) is not Relative:
        return stop, dtype
    rtol = default_tolerance(dtype) if stop.rtol is None else stop.rtol
    eps = torch.finfo(dtype).eps
    if dtype != torch.float32 or rtol >= 4 * eps * gain:
        return replace(stop, rtol=rtol / gain), dtype
    return replace(stop, rtol=min(rtol, eps) / gain), torch.float64


@dataclass(frozen=True)
class ErrorBound(Stopping):
    """Accepts when the distance to the true equilibrium is at most `tol`, rounding included.

    Works for maps whose contraction is known (`ImplicitModel`, `ImplicitForm`, `Contraction`).
    """

    tol: float

    def __post_init__(self) -> None:
        _check_nonnegative("tol", self.tol)

    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        bound = step.f.error_bound(step.x, step.fx)
        if bound is None:
            raise InputError(
                "stop=ErrorBound(...) needs a map whose contraction is known, which this one's is not; use "
                "ImplicitModel, declare the constant with Contraction(f, factor), or stop by Relative()"
            )
        return bound <= self.tol, state

    def adjoint(self) -> Stopping:
        return Relative()


@dataclass(frozen=True)
class MeanRelative(Stopping):
    """Accepts when the mean of the last `window` iterates solves the equation to `rtol`.

    With the mean ``m`` of the window, tests ``|f(m) - m|_2 <= rtol |f(m)|_2`` and returns ``m``
    (004 eq. 54, read as the residual of the map without noise at the windowed mean; with noise it would never
    fall below that of one step). Costs one more evaluation of `f` a step. Samples that are not accepted in time
    report the mean as well.
    """

    rtol: float | None = None
    window: int = 5

    def __post_init__(self) -> None:
        _check_nonnegative("rtol", self.rtol)
        if self.window < 1:
            raise InputError(f"window must be at least 1; received {self.window}")

    def begin(self, x0: Tensor) -> State:
        return (x0.new_full((x0.shape[0], self.window, x0.shape[1]), torch.nan),)

    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        window = torch.cat([state[0][:, 1:], step.x[:, None]], dim=1)
        if step.index + 1 < self.window:
            return torch.zeros_like(step.residual, dtype=torch.bool), (window,)
        with torch.no_grad():
            mean = window.mean(1)
            f_mean = step.f.noiseless(mean)
            rtol = default_tolerance(mean.dtype) if self.rtol is None else self.rtol
            residual = torch.linalg.vector_norm(f_mean - mean, dim=1)
            return residual <= rtol * torch.linalg.vector_norm(f_mean, dim=1), (window,)

    def accept(self, step: Step, state: State) -> Tensor:
        return state[0].nanmean(1)  # of fewer iterates while the window fills


@dataclass(frozen=True)
class Steps(Stopping):
    """Does exactly `n` steps; the status is then `STEPS_DONE`, which claims no equilibrium."""

    n: int
    certifies = False

    def __post_init__(self) -> None:
        if self.n < 0:
            raise InputError(f"the number of steps must not be negative; received {self.n}")

    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        return torch.full_like(step.residual, step.index >= self.n, dtype=torch.bool), state

    def limit(self) -> int:
        return self.n + 1


@dataclass(frozen=True)
class Settled(Stopping):
    """Accepts when the state no longer changes, at the latest after `depth` steps.

    For maps without feedback: each step makes one more layer exact, and `depth` steps make all of them exact.
    """

    depth: int
    stateless = True

    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        stacked = step.residual if step.residual.dim() == 2 else step.residual[None]
        index = step.index + torch.arange(len(stacked), device=stacked.device)[:, None]
        index = index.expand_as(stacked).reshape(step.residual.shape)
        return (step.residual == 0) | ((index >= self.depth) & step.residual.isfinite()), state

    def limit(self) -> int:
        return self.depth + 1


@dataclass(frozen=True)
class RandomSteps(Stopping):
    """Does a number of steps drawn uniformly from ``low..high`` for every sample."""

    low: int
    high: int
    generator: torch.Generator | None = None
    certifies = False

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def begin(self, x0: Tensor) -> State:
        return (_draw_steps(self.low, self.high, x0, self.generator),)

    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        return step.index >= state[0], state

    def seeded(self, generator: torch.Generator | None) -> "RandomSteps":
        return self if generator is None else replace(self, generator=generator)

    def limit(self) -> int:
        return self.high + 1


def _check_range(low: int, high: int) -> None:
    if not 0 <= low <= high:
        raise InputError(f"0 <= low <= high is needed; received low={low}, high={high}")


def _draw_steps(low: int, high: int, x0: Tensor, generator: torch.Generator | None) -> Tensor:  # (B,)
    device = None if generator is None else generator.device
    return torch.randint(low, high + 1, (x0.shape[0],), generator=generator, device=device).to(x0.device)


@dataclass(frozen=True)
class RandomThreshold(Stopping):
    """Accepts where another rule does, and at the latest after a number of steps drawn for every sample.

    The number is uniform in ``low..high``. Solvers that give up at random are a defence against attacks in 004
    (section E.3: 1 to 8 steps), which attacks through the steps defeat. All samples end as `STEPS_DONE`,
    which claims no equilibrium. The backward solve follows the other rule alone.

    Args:
        low, high: of the draws.
        rule: the other rule; `Relative` by default.
        generator: of the draws; torch's own if None.

    Example:
        >>> from wellposed.equilibrium.fixed_point import fixed_point
        >>> stop = RandomThreshold(1, 3, generator=torch.Generator().manual_seed(0))
        >>> solution = fixed_point(lambda x: 0.5 * x + 1, torch.zeros(20, 1), solver="picard", stop=stop)
        >>> sorted(set(solution.value.flatten().tolist()))  # after 1, 2 or 3 steps
        [1.0, 1.5, 1.75]
    """

    low: int = 1
    high: int = 8
    rule: Stopping = field(default_factory=Relative)
    generator: torch.Generator | None = None
    certifies = False

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def begin(self, x0: Tensor) -> State:
        return (_draw_steps(self.low, self.high, x0, self.generator), *self.rule.begin(x0))

    def check(self, step: Step, state: State) -> tuple[Tensor, State]:
        accepted, inner = self.rule.check(step, state[1:])
        return accepted | (step.index >= state[0]), (state[0], *inner)

    def accept(self, step: Step, state: State) -> Tensor:
        return self.rule.accept(step, state[1:])

    def seeded(self, generator: torch.Generator | None) -> "RandomThreshold":
        return self if generator is None else replace(self, generator=generator, rule=self.rule.seeded(generator))

    def limit(self) -> int:
        return self.high + 1

    def adjoint(self) -> Stopping:
        return self.rule.adjoint()


STOPPINGS: Registry[Stopping] = Registry(
    "stopping rule", Stopping, {"absolute": Absolute, "relative": Relative, "mean_relative": MeanRelative}
)
