"""The loop of `equilibrium.loop` for x = phi(Ax + v) and y = d (A'y + g), compiled: all steps in one call.

A group of samples advances together, one sample a lane. A lane whose sample has finished takes the next sample at
the end of a cycle of its solver, so that no sample waits for the slowest of a batch; no lane reads another, so a
sample's result does not depend on its companions.

The memory of a group is one flat buffer, ``work[row * width + lane]``: the points of a cycle (`slots`), then v and
d, then single rows. `at` has the offsets of v, d, the single rows, the solution of the least squares problem and
the minima. `lanes` says which sample a lane works on, and since which step.

A step evaluates the map (`evaluate`), takes new samples (`refill`) and writes finished ones
(`write_finished`). `jump` and `advance` are the extrapolation of `equilibrium.solvers.Anderson` for all lanes.
Where A has no cycles, states follow from each other in one pass (`substitute`).
"""

import math
from typing import Any

import numpy as np

from wellposed.equilibrium.loop import PATIENCE, PERIOD
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.cpu.cache import njit_cached, source_key
from wellposed.kernels.cpu.engine import Counts, Numbers, Rows
from wellposed.kernels.cpu.simd import (
    INDEX,
    ROWS,
    VECTOR_BYTES,  # noqa: F401  the engine sizes its buffers by it
    VECTORS,
    Memory,
    activate,
    borrow,
    choose,
    combine,
    gram,
    lanes_of,
    move_transposed,
    multiply,
    multiply_rows,
    pointer_of,
    rows_alone,
    weigh,
    wipe,
)
from wellposed.kernels.spec import CHECKED, COUNTED, POINT, RELU, SETTLED, SLOPED, TANH, TOLERANCE

