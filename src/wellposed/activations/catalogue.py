"""The activation maps that are known by name."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.activations.activation import NORMS, Activation, Map
from wellposed.activations.family import elu, elu_slope, hardtanh, leaky_relu, softplus, softshrink, step, window


def _identity(z: Tensor) -> Tensor:
    return z


def _gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _silu_slope(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 + z * (1 - gate))


def _softsign_slope(z: Tensor) -> Tensor:
    return (1 + z.abs()).reciprocal().square()


def _tanh_slope(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z).square()


def _sigmoid_slope(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 - gate)


def _hardsigmoid(z: Tensor) -> Tensor:
    # F.hardsigmoid differentiates with a float32 sixth, also in float64.
    return (z / 6 + 0.5).clamp(0, 1)


def _mish_slope(z: Tensor) -> Tensor:
    gate = torch.tanh(F.softplus(z))
    return gate + z * (1 - gate.square()) * torch.sigmoid(z)


def _hardswish(z: Tensor) -> Tensor:
    return z * _hardsigmoid(z)


def _hardswish_slope(z: Tensor) -> Tensor:
    return _hardsigmoid(z) + z * window(z, -3.0, 3.0, 1 / 6)


def _logsigmoid_slope(z: Tensor) -> Tensor:
    return torch.sigmoid(-z)


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _tanhshrink_slope(z: Tensor) -> Tensor:
    return torch.tanh(z).square()


_GELU_TANH = 1.1289930687
_SELU = (1.0507009873554805, 1.6732632423543772)
_GELU, _SILU = 1.1289041452, 1.0998393202


def catalogue() -> list[Activation]:
    cone = {"homogeneous": True, "projection": True, "rounding": 0.0}
    box = {"projection": True, "rounding": 0.0, "image": (0.0, 6.0)}
    selu_image = {"image": (-_SELU[0] * _SELU[1], math.inf)}
    positive, unit_image, ball = {"image": (0.0, math.inf)}, {"image": (0.0, 1.0)}, {"image": (-1.0, 1.0)}
    unit, sixth = (0.0, 1.0), math.nextafter(1 / 6, 1.0)
    rows: list[tuple[str, Map, tuple[float, float], Map | None, dict[str, Any]]] = [
        ("identity", _identity, (1.0, 1.0), torch.ones_like, cone),
        ("relu", torch.relu, unit, partial(step, left=0.0, right=1.0), cone | positive),
        ("relu6", F.relu6, unit, partial(window, low=0.0, high=6.0), box),
        (
            "selu",
            F.selu,
            (0.0, 1.7580993408473773),
            partial(elu_slope, scale=_SELU[0], alpha=_SELU[1]),
            selu_image,
        ),
        ("gelu", F.gelu, (1.0 - _GELU, _GELU), _gelu_slope, {"image": (-0.1699713, math.inf)}),
        ("silu", F.silu, (1.0 - _SILU, _SILU), _silu_slope, {"image": (-0.2784646, math.inf)}),
        ("softsign", F.softsign, unit, _softsign_slope, ball),
        ("tanh", torch.tanh, unit, _tanh_slope, ball),
        ("sigmoid", torch.sigmoid, (0.0, 0.25), _sigmoid_slope, unit_image),
        ("hardsigmoid", _hardsigmoid, (0.0, sixth), partial(window, low=-3.0, high=3.0, height=1 / 6), unit_image),
        ("tanhshrink", F.tanhshrink, unit, _tanhshrink_slope, {}),
        ("sin", torch.sin, (-1.0, 1.0), torch.cos, ball),
        ("mish", F.mish, (-0.1125262, 1.0884982), _mish_slope, {"image": (-0.3088435, math.inf)}),
        ("hardswish", _hardswish, (-0.5, 1.5), _hardswish_slope, {"image": (-0.3750001, math.inf)}),
        ("logsigmoid", F.logsigmoid, unit, _logsigmoid_slope, {"image": (-math.inf, 0.0)}),
        ("gelu_tanh", _gelu_tanh, (1.0 - _GELU_TANH, _GELU_TANH), None, {"image": (-0.1700408, math.inf)}),
    ]
    halves = dict.fromkeys(NORMS, 0.5)
    softmax = Activation("softmax", partial(torch.softmax, dim=-1), block=0, constants=halves, image=(0.0, 1.0))
    named = [elu(), hardtanh(), softplus(), softshrink(), leaky_relu()]
    plain = [replace(activation, name=activation.name.partition("(")[0]) for activation in named]
    return [softmax, *plain, *(Activation(*row[:4], **row[4]) for row in rows)]
