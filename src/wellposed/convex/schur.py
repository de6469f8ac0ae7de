"""Eliminates the columns that are not capped: one Schur complement for all rows."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wellposed.convex.factor import Factor
from wellposed.convex.homotopy import Homotopy
from wellposed.convex.problem import RowProblem, common_support, gradient
from wellposed.convex.solver import RowSolution, RowSolver, finished, merged

ABSENT, PASSES = 1e-13, 4


@dataclass(frozen=True, eq=False)
class Reduction:
    """A problem in (a, b) as one in a alone, everything capped.

    For given a the best b is K^-1 (c_b - G_ba a), with K the Gram matrix of the columns of b. What is left is
    least squares with G_aa - G_ab K^-1 G_ba, c_a - G_ab K^-1 c_b and |z|^2 - c_b'K^-1 c_b, with one matrix.

    Args:
        problem: in (a, b), without a lasso; all rows may use the same columns of b.
        factor: of K.
        reduced: in a.
    """

    problem: RowProblem
    factor: Factor
    reduced: RowProblem

    @classmethod
    def of(cls, problem: RowProblem) -> "Reduction":
        """Forms the Schur complement."""
        cut, factor = problem.capped, problem.factor
        across, gram, absent, shared = problem.once("schur", lambda: _complement(problem))
        right = factor.half(problem.cross[:, cut:])  # (r, p)
        cross = (problem.cross[:, :cut] - right @ across.mT).masked_fill(absent, 0.0)
        power = (problem.power - right.square().sum(1)).clamp(min=0)
        support = None if problem.support is None else problem.support[:, :cut]
        reduced = RowProblem(
            gram, cross, power, problem.kappa, cut, support=support, reference=problem.scale, shared=shared
        )
        return cls(problem, factor, reduced)

    def completed(self, a: Tensor) -> Tensor:  # (r, d)
        """Adds the best b to every a."""
        cut = self.problem.capped
        b = self.factor.solve(self.problem.cross[:, cut:] - a @ self.problem.gram[:cut, cut:])
        return torch.cat([a, b], dim=1)

    def corrected(self, weights: Tensor) -> tuple[Tensor, RowProblem]:
        """Computes the gradient from the data and returns better b, and a reduced problem that is exact at a."""
        cut = self.problem.capped
        for _ in range(2):
            slope = gradient(self.problem, weights, exact=True)
            moved = self.factor.solve(slope[:, cut:])
            weights = torch.cat([weights[:, :cut], weights[:, cut:] - moved], dim=1)
        slope = gradient(self.problem, weights, exact=True)
        reduced = slope[:, :cut] - self.factor.solve(slope[:, cut:]) @ self.problem.gram[cut:, :cut]
        cross = weights[:, :cut] @ self.reduced.gram - reduced
        return weights, replace(self.reduced, cross=cross)


def _complement(problem: RowProblem) -> tuple[Tensor, Tensor, Tensor, dict[Any, Any]]:
    """Computes L^-1 G_ba, the complement, which columns of a vanish in it, and room for what it decides."""
    cut = problem.capped
    across = problem.factor.half(problem.gram[:cut, cut:])  # (n, p)
    whole = problem.gram[:cut, :cut]
    gram = whole - across @ across.mT
    absent = gram.diagonal() <= ABSENT * whole.diagonal()
    return across, ((gram + gram.mT) / 2).masked_fill(absent | absent[:, None], 0.0), absent, {}


@dataclass(frozen=True)
class Schur(RowSolver):
    """Eliminates b and hands the problem in a to another solver.

    The complement cancels digits where b alone explains most of z. Each pass of `refine` computes gradients from
    the data again and solves once more, which brings them back; it takes ``8 m d r`` operations. With a `tol` the
    gap itself is computed from the data, and the passes end as soon as it is reached: ``Schur(tol=1e-9)``, or
    "refined" by name, proves a relative gap of 1e-9 that no rounding of the Gram matrix can fake.

    Args:
        inner: for the problem in a, where everything is capped.
        refine: passes over the data; with a `tol` at most this many, 4 if zero.
        tol: relative gap to reach, judged from the data; None makes all passes of `refine`.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> X, U = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
        >>> problem = row_problem(Design.of(X, U), torch.tensor([[2.0], [5.0]]), kappa=0.5, capped=1)
        >>> Schur().solve(problem).weights
        tensor([[0.5000, 5.0000]], dtype=torch.float64)
    """

    inner: RowSolver = field(default_factory=Homotopy)
    refine: int = 0
    tol: float | None = None

    @property
    def passes(self) -> int:
        """How many passes over the data there may be."""
        return self.refine if self.refine or self.tol is None else PASSES

    def refusal(self, problem: RowProblem) -> str | None:
        if problem.lasso > 0:
            return "eliminates b only where it has no lasso; use Projected()"
        if self.passes and problem.design is None:
            return "refines by way of the data, which this problem has not kept; set refine=0 and tol=None"
        return None

    def solve(self, problem: RowProblem) -> RowSolution:
        self.accept(problem)
        if problem.free == 0:
            return self.inner.solve(problem)
        if problem.support is None:
            return self._solve(problem)
        return self._by_support(problem, problem.support)

    def _solve(self, problem: RowProblem) -> RowSolution:
        reduction = Reduction.of(problem)
        first = self.inner.solve(reduction.reduced)
        found = finished(problem, reduction.completed(first.weights), first.steps, exact=self.passes > 0)
        for _ in range(self.passes):
            rest = self._unfinished(problem, found)
            if len(rest) == 0:
                break
            part = problem if len(rest) == problem.rows else problem.chosen(rest)
            found = self._kept(found, self._pass(part, found.weights[rest]), rest)
        return found

    def _unfinished(self, problem: RowProblem, found: RowSolution) -> Tensor:
        if self.tol is None:
            return torch.arange(problem.rows, device=problem.cross.device)
        return torch.nonzero(found.gap > self.tol * problem.scale)[:, 0]

    def _kept(self, found: RowSolution, again: RowSolution, rest: Tensor) -> RowSolution:
        if self.tol is None:  # a pass may seem worse by the Gram matrix alone; all of them count
            return replace(again, steps=found.steps + again.steps)
        return merged(found, again, rest)

    def _pass(self, problem: RowProblem, weights: Tensor) -> RowSolution:
        """Solves once more with gradients from the data."""
        reduction, cut = Reduction.of(problem), problem.capped
        weights, reduced = reduction.corrected(weights)
        again = self.inner.solve(reduced)
        moved = again.weights - weights[:, :cut]
        b = weights[:, cut:] - reduction.factor.solve(moved @ problem.gram[:cut, cut:])
        return finished(problem, torch.cat([again.weights, b], dim=1), again.steps, exact=True)

    def _by_support(self, problem: RowProblem, support: Tensor) -> RowSolution:
        """Solves rows that use the same columns of b together."""
        weights = torch.zeros_like(problem.cross)
        steps = torch.zeros(problem.rows, dtype=torch.int64, device=weights.device)
        gap = torch.zeros_like(problem.power)
        head = torch.arange(problem.capped, device=weights.device)
        for rows, tail in common_support(support[:, problem.capped :]):
            columns = torch.cat([head, problem.capped + tail])
            part = restricted(problem.chosen(rows), columns)
            if part.support is not None and bool(part.support.all()):
                part = replace(part, support=None)
            found = self._solve_group(part)
            weights[rows[:, None], columns] = found.weights
            steps[rows], gap[rows] = found.steps.to(steps), found.gap
        return RowSolution(weights, gap, problem.scale, steps)

    def _solve_group(self, problem: RowProblem) -> RowSolution:
        return self.inner.solve(problem) if problem.free == 0 else self._solve(problem)


def restricted(problem: RowProblem, columns: Tensor) -> RowProblem:
    """Keeps some columns of all rows, in ascending order.

    Example:
        >>> import torch
        >>> from wellposed.convex import Design, row_problem
        >>> problem = row_problem(Design.of(torch.eye(3)), torch.ones(3, 1), kappa=1.0, capped=3)
        >>> restricted(problem, torch.tensor([0, 2])).columns
        2
    """
    return replace(
        problem,
        gram=problem.gram[columns][:, columns],
        cross=problem.cross[:, columns],
        capped=int((columns < problem.capped).sum()),
        ridge=None if problem.ridge is None else problem.ridge[columns],
        support=None if problem.support is None else problem.support[:, columns],
        design=None if problem.design is None else problem.design.restricted(columns),
        shared={},
    )
