"""The whole solve of a block of samples in one program, with A streamed in tiles: any number of states.

All points, the iterate among them, lie in the scratch buffer of `gpu_steps`; A comes tile by tile from the cache
of the device, as often as there are blocks. Plain steps use two slots of the buffer in turn.

In float32 A is split beforehand, by a small kernel, into two matrices of float16 numbers, and so are the states
whenever they are read: ``x a = h a_h + 2^-11 (l a_h + h a_l)`` to 22 bits, with rows of both in units of powers of
two, so that nothing overflows. Three such products take half the time of three in TF32, and A need not be split
again in every block.
"""
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"

from wellposed.errors import require
from wellposed.kernels.gpu_elementary import LINEAR, SIGMOID, activate, product, slope_at
from wellposed.kernels.gpu_resident import UNSPECIALISED
from wellposed.kernels.gpu_steps import close, extrapolate, judge, look_back

triton = require("triton")
tl = require("triton.language")


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
    part = a * inverse
    high = part.to(tl.float16)
    tl.store(HIGH + line * WIDTH + inner, high, mask=inner < WIDTH)
    tl.store(LOW + line * WIDTH + inner, ((part - high.to(tl.float32)) * 2048).to(tl.float16), mask=inner < WIDTH)
    tl.store(UNITS + line, unit)


