"""Pooling: averages are convolutions, maxima the block map of 003 (section 2.5)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.activations import max_pool
from wellposed.convert.convolution import Sizes, sizes
from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.padding import padded
from wellposed.convert.resize import along_axes
from wellposed.convert.signal import Signal
from wellposed.forms import Convolution, Dense, Diagonal, Operator, Repeated

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
    places = signal.places().reshape(-1, *extent)[tuple(index)]  # (lead, *windows, *widths)
    windows = [axis.shape[0] for axis in axes]
    size = math.prod(axis.shape[1] for axis in axes)
    picked = signal.gathered().select(places.reshape(-1, size))
    if size == 1:
        return picked.reshape((*lead, *windows))
    pooled = picked.activate(max_pool(size))
    return pooled.select(pooled.places()[:, 0].reshape(*lead, *windows))


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
    home: dict[str, Any] = {"dtype": signal.dtype, "device": signal.device}
    one = torch.ones(1, 1, *extent, **home)
    pooled = _AVERAGE[dimensions](one, kernel, step, width, ceil_mode, count_include_pad, *options)
    spans = zip(pooled.shape[2:], step, kernel, extent, width, strict=True)
    more = [max(0, (m - 1) * s + k - n - 2 * p) for m, s, k, n, p in spans]
    if any(more):  # windows that reach beyond the padding of the far end
        pad = [count for p, extra in zip(reversed(width), reversed(more), strict=True) for count in (p, p + extra)]
        signal, one = padded(signal, pad), F.pad(one, pad)
        width = (0,) * dimensions
    weight, shape = torch.ones(1, 1, *kernel, **home), (1, *signal.shape[-dimensions:])
    total = Convolution(weight, shape, step, width, (1,) * dimensions)
    factor = pooled.flatten() / total.apply(one.flatten(1))[0]
    lead = signal.shape[:-dimensions]
    operator = repeated(Diagonal(factor) @ total, math.prod(lead))
    return signal.gathered().linear(operator, (*lead, *pooled.shape[2:]))


def adaptive_average_pool(dimensions: int, signal: Signal, output_size: Any) -> Signal:
    """Converts adaptive average pooling; to a single entry it is one row of equal weights."""
    extent, lead = signal.shape[-dimensions:], signal.shape[:-dimensions]
    target = _target(output_size, extent)
    home: dict[str, Any] = {"dtype": signal.dtype, "device": signal.device}
    if math.prod(target) == 1:
        size = math.prod(extent)
        row = Dense(torch.full((1, size), 1 / size, **home))
        return signal.gathered().linear(repeated(row, math.prod(lead)), (*lead, *target))
    if all(n % m == 0 for n, m in zip(extent, target, strict=True)):
        return average_pool(dimensions, signal, [n // m for n, m in zip(extent, target, strict=True)])
    axes = [
        F.adaptive_avg_pool1d(torch.eye(n, **home)[:, None], m)[:, 0].mT
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
        [min(place, stop - 1) for place in range(start, start + widest)]
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