numba = require("numba", extra="fast")
_cgutils = require("numba.core.cgutils", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types
compiled = numba.njit(nogil=True, error_model="numpy")
cached = njit_cached(nogil=True, error_model="numpy")

RUNNING, CONVERGED, STAGNATED = int(Status.RUNNING), int(Status.CONVERGED), int(Status.STAGNATED)
STEPS_DONE, MAX_STEPS = int(Status.STEPS_DONE), int(Status.MAX_STEPS)
DIVERGED, NONFINITE = int(Status.DIVERGED), int(Status.NONFINITE)

# The workspace of a group: rows of `width` lanes, as `cpu.engine.plan_workspace` plans them, for a solver with the
# memory m.
#
#   m + 2 points of n rows    n rows    n rows    16 + m (m + 3) / 2 + 1 rows    m + 1 rows      a row a period
#   points of a cycle         v         d         single rows                    solution        minima
#   slots[0], slots[1], ...   at.v      at.d      at.single                      at.solution     at.minima
# Single rows: largest residual, largest entry and l1 norm of the residual; its l1 norm one step before and the one
# that a jump must beat; the first residual and the least of this period; cycles to come without a jump, failures
# in a row; periods after which the sample fell back on plain steps, or 0; flags: has jumped, jump failed, must be
# checked, has a sample (CLOSING once that is accepted); rate, residual expected soon; least squares problem.
(
    RESIDUAL, SIZE, L1, PREVIOUS, TARGET, FIRST, LEAST, REST, FAILURES, SINCE, JUMPED, FAILED, EVENT, ALIVE, RATE,
    SLOW, PROBLEM,
) = range(17)  # fmt: skip
SAMPLE, BIRTH = range(2)  # of `lanes`
CLOSING = 2  # a sample that takes its last evaluations; larger numbers count them
IMAGES = 2  # of an accepted point that are looked at where nobody knows whether the map contracts
SPARE = 4  # a group takes new samples when this part of a vector is free: samples that start together end together


@compiled
def unpack(layout: Any, parameters: Any) -> Any:
    """Returns the rows of a group, counts and numbers of a `Plan`, which are handed over faster as arrays."""
    at = Rows(layout[0], layout[1], layout[2], layout[3], layout[4])
    counts = Counts(layout[5], layout[6], layout[7], layout[8], layout[9], layout[10] > 0)
    own = parameters
    return at, counts, Numbers(own[0], own[1], own[2], own[3], own[4], own[5], own[6])


@compiled
def pack_tiles(
    tiles: Any, start: int, inner: int, matrix: Any, transposed: bool, row: int, rows: int, column: int,
    columns: int,
) -> None:  # fmt: skip
    """Copies rows from `row` and columns from `column` on of a matrix, or of its transpose, in tiles of rows.

    Tiles begin at `start`, have `inner` columns and are stored column by column; rows beyond the last are zero.
    """
    for r in range((rows + ROWS - 1) // ROWS * ROWS):
        at = start + r // ROWS * ROWS * inner + r % ROWS
        for k in range(columns):
            if r >= rows:
                tiles[at + k * ROWS] = 0
            elif transposed:
                tiles[at + k * ROWS] = matrix[column + k, row + r]
            else:
                tiles[at + k * ROWS] = matrix[row + r, column + k]


@cached
def pack(A: Any, transpose: bool, packed: Any) -> None:
    """Copies A, or A', in tiles."""
    n = A.shape[0]
    pack_tiles(packed, 0, n, A, transpose, 0, n, 0, n)


@compiled
def largest(row: Any) -> Any:
    """Returns the largest size of an entry, from four maxima that do not wait for each other."""
    a = b = c = d = row.dtype.type(0)
    whole = len(row) // 4 * 4
    for k in range(0, whole, 4):
        a, b = max(a, abs(row[k])), max(b, abs(row[k + 1]))
        c, d = max(c, abs(row[k + 2])), max(d, abs(row[k + 3]))
    for k in range(whole, len(row)):
        a = max(a, abs(row[k]))
    return max(max(a, b), max(c, d))


@cached
def prepare_adjoint(z: Any, g: Any, kind: int, slope: float, d: Any, offset: Any, scale: Any) -> None:
    """Writes the slopes d = phi'(z), the size of every row of g (one for zeros) and ``d g`` divided by it."""
    one, zero = z.dtype.type(1), z.dtype.type(0)
    below = z.dtype.type(slope)
    for s in range(z.shape[0]):
        size = largest(g[s])
        size = size if size != zero else one
        scale[s, 0] = size
        for k in range(z.shape[1]):
            factor = one
            if kind in (RELU, SLOPED):
                factor = one if z[s, k] > zero else below
            else:  # from the exponential: images of saturated states are rounded to one
                tail = math.exp(-abs(z[s, k] + z[s, k] if kind == TANH else z[s, k]))
                factor = min(tail / ((one + tail) * (one + tail)) * (4 if kind == TANH else 1), one)
            d[s, k], offset[s, k] = factor, factor * g[s, k] / size


@compiled
def eliminate(system: Any, y: Any) -> None:
    """Solves a system in place by elimination with row exchanges; `y` is the right side, then the solution."""
    n = len(y)
    for k in range(n):
        pivot = k
        for i in range(k + 1, n):
            if abs(system[i, k]) > abs(system[pivot, k]):
                pivot = i
        if pivot != k:
            for j in range(k, n):
                system[k, j], system[pivot, j] = system[pivot, j], system[k, j]
            y[k], y[pivot] = y[pivot], y[k]
        for i in range(k + 1, n):
            factor = system[i, k] / system[k, k]
            for j in range(k + 1, n):
                system[i, j] -= factor * system[k, j]
            y[i] -= factor * y[k]
    for k in range(n - 1, -1, -1):
        for j in range(k + 1, n):
            y[k] -= system[k, j] * y[j]
        y[k] /= system[k, k]


@compiled
def evaluate(
    work: Any, matrix: Any, x: int, y: int, at: Any, n: int, width: int, kind: int, slope: float, vectors: int,
    alone: bool, zero: bool,
) -> None:  # fmt: skip
    """Evaluates the map for a group, from the point at `x`, perhaps `zero`, to `y`, and measures the residual."""
    # Only adjoints use d, and they have no sparse product: its rows are free for `multiply`.
    if zero:
        wipe(work, y, n)
    else:
        multiply(work, matrix, x, y, at.d, n, width, vectors, alone)
    activate(work, y, x, at.v, at.d, at.single, n, vectors, kind, slope)


@compiled
def load_group(work: Any, to: int, values: Any, first: int, width: int) -> None:
    """Copies a row of values for every lane, from `first` on."""
    n, count = values.shape[1], width // VECTORS
    whole = n // count * count
    move_transposed(values, first * n, n, work, to, n // count)
    for k in range(whole, n):
        for i in range(width):
            work[to + k * width + i] = values[first + i, k]


@compiled
def load_lane(work: Any, x: int, at: Any, width: int, i: int, v: Any, d: Any, x0: Any, s: int) -> None:
    """Copies v, d and the start of a sample to a lane."""
    for k in range(v.shape[1]):
        work[at.v + k * width + i] = v[s, k]
    for k in range(v.shape[1]):
        work[x + k * width + i] = x0[s, k] if x0.shape[0] > 0 else 0
    if d.shape[0] > 0:
        for k in range(v.shape[1]):
            work[at.d + k * width + i] = d[s, k]


@compiled
def refill(
    work: Any, x: int, at: Any, lanes: Any, width: int, v: Any, d: Any, x0: Any, now: int, left: int,
    waiting: int, end: int,
) -> int:  # fmt: skip
    """Gives free lanes the next samples; returns the first that is still waiting."""
    n, rows, all_new = v.shape[1], at.single, left == 0 and end - waiting >= width
    if all_new:
        load_group(work, at.v, v, waiting, width)
        if d.shape[0] > 0:
            load_group(work, at.d, d, waiting, width)
        if x0.shape[0] > 0:
            load_group(work, x, x0, waiting, width)
        else:
            wipe(work, x, n)
    for i in range(width):
        if waiting >= end:
            break
        if lanes[SAMPLE * width + i] >= 0:
            continue
        lanes[SAMPLE * width + i], lanes[BIRTH * width + i] = waiting, now
        work[rows + LEAST * width + i], work[rows + ALIVE * width + i] = np.inf, 1
        for row in (REST, FAILURES, SINCE, JUMPED):
            work[rows + row * width + i] = 0
        if not all_new:
            load_lane(work, x, at, width, i, v, d, x0, waiting)
        waiting += 1
    return waiting


@compiled
def lasts(work: Any, at: Any, width: int, numbers: Any) -> bool:
    """Tells whether a sample of the group does not end soon: two steps at its rate leave too large a residual.

    Where all end soon, a group waits for them, since lanes that end within a cycle are free until its end.
    """
    rows, count = at.single, 0
    for i in range(width):
        limit, rate = (
            max(numbers.atol, numbers.rtol * work[rows + SIZE * width + i]),
            work[rows + RATE * width + i],
        )
        ends = work[rows + RESIDUAL * width + i] * rate * rate <= limit
        count += (work[rows + ALIVE * width + i] > 0) & (not ends)
    return count > 0


@compiled
def gather(work: Any, x: int, at: Any, lanes: Any, width: int, n: int, periods: int) -> None:
    """Moves running samples to the first lanes.

    Lanes below `free` are taken: a sample moves to the first free lane before its own.
    """
    free = 0
    for i in range(width):
        if lanes[SAMPLE * width + i] < 0:
            continue
        while free < i and lanes[SAMPLE * width + free] >= 0:
            free += 1
        if free >= i:
            continue
        for start, count in ((x, n), (at.v, n), (at.d, n), (at.single, PROBLEM), (at.minima, periods)):
            for row in range(count):
                work[start + row * width + free] = work[start + row * width + i]
        for row in (SAMPLE, BIRTH):
            lanes[row * width + free] = lanes[row * width + i]
        lanes[SAMPLE * width + i], work[at.single + ALIVE * width + i] = -1, 0


@compiled
def at_rounding_level(work: Any, x: int, at: Any, i: int, n: int, width: int, eps: float) -> bool:
    """Tells whether a residual is as small as rounding allows."""
    rows = at.single
    size = work[rows + SIZE * width + i]
    for k in range(n):
        size = max(size, abs(work[x + k * width + i]))
    return bool(work[rows + RESIDUAL * width + i] <= 4 * (4 + math.sqrt(n)) * eps * size)


@compiled
def stopped_falling(work: Any, at: Any, i: int, steps: int, width: int) -> bool:
    """Tells whether a residual has not fallen lately, as `loop.flat_rows`; called at fixed step numbers."""
    rows, periods = at.single, steps // PERIOD
    newest = at.minima + (periods - 1) * width + i
    work[newest] = work[rows + LEAST * width + i]
    work[rows + LEAST * width + i] = np.inf
    since = int(work[rows + SINCE * width + i])
    known = periods - since
    window = max(PATIENCE if since > 0 else 1, known // 4)
    if known < 2 * window:
        return False
    late, early = work[newest], work[newest - window * width]
    for period in range(1, window):
        late = min(late, work[newest - period * width])
        early = min(early, work[newest - (window + period) * width])
    return bool(late >= early)


@compiled
def verdict(residual: float, size: float, l1: float, index: int, counts: Any, numbers: Any) -> int:
    """Applies the stopping rule to one sample."""
    if not (residual < np.inf and l1 == l1):
        return NONFINITE
    if counts.rule == COUNTED:
        return STEPS_DONE if index >= counts.limit else RUNNING
    if counts.rule == SETTLED:
        return CONVERGED if residual == 0 or index >= counts.limit else RUNNING
    return CONVERGED if residual <= max(numbers.atol, numbers.rtol * size) else RUNNING


def _events(builder: Any, memory: Memory, rows: Any, atol: Any, rtol: Any, due: Any) -> Any:
    """Returns which lanes of a vector must be checked, and updates their least residuals."""
    lanes, width = memory.lanes, VECTORS * memory.lanes.count
    positions = {row: builder.add(rows, INDEX(row * width)) for row in (RESIDUAL, SIZE, L1, LEAST, EVENT, ALIVE)}
    residual, size, l1, least = (memory.load(positions[row]) for row in (RESIDUAL, SIZE, L1, LEAST))
    memory.store(builder.select(builder.fcmp_ordered("<", residual, least), residual, least), positions[LEAST])
    limit = lanes.larger(builder, atol, builder.fmul(rtol, size))
    calm = builder.fcmp_ordered("<", l1, lanes.full(float("inf")))
    event = builder.or_(builder.fcmp_ordered("<=", residual, limit), builder.not_(calm))
    alive = memory.load(positions[ALIVE])
    living = builder.fcmp_ordered(">", alive, lanes.zero)
    closing = builder.fcmp_ordered(">", alive, lanes.full(1.0))
    event = builder.select(due, living, builder.or_(builder.and_(event, living), closing))
    memory.store(builder.select(event, lanes.full(1.0), lanes.zero), positions[EVENT])
    return event


@_extending.intrinsic
def mark(typing: Any, array: Any, rows: Any, vectors: Any, atol: Any, rtol: Any, due: Any) -> Any:
    """Marks lanes that must be checked: accepted, closing or not finite, or all that are alive if they are `due`.

    Returns whether there are any; `rows` are the single rows of the group.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, rows, vectors, atol, rtol, due = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        atol, rtol = lanes.splat(builder, atol), lanes.splat(builder, rtol)
        bits = lanes.ir.IntType(lanes.count)
        some_event = _cgutils.alloca_once_value(builder, lanes.ir.Constant(lanes.ir.IntType(1), 0))
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                at = builder.add(rows, INDEX(vector * lanes.count))
                event = _events(builder, memory, at, atol, rtol, due)
                some = builder.icmp_unsigned("!=", builder.bitcast(event, bits), bits(0))
                builder.store(builder.or_(builder.load(some_event), some), some_event)
        return builder.load(some_event)

    whole, number = _types.int64, array.dtype
    return _types.boolean(array, whole, whole, number, number, _types.boolean), code


@compiled
def judge_lane(
    work: Any, x: int, at: Any, width: int, i: int, index: int, n: int, counts: Any, numbers: Any
) -> int:
    """Returns the status of a lane after a step, RUNNING if it goes on."""
    rows = at.single
    residual, size = work[rows + RESIDUAL * width + i], work[rows + SIZE * width + i]
    status = verdict(residual, size, work[rows + L1 * width + i], index, counts, numbers)
    if status != RUNNING:
        return int(status)
    at_period, last = counts.rule != COUNTED and (index + 1) % PERIOD == 0, index + 1 == counts.max_steps
    flat = at_period and stopped_falling(work, at, i, index + 1, width)
    since, ends = work[rows + SINCE * width + i], last and not counts.goes_on
    if (flat or (ends and since > 0)) and at_rounding_level(work, x, at, i, n, width, numbers.eps):
        if counts.memory == 0 or since > 0:
            return STAGNATED
        work[rows + SINCE * width + i], work[rows + REST * width + i] = (index + 1) // PERIOD, np.inf
        work[rows + JUMPED * width + i] = 0
        if ends:
            return STAGNATED
    if last:
        return DIVERGED if residual > 1000 * work[rows + FIRST * width + i] else MAX_STEPS
    return RUNNING


@compiled
def note_first_residuals(work: Any, at: Any, lanes: Any, width: int, now: int) -> None:
    """Remembers the residuals of samples that begin `now`."""
    for i in range(width):
        if lanes[BIRTH * width + i] == now:
            work[at.single + FIRST * width + i] = work[at.single + RESIDUAL * width + i]


@compiled
def record_residuals(work: Any, at: Any, lanes: Any, width: int, now: int, trace: Any) -> None:
    """Writes the residual of every running sample to its trace."""
    for i in range(width):
        s = lanes[SAMPLE * width + i]
        if s >= 0 and work[at.single + ALIVE * width + i] < CLOSING:
            l1 = work[at.single + L1 * width + i]
            residual = work[at.single + RESIDUAL * width + i]
            trace[now - lanes[BIRTH * width + i], s] = residual if l1 == l1 else np.nan


@compiled
def write_finished(
    work: Any, x: int, y: int, at: Any, lanes: Any, width: int, vectors: int, now: int, due: int, counts: Any,
    numbers: Any, value: Any, status: Any, steps: Any,
) -> Any:  # fmt: skip
    """Writes those of the marked samples that finished in a step from `x` to `y`, and frees their lanes.

    The image of an accepted point is nearer to the equilibrium where the map contracts. Where nobody knows that,
    CHECKED finds out by evaluations that are no steps: it takes images as long as their residuals do not grow, up
    to `IMAGES` of them.

    Returns:
        how many have finished, and the step at which all lanes must be checked again.
    """
    n, done, rows, tolerant = value.shape[1], 0, at.single, counts.rule in (TOLERANCE, POINT, CHECKED)
    due = now + PERIOD if now >= due else due
    for i in range(vectors * (width // VECTORS)):
        if work[rows + EVENT * width + i] == 0:
            continue
        s, index = lanes[SAMPLE * width + i], now - lanes[BIRTH * width + i]
        outcome, residual = CONVERGED, work[rows + RESIDUAL * width + i]
        if work[rows + ALIVE * width + i] >= CLOSING:
            falls = residual <= work[rows + FIRST * width + i] and work[rows + L1 * width + i] < np.inf
            if falls:
                work[rows + FIRST * width + i] = residual
                for k in range(n):
                    value[s, k] = work[x + k * width + i]
            work[rows + ALIVE * width + i] += 1
            if not falls or work[rows + ALIVE * width + i] == CLOSING + IMAGES:
                done += 1
                lanes[SAMPLE * width + i], work[rows + ALIVE * width + i] = -1, 0
            continue
        limit = max(numbers.atol, numbers.rtol * work[rows + SIZE * width + i])
        if not (tolerant and work[rows + L1 * width + i] < np.inf and residual <= limit):
            outcome = judge_lane(work, x, at, width, i, index, n, counts, numbers)
        if outcome == RUNNING:
            due = min(due, next_check(now, index, counts))
            continue
        status[s], steps[s] = outcome, index + 1
        if outcome == CONVERGED and counts.rule == CHECKED:
            work[rows + ALIVE * width + i], work[rows + JUMPED * width + i] = CLOSING, 0
            work[rows + FIRST * width + i] = residual
        else:
            done += 1
            lanes[SAMPLE * width + i], work[rows + ALIVE * width + i] = -1, 0
        point = y if outcome == CONVERGED and counts.rule not in (POINT, CHECKED) else x
        for k in range(n):
            value[s, k] = work[point + k * width + i]
    return done, due


@compiled
def next_check(now: int, index: int, counts: Any) -> int:
    """Returns the step at which a sample is due that has made `index` steps before the one `now`."""
    return now - index - 1 + min((index + 1) // PERIOD * PERIOD + PERIOD, counts.max_steps)


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
    raise_rates(work, rows, width, numbers.patience, rows + SLOW * width)
    raise_rates(work, rows, width, numbers.worth, rows + TARGET * width)


@compiled
def candidates(work: Any, rows: int, size: int, lanes: Any, width: int, numbers: Any) -> int:
    """Decides which lanes may jump, given the sizes of their last points at `size`; returns how many."""
    count, goal = 0, 8 * numbers.eps
    for i in range(width):
        slow = work[rows + SLOW * width + i] > goal * work[size + i]
        work[rows + JUMPED * width + i] = slow & (work[rows + REST * width + i] <= 0)
    for i in range(width):
        if lanes[SAMPLE * width + i] < 0 or work[rows + ALIVE * width + i] >= CLOSING:
            work[rows + JUMPED * width + i] = 0
    for i in range(width):
        count += work[rows + JUMPED * width + i] > 0
    return count


@compiled
def forget(work: Any, problem: int, width: int, memory: int, count: int) -> None:
    """Drops the oldest differences from the least squares problem: more than states are linearly dependent."""
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
    memory, rows = len(slots) - 2, at.single
    problem = rows + PROBLEM * width
    measure_rates(work, rows, width, numbers)
    # No norm is below the largest entry: what need not jump by that measure need not by the l1 norm.
    if candidates(work, rows, rows + SIZE * width, lanes, width, numbers) == 0:
        return False
    gram(work, slots, problem, rows + L1 * width, n, vectors)
    size = problem + memory * (memory + 3) // 2 * width
    if candidates(work, rows, size, lanes, width, numbers) == 0:
        return False
    if n < memory:
        forget(work, problem, width, memory, memory - n)
    weigh(work, slots, problem, at.solution, rows + JUMPED * width, numbers.ridge, vectors)
    combine(work, slots, at.solution, n, vectors)
    for i in range(width):
        if work[rows + JUMPED * width + i] > 0 and not work[at.solution + memory * width + i] < np.inf:
            work[rows + JUMPED * width + i] = 0
            for k in range(n):
                work[slots[0] + k * width + i] = work[slots[memory + 1] + k * width + i]
    return True


@compiled
def judge(work: Any, slots: Any, at: Any, width: int, n: int, vectors: int) -> None:
    """Continues from the image of a jump that paid off, from the last plain point after one that did not."""
    memory, rows = len(slots) - 2, at.single
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
    memory, rows = len(slots) - 2, at.single
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


@compiled
def solve_runs(work: Any, matrix: Any, x: int, at: Any, width: int, kind: int, slope: float, vectors: int) -> None:
    """Computes the states at `x`, one run of rows after the other, each from the runs before it."""
    runs = matrix[3]
    for start in range(0, len(runs), 2):
        first, last = runs[start], runs[start + 1]
        multiply_rows(work, matrix, x, x, first, last, vectors)
        here, v, d = x + first * width, at.v + first * width, at.d + first * width
        activate(work, here, here, v, d, at.single, last - first, vectors, kind, slope)


@compiled
def start_substituted(work: Any, x: int, scratch: int, lanes: Any, width: int, now: int, n: int) -> None:
    """Starts new samples from the result of substitution, unless that is not finite."""
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
) -> bool:  # fmt: skip
    """Starts samples that begin `now` from their equilibrium, if A has an order and steps are not to be counted.

    The start is then evaluated and judged like any other, so that statuses and residuals mean the same.

    Returns:
        whether it has started any.
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
    ) -> bool:  # fmt: skip
        return False

    def sparse(
        work: Any, matrix: Any, x: Any, scratch: Any, at: Any, lanes: Any, width: Any, now: Any, n: Any,
        counts: Any, numbers: Any, vectors: Any,
    ) -> bool:  # fmt: skip
        if len(matrix[3]) == 0 or counts.rule == COUNTED:
            return False
        solve_runs(work, matrix, scratch, at, width, counts.kind, numbers.slope, vectors)
        start_substituted(work, x, scratch, lanes, width, now, n)
        return True

    return sparse if isinstance(matrix, _types.BaseTuple) else dense


@compiled
def clear(work: Any, lanes: Any, width: int, slots: Any, at: Any) -> None:
    """Frees all lanes and fills them with zeros."""
    for i in range(width):
        lanes[SAMPLE * width + i] = -1
    wipe(work, slots[0], slots[1] // width)
    wipe(work, at.v, (at.single - at.v) // width + PROBLEM)


@compiled
def load_samples(work: Any, u: Any, first: int, size: int, width: int) -> None:
    """Copies samples to lanes."""
    for k in range(u.shape[1]):
        for i in range(size):
            work[k * width + i] = u[first + i, k]
        for i in range(size, width):
            work[k * width + i] = 0


@compiled
def store_samples(work: Any, out: int, bias: Any, y: Any, first: int, size: int, width: int) -> None:
    """Copies lanes to samples, and adds the bias if there is one."""
    for i in range(size):
        for k in range(y.shape[1]):
            y[first + i, k] = work[out + k * width + i]
        if len(bias) > 0:
            for k in range(y.shape[1]):
                y[first + i, k] += bias[k]


@compiled
def worst_status(status: Any, begin: int, end: int) -> int:
    """Returns the largest status of some samples, RUNNING if there are none."""
    worst = RUNNING
    for s in range(begin, end):
        worst = max(worst, status[s])
    return worst


@compiled
def solve_samples(
    packed: Any, v: Any, d: Any, x0: Any, value: Any, status: Any, steps: Any, trace: Any, work: Any,
    lanes: Any, slots: Any, at: Any, counts: Any, numbers: Any, begin: int, end: int,
) -> int:  # fmt: skip
    """Solves the samples from `begin` to `end`; returns the largest of their statuses."""
    n, width = v.shape[1], lanes.shape[0] // 2
    memory, plain, half = len(slots) - 2, counts.memory == 0, width // VECTORS
    vectors, alone = 1 if end - begin <= half else VECTORS, end - begin == 1
    always = counts.rule in (SETTLED, COUNTED)
    clear(work, lanes, width, slots, at)
    zero = begin - begin  # not a constant, for which numba would compile everything once more
    now, phase, origin, left, waiting, due = zero, zero, zero, zero, begin, zero
    # Before every step the iterates of the `left` running samples are at slots[origin], `now` evaluations of
    # the group have been made, samples from `waiting` on have no lane yet, and no sample must be checked before
    # the step `due` unless it is accepted. Lanes change samples in phase 0 only, when the other slots hold no
    # history.
    while True:
        new = at_zero = False
        if phase == 0:
            free = vectors * half - left
            if waiting < end and (
                left == 0 or (free >= half // SPARE and (plain or lasts(work, at, width, numbers)))
            ):
                known, new, first = waiting, True, next_check(now, 0, counts)
                waiting = refill(work, slots[origin], at, lanes, width, v, d, x0, now, left, waiting, end)
                scratch = slots[1 - origin]
                started = substitute(
                    work, packed, slots[origin], scratch, at, lanes, width, now, n, counts, numbers, vectors
                )
                at_zero = left == 0 and x0.shape[0] == 0 and not started
                left, due = left + waiting - known, first if left == 0 else min(due, first)
            if left == 0:
                return worst_status(status, begin, end)
            if vectors > 1 and waiting >= end and left <= half:
                gather(work, slots[origin], at, lanes, width, n, counts.max_steps // PERIOD + 1)
                vectors = 1
        target = 1 - origin if plain else 1 if phase > memory else origin + 1
        evaluate(
            work, packed, slots[origin], slots[target], at, n, width, counts.kind, numbers.slope, vectors,
            alone, at_zero,
        )  # fmt: skip
        if new:
            note_first_residuals(work, at, lanes, width, now)
        if trace.shape[0] > 0:
            record_residuals(work, at, lanes, width, now, trace)
        if mark(work, at.single, vectors, numbers.atol, numbers.rtol, always or now >= due):
            done, due = write_finished(
                work, slots[origin], slots[target], at, lanes, width, vectors, now, due, counts, numbers, value,
                status, steps,
            )  # fmt: skip
            left -= done
        now += 1
        if plain:
            origin = target
        elif left == 0:
            phase, origin = zero, zero
        elif phase < memory - 1:
            phase, origin = phase + 1, phase + 1
        else:
            phase, origin = advance(work, slots, at, lanes, width, n, numbers, vectors, phase)


def _make_solve(key: int) -> Any:
    """Returns the kernel; what a function closes over is part of its key in numba's cache."""

    @cached
    def solve(
        packed: Any, v: Any, d: Any, x0: Any, value: Any, status: Any, steps: Any, trace: Any, work: Any,
        lanes: Any, slots: Any, at: Any, counts: Any, numbers: Any, begin: int, end: int,
    ) -> int:  # fmt: skip
        """Solves the samples from `begin` to `end`; returns the largest of their statuses."""
        return solve_samples(
            borrow(packed), borrow(v), borrow(d), borrow(x0), borrow(value), borrow(status), borrow(steps),
            borrow(trace), borrow(work), borrow(lanes), slots, at, counts, numbers, begin, end if key else begin,
        )  # fmt: skip

    return solve


def _make_multiply_batch(key: int) -> Any:
    """Returns the product of a sparse matrix with samples, outside of a solve."""

    @cached
    def multiply_batch(
        matrix: Any, u: Any, bias: Any, y: Any, work: Any, width: int, begin: int, end: int
    ) -> None:
        """Writes ``Wu + b`` for the samples from `begin` to `end`, a group at a time."""
        matrix, u, bias, y, work = borrow(matrix), borrow(u), borrow(bias), borrow(y), borrow(work)
        rows, half = y.shape[1] if key else 0, width // VECTORS
        out = u.shape[1] * width
        for first in range(begin, end, width):
            size = min(width, end - first)
            if end - begin == 1:
                for k in range(u.shape[1]):
                    work[k] = u[first, k]
                rows_alone(work, matrix[0], matrix[1], matrix[2], 0, out, 0, rows)
            else:
                load_samples(work, u, first, size, width)
                multiply_rows(work, matrix, 0, out, 0, rows, 1 if size <= half else VECTORS)
            store_samples(work, out, bias, y, first, size, width)

    return multiply_batch


solve, multiply_batch = _make_solve(source_key()), _make_multiply_batch(source_key())
