"""Softmax along any dimension, and the logarithms of sums that go with it."""

import math
from typing import Any

import torch
from torch import nn

from wellposed.activations import softmax as softmax_map
from wellposed.activations import softplus
from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.shape import joined
from wellposed.convert.signal import Signal

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
    found = (0 if count in (0, 1, 3) else 1) if dim is None else dim % count
    if found == 0 and count > 1 and signal.shape[0] == 1:
        raise UnsupportedError(
            "a softmax over the first dimension, the batch, mixes samples, so it has no implicit form; give the "
            "dimension of the classes"
        )
    return found


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
    moved = signal.select(signal.places().movedim(k, -1))
    found = moved.activate(softmax_map(signal.shape[k]))
    return found.select(found.places().movedim(-1, k))


@RULES.named("softmin")
def _softmin(signal: Signal, dim: int | None = None, *rest: Any, **others: Any) -> Signal:
    return softmax(signal.scaled(-1.0), dim)


@RULES.named("logsumexp")
def log_sum_exp(signal: Signal, dim: Any, keepdim: bool = False) -> Signal:
    """Converts ``log(sum(exp(z)))`` by halving: ``log(e^a + e^b) = b + softplus(a - b)``, in log2(k) blocks."""
    if not isinstance(dim, int):
        (dim,) = dim
    k, signal = _dimension(signal, dim), finite(signal)
    rows = signal.select(signal.places().movedim(k, -1))
    while rows.shape[-1] > 1:
        rows = _halved(rows.kept() if rows.costly else rows)
    shape = rows.shape[:-1]
    return rows.reshape((*shape[:k], 1, *shape[k:]) if keepdim else shape)


def _halved(rows: Signal) -> Signal:
    """Joins the entries of the last dimension in pairs; an odd one is left as it is."""
    half = rows.shape[-1] // 2
    first, second, odd = (rows.select(part) for part in rows.places().split([half, half, rows.shape[-1] % 2], -1))
    pairs = second.plus(first.plus(second.scaled(-1.0)).activate(softplus(1.0)))
    return joined(torch.cat, [pairs, odd], dim=-1) if odd.size else pairs


@RULES.named("log_softmax", "_log_softmax")
def log_softmax(signal: Signal, dim: int | None = None, *rest: Any, **others: Any) -> Signal:
    """Converts ``z - log(sum(exp(z)))``."""
    signal = finite(signal)
    whole = signal.kept() if signal.costly else signal
    k = _dimension(signal, dim)
    total = log_sum_exp(whole, k, keepdim=True)
    return whole.plus(total.select(total.places().broadcast_to(whole.shape)).scaled(-1.0))


@RULES.module(nn.Softmax, nn.Softmin, nn.LogSoftmax)
def _softmax_layer(module: Any, signal: Signal) -> Signal:
    rules = {nn.Softmax: softmax, nn.Softmin: _softmin, nn.LogSoftmax: log_softmax}
    return next(rule for kind, rule in rules.items() if isinstance(module, kind))(signal, module.dim)


@RULES.module(nn.Softmax2d)
def _image_layer(module: nn.Softmax2d, signal: Signal) -> Signal:
    return softmax(signal, -3)
