"""Activation layers and functions as blocks of states.

Those that `wellposed.activations` knows need no rule. Here are those that are made of ReLU (`prelu`, `clamped`,
`larger`, `smaller`), then `glu`, `softmax` along any dimension, and the logarithms of sums that go with it
(`log_sum_exp`, `log_softmax`).
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.activations import elu, get_activation, hardtanh, leaky_relu, softplus
from wellposed.activations import softmax as softmax_map
from wellposed.convert.rules.arithmetic import minus, multiplied, network_of, plus
from wellposed.convert.rules.shape import as_signal, joined
from wellposed.convert.signal import RULES, Signal, UnsupportedError


def _layer(kind: type[nn.Module], rule: Callable[..., Signal], *settings: str) -> None:
    """Registers a module by the rule of its function and the names of its settings."""
    RULES.module(kind)(lambda module, signal: rule(signal, *(getattr(module, name) for name in settings)))


RULES.named("cos")(lambda signal: signal.shifted(torch.pi / 2).activate("sin"))


@RULES.named("rrelu")
def _random_relu(
    signal: Signal, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *rest: Any, **others: Any
) -> Signal:
    """Takes the mean slope, as torch does in evaluation."""
    if training:
        get_activation("rrelu")  # raises, with the reason
    return signal.activate(leaky_relu((float(lower) + float(upper)) / 2))


_layer(nn.RReLU, _random_relu, "lower", "upper")


@RULES.named("prelu", "_prelu_kernel")
def prelu(signal: Signal, weight: Tensor) -> Signal:
    """Converts ``relu(z) - a relu(-z)``; with one slope for all it is a leaky ReLU."""
    slopes = weight.flatten()
    trained = torch.is_grad_enabled() and weight.requires_grad
    if not trained and bool((slopes == slopes[0]).all()):
        return signal.activate(leaky_relu(float(slopes[0])))
    wide = slopes.view(-1, *(1,) * (len(signal.shape) - 2)) if weight.dim() == 1 else weight
    positive, negative = relu_pair(signal)
    return positive.plus(negative.scaled(-wide))


_layer(nn.PReLU, prelu, "weight")


def relu_pair(signal: Signal) -> tuple[Signal, Signal]:
    """Returns ``relu(z)`` and ``relu(-z)`` as one block of states, so that z is computed once.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((3,), torch.float32, torch.device("cpu"))
        >>> [half.shape for half in relu_pair(network.input)], network.sources[0].size
        ([(1, 3), (1, 3)], 6)
    """
    places = signal.gathered().indices()
    sign = torch.ones(2, *signal.shape, dtype=signal.dtype, device=signal.device)
    sign[1] = -1
    both = signal.gathered().select(torch.stack([places, places])).scaled(sign).activate("relu")
    return both.select(both.indices()[0]), both.select(both.indices()[1])


@RULES.named("abs", "absolute")
@RULES.function(abs, operator.abs)
def _absolute(signal: Signal) -> Signal:
    positive, negative = relu_pair(signal)
    return positive.plus(negative)


@RULES.named("elu")
def _elu(
    signal: Signal, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: bool = False
) -> Signal:
    inner = signal if input_scale == 1 else signal.scaled(float(input_scale))
    if scale == 1 or isinstance(scale, bool):
        return inner.activate(elu(float(alpha)))
    return _scaled_elu(signal, float(alpha), float(scale), float(input_scale))


def _scaled_elu(signal: Signal, alpha: float, scale: float, input_scale: float) -> Signal:
    """Converts ATen's ``scale (max(z, 0) + alpha min(e^(s z) - 1, 0))``; s acts below zero alone."""
    positive, negative = relu_pair(signal)
    below = negative.scaled(-input_scale).activate(elu(alpha))
    return positive.plus(below).scaled(scale)


@RULES.named("celu")
def _celu(signal: Signal, alpha: float = 1.0, inplace: bool = False) -> Signal:
    """Converts ``alpha elu(z / alpha)``."""
    return signal.scaled(1 / float(alpha)).activate(elu(1.0)).scaled(float(alpha))


_layer(nn.CELU, _celu, "alpha")


@RULES.named("clamp", "clip")
def clamped(signal: Signal, min: Any = None, max: Any = None) -> Signal:
    """Converts a projection on an interval, given by numbers, tensors or signals."""
    if isinstance(min, int | float) and isinstance(max, int | float):
        return signal.activate(hardtanh(float(min), float(max)))
    above = signal if min is None else larger(signal, min)
    return above if max is None else smaller(above, max)


RULES.named("clamp_min")(lambda signal, min: clamped(signal, min))
RULES.named("clamp_max")(lambda signal, max: clamped(signal, None, max))


@RULES.named("maximum", "fmax")
def larger(a: Any, b: Any) -> Signal:
    """Converts ``max(a, b) = b + relu(a - b)``."""
    network = network_of(a, b)
    first, second = (_once(as_signal(value, network)) for value in (a, b))
    return plus(second, minus(first, second).activate("relu"))


@RULES.named("minimum", "fmin")
def smaller(a: Any, b: Any) -> Signal:
    """Converts ``min(a, b) = b - relu(b - a)``."""
    network = network_of(a, b)
    first, second = (_once(as_signal(value, network)) for value in (a, b))
    return minus(second, minus(second, first).activate("relu"))


def _once(signal: Signal) -> Signal:
    return signal.as_state() if signal.costly else signal


