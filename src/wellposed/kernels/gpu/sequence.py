"""The loops over time of a recurrent implicit model in Triton: whole sequences in one launch each way.

Elements are stored time after time, the longest sequences first (the layout of a packed sequence), one row an
element: the element of sequence i at time t is row ``offsets[t] + i`` of

    inputs    (N, p)
    known     (N, n + p + h)        states, inputs, hidden states before; with a bias, a one behind them
    images    (N, n)                phi(Ax + v)
    H         (N, h)                hidden states
    adjoints  (N, n + h)            y and the total gradient of the hidden state, backward
    residuals (N,)                  of the last points; their statuses and steps likewise

A block of `ROWS` sequences is one program: hidden states, equilibria and the gradients that go back in time stay
in it. Sequences that have ended, or have not begun, keep their values. `forward` and `backward` are the loops.

At every time `solve` solves a block on the chip. Rows of a block are samples, columns are states; both are padded
to sizes that tensor cores take, and padding stays zero. A row that has finished does not change while others go
on, so that after the last step every row holds the accepted point and its image. The points of a cycle and the
minima are in a scratch buffer, laid out as in `gpu.solve`, with rows of `STATES` numbers and minima for whole
blocks; for plain steps it has no points.
"""

from wellposed.errors import require
from wellposed.kernels.gpu.solve import (
    CONVERGED,
    LINEAR,
    MAX_STEPS,
    SIGMOID,
    activate,
    extrapolate,
    judge,
    judge_jump,
    measure,
    slope_at,
    split,
    split_product,
)

# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"


