"""The whole solve of a block of samples in one program, with A on the chip: up to 128 states.

A is loaded once into registers and shared memory; the iterate never leaves the registers. A row that has finished
is written at once and no longer looked at, while the others of its block go on.
"""
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"

from wellposed.errors import require
from wellposed.kernels.gpu_elementary import (
    LINEAR,
    SIGMOID,
    activate,
    measure,
    product,
    slope_at,
    split,
    split_product,
)
from wellposed.kernels.gpu_steps import close, extrapolate, judge, look_back

triton = require("triton")
tl = require("triton.language")
UNSPECIALISED = ("batch", "limit", "max_steps")


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
    """Solves ``x = phi(Ax + v)``, or ``y = d (Ay) + v``, for the rows of one block; see `gpu_launch`."""
    rows, states = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside, real, slot = rows < batch, states < n, tl.num_programs(0).to(tl.int64) * BLOCK * WIDTH
    at, there = rows[:, None] * n + states[None, :], inside[:, None] & real[None, :]
    like: tl.constexpr = POINTS.dtype.element_ty
    places, known = states[None, :] * row + states[:, None] * column, real[None, :] & real[:, None]
    a = tl.load(A + places, mask=known, other=0.0)  # a[k, i] = A_ik
    a, low = split(a) if SPLIT else (a, a)
    MINIMA = POINTS + (MEMORY + 2) * slot
    v, d, scale, x = start_rows(V, D, X0, at, there, like, STARTS, KIND, SCALED)
    points = POINTS + rows[:, None] * WIDTH + states[None, :]
    status, steps = tl.where(inside, 0, 1), tl.zeros([BLOCK], tl.int32)
    rest, failures, jumped = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), rows < 0
    first, previous, target = tl.zeros([BLOCK], like), tl.zeros([BLOCK], like), tl.zeros([BLOCK], like)
    least = tl.full([BLOCK], float("inf"), like)
    index, phase, left = tl.zeros([], tl.int32), tl.zeros([], tl.int32), 1
    while left > 0:
        y = image(x, a, low, v, d, real, SLOPE, KIND, SPLIT)
        residual, size, l1 = measure(x, y, FUSED)
        found, first, least = judge(
            residual, size, l1, status, first, least, index, rows, inside, MINIMA, TRACE, batch, n, atol, rtol,
            eps, limit, max_steps, RULE, TRACED,
        )  # fmt: skip
        newly = found != 0
        index += 1
        if tl.max(newly.to(tl.int32), 0) > 0:
            status, steps = tl.where(newly, found, status), tl.where(newly, index, steps)
            value = x * scale[:, None] if SCALED else x
            tl.store(X + at, value, mask=newly[:, None] & there)
            if SAVES:
                tl.store(SLOPES + at, slope_at(y, SLOPE, KIND), mask=newly[:, None] & there)
            left = tl.sum((status == 0).to(tl.int32), 0)
        if MEMORY == 0:
            x = y
        elif phase > MEMORY:
            failed, rest, failures = look_back(jumped, l1, target, rest, failures)
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