@RULES.named("threshold")
def _threshold(signal: Signal, threshold: float, value: float, inplace: bool = False) -> Signal:
    if threshold != value:
        get_activation("threshold")  # raises, with the reason
    return signal.shifted(-float(value)).activate("relu").shifted(float(value))


_layer(nn.Threshold, _threshold, "threshold", "value")


@RULES.named("glu")
def glu(signal: Signal, dim: int = -1) -> Signal:
    """Converts ``a sigmoid(b)`` of the two halves along a dimension."""
    whole = signal.as_state() if signal.costly else signal
    a, b = (whole.select(part) for part in whole.indices().chunk(2, dim))
    return multiplied(a, b.activate("sigmoid"))


_layer(nn.GLU, glu, "dim")


@RULES.named("logaddexp")
def _log_add_exp(a: Any, b: Any) -> Signal:
    """Converts ``log(e^a + e^b) = b + softplus(a - b)``."""
    network = network_of(a, b)
    first, second = (_once(as_signal(value, network)) for value in (a, b))
    difference = minus(first, second)
    return plus(second, difference.activate(softplus(1.0)))


HIDDEN = -1e9  # a score whose weight is exactly zero, and that stays finite in every operation


def hidden_score(dtype: torch.dtype) -> float:
    """Returns what stands for a score of minus infinity."""
    return max(HIDDEN, torch.finfo(dtype).min / 4)


def finite(signal: Signal) -> Signal:
    """Replaces offsets of minus infinity, as masks add them, by `HIDDEN`."""
    if signal.offset is None or bool(signal.offset.isfinite().all()):
        return signal
    offset = torch.where(signal.offset == -math.inf, hidden_score(signal.dtype), signal.offset)
    return Signal(signal.network, signal.shape, signal.terms, offset)


def _dimension(signal: Signal, dim: int | None) -> int:
    """Reads a dimension, by torch's old rule if it is None."""
    count = len(signal.shape)
    axis = (0 if count in (0, 1, 3) else 1) if dim is None else dim % count
    if axis == 0 and count > 1 and signal.shape[0] == 1:
        raise UnsupportedError(
            "a softmax over the first dimension, the batch, mixes samples, so it has no implicit form; give the "
            "dimension of the classes"
        )
    return axis


@RULES.named("softmax", "_softmax", "_safe_softmax")
def softmax(signal: Signal, dim: int | None = None, *rest: Any, **others: Any) -> Signal:
    """Converts a softmax; the dimension is brought to the end and back.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((3, 4), torch.float32, torch.device("cpu"))
        >>> softmax(network.input, 1).shape, network.activations[0].name
        ((1, 3, 4), 'softmax(3)')
    """
    k = _dimension(signal, dim)
    signal = finite(signal)
    moved = signal.select(signal.indices().movedim(k, -1))
    weights = moved.activate(softmax_map(signal.shape[k]))
    return weights.select(weights.indices().movedim(-1, k))


@RULES.named("softmin")
def _softmin(signal: Signal, dim: int | None = None, *rest: Any, **others: Any) -> Signal:
    return softmax(signal.scaled(-1.0), dim)


@RULES.named("logsumexp")
def log_sum_exp(signal: Signal, dim: Any, keepdim: bool = False) -> Signal:
    """Converts ``log(sum(exp(z)))`` by halving: ``log(e^a + e^b) = b + softplus(a - b)``, in log2(k) blocks."""
    if not isinstance(dim, int):
        (dim,) = dim
    k, signal = _dimension(signal, dim), finite(signal)
    rows = signal.select(signal.indices().movedim(k, -1))
    while rows.shape[-1] > 1:
        rows = _halved(rows.as_state() if rows.costly else rows)
    shape = rows.shape[:-1]
    return rows.reshape((*shape[:k], 1, *shape[k:]) if keepdim else shape)


def _halved(rows: Signal) -> Signal:
    """Joins the entries of the last dimension in pairs; an odd one is left as it is."""
    half = rows.shape[-1] // 2
    first, second, odd = (rows.select(part) for part in rows.indices().split([half, half, rows.shape[-1] % 2], -1))
    pairs = second.plus(first.plus(second.scaled(-1.0)).activate(softplus(1.0)))
    return joined(torch.cat, [pairs, odd], dim=-1) if odd.size else pairs


@RULES.named("log_softmax", "_log_softmax")
def log_softmax(signal: Signal, dim: int | None = None, *rest: Any, **others: Any) -> Signal:
    """Converts ``z - log(sum(exp(z)))``."""
    signal = finite(signal)
    whole = signal.as_state() if signal.costly else signal
    k = _dimension(signal, dim)
    total = log_sum_exp(whole, k, keepdim=True)
    return whole.plus(total.select(total.indices().broadcast_to(whole.shape)).scaled(-1.0))


@RULES.module(nn.Softmax, nn.Softmin, nn.LogSoftmax)
def _softmax_layer(module: Any, signal: Signal) -> Signal:
    rules = {nn.Softmax: softmax, nn.Softmin: _softmin, nn.LogSoftmax: log_softmax}
    return next(rule for kind, rule in rules.items() if isinstance(module, kind))(signal, module.dim)


@RULES.module(nn.Softmax2d)
def _image_layer(module: nn.Softmax2d, signal: Signal) -> Signal:
    return softmax(signal, -3)
