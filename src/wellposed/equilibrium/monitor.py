"""Watching the solves that happen inside a block of code."""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wellposed.equilibrium.solution import failed


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


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean()) if parts else float("nan")


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
