"""The compiled loop for x = phi(Ax + v) under noise: all steps, with their draws, in one call.

Lanes are filled and measured as in `kernels.cpu`; steps are plain or damped. Every lane has the draws of its own
sample and step, so a sample's answer depends neither on its companions nor on threads.
"""

from typing import Any

import numpy as np

from wellposed.equilibrium.loop import PERIOD
from wellposed.errors import require
from wellposed.kernels.counter import SIGNAL, STATE
from wellposed.kernels.lanes import (
    BIRTH,
    CONVERGED,
    DIVERGED,
    DUE,
    EVENT,
    FIRST,
    L1,
    LEAST,
    MAX_STEPS,
    NEVER,
    NONFINITE,
    PROBLEM,
    RESIDUAL,
    RUNNING,
    SAMPLE,
    SIZE,
    STAGNATED,
    note,
    refill,
    stands_still,
    verdict,
)
from wellposed.kernels.product import multiply
from wellposed.kernels.random_vectors import draw
from wellposed.kernels.recipe import AVERAGED, COUNTED
from wellposed.kernels.stamp import stamp
from wellposed.kernels.vectors import VECTORS, activate, borrow

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")
kept = numba.njit(cache=True, nogil=True, error_model="numpy")

ROWS = PROBLEM + 5  # single rows; three measure the clean map, then the power of a signal and the share of a step
CLEAN, POWER, SHARE = PROBLEM, PROBLEM + 3, PROBLEM + 4
V, D, SINGLE, SOLUTION, MINIMA, X, Y, SHAKEN, STATE_DRAWS, SIGNAL_DRAWS, ZEROS, MEAN, IMAGE, WINDOW = range(
    14
)  # `at`
KIND, MEMORY, RULE, LIMIT, LAST, ADDITIVE, HELD, LOW, HIGH, DAMPED = range(10)  # of `counts`
SLOPE, WORTH, PATIENCE, RIDGE, ATOL, RTOL, EPS, STATE_SIZE, SIGNAL_SIZE, RATE, DECAY = range(11)  # of `numbers`
PARTS = ("counter", "elementary", "lanes", "noisy_lanes", "product", "random_vectors", "recipe", "vectors")


@compiled
def shake(
    work: Any, x: int, v: int, y: int, draws: int, power: int, n: int, width: int, size: Any, additive: bool
) -> None:
    """Writes ``z + s draw`` with ``z = x + v`` to `y`; `s` is `size`, times the l2 norm of z unless additive."""
    for i in range(width):
        work[power + i] = 0
    for k in range(n):
        for i in range(width):
            z = work[x + k * width + i] + work[v + k * width + i]
            work[y + k * width + i] = z
            work[power + i] += z * z
    for i in range(width):
        work[power + i] = size if additive else size * np.sqrt(work[power + i])
    for k in range(n):
        for i in range(width):
            work[y + k * width + i] += work[power + i] * work[draws + k * width + i]


@compiled
def step(
    work: Any, packed: Any, x: int, y: int, at: Any, lanes: Any, n: int, width: int, now: int, fresh: bool,
    counts: Any, numbers: Any, vectors: int,
) -> None:  # fmt: skip
    """Evaluates the noisy map of a group, from the point at `x` to the one at `y`, and measures the residual."""
    source, offset, quads = x, at[V], (n + 3) // 4
    power, low, high, held = at[SINGLE] + POWER * width, counts[LOW], counts[HIGH], counts[HELD]
    again, samples, births = fresh or held == 0, SAMPLE * width, BIRTH * width
    if numbers[STATE_SIZE] >= 0:
        if again:
            draw(work, lanes, samples, births, now, held, STATE, low, high, at[STATE_DRAWS], quads, vectors, 0)
        source, size = at[SHAKEN], numbers[STATE_SIZE]
        shake(work, x, at[ZEROS], source, at[STATE_DRAWS], power, n, width, size, counts[ADDITIVE] > 0)
    multiply(work, packed, source, y, at[D], n, width, vectors, False)
    if numbers[SIGNAL_SIZE] >= 0:
        if again:
            draw(work, lanes, samples, births, now, held, SIGNAL, low, high, at[SIGNAL_DRAWS], quads, vectors, 0)
        offset, size = at[ZEROS], numbers[SIGNAL_SIZE]
        shake(work, y, at[V], y, at[SIGNAL_DRAWS], power, n, width, size, counts[ADDITIVE] > 0)
    activate(work, y, x, offset, at[D], at[SINGLE], n, vectors, counts[KIND], numbers[SLOPE])


