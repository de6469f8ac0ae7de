"""The exact LASSO path, all rows on one Gram matrix, with elimination of free columns and Gap-Safe screening.

`Homotopy` follows the path where every column is capped. `Schur` eliminates the columns that are not capped: one
Schur complement for all rows. `certified_zeros` is Gap-Safe screening: columns that are certainly zero in the
solution, known before it is.

Let w be feasible, nu = Mw - z its residual and w*, nu* those of a solution. F is 1-strongly convex and the dual
1-strongly concave in nu, so F(w) - F* and D* - D(nu) are both at least |nu - nu*|^2 / 2, and

    |nu - nu*| <= sqrt(gap),   hence   | |g_j| - |g*_j| | <= |M_j| sqrt(gap).

At the solution |g*_j| is largest where w*_j != 0 (and at least lasso there), so w*_j = 0 if |g_j| + |M_j| r is
below lasso or below some |g_i| - |M_i| r. This is the safe rule for the form with a cap; a ridge (gamma > 0, the
elastic form of 002 eq. 2) is part of G, that is, of M and its column norms. Where the cap is inactive g* = 0 and
nothing can be certified. The rule "mu_1i, mu_2i > 0" of 002 section 5.1 needs an exact dual optimum instead.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.convex.problem import (
    Factor,
    RowProblem,
    common_support,
    duality_gap,
    gradient,
    rounding,
    rounding_of_gap,
)
from wellposed.convex.solvers.base import RowSolution, RowSolver, finished, merged, polished, unfinished
from wellposed.errors import require

LEVELS = (1e-13, 1e-9)
ROUNDS = 3
TIED, NUDGE = 1e-10, 1e-9


@cache
def _compiled() -> ModuleType:
    """Imports what needs numba, on first use."""
    require("numba", extra="convex")
    return require("wellposed.convex.solvers.path", extra="convex")


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

    def why_not(self, problem: RowProblem) -> str | None:
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
        solution = merged(first, self._path(part, part.cross), rest)
        rest = unfinished(problem, solution, max(self.tol, TIED))
        if len(rest) == 0:
            return solution
        part = problem.chosen(rest)
        # A relative change of 1e-9 lets columns that would join at the same lambda do so one by one.
        noise = torch.rand(part.cross.shape, generator=torch.Generator().manual_seed(0), dtype=part.cross.dtype)
        nudge = NUDGE * part.cross.abs().amax(1, keepdim=True) * (noise.to(part.cross) - 0.5)
        return merged(solution, self._path(part, part.cross + nudge), rest)

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
        followed = _compiled().follow_all(gram, cross, kappa, float(problem.lasso), targets, allowed, limit)
        return torch.from_numpy(followed[0]).to(problem.cross), torch.from_numpy(followed[2])


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


ABSENT, PASSES = 1e-13, 4  # share of the diagonal below which a column vanishes; most passes over the data


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

    def why_not(self, problem: RowProblem) -> str | None:
        if problem.lasso > 0:
            return "eliminates b only where it has no lasso; use Projected()"
        if self.passes and problem.design is None:
            return "refines by way of the data, which this problem no longer has; set refine=0 and tol=None"
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
        solution = finished(problem, reduction.completed(first.weights), first.steps, exact=self.passes > 0)
        for _ in range(self.passes):
            rest = self._unfinished(problem, solution)
            if len(rest) == 0:
                break
            part = problem if len(rest) == problem.rows else problem.chosen(rest)
            again = self._pass(part, solution.weights[rest])
            if self.tol is None:  # a pass may seem worse by the Gram matrix alone; all of them count
                solution = replace(again, steps=solution.steps + again.steps)
            else:
                solution = merged(solution, again, rest)
        return solution

    def _unfinished(self, problem: RowProblem, solution: RowSolution) -> Tensor:
        if self.tol is None:
            return torch.arange(problem.rows, device=problem.cross.device)
        return torch.nonzero(solution.gap > self.tol * problem.scale)[:, 0]

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
            solution = self.inner.solve(part) if part.free == 0 else self._solve(part)
            weights[rows[:, None], columns] = solution.weights
            steps[rows], gap[rows] = solution.steps.to(steps), solution.gap
        return RowSolution(weights, gap, problem.scale, steps)


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


def certified_zeros(problem: RowProblem, weights: Tensor) -> Tensor:  # (r, d) bool
    """Marks entries of the support that are zero in every solution, from any feasible point.

    Rounding is allowed for: in the gradient, the column norms and the gap. Columns that are not capped and carry
    no lasso are never marked; those of a are then judged after b is eliminated.

    Args:
        problem: with one support for all rows in the columns that are not capped, if any.
        weights: feasible, the better the more is marked.

    Example:
        >>> from wellposed.convex import Design, Homotopy, row_problem
        >>> M, z = torch.eye(3), torch.tensor([[3.0], [2.0], [0.5]])
        >>> problem = row_problem(Design.of(M), z, kappa=2.0, capped=3)
        >>> certified_zeros(problem, Homotopy().solve(problem).weights)
        tensor([[False, False,  True]])
    """
    if problem.free and problem.lasso == 0:
        if problem.capped == 0:
            return torch.zeros_like(weights, dtype=torch.bool)
        inner = certified_zeros(Reduction.of(problem).reduced, weights[:, : problem.capped])
        return torch.cat([inner, torch.zeros_like(weights[:, problem.capped :], dtype=torch.bool)], dim=1)
    lower, upper = correlation_bounds(problem, weights)
    if problem.support is not None:
        lower = lower.masked_fill(~problem.support, -torch.inf)
    level = torch.full_like(problem.power, problem.lasso)[:, None].expand_as(upper).clone()
    if problem.capped:
        head = slice(0, problem.capped)
        level[:, head] = level[:, head].maximum(lower[:, head].amax(1, keepdim=True))
    zeros = upper < level
    return zeros if problem.support is None else zeros & problem.support


def correlation_bounds(problem: RowProblem, weights: Tensor) -> tuple[Tensor, Tensor]:  # (r, d) each
    """Bounds |g*_j| = |M_j'nu*| from both sides.

    With columns that are not capped the dual point is the residual shrunk by s <= 1; it is not the residual of a
    feasible point then, and the radius is sqrt(2 gap).
    """
    slope = gradient(problem, weights)
    if problem.support is not None:
        slope = slope * problem.support
    norms = problem.gram.diagonal().clamp(min=0).sqrt()
    error = rounding(problem, weights)
    gap, slack = duality_gap(problem, weights), rounding_of_gap(problem, weights)
    shrink = torch.ones_like(gap)
    if problem.free:
        tail = slope[:, problem.capped :].abs().amax(1)
        shrink = torch.where(tail > problem.lasso, problem.lasso / tail, 1.0)
        gap, slack = 2 * gap, 4 * slack + 1e-13 * problem.power
    radius = (gap + slack).sqrt()[:, None] * norms + error
    size = slope.abs() * shrink[:, None]
    return size - radius, size + radius
