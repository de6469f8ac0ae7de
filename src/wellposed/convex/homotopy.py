"""The exact LASSO path, all rows on one Gram matrix."""

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from wellposed.convex.factor import Factor
from wellposed.convex.polish import polished
from wellposed.convex.problem import RowProblem, duality_gap, gradient
from wellposed.convex.solver import RowSolution, RowSolver, finished, merged, unfinished
from wellposed.errors import require

LEVELS = (1e-13, 1e-9)
ROUNDS = 3
TIED, NUDGE = 1e-10, 1e-9


@cache
def _compiled() -> ModuleType:
    """Imports what needs numba, on first use."""
    require("numba", extra="convex")
    return require("wellposed.convex.path", extra="convex")


@dataclass(frozen=True)
class Homotopy(RowSolver):
    """Follows the path of ``min 1/2 |Ma - z|^2 + lambda |a|_1`` down to the lambda at which |a|_1 = kappa.

    On the path the gap of P(kappa) is lambda (kappa - |a|_1), so the end is exact, not approximate. Rows whose
    cap is inactive (assumption A1 of 003 section 3.3 fails, as for dead units) are found first: a least-squares
    point inside the ball whose gap is small is optimal. Zero, dependent and equal columns stay out. Rows in which
    several columns join at the same lambda are followed again with c changed a little, and then solved exactly on
    the entries found.

    Args:
        tol: the relative gap at which a path may end before it reaches kappa.
        max_steps: joins and leaves of one row; None is ten for every column.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> z = torch.tensor([[3.0], [2.0], [0.5]])
        >>> problem = row_problem(Design.of(torch.eye(3)), z, kappa=2.0, capped=3)
        >>> Homotopy().solve(problem).weights
        tensor([[1.5000, 0.5000, 0.0000]], dtype=torch.float64)
    """

    tol: float = 1e-12
    max_steps: int | None = None

    def refusal(self, problem: RowProblem) -> str | None:
        if problem.free and problem.lasso == 0:
            return "bounds the whole row; use Schur(Homotopy()) where some columns are not capped"
        if problem.free and problem.capped:
            return "takes a lasso only with a cap on the whole row or none; use Projected()"
        return None

    def solve(self, problem: RowProblem) -> RowSolution:
        self.accept(problem)
        first = finished(problem, inside_ball(problem) if problem.lasso == 0 else torch.zeros_like(problem.cross))
        rest = unfinished(problem, first, self.tol)
        if len(rest) == 0:
            return first
        part = problem.chosen(rest)
        found = merged(first, self._path(part, part.cross), rest)
        rest = unfinished(problem, found, max(self.tol, TIED))
        if len(rest) == 0:
            return found
        part = problem.chosen(rest)
        return merged(found, self._path(part, _perturbed(part)), rest)

    def _path(self, problem: RowProblem, cross: Tensor) -> RowSolution:
        weights, steps = self._follow(replace(problem, cross=cross))
        if cross is not problem.cross:
            weights = polished(problem, weights)
        return finished(problem, weights, steps.to(weights.device))

    def _follow(self, problem: RowProblem) -> tuple[Tensor, Tensor]:
        support = problem.support
        allowed = np.ones((1, problem.columns), np.bool_) if support is None else support.cpu().numpy()
        limit = 10 * problem.columns if self.max_steps is None else self.max_steps
        gram, cross = (np.ascontiguousarray(part.cpu().numpy()) for part in (problem.gram, problem.cross))
        targets = (self.tol * problem.scale).cpu().numpy()
        kappa = float(problem.kappa) if problem.capped else math.inf
        found = _compiled().follow_all(gram, cross, kappa, float(problem.lasso), targets, allowed, limit)
        return torch.from_numpy(found[0]).to(problem.cross), torch.from_numpy(found[2])


def _perturbed(problem: RowProblem) -> Tensor:
    """Changes c by a relative 1e-9, so that columns which would join at the same lambda do so one by one."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(problem.cross.shape, generator=generator, dtype=problem.cross.dtype).to(problem.cross)
    return problem.cross + NUDGE * problem.cross.abs().amax(1, keepdim=True) * (noise - 0.5)


def inside_ball(problem: RowProblem) -> Tensor:  # (r, d)
    """Returns least-squares points of the rows that have one inside the ball, zero for the others.

    ``a <- a - (G + level diag(G))^-1 (Ga - c)`` tends to the least-squares point next to zero. Whether a point
    is optimal is decided by its gap, so nothing hangs on the level. Rows with a support of their own get zero.
    """
    best = torch.zeros_like(problem.cross)
    if problem.support is not None or problem.columns == 0 or problem.rows == 0:
        return best
    least = duality_gap(problem, best)
    for level in LEVELS:
        factor = problem.once(level, partial(Factor.of, problem.gram, level))
        a = factor.solve(problem.cross)
        near = torch.nonzero(a.abs().sum(1) <= 2 * problem.kappa)[:, 0]
        part, a = problem.chosen(near), a[near]
        for _ in range(ROUNDS if len(near) else 0):
            a = a - factor.solve(gradient(part, a))
            gap = duality_gap(part, a)
            better = gap < least[near]
            best[near[better]], least[near[better]] = a[better], gap[better]
    return best
