"""What happens to a block of samples in every step: the verdict, and Anderson's extrapolation.

The points of a cycle lie in a scratch buffer, ``points[slot, row, state]``, which stays in the cache of the
device: a step writes one of them, and a jump reads them all once. The algorithm is that of
`equilibrium.anderson`, the rules are those of `equilibrium.loop`; every number is one of a row, and no row looks
at another.
"""
# ruff: noqa: RUF005  (Triton has no unpacking in tuples)
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type, assignment, var-annotated"

from wellposed.equilibrium import loop
from wellposed.errors import require
from wellposed.kernels.gpu_elementary import (
    CONVERGED,
    COUNTED,
    DIVERGED,
    MAX_STEPS,
    NONFINITE,
    SETTLED,
    STAGNATED,
    STEPS_DONE,
)

triton = require("triton")
tl = require("triton.language")
PERIOD = tl.constexpr(loop.PERIOD)
TINY = tl.constexpr(2.2250738585072014e-308)


@triton.jit
def verdict(residual, size, l1, index, limit, atol, rtol, RULE: tl.constexpr):
    """Applies the stopping rule; zero for rows that go on."""
    if RULE == COUNTED:
        found = tl.where((residual >= 0) & (index >= limit), STEPS_DONE, 0)
    elif RULE == SETTLED:
        found = tl.where((residual == 0) | (index >= limit), CONVERGED, 0)
    else:
        found = tl.where(residual <= tl.maximum(atol, rtol * size), CONVERGED, 0)
    # Maxima ignore NaN, sums do not.
    return tl.where((residual < float("inf")) & (l1 == l1), found, NONFINITE)


