"""What happens to a group of samples in every step: evaluate, measure, finish, take new samples.

The memory of a group is one flat buffer, ``work[row * width + lane]``: the points of a cycle (`slots`), then v and
d, then single rows. `at` tells where v, d, the single rows, the solution of the least squares problem and the
minima begin. Which sample a lane works on, since when, and when it must be looked at stands in `lanes`.
"""

import math
from typing import Any

import numpy as np

from wellposed.equilibrium.loop import PERIOD
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.keeping import keeping
from wellposed.kernels.product import multiply
from wellposed.kernels.recipe import COUNTED, RELU, SETTLED, SLOPED, TANH, TOLERANCE
from wellposed.kernels.vectors import ROWS, activate

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")
kept = keeping(nogil=True, error_model="numpy")

RUNNING, CONVERGED, STAGNATED = int(Status.RUNNING), int(Status.CONVERGED), int(Status.STAGNATED)
STEPS_DONE, MAX_STEPS = int(Status.STEPS_DONE), int(Status.MAX_STEPS)
DIVERGED, NONFINITE = int(Status.DIVERGED), int(Status.NONFINITE)

V, D, SINGLE, SOLUTION, MINIMA = range(5)  # of `at`
# Single rows: largest residual, largest entry and l1 norm of the residual; its l1 norm before and the one to beat;
# the first residual and the least since the last look; cycles to sit out, failures in a row; who has jumped, who
# in vain, who needs a look; room for jumps; the least squares problem.
RESIDUAL, SIZE, L1, PREVIOUS, TARGET, FIRST, LEAST, REST, FAILURES, JUMPED, FAILED, EVENT, RATE, SLOW, PROBLEM = (
    range(15)
)
SAMPLE, BIRTH, DUE = range(3)  # of `lanes`
NEVER = 1 << 62
KIND, MEMORY, RULE, LIMIT, LAST = range(5)  # of `counts`
SLOPE, WORTH, PATIENCE, RIDGE, ATOL, RTOL, EPS = range(7)  # of `numbers`


