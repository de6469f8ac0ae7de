"""Semismooth Newton: dense for small states, matrix-free above."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.equilibrium.linear import gmres, solve_rows
from wellposed.equilibrium.map import Map
from wellposed.equilibrium.solver import Solver, SolverState
from wellposed.equilibrium.transform import under_transform
from wellposed.errors import InputError


@dataclass(frozen=True)
class Newton(Solver):
    """Proposes ``x + (I - J)^-1 (f(x) - x)`` with ``J`` an element of the generalised Jacobian of f.

    For piecewise linear maps such as ReLU this is an active-set method and ends after finitely many
    steps. A step that does not reduce the residual is halved, up to `halvings` times, and then replaced
    by a plain step from the point it started at.

    Args:
        dense: states up to this size factorise the Jacobian; larger ones use GMRES.
        krylov_steps: the most products with the Jacobian in one GMRES solve.
        halvings: the most evaluations spent on shortening one step.
    """

    dense: int = 64
    krylov_steps: int = 40
    halvings: int = 6

    def __post_init__(self) -> None:
        if self.dense < 0 or self.krylov_steps < 1 or self.halvings < 0:
            raise InputError(
                "dense and halvings must not be negative and krylov_steps at least 1; received "
                f"dense={self.dense}, krylov_steps={self.krylov_steps}, halvings={self.halvings}"
            )

    def init(self, x: Tensor) -> SolverState:
        # where the step started, its direction, its length (zero: the last step was plain), the
        # residual there and the plain image of that point
        size = x.new_zeros(x.shape[0])
        return x, torch.zeros_like(x), size, torch.full_like(size, torch.inf), x

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        origin, direction, length, best, safe = state
        norm = torch.linalg.vector_norm((fx - x).detach(), dim=1)
        worse = (length > 0) & ~(norm < best)
        half = worse & (length > 0.5**self.halvings)
        plain = worse & ~half
        if under_transform() or not bool(worse.all()):
            found = self._solve(f, x.detach(), fx - x)
            fresh = ~worse & found.detach().isfinite().all(1)
            keep = worse[:, None]
            origin, safe = torch.where(keep, origin, x), torch.where(keep, safe, fx)
            best = torch.where(worse, best, norm)
            direction = torch.where(keep, direction, torch.where(fresh[:, None], found, fx - x))
        length = torch.where(half, length / 2, torch.where(plain, 0, 1))
        proposal = torch.where(plain[:, None], safe, origin + length[:, None] * direction)
        return proposal, (origin, direction, length, best, safe)

    def _solve(self, f: Map, x: Tensor, r: Tensor) -> Tensor:
        if x.shape[1] <= self.dense:
            with torch.no_grad():
                system = torch.eye(x.shape[1], dtype=x.dtype, device=x.device) - f.jacobian(x)
            return solve_rows(system, r)
        if r.requires_grad:
            raise InputError(
                f"Newton on {x.shape[1]} states uses GMRES, which gradient=Unrolled() cannot differentiate; "
                "use gradient=Implicit(), or raise Newton(dense=...)"
            )
        return gmres(lambda tangent: tangent - f.jvp(x, tangent), r, self.krylov_steps)
