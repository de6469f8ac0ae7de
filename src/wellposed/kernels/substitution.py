"""Substitution for a group of lanes: where A has no cycles, states follow from each other in one pass."""

from typing import Any

import numpy as np

from wellposed.errors import require
from wellposed.kernels.lanes import BIRTH, KIND, RULE, SAMPLE, SINGLE, SLOPE, D, V
from wellposed.kernels.product import multiply_rows
from wellposed.kernels.recipe import COUNTED
from wellposed.kernels.vectors import activate

numba = require("numba", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types
compiled = numba.njit(nogil=True, error_model="numpy")


@compiled
def walk_runs(work: Any, matrix: Any, x: int, at: Any, width: int, kind: int, slope: float, vectors: int) -> None:
    """Computes the states at `x`, one run of rows after the other, each from what is before it."""
    runs = matrix[3]
    for place in range(0, len(runs), 2):
        first, last = runs[place], runs[place + 1]
        multiply_rows(work, matrix, x, x, first, last, vectors)
        here, v, d = x + first * width, at[V] + first * width, at[D] + first * width
        activate(work, here, here, v, d, at[SINGLE], last - first, vectors, kind, slope)


@compiled
def take_over(work: Any, x: int, scratch: int, lanes: Any, width: int, now: int, n: int) -> None:
    """Starts new samples where substitution has led, unless that is not finite."""
    for i in range(width):
        if lanes[SAMPLE * width + i] < 0 or lanes[BIRTH * width + i] != now:
            continue
        size = 0.0
        for k in range(n):
            size += abs(work[scratch + k * width + i])
        if size < np.inf:
            for k in range(n):
                work[x + k * width + i] = work[scratch + k * width + i]


def substitute(
    work: Any, matrix: Any, x: int, scratch: int, at: Any, lanes: Any, width: int, now: int, n: int, counts: Any,
    numbers: Any, vectors: int,
) -> None:  # fmt: skip
    """Starts samples that begin `now` from their equilibrium, if A has an order and steps are not to be counted.

    The start is then evaluated and judged like any other, so that statuses and residuals are as honest as ever.
    """
    raise NotImplementedError("this is called by compiled code alone, through its overload")


@_extending.overload(substitute)
def _substitute(
    work: Any, matrix: Any, x: Any, scratch: Any, at: Any, lanes: Any, width: Any, now: Any, n: Any, counts: Any,
    numbers: Any, vectors: Any,
) -> Any:  # fmt: skip
    def dense(
        work: Any, matrix: Any, x: Any, scratch: Any, at: Any, lanes: Any, width: Any, now: Any, n: Any,
        counts: Any, numbers: Any, vectors: Any,
    ) -> None:  # fmt: skip
        pass

    def sparse(
        work: Any, matrix: Any, x: Any, scratch: Any, at: Any, lanes: Any, width: Any, now: Any, n: Any,
        counts: Any, numbers: Any, vectors: Any,
    ) -> None:  # fmt: skip
        if len(matrix[3]) > 0 and counts[RULE] != COUNTED:
            walk_runs(work, matrix, scratch, at, width, counts[KIND], numbers[SLOPE], vectors)
            take_over(work, x, scratch, lanes, width, now, n)

    return sparse if isinstance(matrix, _types.BaseTuple) else dense