@kept
def pack(A: Any, transpose: bool, packed: Any) -> None:
    """Copies A (or A') in tiles of rows, column by column; rows beyond the last are zero."""
    n = A.shape[0]
    for row in range((n + ROWS - 1) // ROWS * ROWS):
        start = row // ROWS * ROWS * n + row % ROWS
        for k in range(n):
            if row >= n:
                packed[start + k * ROWS] = 0
            elif transpose:
                packed[start + k * ROWS] = A[k, row]
            else:
                packed[start + k * ROWS] = A[row, k]


@kept
def prepare_adjoint(z: Any, g: Any, kind: int, slope: float, d: Any, offset: Any, scale: Any) -> None:
    """Writes the slopes d = phi'(z), the size of every row of g (one for zeros) and ``d g`` divided by it."""
    one, zero = z.dtype.type(1), z.dtype.type(0)
    below = z.dtype.type(slope)
    for s in range(z.shape[0]):
        size = zero
        for k in range(z.shape[1]):
            size = size if size > abs(g[s, k]) else abs(g[s, k])  # NaN stays
        size = size if size != zero else one
        scale[s, 0] = size
        for k in range(z.shape[1]):
            factor = one
            if kind in (RELU, SLOPED):
                factor = one if z[s, k] > zero else below
            elif kind == TANH:
                gate = math.tanh(z[s, k])
                factor = one - gate * gate
            else:
                gate = one / (one + math.exp(-z[s, k]))
                factor = gate * (one - gate)
            d[s, k], offset[s, k] = factor, factor * g[s, k] / size


@compiled
def evaluate(
    work: Any, matrix: Any, x: int, y: int, at: Any, n: int, width: int, kind: int, slope: float, vectors: int,
    alone: bool,
) -> None:  # fmt: skip
    """Evaluates the map for a group, from the point at `x` to the one at `y`, and measures the residual."""
    # Only adjoints look at d, and they have no sparse product: there is room.
    multiply(work, matrix, x, y, at[D], n, width, vectors, alone)
    activate(work, y, x, at[V], at[D], at[SINGLE], n, vectors, kind, slope)


@compiled
def refill(
    work: Any, x: int, at: Any, lanes: Any, width: int, v: Any, d: Any, x0: Any, now: int, waiting: int, end: int
) -> int:
    """Gives free lanes the next samples; returns the first that waits."""
    n, rows = v.shape[1], at[SINGLE]
    for i in range(width):
        if waiting >= end:
            break
        if lanes[SAMPLE * width + i] >= 0:
            continue
        lanes[SAMPLE * width + i] = waiting
        lanes[BIRTH * width + i] = lanes[DUE * width + i] = now
        work[rows + LEAST * width + i] = np.inf
        for row in (REST, FAILURES, JUMPED):
            work[rows + row * width + i] = 0
        for k in range(n):
            work[at[V] + k * width + i] = v[waiting, k]
        for k in range(n):
            work[x + k * width + i] = x0[waiting, k] if x0.shape[0] > 0 else 0
        if d.shape[0] > 0:
            for k in range(n):
                work[at[D] + k * width + i] = d[waiting, k]
        waiting += 1
    return waiting


@compiled
def gather(work: Any, x: int, at: Any, lanes: Any, width: int, n: int, looks: int) -> None:
    """Moves the samples at work to the first lanes."""
    free = 0
    for i in range(width):
        if lanes[SAMPLE * width + i] < 0:
            continue
        while free < i and lanes[SAMPLE * width + free] >= 0:
            free += 1
        if free >= i:
            continue
        for start, count in ((x, n), (at[V], n), (at[D], n), (at[SINGLE], PROBLEM), (at[MINIMA], looks)):
            for row in range(count):
                work[start + row * width + free] = work[start + row * width + i]
        for row in range(3):
            lanes[row * width + free] = lanes[row * width + i]
        lanes[SAMPLE * width + i], lanes[DUE * width + i] = -1, NEVER


@compiled
def stands_still(work: Any, x: int, at: Any, i: int, steps: int, n: int, width: int, eps: float) -> bool:
    """Tells whether a residual stopped falling at the rounding level of the map; looks at fixed step numbers."""
    rows, known = at[SINGLE], steps // PERIOD
    newest = at[MINIMA] + (known - 1) * width + i
    work[newest] = work[rows + LEAST * width + i]
    work[rows + LEAST * width + i] = np.inf
    if known < 2:
        return False
    window = max(1, known // 4)
    late, early = work[newest], work[newest - window * width]
    for look in range(1, window):
        late = min(late, work[newest - look * width])
        early = min(early, work[newest - (window + look) * width])
    if late < early:
        return False
    size = work[rows + SIZE * width + i]
    for k in range(n):
        size = max(size, abs(work[x + k * width + i]))
    return bool(work[rows + RESIDUAL * width + i] <= 4 * (4 + math.sqrt(n)) * eps * size)


@compiled
def verdict(residual: float, size: float, l1: float, index: int, counts: Any, numbers: Any) -> int:
    """Applies the stopping rule to one sample."""
    if not (residual < np.inf and l1 == l1):
        return NONFINITE
    if counts[RULE] == COUNTED:
        return STEPS_DONE if index >= counts[LIMIT] else RUNNING
    if counts[RULE] == SETTLED:
        return CONVERGED if residual == 0 or index >= counts[LIMIT] else RUNNING
    return CONVERGED if residual <= max(numbers[ATOL], numbers[RTOL] * size) else RUNNING


@compiled
def find_events(work: Any, at: Any, lanes: Any, width: int, now: int, always: bool, numbers: Any) -> int:
    """Marks lanes that need a look: accepted, not finite or due. Its loops run over vectors."""
    rows, count = at[SINGLE], 0
    atol, rtol, infinite = numbers[ATOL], numbers[RTOL], numbers.dtype.type(np.inf)
    for i in range(width):
        residual, l1 = work[rows + RESIDUAL * width + i], work[rows + L1 * width + i]
        work[rows + LEAST * width + i] = min(work[rows + LEAST * width + i], residual)
        accepted = residual <= max(atol, rtol * work[rows + SIZE * width + i])
        work[rows + EVENT * width + i] = accepted | (not l1 < infinite) | always
    for i in range(width):
        if lanes[DUE * width + i] <= now:
            work[rows + EVENT * width + i] = 1
    for i in range(width):
        count += (work[rows + EVENT * width + i] > 0) & (lanes[DUE * width + i] < NEVER)
    return count


@compiled
def judge_lane(
    work: Any, x: int, at: Any, width: int, i: int, index: int, n: int, counts: Any, numbers: Any
) -> int:
    """Returns the status of a lane after a step, RUNNING if it goes on."""
    rows = at[SINGLE]
    residual, size = work[rows + RESIDUAL * width + i], work[rows + SIZE * width + i]
    found = verdict(residual, size, work[rows + L1 * width + i], index, counts, numbers)
    if index == 0:
        work[rows + FIRST * width + i] = residual
    look = counts[RULE] != COUNTED and (index + 1) % PERIOD == 0
    if found == RUNNING and look and stands_still(work, x, at, i, index + 1, n, width, numbers[EPS]):
        return STAGNATED
    if found == RUNNING and index + 1 == counts[LAST]:
        return DIVERGED if residual > 1000 * work[rows + FIRST * width + i] else MAX_STEPS
    return int(found)


@compiled
def note(work: Any, at: Any, lanes: Any, width: int, now: int, trace: Any) -> None:
    """Writes the residual of every sample at work to its trace."""
    for i in range(width):
        s = lanes[SAMPLE * width + i]
        if s >= 0:
            l1 = work[at[SINGLE] + L1 * width + i]
            residual = work[at[SINGLE] + RESIDUAL * width + i]
            trace[now - lanes[BIRTH * width + i], s] = residual if l1 == l1 else np.nan


@compiled
def settle(
    work: Any, x: int, at: Any, lanes: Any, width: int, now: int, counts: Any, numbers: Any, value: Any,
    status: Any, steps: Any,
) -> int:  # fmt: skip
    """Writes what has finished in a step; returns the number of samples that have."""
    n, done = value.shape[1], 0
    if find_events(work, at, lanes, width, now, counts[RULE] != TOLERANCE, numbers) == 0:
        return 0
    for i in range(width):
        if work[at[SINGLE] + EVENT * width + i] == 0 or lanes[DUE * width + i] == NEVER:
            continue
        s, birth = lanes[SAMPLE * width + i], lanes[BIRTH * width + i]
        index = now - birth
        found = judge_lane(work, x, at, width, i, index, n, counts, numbers)
        if found == RUNNING:
            lanes[DUE * width + i] = birth + min((index + 1) // PERIOD * PERIOD + PERIOD, counts[LAST]) - 1
            continue
        done += 1
        status[s], steps[s] = found, index + 1
        lanes[SAMPLE * width + i], lanes[DUE * width + i] = -1, NEVER
        for k in range(n):
            value[s, k] = work[x + k * width + i]
    return done
