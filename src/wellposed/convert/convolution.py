"""Convolutions and transposed convolutions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.padding import padded
from wellposed.convert.signal import Signal, factors
from wellposed.forms import Convolution, Identity, Operator, Product, Repeated, Selection

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
    operator = Convolution(weight.detach().clone(), signal.shape[-d - 1 :], step, width, spread, groups)
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
    offset = None if bias is None else bias.detach().view(-1, *(1,) * operator.dimensions).expand(shape)
    if count > 1:
        return signal.gathered().linear(Repeated(operator, count), shape, offset)
    signal = signal.gathered()
    if len(signal.terms) > 1 and (operator.groups > 1 or operator.transposed):
        signal = signal.kept()
    moved = replace(signal, terms={}).linear(operator, shape, offset)
    terms = {k: _narrowed(operator, part) for k, part in signal.terms.items()}
    return replace(moved, terms=terms)


def _narrowed(operator: Convolution, part: Operator) -> Operator:
    """Multiplies by a convolution, leaving out channels that are zero, as concatenation makes them."""
    first, *rest = factors(part)
    found: Operator = operator @ part
    if not isinstance(first, Selection) or operator.groups > 1 or operator.transposed:
        return found
    index = first.index.view(operator.input_shape[0], -1)
    filled = (index >= 0).any(1)
    if bool(filled.all()) or not bool(filled.any()):
        return found
    weight, shape = operator.weight[:, filled], (int(filled.sum()), *operator.input_shape[1:])
    places, columns = index[filled].reshape(-1), first.columns
    inner: Operator = Selection(places, columns, first.kind)
    if len(places) == columns and torch.equal(places, torch.arange(columns, device=places.device)):
        inner = Identity(columns, first.kind, first.device)
    narrow: Operator = replace(operator, weight=weight.contiguous(), input_shape=shape) @ inner
    return narrow @ _product(rest) if rest else narrow


def _product(parts: list[Operator]) -> Operator:
    return parts[0] if len(parts) == 1 else Product(tuple(parts))


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
    forward = Convolution(weight.detach().clone(), output, step, width, spread, groups)
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
