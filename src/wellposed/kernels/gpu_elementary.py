"""Device functions that all Triton kernels share: activations, their slopes and products."""
# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"

from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels import recipe

triton = require("triton")
tl = require("triton.language")
# Kernels see global numbers only as constants of Triton.
RELU, SLOPED, LINEAR = tl.constexpr(recipe.RELU), tl.constexpr(recipe.SLOPED), tl.constexpr(recipe.LINEAR)
TANH, SIGMOID = tl.constexpr(recipe.TANH), tl.constexpr(recipe.SIGMOID)
TOLERANCE, SETTLED = tl.constexpr(recipe.TOLERANCE), tl.constexpr(recipe.SETTLED)
COUNTED = tl.constexpr(recipe.COUNTED)
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
    """Returns x rounded to the eleven bits that a TF32 product looks at, and the rest."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def split_product(x, high, low, total):
    """Adds ``x (high + low)`` to `total` by three TF32 products, in chains that do not wait for each other."""
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
