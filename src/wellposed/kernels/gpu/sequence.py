"""The loops over time of a recurrent implicit model in Triton: a whole sequence in one launch, there and back.

Elements lie time after time, the longest sequences first (the layout of a packed sequence), one row an element. A
block of sequences is one program: hidden states, equilibria and what goes back in time do not leave it. Sequences
that have ended, or have not begun, keep what they have. `walk` and `unwind` are the loops, forward and backward.

At every time `solve` brings a block to its equilibria on the chip. Rows of a block are samples, columns are
states; both are padded to sizes that the units for products take, and what is padded stays zero. A row that has
finished stands still while others go on, so that after the last step every row holds the point that was accepted
and its image.
"""

from wellposed.equilibrium.loop import PERIOD as LOOK
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.gpu.solve import (
    CONVERGED,
    COUNTED,
    DIVERGED,
    LINEAR,
    MAX_STEPS,
    NONFINITE,
    SETTLED,
    SIGMOID,
    STAGNATED,
    STEPS_DONE,
    TOLERANCE,
    activate,
    measure,
    power_of_two,
    slope_at,
    split,
    split_product,
)

# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"


triton = require("triton")
tl = require("triton.language")

RUNNING = tl.constexpr(int(Status.RUNNING))
PERIOD = tl.constexpr(LOOK)
EPS = tl.constexpr(2.0**-23)


@triton.jit
def multiply(x, matrix, total):
    """Adds ``x matrix`` to `total`."""
    high, low = split(matrix)
    return split_product(x, high, low, total)


@triton.jit
def image(x, v, d, high, low, inside, slope, KIND: tl.constexpr):
    """Evaluates ``phi(xa + v)``, or ``d (xa) + v`` of the linear kind, for a matrix in two parts."""
    if KIND == LINEAR:
        y = d * split_product(x, high, low, tl.zeros_like(v)) + v
    else:
        y = activate(split_product(x, high, low, v), slope, KIND)
        if KIND == SIGMOID:
            y = tl.where(inside, y, 0.0)
    return y


