"""The projection of every row on the l1 ball, and its derivative, one launch each.

The same numbers as `conditions.projections.project_rows`, which takes some thirty launches: with theta the root of
``sum_j (|w_j| - theta)_+ = radius``, p_j = sign(w_j) (|w_j| - theta)_+. The root is found without sorting, by
Newton's method on that convex, piecewise linear equation (Michelot 1986): from below, in a few steps, exactly.
"""

import torch
from torch import Tensor

from wellposed.errors import require
from wellposed.kernels.gpu.engine import call

# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"


triton = require("triton")
tl = require("triton.language")
WIDE = tl.constexpr(2.220446049250313e-16)  # the rounding unit of float64


@triton.jit
def root(load, valid, target):
    """Returns theta with ``sum (load - theta)_+ = target`` over the valid entries, in float64."""
    count = tl.sum(valid.to(tl.float64), 0)
    theta = (tl.sum(tl.where(valid, load, 0.0), 0) - target) / count
    known = count + 1
    # theta is at most the root; entries that have left the sum do not return.
    while known > count:
        above = (load > theta) & valid
        known, count = count, tl.sum(above.to(tl.float64), 0)
        theta = tl.where(count > 0, (tl.sum(tl.where(above, load, 0.0), 0) - target) / tl.maximum(count, 1), theta)
    return theta


@triton.jit
def shrink(W, P, LEVELS, n, eps, RADIUS: tl.constexpr, WIDTH: tl.constexpr):
    """Projects one row; its level is the largest entry that vanishes, negative for a row that does not change."""
    line, states = tl.program_id(0), tl.arange(0, WIDTH)
    w = tl.load(W + line * n + states, mask=states < n, other=0.0)
    size = tl.sum(tl.abs(w).to(tl.float64), 0)
    if size + (n + 4) * WIDE * size > RADIUS:
        # Entries are counted from the largest one in a row that is far outside: the differences are exact.
        largest = tl.max(tl.abs(w), 0)
        top = tl.where(largest > 2 * RADIUS, largest, largest * 0)
        load = tl.abs(w) - top
        wide = load.to(tl.float64)
        near = tl.sum(tl.where((states < n) & (wide > -RADIUS), tl.abs(wide), 0.0), 0)
        bounded = tl.minimum(size, RADIUS)
        target = RADIUS - 4 * (n + 4) * WIDE * tl.maximum(near, bounded) - 2 * eps * bounded
        theta = root(tl.maximum(wide, -2.0 * RADIUS), states < n, target)
        active = (load > (theta + 2 * eps * tl.abs(theta)).to(w.dtype)) & (states < n)
        count = tl.sum(active.to(tl.float64), 0)
        shift = (tl.sum(tl.where(active, wide, 0.0), 0) - target) / tl.maximum(count, 1)
        shift = tl.where(top > 0, shift, tl.abs(shift))
        shift = (shift + 2 * eps * tl.abs(shift)).to(w.dtype)
        p = tl.where(active, tl.where(w > 0, load - shift, shift - load), 0.0)
        level = tl.max(tl.where(active, 0.0, tl.abs(w)), 0).to(w.dtype)
    else:
        level = (size * 0 - 1).to(w.dtype)
        p = w
    tl.store(P + line * n + states, p, mask=states < n)
    tl.store(LEVELS + line, level)


@triton.jit
def pull_back(W, LEVELS, G, R, n, eps, WIDTH: tl.constexpr):
    """Differentiates the projection of one row: ``g - sign mean(sign g)`` over the active entries."""
    line, states = tl.program_id(0), tl.arange(0, WIDTH)
    w = tl.load(W + line * n + states, mask=states < n, other=0.0)
    g = tl.load(G + line * n + states, mask=states < n, other=0.0)
    level = tl.load(LEVELS + line)
    active = tl.abs(w) > level
    sign = tl.where(active, tl.where(w > 0, 1.0, -1.0), 0.0).to(w.dtype)
    sign = tl.where(level >= 0, sign, 0.0)
    count = tl.sum(tl.abs(sign).to(tl.float64), 0)
    mean = tl.sum((g * sign).to(tl.float64), 0) * (1 + 2 * eps) / tl.maximum(count, 1)
    tl.store(R + line * n + states, tl.where(active, g, 0.0) - sign * mean.to(w.dtype), mask=states < n)


def project(W: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Returns the projection of a square matrix and the levels that `project_backward` needs."""
    n, width = W.shape[0], _width(W.shape[0])
    W = W.contiguous()
    P, levels = torch.empty_like(W), W.new_empty(n)
    # As an argument the radius would be rounded to float32; as a constant it is exact, and it seldom changes.
    constants = {"RADIUS": radius, "WIDTH": width}
    kind, numbers = (n, radius, W.dtype), (n, torch.finfo(W.dtype).eps)
    call(shrink, n, kind, (W, P, levels), numbers, constants, {"num_warps": _warps(width)})
    return P, levels


def project_backward(W: Tensor, levels: Tensor, g: Tensor) -> Tensor:
    """Returns the gradient by W from that by the projection."""
    n, width = W.shape[0], _width(W.shape[0])
    W, g = W.contiguous(), g.contiguous()
    gradient = torch.empty_like(W)
    tensors, numbers = (W, levels, g, gradient), (n, torch.finfo(W.dtype).eps)
    call(pull_back, n, (n, W.dtype), tensors, numbers, {"WIDTH": width}, {"num_warps": _warps(width)})
    return gradient


def _width(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _warps(width: int) -> int:
    return 1 if width <= 128 else 4 if width <= 1024 else 16
