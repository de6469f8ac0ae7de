"""The normal numbers of `kernels.counter` for Triton kernels: Triton's Philox and the Box-Muller transform.

Logarithm, sine and cosine are the series of `random_vectors`, so that CPU and GPU differ by rounding alone.
"""
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"

import math

from wellposed.errors import require

triton = require("triton")
tl = require("triton.language")
NEAR = tl.constexpr(3_037_000_500)  # words from here on are uniform numbers above 1 / sqrt(2)
EIGHTH, QUARTER = tl.constexpr(1 << 29), tl.constexpr(30)
TURN, LOG2 = tl.constexpr(2 * math.pi / 2**32), tl.constexpr(math.log(2))
UNIT = tl.constexpr(2.0**-32)


@triton.jit
def logarithm(f, TERMS: tl.constexpr):
    """Returns log(1 + f) for f between -0.3 and 0.42."""
    s = f / (2 + f)
    square = s * s
    total = tl.zeros(f.shape, f.dtype) + 2.0 / (2 * TERMS - 1)
    for j in tl.static_range(1, TERMS):
        total = total * square + 2.0 / (2 * (TERMS - j) - 1)
    return s * total


@triton.jit
def radius(words, like: tl.constexpr):
    """Returns ``sqrt(-2 log u)`` for ``u = (w + 1/2) / 2^32``, accurate also where u is almost one."""
    TERMS: tl.constexpr = 11 if like == tl.float64 else 5
    u = words.to(like) + 0.5
    if like == tl.float64:
        bits = u.to(tl.int64, bitcast=True)
        power = (bits - 0x3FE6A09E667F3BCD) >> 52
        m = (bits - (power << 52)).to(tl.float64, bitcast=True)
    else:
        bits = u.to(tl.int32, bitcast=True)
        power = (bits - 0x3F3504F3) >> 23
        m = (bits - (power << 23)).to(tl.float32, bitcast=True)
    near = words >= NEAR
    below = ((words ^ 0xFFFFFFFF).to(tl.uint32).to(like) + 0.5) * UNIT  # 1 - u
    f = tl.where(near, -below, m - 1)
    k = tl.where(near, 0.0, power.to(like) - 32)
    return tl.sqrt(-2 * (k * LOG2 + logarithm(f, TERMS)))


@triton.jit
def turn(words, like: tl.constexpr):
    """Returns the cosine and sine of ``2 pi w / 2^32``."""
    quarter = (words + EIGHTH) >> QUARTER
    rest = (words - (quarter << QUARTER)).to(tl.int32, bitcast=True)
    angle = rest.to(like) * TURN
    square = angle * angle
    cosine, sine = tl.full(angle.shape, 1.0, like), tl.full(angle.shape, 1.0, like)
    TERMS: tl.constexpr = 8 if like == tl.float64 else 5
    for even in tl.static_range(2 * TERMS, 0, -2):
        cosine = 1 - square * cosine * (1.0 / (even * (even - 1)))
        sine = 1 - square * sine * (1.0 / (even * (even + 1)))
    sine = angle * sine
    crossed = (quarter & 1) != 0
    across, up = tl.where(crossed, sine, cosine), tl.where(crossed, cosine, sine)
    across = tl.where(((quarter + 1) & 2) != 0, -across, across)
    return across, tl.where((quarter & 2) != 0, -up, up)


@triton.jit
def draw(seed, quads, step, samples, site, like: tl.constexpr):
    """Returns normal numbers ``(BLOCK, 4 len(quads))`` of some samples at a site of a step."""
    first = quads[None, :] + samples[:, None] * 0
    a, b, c, d = tl.philox(seed, first, first * 0 + step, first * 0 + samples[:, None], first * 0 + site)
    size, more = radius(a, like), radius(c, like)
    across, up = turn(b, like)
    right, high = turn(d, like)
    even, odd = tl.join(size * across, more * right), tl.join(size * up, more * high)  # states 0 and 2, 1 and 3
    return tl.reshape(tl.join(even, odd), [samples.shape[0], 4 * quads.shape[0]])
