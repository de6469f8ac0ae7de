"""Decides, per sample, when an accelerated step is worth its risk."""

from dataclasses import dataclass

import torch
from torch import Tensor

Guard = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Safeguard:
    """Accepts a trial step only if it pays, and pauses after one that did not.

    Residuals are measured in the l1 norm: averaging iterates whose residual merely moves from state to
    state (a cyclic shift) shrinks the other norms and gains nothing.

    Args:
        worth: a trial must gain at least as much as this many plain steps at their latest rate;
            None accepts any trial whose residual does not grow beyond `growth`.
        pause: plain steps after a rejected trial; bounds the evaluations lost by ``1 / pause``.
        easy: plain steps at least this fast are left alone.
        growth: the growth of the residual that is tolerated where `worth` is None.
    """

    worth: float | None
    pause: int
    easy: float = -1.0
    growth: float = 1.0

    def init(self, x: Tensor) -> Guard:
        """Returns (image of the best point, its residual, latest plain rate, trial pending, steps to wait)."""
        size = x.new_zeros(x.shape[0])
        return x, torch.full_like(size, torch.inf), torch.zeros_like(size), size.bool(), size

    def judge(self, guard: Guard, x: Tensor, fx: Tensor) -> tuple[Tensor, Tensor, Guard]:
        """Judges the point that has just been evaluated.

        Returns:
            Samples whose trial is rejected, samples that may try again now, and the next guard (its
            pending trials still have to be set).
        """
        safe, best, rate, pending, wait = guard
        norm = (fx - x).detach().abs().sum(1)
        if self.worth is None:
            limit = self.growth * best
        else:
            limit = rate.clamp(0, 1) ** self.worth * best
        rejected = pending & ~(norm <= limit)
        rate = torch.where(pending | best.isinf(), rate, norm / best)
        wait = torch.where(rejected, self.pause, wait - 1)
        best = torch.where(rejected, best, norm)
        ready = ~rejected & (wait <= 0) & (rate > self.easy)
        return rejected, ready, (torch.where(rejected[:, None], safe, fx), best, rate, pending, wait)

    def choose(self, trial: Tensor, rejected: Tensor, ready: Tensor, fx: Tensor, guard: Guard) -> tuple[Tensor, Guard]:
        """Takes the trial where it is ready and finite, the safe image where one failed, f(x) elsewhere."""
        safe, best, rate, _, wait = guard
        taken = ready & trial.detach().isfinite().all(1)
        x = torch.where(taken[:, None], trial, torch.where(rejected[:, None], safe, fx))
        return x, (safe, best, rate, taken, wait)