@triton.jit
def judge(
    residual, size, l1, first, still, now, limit, max_steps, atol,
    rtol, noise, RULE: tl.constexpr,
):  # fmt: skip
    """Returns statuses after step number `now`, counted from one."""
    if RULE == TOLERANCE:
        accepted = residual <= tl.maximum(atol, rtol * size)
    elif RULE == SETTLED:
        accepted = (residual == 0) | (now > limit)
    else:
        accepted = (residual != residual) | (now > limit)
    finite = l1 < float("inf")
    if RULE != COUNTED:
        found = tl.where(accepted, CONVERGED, RUNNING)
        stuck = (still >= tl.maximum(PERIOD, now // 4)) & (residual <= noise * size)
        found = tl.where((found == RUNNING) & stuck, STAGNATED, found)
    else:
        found = tl.where(accepted, STEPS_DONE, RUNNING)
    ending = tl.where(residual > 1000 * first, DIVERGED, MAX_STEPS)
    found = tl.where((found == RUNNING) & (now >= max_steps), ending, found)
    return tl.where(finite, found, NONFINITE)


@triton.jit
def add(a, b, c, d, e, f, g, h, i, j, a1, b1, c1, d1, e1, f1, g1, h1, i1, j1):
    """Adds ten values to ten."""
    return a + a1, b + b1, c + c1, d + d1, e + e1, f + f1, g + g1, h + h1, i + i1, j + j1


@triton.jit
def gram(y, x, x1, x2, x3, l1, FUSED: tl.constexpr):
    """Returns products of three differences of residuals with each other and with the latest one, and |y|_1.

    Residuals are divided by a power of two near their norm, or squares would leave the range of float32.
    """
    unit = power_of_two(l1)[:, None]
    r, r1, r2, r3 = (y - x) * unit, (x - x1) * unit, (x1 - x2) * unit, (x2 - x3) * unit
    a, b, c = r - r1, r1 - r2, r2 - r3
    terms = (a * a, b * b, c * c, a * b, a * c, b * c, a * r, b * r, c * r, tl.abs(y))
    if FUSED:
        sums = tl.reduce(terms, 1, add)
    else:
        sums = ()
        for term in tl.static_range(10):
            sums = sums + (tl.sum(terms[term], 1),)  # noqa: RUF005
    return sums


@triton.jit
def weights(aa, bb, cc, ab, ac, bc, ar, br, cr, ridge):
    """Solves for the combination of the differences that comes next to the latest residual."""
    floor = ridge * (aa + bb + cc) + 1e-37
    aa += floor
    pb, pc = ab / aa, ac / aa
    bb = tl.maximum(bb + floor - pb * ab, floor)
    bc -= pb * ac
    br -= pb * ar
    pd = bc / bb
    cc = tl.maximum(cc + floor - pc * ac - pd * bc, floor)
    third = (cr - pc * ar - pd * br) / cc
    second = (br - bc * third) / bb
    return (ar - ab * second - ac * third) / aa, second, third


@triton.jit
def jump(y, x, x1, x2, x3, l1, inside, ridge, FUSED: tl.constexpr):
    """Extrapolates from five points in a row, `x3` to `y`; tells also where that is sound, and |y|_1."""
    aa, bb, cc, ab, ac, bc, ar, br, cr, size = gram(y, x, x1, x2, x3, l1, FUSED)
    first, second, third = weights(aa, bb, cc, ab, ac, bc, ar, br, cr, ridge)
    found = y - first[:, None] * (y - x) - second[:, None] * (x - x1) - third[:, None] * (x1 - x2)
    sound = tl.abs(first) + tl.abs(second) + tl.abs(third) < 1e30
    return tl.where(inside, found, 0.0), sound, size


@triton.jit
def solve(
    x, v, d, high, low, inside, status, slope, limit, max_steps, atol, rtol, noise, worth, patience, ridge,
    KIND: tl.constexpr, RULE: tl.constexpr, ANDERSON: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Iterates from `x` until no row has the status RUNNING; returns points, images, statuses and steps.

    The matrix comes in the two parts of `split`. Extrapolation is that of `equilibrium.solvers.Anderson` with a
    memory of three: four plain steps, a jump, and its judgement by the next evaluation.
    """
    # One name each: what is the same value before a loop, Triton takes for one that does not change in it.
    y, x1, x2, x3 = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
    steps, still, failures, rest, jumped = status * 0, status * 0, status * 0, status * 0, status * 0
    l1 = tl.zeros((x.shape[0],), tl.float32)
    first, target = l1, l1
    least = l1 + float("inf")
    now, phase = 0, 0
    going = tl.max(tl.where(status == RUNNING, 1, 0), 0)
    while going > 0:
        y = image(x, v, d, high, low, inside, slope, KIND)
        before = l1
        residual, size, l1 = measure(x, y, FUSED)
        now += 1
        first = tl.where(now == 1, residual, first)
        still = tl.where(residual < least, 0, still + 1)
        least = tl.minimum(least, residual)
        running = status == RUNNING
        found = judge(residual, size, l1, first, still, now, limit, max_steps, atol, rtol, noise, RULE)
        steps = tl.where(running, now, steps)
        status = tl.where(running, found, status)
        going = tl.max(tl.where(status == RUNNING, 1, 0), 0)
        following = y
        if ANDERSON:
            if phase == 4:
                lost = (jumped > 0) & (l1 > target)
                following = tl.where(lost[:, None], x1, y)
                failures = tl.where(jumped > 0, tl.where(lost, failures + 1, 0), failures)
                pause = tl.where(failures > 3, 7, tl.where(failures == 3, 3, failures - 1))
                rest = tl.where(lost, pause, rest)
                phase = 0
            elif phase == 3:
                rate = tl.minimum(l1 / before, 1.0)
                power = tl.log2(rate)
                guess, sound, total = jump(y, x, x1, x2, x3, l1, inside, ridge, FUSED)
                slow = l1 * tl.exp2(patience * power) > 8 * EPS * total
                target = l1 * tl.exp2(worth * power)
                jumped = tl.where(slow & sound & (rest <= 0), 1, 0)
                following = tl.where(jumped[:, None] > 0, guess, y)
                rest -= 1
                x1 = y
                phase = 4
            else:
                x3, x2, x1 = x2, x1, x
                phase += 1
        x = tl.where((status == RUNNING)[:, None], following, x)
    return x, y, status, steps


# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"


VARYING = ("batch", "times", "limit", "max_steps", "zero")  # no value of theirs is worth a compilation


@triton.jit
def block(matrix, stride, rows, columns, height, width):
    """Loads rows and columns of a matrix, zeros beyond its height and width."""
    within = (rows[:, None] < height) & (columns[None, :] < width)
    return tl.load(matrix + rows[:, None] * stride + columns[None, :], mask=within, other=0.0)


@triton.jit
def turned(matrix, stride, rows, columns, height, width):
    """Loads a transposed block: element (k, i) is that of row `columns[i]` and column `rows[k]`."""
    within = (columns[None, :] < height) & (rows[:, None] < width)
    return tl.load(matrix + columns[None, :] * stride + rows[:, None], mask=within, other=0.0)


@triton.jit
def keep(
    target,
    at,
    stride,
    columns,
    width,
    here,
    value,
):
    """Stores rows of a block where sequences are present."""
    within = here[:, None] & (columns[None, :] < width)
    tl.store(target + at[:, None] * stride + columns[None, :], value, mask=within)


@triton.jit
def elements(offsets, time, batch, EVEN: tl.constexpr):
    """Returns the first element of a time and the number of sequences."""
    if EVEN:
        first, size = batch.to(tl.int64) * time, batch
    else:
        first = tl.load(offsets + time)
        size = (tl.load(offsets + time + 1) - first).to(tl.int32)
    return first, size


@triton.jit
def read(
    inputs, at, here, known, width, B, D, v, out, states, hidden, n, p, h,
    THROUGH: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds what inputs contribute to v and to the next hidden states, and copies them to `known`."""
    k = 0
    while k < p:
        chunk = k + tl.arange(0, CHUNK)
        present = here[:, None] & (chunk[None, :] < p)
        u = tl.load(inputs + at[:, None] * p + chunk[None, :], mask=present, other=0.0)
        v = multiply(u, turned(B, p + h, chunk, states, n, p), v)
        if THROUGH:
            out = multiply(u, turned(D, p + h, chunk, hidden, h, p), out)
        if KEEP:
            keep(known, at, width, chunk, p, here, u)
        k += CHUNK
    return v, out


@triton.jit(do_not_specialize=VARYING)
def walk(
    flag, A, B, C, D, bias, inputs, h0, offsets, known, images, H, last, statuses, counts,
    batch, times, n, p, h, slope, limit, max_steps, atol, rtol, noise, worth, patience, ridge, zero,
    KIND: tl.constexpr, RULE: tl.constexpr, ANDERSON: tl.constexpr, FUSED: tl.constexpr,
    THROUGH: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, BACKWARDS: tl.constexpr, WARM: tl.constexpr,
    KEEP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Computes a block of sequences; a row of `known` is states, inputs, hidden states before and, biased, one."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    states, hidden = tl.arange(0, STATES), tl.arange(0, HIDDEN)
    inside = (rows[:, None] >= 0) & (states[None, :] < n)
    both = p + h
    width = n + both + BIASED
    high, low = split(turned(A, n, states, states, n, n))
    before = block(h0, h, rows, hidden, batch, h)
    x = tl.zeros((ROWS, STATES), tl.float32)
    turn, worst = 0, 0
    while turn < times:
        # Else addresses of all matrices would be computed before the loop and fill the registers.
        states, hidden = tl.arange(0, STATES) + turn * zero, tl.arange(0, HIDDEN) + turn * zero
        time = times - 1 - turn if BACKWARDS else turn
        first, size = elements(offsets, time, batch, EVEN)
        here, at = rows < size, first + rows
        v = tl.zeros((ROWS, STATES), tl.float32)
        if BIASED:
            v += tl.load(bias + states, mask=states < n, other=0.0)[None, :]
        out = tl.zeros((ROWS, HIDDEN), tl.float32)
        v, out = read(
            inputs, at, here, known + n, width, B, D, v, out, states, hidden, n, p, h, THROUGH, KEEP, CHUNK
        )
        v = multiply(before, turned(B + p, both, hidden, states, n, h), v)
        if THROUGH:
            out = multiply(before, turned(D + p, both, hidden, hidden, h, h), out)
        # From zero where v is zero: towards it states would decay for ever, and nothing is small beside it.
        start = tl.where((tl.max(tl.abs(v), 1) > 0)[:, None], x, 0.0) if WARM else tl.zeros_like(x)
        begun = tl.where(here, RUNNING, CONVERGED)
        found, y, status, steps = solve(
            start, v, v, high, low, inside, begun, slope, limit, max_steps, atol, rtol, noise, worth, patience,
            ridge, KIND, RULE, ANDERSON, FUSED,
        )  # fmt: skip
        out = multiply(found, turned(C, n, states, hidden, h, n), out)
        if KEEP:
            keep(known, at, width, states, n, here, found)
            keep(known + n + p, at, width, hidden, h, here, before)
            keep(images, at, n, states, n, here, y)
            if BIASED:
                tl.store(known + at * width + n + both, tl.full((ROWS,), 1.0, tl.float32), mask=here)
        keep(H, at, h, hidden, h, here, out)
        tl.store(statuses + at, status, mask=here)
        tl.store(counts + at, steps, mask=here)
        worst = tl.maximum(worst, tl.max(status, 0))
        x = tl.where(here[:, None], found, x)
        before = tl.where(here[:, None], out, before)
        turn += 1
    keep(last, rows, h, hidden, h, rows < batch, before)
    if worst >= MAX_STEPS:
        tl.store(flag, 1)


@triton.jit(do_not_specialize=VARYING)
def unwind(
    flag, A, B, C, D, images, outer, every, ending, offsets, found, beginning, statuses, counts,
    batch, times, n, p, h, slope, limit, max_steps, atol, rtol, noise, worth, patience, ridge, zero,
    KIND: tl.constexpr, RULE: tl.constexpr, ANDERSON: tl.constexpr, FUSED: tl.constexpr,
    THROUGH: tl.constexpr, OUTER: tl.constexpr, EVERY: tl.constexpr, ENDING: tl.constexpr, EVEN: tl.constexpr,
    BACKWARDS: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Solves ``y = d (A'y + g)`` from the last time to the first; a row of `found` is y and the hidden gradient.

    The gradients that come in are those of states (`outer`), of all hidden states (`every`) and of the last ones
    (`ending`), each only where it exists; `beginning` are those of the first hidden states.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    states, hidden = tl.arange(0, STATES), tl.arange(0, HIDDEN)
    inside = (rows[:, None] >= 0) & (states[None, :] < n)
    both = p + h
    high, low = split(block(A, n, states, states, n, n))
    carry = tl.zeros((ROWS, HIDDEN), tl.float32)
    if ENDING:
        carry = block(ending, h, rows, hidden, batch, h)
    turn, worst = 0, 0
    while turn < times:
        states, hidden = tl.arange(0, STATES) + turn * zero, tl.arange(0, HIDDEN) + turn * zero
        time = turn if BACKWARDS else times - 1 - turn
        first, size = elements(offsets, time, batch, EVEN)
        here, at = rows < size, first + rows
        total, within = carry, here[:, None] & (states[None, :] < n)
        if EVERY:
            present = here[:, None] & (hidden[None, :] < h)
            total += tl.load(every + at[:, None] * h + hidden[None, :], mask=present, other=0.0)
        g = multiply(total, block(C, n, hidden, states, h, n), tl.zeros((ROWS, STATES), tl.float32))
        if OUTER:
            g += tl.load(outer + at[:, None] * n + states[None, :], mask=within, other=0.0)
        y = tl.load(images + at[:, None] * n + states[None, :], mask=within, other=0.0)
        d = slope_at(y, slope, KIND)
        scale = tl.max(tl.abs(g), 1)
        scale = tl.where(scale > 0, scale, 1.0)[:, None]
        begun = tl.where(here, RUNNING, CONVERGED)
        adjoint, y, status, steps = solve(
            tl.zeros_like(g), d * (g / scale), d, high, low, inside, begun, slope, limit, max_steps, atol, rtol,
            noise, worth, patience, ridge, LINEAR, RULE, ANDERSON, FUSED,
        )  # fmt: skip
        adjoint = adjoint * scale
        keep(found, at, n + h, states, n, here, adjoint)
        keep(found + n, at, n + h, hidden, h, here, total)
        tl.store(statuses + at, status, mask=here)
        tl.store(counts + at, steps, mask=here)
        worst = tl.maximum(worst, tl.max(status, 0))
        back = multiply(adjoint, block(B + p, both, states, hidden, n, h), tl.zeros((ROWS, HIDDEN), tl.float32))
        if THROUGH:
            back = multiply(total, block(D + p, both, hidden, hidden, h, h), back)
        carry = tl.where(here[:, None], back, carry)
        turn += 1
    keep(beginning, rows, h, hidden, h, rows < batch, carry)
    if worst >= MAX_STEPS:
        tl.store(flag, 1)
