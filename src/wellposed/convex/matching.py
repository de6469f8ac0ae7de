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
from wellposed.convex.table import GIBIBYTE, scratch

NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class Samples:
    """States of a recording and the units of the fit, to which they are converted while they are read.

    Args:
        X, U, Z: as in `States`.
        sizes: of the blocks.
        activations: phi of every block in the units of the fit.
        factors: of these units, ``(n,)``; None if they are those of the recording.
        home: where the fit is done; None is where the states are.
    """

    X: Tensor
    U: Tensor
    Z: Tensor
    sizes: tuple[int, ...]
    activations: tuple[Activation, ...]
    factors: Tensor | None = None
    home: torch.device | None = None

    @property
    def design(self) -> Design:
        """The columns (X, U) in the units of the fit."""
        ones = torch.ones(self.U.shape[1], dtype=WIDE)
        factors = None if self.factors is None else torch.cat([self.factors, ones])
        return Design.of(self.X, self.U, factors=factors, home=self.home)

    @property
    def targets(self) -> Design:
        """The columns Z in the units of the fit."""
        return Design.of(self.Z, factors=self.factors, home=self.home)


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
        limit: bytes above which these states lie in a temporary file.

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
    limit: int = GIBIBYTE

    def rows(self, data: Samples, mask: Tensor, cache: dict[int, RowProblem] | None = None) -> Matched:
        """Fits all rows; `cache` keeps problems that do not depend on the objective, for the next call."""
        n, cache = data.X.shape[1], {} if cache is None else cache
        data = replace(data, X=copied(data.X, self.limit)) if self.sequential else data
        design, targets = data.design, data.targets
        found = _empty(mask, design.device)
        starts, done = block_starts(data.sizes), 0
        for k in reversed(range(len(data.sizes))):
            rows = torch.arange(starts[k], starts[k + 1], device=mask.device)
            for group in _groups_of(mask, rows, n):
                self._group(found, design, targets, group, n, cache, done)
                done += len(group.rows)
            if self.sequential:
                _advance(data, design, found, k)
        return found

    def survivors(self, data: Samples, mask: Tensor, target: float) -> Tensor:  # (n, n + p) bool
        """Chooses the entries to keep for a fraction `target` of zeros, on the recorded states."""
        n, starts = data.X.shape[1], block_starts(data.sizes)
        design, targets = data.design, data.targets
        groups, squares = [], targets.squares()
        for low, high in pairwise(starts):
            power = float(squares[low:high].sum())
            for group in _groups_of(mask, torch.arange(low, high, device=mask.device), n):
                problem = self._problem(design, targets, group, n)
                groups.append(Candidates(group.rows, group.columns, problem, 1 / power if power else 0.0))
        return surviving_entries(groups, mask, target)

    def unbounded(self, design: Design, targets: Design, states: int) -> Matched:
        """Fits targets Y = XC' + UD' + c, all rows on all columns of (X, U)."""
        count, width = targets.shape[1], design.shape[1]
        found = _empty(torch.ones(count, width, dtype=torch.bool), design.device)
        group = RowGroup(torch.arange(count, device=design.device), torch.arange(width, device=design.device))
        self._group(found, design, targets, group, states, {}, 0)
        return found

    def _group(
        self,
        found: Matched,
        design: Design,
        targets: Design,
        group: RowGroup,
        n: int,
        cache: dict[int, RowProblem],
        done: int,
    ) -> None:
        rows = group.rows
        fixed = not self.sequential or bool((group.columns >= n).all())
        key = int(rows[0])
        problem = cache.get(key)
        if problem is None:
            problem = self._problem(design, targets, group, n)
        if fixed:
            cache[key] = problem
        solution = self._solve(problem, done, targets.shape[1])
        found.weights[rows[:, None], group.columns] = solution.weights
        found.gap[rows], found.scale[rows] = solution.gap, solution.scale
        assert problem.design is not None and isinstance(problem.targets, Design)
        found.residual[rows] = problem.design.residual(solution.weights, problem.targets)
        if self.bias:
            assert problem.design.means is not None and problem.targets.means is not None
            found.bias[rows] = problem.targets.means - solution.weights @ problem.design.means

    def _problem(self, design: Design, targets: Design, group: RowGroup, n: int) -> RowProblem:
        """Builds the problem of some rows, on columns and targets without their means if there is a bias."""
        part, z = design.restricted(group.columns), targets.restricted(group.rows)
        if self.bias:
            part, z = part.centred(), z.centred()
        whole = RowGroup(torch.arange(z.shape[1]), torch.arange(part.shape[1]), group.support)
        return self.fit.problem(part, z, whole, int((group.columns < n).sum()))

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


def copied(part: Tensor, limit: int) -> Tensor:
    """Copies a matrix, piece by piece if it is large, to double precision."""
    copy = scratch(part.shape[0], part.shape[1], limit).to(part.device)
    for start in range(0, len(part), Design.samples):
        copy[start : start + Design.samples] = part[start : start + Design.samples]
    return copy


def _advance(data: Samples, design: Design, found: Matched, k: int) -> None:
    """Replaces the states of a block by those that its fitted rows give."""
    low, high = block_starts(data.sizes)[k : k + 2]
    weights, bias = found.weights[low:high], found.bias[low:high]
    factors = 1.0 if data.factors is None else data.factors[low:high].to(weights)
    for rows, M in design.pieces():
        data.X[rows, low:high] = (data.activations[k](M @ weights.mT + bias) / factors).to(data.X)


def _empty(mask: Tensor, device: torch.device) -> Matched:
    zeros = torch.zeros(len(mask), dtype=WIDE, device=device)
    weights = torch.zeros(mask.shape, dtype=WIDE, device=device)
    return Matched(weights, zeros, zeros.clone(), zeros.clone(), zeros.clone())
