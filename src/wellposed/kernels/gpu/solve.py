"""The solve of a block of samples in Triton: whole, with A on the chip or streamed in tiles, or a launch a step.

A program solves `BLOCK` rows, one sample a row. `activate`, `slope_at` and `split_product` are shared by all
Triton kernels. `judge`, `extrapolate` and `judge_jump` are the stopping rule and the extrapolation of a block: the
algorithm is that of `equilibrium.solvers.Anderson`, the rules are those of `equilibrium.loop`; every number is of
one row, and no row reads another. The points of a cycle are in a scratch buffer, which stays in the cache of the
device: a step writes one of them, and a jump reads them all once. For a solver with the memory m, with `rows` the
samples padded to whole blocks, P = ``max_steps // PERIOD + 1`` and rows of `WIDTH` states (n and padding),

    (m + 2, rows, WIDTH)                  (P, batch)
    points of a cycle                     least residual of every period
    POINTS + s * slot, slot = rows WIDTH  MINIMA = POINTS + (m + 2) * slot

Slot 0 is the first point of a cycle and slot s its s-th image; a jump is written to slot 0, its image (where it is
streamed) to slot 1. Inputs and outputs are ``(batch, n)`` without padding, at the offsets `at` under the mask
`there`.

`solve_resident` is for up to 128 states. A is loaded once into registers and shared memory; the iterate never
leaves the registers. A row that has finished is written at once (the image of a point that was accepted, which is
nearer to the equilibrium since the map contracts) and ignored from then on, while the others of its block go on.

`solve_streamed` is for any number of states. All points, also the iterate, are in the scratch buffer; every block
reads A tile by tile from the cache of the device. Plain steps use two slots of the buffer in turn. In float32 A is
split beforehand, by a small kernel (`split_float16`), into two matrices of float16 numbers, and so are the states
whenever they are read: ``x a = h a_h + 2^-11 (l a_h + h a_l)`` to 22 bits, with rows of both in units of powers of
two, so that nothing overflows. Three such products take half the time of three in TF32, and A need not be split
again in every block.

Beyond 1024 states one product of all samples fills the device, and tiles that every block reads for itself would
not stay in the cache. There a step is two launches: `wide_product` multiplies, with numbers split as above (in
float64 a library does), and `advance` does the rest of a step, few rows in a program. What `turn` returns is kept
between launches, with R rows (samples padded to whole blocks of the product), in

    STATE (7, R)   first, previous, target, least, safe, peak, scale
    COUNTS (4, R)  rest, failures, jumped, since
    RUNNING (K + 1,) int32, of every step whether a sample needs it: launches beyond the last step do nothing
"""

from wellposed.equilibrium import loop
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels import spec

# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"


triton = require("triton")
tl = require("triton.language")
# Kernels see global numbers only as constants of Triton.
RELU, SLOPED, LINEAR = tl.constexpr(spec.RELU), tl.constexpr(spec.SLOPED), tl.constexpr(spec.LINEAR)
TANH, SIGMOID = tl.constexpr(spec.TANH), tl.constexpr(spec.SIGMOID)
TOLERANCE, SETTLED = tl.constexpr(spec.TOLERANCE), tl.constexpr(spec.SETTLED)
COUNTED, POINT = tl.constexpr(spec.COUNTED), tl.constexpr(spec.POINT)
CONVERGED, STAGNATED = tl.constexpr(int(Status.CONVERGED)), tl.constexpr(int(Status.STAGNATED))
STEPS_DONE, MAX_STEPS = tl.constexpr(int(Status.STEPS_DONE)), tl.constexpr(int(Status.MAX_STEPS))
DIVERGED, NONFINITE = tl.constexpr(int(Status.DIVERGED)), tl.constexpr(int(Status.NONFINITE))
SMALL = tl.constexpr(0.3)  # below it tanh is a series


@triton.jit
def tanh(z):
    """Returns tanh z, accurate relative to the result; NaN stays."""
    e = tl.exp(-2 * tl.abs(z))
    large = (1 - e) / (1 + e)
    s = z * z
    if z.dtype == tl.float64:
        # The coefficients 2^2k (2^2k - 1) B_2k / (2k)! of the series, from the 25th power downwards.
        p = s * 1.5918905069328964e-5 - 3.927832388331683e-5
        p = p * s + 9.691537956929451e-5
        p = p * s - 2.3912911424355248e-4
        p = p * s + 5.90027440945586e-4
        p = p * s - 1.4558343870513183e-3
        p = p * s + 3.592128036572481e-3
        p = p * s - 8.863235529902197e-3
    else:
        p = s * 3.592128036572481e-3 - 8.863235529902197e-3
    p = p * s + 2.1869488536155203e-2
    p = p * s - 5.3968253968253971e-2
    p = p * s + 0.13333333333333333
    p = p * s - 0.3333333333333333
    near = z + z * s * p
    return tl.where(tl.abs(z) < SMALL, near, tl.where(z < 0, -large, large))


@triton.jit
def activate(z, slope, KIND: tl.constexpr):
    """Returns phi(z); `slope` is that of leaky ReLU below zero. NaN stays."""
    if KIND == RELU:
        y = tl.where(z < 0, 0.0, z)
    elif KIND == SLOPED:
        y = tl.where(z < 0, z * slope, z)
    elif KIND == TANH:
        y = tanh(z)
    elif KIND == SIGMOID:
        y = 1 / (1 + tl.exp(-z))
    else:
        y = z
    return y


