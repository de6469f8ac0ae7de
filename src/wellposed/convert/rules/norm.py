"""Normalisations.

Batch normalisation in evaluation mode is affine and folded into the layer before it. The others divide by a
standard deviation of the very numbers they normalise, a block map whose Lipschitz constant is 1 / sqrt(eps): it is
exact in a network without loops, but no useful bound on outputs or gains passes through it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.activations import normalise
from wellposed.convert.rules.shape import joined
from wellposed.convert.signal import RULES, Signal, UnsupportedError


def affine(signal: Signal, weight: Tensor | None, bias: Tensor | None, dim: int | None = 1) -> Signal:
    """Multiplies by weights and adds biases, per channel in dimension `dim` or, if None, in the last ones."""
    around = () if dim is None else (1,) * (len(signal.shape) - dim - 1)
    if weight is not None:
        signal = signal.scaled(weight.reshape(*weight.shape, *around))
    return signal if bias is None else signal.shifted(bias.reshape(*bias.shape, *around))


def batch_norm(
    signal: Signal,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *rest: Any,
) -> Signal:
    """Converts batch normalisation by its running statistics."""
    if training or running_mean is None or running_var is None:
        raise UnsupportedError(
            "batch normalisation without running statistics depends on the other samples of a batch; keep them "
            "(track_running_stats=True) and take the network in evaluation mode"
        )
    scale = (running_var.double() + eps).rsqrt()  # float32 would round twice
    if signal.network.exact:
        return affine(affine(affine(signal, None, -running_mean), scale.to(signal.dtype), None), weight, bias)
    scale = scale if weight is None else scale * weight.double()
    shift = -running_mean.double() * scale
    shift = shift if bias is None else shift + bias.double()
    return affine(signal, scale.to(signal.dtype), shift.to(signal.dtype))


RULES.function(nn.functional.batch_norm)(batch_norm)


@RULES.function(torch.batch_norm, torch.ops.aten.batch_norm)
def _batch_norm(signal: Signal, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Signal:
    return batch_norm(signal, mean, variance, weight, bias, *rest)


@RULES.named("_native_batch_norm_legit_no_training")
def _native(
    signal: Signal, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple:
    return (batch_norm(signal, mean, variance, weight, bias, False, momentum, eps),)


@RULES.module(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
def _batch_layer(module: Any, signal: Signal) -> Signal:
    return batch_norm(signal, module.running_mean, module.running_var, module.weight, module.bias, eps=module.eps)


@RULES.named("layer_norm")
def layer_norm(
    signal: Signal,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Signal:
    """Converts layer normalisation as the block map `normalise`, then what is affine in it."""
    normal = signal.activate(normalise(math.prod(normalized_shape), float(eps)))
    return affine(normal, weight, bias, None)


@RULES.named("native_layer_norm")
def _native_layer_norm(signal: Signal, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple:
    return (layer_norm(signal, shape, weight, bias, eps),)


@RULES.named("group_norm")
def group_norm(
    signal: Signal,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Signal:
    """Converts group normalisation: the channels of a group lie next to each other."""
    count = signal.shape[0] * num_groups
    return affine(signal.activate(normalise(signal.size // count, float(eps))), weight, bias)


@RULES.named("instance_norm")
def instance_norm(
    signal: Signal,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *rest: Any,
) -> Signal:
    """Converts instance normalisation, by the image itself or by running statistics."""
    if not use_input_stats:
        return batch_norm(signal, running_mean, running_var, weight, bias, eps=eps)
    return group_norm(signal, signal.shape[1], weight, bias, eps)


@RULES.named("rms_norm")
def rms_norm(
    signal: Signal, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Signal:
    """Converts ``z / sqrt(mean(z^2) + eps)``: z next to -z has the mean zero and this variance."""
    size = math.prod(normalized_shape)
    flat = signal.reshape((signal.size // size, size))
    pairs = joined(torch.cat, [flat, flat.scaled(-1.0)], dim=1)
    margin = torch.finfo(signal.dtype).eps if eps is None else float(eps)
    both = pairs.activate(normalise(2 * size, margin))
    return affine(both.select(both.indices()[:, :size]).reshape(signal.shape), weight, None, None)


@RULES.module(nn.LayerNorm)
def _layer_layer(module: nn.LayerNorm, signal: Signal) -> Signal:
    return layer_norm(signal, module.normalized_shape, module.weight, module.bias, module.eps)


@RULES.module(nn.GroupNorm)
def _group_layer(module: nn.GroupNorm, signal: Signal) -> Signal:
    return group_norm(signal, module.num_groups, module.weight, module.bias, module.eps)


@RULES.module(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_layer(module: Any, signal: Signal) -> Signal:
    own = not module.track_running_stats
    mean, variance = module.running_mean, module.running_var
    return instance_norm(signal, mean, variance, module.weight, module.bias, own, eps=module.eps)


@RULES.module(nn.RMSNorm)
def _rms_layer(module: nn.RMSNorm, signal: Signal) -> Signal:
    return rms_norm(signal, module.normalized_shape, module.weight, module.eps)
