"""The whole solve of a block of samples under noise in one program, with A on the chip: up to 128 states.

The loop is that of `gpu_resident` with plain or damped steps. Draws are made on the way and never lie in memory;
the last iterates, of which `MeanRelative` takes the mean, lie in a scratch buffer.
"""
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"

from wellposed.errors import require
from wellposed.kernels import counter
from wellposed.kernels.gpu_elementary import AVERAGED, SIGMOID, activate, measure, split
from wellposed.kernels.gpu_random import draw
from wellposed.kernels.gpu_resident import matrix_product, start_rows
from wellposed.kernels.gpu_steps import close, judge

triton = require("triton")
tl = require("triton.language")
UNSPECIALISED = ("batch", "limit", "max_steps", "seed")
STATE, SIGNAL = tl.constexpr(counter.STATE), tl.constexpr(counter.SIGNAL)


@triton.jit
def shake(z, real, seed, quads, step, samples, size, SITE: tl.constexpr, ADDITIVE: tl.constexpr):
    """Adds noise to a block; its deviation is `size`, times the l2 norms of rows unless additive."""
    noise = size * draw(seed, quads, step, samples, SITE, z.dtype)
    if not ADDITIVE:
        noise *= tl.sqrt(tl.sum(z * z, 1))[:, None]
    return tl.where(real[None, :], z + noise, 0.0)


@triton.jit
def padded(z, real, KIND: tl.constexpr, SLOPE: tl.constexpr):
    """Applies the activation; states that are padding stay zero."""
    y = activate(z, SLOPE, KIND)
    return tl.where(real[None, :], y, 0.0) if KIND == SIGMOID else y


@triton.jit
def remember(points, slot, x, index, limit):
    """Writes the iterates to their place in the window; returns the mean of what is there."""
    known = tl.minimum(limit, index + 1)
    mean, back = x * 0, known - 1
    while back > 0:
        mean += tl.load(points + ((index - back) % limit) * slot)
        back -= 1
    tl.store(points + (index % limit) * slot, x)
    tl.debug_barrier()
    return (mean + x) / known.to(x.dtype)


@triton.jit
def products(x, mean, a, low, v, RULE: tl.constexpr, SPLIT: tl.constexpr):
    """Returns ``Ax + v`` and, for rules that look at it, the same of the mean."""
    if RULE == AVERAGED:
        total, last, source = v, v, x
        for turn in range(2):  # two products apart would need twice the shared memory
            last = matrix_product(source, a, low, v, SPLIT)
            total = tl.where(turn == 0, last, total)
            source = mean
    else:
        total = matrix_product(x, a, low, v, SPLIT)
        last = total
    return total, last


@triton.jit
def solves(mean, clean, index, limit, rtol):
    """Returns ones for rows whose mean solves the equation without noise, once the window is full."""
    gap, size = tl.sum((clean - mean) * (clean - mean), 1), tl.sum(clean * clean, 1)
    return ((index + 1 >= limit) & (tl.sqrt(gap) <= rtol * tl.sqrt(size))).to(tl.int32)


@triton.jit(do_not_specialize=UNSPECIALISED)
def solve_noisy(
    FLAG, A, V, X0, NUMBERS, X, STATUS, STEPS, POINTS, TRACE,
    batch, n, row, column, atol, rtol, eps, limit, max_steps, seed,
    KIND: tl.constexpr, SLOPE: tl.constexpr, RULE: tl.constexpr, STATED: tl.constexpr, SIGNALLED: tl.constexpr,
    ADDITIVE: tl.constexpr, HELD: tl.constexpr, DAMPED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Solves ``x = phi(Ax + v)`` under noise for the rows of one block; see `gpu_noisy_launch`."""
    rows, states = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside, real, slot = rows < batch, states < n, tl.num_programs(0).to(tl.int64) * BLOCK * WIDTH
    at, there = rows[:, None] * n + states[None, :], inside[:, None] & real[None, :]
    like: tl.constexpr = POINTS.dtype.element_ty
    samples, quads = rows.to(tl.int32), tl.arange(0, WIDTH // 4)
    places, known = states[None, :] * row + states[:, None] * column, real[None, :] & real[:, None]
    a = tl.load(A + places, mask=known, other=0.0)  # a[k, i] = A_ik
    a, low = split(a) if SPLIT else (a, a)
    points, MINIMA = POINTS + rows[:, None] * WIDTH + states[None, :], POINTS
    if RULE == AVERAGED:
        MINIMA = POINTS + limit * slot
    v, _, _, x = start_rows(V, V, X0, at, there, like, True, KIND, False)
    state, signal = tl.load(NUMBERS), tl.load(NUMBERS + 1)
    rate, decay = tl.load(NUMBERS + 2), tl.load(NUMBERS + 3)
    status, steps = tl.where(inside, 0, 1), tl.zeros([BLOCK], tl.int32)
    first, least = tl.zeros([BLOCK], like), tl.full([BLOCK], float("inf"), like)
    index, left = tl.zeros([], tl.int32), 1
    while left > 0:
        step = index * 0 if HELD else index
        value, source, bar = x, x, atol
        if RULE == AVERAGED:
            value = remember(points, slot, x, index, limit)
        if STATED:
            source = shake(x, real, seed, quads, step, samples, state, STATE, ADDITIVE)
        z, clean = products(source, value, a, low, v, RULE, SPLIT)
        if SIGNALLED:
            z = shake(z, real, seed, quads, step, samples, signal, SIGNAL, ADDITIVE)
        y = padded(z, real, KIND, SLOPE)
        residual, size, l1 = measure(x, y, FUSED)
        if RULE == AVERAGED:
            bar = solves(value, padded(clean, real, KIND, SLOPE), index, limit, rtol)
        found, first, least = judge(
            residual, size, l1, status, first, least, index, rows, inside, MINIMA, TRACE, batch, n, bar, rtol,
            eps, limit, max_steps, RULE, True,
        )  # fmt: skip
        newly, index = found != 0, index + 1
        if tl.max(newly.to(tl.int32), 0) > 0:
            status, steps = tl.where(newly, found, status), tl.where(newly, index, steps)
            tl.store(X + at, value, mask=newly[:, None] & there)
            left = tl.sum((status == 0).to(tl.int32), 0)
        share = rate * tl.exp2(-decay * tl.log2(index.to(like)))
        x = y - (1 - share) * (y - x) if DAMPED else y
    close(STATUS, STEPS, FLAG, rows, inside, status, steps)
