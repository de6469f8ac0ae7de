"""Activation layers and functions as blocks of states."""

import torch
import torch.nn.functional as F
from torch import nn

from wellposed.convert.dispatch import RULES

_PLAIN = {
    "relu": (nn.ReLU, torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_", torch.ops.aten.relu),
    "tanh": (nn.Tanh, torch.tanh, F.tanh, "tanh", torch.ops.aten.tanh),
    "sigmoid": (nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid", torch.ops.aten.sigmoid),
}


def _register(name: str, kinds: tuple) -> None:
    modules = tuple(kind for kind in kinds if isinstance(kind, type))
    RULES.module(*modules)(lambda module, signal: signal.activate(name))
    functions = tuple(kind for kind in kinds if not isinstance(kind, type))
    RULES.function(*functions)(lambda signal, inplace=False: signal.activate(name))


for _name, _kinds in _PLAIN.items():
    _register(_name, _kinds)
