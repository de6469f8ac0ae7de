"""Which slopes an activation has on a box: the Jacobians between any two points of it.

By the mean value theorem ``phi(a) - phi(b) = J (a - b)`` for a matrix J between the ends of `slope_range`, for all
a and b of the box. J is diagonal for componentwise maps and has blocks for softmax, normalisation and products.
All ranges are rounded outward.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.activations.activation import Activation, block_view, used
from wellposed.activations.blockwise import _matrix_product, _multiply, _normalise, _softmax
from wellposed.activations.catalogue import _softplus
from wellposed.errors import InputError

SLACK = 1e-12  # more than the rounding of a slope, relative to what it is computed from
EPS = 2.0**-52
PARAMETER = 2.0**-22  # relative to a parameter, which torch may round to float32


class SlopeRange(NamedTuple):
    """The matrices ``middle +- radius``, (B, n) where they are diagonal and (B, n, n) where not."""

    middle: Tensor
    radius: Tensor

    @property
    def dense(self) -> "SlopeRange":
        """The same as full matrices."""
        if self.middle.dim() == 3:
            return self
        return SlopeRange(self.middle.diag_embed(), self.radius.diag_embed())


def why_no_slopes(phi: Activation) -> str:
    """Says why the slopes of a map on a box are not known; nothing where they are.

    Example:
        >>> from wellposed.activations import get_activation, max_pool
        >>> why_no_slopes(get_activation("tanh")), why_no_slopes(max_pool(2))
        ('', "the Jacobians of 'max_pool(2)' on a box are not known")
    """
    if phi.componentwise:
        finite = all(abs(end) < float("inf") for end in phi.slope)
        return "" if finite else f"the slopes of {phi.name!r} have no bound"
    return "" if _block_rule(phi) is not None else f"the Jacobians of {phi.name!r} on a box are not known"


def is_product(phi: Activation) -> bool:
    """Returns whether a map multiplies parts of its argument without clipping them.

    Example:
        >>> from wellposed.activations import multiply
        >>> is_product(multiply()), is_product(multiply(1.0, 1.0))
        (True, False)
    """
    function = phi.function
    if not isinstance(function, partial) or function.func not in (_multiply, _matrix_product):
        return False
    return function.keywords.get("bounds") is None


@torch.no_grad()
def slope_range(phi: Activation, center: Tensor, radius: Tensor, secants: bool = False) -> SlopeRange:  # (B, n)
    """Encloses the slopes of an activation on the box ``center +- radius``, in float64.

    Args:
        secants: whether one of the two points is the center, which leaves fewer slopes.

    Example:
        >>> from wellposed.activations import get_activation
        >>> z, r = torch.tensor([[3.0, -3.0, 1.0]]).double(), torch.full((1, 3), 2.0).double()
        >>> slope_range(get_activation("relu"), z, r).radius.round(decimals=3)
        tensor([[0.0000, 0.0000, 0.5000]], dtype=torch.float64)
        >>> slope_range(get_activation("relu"), z, r, secants=True).radius.round(decimals=3)
        tensor([[0.0000, 0.0000, 0.2500]], dtype=torch.float64)
    """
    if reason := why_no_slopes(phi):
        raise InputError(reason)
    if phi.componentwise:
        low, high = _ends(phi, center, radius, secants)
        middle = (low + high) / 2
        return SlopeRange(middle, torch.maximum(high - middle, middle - low) * (1 + SLACK))
    rule = _block_rule(phi)
    assert rule is not None
    size = phi.block or center.shape[-1]
    blocks = rule(block_view(center, size), block_view(radius, size))  # (B, n / k, k, k)
    return SlopeRange(*(torch.stack([torch.block_diag(*sample) for sample in part]) for part in blocks))


def joined(ranges: Sequence[SlopeRange]) -> SlopeRange:
    """Puts the slopes of consecutive blocks together.

    Example:
        >>> one = SlopeRange(torch.ones(1, 2), torch.zeros(1, 2))
        >>> joined([one, one]).middle.shape, joined([one, one.dense]).middle.shape
        (torch.Size([1, 4]), torch.Size([1, 4, 4]))
    """
    if all(each.middle.dim() == 2 for each in ranges):
        return SlopeRange(*(torch.cat(pieces, dim=1) for pieces in zip(*ranges, strict=True)))
    whole = []
    for pieces in zip(*(each.dense for each in ranges), strict=True):
        whole.append(torch.stack([torch.block_diag(*sample) for sample in zip(*pieces, strict=True)]))
    return SlopeRange(*whole)


def _ends(phi: Activation, center: Tensor, radius: Tensor, secants: bool) -> tuple[Tensor, Tensor]:
    wide = torch.where(radius > 0, radius * (1 + SLACK) + 4 * EPS * center.abs(), 0.0)
    lower, upper = center - wide, center + wide
    least, most = phi.slope
    if phi.traits.stretch is not None:  # the slope falls with the distance from zero, on both sides
        nearest = torch.zeros_like(center).clamp(lower, upper)
        low = (torch.minimum(phi.slope_at(lower), phi.slope_at(upper)) - SLACK).clamp(least, most)
        high = (phi.slope_at(nearest) + SLACK).clamp(least, most)
        bent = (lower < 0) & (upper > 0)  # elsewhere quotients are monotone
        return _narrowed(phi, center, low, high, [lower, upper], bent) if secants else (low, high)
    if phi.traits.kinks is None:
        if math.isinf(curvature := _curvature(phi)):
            return torch.full_like(center, least), torch.full_like(center, most)
        here, change = phi.slope_at(center), curvature * wide
        return (here - change - SLACK).clamp(least, most), (here + change + SLACK).clamp(least, most)
    ends = torch.stack([lower, upper])
    for kink in phi.traits.kinks:  # a piece begins and ends at each
        sides = torch.stack([torch.full_like(center, kink) - 1e-9, torch.full_like(center, kink) + 1e-9])
        ends = torch.cat([ends, torch.where((lower <= kink) & (upper >= kink), sides, center)])
    slopes = phi.slope_at(ends)
    slack = torch.where((slopes == 0) | (slopes == 1), 0.0, SLACK + PARAMETER * slopes.abs())
    low, high = (slopes - slack).amin(0).clamp(least, most), (slopes + slack).amax(0).clamp(least, most)
    if not secants:
        return low, high
    kinks = [torch.full_like(center, kink).clamp(lower, upper) for kink in phi.traits.kinks]
    return _narrowed(phi, center, low, high, [lower, upper, *kinks], torch.zeros_like(center, dtype=torch.bool))


def _narrowed(
    phi: Activation, center: Tensor, low: Tensor, high: Tensor, points: list[Tensor], bent: Tensor
) -> tuple[Tensor, Tensor]:
    """Cuts slopes to the difference quotients between the center and points, between which they are monotone.

    Args:
        bent: where they are not, and all slopes stay.
    """
    here, there, step = phi.function(center), phi.function(torch.stack(points)), torch.stack(points) - center
    size = here.abs() + there.abs() + center.abs() + torch.stack(points).abs()
    origin = float(phi.function(torch.zeros(1, dtype=torch.float64)).abs())
    error = (phi.rounding + 8) * EPS * (size + origin) / step.abs()
    error = error + PARAMETER * (phi.slope[1] - phi.slope[0]) * (phi.rounding > 0)
    quotient = (there - here) / torch.where(step == 0, 1.0, step)
    error = torch.where((step == 0) | bent, torch.inf, error)
    return torch.maximum(low, (quotient - error).amin(0)), torch.minimum(high, (quotient + error).amax(0))


def _curvature(phi: Activation) -> float:
    """Bounds the second derivative of a smooth map; infinite where that is not known."""
    if isinstance(phi.function, partial):
        return used(phi.function.keywords["beta"])[1] / 4 if phi.function.func is _softplus else math.inf
    return CURVATURES.get(phi.function, math.inf)


CURVATURES: dict[Callable[[Tensor], Tensor], float] = {
    F.gelu: 0.79789,  # 2 / sqrt(2 pi), at zero as the next ones
    F.silu: 0.5,
    F.logsigmoid: 0.25,
    F.softsign: 2.0,
    F.tanhshrink: 0.76981,  # 4 / sqrt(27)
    torch.sin: 1.0,
}
BlockRule = Callable[[Tensor, Tensor], SlopeRange]  # (B, m, k), (B, m, k) -> (B, m, k, k)


def _block_rule(phi: Activation) -> BlockRule | None:
    function = phi.function
    if not isinstance(function, partial):
        return None
    options = function.keywords
    if function.func is _softmax or (function.func is torch.softmax and phi.block == 0):
        return _softmax_range
    if function.func is _normalise:
        return partial(_normalise_range, eps=options["eps"])
    if function.func is _multiply:
        return partial(_product_range, shape=(1, 1, 1), bounds=options["bounds"])
    if function.func is _matrix_product:
        shape = options["rows"], options["inner"], options["columns"]
        return partial(_product_range, shape=shape, bounds=options.get("bounds"))
    return None


def _softmax_range(center: Tensor, radius: Tensor) -> SlopeRange:
    """``diag(p) - p p'``, every p between what it is where the others are largest and where they are least."""
    lower, upper = center - radius, center + radius
    others = 1 - torch.eye(center.shape[-1], dtype=center.dtype, device=center.device)
    most = 1 / (1 + (torch.exp(lower[..., None, :] - upper[..., :, None]) * others).sum(-1))
    least = 1 / (1 + (torch.exp(upper[..., None, :] - lower[..., :, None]) * others).sum(-1))
    size = SLACK * (1 + center.abs().amax(-1, keepdim=True))
    p, doubt = (most + least) / 2, (most - least) / 2 + size
    middle = p.diag_embed() - p[..., :, None] * p[..., None, :]
    diagonal = doubt * ((1 - 2 * p).abs() + doubt)  # of p (1 - p)
    cross = p[..., :, None] * doubt[..., None, :] + doubt[..., :, None] * (p + doubt)[..., None, :]
    return SlopeRange(middle, (cross * others + diagonal.diag_embed()) * (1 + SLACK) + SLACK)