@triton.jit
def stands_still(newest, batch, inside, known, least, residual, size, n, eps):
    """Tells which residuals stopped falling at the rounding level of the map.

    Args:
        newest: where the least residuals of the latest period go; older ones lie a batch before each other.
        batch, n: sizes.
        inside: rows that exist.
        known: periods so far.
        least: of the latest period.
        residual, size: of the latest step, and of the image.
        eps: the rounding unit.
    """
    tl.store(newest, least, mask=inside)
    tl.debug_barrier()
    window = tl.maximum(known // 4, 1)
    late, early = least, tl.full(least.shape, float("inf"), least.dtype)
    there = inside & (known >= 2)
    look = known * 0
    while look < window:
        late = tl.minimum(late, tl.load(newest - look * batch, mask=there, other=float("inf")))
        early = tl.minimum(early, tl.load(newest - (window + look) * batch, mask=there, other=float("inf")))
        look += 1
    level = 4 * (4 + tl.sqrt((n + known * 0).to(tl.float32))) * eps * size
    return there & (late >= early) & (residual <= level)


@triton.jit
def judge(
    residual, size, l1, status, first, least, index, rows, inside, MINIMA, TRACE, batch, n, atol, rtol, eps, limit,
    max_steps, RULE: tl.constexpr, TRACED: tl.constexpr,
):  # fmt: skip
    """Returns the status of rows after a step, zero for those that go on; the first residual and the least."""
    if TRACED:
        tl.store(TRACE + index * batch + rows, tl.where(l1 == l1, residual, l1), mask=status == 0)
    first, least = tl.where(index == 0, residual, first), tl.minimum(least, residual)
    found = verdict(residual, size, l1, index, limit, atol, rtol, RULE)
    if (RULE != COUNTED) & ((index + 1) % PERIOD == 0):
        known = (index + 1) // PERIOD
        still = stands_still(
            MINIMA + (known - 1) * batch + rows, batch, inside, known, least, residual, size, n, eps
        )
        found = tl.where((found == 0) & still, STAGNATED, found)
        least = tl.full(least.shape, float("inf"), least.dtype)
    ending = tl.where(residual > 1000 * first, DIVERGED, MAX_STEPS)
    found = tl.where((found == 0) & (index + 1 >= max_steps), ending, found)
    return tl.where(status == 0, found, 0), first, least


@triton.jit
def close(STATUS, STEPS, FLAG, rows, inside, status, steps):
    """Writes how all rows have ended, and raises the flag if one of them has failed."""
    tl.store(STATUS + rows, status, mask=inside)
    tl.store(STEPS + rows, steps, mask=inside)
    if tl.max(tl.where(inside, status, 0), 0) >= MAX_STEPS:
        tl.store(FLAG, 1)


@triton.jit
def gram(points, slot, rows, n, MEMORY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the normal equations: lower triangle, right side, and the l1 norm of the last point."""
    COUNT: tl.constexpr = MEMORY * (MEMORY + 3) // 2 + 1
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros(rows.shape, points.dtype.element_ty),)
    for start in range(0, WIDTH, CHUNK):
        place = points + rows[:, None] * WIDTH + (start + tl.arange(0, CHUNK))[None, :]
        before = tl.load(place)
        after = tl.load(place + slot)
        step = after - before
        columns = ()
        for j in tl.static_range(MEMORY):
            before = after
            after = tl.load(place + (j + 2) * slot)
            difference = after - before - step
            step = after - before
            # More differences than states determine nothing: the oldest are forgotten.
            columns = columns + (tl.where(j >= MEMORY - n, difference, 0.0),)
        new = ()
        for a in tl.static_range(MEMORY):
            for b in tl.static_range(a + 1):
                new = new + (sums[a * (a + 1) // 2 + b] + tl.sum(columns[a] * columns[b], 1),)
        for a in tl.static_range(MEMORY):
            new = new + (sums[MEMORY * (MEMORY + 1) // 2 + a] + tl.sum(columns[a] * step, 1),)
        sums = new + (sums[COUNT - 1] + tl.sum(tl.abs(after), 1),)
    return sums


@triton.jit
def weigh(sums, ridge, MEMORY: tl.constexpr):
    """Solves the regularised normal equations by L D L' in float64; returns the weights, the latest first."""
    shift = tl.zeros(sums[0].shape, tl.float64) + TINY
    for a in tl.static_range(MEMORY):
        shift += ridge * sums[a * (a + 1) // 2 + a].to(tl.float64)
    lower, scaled, inverses, right = (), (), (), ()  # rows of L and L D, 1 / D, and the forward substitution
    for a in tl.static_range(MEMORY):
        for b in tl.static_range(a):
            entry = sums[a * (a + 1) // 2 + b].to(tl.float64)
            for c in tl.static_range(b):
                entry -= scaled[a * (a - 1) // 2 + c] * lower[b * (b - 1) // 2 + c]
            scaled = scaled + (entry,)
            lower = lower + (entry * inverses[b],)
        pivot = sums[a * (a + 1) // 2 + a].to(tl.float64) + shift
        value = sums[MEMORY * (MEMORY + 1) // 2 + a].to(tl.float64)
        for c in tl.static_range(a):
            pivot -= scaled[a * (a - 1) // 2 + c] * lower[a * (a - 1) // 2 + c]
            value -= lower[a * (a - 1) // 2 + c] * right[c]
        inverses = inverses + (1 / pivot,)
        right = right + (value,)
    weights = ()
    for back in tl.static_range(MEMORY):
        weight = right[MEMORY - 1 - back] * inverses[MEMORY - 1 - back]
        for c in tl.static_range(back):
            weight -= lower[(MEMORY - 1 - c) * (MEMORY - 2 - c) // 2 + MEMORY - 1 - back] * weights[c]
        weights = weights + (weight,)
    return weights


@triton.jit
def combine(
    points, slot, rows, weights, jumps,
    MEMORY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the jump over the first point, the last point where there is none; returns who has, and how far."""
    size, largest = tl.zeros(rows.shape, points.dtype.element_ty), tl.zeros(rows.shape, points.dtype.element_ty)
    for start in range(0, WIDTH, CHUNK):
        place = points + rows[:, None] * WIDTH + (start + tl.arange(0, CHUNK))[None, :]
        last = tl.load(place + (MEMORY + 1) * slot)
        jump, after = last, last
        for back in tl.static_range(MEMORY):
            before = tl.load(place + (MEMORY - back) * slot)
            jump -= weights[back].to(last.dtype)[:, None] * (after - before)
            after = before
        size, largest = size + tl.sum(tl.abs(jump), 1), tl.maximum(largest, tl.max(tl.abs(jump), 1))
        tl.store(place, tl.where(jumps[:, None], jump, last))
    sound = size < float("inf")
    if tl.max((jumps & (sound == 0)).to(tl.int32), 0) > 0:
        tl.debug_barrier()
        for start in range(0, WIDTH, CHUNK):
            place = points + rows[:, None] * WIDTH + (start + tl.arange(0, CHUNK))[None, :]
            last = tl.load(place + (MEMORY + 1) * slot)
            tl.store(place, last, mask=(sound == 0)[:, None])
    return jumps & sound, largest


@triton.jit
def extrapolate(
    points, slot, rows, running, rest, l1, previous, n, eps,
    worth, patience, ridge, MEMORY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Jumps from the points of a cycle where that may pay, over the first; tells who, what to beat, and sizes."""
    rate = tl.minimum(l1 / previous, 1.0)
    target = l1 * tl.exp2(worth * tl.log2(rate))
    slow = l1 * tl.exp2(patience * tl.log2(rate))
    tl.debug_barrier()
    sums = gram(points, slot, rows, n, MEMORY, WIDTH, CHUNK)
    jumps = running & (rest <= 0) & (slow > 8 * eps * sums[MEMORY * (MEMORY + 3) // 2])
    weights = weigh(sums, ridge, MEMORY)
    jumped, largest = combine(points, slot, rows, weights, jumps, MEMORY, WIDTH, CHUNK)
    tl.debug_barrier()
    return jumped, target, largest


@triton.jit
def look_back(jumped, l1, target, rest, failures):
    """Judges a jump by the evaluation after it; returns who failed, cycles to sit out and failures in a row."""
    failed = jumped & ((l1 <= target) == 0)
    failures = tl.where(jumped, tl.where(failed, failures + 1, 0), failures)
    rest = tl.where(failed, (1 << tl.minimum(tl.maximum(failures - 1, 0), 3)) - 1, rest)
    return failed, rest, failures
