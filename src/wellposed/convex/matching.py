"""State matching: the rows of (A, B) layer by layer, on recorded states or on those of the rows fitted before.

`Objective` is what a fit minimises beside the misfit: names, weights without units, and penalties by CVXPY.
`surviving_entries` chooses the entries of (A, B) to keep for a given sparsity: those whose loss would cost most
misfit. `RowMatcher` fits the rows, and `fitted_output` the output y = Cx + Du + c on the states that a model
computes itself.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.convex.problem import SMALLEST_RIDGE, WIDE, Design, RowProblem
from wellposed.convex.rows import RowFit, RowGroup, block_starts, row_groups
from wellposed.convex.solvers.automatic import Automatic
from wellposed.convex.solvers.base import RowSolution, RowSolver
from wellposed.convex.solvers.conic import Cvxpy, Penalty
from wellposed.convex.solvers.projected import GroupLasso
from wellposed.convex.states import GIBIBYTE, States, scratch
from wellposed.errors import InputError, require, unknown_name
from wellposed.forms.operators.plain import Zero

OBJECTIVES = ("none", "lasso", "ridge", "elastic-net", "group", "robust")


@dataclass(frozen=True)
class Objective:
    """The objective l(a, b) of 003 eq. (3.3), row by row, with a weight without units.

    For "lasso" a strength of one is the least at which all rows of a layer are zero: the weight of |w|_1 is
    strength max |M'z|_inf; likewise for "group". For "ridge" it multiplies the mean square norm of a column, for
    "robust" half the mean square of z. A function of one's own is multiplied by the strength and nothing else.

    Args:
        name: of `OBJECTIVES`, or "own".
        strength: its weight.
        mix: share of the lasso in "elastic-net".
        penalty: takes a and b of one row, CVXPY expressions, and returns a convex expression.
        equality: whether the states must be met exactly (003 eq. 3.2).

    Example:
        >>> Objective.of("lasso", 0.1).sparse, Objective.of("ridge", 0.1).sparse
        (True, False)
    """

    name: str = "none"
    strength: float = 0.0
    mix: float = 0.5
    penalty: Penalty | None = None
    equality: bool = False

    @classmethod
    def of(
        cls, objective: str | Callable[[Any, Any], Any], strength: float, mix: float = 0.5, equality: bool = False
    ) -> "Objective":
        """Builds an objective from a name or a function."""
        if not (isinstance(strength, int | float) and 0 <= strength < float("inf")):
            raise InputError(f"strength must be a finite number that is not negative; received {strength!r}")
        if not 0 <= mix <= 1:
            raise InputError(f"mix is the share of the lasso, from 0 to 1; received {mix!r}")
        if callable(objective):
            return cls("own", float(strength), mix, objective, equality)
        if objective not in OBJECTIVES:
            raise unknown_name("objective", objective, OBJECTIVES)
        if equality and objective == "group":
            raise InputError("objective 'group' couples rows and takes no equality; choose another objective")
        return cls(objective, float(strength), mix, robust if objective == "robust" else None, equality)

    @property
    def sparse(self) -> bool:
        """Whether larger strengths give more zeros."""
        return self.name in ("lasso", "elastic-net", "group")

    def applied(self, problem: RowProblem) -> RowProblem:
        """Adds the lasso and the ridge to a problem that has neither."""
        share = {"lasso": 1.0, "elastic-net": self.mix}.get(self.name, 0.0)
        lasso = share * self.strength * float(problem.cross.abs().max()) if problem.cross.numel() else 0.0
        share = {"ridge": 1.0, "elastic-net": 1 - self.mix}.get(self.name, 0.0)
        diagonal = problem.gram.diagonal()
        ridge = share * self.strength * float(diagonal.mean()) if diagonal.numel() else 0.0
        if ridge:
            total = torch.full_like(diagonal, ridge) if problem.ridge is None else problem.ridge + ridge
            gram = problem.gram + ridge * torch.eye(len(diagonal)).to(problem.gram)
            problem = replace(problem, gram=gram, ridge=total, shared={})
        return replace(problem, lasso=lasso)

    def modelled(self, problem: RowProblem) -> RowSolver | None:
        """Returns the CVXPY model of an objective that no other solver takes."""
        if self.penalty is None and not self.equality:
            return None
        weight = self.strength * (float(problem.power.mean()) / 2 if self.name == "robust" else 1.0)
        given = self.penalty
        penalty = None if given is None or weight == 0 else (lambda a, b: weight * given(a, b))
        return Cvxpy(penalty, self.equality)


def robust(a: Any, b: Any) -> Any:
    """Models one row of the robustness penalty, ``|b|_1^2 / (2 (1 - |a|_1))`` (003 eq. 4.9).

    The penalty of the whole model takes the largest rows of A and B; here every row pays for itself. The terms of
    C and D belong to the output, which is fitted apart.
    """
    cvxpy = require("cvxpy", extra="convex")
    size = cvxpy.norm1(b) if b.size else 0
    room = 1 - cvxpy.norm1(a) if a.size else 1
    return cvxpy.quad_over_lin(size, room) / 2


PACE = 0.7  # of the entries that stay in one round
RIDGE = 1e-5  # of the Gram matrix by which entries are ranked, relative to its diagonal


@dataclass(frozen=True, eq=False)
class Candidates:
    """Rows of one layer on their columns.

    Args:
        rows, columns: their places in (A, B).
        problem: without a penalty.
        weight: what a unit of misfit in these rows costs.
    """

    rows: Tensor
    columns: Tensor
    problem: RowProblem
    weight: float


def surviving_entries(groups: list[Candidates], mask: Tensor, target: float) -> Tensor:  # (n, n + p) bool
    """Removes entries in rounds until a fraction `target` of those in `mask` is zero.

    Setting w_j of a least-squares row to zero and adapting the others raises its misfit by w_j^2 / (2 [G^-1]_jj).
    In every round the rows are fitted on what they have left, and the entries with the smallest rise go, in all
    layers together; a rise counts relative to |Z|^2 of its layer.

    Args:
        groups: all rows.
        mask: the support they start from.
        target: fraction of zeros.
    """
    goal = round((1 - target) * int(mask.sum()))
    alive = [mask[g.rows][:, g.columns] & (g.problem.gram.diagonal() > 0) for g in groups]
    while (left := sum(int(part.sum()) for part in alive)) > goal:
        rises = [_rises(g.problem, part) * g.weight for g, part in zip(groups, alive, strict=True)]
        everything = torch.cat([rise[part] for rise, part in zip(rises, alive, strict=True)])
        count = min(left - 1, max(goal, int(PACE * left)))
        if count <= 0:
            return torch.zeros_like(mask)
        level = everything.kthvalue(left - count).values
        alive = [part & (rise > level) for part, rise in zip(alive, rises, strict=True)]
    support = torch.zeros_like(mask)
    for g, part in zip(groups, alive, strict=True):
        support[g.rows[:, None], g.columns] = part
    return support


def _rises(problem: RowProblem, alive: Tensor) -> Tensor:  # (r, d)
    """Computes 2 x the rise of the misfit by the loss of each entry that is left."""
    rises = torch.zeros_like(problem.cross)
    same = bool((alive == alive[:1]).all())
    shared = _inverse(problem.gram, torch.nonzero(alive[0])[:, 0]) if same and len(alive) else None
    for i, row in enumerate(alive):
        columns = torch.nonzero(row)[:, 0]
        if len(columns):
            inverse = _inverse(problem.gram, columns) if shared is None else shared
            w = inverse @ problem.cross[i, columns]
            rises[i, columns] = w.square() / inverse.diagonal()
    return rises


def _inverse(gram: Tensor, columns: Tensor) -> Tensor:
    part = gram[columns][:, columns]
    damped = part + torch.diag(RIDGE * part.diagonal())
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))


NEGLIGIBLE = 1e-9  # share of the largest entry below which another is no part of a debiased row


@dataclass(frozen=True, eq=False)
class FitData:
    """States of a recording and the units of the fit, to which they are converted while they are read.

    Args:
        X, U, Z: as in `States`.
        sizes: of the blocks.
        activations: phi of every block in the units of the fit.
        factors: of these units, ``(n,)``; None if they are those of the recording.
        target_device: where the fit is done; None is where the states are.
    """

    X: Tensor
    U: Tensor
    Z: Tensor
    sizes: tuple[int, ...]
    activations: tuple[Activation, ...]
    factors: Tensor | None = None
    target_device: torch.device | None = None

    @property
    def design(self) -> Design:
        """The columns (X, U) in the units of the fit."""
        ones = torch.ones(self.U.shape[1], dtype=WIDE)
        factors = None if self.factors is None else torch.cat([self.factors, ones])
        return Design.of(self.X, self.U, factors=factors, target_device=self.target_device)

    @property
    def targets(self) -> Design:
        """The columns Z in the units of the fit."""
        return Design.of(self.Z, factors=self.factors, target_device=self.target_device)


@dataclass(frozen=True, eq=False)
class MatchedRows:
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
class RowMatcher:
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
        >>> data = FitData(X, U, 2 * U + 1, (1,), (get_activation("relu"),))
        >>> matched = RowMatcher(fit=RowFit(), bias=True).rows(data, torch.ones(1, 2, dtype=torch.bool))
        >>> matched.weights.round(decimals=6), matched.bias.round(decimals=6)
        (tensor([[0., 2.]], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    fit: RowFit
    objective: Objective = field(default_factory=Objective)
    bias: bool = False
    debias: bool = False
    sequential: bool = False
    limit: int = GIBIBYTE

    def rows(self, data: FitData, mask: Tensor, cache: dict[int, RowProblem] | None = None) -> MatchedRows:
        """Fits all rows; `cache` keeps problems that do not depend on the objective, for the next call."""
        n, cache = data.X.shape[1], {} if cache is None else cache
        data = replace(data, X=copied(data.X, self.limit)) if self.sequential else data
        design, targets = data.design, data.targets
        matched = _empty(mask, design.device)
        starts, done = block_starts(data.sizes), 0
        for k in reversed(range(len(data.sizes))):
            rows = torch.arange(starts[k], starts[k + 1], device=mask.device)
            for group in _groups_of(mask, rows, n):
                self._group(matched, design, targets, group, n, cache, done)
                done += len(group.rows)
            if self.sequential:
                _advance(data, design, matched, k)
        return matched

    def survivors(self, data: FitData, mask: Tensor, target: float) -> Tensor:  # (n, n + p) bool
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

    def unbounded(self, design: Design, targets: Design, states: int) -> MatchedRows:
        """Fits targets Y = XC' + UD' + c, all rows on all columns of (X, U)."""
        count, width = targets.shape[1], design.shape[1]
        matched = _empty(torch.ones(count, width, dtype=torch.bool), design.device)
        group = RowGroup(torch.arange(count, device=design.device), torch.arange(width, device=design.device))
        self._group(matched, design, targets, group, states, {}, 0)
        return matched

    def _group(
        self,
        matched: MatchedRows,
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
        matched.weights[rows[:, None], group.columns] = solution.weights
        matched.gap[rows], matched.scale[rows] = solution.gap, solution.scale
        assert problem.design is not None and isinstance(problem.targets, Design)
        matched.residual[rows] = problem.design.residual(solution.weights, problem.targets)
        if self.bias:
            assert problem.design.means is not None and problem.targets.means is not None
            matched.bias[rows] = problem.targets.means - solution.weights @ problem.design.means

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
            columns = torch.nonzero(size > NEGLIGIBLE * size.max())[:, 0]
            if len(columns):
                again = Automatic().solve(restricted(problem, i, columns))
                weights[i, columns], gap[i] = again.weights[0], again.gap[0]
        return replace(solution, weights=weights, gap=gap)


def restricted(problem: RowProblem, i: int, columns: Tensor) -> RowProblem:
    """Keeps one row and some of its columns, and drops lasso and ridge."""
    capped = int((columns < problem.capped).sum())
    gram = problem.gram[columns][:, columns]
    if problem.ridge is not None:
        gram = gram - torch.diag(problem.ridge[columns])
    ridge = torch.zeros_like(gram.diagonal())
    ridge[capped:] = SMALLEST_RIDGE * gram.diagonal()[capped:]
    return replace(
        problem.chosen(torch.tensor([i])),
        gram=gram + torch.diag(ridge),
        cross=problem.cross[i : i + 1, columns],
        capped=capped,
        lasso=0.0,
        ridge=ridge,
        support=None,
        design=None if problem.design is None else problem.design.restricted(columns),
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


def _advance(data: FitData, design: Design, matched: MatchedRows, k: int) -> None:
    """Replaces the states of a block by those that its fitted rows give."""
    low, high = block_starts(data.sizes)[k : k + 2]
    weights, bias = matched.weights[low:high], matched.bias[low:high]
    factors = 1.0 if data.factors is None else data.factors[low:high].to(weights)
    for rows, M in design.pieces():
        data.X[rows, low:high] = (data.activations[k](M @ weights.mT + bias) / factors).to(data.X)


def _empty(mask: Tensor, device: torch.device) -> MatchedRows:
    zeros = torch.zeros(len(mask), dtype=WIDE, device=device)
    weights = torch.zeros(mask.shape, dtype=WIDE, device=device)
    return MatchedRows(weights, zeros, zeros.clone(), zeros.clone(), zeros.clone())


TINY = 1e-10  # ridge of the output, relative to the mean square of its columns


@dataclass(frozen=True, eq=False)
class Output:
    """C, D and c; D is None without a feedthrough, c without an output bias."""

    C: Tensor
    D: Tensor | None
    bias: Tensor | None


def reads_input(states: States) -> bool:
    """Returns whether the network's output reads its input directly."""
    return states.form is not None and not isinstance(states.form.D, Zero)