def _normalise_range(center: Tensor, radius: Tensor, eps: float) -> SlopeRange:
    """``(I - 11'/k - y y'/k) / s``, ``y = m / s``; m is the deviation from the mean, s its root mean square."""
    size = center.shape[-1]
    mean = torch.full((size, size), 1 / size, dtype=center.dtype, device=center.device)
    centering = torch.eye(size, dtype=center.dtype, device=center.device) - mean
    deviation = center - center.mean(-1, keepdim=True)
    doubt = radius @ centering.abs() + 4e-16 * (size + 4) * center.abs().amax(-1, keepdim=True)
    least = (deviation.abs() - doubt).clamp(min=0).square().mean(-1, keepdim=True) + eps
    most = (deviation.abs() + doubt).square().mean(-1, keepdim=True) + eps
    inverse = SlopeRange(
        (least.rsqrt() + most.rsqrt()) / 2, (least.rsqrt() - most.rsqrt()) / 2 + SLACK * least.rsqrt()
    )
    y = deviation * inverse.middle
    error = doubt * (inverse.middle + inverse.radius) + deviation.abs() * inverse.radius + SLACK * y.abs()
    square = y[..., :, None] * y[..., None, :]
    spread = y.abs()[..., :, None] * error[..., None, :] + error[..., :, None] * (y.abs() + error)[..., None, :]
    inner, inner_radius = centering - square / size, spread / size + SLACK * (1 + square.abs())
    factor, factor_radius = inverse.middle[..., None], inverse.radius[..., None]
    radius_ = factor_radius * inner.abs() + (factor + factor_radius) * inner_radius
    return SlopeRange(factor * inner, radius_ * (1 + SLACK) + SLACK * (factor * inner).abs())


