"""Linear layers, convolutions and what is folded into them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.convert.dispatch import RULES
from wellposed.convert.signal import Signal
from wellposed.forms import Dense, Operator, Repeated


@RULES.function(F.linear, torch.ops.aten.linear)
def linear(signal: Signal, weight: Tensor, bias: Tensor | None = None) -> Signal:
    """Converts ``y = W x + b`` along the last dimension."""
    *lead, width = signal.shape
    count = signal.size // width
    matrix: Operator = Dense(weight.detach().clone())
    if count > 1:
        matrix = Repeated(matrix, count)
    offset = None if bias is None else bias.detach().repeat(count)
    return signal.linear(matrix, (*lead, weight.shape[0]), offset)


@RULES.module(nn.Linear)
def _linear_layer(module: nn.Linear, signal: Signal) -> Signal:
    return linear(signal, module.weight, module.bias)
