"""What every row solver promises: a feasible point and its duality gap."""

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

    def refusal(self, problem: RowProblem) -> str | None:
        """Says why the solver cannot take a problem; None if it can."""
        return None

    def accept(self, problem: RowProblem) -> None:
        """Raises if the solver cannot take a problem."""
        if (reason := self.refusal(problem)) is not None:
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
