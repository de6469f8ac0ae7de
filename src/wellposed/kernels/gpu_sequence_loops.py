"""The loops over time of a recurrent implicit model in Triton: a whole sequence in one launch, there and back.

Elements lie time after time, the longest sequences first (the layout of a packed sequence), one row an element. A
block of sequences is one program: hidden states, equilibria and what goes back in time do not leave it. Sequences
that have ended, or have not begun, keep what they have.
"""
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"

from wellposed.errors import require
from wellposed.kernels.gpu_elementary import CONVERGED, LINEAR, MAX_STEPS, slope_at, split
from wellposed.kernels.gpu_sequence_solve import RUNNING, multiply, solve

triton = require("triton")
tl = require("triton.language")

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
        start = x if WARM else tl.zeros_like(x)
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