@triton.jit
def split_float16_product(HIGH, LOW, UNITS, x, rows, peak, states, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                  TILE: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Returns some columns of the product of A with the rows at `x`, of size `peak`, by three float16 products."""
    total = tl.zeros([BLOCK, TILE], tl.float32)
    unit, inverse = units_of(peak)
    for start in range(0, WIDTH, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        part = tl.load(x + rows[:, None] * WIDTH + inner[None, :]) * inverse[:, None]
        high = part.to(tl.float16)
        low = ((part - high.to(tl.float32)) * 2048).to(tl.float16)
        place = states[None, :] * WIDTH + inner[:, None]
        a_high, a_low = tl.load(HIGH + place), tl.load(LOW + place)
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
        part = tl.load(x + rows[:, None] * WIDTH + inner[None, :])
        a = tl.load(
            A + states[None, :] * row + inner[:, None] * column,
            mask=(states < n)[None, :] & (inner < n)[:, None],
            other=0.0,
        )  # a[k, i] = A_ik
        total = product(part, a, total, "ieee")
    return total


@triton.jit
def evaluate(A, LOW, UNITS, V, D, x, y, rows, inside, peak, scale, n, row, column, KIND: tl.constexpr,
             SLOPE: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
             TILE: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Evaluates the map from the point at `x` to the one at `y`; measures residual and y."""
    like: tl.constexpr = x.dtype.element_ty
    residual, l1, size = tl.zeros([BLOCK], like), tl.zeros([BLOCK], like), tl.zeros([BLOCK], like)
    for tile in range(0, WIDTH, TILE):
        states = tile + tl.arange(0, TILE)
        at, there = rows[:, None] * n + states[None, :], inside[:, None] & (states < n)[None, :]
        if SPLIT:
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
def write(X, SLOPES, x, y, rows, newly, scale, n, KIND: tl.constexpr, SLOPE: tl.constexpr, SAVES: tl.constexpr,
          SCALED: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Writes rows that have finished: the point, and the slopes at its image."""
    for tile in range(0, WIDTH, TILE):
        states = tile + tl.arange(0, TILE)
        at, there = rows[:, None] * n + states[None, :], newly[:, None] & (states < n)[None, :]
        place = rows[:, None] * WIDTH + states[None, :]
        value = tl.load(x + place, mask=there, other=0.0)
        tl.store(X + at, value * scale[:, None] if SCALED else value, mask=there)
        if SAVES:
            image = tl.load(y + place, mask=there, other=0.0)
            tl.store(SLOPES + at, slope_at(image, SLOPE, KIND), mask=there)


@triton.jit
def choose(points, slot, rows, failed, MEMORY: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Writes where to go on from after a jump: the last plain point where it failed, its image elsewhere."""
    for tile in range(0, WIDTH, TILE):
        place = points + rows[:, None] * WIDTH + (tile + tl.arange(0, TILE))[None, :]
        safe, image = tl.load(place + (MEMORY + 1) * slot), tl.load(place + slot)
        tl.store(place, tl.where(failed[:, None], safe, image))
    tl.debug_barrier()


@triton.jit(do_not_specialize=UNSPECIALISED)
def solve_streamed(
    FLAG, A, LOW, UNITS, V, D, X0, X, SLOPES, STATUS, STEPS, POINTS, TRACE,
    batch, n, row, column, atol, rtol, eps, limit, max_steps, worth, patience, ridge,
    KIND: tl.constexpr, SLOPE: tl.constexpr, RULE: tl.constexpr, MEMORY: tl.constexpr, STARTS: tl.constexpr,
    SAVES: tl.constexpr, SCALED: tl.constexpr, TRACED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Solves ``x = phi(Ax + v)``, or ``y = d (Ay) + v``, for the rows of one block; see `gpu_launch`."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = rows < batch, tl.num_programs(0).to(tl.int64) * BLOCK * WIDTH
    like: tl.constexpr = POINTS.dtype.element_ty
    MINIMA = POINTS + (MEMORY + 2) * slot
    peak, scale = begin(V, X0, POINTS, rows, inside, n, STARTS, SCALED, WIDTH, BLOCK, TILE)
    status, steps = tl.where(inside, 0, 1), tl.zeros([BLOCK], tl.int32)
    rest, failures, jumped = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), rows < 0
    first, previous, target = tl.zeros([BLOCK], like), tl.zeros([BLOCK], like), tl.zeros([BLOCK], like)
    least, safe = tl.full([BLOCK], float("inf"), like), peak
    index, phase, origin, left = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32), 1
    while left > 0:
        goal = 1 - origin if MEMORY == 0 else tl.where(phase > MEMORY, 1, origin + 1)
        x, y = POINTS + origin * slot, POINTS + goal * slot
        residual, l1, size = evaluate(
            A, LOW, UNITS, V, D, x, y, rows, inside, peak, scale, n, row, column, KIND, SLOPE, SCALED, WIDTH,
            BLOCK, TILE, DEPTH, SPLIT,
        )  # fmt: skip
        found, first, least = judge(
            residual, size, l1, status, first, least, index, rows, inside, MINIMA, TRACE, batch, n, atol, rtol,
            eps, limit, max_steps, RULE, TRACED,
        )  # fmt: skip
        newly, index = found != 0, index + 1
        if tl.max(newly.to(tl.int32), 0) > 0:
            status, steps = tl.where(newly, found, status), tl.where(newly, index, steps)
            write(X, SLOPES, x, y, rows, newly, scale, n, KIND, SLOPE, SAVES, SCALED, WIDTH, TILE)
            left = tl.sum((status == 0).to(tl.int32), 0)
        if MEMORY == 0:
            origin, peak = goal, size
        elif phase > MEMORY:
            failed, rest, failures = look_back(jumped, l1, target, rest, failures)
            choose(POINTS, slot, rows, failed, MEMORY, WIDTH, TILE)
            origin, phase, peak = origin * 0, phase * 0, tl.where(failed, safe, size)
        else:
            origin, phase, peak, safe = goal, phase + 1, size, size
            if phase == MEMORY:
                previous = l1
            if phase > MEMORY:
                jumped, target, largest = extrapolate(
                    POINTS, slot, rows, status == 0, rest, l1, previous, n, eps, worth, patience, ridge,
                    MEMORY, WIDTH, CHUNK,
                )  # fmt: skip
                origin, rest, peak = origin * 0, rest - 1, tl.where(jumped, largest, size)
    close(STATUS, STEPS, FLAG, rows, inside, status, steps)
