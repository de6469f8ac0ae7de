"""Plain and damped fixed-point iteration."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.equilibrium.map import Map
from wellposed.equilibrium.solver import Solver, SolverState
from wellposed.errors import InputError


@dataclass(frozen=True)
class Picard(Solver):
    """Iterates ``x <- (1 - damping) x + damping f(x)`` (003 Theorem 1 with damping 1)."""

    damping: float = 1.0

    block = 16

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise InputError(f"damping must lie in (0, 1]; received {self.damping}")

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        return (fx if self.damping == 1 else torch.lerp(x, fx, self.damping)), state
