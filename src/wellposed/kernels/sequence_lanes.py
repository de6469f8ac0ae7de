"""What happens to a group of sequences at one time: products of packed matrices, a solve, rows to and from memory.

A group works in the memory of `kernels.lanes`, one sequence a lane, and in rows of its own beside it. Outside,
everything is stored with one column an element: what is side by side in a group is side by side in memory.
"""

from typing import Any

import numpy as np

from wellposed.equilibrium.loop import PERIOD
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.combination import choose
from wellposed.kernels.extrapolation import advance
from wellposed.kernels.lanes import (
    ATOL,
    EVENT,
    FAILURES,
    FIRST,
    JUMPED,
    KIND,
    L1,
    LAST,
    LEAST,
    MEMORY,
    RESIDUAL,
    REST,
    RTOL,
    RULE,
    SAMPLE,
    SINGLE,
    SIZE,
    SLOPE,
    D,
    V,
    judge_lane,
)
from wellposed.kernels.product import multiply_tiles
from wellposed.kernels.recipe import TOLERANCE
from wellposed.kernels.sequence_vectors import mark, move, wipe
from wellposed.kernels.vectors import ROWS, VECTORS, activate

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")

RUNNING, CONVERGED = int(Status.RUNNING), int(Status.CONVERGED)
# Of `room`: accepted points (other vectors behind them), their images, a product, single rows.
POINT, IMAGE, OUT, ALIVE, SCALE = range(5)


@compiled
def pack_block(packed: Any, start: int, inner: int, skip: int, matrix: Any, transposed: bool, origin: int) -> None:
    """Copies a block to a packed matrix of `inner` columns that begins at `start`, after `skip` columns.

    The block is the matrix, or its transpose without the first `origin` rows; rows beyond the last are zero.
    """
    rows = matrix.shape[1] - origin if transposed else matrix.shape[0]
    columns = matrix.shape[0] if transposed else matrix.shape[1]
    for row in range((rows + ROWS - 1) // ROWS * ROWS):
        at = start + row // ROWS * ROWS * inner + row % ROWS + skip * ROWS
        for k in range(columns):
            if row >= rows:
                packed[at + k * ROWS] = 0
            elif transposed:
                packed[at + k * ROWS] = matrix[k, origin + row]
            else:
                packed[at + k * ROWS] = matrix[row, k]


@compiled
def load(work: Any, at: int, width: int, matrix: Any, first: int, rows: int, column: int, count: int) -> None:
    """Reads rows of `count` elements from `column` on into lanes."""
    stride, half = matrix.shape[1], width // VECTORS
    if count in (half, width):
        move(matrix, first * stride + column, stride, work, at, width, rows, count // half)
        return
    for row in range(rows):
        for i in range(count):
            work[at + row * width + i] = matrix[first + row, column + i]


@compiled
def store(work: Any, at: int, width: int, matrix: Any, first: int, rows: int, column: int, count: int) -> None:
    """Writes rows of lanes to `count` elements from `column` on."""
    stride, half = matrix.shape[1], width // VECTORS
    if count in (half, width):
        move(work, at, width, matrix, first * stride + column, stride, rows, count // half)
        return
    for row in range(rows):
        for i in range(count):
            matrix[first + row, column + i] = work[at + row * width + i]


@compiled
def begin(work: Any, at: Any, alive: int, lanes: Any, width: int, count: int) -> None:
    """Puts a new sample into each of the first lanes; the others rest."""
    rows = at[SINGLE]
    for i in range(width):
        lanes[SAMPLE * width + i] = i if i < count else -1
        work[alive + i] = 1 if i < count else 0
        work[rows + LEAST * width + i] = np.inf
    for row in (REST, FAILURES, JUMPED):
        wipe(work, rows + row * width, 1)


@compiled
def finish(
    work: Any, x: int, y: int, at: Any, room: Any, lanes: Any, width: int, now: int, n: int, counts: Any,
    numbers: Any, status: Any, steps: Any, first: int, vectors: int,
) -> int:  # fmt: skip
    """Keeps points that are accepted in a step, and their images; returns how many there are."""
    rows, plain = at[SINGLE], counts[RULE] == TOLERANCE
    due = not plain or (now + 1) % PERIOD == 0 or now + 1 == counts[LAST]
    if not mark(work, rows, room[ALIVE], vectors, numbers[ATOL], numbers[RTOL], due):
        return 0
    done, events = 0, rows + EVENT * width
    for i in range(vectors * (width // VECTORS)):
        if work[events + i] == 0:
            continue
        limit = max(numbers[ATOL], numbers[RTOL] * work[rows + SIZE * width + i])
        found = CONVERGED
        if not (plain and work[rows + L1 * width + i] < np.inf and work[rows + RESIDUAL * width + i] <= limit):
            found = judge_lane(work, x, at, width, i, now, n, counts, numbers)
        if found == RUNNING:
            work[events + i] = 0
            continue
        done += 1
        status[first + i], steps[first + i] = found, now + 1
        lanes[SAMPLE * width + i], work[room[ALIVE] + i] = -1, 0
    if done > 0:
        choose(work, room[POINT], x, room[POINT], events, n, vectors)
        choose(work, room[IMAGE], y, room[IMAGE], events, n, vectors)
    return done


@compiled
def solve_group(
    work: Any, packed: Any, slots: Any, at: Any, room: Any, lanes: Any, width: int, n: int, count: int,
    counts: Any, numbers: Any, status: Any, steps: Any, first: int,
) -> None:  # fmt: skip
    """Solves for the samples in the first `count` lanes, from the points in the first slot.

    The steps are those of `kernels.cpu.solve`, but all samples begin together, so that the last of them ends the
    solve in the middle of a cycle.
    """
    memory, plain = len(slots) - 2, counts[MEMORY] == 0
    vectors = 1 if count * VECTORS <= width else VECTORS
    begin(work, at, room[ALIVE], lanes, width, count)
    zero = count - count  # not a constant, for which numba would compile everything once more
    now, phase, origin, left = zero, zero, zero, count
    residual, earliest = at[SINGLE] + RESIDUAL * width, at[SINGLE] + FIRST * width
    while True:
        target = 1 - origin if plain else 1 if phase > memory else origin + 1
        x, y = slots[origin], slots[target]
        multiply_tiles(work, packed, 0, x, y, n, n, width, vectors)
        activate(work, y, x, at[V], at[D], at[SINGLE], n, vectors, counts[KIND], numbers[SLOPE])
        if now == 0:
            move(work, residual, width, work, earliest, width, 1, VECTORS)
        left -= finish(work, x, y, at, room, lanes, width, now, n, counts, numbers, status, steps, first, vectors)
        if left == 0:
            return
        now += 1
        if plain:
            origin = target
        else:
            phase, origin = advance(work, slots, at, lanes, width, n, numbers, vectors, phase)
