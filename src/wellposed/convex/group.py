"""Rows that share their features: the group lasso with a cap on every row."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.convex.problem import RowProblem, capped_norm, feasible
from wellposed.convex.solver import RowSolution, RowSolver


@dataclass(frozen=True)
class GroupLasso(RowSolver):
    """Minimises ``1/2 |MW' - Z|^2 + weight sum_j |W_j|_2`` over all rows together, W_j the column of a feature.

    A feature is then used by all rows or by none. ADMM with one factorisation: one copy of W carries the groups,
    one the cap; the copy with the groups, moved inside the cap, is returned. The gap is that of the joint problem:
    with g = M'nu split into a part whose columns are at most `weight` long (from ADMM's multipliers) and a rest r,
    the dual value is -1/2 |nu|^2 - <z, nu> - kappa sum_i max_j |r_ij|. Every row is told its share of it.

    Args:
        weight: of the groups.
        tol: relative gap.
        max_steps: of ADMM.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> z = torch.tensor([[3.0, 4.0], [0.1, 0.1]])
        >>> problem = row_problem(Design.of(torch.eye(2)), z, kappa=9.0, capped=2)
        >>> GroupLasso(1.0).solve(problem).weights.round(decimals=4)
        tensor([[2.4000, 0.0000],
                [3.2000, 0.0000]], dtype=torch.float64)
    """

    weight: float
    tol: float = 1e-7
    max_steps: int = 20_000

    def solve(self, problem: RowProblem) -> RowSolution:
        gram, cross = problem.gram, problem.cross
        step = float(gram.diagonal().mean()) or 1.0
        factor = torch.linalg.cholesky(gram + 2 * step * torch.eye(len(gram)).to(gram))
        groups, inside = torch.zeros_like(cross), torch.zeros_like(cross)
        first, second = torch.zeros_like(cross), torch.zeros_like(cross)
        best, least, steps = torch.zeros_like(cross), math.inf, 0
        target = self.tol * float(problem.scale.sum())
        for steps in range(1, self.max_steps + 1):
            right = cross + step * (groups - first + inside - second)
            W = torch.cholesky_solve(right.mT, factor).mT
            groups = self._shrunk(W + first, self.weight / step, problem)
            inside = self._capped(W + second, problem)
            first, second = first + W - groups, second + W - inside
            if steps % 25 == 0:
                candidate = feasible(problem, groups)
                if (gap := self._gap(problem, candidate, -step * first)) < least:
                    best, least = candidate, gap
                if least <= target:
                    break
        share = problem.scale / problem.scale.sum().clamp(min=1e-300)
        return RowSolution(best, least * share, problem.scale, torch.full_like(share, steps, dtype=torch.int64))

    @staticmethod
    def _shrunk(W: Tensor, level: float, problem: RowProblem) -> Tensor:
        if problem.support is not None:
            W = W * problem.support
        size = W.norm(dim=0, keepdim=True)
        return W * (1 - level / size.clamp(min=level or 1e-300)).clamp(min=0)

    @staticmethod
    def _capped(W: Tensor, problem: RowProblem) -> Tensor:
        if not problem.capped or not math.isfinite(problem.kappa):
            return W
        head = project_rows(W[:, : problem.capped].contiguous(), problem.kappa)
        return torch.cat([head, W[:, problem.capped :]], dim=1)

    def _gap(self, problem: RowProblem, W: Tensor, multiplier: Tensor) -> float:
        """Computes primal minus dual value at the residual, shrunk until the columns without a cap allow it."""
        slope = W @ problem.gram - problem.cross
        if problem.support is not None:
            slope = slope * problem.support
        explained, power = float((W * problem.cross).sum()), float(problem.power.sum())
        square = float((W * (W @ problem.gram)).sum()) - 2 * explained + power
        primal = square / 2 + self.weight * float(W.norm(dim=0).sum())
        size = slope.norm(dim=0)
        tail = float(size[problem.capped :].max()) if problem.free else 0.0
        s = self.weight / tail if tail > self.weight else 1.0
        slope = s * slope
        length = multiplier.norm(dim=0)
        short = multiplier * (self.weight / length.clamp(min=self.weight or 1e-300))
        rest = slope - short if problem.support is None else (slope - short) * problem.support
        cost = problem.kappa * float(rest[:, : problem.capped].abs().amax(1).sum()) if problem.capped else 0.0
        dual = -s * s * square / 2 - s * (explained - power) - cost
        excess = bool((capped_norm(problem, W) > problem.kappa * (1 + 1e-12)).any())
        return math.inf if excess else max(primal - dual, 0.0)
