"""Functions that only move entries: found by applying them to the places of the entries."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.convert.dispatch import RULES
from wellposed.convert.signal import Signal


def rearranged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Builds the rule of a function that picks, repeats or reorders entries of its first argument."""

    def rule(signal: Signal, *args: Any, **kwargs: Any) -> Any:
        found = function(signal.places(), *args, **kwargs)
        if isinstance(found, Tensor):
            return signal.select(found)
        return (
            type(found)(signal.select(part) for part in found)
            if isinstance(found, list)
            else tuple(signal.select(part) for part in found)
        )

    return rule


for _function, _names in {
    torch.flatten: (torch.flatten, "flatten", torch.ops.aten.flatten),
    torch.permute: (torch.permute, "permute", torch.ops.aten.permute),
}.items():
    RULES.function(*_names)(rearranged(_function))


@RULES.module(nn.Flatten)
def _flatten(module: nn.Flatten, signal: Signal) -> Signal:
    return signal.select(module(signal.places()))