@compiled
def average(work: Any, at: Any, i: int, index: int, now: int, n: int, width: int, window: int) -> None:
    """Writes the mean of the last iterates of a lane, of fewer while the window fills."""
    known = min(window, index + 1)
    for k in range(n):
        total = work.dtype.type(0)
        for back in range(known - 1, -1, -1):
            total += work[at[WINDOW] + ((now - back) % window * n + k) * width + i]
        work[at[MEAN] + k * width + i] = total / work.dtype.type(known)


@compiled
def average_all(work: Any, at: Any, n: int, width: int, window: int) -> None:
    """Writes the means of full windows of all lanes."""
    for k in range(n):
        mean = at[MEAN] + k * width
        for i in range(width):
            work[mean + i] = 0
        for slot in range(window):
            for i in range(width):
                work[mean + i] += work[at[WINDOW] + (slot * n + k) * width + i]
        for i in range(width):
            work[mean + i] /= work.dtype.type(window)


@compiled
def accept_means(
    work: Any, packed: Any, x: int, at: Any, lanes: Any, n: int, width: int, now: int, counts: Any, numbers: Any,
    vectors: int,
) -> None:  # fmt: skip
    """Remembers the iterates, and marks lanes whose mean solves the equation without noise."""
    window, event, size, gap = counts[LIMIT], EVENT * width, POWER * width, SHARE * width
    slot, rows, ripe = at[WINDOW] + now % window * n * width, at[SINGLE], False
    for k in range(n * width):
        work[slot + k] = work[x + k]
    for i in range(width):
        work[rows + event + i] = work[rows + size + i] = work[rows + gap + i] = 0
        ripe = ripe or (lanes[SAMPLE * width + i] >= 0 and now - lanes[BIRTH * width + i] + 1 >= window)
    if not ripe:
        return
    average_all(work, at, n, width, window)
    multiply(work, packed, at[MEAN], at[IMAGE], at[D], n, width, vectors, False)
    activate(work, at[IMAGE], at[MEAN], at[V], at[D], rows + CLEAN * width, n, vectors, counts[KIND],
             numbers[SLOPE])  # fmt: skip
    for k in range(n):
        for i in range(width):
            image = work[at[IMAGE] + k * width + i]
            difference = image - work[at[MEAN] + k * width + i]
            work[rows + gap + i] += difference * difference
            work[rows + size + i] += image * image
    for i in range(width):
        full = now - lanes[BIRTH * width + i] + 1 >= window
        small = np.sqrt(work[rows + gap + i]) <= numbers[RTOL] * np.sqrt(work[rows + size + i])
        work[rows + event + i] = full and small


@compiled
def judge(work: Any, x: int, at: Any, width: int, i: int, index: int, n: int, counts: Any, numbers: Any) -> int:
    """Returns the status of a lane after a step, RUNNING if it goes on."""
    rows = at[SINGLE]
    residual, l1 = work[rows + RESIDUAL * width + i], work[rows + L1 * width + i]
    work[rows + LEAST * width + i] = min(work[rows + LEAST * width + i], residual)
    if index == 0:
        work[rows + FIRST * width + i] = residual
    if counts[RULE] == AVERAGED:
        found = CONVERGED if work[rows + EVENT * width + i] > 0 else RUNNING
        found = found if residual < np.inf and l1 == l1 else NONFINITE
    else:
        found = verdict(residual, work[rows + SIZE * width + i], l1, index, counts, numbers)
    look = counts[RULE] != COUNTED and (index + 1) % PERIOD == 0
    if look and stands_still(work, x, at, i, index + 1, n, width, numbers[EPS]) and found == RUNNING:
        return STAGNATED
    if found == RUNNING and index + 1 == counts[LAST]:
        return DIVERGED if residual > 1000 * work[rows + FIRST * width + i] else MAX_STEPS
    return int(found)


