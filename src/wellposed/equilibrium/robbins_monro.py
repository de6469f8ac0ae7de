"""Stochastic approximation: damped steps that shrink, for maps whose values are noisy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.equilibrium.map import Map
from wellposed.equilibrium.solver import Solver, SolverState
from wellposed.errors import InputError


@dataclass(frozen=True)
class RobbinsMonro(Solver):
    """Iterates ``x <- (1 - a) x + a f(x)`` with ``a = rate / (1 + m) ** decay`` at step m.

    The "stochastic unrolling" of 004 (eq. 7, whose printed signs run away from the equilibrium). With `decay` in
    (0.5, 1] the iterates converge to the root of the mean map (Robbins and Monro 1951); with ``decay=0``, which
    004 uses, they keep moving around it, and a mean over the last of them, `MeanRelative`, is the answer.

    Args:
        rate: the first step.
        decay: how fast steps shrink.

    Example:
        >>> RobbinsMonro(0.5).step(None, torch.zeros(1, 2), torch.ones(1, 2), (torch.zeros(1, 1),))[0]
        tensor([[0.5000, 0.5000]])
    """

    rate: float = 0.5
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise InputError(f"rate must lie in (0, 1]; received {self.rate}")
        if not 0 <= self.decay <= 1:
            raise InputError(f"decay must lie in [0, 1]; received {self.decay}")

    def init(self, x: Tensor) -> SolverState:
        return (x.new_zeros(x.shape[0], 1),)

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        (count,) = state
        share = self.rate / (1 + count) ** self.decay
        return torch.lerp(x, fx, share.expand_as(x)), (count + 1,)