@triton.jit
def slope_at(y, slope, KIND: tl.constexpr):
    """Returns phi'(z) from y = phi(z); leaky ReLU needs a slope that is not negative."""
    if KIND == RELU:
        d = tl.where(y > 0, 1.0, 0.0).to(y.dtype)
    elif KIND == SLOPED:
        d = tl.where(y > 0, 1.0, slope).to(y.dtype)
    elif KIND == TANH:
        d = 1 - y * y
    elif KIND == SIGMOID:
        d = y * (1 - y)
    else:
        d = tl.full(y.shape, 1.0, y.dtype)
    return d


@triton.jit
def product(x, a, total, PRECISION: tl.constexpr):
    """Adds ``x a`` to `total`, in the short dtype of `a` with long sums."""
    return tl.dot(x.to(a.dtype), a, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def split(x):
    """Returns x rounded to the eleven bits that a TF32 product uses, and the rest."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def split_product(x, high, low, total):
    """Adds ``x (high + low)`` to `total` by three independent TF32 products."""
    x_high, x_low = split(x)
    first = tl.dot(x_high, high, total, input_precision="tf32")
    second = tl.dot(x_high, low, input_precision="tf32")
    third = tl.dot(x_low, high, input_precision="tf32")
    return first + (second + third)


@triton.jit
def worst(r, s, t, other_r, other_s, other_t):
    """Merges two largest values and a sum."""
    return tl.maximum(r, other_r), tl.maximum(s, other_s), t + other_t


@triton.jit
def measure(x, y, FUSED: tl.constexpr):
    """Returns the residual in the largest entry, the size of `y` and the residual as a sum, which keeps NaN."""
    difference = tl.abs(y - x)
    if FUSED:
        residual, size, l1 = tl.reduce((difference, tl.abs(y), difference), 1, worst)
    else:
        residual, size, l1 = tl.max(difference, 1), tl.max(tl.abs(y), 1), tl.sum(difference, 1)
    return residual, size, l1


# ruff: noqa: RUF005  (Triton has no unpacking in tuples)
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type, assignment, var-annotated"


PERIOD, PATIENCE = tl.constexpr(loop.PERIOD), tl.constexpr(loop.PATIENCE)
ALWAYS = tl.constexpr(1 << 30)  # cycles without a jump, for samples that have fallen back on plain steps
TINY = tl.constexpr(2.2250738585072014e-308)


@triton.jit
def verdict(residual, size, l1, index, limit, atol, rtol, RULE: tl.constexpr):
    """Applies the stopping rule; zero for rows that go on."""
    if RULE == COUNTED:
        status = tl.where((residual >= 0) & (index >= limit), STEPS_DONE, 0)
    elif RULE == SETTLED:
        status = tl.where((residual == 0) | (index >= limit), CONVERGED, 0)
    else:
        status = tl.where(residual <= tl.maximum(atol, rtol * size), CONVERGED, 0)
    # Maxima ignore NaN, sums do not.
    return tl.where((residual < float("inf")) & (l1 == l1), status, NONFINITE)


@triton.jit
def stopped_falling(newest, batch, inside, periods, since, least):
    """Tells which residuals have not fallen lately, as `loop.flat_rows`.

    Args:
        newest: where the least residuals of the latest period go; each period before is `batch` numbers lower.
        batch: numbers of a period.
        inside: rows that exist.
        periods: so far.
        since: periods after which a row fell back on plain steps, or 0.
        least: of the latest period.
    """
    tl.store(newest, least, mask=inside)
    tl.debug_barrier()
    known = periods - since
    window = tl.maximum(known // 4, tl.where(since > 0, PATIENCE, 1))
    late, early = least, tl.full(least.shape, float("inf"), least.dtype)
    enough = inside & (known >= 2 * window)
    longest, age = tl.max(tl.where(enough, window, 0), 0), periods * 0
    while age < longest:
        there = enough & (age < window)
        late = tl.minimum(late, tl.load(newest - age * batch, mask=there, other=float("inf")))
        early = tl.minimum(early, tl.load(newest - (window + age) * batch, mask=there, other=float("inf")))
        age += 1
    return enough & (late >= early)


@triton.jit
def judge(
    residual, size, l1, status, first, least, since, rest, jumped, index, rows, inside, MINIMA, TRACE, batch, n,
    atol, rtol, eps, limit, max_steps, RULE: tl.constexpr, MEMORY: tl.constexpr, TRACED: tl.constexpr,
):  # fmt: skip
    """Judges a step of all rows.

    Returns the status of rows, zero for those that go on; the first residual and the least of this period; and
    `since`, `rest` and `jumped` after rows have fallen back on plain steps.
    """
    if TRACED:
        tl.store(TRACE + index * batch + rows, tl.where(l1 == l1, residual, l1), mask=status == 0)
    first, least = tl.where(index == 0, residual, first), tl.minimum(least, residual)
    outcome = verdict(residual, size, l1, index, limit, atol, rtol, RULE)
    level = residual <= 4 * (4 + tl.sqrt((n + index * 0).to(tl.float32))) * eps * size
    if (RULE != COUNTED) & ((index + 1) % PERIOD == 0):
        periods = (index + 1) // PERIOD
        stuck = level & stopped_falling(
            MINIMA + (periods - 1) * batch + rows, batch, inside, periods, since, least
        )
        if MEMORY > 0:
            fresh = stuck & (since == 0)
            since, rest = tl.where(fresh, periods, since), tl.where(fresh, ALWAYS, rest)
            jumped, stuck = jumped & (fresh == 0), stuck & (fresh == 0)
        outcome = tl.where((outcome == 0) & stuck, STAGNATED, outcome)
        least = tl.full(least.shape, float("inf"), least.dtype)
    ending = tl.where(residual > 1000 * first, DIVERGED, MAX_STEPS)
    ending = tl.where(level & (since > 0), STAGNATED, ending)
    outcome = tl.where((outcome == 0) & (index + 1 >= max_steps), ending, outcome)
    return tl.where(status == 0, outcome, 0), first, least, since, rest, jumped


@triton.jit
def close(STATUS, STEPS, FLAG, rows, inside, status, steps):
    """Writes how all rows have ended, and raises the flag if one of them has failed."""
    tl.store(STATUS + rows, status, mask=inside)
    tl.store(STEPS + rows, steps, mask=inside)
    if tl.max(tl.where(inside, status, 0), 0) >= MAX_STEPS:
        tl.store(FLAG, 1)


@triton.jit(do_not_specialize=("size",))
def flag_nonfinite(FLAG, Y, size, BLOCK: tl.constexpr):
    """Sets a flag in the memory of the host if one of `size` numbers is NaN or infinite."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(Y + at, mask=at < size, other=0.0)
    wrong = tl.max(tl.where(tl.abs(y) < float("inf"), 0, 1), 0)
    if wrong > 0:
        tl.store(FLAG, 1)


@triton.jit
def power_of_two(size):
    """Returns powers of two whose products with positive numbers are near one, and exact."""
    if size.dtype == tl.float64:
        field = tl.maximum(2045 - (size.to(tl.int64, bitcast=True) >> 52), 1)
        unit = (field << 52).to(tl.float64, bitcast=True)
    else:
        field = tl.maximum(253 - (size.to(tl.int32, bitcast=True) >> 23), 1)
        unit = (field << 23).to(tl.float32, bitcast=True)
    return unit


@triton.jit
def gram(points, slot, rows, l1, n, MEMORY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the normal equations: lower triangle, right side, and the l1 norm of the last point.

    Residuals are divided by a power of two near their norm, or squares would leave the range of the dtype.
    """
    unit = power_of_two(l1)[:, None]
    COUNT: tl.constexpr = MEMORY * (MEMORY + 3) // 2 + 1
    # Sums over threads cost most: up to four chunks are summed first, beyond that they would leave the registers.
    LATE: tl.constexpr = (CHUNK < WIDTH) & (WIDTH <= 4 * CHUNK)
    zero = tl.zeros([rows.shape[0], CHUNK], points.dtype.element_ty)
    terms = ()
    for _ in tl.static_range(COUNT):
        terms = terms + (zero if LATE else tl.sum(zero, 1),)
    for start in range(0, WIDTH, CHUNK):
        position = points + rows[:, None] * WIDTH + (start + tl.arange(0, CHUNK))[None, :]
        before = tl.load(position)
        after = tl.load(position + slot)
        step = (after - before) * unit
        columns = ()
        for j in tl.static_range(MEMORY):
            before = after
            after = tl.load(position + (j + 2) * slot)
            difference = (after - before) * unit - step
            step = (after - before) * unit
            # More differences than states are linearly dependent: the oldest are dropped.
            columns = columns + (tl.where(j >= MEMORY - n, difference, 0.0),)
        new = ()
        for a in tl.static_range(MEMORY):
            for b in tl.static_range(a + 1):
                term = columns[a] * columns[b]
                new = new + (terms[a * (a + 1) // 2 + b] + (term if LATE else tl.sum(term, 1)),)
        for a in tl.static_range(MEMORY):
            term = columns[a] * step
            new = new + (terms[MEMORY * (MEMORY + 1) // 2 + a] + (term if LATE else tl.sum(term, 1)),)
        terms = new + (terms[COUNT - 1] + (tl.abs(after) if LATE else tl.sum(tl.abs(after), 1)),)
    sums = ()
    for k in tl.static_range(COUNT):
        sums = sums + (tl.sum(terms[k], 1) if LATE else terms[k],)
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
    """Writes the jump to slot 0, the last point in rows without one; returns which rows jumped, and jump sizes."""
    # Sums over threads cost most: chunks are summed first.
    sums = tl.zeros([rows.shape[0], CHUNK], points.dtype.element_ty)
    peaks = tl.zeros([rows.shape[0], CHUNK], points.dtype.element_ty)
    for start in range(0, WIDTH, CHUNK):
        position = points + rows[:, None] * WIDTH + (start + tl.arange(0, CHUNK))[None, :]
        last = tl.load(position + (MEMORY + 1) * slot)
        jump, after = last, last
        for back in tl.static_range(MEMORY):
            before = tl.load(position + (MEMORY - back) * slot)
            jump -= weights[back].to(last.dtype)[:, None] * (after - before)
            after = before
        sums, peaks = sums + tl.abs(jump), tl.maximum(peaks, tl.abs(jump))
        tl.store(position, tl.where(jumps[:, None], jump, last))
    sound = tl.sum(sums, 1) < float("inf")
    if tl.max((jumps & (sound == 0)).to(tl.int32), 0) > 0:
        tl.debug_barrier()
        for start in range(0, WIDTH, CHUNK):
            position = points + rows[:, None] * WIDTH + (start + tl.arange(0, CHUNK))[None, :]
            last = tl.load(position + (MEMORY + 1) * slot)
            tl.store(position, last, mask=(sound == 0)[:, None])
    return jumps & sound, tl.max(peaks, 1)


@triton.jit
def extrapolate(
    points, slot, rows, running, rest, l1, previous, n, eps,
    worth, patience, ridge, MEMORY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Extrapolates to slot 0 where that may pay off; returns rows that jumped, the residual to beat, and sizes."""
    rate = tl.minimum(l1 / previous, 1.0)
    target = l1 * tl.exp2(worth * tl.log2(rate))
    slow = l1 * tl.exp2(patience * tl.log2(rate))
    tl.debug_barrier()
    sums = gram(points, slot, rows, l1, n, MEMORY, WIDTH, CHUNK)
    jumps = running & (rest <= 0) & (slow > 8 * eps * sums[MEMORY * (MEMORY + 3) // 2])
    weights = weigh(sums, ridge, MEMORY)
    jumped, largest = combine(points, slot, rows, weights, jumps, MEMORY, WIDTH, CHUNK)
    tl.debug_barrier()
    return jumped, target, largest


@triton.jit
def judge_jump(jumped, l1, target, rest, failures):
    """Judges a jump by its residual; returns failed rows, cycles to come without a jump, and failures in a row."""
    failed = jumped & ((l1 <= target) == 0)
    failures = tl.where(jumped, tl.where(failed, failures + 1, 0), failures)
    rest = tl.where(failed, (1 << tl.minimum(tl.maximum(failures - 1, 0), 3)) - 1, rest)
    return failed, rest, failures


# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"


UNSPECIALISED = ("batch", "limit", "max_steps")  # arguments whose values are not compiled in


@triton.jit
def start_rows(G, D, X0, at, there, like, STARTS: tl.constexpr, KIND: tl.constexpr,
               SCALED: tl.constexpr):  # fmt: skip
    """Loads v, the slopes d of an adjoint and the start; with `SCALED` divides rows of g by their size."""
    v = tl.load(G + at, mask=there, other=0.0).to(like)
    d, scale = v, tl.max(tl.abs(v), 1)
    if KIND == LINEAR:
        d = tl.load(D + at, mask=there, other=0.0).to(like)
    if SCALED:
        scale = tl.where(scale == 0, 1.0, scale)
        v = d * v / scale[:, None]
    x = tl.zeros(v.shape, like)
    if STARTS:
        x = tl.load(X0 + at, mask=there, other=0.0).to(like)
    return v, d, scale, x


@triton.jit
def matrix_product(x, a, low, total, SPLIT: tl.constexpr):
    """Adds to `total` the product with A, in float32 with its two parts."""
    return split_product(x, a, low, total) if SPLIT else product(x, a, total, "ieee")


@triton.jit
def image(x, a, low, v, d, real, SLOPE: tl.constexpr, KIND: tl.constexpr, SPLIT: tl.constexpr):
    """Evaluates the map; states that are padding stay zero."""
    if KIND == LINEAR:
        y = d * matrix_product(x, a, low, tl.zeros(v.shape, v.dtype), SPLIT) + v
    else:
        y = activate(matrix_product(x, a, low, v, SPLIT), SLOPE, KIND)
    if KIND == SIGMOID:
        y = tl.where(real[None, :], y, 0.0)
    return y


@triton.jit(do_not_specialize=UNSPECIALISED)
def solve_resident(
    FLAG, A, V, D, X0, X, SLOPES, STATUS, STEPS, POINTS, TRACE,
    batch, n, row, column, atol, rtol, eps, limit, max_steps, worth, patience, ridge,
    KIND: tl.constexpr, SLOPE: tl.constexpr, RULE: tl.constexpr, MEMORY: tl.constexpr, STARTS: tl.constexpr,
    SAVES: tl.constexpr, SCALED: tl.constexpr, TRACED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Solves ``x = phi(Ax + v)``, or ``y = d (Ay) + v``, for the rows of one block; see `gpu.launch`."""
    rows, states = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside, real, slot = rows < batch, states < n, tl.num_programs(0).to(tl.int64) * BLOCK * WIDTH
    at, there = rows[:, None] * n + states[None, :], inside[:, None] & real[None, :]
    like: tl.constexpr = POINTS.dtype.element_ty
    entries, known = states[None, :] * row + states[:, None] * column, real[None, :] & real[:, None]
    a = tl.load(A + entries, mask=known, other=0.0)  # a[k, i] = A_ik
    a, low = split(a) if SPLIT else (a, a)
    v, d, scale, x = start_rows(V, D, X0, at, there, like, STARTS, KIND, SCALED)
    points = POINTS + rows[:, None] * WIDTH + states[None, :]
    status, steps, since = tl.where(inside, 0, 1), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    rest, failures, jumped = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), rows < 0
    first, previous, target = tl.zeros([BLOCK], like), tl.zeros([BLOCK], like), tl.zeros([BLOCK], like)
    least = tl.full([BLOCK], float("inf"), like)
    index, phase, left = tl.zeros([], tl.int32), tl.zeros([], tl.int32), 1
    # Before every step x are the iterates, `index` evaluations have been made, and `left` rows are running. In the
    # phases p = 1 to MEMORY of a cycle, slots 0 to p hold its points; in phase MEMORY + 1, x is a jump where there
    # is one.
    while left > 0:
        y = image(x, a, low, v, d, real, SLOPE, KIND, SPLIT)
        residual, size, l1 = measure(x, y, FUSED)
        outcome, first, least, since, rest, jumped = judge(
            residual, size, l1, status, first, least, since, rest, jumped, index, rows, inside,
            POINTS + (MEMORY + 2) * slot, TRACE, batch, n, atol, rtol, eps, limit, max_steps, RULE, MEMORY, TRACED,
        )  # fmt: skip
        newly, index = outcome != 0, index + 1
        if tl.max(newly.to(tl.int32), 0) > 0:
            status, steps = tl.where(newly, outcome, status), tl.where(newly, index, steps)
            value = tl.where(((outcome == CONVERGED) & (RULE != POINT))[:, None], y, x)
            tl.store(X + at, value * scale[:, None] if SCALED else value, mask=newly[:, None] & there)
            if SAVES:
                tl.store(SLOPES + at, slope_at(y, SLOPE, KIND), mask=newly[:, None] & there)
            left = tl.sum((status == 0).to(tl.int32), 0)
        if MEMORY == 0:
            x = y
        elif phase > MEMORY:
            failed, rest, failures = judge_jump(jumped, l1, target, rest, failures)
            x, phase = tl.where(failed[:, None], tl.load(points + (MEMORY + 1) * slot), y), phase * 0
        else:
            if phase == 0:
                tl.store(points, x)
            tl.store(points + (phase + 1) * slot, y)
            x = y
            if phase == MEMORY - 1:
                previous = l1
            if phase == MEMORY:
                jumped, target, _ = extrapolate(
                    POINTS, slot, rows, status == 0, rest, l1, previous, n, eps, worth, patience, ridge,
                    MEMORY, WIDTH, CHUNK,
                )  # fmt: skip
                x, rest = tl.load(points), rest - 1
            phase += 1
    close(STATUS, STEPS, FLAG, rows, inside, status, steps)


# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"


@triton.jit
def begin(V, X0, points, rows, inside, n, STARTS: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr,
          BLOCK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Writes the start to the first slot; returns its size and that of the rows of g."""
    like: tl.constexpr = points.dtype.element_ty
    scale, peak = tl.zeros([BLOCK], like), tl.zeros([BLOCK], like)
    for tile in range(0, WIDTH, TILE):
        states = tile + tl.arange(0, TILE)
        at, there = rows[:, None] * n + states[None, :], inside[:, None] & (states < n)[None, :]
        x = tl.zeros([BLOCK, TILE], like)
        if STARTS:
            x = tl.load(X0 + at, mask=there, other=0.0).to(like)
            peak = tl.maximum(peak, tl.max(tl.abs(x), 1))
        tl.store(points + rows[:, None] * WIDTH + states[None, :], x)
        if SCALED:
            scale = tl.maximum(scale, tl.max(tl.abs(tl.load(V + at, mask=there, other=0.0).to(like)), 1))
    tl.debug_barrier()
    return peak, tl.where(scale == 0, 1.0, scale)


@triton.jit
def units_of(size):
    """Returns a power of two beyond `size` and its inverse, both exact."""
    exponent = size.to(tl.int32, bitcast=True) >> 23
    return ((exponent + 1) << 23).to(tl.float32, bitcast=True), ((253 - exponent) << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit(do_not_specialize=("row", "column"))
def split_float16(A, HIGH, LOW, UNITS, n, row, column, WIDTH: tl.constexpr, POWER: tl.constexpr):
    """Writes a row of A, in units of a power of two, as float16 numbers plus 2^-11 times such numbers."""
    line, inner = tl.program_id(0).to(tl.int64), tl.arange(0, POWER)
    a = tl.load(A + line * row + inner * column, mask=(line < n) & (inner < n), other=0.0)
    unit, inverse = units_of(tl.max(tl.abs(a), 0))
    ratio = a * inverse
    high = ratio.to(tl.float16)
    tl.store(HIGH + line * WIDTH + inner, high, mask=inner < WIDTH)
    tl.store(LOW + line * WIDTH + inner, ((ratio - high.to(tl.float32)) * 2048).to(tl.float16), mask=inner < WIDTH)
    tl.store(UNITS + line, unit)


@triton.jit
def split_float16_product(HIGH, LOW, UNITS, x, rows, peak, states, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                  TILE: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Returns some columns of the product of A with the rows at `x`, of size `peak`, by three float16 products."""
    total = tl.zeros([BLOCK, TILE], tl.float32)
    unit, inverse = units_of(peak)
    for start in range(0, WIDTH, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        ratio = tl.load(x + rows[:, None] * WIDTH + inner[None, :]) * inverse[:, None]
        high = ratio.to(tl.float16)
        low = ((ratio - high.to(tl.float32)) * 2048).to(tl.float16)
        entries = states[None, :] * WIDTH + inner[:, None]
        a_high, a_low = tl.load(HIGH + entries), tl.load(LOW + entries)
        # Tensor cores cut sums off instead of rounding them: long sums are added up outside.
        small = tl.dot(low, a_high, tl.dot(high, a_low)) * (1 / 2048)
        total += tl.dot(high, a_high, small)
    return total * unit[:, None] * tl.load(UNITS + states)[None, :]


@triton.jit
def tile_product(A, x, rows, states, n, row, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
                 DEPTH: tl.constexpr):  # fmt: skip
    """Returns some columns of the product of A with the rows at `x`, in the dtype of A."""
    total = tl.zeros([BLOCK, TILE], x.dtype.element_ty)
    for start in range(0, WIDTH, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        block = tl.load(x + rows[:, None] * WIDTH + inner[None, :])
        a = tl.load(
            A + states[None, :] * row + inner[:, None] * column,
            mask=(states < n)[None, :] & (inner < n)[:, None],
            other=0.0,
        )  # a[k, i] = A_ik
        total = product(block, a, total, "ieee")
    return total


@triton.jit
def evaluate(A, LOW, UNITS, V, D, x, y, rows, inside, peak, scale, n, row, column, KIND: tl.constexpr,
             SLOPE: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
             TILE: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Evaluates the map from the point at `x` to the one at `y`; measures residual and y.

    Without a `DEPTH` the product is known: A points to it.
    """
    like: tl.constexpr = x.dtype.element_ty
    residual, l1, size = tl.zeros([BLOCK], like), tl.zeros([BLOCK], like), tl.zeros([BLOCK], like)
    for tile in range(0, WIDTH, TILE):
        states = tile + tl.arange(0, TILE)
        at, there = rows[:, None] * n + states[None, :], inside[:, None] & (states < n)[None, :]
        if DEPTH == 0:
            total = tl.load(A + rows[:, None] * WIDTH + states[None, :])
        elif SPLIT:
            total = split_float16_product(A, LOW, UNITS, x, rows, peak, states, WIDTH, BLOCK, TILE, DEPTH)
        else:
            total = tile_product(A, x, rows, states, n, row, column, WIDTH, BLOCK, TILE, DEPTH)
        v = tl.load(V + at, mask=there, other=0.0).to(like)
        if KIND == LINEAR:
            d = tl.load(D + at, mask=there, other=0.0).to(like)
            image = d * (total + v / scale[:, None]) if SCALED else d * total + v
        else:
            image = activate(total + v, SLOPE, KIND)
        if KIND == SIGMOID:
            image = tl.where((states < n)[None, :], image, 0.0)
        old = tl.load(x + rows[:, None] * WIDTH + states[None, :])
        difference = tl.abs(image - old)
        residual, l1 = tl.maximum(residual, tl.max(difference, 1)), l1 + tl.sum(difference, 1)
        size = tl.maximum(size, tl.max(tl.abs(image), 1))
        tl.store(y + rows[:, None] * WIDTH + states[None, :], image)
    tl.debug_barrier()
    return residual, l1, size


@triton.jit
def write(X, SLOPES, x, y, rows, outcome, scale, n, KIND: tl.constexpr, SLOPE: tl.constexpr, RULE: tl.constexpr,
          SAVES: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Writes rows that have finished: the point, its image where it was accepted, and the slopes at the image."""
    for tile in range(0, WIDTH, TILE):
        states = tile + tl.arange(0, TILE)
        at, there = rows[:, None] * n + states[None, :], (outcome != 0)[:, None] & (states < n)[None, :]
        position = rows[:, None] * WIDTH + states[None, :]
        image = tl.load(y + position, mask=there, other=0.0)
        accepted = (outcome == CONVERGED) & (RULE != POINT)
        value = tl.where(accepted[:, None], image, tl.load(x + position, mask=there, other=0.0))
        tl.store(X + at, value * scale[:, None] if SCALED else value, mask=there)
        if SAVES:
            tl.store(SLOPES + at, slope_at(image, SLOPE, KIND), mask=there)


@triton.jit
def choose(points, slot, rows, failed, MEMORY: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Writes the iterate after a jump to slot 0: the last plain point where it failed, its image elsewhere."""
    for tile in range(0, WIDTH, TILE):
        position = points + rows[:, None] * WIDTH + (tile + tl.arange(0, TILE))[None, :]
        safe, image = tl.load(position + (MEMORY + 1) * slot), tl.load(position + slot)
        tl.store(position, tl.where(failed[:, None], safe, image))
    tl.debug_barrier()


@triton.jit
def turn(
    A, LOW, UNITS, V, D, X, SLOPES, POINTS, MINIMA, TRACE, slot, rows, inside, scale, index, phase, origin, state,
    batch, n, row, column, atol, rtol, eps, limit, max_steps, worth, patience, ridge,
    KIND: tl.constexpr, SLOPE: tl.constexpr, RULE: tl.constexpr, MEMORY: tl.constexpr, SAVES: tl.constexpr,
    SCALED: tl.constexpr, TRACED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Takes a step of all rows whose points are in the scratch buffer.

    Before it the iterates, with largest entries `peak`, are at slot `origin`, and `index` evaluations have been
    made; phases are those of `solve_resident`. Returns the next `state`, `phase` and `origin`.
    """
    status, steps, rest, failures, jumped, since, first, previous, target, least, safe, peak = state
    goal = 1 - origin if MEMORY == 0 else tl.where(phase > MEMORY, 1, origin + 1)
    x, y = POINTS + origin * slot, POINTS + goal * slot
    residual, l1, size = evaluate(
        A, LOW, UNITS, V, D, x, y, rows, inside, peak, scale, n, row, column, KIND, SLOPE, SCALED, WIDTH, BLOCK,
        TILE, DEPTH, SPLIT,
    )  # fmt: skip
    outcome, first, least, since, rest, jumped = judge(
        residual, size, l1, status, first, least, since, rest, jumped, index, rows, inside, MINIMA, TRACE, batch,
        n, atol, rtol, eps, limit, max_steps, RULE, MEMORY, TRACED,
    )  # fmt: skip
    newly = outcome != 0
    if tl.max(newly.to(tl.int32), 0) > 0:
        status, steps = tl.where(newly, outcome, status), tl.where(newly, index + 1, steps)
        write(X, SLOPES, x, y, rows, outcome, scale, n, KIND, SLOPE, RULE, SAVES, SCALED, WIDTH, TILE)
    if MEMORY == 0:
        origin, peak = goal, size
    elif phase > MEMORY:
        failed, rest, failures = judge_jump(jumped, l1, target, rest, failures)
        choose(POINTS, slot, rows, failed, MEMORY, WIDTH, TILE)
        origin, phase, peak = origin * 0, phase * 0, tl.where(failed, safe, size)
    else:
        origin, phase, peak, safe = goal, phase + 1, size, size
        if phase == MEMORY:
            previous = l1
        if phase > MEMORY:
            jumped, target, largest = extrapolate(
                POINTS, slot, rows, status == 0, rest, l1, previous, n, eps, worth, patience, ridge, MEMORY, WIDTH,
                CHUNK,
            )  # fmt: skip
            origin, rest, peak = origin * 0, rest - 1, tl.where(jumped, largest, size)
    following = (status, steps, rest, failures, jumped, since, first, previous, target, least, safe, peak)
    return following, phase, origin


@triton.jit(do_not_specialize=UNSPECIALISED)
def solve_streamed(
    FLAG, A, LOW, UNITS, V, D, X0, X, SLOPES, STATUS, STEPS, POINTS, TRACE,
    batch, n, row, column, atol, rtol, eps, limit, max_steps, worth, patience, ridge,
    KIND: tl.constexpr, SLOPE: tl.constexpr, RULE: tl.constexpr, MEMORY: tl.constexpr, STARTS: tl.constexpr,
    SAVES: tl.constexpr, SCALED: tl.constexpr, TRACED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Solves ``x = phi(Ax + v)``, or ``y = d (Ay) + v``, for the rows of one block; see `gpu.launch`."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = rows < batch, tl.num_programs(0).to(tl.int64) * BLOCK * WIDTH
    like: tl.constexpr = POINTS.dtype.element_ty
    peak, scale = begin(V, X0, POINTS, rows, inside, n, STARTS, SCALED, WIDTH, BLOCK, TILE)
    status, steps = tl.where(inside, 0, 1), tl.zeros([BLOCK], tl.int32)
    rest, failures, jumped = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), rows < 0
    since = tl.zeros([BLOCK], tl.int32)
    first, previous, target = tl.zeros([BLOCK], like), tl.zeros([BLOCK], like), tl.zeros([BLOCK], like)
    least = tl.full([BLOCK], float("inf"), like)
    state = (status, steps, rest, failures, jumped, since, first, previous, target, least, peak, peak)
    index, phase, origin, left = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32), 1
    while left > 0:
        state, phase, origin = turn(
            A, LOW, UNITS, V, D, X, SLOPES, POINTS, POINTS + (MEMORY + 2) * slot, TRACE, slot, rows, inside, scale,
            index, phase, origin, state, batch, n, row, column, atol, rtol, eps, limit, max_steps, worth, patience,
            ridge, KIND, SLOPE, RULE, MEMORY, SAVES, SCALED, TRACED, WIDTH, BLOCK, TILE, DEPTH, CHUNK, SPLIT,
        )  # fmt: skip
        index, left = index + 1, tl.sum((state[0] == 0).to(tl.int32), 0)
    close(STATUS, STEPS, FLAG, rows, inside, state[0], state[1])


@triton.jit
def split_rows(HIGH, LOW, x, rows, peak, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Writes rows at `x`, of size `peak`, in units of powers of two as float16 numbers and 2^-11 times such."""
    inverse = units_of(peak)[1]
    for tile in range(0, WIDTH, TILE):
        position = rows[:, None] * WIDTH + (tile + tl.arange(0, TILE))[None, :]
        ratio = tl.load(x + position) * inverse[:, None]
        high = ratio.to(tl.float16)
        tl.store(HIGH + position, high)
        tl.store(LOW + position, ((ratio - high.to(tl.float32)) * 2048).to(tl.float16))


@triton.jit(do_not_specialize=("height", "batch"))
def begin_wide(
    V, X0, STATUS, POINTS, STATE, COUNTS, HIGH, LOW, RUNNING, height, batch, n,
    STARTS: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Writes start and state of a block before the first step."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < batch
    peak, scale = begin(V, X0, POINTS, rows, inside, n, STARTS, SCALED, WIDTH, BLOCK, TILE)
    for k in tl.static_range(3):
        tl.store(STATE + k * height + rows, peak * 0)
    tl.store(STATE + 3 * height + rows, peak * 0 + float("inf"))
    tl.store(STATE + 4 * height + rows, peak)
    tl.store(STATE + 5 * height + rows, peak)
    tl.store(STATE + 6 * height + rows, scale)
    for k in tl.static_range(4):
        tl.store(COUNTS + k * height + rows, tl.zeros([BLOCK], tl.int32))
    tl.store(STATUS + rows, tl.zeros([BLOCK], tl.int8), mask=inside)
    if SPLIT:
        split_rows(HIGH, LOW, POINTS, rows, peak, WIDTH, TILE)
    if tl.program_id(0) == 0:
        tl.store(RUNNING, 1)


@triton.jit(do_not_specialize=("index",))
def wide_product(
    RUNNING, HIGH, LOW, A_HIGH, A_LOW, UNITS, PEAK, Z, index,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies a block of rows with some rows of A, both split by powers of two, if a sample needs the step."""
    if tl.load(RUNNING + index) == 0:
        return
    # `GROUP` blocks of rows go through all tiles of A together: what they read stays in the cache.
    TILES: tl.constexpr = WIDTH // TILE
    program, blocks = tl.program_id(0), tl.num_programs(0) // TILES
    lead = program // (GROUP * TILES) * GROUP
    height = tl.minimum(blocks - lead, GROUP)
    inner = program % (GROUP * TILES)
    rows = (lead + inner % height).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    states = (inner // height).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros([BLOCK, TILE], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        mine, entries = rows[:, None] * WIDTH + depth[None, :], states[None, :] * WIDTH + depth[:, None]
        high, low, a_high, a_low = (
            tl.load(HIGH + mine), tl.load(LOW + mine), tl.load(A_HIGH + entries), tl.load(A_LOW + entries)
        )  # fmt: skip
        small = tl.dot(low, a_high, tl.dot(high, a_low)) * (1 / 2048)
        total += tl.dot(high, a_high, small)
    unit = units_of(tl.load(PEAK + rows))[0]
    tl.store(Z + rows[:, None] * WIDTH + states[None, :], total * unit[:, None] * tl.load(UNITS + states)[None, :])


@triton.jit(do_not_specialize=(*UNSPECIALISED, "index", "phase", "origin", "height"))
def advance(
    FLAG, Z, V, D, X, SLOPES, STATUS, STEPS, POINTS, TRACE, STATE, COUNTS, HIGH, LOW, RUNNING,
    index, phase, origin, height, batch, n, atol, rtol, eps, limit, max_steps, worth, patience, ridge,
    KIND: tl.constexpr, SLOPE: tl.constexpr, RULE: tl.constexpr, MEMORY: tl.constexpr, SAVES: tl.constexpr,
    SCALED: tl.constexpr, TRACED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Takes a step of a block whose product with A is at Z."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = rows < batch, height.to(tl.int64) * WIDTH
    status = tl.load(STATUS + rows, mask=inside, other=1).to(tl.int32)
    if tl.min(status, 0) > 0:
        return
    STATE += rows
    COUNTS += rows
    rest, failures = tl.load(COUNTS), tl.load(COUNTS + height)
    jumped, since = tl.load(COUNTS + 2 * height) > 0, tl.load(COUNTS + 3 * height)
    first, previous, target = tl.load(STATE), tl.load(STATE + height), tl.load(STATE + 2 * height)
    least, safe, peak = tl.load(STATE + 3 * height), tl.load(STATE + 4 * height), tl.load(STATE + 5 * height)
    scale = tl.load(STATE + 6 * height)
    before = (
        status, tl.zeros([BLOCK], tl.int32), rest, failures, jumped, since, first, previous, target, least, safe,
        peak,
    )  # fmt: skip
    after, phase, origin = turn(
        Z, Z, Z, V, D, X, SLOPES, POINTS, POINTS + (MEMORY + 2) * slot, TRACE, slot, rows, inside, scale, index,
        phase, origin, before, batch, n, 0, 0, atol, rtol, eps, limit, max_steps, worth, patience, ridge, KIND,
        SLOPE, RULE, MEMORY, SAVES, SCALED, TRACED, WIDTH, BLOCK, TILE, 0, CHUNK, SPLIT,
    )  # fmt: skip
    for k in tl.static_range(4):
        tl.store(COUNTS + k * height, after[2 + k].to(tl.int32))
    for k in tl.static_range(6):
        tl.store(STATE + k * height, after[6 + k])
    newly = inside & (status == 0) & (after[0] != 0)
    tl.store(STATUS + rows, after[0].to(tl.int8), mask=newly)
    tl.store(STEPS + rows, after[1], mask=newly)
    if tl.max(tl.where(newly, after[0], 0), 0) >= MAX_STEPS:
        tl.store(FLAG, 1)
    if tl.min(after[0], 0) == 0:
        tl.store(RUNNING + index + 1, 1)
        if SPLIT:
            split_rows(HIGH, LOW, POINTS + origin * slot, rows, after[11], WIDTH, TILE)
