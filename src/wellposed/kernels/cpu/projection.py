"""The projection of every row on the l1 ball, and its derivative, compiled.

The same numbers as `conditions.projections.project_rows`, which takes some thirty operations of torch; algorithm
and safeguards are those of `kernels.gpu.projection`.
"""

from typing import Any

import numpy as np

from wellposed.errors import require
from wellposed.kernels.cpu.cache import njit_cached
from wellposed.kernels.cpu.simd import array_at

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")
cached = njit_cached(nogil=True, error_model="numpy")
WIDE = float(np.finfo(np.float64).eps)


@compiled
def shrink(W: Any, P: Any, levels: Any, radius: float, eps: float) -> None:
    """Projects all rows; a level is the largest entry that vanishes, negative for a row that does not change."""
    n = W.shape[1]
    load = np.empty(n, W.dtype)  # sizes of entries, from `top`
    for row in range(W.shape[0]):
        size = 0.0
        largest = W.dtype.type(0)
        for k in range(n):
            size += abs(W[row, k])
            largest = max(largest, abs(W[row, k]))
        if not size + (n + 4) * WIDE * size > radius:
            levels[row] = -1
            for k in range(n):
                P[row, k] = W[row, k]
            continue
        # Entries are counted from the largest one in a row that is far outside: the differences are exact.
        top = largest if largest > 2 * radius else W.dtype.type(0)
        near, total = 0.0, 0.0
        for k in range(n):
            load[k] = abs(W[row, k]) - top
            wide = float(load[k])
            near += abs(wide) if wide > -radius else 0.0
            total += max(wide, -2 * radius)
        bounded = min(size, radius)
        target = radius - 4 * (n + 4) * WIDE * max(near, bounded) - 2 * eps * bounded
        count, known = n, n + 1
        theta = (total - target) / n
        # theta is at most the root; entries that have left the sum do not return.
        while known > count and count > 0:
            known, count, total = count, 0, 0.0
            for k in range(n):
                if load[k] > theta:
                    count += 1
                    total += load[k]
            if count > 0:
                theta = (total - target) / count
        level = W.dtype.type(theta + 2 * eps * abs(theta))
        count, total = 0, 0.0
        for k in range(n):
            if load[k] > level:
                count += 1
                total += load[k]
        shift = (total - target) / max(count, 1)
        shift = shift if top > 0 else abs(shift)
        change = W.dtype.type(shift + 2 * eps * abs(shift))
        vanished = W.dtype.type(0)
        for k in range(n):
            if load[k] > level:
                P[row, k] = load[k] - change if W[row, k] > 0 else change - load[k]
            else:
                P[row, k] = 0
                vanished = max(vanished, abs(W[row, k]))
        levels[row] = vanished


@compiled
def pull_back(W: Any, levels: Any, g: Any, gradient: Any, eps: float) -> None:
    """Differentiates the projection: ``g - sign mean(sign g)`` over the active entries of a row."""
    for row in range(W.shape[0]):
        level, count, total = levels[row], 0, 0.0
        for k in range(W.shape[1]):
            if level < 0:
                gradient[row, k] = g[row, k]
            elif abs(W[row, k]) > level:
                count += 1
                total += g[row, k] if W[row, k] > 0 else -g[row, k]
        if level < 0:
            continue
        mean = W.dtype.type(total * (1 + 2 * eps) / max(count, 1))
        for k in range(W.shape[1]):
            active = abs(W[row, k]) > level
            gradient[row, k] = (g[row, k] - mean if W[row, k] > 0 else g[row, k] + mean) if active else 0


@cached
def project(W: int, P: int, levels: int, shape: Any, like: Any, radius: float, eps: float) -> None:
    """Projects the rows of the matrix at the address W, with the dtype of `like`."""
    shrink(array_at(W, shape, like), array_at(P, shape, like), array_at(levels, shape[:1], like), radius, eps)


@cached
def project_backward(W: int, levels: int, g: int, gradient: int, shape: Any, like: Any, eps: float) -> None:
    """Differentiates that."""
    arrays = array_at(W, shape, like), array_at(levels, shape[:1], like), array_at(g, shape, like)
    pull_back(*arrays, array_at(gradient, shape, like), eps)
