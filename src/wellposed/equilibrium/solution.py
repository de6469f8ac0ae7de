"""What a solve returns: a value and, per sample, how it was reached."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.maps import State


class Status(enum.IntEnum):
    """How the solve of one sample ended."""

    RUNNING = 0
    CONVERGED = 1
    STAGNATED = 2
    STEPS_DONE = 3
    MAX_STEPS = 4
    DIVERGED = 5
    NONFINITE = 6

    @property
    def text(self) -> str:
        """The status as a sentence."""
        return _TEXTS[self]

    @property
    def failed(self) -> bool:
        """Whether the sample reached no equilibrium."""
        return self in (Status.RUNNING, Status.MAX_STEPS, Status.DIVERGED, Status.NONFINITE)


_TEXTS = {
    Status.RUNNING: "still running",
    Status.CONVERGED: "the stopping rule was met",
    Status.STAGNATED: "the residual stagnated at the rounding level of the dtype: no better value exists in it",
    Status.STEPS_DONE: "the requested number of steps was done; no tolerance was tested",
    Status.MAX_STEPS: "max_steps was reached before the stopping rule was met",
    Status.DIVERGED: "the residual grew until max_steps",
    Status.NONFINITE: "the map returned NaN or infinity; the value is the last finite iterate",
}


def failed(status: Tensor) -> Tensor:
    """Marks the samples that did not reach an equilibrium."""
    return (status >= Status.MAX_STEPS) | (status == Status.RUNNING)


def last_residual(residuals: Tensor, steps: Tensor) -> Tensor:  # (B,), from (B, K) and (B,)
    """Picks the residual of every sample's last step."""
    if residuals.numel() == 0:
        return residuals.new_full(steps.shape, torch.nan)
    return residuals.gather(-1, (steps - 1).clamp_min(0)[..., None])[..., 0]


@dataclass
class Adjoint:
    """Holds the result of the latest backward solve; nothing before `backward()`."""

    iterates: Any = None  # of the loop, which imports this module

    @property
    def solution(self) -> "Solution | None":
        """The backward solve as a solution."""
        if self.iterates is None:
            return None
        iterates = self.iterates
        return Solution(iterates.value, iterates.status, iterates.steps, lambda: iterates.residuals)


@dataclass(frozen=True)
class Solution:
    """An equilibrium and how it was reached; everything but `value` is per sample.

    Attributes:
        value: the state, in the shape of `x0`.
        status: `Status` codes.
        steps: evaluations of the map.
        trace: computes `residuals`.
    """

    value: State
    status: Tensor  # (B,) int8
    steps: Tensor  # (B,) int64
    trace: Callable[[], Tensor] = field(repr=False)
    bound: Callable[[], Tensor | None] = field(default=lambda: None, repr=False)
    adjoint_record: Adjoint = field(default_factory=Adjoint, repr=False)

    @classmethod
    def none(cls, value: Tensor) -> "Solution":  # (B, ...)
        """Returns the solution of a problem that has none for any sample."""
        status = torch.full(value.shape[:1], Status.NONFINITE, dtype=torch.int8, device=value.device)
        residuals = torch.full((len(value), 1), torch.nan, dtype=value.dtype, device=value.device)
        unknown = torch.full_like(residuals[:, 0], torch.inf)
        return cls(value, status, torch.ones_like(status, dtype=torch.int64), lambda: residuals, lambda: unknown)

    @property
    def converged(self) -> Tensor:  # (B,) bool
        """Samples whose stopping rule was met."""
        return self.status == Status.CONVERGED

    @property
    def failed(self) -> Tensor:  # (B,) bool
        """Samples that did not reach an equilibrium (neither converged nor stagnated at rounding level)."""
        return failed(self.status)

    @cached_property
    def residuals(self) -> Tensor:  # (B, K)
        """``|f(x) - x|_inf`` at every step, NaN after a sample has finished; assembled when asked for."""
        return self.trace()

    @property
    def residual(self) -> Tensor:  # (B,)
        """The residual of the last point.

        That is `value`, or `value` is its image where the map is a proven contraction, as in `ImplicitModel`, and
        then nearer still to the equilibrium.
        """
        return last_residual(self.residuals, self.steps)

    @cached_property
    def error_bound(self) -> Tensor | None:  # (B,)
        """Upper bound of ``|value - x*|_inf``, rounding included; None where no contraction is known."""
        return self.bound()

    @property
    def adjoint(self) -> "Solution | None":
        """The solve behind the latest backward pass; None before it."""
        return self.adjoint_record.solution

    def __str__(self) -> str:
        if self.status.numel() == 0:
            return "empty batch"
        counts = torch.bincount(self.status.long(), minlength=len(Status))
        shares = ", ".join(f"{int(counts[s])} {s.name.lower()}" for s in Status if counts[s])
        return (
            f"{self.status.numel()} samples: {shares}; steps {self.steps.float().mean():.1f} mean, "
            f"{int(self.steps.max())} most; residual {float(self.residual.max()):.1e} at worst"
        )
