"""Activation layers and functions as blocks of states."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.activations import Activation, elu, get_activation, hardtanh, leaky_relu, softplus, softshrink
from wellposed.convert.arithmetic import minus, network_of, plus
from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.multiply import multiplied
from wellposed.convert.shape import as_signal
from wellposed.convert.signal import Signal

_PLAIN: dict[str, tuple[type[nn.Module] | None, tuple[str, ...]]] = {
    "relu": (nn.ReLU, ("relu",)),
    "relu6": (nn.ReLU6, ("relu6",)),
    "selu": (nn.SELU, ("selu",)),
    "silu": (nn.SiLU, ("silu",)),
    "softsign": (nn.Softsign, ("softsign",)),
    "tanh": (nn.Tanh, ("tanh",)),
    "sigmoid": (nn.Sigmoid, ("sigmoid", "expit")),
    "hardsigmoid": (nn.Hardsigmoid, ("hardsigmoid",)),
    "tanhshrink": (nn.Tanhshrink, ("tanhshrink",)),
    "mish": (nn.Mish, ("mish",)),
    "hardswish": (nn.Hardswish, ("hardswish",)),
    "logsigmoid": (nn.LogSigmoid, ("logsigmoid", "log_sigmoid")),
    "sin": (None, ("sin",)),
}


def _register(name: str, kind: type[nn.Module] | None, functions: tuple[str, ...]) -> None:
    if kind is not None:
        RULES.module(kind)(lambda module, signal: signal.activate(name))
    RULES.named(*functions)(lambda signal, inplace=False: signal.activate(name))


for _name, (_kind, _functions) in _PLAIN.items():
    _register(_name, _kind, _functions)


def _layer(kind: type[nn.Module], rule: Callable[..., Signal], *settings: str) -> None:
    """Registers a module by the rule of its function and the names of its settings."""
    RULES.module(kind)(lambda module, signal: rule(signal, *(getattr(module, name) for name in settings)))


RULES.named("cos")(lambda signal: signal.shifted(torch.pi / 2).activate("sin"))


@RULES.named("leaky_relu")
def _leaky_relu(signal: Signal, negative_slope: float = 0.01, inplace: bool = False) -> Signal:
    return signal.activate(leaky_relu(float(negative_slope)))


_layer(nn.LeakyReLU, _leaky_relu, "negative_slope")


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
    slopes = weight.detach().flatten()
    if bool((slopes == slopes[0]).all()):
        return signal.activate(leaky_relu(float(slopes[0])))
    wide = slopes.view(-1, *(1,) * (len(signal.shape) - 2)) if weight.dim() == 1 else weight.detach()
    positive, negative = halves(signal)
    return positive.plus(negative.scaled(-wide))


_layer(nn.PReLU, prelu, "weight")


def halves(signal: Signal) -> tuple[Signal, Signal]:
    """Returns ``relu(z)`` and ``relu(-z)`` as one block of states, so that z is computed once.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((3,), torch.float32, torch.device("cpu"))
        >>> [half.shape for half in halves(network.input)], network.sources[0].size
        ([(1, 3), (1, 3)], 6)
    """
    places = signal.gathered().places()
    sign = torch.ones(2, *signal.shape, dtype=signal.dtype, device=signal.device)
    sign[1] = -1
    both = signal.gathered().select(torch.stack([places, places])).scaled(sign).activate("relu")
    return both.select(both.places()[0]), both.select(both.places()[1])


@RULES.named("abs", "absolute")
@RULES.function(abs, operator.abs)
def _absolute(signal: Signal) -> Signal:
    positive, negative = halves(signal)
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
    positive, negative = halves(signal)
    below = negative.scaled(-input_scale).activate(elu(alpha))
    return positive.plus(below).scaled(scale)


RULES.module(nn.ELU)(lambda module, signal: signal.activate(elu(float(module.alpha))))


@RULES.named("celu")
def _celu(signal: Signal, alpha: float = 1.0, inplace: bool = False) -> Signal:
    """Converts ``alpha elu(z / alpha)``."""
    return signal.scaled(1 / float(alpha)).activate(elu(1.0)).scaled(float(alpha))


_layer(nn.CELU, _celu, "alpha")


@RULES.named("gelu")
def _gelu(signal: Signal, approximate: str = "none") -> Signal:
    return signal.activate("gelu_tanh" if approximate == "tanh" else "gelu")


_layer(nn.GELU, _gelu, "approximate")


@RULES.named("hardtanh")
def _hardtanh(signal: Signal, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Signal:
    return signal.activate(hardtanh(float(min_val), float(max_val)))


_layer(nn.Hardtanh, _hardtanh, "min_val", "max_val")


@RULES.named("clamp", "clip")
def clamped(signal: Signal, min: Any = None, max: Any = None) -> Signal:
    """Converts a projection on an interval, given by numbers, tensors or signals."""
    if isinstance(min, int | float) and isinstance(max, int | float):
        return signal.activate(hardtanh(float(min), float(max)))
    found = signal if min is None else larger(signal, min)
    return found if max is None else smaller(found, max)


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
    return signal.kept() if signal.costly else signal


@RULES.named("softplus")
def _softplus(signal: Signal, beta: float = 1.0, threshold: float = 20.0) -> Signal:
    if threshold < 20:
        raise UnsupportedError(f"softplus with threshold={threshold} jumps where it becomes linear; use 20")
    return signal.activate(softplus(float(beta)))


_layer(nn.Softplus, _softplus, "beta", "threshold")


@RULES.named("softshrink")
def _softshrink(signal: Signal, lambd: float = 0.5) -> Signal:
    return signal.activate(softshrink(float(lambd)))


_layer(nn.Softshrink, _softshrink, "lambd")


@RULES.named("threshold")
def _threshold(signal: Signal, threshold: float, value: float, inplace: bool = False) -> Signal:
    if threshold != value:
        get_activation("threshold")  # raises, with the reason
    return signal.shifted(-float(value)).activate("relu").shifted(float(value))


_layer(nn.Threshold, _threshold, "threshold", "value")


def _refuse(name: str) -> Callable[..., Activation]:
    return lambda *args, **kwargs: get_activation(name)


RULES.named("hardshrink")(_refuse("hardshrink"))
RULES.module(nn.Hardshrink)(_refuse("hardshrink"))
RULES.named("sign", "sgn", "heaviside")(_refuse("sign"))


@RULES.named("glu")
def glu(signal: Signal, dim: int = -1) -> Signal:
    """Converts ``a sigmoid(b)`` of the two halves along a dimension."""
    whole = signal.kept() if signal.costly else signal
    a, b = (whole.select(part) for part in whole.places().chunk(2, dim))
    return multiplied(a, b.activate("sigmoid"))


_layer(nn.GLU, glu, "dim")


@RULES.named("logaddexp")
def _log_add_exp(a: Any, b: Any) -> Signal:
    """Converts ``log(e^a + e^b) = b + softplus(a - b)``."""
    network = network_of(a, b)
    first, second = (_once(as_signal(value, network)) for value in (a, b))
    difference = minus(first, second)
    return plus(second, difference.activate(softplus(1.0)))
