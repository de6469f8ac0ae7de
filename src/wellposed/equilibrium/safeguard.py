"""Takes back steps that lead astray, per sample."""

from dataclasses import dataclass

import torch
from torch import Tensor

Guard = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Safeguard:
    """Rejects a trial step whose residual has grown too much, and pauses after it.

    Args:
        growth: the growth of the residual that is tolerated.
        pause: plain steps after a rejected trial.
    """

    growth: float
    pause: int

    def init(self, x: Tensor) -> Guard:
        """Returns the plain image of the best point, its residual, whether a trial is pending, steps to wait."""
        size = x.new_zeros(x.shape[0])
        return x, torch.full_like(size, torch.inf), size.bool(), size

    def judge(self, guard: Guard, x: Tensor, fx: Tensor) -> tuple[Tensor, Guard]:
        """Judges the point that has just been evaluated; returns the samples whose trial is rejected."""
        safe, best, pending, wait = guard
        norm = (fx - x).detach().abs().sum(1)
        rejected = pending & ~(norm <= self.growth * best)
        wait = (wait - 1).masked_fill(rejected, self.pause)
        best = torch.where(rejected, best, norm)
        return rejected, (torch.where(rejected[:, None], safe, fx), best, pending, wait)

    def choose(self, trial: Tensor, rejected: Tensor, fx: Tensor, guard: Guard) -> tuple[Tensor, Guard]:
        """Takes the trial where it may be tried and is finite, the safe image where one failed, f(x) elsewhere."""
        safe, best, _, wait = guard
        taken = ~rejected & (wait <= 0) & trial.detach().isfinite().all(1)
        x = torch.where(taken[:, None], trial, torch.where(rejected[:, None], safe, fx))
        return x, (safe, best, taken, wait)
