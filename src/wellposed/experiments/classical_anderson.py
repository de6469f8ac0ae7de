"""Anderson acceleration as the literature on equilibrium models has it, for comparisons."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.equilibrium.anderson import least_squares
from wellposed.equilibrium.map import Map
from wellposed.equilibrium.solver import Solver, SolverState


@dataclass(frozen=True)
class ClassicalAnderson(Solver):
    """Goes at every step to the combination of the latest images whose residuals cancel (Anderson 1965).

    Without the plain steps and the judgement of `wellposed.Anderson`, which takes a jump back whose residual has
    not fallen; where residuals are noise, that is nearly every jump.

    Args:
        memory: images that are combined.
        ridge: regularisation, relative to the trace of the normal equations.
    """

    memory: int = 5
    ridge: float = 1e-4

    def init(self, x: Tensor) -> SolverState:
        none = x.new_zeros(x.shape[0], 0, x.shape[1])
        return none, none

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        points, images = (
            torch.cat([kept, new[:, None]], dim=1)[:, -self.memory :]
            for kept, new in zip(state, (x, fx), strict=True)
        )
        if points.shape[1] == 1:
            return fx, (points, images)
        residuals = images - points  # (B, m, n)
        gamma = least_squares(residuals.diff(dim=1)[:, None], residuals[:, None, -1], self.ridge)
        return fx - (images.diff(dim=1) * gamma[:, :, None]).sum(1), (points, images)
