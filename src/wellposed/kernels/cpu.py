"""The loop of `equilibrium.loop` for x = phi(Ax + v) and y = d (A'y + g), compiled: all steps in one call.

A group of samples advances together, one sample a lane. A lane whose sample has finished takes the next sample at
the end of a cycle of its solver, so that nobody waits for the slowest sample of a batch; no lane looks at another,
so a sample's answer does not depend on its companions.
"""

from typing import Any

from wellposed.equilibrium.loop import PERIOD
from wellposed.errors import require
from wellposed.kernels.extrapolation import advance
from wellposed.kernels.keeping import keeping
from wellposed.kernels.lanes import (
    DUE,
    KIND,
    LAST,
    MEMORY,
    NEVER,
    PROBLEM,
    SAMPLE,
    SINGLE,
    SLOPE,
    V,
    evaluate,
    gather,
    note,
    pack,
    prepare_adjoint,
    refill,
    settle,
)
from wellposed.kernels.product import multiply_rows, rows_alone
from wellposed.kernels.stamp import stamp
from wellposed.kernels.substitution import substitute
from wellposed.kernels.vectors import ROWS, VECTOR_BYTES, VECTORS, borrow

__all__ = ["PROBLEM", "ROWS", "VECTORS", "VECTOR_BYTES", "pack", "prepare_adjoint", "solve", "spread"]

PARTS = (
    "combination",
    "cpu",
    "elementary",
    "extrapolation",
    "lanes",
    "product",
    "recipe",
    "substitution",
    "vectors",
)
numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")
kept = keeping(nogil=True, error_model="numpy")


@compiled
def clear(work: Any, lanes: Any, width: int, slots: Any, at: Any) -> None:
    """Frees all lanes and fills them with zeros."""
    for i in range(width):
        lanes[SAMPLE * width + i], lanes[DUE * width + i] = -1, NEVER
    for i in range(slots[0], slots[1]):
        work[i] = 0
    for i in range(at[V], at[SINGLE] + PROBLEM * width):
        work[i] = 0


@compiled
def enter(work: Any, u: Any, first: int, size: int, width: int) -> None:
    """Brings samples to lanes."""
    for k in range(u.shape[1]):
        for i in range(size):
            work[k * width + i] = u[first + i, k]
        for i in range(size, width):
            work[k * width + i] = 0


@compiled
def leave(work: Any, out: int, bias: Any, y: Any, first: int, size: int, width: int) -> None:
    """Brings lanes back to samples, and adds the bias if there is one."""
    for i in range(size):
        for k in range(y.shape[1]):
            y[first + i, k] = work[out + k * width + i]
        if len(bias) > 0:
            for k in range(y.shape[1]):
                y[first + i, k] += bias[k]


def _make_solve(stamp: int) -> Any:
    """Returns the kernel; what a function closes over is part of its place in numba's cache."""

    @kept
    def solve(
        packed: Any, v: Any, d: Any, x0: Any, value: Any, status: Any, steps: Any, trace: Any, work: Any,
        lanes: Any, slots: Any, at: Any, counts: Any, numbers: Any, begin: int, end: int,
    ) -> int:  # fmt: skip
        """Solves the samples from `begin` to `end`; returns the number of evaluations of groups."""
        work, lanes, packed, numbers = borrow(work), borrow(lanes), borrow(packed), borrow(numbers)
        v, d, x0, trace = borrow(v), borrow(d), borrow(x0), borrow(trace)
        value, status, steps = borrow(value), borrow(status), borrow(steps)
        n, width = v.shape[1], lanes.shape[0] // 3 if stamp else 0
        memory, plain, half = len(slots) - 2, counts[MEMORY] == 0, width // VECTORS
        vectors, alone = 1 if end - begin <= half else VECTORS, end - begin == 1
        clear(work, lanes, width, slots, at)
        zero = begin - begin  # not a constant, for which numba would compile everything once more
        now, phase, origin, left, waiting = zero, zero, zero, zero, begin
        while True:
            if phase == 0:
                if waiting < end and left < vectors * half:
                    known = waiting
                    waiting = refill(work, slots[origin], at, lanes, width, v, d, x0, now, waiting, end)
                    left += waiting - known
                    scratch = slots[1 - origin]
                    substitute(
                        work, packed, slots[origin], scratch, at, lanes, width, now, n, counts, numbers, vectors
                    )
                if left == 0:
                    return now
                if vectors > 1 and waiting >= end and left <= half:
                    gather(work, slots[origin], at, lanes, width, n, counts[LAST] // PERIOD + 1)
                    vectors = 1
            target = 1 - origin if plain else 1 if phase > memory else origin + 1
            evaluate(
                work, packed, slots[origin], slots[target], at, n, width, counts[KIND], numbers[SLOPE], vectors,
                alone,
            )  # fmt: skip
            if trace.shape[0] > 0:
                note(work, at, lanes, width, now, trace)
            left -= settle(work, slots[origin], at, lanes, width, now, counts, numbers, value, status, steps)
            now += 1
            if plain:
                origin = target
            elif left == 0:
                phase, origin = zero, zero
            else:
                phase, origin = advance(work, slots, at, lanes, width, n, numbers, vectors, phase)

    return solve


def _make_spread(stamp: int) -> Any:
    """Returns the product of a sparse matrix with samples, outside of a solve."""

    @kept
    def spread(matrix: Any, u: Any, bias: Any, y: Any, work: Any, width: int, begin: int, end: int) -> None:
        """Writes ``Wu + b`` for the samples from `begin` to `end`, a group at a time."""
        matrix, u, bias, y, work = borrow(matrix), borrow(u), borrow(bias), borrow(y), borrow(work)
        rows, half = y.shape[1] if stamp else 0, width // VECTORS
        out = u.shape[1] * width
        for first in range(begin, end, width):
            size = min(width, end - first)
            if end - begin == 1:
                for k in range(u.shape[1]):
                    work[k] = u[first, k]
                rows_alone(work, matrix[0], matrix[1], matrix[2], 0, out, 0, rows)
            else:
                enter(work, u, first, size, width)
                multiply_rows(work, matrix, 0, out, 0, rows, 1 if size <= half else VECTORS)
            leave(work, out, bias, y, first, size, width)

    return spread


solve, spread = _make_solve(stamp(*PARTS)), _make_spread(stamp(*PARTS))
