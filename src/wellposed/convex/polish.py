"""Closed-form solution on a known support."""

import torch
from torch import Tensor

from wellposed.convex.problem import RowProblem

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
    place = weights.abs().topk(width, dim=1).indices  # (r, k)
    signs = weights.gather(1, place).sign()
    used = signs != 0
    gram = problem.gram[place[:, :, None], place[:, None, :]] * (used[:, :, None] & used[:, None, :])
    gram.diagonal(dim1=1, dim2=2).masked_fill_(~used, 1.0)
    capped = signs * (place < problem.capped)
    right = torch.stack([problem.cross.gather(1, place) * used, signs, capped], dim=2)
    found, info = torch.linalg.solve_ex(gram, right)
    base = found[..., 0] - problem.lasso * found[..., 1]
    rate = (capped * found[..., 2]).sum(1)
    excess = (capped * base).sum(1) - problem.kappa
    mu = torch.where(rate > 0, excess / rate, 0.0).clamp(min=0)
    entries = base - mu[:, None] * found[..., 2]
    good = ((info == 0) & entries.isfinite().all(1))[:, None]
    entries = torch.where(good & (entries * signs > 0), entries, 0.0)
    moved = torch.zeros_like(weights).scatter(1, place, entries)
    return torch.where(good, moved, weights)
