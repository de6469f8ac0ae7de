"""Algorithm 1 of 003: bisection on lambda, a LASSO problem at every step."""

from dataclasses import dataclass

import numpy as np
import torch

from wellposed.convex.homotopy import compiled
from wellposed.convex.problem import RowProblem
from wellposed.convex.solver import RowSolution, RowSolver, finished


@dataclass(frozen=True)
class Bisection(RowSolver):
    """Halves an interval of lambda until the LASSO solution at its upper end nearly fills the ball.

    The default repairs Algorithm 1: it starts at |M'z|_inf, above which the solution is zero (003, Lemma 1), it
    measures the interval relative to that, and it returns the upper end, which satisfies the cap. The inner
    problems are solved by coordinate descent. For comparison with `Homotopy`, which is exact and faster.

    Args:
        eps: width at which the interval is small enough, relative to |M'z|_inf (`literal`: absolute).
        inner_tol: squared changes |M_j da_j|^2 of the last sweep of an inner problem, relative to |z|^2 / 2.
        warm_start: whether an inner problem starts from the last solution (003, Algorithm 2) or from zero.
        literal: Algorithm 1 as printed: starts at |M'z|_2, and returns the last lambda that was tried, whose
            solution may violate the cap; its gap is then infinite.
        max_sweeps: passes over the columns of one inner problem.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> problem = row_problem(Design.of(torch.eye(2)), torch.tensor([[3.0], [1.0]]), kappa=1.0, capped=2)
        >>> Bisection().solve(problem).weights.round(decimals=6)
        tensor([[1., 0.]], dtype=torch.float64)
    """

    eps: float = 1e-9
    inner_tol: float = 1e-18
    warm_start: bool = True
    literal: bool = False
    max_sweeps: int = 10_000

    def refusal(self, problem: RowProblem) -> str | None:
        if problem.free or problem.lasso:
            return "bounds the whole row and takes no lasso; use Schur(Bisection()) where columns are not capped"
        return None

    def solve(self, problem: RowProblem) -> RowSolution:
        self.accept(problem)
        gram, cross = (np.ascontiguousarray(part.cpu().numpy()) for part in (problem.gram, problem.cross))
        allowed = np.ones(cross.shape, np.bool_) if problem.support is None else problem.support.cpu().numpy()
        scale = problem.scale.cpu().numpy() * self.inner_tol
        weights, steps = compiled("descent").bisect_all(
            gram, cross, allowed, float(problem.kappa), self.eps, scale, self.warm_start, self.literal,
            self.max_sweeps,
        )  # fmt: skip
        found = torch.from_numpy(weights).to(problem.cross)
        counts = torch.from_numpy(steps).to(found.device)
        if not self.literal:
            return finished(problem, found, counts)
        fair = finished(problem, found, counts)
        outside = found.abs().sum(1) > problem.kappa * (1 + 1e-12)
        return RowSolution(found, torch.where(outside, torch.inf, fair.gap), problem.scale, counts)
