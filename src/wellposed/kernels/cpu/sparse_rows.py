"""Builds compressed rows and finds an order of substitution, compiled."""

from typing import Any

import numpy as np

from wellposed.kernels.cpu.cache import njit_cached
from wellposed.kernels.cpu.simd import QUAD

cached = njit_cached(nogil=True, error_model="numpy")


@cached
def count(A: Any, starts: Any) -> int:
    """Writes where the padded rows of A begin; returns the number of entries that are not zero."""
    total = 0
    for row in range(A.shape[0]):
        entries = 0
        for k in range(A.shape[1]):
            entries += A[row, k] != 0
        total += entries
        starts[row + 1] = starts[row] + (entries + QUAD - 1) // QUAD * QUAD
    return total


@cached
def fill(A: Any, starts: Any, values: Any, columns: Any) -> None:
    """Writes entries and their columns; padding repeats the last column with the value zero."""
    for row in range(A.shape[0]):
        at = starts[row]
        for k in range(A.shape[1]):
            if A[row, k] != 0:
                values[at], columns[at] = A[row, k], k
                at += 1
        for rest in range(at, starts[row + 1]):
            values[rest], columns[rest] = 0, columns[at - 1]


@cached
def transpose(columns: Any, starts: Any) -> Any:
    """Returns which rows have an entry in a column, one column after the other, and where columns begin."""
    n = len(starts) - 1
    first, users, known = np.zeros(n + 1, np.int64), np.empty(starts[n], np.int64), np.zeros(n, np.int64)
    for at in range(starts[n]):
        first[columns[at] + 1] += 1
    for k in range(n):
        first[k + 1] += first[k]
    for row in range(n):
        for at in range(starts[row], starts[row + 1]):
            k = columns[at]
            users[first[k] + known[k]] = row
            known[k] += 1
    return users, first


@cached
def find_levels(columns: Any, starts: Any, level: Any) -> int:
    """Writes the length of the longest path to every state; returns the number of levels, 0 if there is a cycle.

    A state is visited after all that it depends on (Kahn's algorithm): `pending` counts those not visited yet.
    """
    n = len(level)
    users, first = transpose(columns, starts)
    pending, queue, head, tail, deepest = starts[1:] - starts[:-1], np.empty(n, np.int64), 0, 0, 0
    for row in range(n):
        level[row] = 0
        if pending[row] == 0:
            queue[tail] = row
            tail += 1
    while head < tail:
        k = queue[head]
        head += 1
        deepest = max(deepest, level[k])
        for at in range(first[k], first[k + 1]):
            row = users[at]
            level[row] = max(level[row], level[k] + 1)
            pending[row] -= 1
            if pending[row] == 0:
                queue[tail] = row
                tail += 1
    return deepest + 1 if tail == n else 0
