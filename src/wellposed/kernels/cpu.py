"""The loop of `equilibrium.loop` for x = phi(Ax + v) and y = d (A'y + g), compiled: all steps in one call.

A group of samples advances together, one sample a lane. A lane whose sample has finished takes the next sample at
the end of a cycle of its solver, so that nobody waits for the slowest sample of a batch; no lane looks at another,
so a sample's answer does not depend on its companions.
"""

import zlib
from pathlib import Path
from typing import Any

from wellposed.equilibrium.loop import PERIOD
from wellposed.errors import require
from wellposed.kernels.extrapolation import advance
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
from wellposed.kernels.vectors import ROWS, VECTOR_BYTES, VECTORS, borrow

__all__ = ["PROBLEM", "ROWS", "VECTORS", "VECTOR_BYTES", "pack", "prepare_adjoint", "solve"]

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")
kept = numba.njit(cache=True, nogil=True, error_model="numpy")


@compiled
def clear(work: Any, lanes: Any, width: int, slots: Any, at: Any) -> None:
    """Frees all lanes and fills them with zeros."""
    for i in range(width):
        lanes[SAMPLE * width + i], lanes[DUE * width + i] = -1, NEVER
    for i in range(slots[0], slots[1]):
        work[i] = 0
    for i in range(at[V], at[SINGLE] + PROBLEM * width):
        work[i] = 0


def _stamp() -> int:
    """Returns a number that changes with the files of the kernels.

    numba looks for changes only in the file of the function that it has cached, not in those of what it calls.
    """
    names = ("combination", "cpu", "elementary", "extrapolation", "lanes", "recipe", "vectors")
    files = [Path(__file__).with_name(f"{name}.py") for name in names]
    texts = (f"{file.name} {file.stat().st_mtime_ns} {file.stat().st_size}" for file in files)
    return zlib.crc32("\n".join(texts).encode()) + 1


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
        vectors = 1 if end - begin <= half else VECTORS
        clear(work, lanes, width, slots, at)
        zero = begin - begin  # not a constant, for which numba would compile everything once more
        now, phase, origin, left, waiting = zero, zero, zero, zero, begin
        while True:
            if phase == 0:
                if waiting < end and left < vectors * half:
                    known = waiting
                    waiting = refill(work, slots[origin], at, lanes, width, v, d, x0, now, waiting, end)
                    left += waiting - known
                if left == 0:
                    return now
                if vectors > 1 and waiting >= end and left <= half:
                    gather(work, slots[origin], at, lanes, width, n, counts[LAST] // PERIOD + 1)
                    vectors = 1
            target = 1 - origin if plain else 1 if phase > memory else origin + 1
            evaluate(
                work, packed, slots[origin], slots[target], at, n, width, counts[KIND], numbers[SLOPE], vectors
            )
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


solve = _make_solve(_stamp())
