"""Accelerated projected gradient for all rows at once, on a CPU or a GPU.

`Projected` takes every row by itself. In `GroupLasso` rows share their features: the group lasso with a cap on
every row.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.convex.problem import RowProblem, capped_norm, duality_gap, feasible, gradient, rounding_of_gap
from wellposed.convex.solvers.base import RowSolution, RowSolver, finished, polished
from wellposed.convex.solvers.homotopy import certified_zeros

POWER_STEPS, MARGIN = 40, 1.02
WORTH = 0.9  # of the columns: what may be left for it to be worth while to drop the others


@dataclass(frozen=True)
class Projected(RowSolver):
    """Takes accelerated gradient steps, each followed by the exact projection on the l1 ball.

    The momentum of a row starts anew when it points uphill (adaptive restart). After `period` steps, and then ever
    more rarely, gaps are computed, finished rows leave, columns that no remaining row can need (Gap-Safe
    screening) are dropped from the Gram matrix, and the equations of the entries that are not zero are solved in
    closed form, which ends most rows. For very many rows or very wide ones; a lasso beside a cap on a alone is
    solved here only.

    Args:
        tol: relative gap.
        max_steps: of a row; what is not done then is returned with the gap it has.
        period: steps before the first look.
        screen: whether columns are dropped.
        polish: whether the entries that are not zero are solved for.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> z = torch.tensor([[3.0], [2.0], [0.5]])
        >>> problem = row_problem(Design.of(torch.eye(3)), z, kappa=2.0, capped=3)
        >>> Projected().solve(problem).weights.round(decimals=9)
        tensor([[1.5000, 0.5000, 0.0000]], dtype=torch.float64)
    """

    tol: float = 1e-10
    max_steps: int = 20_000
    period: int = 20
    screen: bool = True
    polish: bool = True

    def solve(self, problem: RowProblem) -> RowSolution:
        best = torch.zeros_like(problem.cross)
        state = _Rows(problem, self)
        while state.left and state.steps < self.max_steps:
            # Ever rarer looks: they cost as much as several steps.
            state.advance(min(max(self.period, state.steps // 2), self.max_steps - state.steps))
            state.check()
            state.write(best)
        return finished(problem, best, state.taken)


class _Rows:
    """The rows that are not finished, on the columns that are not dropped."""

    def __init__(self, problem: RowProblem, solver: Projected) -> None:
        self.problem, self.solver, self.steps = problem, solver, 0
        self.rows = torch.arange(problem.rows, device=problem.cross.device)
        self.columns = torch.arange(problem.columns, device=problem.cross.device)
        self.taken = torch.zeros_like(self.rows)
        self.best = torch.zeros_like(problem.cross)
        self.gap = duality_gap(problem, self.best)
        self.x, self.y = self.best.clone(), self.best.clone()
        self.momentum = torch.ones_like(problem.power)
        self.bound = _largest_eigenvalue(problem.gram)

    @property
    def left(self) -> int:
        return len(self.rows)

    def advance(self, count: int) -> None:
        """Takes some steps."""
        problem, step = self.problem, 1 / self.bound if self.bound > 0 else 0.0
        for _ in range(count):
            new = nearest(problem, self.y - step * gradient(problem, self.y), step)
            uphill = ((self.y - new) * (new - self.x)).sum(1) > 0
            momentum = ((1 + (1 + 4 * self.momentum.square()).sqrt()) / 2).masked_fill(uphill, 1.0)
            factor = ((self.momentum - 1) / momentum).masked_fill(uphill, 0.0)
            self.y = new + factor[:, None] * (new - self.x)
            self.x, self.momentum = new, momentum
        self.steps += count
        self.taken[self.rows] = self.steps

    def check(self) -> None:
        """Computes the gaps, stores the best points and drops what is not needed."""
        self._keep(feasible(self.problem, self.x))
        if self.solver.polish:
            self._keep(feasible(self.problem, polished(self.problem, self.best)))

    def _keep(self, candidate: Tensor) -> None:
        gap = duality_gap(self.problem, candidate)
        better = gap < self.gap
        self.gap = torch.where(better, gap, self.gap)
        self.best = torch.where(better[:, None], candidate, self.best)

    def write(self, target: Tensor) -> None:
        """Copies the points to where they belong and goes on with the rest."""
        target[self.rows[:, None], self.columns] = self.best
        allowed = (self.solver.tol * self.problem.scale).maximum(rounding_of_gap(self.problem, self.best))
        going = self.gap > allowed
        if not bool(going.all()):
            self._select(going, torch.ones_like(self.columns, dtype=torch.bool))
        if self.solver.screen and self.left and self.problem.free == 0:
            zeros = certified_zeros(self.problem, self.best)
            barred = zeros if self.problem.support is None else zeros | ~self.problem.support
            # A mask costs more in every step than it saves, unless columns go that no row needs.
            if int((~barred.all(0)).sum()) <= WORTH * len(self.columns):
                self._drop(target, barred)

    def _drop(self, target: Tensor, barred: Tensor) -> None:
        """Bars entries that are certainly zero, and drops columns that no row needs."""
        self.problem = replace(self.problem, support=~barred)
        keep = ~barred.all(0)
        target[self.rows[:, None], self.columns] = target[self.rows[:, None], self.columns] * ~barred
        for name in ("x", "y", "best"):
            setattr(self, name, getattr(self, name) * ~barred)
        self.gap = duality_gap(self.problem, self.best)
        if bool((~keep).any()):
            self._select(torch.ones_like(self.rows, dtype=torch.bool), keep)
            self.bound = _largest_eigenvalue(self.problem.gram)
            self.momentum = torch.ones_like(self.momentum)

    def _select(self, rows: Tensor, columns: Tensor) -> None:
        problem = self.problem.chosen(rows)
        support = None if problem.support is None else problem.support[:, columns]
        self.problem = replace(
            problem,
            gram=problem.gram[columns][:, columns],
            cross=problem.cross[:, columns],
            capped=int(columns[: problem.capped].sum()),
            ridge=None,
            design=None,
            targets=None,
            support=support,
            shared={},
        )
        for name in ("x", "y", "best"):
            setattr(self, name, getattr(self, name)[rows][:, columns])
        self.gap, self.momentum = self.gap[rows], self.momentum[rows]
        self.rows, self.columns = self.rows[rows], self.columns[columns]


def nearest(problem: RowProblem, point: Tensor, step: float) -> Tensor:
    """Solves min 1/2 |w - point|^2 + step lasso |w|_1 under cap and support.

    Thresholding by step lasso and then projecting on the ball is the same as thresholding once by more.
    """
    if problem.lasso:
        point = point.sign() * (point.abs() - step * problem.lasso).clamp(min=0)
    if problem.support is not None:
        point = point * problem.support
    if problem.capped == 0:
        return point
    head = project_rows(point[:, : problem.capped].contiguous(), problem.kappa)
    return head if problem.free == 0 else torch.cat([head, point[:, problem.capped :]], dim=1)


def _largest_eigenvalue(gram: Tensor) -> float:
    """Estimates |G|_2 from above: power steps and a margin, at most the largest row sum."""
    if gram.shape[0] == 0:
        return 0.0
    v = gram.abs().sum(1, keepdim=True)
    limit = float(v.max())
    for _ in range(POWER_STEPS):
        v = gram @ v
        v = v / v.norm().clamp(min=torch.finfo(v.dtype).tiny)
    return min(limit, MARGIN * float((gram @ v).norm()))


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
