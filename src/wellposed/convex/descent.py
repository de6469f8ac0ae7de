"""Algorithm 1 of 003 on a shared Gram matrix, its LASSO problems by coordinate descent, compiled on first use."""

from typing import Any

import numpy as np

from wellposed.convex.path import compiled


@compiled
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


@compiled
def reset(a: Any, c: Any, c0: Any) -> None:
    """Starts from zero."""
    for q in range(a.shape[0]):
        a[q], c[q] = 0.0, c0[q]


@compiled
def copy(a: Any, to: Any) -> None:
    """Copies entries."""
    for q in range(a.shape[0]):
        to[q] = a[q]


@compiled
def norm(a: Any) -> float:
    """Returns |a|_1."""
    total = 0.0
    for value in a:
        total += abs(value)
    return total


@compiled
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


@compiled
def bisect_all(
    G: Any, C: Any, allowed: Any, kappa: float, eps: float, targets: Any, warm: bool, literal: bool, limit: int
) -> Any:  # fmt: skip
    """Runs Algorithm 1 on every row; returns weights and sweeps."""
    weights, steps = np.zeros(C.shape), np.zeros(C.shape[0], np.int64)
    for i in range(C.shape[0]):
        steps[i] = bisect(G, C[i], allowed[i], kappa, eps, targets[i], warm, literal, limit, weights[i])
    return weights, steps
