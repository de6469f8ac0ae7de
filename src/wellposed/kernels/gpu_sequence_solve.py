"""A block of samples is brought to its equilibria on the chip: steps, extrapolations and verdicts in Triton.

Rows of a block are samples, columns are states; both are padded to sizes that the units for products take, and
what is padded stays zero. A row that has finished stands still while others go on, so that after the last step
every row holds the point that was accepted and its image.
"""
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"

from wellposed.equilibrium.loop import PERIOD as LOOK
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.gpu_elementary import (
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
    split,
    split_product,
)

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
def gram(y, x, x1, x2, x3, FUSED: tl.constexpr):
    """Returns products of three differences of residuals with each other and with the latest one, and |y|_1."""
    r = y - x
    a, b, c = r - (x - x1), (x - x1) - (x1 - x2), (x1 - x2) - (x2 - x3)
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
def jump(y, x, x1, x2, x3, inside, ridge, FUSED: tl.constexpr):
    """Extrapolates from five points in a row, `x3` to `y`; tells also where that is sound, and |y|_1."""
    aa, bb, cc, ab, ac, bc, ar, br, cr, size = gram(y, x, x1, x2, x3, FUSED)
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

    The matrix comes in the two parts of `split`.
    Extrapolation is that of `equilibrium.anderson` with a memory of three: four plain steps, a jump, and its
    judgement by the next evaluation.
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
                guess, sound, total = jump(y, x, x1, x2, x3, inside, ridge, FUSED)
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
