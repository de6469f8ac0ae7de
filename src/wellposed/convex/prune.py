"""Which entries of (A, B) to keep for a given sparsity: those whose loss would cost most misfit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.convex.problem import RowProblem

PACE = 0.7  # of the entries that stay in one round
RIDGE = 1e-5


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
    kept = torch.zeros_like(mask)
    for g, part in zip(groups, alive, strict=True):
        kept[g.rows[:, None], g.columns] = part
    return kept


def _rises(problem: RowProblem, alive: Tensor) -> Tensor:  # (r, d)
    """Computes 2 x the rise of the misfit by the loss of each entry that is left."""
    found = torch.zeros_like(problem.cross)
    same = bool((alive == alive[:1]).all())
    shared = _inverse(problem.gram, torch.nonzero(alive[0])[:, 0]) if same and len(alive) else None
    for i, row in enumerate(alive):
        kept = torch.nonzero(row)[:, 0]
        if len(kept):
            inverse = _inverse(problem.gram, kept) if shared is None else shared
            w = inverse @ problem.cross[i, kept]
            found[i, kept] = w.square() / inverse.diagonal()
    return found


def _inverse(gram: Tensor, kept: Tensor) -> Tensor:
    part = gram[kept][:, kept]
    damped = part + torch.diag(RIDGE * part.diagonal())
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))