triton = require("triton")
tl = require("triton.language")


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
def solve(
    x, v, d, high, low, inside, running, scratch, slot, local, n, slope, limit, max_steps, atol, rtol, eps, worth,
    patience, ridge, KIND: tl.constexpr, RULE: tl.constexpr, MEMORY: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Iterates from `x` until no row is `running`.

    Returns results, images of the last points, their residuals (NaN stays), statuses and steps. The matrix comes
    in the two parts of `split`. Verdicts and extrapolation are those of `solve_resident`; the points of a cycle
    are in `scratch`, a row of them for every row of the grid (`local`), then the minima.
    """
    WIDTH: tl.constexpr = x.shape[1]
    points = scratch + local[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    minima, count = scratch + (MEMORY + 2) * slot if MEMORY > 0 else scratch, slot // WIDTH
    # One name each: what is the same value before a loop, Triton takes for one that does not change in it.
    y, status, steps = tl.zeros_like(x), tl.where(running, 0, CONVERGED), tl.where(running, 0, 0)
    rest, failures, jumped = tl.where(running, 0, 0), tl.where(running, 0, 0), local < 0
    first, previous, target = tl.max(x, 1) * 0, tl.max(x, 1) * 0, tl.max(x, 1) * 0
    since, least = tl.where(running, 0, 0), first + float("inf")
    index, phase, left = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.max(running.to(tl.int32), 0)
    # Before every step x are the iterates of running rows and the accepted points of the others; `left` is 1 while
    # a row is running. Phases are those of `solve_resident`.
    while left > 0:
        y = image(x, v, d, high, low, inside, slope, KIND)
        residual, size, l1 = measure(x, y, FUSED)
        outcome, first, least, since, rest, jumped = judge(
            residual, size, l1, status, first, least, since, rest, jumped, index, local, running, minima, minima,
            count, n, atol, rtol, eps, limit, max_steps, RULE, MEMORY, False,
        )  # fmt: skip
        index += 1
        steps = tl.where(outcome != 0, index, steps)
        status = tl.where(outcome != 0, outcome, status)
        left = tl.max((status == 0).to(tl.int32), 0)
        following = y
        if MEMORY > 0:
            if phase > MEMORY:
                failed, rest, failures = judge_jump(jumped, l1, target, rest, failures)
                following, phase = tl.where(failed[:, None], tl.load(points + (MEMORY + 1) * slot), y), phase * 0
            else:
                if phase == 0:
                    tl.store(points, x)
                tl.store(points + (phase + 1) * slot, y)
                if phase == MEMORY - 1:
                    previous = l1
                if phase == MEMORY:
                    jumped, target, _ = extrapolate(
                        scratch, slot, local, status == 0, rest, l1, previous, n, eps, worth, patience, ridge,
                        MEMORY, WIDTH, WIDTH,
                    )  # fmt: skip
                    following, rest = tl.load(points), rest - 1
                phase += 1
        x = tl.where((status == 0)[:, None], following, x)
    residual, _, l1 = measure(x, y, FUSED)
    value, residual = tl.where((status == CONVERGED)[:, None], y, x), tl.where(l1 == l1, residual, l1)
    return value, y, residual, status, steps


VARYING = ("batch", "times", "limit", "max_steps", "zero")  # arguments whose values are not compiled in


@triton.jit
def block(matrix, stride, rows, columns, height, width):
    """Loads rows and columns of a matrix, zeros beyond its height and width."""
    within = (rows[:, None] < height) & (columns[None, :] < width)
    return tl.load(matrix + rows[:, None] * stride + columns[None, :], mask=within, other=0.0)


@triton.jit
def transposed_block(matrix, stride, rows, columns, height, width):
    """Loads a transposed block: element (k, i) is that of row `columns[i]` and column `rows[k]`."""
    within = (columns[None, :] < height) & (rows[:, None] < width)
    return tl.load(matrix + columns[None, :] * stride + rows[:, None], mask=within, other=0.0)


@triton.jit
def store_rows(target, at, stride, columns, width, here, value):
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
def add_inputs(
    inputs, at, here, known, width, B, D, v, out, states, hidden, n, p, h,
    THROUGH: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds the products with inputs to v and to the next hidden states, and copies inputs to `known`."""
    k = 0
    while k < p:
        chunk = k + tl.arange(0, CHUNK)
        present = here[:, None] & (chunk[None, :] < p)
        u = tl.load(inputs + at[:, None] * p + chunk[None, :], mask=present, other=0.0)
        v = multiply(u, transposed_block(B, p + h, chunk, states, n, p), v)
        if THROUGH:
            out = multiply(u, transposed_block(D, p + h, chunk, hidden, h, p), out)
        if KEEP:
            store_rows(known, at, width, chunk, p, here, u)
        k += CHUNK
    return v, out


@triton.jit(do_not_specialize=VARYING)
def forward(
    flag, A, B, C, D, bias, inputs, h0, offsets, known, images, H, last, residuals, statuses, counts,
    scratch,
    batch, times, n, p, h, slope, limit, max_steps, atol, rtol, eps, worth, patience, ridge, zero,
    KIND: tl.constexpr, RULE: tl.constexpr, MEMORY: tl.constexpr, FUSED: tl.constexpr,
    THROUGH: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, BACKWARDS: tl.constexpr, WARM: tl.constexpr,
    KEEP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Computes a block of sequences; a row of `known` is states, inputs, hidden states before and, biased, one."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    states, hidden = tl.arange(0, STATES), tl.arange(0, HIDDEN)
    inside = (rows[:, None] >= 0) & (states[None, :] < n)
    both, slot = p + h, tl.num_programs(0).to(tl.int64) * ROWS * STATES
    width = n + both + BIASED
    high, low = split(transposed_block(A, n, states, states, n, n))
    before = block(h0, h, rows, hidden, batch, h)
    x = tl.zeros((ROWS, STATES), tl.float32)
    turn, worst = 0, 0
    # Before every turn x and `before` are the latest states and hidden states of all rows, the start where there
    # are none, and `worst` is the largest status so far.
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
        v, out = add_inputs(
            inputs, at, here, known + n, width, B, D, v, out, states, hidden, n, p, h, THROUGH, KEEP, CHUNK
        )
        v = multiply(before, transposed_block(B + p, both, hidden, states, n, h), v)
        if THROUGH:
            out = multiply(before, transposed_block(D + p, both, hidden, hidden, h, h), out)
        # From zero where v is zero: states would decay towards it for ever; no residual is small beside 0.
        start = tl.where((tl.max(tl.abs(v), 1) > 0)[:, None], x, 0.0) if WARM else tl.zeros_like(x)
        point, y, residual, status, steps = solve(
            start, v, v, high, low, inside, here, scratch, slot, rows, n, slope, limit, max_steps, atol, rtol, eps,
            worth, patience, ridge, KIND, RULE, MEMORY, FUSED,
        )  # fmt: skip
        out = multiply(point, transposed_block(C, n, states, hidden, h, n), out)
        if KEEP:
            store_rows(known, at, width, states, n, here, point)
            store_rows(known + n + p, at, width, hidden, h, here, before)
            store_rows(images, at, n, states, n, here, y)
            if BIASED:
                tl.store(known + at * width + n + both, tl.full((ROWS,), 1.0, tl.float32), mask=here)
        store_rows(H, at, h, hidden, h, here, out)
        tl.store(residuals + at, residual, mask=here)
        tl.store(statuses + at, status, mask=here)
        tl.store(counts + at, steps, mask=here)
        worst = tl.maximum(worst, tl.max(status, 0))
        x = tl.where(here[:, None], point, x)
        before = tl.where(here[:, None], out, before)
        turn += 1
    store_rows(last, rows, h, hidden, h, rows < batch, before)
    if worst >= MAX_STEPS:
        tl.store(flag, 1)


@triton.jit(do_not_specialize=VARYING)
def backward(
    flag, A, B, C, D, images, outer, every, ending, offsets, adjoints, beginning, residuals, statuses, counts,
    scratch,
    batch, times, n, p, h, slope, limit, max_steps, atol, rtol, eps, worth, patience, ridge, zero,
    KIND: tl.constexpr, RULE: tl.constexpr, MEMORY: tl.constexpr, FUSED: tl.constexpr,
    THROUGH: tl.constexpr, OUTER: tl.constexpr, EVERY: tl.constexpr, ENDING: tl.constexpr, EVEN: tl.constexpr,
    BACKWARDS: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Solves ``y = d (A'y + g)`` from the last time to the first; see above for `adjoints`.

    The gradients that come in are those of states (`outer`), of all hidden states (`every`) and of the last ones
    (`ending`), each only where it exists; `beginning` are those of the first hidden states.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    states, hidden = tl.arange(0, STATES), tl.arange(0, HIDDEN)
    inside = (rows[:, None] >= 0) & (states[None, :] < n)
    both, slot = p + h, tl.num_programs(0).to(tl.int64) * ROWS * STATES
    high, low = split(block(A, n, states, states, n, n))
    carry = tl.zeros((ROWS, HIDDEN), tl.float32)
    if ENDING:
        carry = block(ending, h, rows, hidden, batch, h)
    turn, worst = 0, 0
    # Before every turn `carry` is the gradient of the hidden states by later times, or of the last ones.
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
        adjoint, y, residual, status, steps = solve(
            tl.zeros_like(g), d * (g / scale), d, high, low, inside, here, scratch, slot, rows, n, slope, limit,
            max_steps, atol, rtol, eps, worth, patience, ridge, LINEAR, RULE, MEMORY, FUSED,
        )  # fmt: skip
        adjoint = adjoint * scale
        store_rows(adjoints, at, n + h, states, n, here, adjoint)
        store_rows(adjoints + n, at, n + h, hidden, h, here, total)
        tl.store(residuals + at, residual, mask=here)
        tl.store(statuses + at, status, mask=here)
        tl.store(counts + at, steps, mask=here)
        worst = tl.maximum(worst, tl.max(status, 0))
        back = multiply(adjoint, block(B + p, both, states, hidden, n, h), tl.zeros((ROWS, HIDDEN), tl.float32))
        if THROUGH:
            back = multiply(total, block(D + p, both, hidden, hidden, h, h), back)
        carry = tl.where(here[:, None], back, carry)
        turn += 1
    store_rows(beginning, rows, h, hidden, h, rows < batch, carry)
    if worst >= MAX_STEPS:
        tl.store(flag, 1)
