"""Gap-Safe screening: columns that are certainly zero in the solution, known before it is.

Let w be feasible, nu = Mw - z its residual and w*, nu* those of a solution. F is 1-strongly convex and the dual
1-strongly concave in nu, so F(w) - F* and D* - D(nu) are both at least |nu - nu*|^2 / 2, and

    |nu - nu*| <= sqrt(gap),   hence   | |g_j| - |g*_j| | <= |M_j| sqrt(gap).

At the solution |g*_j| is largest where w*_j != 0 (and at least lasso there), so w*_j = 0 if |g_j| + |M_j| r is
below lasso or below some |g_i| - |M_i| r. This is the safe rule for the form with a cap; a ridge (gamma > 0, the
elastic form of 002 eq. 2) is part of G, that is, of M and its column norms. Where the cap is inactive g* = 0 and
nothing can be certified. The rule "mu_1i, mu_2i > 0" of 002 section 5.1 needs an exact dual optimum instead.
"""

import torch
from torch import Tensor

from wellposed.convex.problem import RowProblem, duality_gap, gradient, rounding, rounding_of_gap
from wellposed.convex.schur import Reduction


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
