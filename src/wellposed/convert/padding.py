"""Padding, by constants and by entries of the signal."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.signal import Signal

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
    places, pad = signal.places(), [int(width) for width in pad]
    if mode != "constant":  # which torch does for floating-point numbers only; places are exact in float64
        return signal.select(F.pad(places.double(), pad, mode=mode).long())
    found = signal.select(F.pad(places, pad, value=-1))
    if not value:
        return found
    inside = F.pad(torch.ones(signal.shape, dtype=signal.dtype, device=signal.device), pad)
    return found.shifted(float(value) * (1 - inside))


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