def _product_range(
    center: Tensor, radius: Tensor, shape: tuple[int, int, int], bounds: tuple[float, float] | None
) -> SlopeRange:
    """The derivative of an entry of PQ: by an entry of P an entry of Q, and the other way round."""
    _, inner, columns = shape
    i, j, k = (index.flatten() for index in torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
    left, right = i * inner + j, shape[0] * inner + j * columns + k  # places of the two factors in the block
    limit = torch.full_like(center[0, 0], torch.inf)
    if bounds is not None:
        limit[: shape[0] * inner], limit[shape[0] * inner :] = bounds
    lower, upper = center - radius * (1 + SLACK), center + radius * (1 + SLACK)
    cut = (lower < -limit) | (upper > limit)  # where a factor may be clipped its slope is any from 0 to 1
    lower, upper = lower.clamp(-limit, limit), upper.clamp(-limit, limit)
    middle, doubt = (center.new_zeros(*center.shape, center.shape[-1]) for _ in range(2))
    for own, other in ((left, right), (right, left)):
        low = torch.where(cut[..., own], lower[..., other].clamp(max=0), lower[..., other])
        high = torch.where(cut[..., own], upper[..., other].clamp(min=0), upper[..., other])
        middle[..., i * columns + k, own] = (low + high) / 2
        doubt[..., i * columns + k, own] = (high - low) / 2
    return SlopeRange(middle, doubt * (1 + SLACK) + SLACK * (middle.abs() + doubt))
