"""Anderson's extrapolation for a group of lanes; the algorithm is that of `equilibrium.anderson`."""

from typing import Any

import numpy as np

from wellposed.errors import require
from wellposed.kernels.combination import choose, combine, gram, weigh
from wellposed.kernels.lanes import (
    EPS,
    FAILED,
    FAILURES,
    JUMPED,
    L1,
    PATIENCE,
    PREVIOUS,
    PROBLEM,
    RATE,
    REST,
    RIDGE,
    SAMPLE,
    SINGLE,
    SIZE,
    SLOW,
    SOLUTION,
    TARGET,
    WORTH,
)

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")


@compiled
def raise_rates(work: Any, rows: int, width: int, exponent: float, target: int) -> None:
    """Writes ``residual * rate^exponent`` to the row at `target`, by products where the exponent is whole."""
    whole, rate = int(exponent), rows + RATE * width
    rest = exponent - whole
    for i in range(width):
        work[target + i] = work[rows + L1 * width + i]
    for _ in range(whole):
        for i in range(width):
            work[target + i] *= work[rate + i]
    if rest > 0:
        for i in range(width):
            work[target + i] *= work[rate + i] ** rest


@compiled
def measure_rates(work: Any, rows: int, width: int, numbers: Any) -> None:
    """Writes how fast the residual of every lane falls, where it will be soon, and what a jump must beat."""
    for i in range(width):
        rate = work[rows + L1 * width + i] / work[rows + PREVIOUS * width + i]
        work[rows + RATE * width + i] = min(rate, work.dtype.type(1))
    raise_rates(work, rows, width, numbers[PATIENCE], rows + SLOW * width)
    raise_rates(work, rows, width, numbers[WORTH], rows + TARGET * width)


@compiled
def candidates(work: Any, rows: int, size: int, lanes: Any, width: int, numbers: Any) -> int:
    """Decides which lanes may jump, given the sizes of their last points at `size`; returns how many."""
    count, goal = 0, 8 * numbers[EPS]
    for i in range(width):
        slow = work[rows + SLOW * width + i] > goal * work[size + i]
        work[rows + JUMPED * width + i] = slow & (work[rows + REST * width + i] <= 0)
    for i in range(width):
        if lanes[SAMPLE * width + i] < 0:
            work[rows + JUMPED * width + i] = 0
    for i in range(width):
        count += work[rows + JUMPED * width + i] > 0
    return count


@compiled
def forget(work: Any, problem: int, width: int, memory: int, count: int) -> None:
    """Removes the oldest differences from the least squares problem; more than there are states tell nothing."""
    triangle = memory * (memory + 1) // 2
    for a in range(memory):
        for b in range(min(a + 1, count)):
            for i in range(width):
                work[problem + (a * (a + 1) // 2 + b) * width + i] = 0
    for i in range(count * width):
        work[problem + triangle * width + i] = 0


@compiled
def jump(work: Any, slots: Any, at: Any, lanes: Any, width: int, n: int, numbers: Any, vectors: int) -> bool:
    """Extrapolates from the points of a cycle, over the first of them, in lanes where that may pay."""
    memory, rows = len(slots) - 2, at[SINGLE]
    problem = rows + PROBLEM * width
    measure_rates(work, rows, width, numbers)
    # No norm is below the largest entry: what need not jump by that measure need not by the l1 norm.
    if candidates(work, rows, rows + SIZE * width, lanes, width, numbers) == 0:
        return False
    gram(work, slots, problem, n, vectors)
    size = problem + memory * (memory + 3) // 2 * width
    if candidates(work, rows, size, lanes, width, numbers) == 0:
        return False
    if n < memory:
        forget(work, problem, width, memory, memory - n)
    weigh(work, slots, problem, at[SOLUTION], rows + JUMPED * width, numbers[RIDGE], vectors)
    combine(work, slots, at[SOLUTION], n, vectors)
    for i in range(width):
        if work[rows + JUMPED * width + i] > 0 and not work[at[SOLUTION] + memory * width + i] < np.inf:
            work[rows + JUMPED * width + i] = 0
            for k in range(n):
                work[slots[0] + k * width + i] = work[slots[memory + 1] + k * width + i]
    return True


@compiled
def judge(work: Any, slots: Any, at: Any, width: int, n: int, vectors: int) -> None:
    """Goes on from the jump where it paid, from the last plain point elsewhere."""
    memory, rows = len(slots) - 2, at[SINGLE]
    for i in range(width):
        jumped = work[rows + JUMPED * width + i] > 0
        failed = jumped & (not work[rows + L1 * width + i] <= work[rows + TARGET * width + i])
        work[rows + FAILED * width + i] = failed
        if jumped:
            failures = work[rows + FAILURES * width + i] + 1 if failed else 0
            work[rows + FAILURES * width + i] = failures
            if failed:
                work[rows + REST * width + i] = 2 ** min(int(failures) - 1, 3) - 1
    choose(work, slots[0], slots[memory + 1], slots[1], rows + FAILED * width, n, vectors)


@compiled
def advance(
    work: Any, slots: Any, at: Any, lanes: Any, width: int, n: int, numbers: Any, vectors: int, phase: int
) -> Any:
    """Takes Anderson's step after an evaluation; returns the next phase of the cycle and the point to evaluate.

    Phases 0 to `memory` evaluate plain points, the one after them a jump.
    """
    memory, rows = len(slots) - 2, at[SINGLE]
    if phase > memory:
        judge(work, slots, at, width, n, vectors)
        return 0, 0
    if phase == memory - 1:
        for i in range(width):
            work[rows + PREVIOUS * width + i] = work[rows + L1 * width + i]
    if phase < memory:
        return phase + 1, phase + 1
    jumped = jump(work, slots, at, lanes, width, n, numbers, vectors)
    for i in range(width):
        work[rows + REST * width + i] -= 1
    return phase + 1, 0 if jumped else memory + 1
