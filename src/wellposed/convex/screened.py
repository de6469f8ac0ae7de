"""Solves every row on the columns that it may need, known from a few steps of the projected gradient."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from wellposed.convex.conic import Conic
from wellposed.convex.problem import RowProblem
from wellposed.convex.projected import Projected
from wellposed.convex.schur import restricted
from wellposed.convex.screening import certified_zeros
from wellposed.convex.solver import RowSolution, RowSolver, finished


@dataclass(frozen=True)
class Screened(RowSolver):
    """Removes columns that are certainly zero from every row by itself, and hands what is left to another solver.

    All rows take some steps of the projected gradient together; from the points reached, Gap-Safe screening names
    entries that are zero in every solution. For solvers whose cost grows fast with the columns: an interior-point
    method on 30 columns in place of 900. Rows whose cap is inactive keep all columns. The gap refers to the whole
    problem.

    Args:
        inner: for the rows, one by one.
        steps: of the projected gradient, before the look.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> z = torch.tensor([[3.0], [2.0], [0.5]])
        >>> problem = row_problem(Design.of(torch.eye(3)), z, kappa=2.0, capped=3)
        >>> Screened(steps=20).solve(problem).weights.round(decimals=5)
        tensor([[1.5000, 0.5000, 0.0000]], dtype=torch.float64)
    """

    inner: RowSolver = field(default_factory=Conic)
    steps: int = 100

    def refusal(self, problem: RowProblem) -> str | None:
        return self.inner.refusal(problem)

    def solve(self, problem: RowProblem) -> RowSolution:
        self.accept(problem)
        kept = self.needed(problem)
        weights = torch.zeros_like(problem.cross)
        steps = torch.full((problem.rows,), self.steps, dtype=torch.int64, device=weights.device)
        for i, row in enumerate(kept):
            columns = torch.nonzero(row)[:, 0]
            if len(columns):
                alone = restricted(problem.chosen(slice(i, i + 1)), columns)
                found = self.inner.solve(alone)
                weights[i, columns] = found.weights[0]
                steps[i] += int(found.steps[0])
        return finished(problem, weights, steps)

    def needed(self, problem: RowProblem) -> Tensor:  # (r, d) bool
        """Marks the entries that a solution may use."""
        early = Projected(max_steps=self.steps, period=self.steps, screen=False, polish=False).solve(problem)
        zeros = certified_zeros(problem, early.weights)
        return ~zeros if problem.support is None else ~zeros & problem.support