@compiled
def settle(
    work: Any, x: int, at: Any, lanes: Any, width: int, now: int, counts: Any, numbers: Any, value: Any,
    status: Any, steps: Any,
) -> int:  # fmt: skip
    """Writes what has finished in a step; returns the number of samples that have."""
    n, done, averaged = value.shape[1], 0, counts[RULE] == AVERAGED
    for i in range(width):
        s, index = lanes[SAMPLE * width + i], now - lanes[BIRTH * width + i]
        if s < 0:
            continue
        found = judge(work, x, at, width, i, index, n, counts, numbers)
        if found == RUNNING:
            continue
        if averaged:
            average(work, at, i, index, now, n, width, counts[LIMIT])
        done += 1
        status[s], steps[s], source = found, index + 1, at[MEAN] if averaged else x
        lanes[SAMPLE * width + i], lanes[DUE * width + i] = -1, NEVER
        for k in range(n):
            value[s, k] = work[source + k * width + i]
    return done


@compiled
def relax(work: Any, x: int, y: int, at: Any, lanes: Any, width: int, now: int, n: int, numbers: Any) -> None:
    """Takes damped steps: moves the images at `y` back to the points at `x`."""
    share, one = at[SINGLE] + SHARE * width, work.dtype.type(1)
    for i in range(width):
        age = work.dtype.type(1 + now - lanes[BIRTH * width + i])
        work[share + i] = one - numbers[RATE] / age ** numbers[DECAY]
    for k in range(n):
        for i in range(width):
            image = work[y + k * width + i]
            work[y + k * width + i] = image - work[share + i] * (image - work[x + k * width + i])


def _make_solve(stamp: int) -> Any:
    """Returns the kernel; what a function closes over is part of its place in numba's cache."""

    @kept
    def solve(
        packed: Any, v: Any, x0: Any, value: Any, status: Any, steps: Any, trace: Any, work: Any, lanes: Any,
        at: Any, counts: Any, numbers: Any, begin: int, end: int,
    ) -> int:  # fmt: skip
        """Solves the samples from `begin` to `end`; `work` holds zeros. Returns the evaluations of groups."""
        work, lanes, packed, numbers = borrow(work), borrow(lanes), borrow(packed), borrow(numbers)
        v, x0, trace, value = borrow(v), borrow(x0), borrow(trace), borrow(value)
        status, steps, n, width = borrow(status), borrow(steps), v.shape[1], lanes.shape[0] // 3 if stamp else 0
        vectors = 1 if end - begin <= width // VECTORS else VECTORS
        for i in range(width):
            lanes[SAMPLE * width + i], lanes[BIRTH * width + i], lanes[DUE * width + i] = -1, 0, NEVER
        zero = begin - begin
        now, left, waiting, x, y = zero, zero, begin, at[X], at[Y]
        while True:
            known = waiting
            if waiting < end and left < width:
                waiting = refill(work, x, at, lanes, width, v, v[:0], x0, now, waiting, end)
                left += waiting - known
            if left == 0:
                return now
            step(work, packed, x, y, at, lanes, n, width, now, waiting > known, counts, numbers, vectors)
            note(work, at, lanes, width, now, trace)
            if counts[RULE] == AVERAGED:
                accept_means(work, packed, x, at, lanes, n, width, now, counts, numbers, vectors)
            left -= settle(work, x, at, lanes, width, now, counts, numbers, value, status, steps)
            if counts[DAMPED] > 0:
                relax(work, x, y, at, lanes, width, now, n, numbers)
            now, x, y = now + 1, y, x

    return solve


solve = _make_solve(stamp(*PARTS))
