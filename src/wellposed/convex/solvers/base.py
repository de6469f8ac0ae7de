"""What every row solver promises: a feasible point and its duality gap.

A `RowSolver` returns a `RowSolution`. `finished` makes one of weights, `merged` keeps the better of two, and
`polished` solves in closed form on a known support.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.convex.problem import RowProblem, duality_gap, feasible, rounding_of_gap
from wellposed.errors import InputError
from wellposed.registry import Registry


@dataclass(frozen=True, eq=False)
class RowSolution:
    """Rows that satisfy the cap, each with a proof of how good it is.

    Args:
        weights: (a, b) of every row, ``(r, d)``.
        gap: at most this far above the smallest possible objective, ``(r,)``.
        scale: what relative gaps refer to, ``(r,)``.
        steps: what it took, in the solver's own steps, ``(r,)``.

    Example:
        >>> one = torch.ones(1)
        >>> RowSolution(torch.zeros(1, 3), 0.5 * one, 10 * one, one).relative_gap
        tensor([0.0500])
    """

    weights: Tensor
    gap: Tensor
    scale: Tensor
    steps: Tensor

    @property
    def relative_gap(self) -> Tensor:  # (r,)
        """The gap divided by |z|^2 / 2, the objective of w = 0; zero where there is nothing to explain."""
        return torch.where(self.scale > 0, self.gap / self.scale, 0.0)


class RowSolver(ABC):
    """Solves the rows of a problem."""

    @abstractmethod
    def solve(self, problem: RowProblem) -> RowSolution:
        """Returns a feasible point of every row with its duality gap."""

    def why_not(self, problem: RowProblem) -> str | None:
        """Says why the solver cannot take a problem; None if it can."""
        return None

    def accept(self, problem: RowProblem) -> None:
        """Raises if the solver cannot take a problem."""
        if (reason := self.why_not(problem)) is not None:
            raise InputError(f"{type(self).__name__} {reason}")


def finished(problem: RowProblem, weights: Tensor, steps: Tensor | int = 0, *, exact: bool = False) -> RowSolution:
    """Makes a solution of weights: satisfies the cap and computes the gap there."""
    weights = feasible(problem, weights)
    count = torch.as_tensor(steps, device=weights.device).expand(len(weights))
    return RowSolution(weights, duality_gap(problem, weights, exact=exact), problem.scale, count)


def unfinished(problem: RowProblem, solution: RowSolution, tol: float) -> Tensor:
    """Lists the rows whose relative gap exceeds `tol`, unless rounding forbids a smaller one."""
    allowed = (tol * problem.scale).maximum(rounding_of_gap(problem, solution.weights))
    return torch.nonzero(~(solution.gap <= allowed))[:, 0]


def merged(first: RowSolution, second: RowSolution, rows: Tensor) -> RowSolution:
    """Replaces some rows of a solution by those of another, wherever their gap is smaller."""
    better = second.gap < first.gap[rows]
    places = rows[better]
    weights, gap, steps = first.weights.clone(), first.gap.clone(), first.steps.clone()
    weights[places], gap[places] = second.weights[better], second.gap[better]
    steps[rows] += second.steps.to(steps)
    return RowSolution(weights, gap, first.scale, steps)


ROW_SOLVERS: Registry[RowSolver] = Registry("row solver", RowSolver)


WIDEST, BUDGET = 512, 1 << 24  # entries that are not zero, and numbers in one batch of systems


def polished(problem: RowProblem, weights: Tensor) -> Tensor:  # (r, d)
    """Solves the optimality conditions on the entries that are not zero, signs kept.

    With s the signs and h those of capped entries, G_SS w = c_S - lasso s - mu h, and mu >= 0 is such that the cap
    holds with equality, or zero. The result is optimal if no sign changes and no other entry should join; it is
    for the caller to judge by its gap. Rows with more than 512 such entries stay as they are.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> problem = row_problem(Design.of(torch.eye(2)), torch.tensor([[3.0], [2.0]]), kappa=2.0, capped=2)
        >>> polished(problem, torch.tensor([[1.9, 0.1]], dtype=torch.float64))
        tensor([[1.5000, 0.5000]], dtype=torch.float64)
    """
    count = (weights != 0).sum(1)
    width = min(int(count.max()), WIDEST) if len(count) and weights.shape[1] else 0
    if width == 0:
        return weights
    result = weights.clone()
    for rows in torch.nonzero(count <= width)[:, 0].split(max(1, BUDGET // width**2)):
        result[rows] = _solved(problem.chosen(rows), weights[rows], width)
    return result


def _solved(problem: RowProblem, weights: Tensor, width: int) -> Tensor:
    columns = weights.abs().topk(width, dim=1).indices  # (r, k)
    signs = weights.gather(1, columns).sign()
    used = signs != 0
    gram = problem.gram[columns[:, :, None], columns[:, None, :]] * (used[:, :, None] & used[:, None, :])
    gram.diagonal(dim1=1, dim2=2).masked_fill_(~used, 1.0)
    capped = signs * (columns < problem.capped)
    right = torch.stack([problem.cross.gather(1, columns) * used, signs, capped], dim=2)
    solutions, info = torch.linalg.solve_ex(gram, right)
    base = solutions[..., 0] - problem.lasso * solutions[..., 1]
    rate = (capped * solutions[..., 2]).sum(1)
    excess = (capped * base).sum(1) - problem.kappa
    mu = torch.where(rate > 0, excess / rate, 0.0).clamp(min=0)
    entries = base - mu[:, None] * solutions[..., 2]
    good = ((info == 0) & entries.isfinite().all(1))[:, None]
    entries = torch.where(good & (entries * signs > 0), entries, 0.0)
    moved = torch.zeros_like(weights).scatter(1, columns, entries)
    return torch.where(good, moved, weights)