def own_output(states: States, factors: Tensor) -> Output:
    """Takes C, D and c from the network's form, in the units of the fit."""
    form = states.form
    if form is None:
        raise InputError("refit_output=False keeps the network's own output, which is not known; use True")
    C = form.C.to_dense().cpu().to(WIDE) / factors
    D = form.D.to_dense().cpu().to(WIDE) if reads_input(states) else None
    return Output(C, D, None if form.output_bias is None else form.output_bias.cpu().to(WIDE))


def fitted_output(
    states: States,
    X: Tensor,  # (m, n), of the model
    *,
    feedthrough: bool,
    bias: bool,
    sparse: Objective | None = None,
) -> Output:
    """Fits C, D and c to the outputs of the network by least squares with a ridge of 1e-10, or with a lasso.

    C reads the states that the network's output reads, or all of them where that is not known.

    Args:
        states: for U, Y and the form.
        X: the model's own states.
        feedthrough, bias: whether there are D and c.
        sparse: a lasso or another objective for the rows of (C, D).
    """
    columns = _read_states(states, X.shape[1])
    used = torch.cat([columns, torch.arange(states.U.shape[1] if feedthrough else 0) + X.shape[1]])
    design, targets = (
        Design.of(X, states.U, target_device=X.device).restricted(used),
        Design.of(states.Y, target_device=X.device),
    )
    scale = float(design.squares().mean())
    fit = RowFit(kappa=math.inf, ridge=0.0 if sparse else TINY * scale)
    matching = RowMatcher(fit=fit, objective=sparse or Objective(), bias=bias, debias=sparse is not None)
    rows = matching.unbounded(design, targets, len(columns))
    C = torch.zeros(targets.shape[1], X.shape[1], dtype=WIDE, device=X.device)
    C[:, columns] = rows.weights[:, : len(columns)]
    return Output(C, rows.weights[:, len(columns) :] if feedthrough else None, rows.bias if bias else None)


def _read_states(states: States, n: int) -> Tensor:
    if states.form is None:
        return torch.arange(n)
    C = states.form.blocks[2]
    used = {j for _, j in C.parts}
    chosen = torch.cat([torch.full((size,), k in used) for k, size in enumerate(C.widths)])
    return torch.nonzero(chosen)[:, 0] if bool(chosen.any()) else torch.arange(n)
