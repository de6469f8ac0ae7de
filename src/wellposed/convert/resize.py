"""Interpolation: along every axis a small matrix of its own."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.signal import Signal
from wellposed.forms import Repeated, Sparse

_LINEAR = ("linear", "bilinear", "trilinear", "bicubic", "area")
_NEAREST = ("nearest", "nearest-exact")


def along_axes(signal: Signal, axes: Sequence[Tensor]) -> Signal:
    """Multiplies the last axes by a matrix each, by their Kronecker product.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((1, 4), torch.float32, torch.device("cpu"))
        >>> along_axes(network.input, [torch.ones(3, 4)]).shape
        (1, 1, 3)
    """
    matrix = axes[0].to_sparse().coalesce()
    for axis in axes[1:]:
        matrix = _kronecker(matrix, axis.to_sparse().coalesce())
    lead = signal.shape[: -len(axes)]
    operator = Repeated(Sparse(matrix), math.prod(lead))
    return signal.gathered().linear(operator, (*lead, *(axis.shape[0] for axis in axes)))


def _kronecker(left: Tensor, right: Tensor) -> Tensor:
    (i, j), (down, across) = left.indices(), right.indices()
    rows, columns = i[:, None] * right.shape[0] + down, j[:, None] * right.shape[1] + across
    values = left.values()[:, None] * right.values()
    index = torch.stack([rows.flatten(), columns.flatten()])
    size = (left.shape[0] * right.shape[0], left.shape[1] * right.shape[1])
    return torch.sparse_coo_tensor(index, values.flatten(), size, check_invariants=False).coalesce()


@RULES.function(F.interpolate, F.upsample)
def interpolated(
    signal: Signal,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Signal:
    """Converts interpolation to the nearest entry, linear (in one to three dimensions), bicubic and by area."""
    d = len(signal.shape) - 2
    if antialias or mode not in (*_LINEAR, *_NEAREST):
        raise UnsupportedError(
            f"interpolation of mode {mode!r}{' with antialias' if antialias else ''} has no implicit form"
        )
    options: dict[str, Any] = {"recompute_scale_factor": recompute_scale_factor}
    if mode in _NEAREST:
        places = signal.places().double()
        return signal.select(F.interpolate(places, size, scale_factor, mode, **options).long())
    target, factors = _each(size, d), _each(scale_factor, d)
    if mode != "area":
        options["align_corners"] = align_corners
    extent = zip(signal.shape[2:], target, factors, strict=True)
    return along_axes(signal, [_axis(n, m, factor, mode, options, signal) for n, m, factor in extent])


def _each(value: Any, dimensions: int) -> tuple:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * dimensions


def _axis(length: int, size: Any, factor: Any, mode: str, options: dict[str, Any], signal: Signal) -> Tensor:
    """Interpolates the unit vectors of one axis."""
    unit = torch.eye(length, dtype=signal.dtype, device=signal.device)[:, None]
    if mode == "bicubic":
        wanted, stretch = (None if value is None else (value, 1) for value in (size, factor))
        return F.interpolate(unit[..., None], wanted, stretch, mode, **options)[:, 0, :, 0].mT
    return F.interpolate(unit, size, factor, "area" if mode == "area" else "linear", **options)[:, 0].mT


@RULES.module(nn.Upsample)
def _upsample(module: nn.Upsample, signal: Signal) -> Signal:
    again = module.recompute_scale_factor
    return interpolated(signal, module.size, module.scale_factor, module.mode, module.align_corners, again)


def _register_operators() -> None:
    """Registers what torch.export makes of interpolation."""
    for dimensions in (1, 2, 3):
        name = f"upsample_nearest{dimensions}d"
        RULES.named(name)(lambda signal, size, *rest: _exported(signal, size, rest, "nearest", None))
    for name, mode in (
        ("upsample_linear1d", "linear"),
        ("upsample_bilinear2d", "bilinear"),
        ("upsample_trilinear3d", "trilinear"),
        ("upsample_bicubic2d", "bicubic"),
    ):
        RULES.named(name)(
            lambda signal, size, align, *rest, mode=mode: _exported(signal, size, rest, mode, bool(align))
        )


def _exported(signal: Signal, size: Any, rest: tuple, mode: str, align: bool | None) -> Signal:
    scales = next((value for value in rest if isinstance(value, list | tuple)), None)
    return interpolated(signal, size, None if size is not None else scales, mode, align)


_register_operators()
