"""Features across all rows: which columns of (X, U) are zero in every row that matters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.convex.automatic import Automatic
from wellposed.convex.conic import interior_multipliers
from wellposed.convex.design import WIDE, Design
from wellposed.convex.problem import Bound, RowProblem, row_problem
from wellposed.convex.rows import row_groups
from wellposed.convex.schur import Reduction
from wellposed.convex.screening import certified_zeros, correlation_bounds
from wellposed.convex.states import States

FEWEST = 2  # columns at which 002 halts


@dataclass(frozen=True, eq=False)
class Screened:
    """What screening says of every feature.

    Args:
        certified: zero in every row that matters, ``(n + p,)``.
        slack: the smallest margin over these rows, relative to |g|_inf; negative without proof, ``(n + p,)``.
        share: the largest |w_ij| |M_j| / |z_i| over these rows, ``(n + p,)``.
        zeros: entries that are proven to be zero, or that the support excludes, ``(n, n + p)``.
        weights: a solution, ``(n, n + p)``.
    """

    certified: Tensor
    slack: Tensor
    share: Tensor
    zeros: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Columns:
    """The row problems of 002 eq. (2) for all states, and what the output reads.

    Args:
        X, U, Z: in the units of the fit, without their means where there is a bias.
        mask: the support, ``(n, n + p)``.
        read: columns that the output reads, ``(n + p,)``.
        whole: states that cannot go alone, since their phi acts on blocks, ``(n,)``.
        kappa, gamma, bound: of the row problem.
    """

    X: Tensor
    U: Tensor
    Z: Tensor
    mask: Tensor
    read: Tensor
    whole: Tensor
    kappa: float
    gamma: float
    bound: Bound

    @classmethod
    def of(
        cls, states: States, kappa: float, gamma: float, bound: Bound, mask: Tensor, factors: Tensor
    ) -> "Columns":
        """Prepares recorded states."""
        X, U, Z = (part.to(WIDE) for part in (states.X * factors, states.U, states.Z * factors))
        if states.form is None or states.form.bias is not None:
            X, U, Z = X - X.mean(0), U - U.mean(0), Z - Z.mean(0)
        read = torch.ones(mask.shape[1], dtype=torch.bool)
        read[X.shape[1] :] = False
        if states.form is not None:
            read = torch.cat([(part.to_dense() != 0).any(0) for part in (states.form.C, states.form.D)])
        pairs = zip(states.activations, states.blocks, strict=True)
        whole = torch.cat([torch.full((size,), not phi.componentwise) for phi, size in pairs])
        return cls(X, U, Z, mask, read, whole, kappa, gamma, bound)

    @property
    def features(self) -> Tensor:  # (n + p,) bool
        """Columns that some row may use."""
        return self.mask.any(0)

    def rows(self, kept: Tensor, used: Tensor | None = None) -> Tensor:  # (n,) bool
        """Marks rows that matter: those of states that are read by the output or by a row that matters.

        Args:
            kept: columns that are left, ``(n + p,)``.
            used: entries that may differ from zero, ``(n, n + p)``; the support if None.
        """
        n, used = self.X.shape[1], self.mask if used is None else used
        alive = self.read[:n] | self.whole
        while True:
            reached = alive | (used[alive].any(0) & kept)[:n]
            if torch.equal(reached, alive):
                return alive
            alive = reached

    def solved(self, kept: Tensor) -> list[tuple[Tensor, Tensor, RowProblem, Tensor]]:
        """Solves the rows that matter on some columns: row numbers, columns, problem and weights of each group."""
        rows, n = torch.nonzero(self.rows(kept))[:, 0], self.X.shape[1]
        found = []
        for group in row_groups(self.mask[rows] & kept, n) if len(rows) else []:
            if len(group.columns) == 0:
                continue
            states = int((group.columns < n).sum())
            design = Design.of(self.X, self.U).restricted(group.columns)
            problem = row_problem(
                design,
                self.Z[:, rows[group.rows]],
                kappa=self.kappa,
                capped=states if self.bound == "state" else len(group.columns),
                ridge=self.gamma,
                support=group.support,
            )
            found.append((rows[group.rows], group.columns, problem, Automatic().solve(problem).weights))
        return found

    def screened(self, kept: Tensor) -> Screened:
        """Screens the columns that are left."""
        slack = torch.full(self.mask.shape, torch.inf, dtype=WIDE)
        share, weights = torch.zeros_like(slack), torch.zeros_like(slack)
        zeros = torch.ones_like(self.mask)
        for rows, columns, problem, found in self.solved(kept):
            size = found.abs() * problem.gram.diagonal().clamp(min=0).sqrt()
            power = problem.power.sqrt()[:, None]
            place = rows[:, None], columns
            share[place] = torch.where(power > 0, size / power, 0.0)
            weights[place] = found
            allowed = torch.ones_like(found, dtype=torch.bool) if problem.support is None else problem.support
            zeros[place] = certified_zeros(problem, found) | ~allowed
            slack[place] = _slack(problem, found).masked_fill(~allowed, torch.inf)
        matter = self.rows(kept, ~zeros)  # rows of states that nobody needs do not count
        certified = kept & zeros[matter].all(0)
        return Screened(certified, slack[matter].amin(0), share[matter].amax(0), zeros, weights)

    def rank(self, kept: Tensor) -> Tensor:  # (n + p,)
        """Ranks the columns that are left by their largest share in any row, ties by the margin of the proof."""
        found = self.screened(kept)
        return torch.where(kept, found.share - 1e-9 * found.slack.clamp(-1.0, 1.0), -torch.inf)

    def literal(self) -> Tensor:  # (n + p,) bool
        """Keeps what the rule "mu_1 > 0 and mu_2 > 0" does not remove in every row, but two columns at least."""
        least = torch.full(self.mask.shape, torch.inf, dtype=WIDE)
        for rows, columns, problem, _ in self.solved(self.features):
            upper, lower = interior_multipliers(problem)
            least[rows[:, None], columns] = upper.minimum(lower).nan_to_num(torch.inf)
        size = torch.where(self.features, least.amin(0), torch.inf)
        kept = self.features & ~(size > 0)
        if int(kept.sum()) < FEWEST:
            kept[size.topk(FEWEST, largest=False).indices] = True
        return kept


def _slack(problem: RowProblem, weights: Tensor) -> Tensor:  # (r, d)
    """Computes how far each bound on |g*_j| lies below the level at which an entry may differ from zero."""
    if problem.free and problem.lasso == 0:
        free = torch.full_like(weights[:, problem.capped :], -torch.inf)
        if problem.capped == 0:
            return free
        reduced = Reduction.of(problem).reduced
        return torch.cat([_slack(reduced, weights[:, : problem.capped]), free], dim=1)
    lower, upper = correlation_bounds(problem, weights)
    if problem.support is not None:
        lower = lower.masked_fill(~problem.support, -torch.inf)
    level = lower.amax(1, keepdim=True)
    return (level - upper) / upper.amax(1, keepdim=True).clamp(min=1e-300)
