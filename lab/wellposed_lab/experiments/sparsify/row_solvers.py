"""Algorithm 1 of 003: bisection on lambda, a LASSO problem at every step, by coordinate descent."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from wellposed.convex.problem import RowProblem
from wellposed.convex.solvers.base import RowSolution, RowSolver, finished
from wellposed.errors import require
from wellposed.kernels.cpu.cache import njit_cached


@dataclass(frozen=True)
class Bisection(RowSolver):
    """Halves an interval of lambda until the LASSO solution at its upper end nearly fills the ball.

    The default repairs Algorithm 1: it starts at |M'z|_inf, above which the solution is zero (003, Lemma 1), it
    measures the interval relative to that, and it returns the upper end, which satisfies the cap. The inner
    problems are solved by coordinate descent. For comparison with `Homotopy`, which is exact and faster.

    Args:
        eps: width at which the interval is small enough, relative to |M'z|_inf (`literal`: absolute).
        inner_tol: squared changes |M_j da_j|^2 of the last sweep of an inner problem, relative to |z|^2 / 2.
        warm_start: whether an inner problem starts from the last solution (003, Algorithm 2) or from zero.
        literal: Algorithm 1 as printed: starts at |M'z|_2, and returns the last lambda that was tried, whose
            solution may violate the cap; its gap is then infinite.
        max_sweeps: passes over the columns of one inner problem.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> problem = row_problem(Design.of(torch.eye(2)), torch.tensor([[3.0], [1.0]]), kappa=1.0, capped=2)
        >>> Bisection().solve(problem).weights.round(decimals=6)
        tensor([[1., 0.]], dtype=torch.float64)
    """

    eps: float = 1e-9
    inner_tol: float = 1e-18
    warm_start: bool = True
    literal: bool = False
    max_sweeps: int = 10_000

    def why_not(self, problem: RowProblem) -> str | None:
        if problem.free or problem.lasso:
            return "bounds the whole row and takes no lasso; use Schur(Bisection()) where columns are not capped"
        return None

    def solve(self, problem: RowProblem) -> RowSolution:
        self.accept(problem)
        gram, cross = (np.ascontiguousarray(part.cpu().numpy()) for part in (problem.gram, problem.cross))
        allowed = np.ones(cross.shape, np.bool_) if problem.support is None else problem.support.cpu().numpy()
        scale = problem.scale.cpu().numpy() * self.inner_tol
        weights, steps = _compiled()(
            gram, cross, allowed, float(problem.kappa), self.eps, scale, self.warm_start, self.literal,
            self.max_sweeps,
        )  # fmt: skip
        found = torch.from_numpy(weights).to(problem.cross)
        counts = torch.from_numpy(steps).to(found.device)
        if not self.literal:
            return finished(problem, found, counts)
        fair = finished(problem, found, counts)
        outside = found.abs().sum(1) > problem.kappa * (1 + 1e-12)
        return RowSolution(found, torch.where(outside, torch.inf, fair.gap), problem.scale, counts)


@cache
def _compiled() -> Any:
    """Compiles `bisect_all` and what it calls, on first use."""
    require("numba", extra="convex")
    known_to_numba = require("numba.extending", extra="convex").register_jitable(error_model="numpy")
    for function in (descend, reset, copy, norm, bisect):
        known_to_numba(function)
    return njit_cached(nogil=True, error_model="numpy")(bisect_all)


def descend(G: Any, c0: Any, level: float, allowed: Any, target: float, limit: int, a: Any, c: Any) -> int:
    """Solves min 1/2 a'Ga - c0'a + level |a|_1 by coordinate descent, in place; returns the sweeps.

    `c` is c0 - Ga throughout. A sweep whose changes da have sum_j |M_j|^2 da_j^2 <= target is the last.
    """
    d = a.shape[0]
    for sweep in range(1, limit + 1):
        gain = 0.0
        for j in range(d):
            if not allowed[j] or not G[j, j] > 0:
                continue
            old, push = a[j], c[j] + G[j, j] * a[j]
            new = (max(push - level, 0.0) + min(push + level, 0.0)) / G[j, j]
            if new == old:
                continue
            a[j] = new
            row, change = G[j], new - old
            for q in range(d):
                c[q] -= change * row[q]
            gain += G[j, j] * change * change
        if gain <= target:
            return sweep
    return limit


def reset(a: Any, c: Any, c0: Any) -> None:
    """Starts from zero."""
    for q in range(a.shape[0]):
        a[q], c[q] = 0.0, c0[q]


def copy(a: Any, to: Any) -> None:
    """Copies entries."""
    for q in range(a.shape[0]):
        to[q] = a[q]


def norm(a: Any) -> float:
    """Returns |a|_1."""
    total = 0.0
    for value in a:
        total += abs(value)
    return total


def bisect(
    G: Any, c0: Any, allowed: Any, kappa: float, eps: float, target: float, warm: bool, literal: bool,
    limit: int, best: Any,
) -> int:  # fmt: skip
    """Runs Algorithm 1 on one row; returns the sweeps of all inner problems."""
    d, low, high, square = c0.shape[0], 0.0, 0.0, 0.0
    for q in range(d):
        if allowed[q]:
            high, square = max(high, abs(c0[q])), square + c0[q] * c0[q]
    width = eps if literal else eps * high
    if literal:
        high = np.sqrt(square)
    a, c, total = np.zeros(d), c0.copy(), 0
    if not literal:  # the cap may be inactive, where assumption A1 fails
        total += descend(G, c0, 0.0, allowed, target, limit, a, c)
        if norm(a) <= kappa:
            copy(a, best)
            return total
        reset(a, c, c0)
    while high - low >= width and high > 0:
        level = (high + low) / 2
        if level in (high, low):
            break
        if not warm:
            reset(a, c, c0)
        total += descend(G, c0, level, allowed, target, limit, a, c)
        if norm(a) >= kappa:
            low = level
        else:
            high = level
        if literal or high == level:
            copy(a, best)
    return total


def bisect_all(
    G: Any, C: Any, allowed: Any, kappa: float, eps: float, targets: Any, warm: bool, literal: bool, limit: int
) -> Any:  # fmt: skip
    """Runs Algorithm 1 on every row; returns weights and sweeps."""
    weights, steps = np.zeros(C.shape), np.zeros(C.shape[0], np.int64)
    for i in range(C.shape[0]):
        steps[i] = bisect(G, C[i], allowed[i], kappa, eps, targets[i], warm, literal, limit, weights[i])
    return weights, steps
