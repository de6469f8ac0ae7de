"""State matching: the rows of (A, B) layer by layer, on recorded states or on those of the rows fitted before."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.convex.automatic import Automatic
from wellposed.convex.design import WIDE, Design
from wellposed.convex.group import GroupLasso
from wellposed.convex.objective import Objective
from wellposed.convex.problem import SMALLEST_RIDGE, RowProblem
from wellposed.convex.prune import Candidates, surviving_entries
from wellposed.convex.rows import RowFit, RowGroup, row_groups
from wellposed.convex.solver import RowSolution
from wellposed.convex.support import block_starts

NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class Samples:
    """States of a recording in the units of the fit, in double precision.

    Args:
        X, U, Z: as in `States`.
        sizes: of the blocks.
        activations: phi of every block in these units.
    """

    X: Tensor
    U: Tensor
    Z: Tensor
    sizes: tuple[int, ...]
    activations: tuple[Activation, ...]


@dataclass(frozen=True, eq=False)
class Matched:
    """Rows of (A, B) and b with their gaps.

    Args:
        weights: (A, B), ``(n, n + p)``.
        bias: ``(n,)``.
        gap, scale: of every row, ``(n,)``.
        residual: |Mw + b - z|^2 of every row, ``(n,)``.
    """

    weights: Tensor
    bias: Tensor
    gap: Tensor
    scale: Tensor
    residual: Tensor

    @property
    def relative_gap(self) -> Tensor:  # (n,)
        """Gaps divided by |z|^2 / 2; zero where there is nothing to explain."""
        return torch.where(self.scale > 0, self.gap / self.scale, 0.0)


@dataclass(frozen=True, kw_only=True)
class Matching:
    """How rows are matched.

    The bias of a row is free: neither capped nor penalised. It is eliminated by subtracting means, so the row
    problem is one in (a, b) alone.

    Args:
        fit: cap, solver, workers; without lasso and ridge.
        objective: beside the misfit.
        bias: whether there is one.
        debias: fits the entries that a sparse objective has chosen once more, under the cap and without it.
        sequential: layers see the states that the layers fitted before them give, not the recorded ones.

    Example:
        >>> from wellposed.activations import get_activation
        >>> X, U = torch.zeros(3, 1), torch.tensor([[1.0], [2.0], [4.0]])
        >>> data = Samples(X, U, 2 * U + 1, (1,), (get_activation("relu"),))
        >>> found = Matching(fit=RowFit(), bias=True).rows(data, torch.ones(1, 2, dtype=torch.bool))
        >>> found.weights.round(decimals=6), found.bias.round(decimals=6)
        (tensor([[0., 2.]], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    fit: RowFit
    objective: Objective = field(default_factory=Objective)
    bias: bool = False
    debias: bool = False
    sequential: bool = False

    def rows(self, data: Samples, mask: Tensor, cache: dict[int, RowProblem] | None = None) -> Matched:
        """Fits all rows; `cache` keeps problems that do not depend on the objective, for the next call."""
        n, cache = data.X.shape[1], {} if cache is None else cache
        X, U, Z = (part.to(WIDE) for part in (data.X, data.U, data.Z))
        X = X.clone() if self.sequential else X
        found = _empty(mask, X)
        starts, done = block_starts(data.sizes), 0
        for k in reversed(range(len(data.sizes))):
            rows = torch.arange(starts[k], starts[k + 1], device=X.device)
            for group in _groups_of(mask, rows, n):
                self._group(found, X, U, Z, group, cache, done)
                done += len(group.rows)
            if self.sequential:
                z = torch.cat([X, U], dim=1) @ found.weights[rows].mT + found.bias[rows]
                X[:, rows] = data.activations[k](z)
        return found

    def survivors(self, data: Samples, mask: Tensor, target: float) -> Tensor:  # (n, n + p) bool
        """Chooses the entries to keep for a fraction `target` of zeros, on the recorded states."""
        n, starts = data.X.shape[1], block_starts(data.sizes)
        groups = []
        for low, high in pairwise(starts):
            power = float(data.Z[:, low:high].square().sum())
            for group in _groups_of(mask, torch.arange(low, high, device=data.X.device), n):
                problem = self._problem(data.X, data.U, data.Z, group)
                groups.append(Candidates(group.rows, group.columns, problem, 1 / power if power else 0.0))
        return surviving_entries(groups, mask, target)

    def unbounded(self, X: Tensor, U: Tensor, Y: Tensor) -> Matched:  # (m, n), (m, p), (m, q)
        """Fits Y = XC' + UD' + c, all rows on all columns."""
        count, width = Y.shape[1], X.shape[1] + U.shape[1]
        found = _empty(torch.ones(count, width, dtype=torch.bool), X)
        group = RowGroup(torch.arange(count, device=X.device), torch.arange(width, device=X.device))
        self._group(found, X, U, Y, group, {}, 0)
        return found

    def _group(
        self,
        found: Matched,
        X: Tensor,
        U: Tensor,
        Z: Tensor,
        group: RowGroup,
        cache: dict[int, RowProblem],
        done: int,
    ) -> None:
        rows, n = group.rows, X.shape[1]
        fixed = not self.sequential or bool((group.columns >= n).all())
        key = int(rows[0])
        problem = cache.get(key)
        if problem is None:
            problem = self._problem(X, U, Z, group)
        if fixed:
            cache[key] = problem
        solution = self._solve(problem, done, Z.shape[1])
        found.weights[rows[:, None], group.columns] = solution.weights
        found.gap[rows], found.scale[rows] = solution.gap, solution.scale
        assert problem.design is not None and problem.targets is not None
        found.residual[rows] = problem.design.residual(solution.weights, problem.targets)
        if self.bias:
            means = torch.cat([X.mean(0), U.mean(0)])[group.columns]
            found.bias[rows] = Z[:, rows].mean(0) - solution.weights @ means

    def _problem(self, X: Tensor, U: Tensor, Z: Tensor, group: RowGroup) -> RowProblem:
        """Builds the problem of some rows, on columns and targets without their means if there is a bias."""
        n = X.shape[1]
        states, inputs = group.columns[group.columns < n], group.columns[group.columns >= n] - n
        x, u, z = X[:, states], U[:, inputs], Z[:, group.rows]
        if self.bias:
            x, u, z = x - x.mean(0), u - u.mean(0), z - z.mean(0)
        whole = torch.arange(len(group.columns), device=X.device), torch.arange(len(group.rows), device=X.device)
        return self.fit.problem(Design.of(x, u), z, RowGroup(whole[1], whole[0], group.support), len(states))

    def _solve(self, problem: RowProblem, done: int, total: int) -> RowSolution:
        objective = self.objective
        if objective.name == "group" and objective.strength:
            weight = objective.strength * float(problem.cross.norm(dim=0).max())
            solution = GroupLasso(weight).solve(problem)
        else:
            problem = objective.applied(problem)
            modelled = objective.modelled(problem)
            fit = self.fit if modelled is None else replace(self.fit, solver=modelled)
            solution = fit.solve_problem(problem, done, total)
        return self._debiased(problem, solution) if self.debias and objective.sparse else solution

    def _debiased(self, problem: RowProblem, solution: RowSolution) -> RowSolution:
        weights, gap = torch.zeros_like(solution.weights), solution.gap.clone()
        norms = problem.gram.diagonal().clamp(min=0).sqrt()
        for i, row in enumerate(solution.weights):
            size = row.abs() * norms
            kept = torch.nonzero(size > NEGLIGIBLE * size.max())[:, 0]
            if len(kept):
                again = Automatic().solve(restricted(problem, i, kept))
                weights[i, kept], gap[i] = again.weights[0], again.gap[0]
        return replace(solution, weights=weights, gap=gap)


def restricted(problem: RowProblem, i: int, kept: Tensor) -> RowProblem:
    """Keeps one row and some of its columns, and drops lasso and ridge."""
    capped = int((kept < problem.capped).sum())
    gram = problem.gram[kept][:, kept]
    if problem.ridge is not None:
        gram = gram - torch.diag(problem.ridge[kept])
    ridge = torch.zeros_like(gram.diagonal())
    ridge[capped:] = SMALLEST_RIDGE * gram.diagonal()[capped:]
    return replace(
        problem.chosen(torch.tensor([i])),
        gram=gram + torch.diag(ridge),
        cross=problem.cross[i : i + 1, kept],
        capped=capped,
        lasso=0.0,
        ridge=ridge,
        support=None,
        design=None if problem.design is None else problem.design.restricted(kept),
        shared={},
    )


def _groups_of(mask: Tensor, rows: Tensor, n: int) -> Sequence[RowGroup]:
    """Groups the rows of one block by what they may use."""
    return [replace(group, rows=rows[group.rows]) for group in row_groups(mask[rows], n)] if len(rows) else []


def _empty(mask: Tensor, X: Tensor) -> Matched:
    zeros = torch.zeros(len(mask), dtype=WIDE, device=X.device)
    weights = torch.zeros(mask.shape, dtype=WIDE, device=X.device)
    return Matched(weights, zeros, zeros.clone(), zeros.clone(), zeros.clone())
