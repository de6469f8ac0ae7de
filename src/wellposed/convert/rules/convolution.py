"""Convolutions, transposed convolutions, padding, pooling and interpolation.

`padded` fills up with constants or with entries of the signal, `convolved` and `transposed` are the convolutions.
`interpolated` applies a small matrix along every axis. Averages over windows are convolutions (`average_pool`),
maxima the block map of 003 section 2.5 (`maximum_pool`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.activations import max_pool
from wellposed.convert.signal import RULES, Signal, UnsupportedError, factors
from wellposed.forms import Convolution, Dense, Diagonal, Identity, Operator, Product, Repeated, Selection, Sparse

MODES = ("constant", "reflect", "replicate", "circular")


def padded(signal: Signal, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Signal:
    """Converts torch.nn.functional.pad.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((1, 3), torch.float32, torch.device("cpu"))
        >>> padded(network.input, (1, 1), "reflect").shape
        (1, 1, 5)
    """
    if mode not in MODES:
        raise UnsupportedError(f"padding of mode {mode!r} has no implicit form; use one of {', '.join(MODES)}")
    places, pad = signal.indices(), [int(width) for width in pad]
    if mode != "constant":  # which torch does for floating-point numbers only; places are exact in float64
        return signal.select(F.pad(places.double(), pad, mode=mode).long())
    moved = signal.select(F.pad(places, pad, value=-1))
    if not value:
        return moved
    inside = F.pad(torch.ones(signal.shape, dtype=signal.dtype, device=signal.device), pad)
    return moved.shifted(float(value) * (1 - inside))


RULES.function(F.pad, torch.ops.aten.pad)(padded)
RULES.named("constant_pad_nd")(lambda signal, pad, value=0: padded(signal, pad, "constant", float(value)))
for _mode, _stem in (("reflect", "reflection"), ("replicate", "replication")):
    for _dims in (1, 2, 3):
        RULES.named(f"{_stem}_pad{_dims}d")(lambda signal, pad, mode=_mode: padded(signal, pad, mode))


def _register(kinds: tuple[type[nn.Module], ...], mode: str) -> None:
    @RULES.module(*kinds)
    def _layer(module: Any, signal: Signal) -> Signal:
        return padded(signal, module.padding, mode, getattr(module, "value", None))


_register((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), "reflect")
_register((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), "replicate")
_register((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), "circular")
_register((nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), "constant")
_register((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), "constant")


Sizes = int | Sequence[int]


def sizes(value: Sizes, dimensions: int) -> tuple[int, ...]:
    """Reads a size that is given once or for every dimension.

    Example:
        >>> sizes(2, 3), sizes([1, 2], 2)
        ((2, 2, 2), (1, 2))
    """
    given = (value,) if isinstance(value, int) else tuple(int(size) for size in value)
    return given * dimensions if len(given) == 1 else given


def convolved(
    signal: Signal,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Signal:
    """Converts a convolution (003, section 2.5); zeros are padded by the operator itself.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((1, 5), torch.float32, torch.device("cpu"))
        >>> convolved(network.input, torch.ones(2, 1, 3), padding="same").shape
        (1, 2, 5)
    """
    d = weight.dim() - 2
    step, spread = sizes(stride, d), sizes(dilation, d)
    signal, width = _with_padding(signal, padding, weight.shape[2:], spread)
    operator = Convolution(weight.clone(), signal.shape[-d - 1 :], step, width, spread, groups)
    return _applied(signal, operator, operator.output_shape, bias)


def _with_padding(
    signal: Signal, padding: Sizes | str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Signal, tuple[int, ...]]:
    """Returns the padding of both sides; what one side has more is padded beforehand."""
    if padding == "valid":
        return signal, (0,) * len(kernel)
    if padding != "same":
        assert not isinstance(padding, str)
        return signal, sizes(padding, len(kernel))
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if any(total % 2 for total in totals):
        signal = padded(signal, [width for total in reversed(totals) for width in (0, total % 2)])
    return signal, tuple(total // 2 for total in totals)


def _applied(signal: Signal, operator: Convolution, output: tuple[int, ...], bias: Tensor | None) -> Signal:
    """Applies a convolution to all images of a signal."""
    lead = signal.shape[: -operator.dimensions - 1]
    count = signal.size // operator.shape[1]
    shape = (*lead, *output)
    offset = None if bias is None else bias.view(-1, *(1,) * operator.dimensions).expand(shape)
    if count > 1:
        return signal.gathered().linear(Repeated(operator, count), shape, offset)
    signal = signal.gathered().apart()
    if len(signal.sources) > 1 and (operator.groups > 1 or operator.transposed):
        signal = signal.as_state()
    moved = replace(signal, terms={}).linear(operator, shape, offset)
    terms = {k: _narrowed(operator, part) for k, part in signal.terms.items()}
    if not signal.network.can_form(terms):
        return _applied(signal.split(), operator, output, bias)
    return replace(moved, terms=terms)


def _narrowed(operator: Convolution, part: Operator) -> Operator:
    """Multiplies by a convolution, leaving out channels that are zero, as concatenation makes them."""
    first, *rest = factors(part)
    product: Operator = operator @ part
    if not isinstance(first, Selection) or operator.groups > 1 or operator.transposed:
        return product
    index = first.index.view(operator.input_shape[0], -1)
    filled = (index >= 0).any(1)
    if bool(filled.all()) or not bool(filled.any()):
        return product
    weight, shape = operator.weight[:, filled], (int(filled.sum()), *operator.input_shape[1:])
    places, columns = index[filled].reshape(-1), first.columns
    inner: Operator = Selection(places, columns, first.kind)
    if len(places) == columns and torch.equal(places, torch.arange(columns, device=places.device)):
        inner = Identity(columns, first.kind, first.device)
    narrow: Operator = replace(operator, weight=weight.contiguous(), input_shape=shape) @ inner
    return narrow @ _product(rest) if rest else narrow


def _product(operators: list[Operator]) -> Operator:
    return operators[0] if len(operators) == 1 else Product(tuple(operators))


def transposed(
    signal: Signal,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Signal:
    """Converts a transposed convolution: the transpose of the convolution from its outputs to its inputs.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((1, 5), torch.float32, torch.device("cpu"))
        >>> transposed(network.input, torch.ones(1, 2, 3), stride=2, output_padding=1).shape
        (1, 2, 12)
    """
    d = weight.dim() - 2
    step, width, spread, extra = (sizes(value, d) for value in (stride, padding, dilation, output_padding))
    kernel, before = weight.shape[2:], signal.shape[-d:]
    after = tuple(
        (n - 1) * s - 2 * p + gap * (k - 1) + e + 1
        for n, s, p, gap, k, e in zip(before, step, width, spread, kernel, extra, strict=True)
    )
    surplus = [e // s for e, s in zip(extra, step, strict=True)]  # windows that see padding only
    if any(surplus):
        signal = padded(signal, [count for more in reversed(surplus) for count in (0, more)])
    output = (weight.shape[1] * groups, *after)
    forward = Convolution(weight.clone(), output, step, width, spread, groups)
    return _applied(signal, forward.T, output, bias)


for _d in (1, 2, 3):
    RULES.named(f"conv{_d}d")(convolved)
    RULES.named(f"conv_transpose{_d}d")(transposed)


@RULES.named("convolution")
def _convolution(
    signal: Signal,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed_: bool,
    output_padding: Sizes,
    groups: int,
) -> Signal:
    if transposed_:
        return transposed(signal, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolved(signal, weight, bias, stride, padding, dilation, groups)


@RULES.module(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _layer(module: Any, signal: Signal) -> Signal:
    padding = module.padding
    if module.padding_mode != "zeros":
        signal = padded(signal, module._reversed_padding_repeated_twice, module.padding_mode)
        padding = 0
    return convolved(signal, module.weight, module.bias, module.stride, padding, module.dilation, module.groups)


@RULES.module(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _transposed_layer(module: Any, signal: Signal, output_size: Sequence[int] | None = None) -> Signal:
    if output_size is not None:
        raise UnsupportedError(
            f"{type(module).__name__} is called with output_size; give it output_padding when it is made"
        )
    extra = module.output_padding
    return transposed(
        signal, module.weight, module.bias, module.stride, module.padding, extra, module.groups, module.dilation
    )


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
        places = signal.indices().double()
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


_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def repeated(operator: Operator, count: int) -> Operator:
    """Applies an operator to every piece of a vector."""
    return operator if count == 1 else Repeated(operator, count)


def maximum_of_windows(signal: Signal, axes: Sequence[Tensor]) -> Signal:
    """Takes the maximum over windows: the outer product of ``(windows, width)`` places along the last axes.

    The states of a window are consecutive; the first of them carries the maximum, the others are dead.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((1, 4), torch.float32, torch.device("cpu"))
        >>> maximum_of_windows(network.input, [torch.tensor([[0, 1], [2, 3]])]).shape
        (1, 1, 2)
    """
    d = len(axes)
    lead, extent = signal.shape[:-d], signal.shape[-d:]
    index: list[Any] = [slice(None)]
    for i, axis in enumerate(axes):
        shape = [1] * (2 * d)
        shape[i], shape[d + i] = axis.shape
        index.append(axis.to(signal.device).view(shape))
    places = signal.indices().reshape(-1, *extent)[tuple(index)]  # (lead, *windows, *widths)
    windows = [axis.shape[0] for axis in axes]
    size = math.prod(axis.shape[1] for axis in axes)
    picked = signal.gathered().select(places.reshape(-1, size))
    if size == 1:
        return picked.reshape((*lead, *windows))
    pooled = picked.activate(max_pool(size))
    return pooled.select(pooled.indices()[:, 0].reshape(*lead, *windows))


def _require_no_indices(wanted: bool) -> None:
    if wanted:
        raise UnsupportedError("pooling that returns indices jumps, so it has no implicit form; drop them")


def maximum_pool(
    dimensions: int,
    signal: Signal,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Signal:
    """Converts max-pooling; entries of the padding are replaced by an entry of the same window."""
    _require_no_indices(return_indices)
    kernel = sizes(kernel_size, dimensions)
    step = sizes(stride, dimensions) if stride or stride == 0 else kernel
    rest = (sizes(padding, dimensions), sizes(dilation, dimensions), (ceil_mode,) * dimensions)
    settings = zip(signal.shape[-dimensions:], kernel, step, *rest, strict=True)
    return maximum_of_windows(signal, [_windows(*setting) for setting in settings])


def _windows(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Tensor:
    """Lists the places that windows read along one axis, (windows, kernel), a valid one for those outside."""
    count = F.max_pool1d(torch.zeros(1, 1, length), kernel, stride, padding, dilation, ceil).shape[-1]
    places = torch.arange(count)[:, None] * stride - padding + torch.arange(kernel) * dilation
    inside = (places >= 0) & (places < length)
    valid = places.masked_fill(~inside, length).amin(1, keepdim=True)
    return torch.where(inside, places, valid)


def average_pool(
    dimensions: int,
    signal: Signal,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Signal:
    """Converts average pooling: one convolution with equal weights for every channel."""
    kernel = sizes(kernel_size, dimensions)
    step = sizes(stride, dimensions) if stride or stride == 0 else kernel
    width, extent = sizes(padding, dimensions), signal.shape[-dimensions:]
    options = () if divisor_override is None else (divisor_override,)
    factory_kwargs: dict[str, Any] = {"dtype": signal.dtype, "device": signal.device}
    one = torch.ones(1, 1, *extent, **factory_kwargs)
    pooled = _AVERAGE[dimensions](one, kernel, step, width, ceil_mode, count_include_pad, *options)
    spans = zip(pooled.shape[2:], step, kernel, extent, width, strict=True)
    more = [max(0, (m - 1) * s + k - n - 2 * p) for m, s, k, n, p in spans]
    if any(more):  # windows that reach beyond the padding of the far end
        pad = [count for p, extra in zip(reversed(width), reversed(more), strict=True) for count in (p, p + extra)]
        signal, one = padded(signal, pad), F.pad(one, pad)
        width = (0,) * dimensions
    weight, shape = torch.ones(1, 1, *kernel, **factory_kwargs), (1, *signal.shape[-dimensions:])
    total = Convolution(weight, shape, step, width, (1,) * dimensions)
    factor = pooled.flatten() / total.apply(one.flatten(1))[0]
    lead = signal.shape[:-dimensions]
    operator = repeated(Diagonal(factor) @ total, math.prod(lead))
    return signal.gathered().linear(operator, (*lead, *pooled.shape[2:]))


def adaptive_average_pool(dimensions: int, signal: Signal, output_size: Any) -> Signal:
    """Converts adaptive average pooling; to a single entry it is one row of equal weights."""
    extent, lead = signal.shape[-dimensions:], signal.shape[:-dimensions]
    target = _target(output_size, extent)
    factory_kwargs: dict[str, Any] = {"dtype": signal.dtype, "device": signal.device}
    if math.prod(target) == 1:
        size = math.prod(extent)
        row = Dense(torch.full((1, size), 1 / size, **factory_kwargs))
        return signal.gathered().linear(repeated(row, math.prod(lead)), (*lead, *target))
    if all(n % m == 0 for n, m in zip(extent, target, strict=True)):
        return average_pool(dimensions, signal, [n // m for n, m in zip(extent, target, strict=True)])
    axes = [
        F.adaptive_avg_pool1d(torch.eye(n, **factory_kwargs)[:, None], m)[:, 0].mT
        for n, m in zip(extent, target, strict=True)
    ]
    return along_axes(signal, axes)


def adaptive_maximum_pool(
    dimensions: int, signal: Signal, output_size: Any, return_indices: bool = False
) -> Signal:
    """Converts adaptive max-pooling; shorter windows repeat one of their entries."""
    _require_no_indices(return_indices)
    extent = signal.shape[-dimensions:]
    target = _target(output_size, extent)
    return maximum_of_windows(signal, [_adaptive(n, m) for n, m in zip(extent, target, strict=True)])


def _adaptive(length: int, count: int) -> Tensor:
    """Lists the places of adaptive windows along one axis."""
    starts = [i * length // count for i in range(count)]
    stops = [-((-(i + 1) * length) // count) for i in range(count)]
    widest = max(stop - start for start, stop in zip(starts, stops, strict=True))
    rows = [
        [min(index, stop - 1) for index in range(start, start + widest)]
        for start, stop in zip(starts, stops, strict=True)
    ]
    return torch.tensor(rows)


def _target(output_size: Any, extent: Sequence[int]) -> tuple[int, ...]:
    """Reads an output size, of which None stands for the size of the input."""
    given = (output_size,) if output_size is None or isinstance(output_size, int) else tuple(output_size)
    wanted = given * len(extent) if len(given) == 1 else given
    return tuple(n if m is None else int(m) for n, m in zip(extent, wanted, strict=True))


for _d in (1, 2, 3):
    RULES.named(f"max_pool{_d}d")(partial(maximum_pool, _d))
    RULES.function(getattr(F, f"max_pool{_d}d_with_indices"))(partial(maximum_pool, _d, return_indices=True))
    RULES.named(f"avg_pool{_d}d")(partial(average_pool, _d))
    RULES.named(f"adaptive_avg_pool{_d}d", f"_adaptive_avg_pool{_d}d")(partial(adaptive_average_pool, _d))
    RULES.named(f"adaptive_max_pool{_d}d")(partial(adaptive_maximum_pool, _d))


@RULES.module(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def _maximum_layer(module: Any, signal: Signal) -> Signal:
    settings = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    return maximum_pool(_dimensions(module), signal, *settings, module.return_indices)


@RULES.module(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def _average_layer(module: Any, signal: Signal) -> Signal:
    settings = (module.kernel_size, module.stride, module.padding, module.ceil_mode, module.count_include_pad)
    return average_pool(_dimensions(module), signal, *settings, getattr(module, "divisor_override", None))


@RULES.module(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def _adaptive_average_layer(module: Any, signal: Signal) -> Signal:
    return adaptive_average_pool(_dimensions(module), signal, module.output_size)


@RULES.module(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def _adaptive_maximum_layer(module: Any, signal: Signal) -> Signal:
    return adaptive_maximum_pool(_dimensions(module), signal, module.output_size, module.return_indices)


def _dimensions(module: nn.Module) -> int:
    """Reads the number of dimensions from the name of the nearest class of torch."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next(int(name[-2]) for name in names if name.endswith(("1d", "2d", "3d")))
