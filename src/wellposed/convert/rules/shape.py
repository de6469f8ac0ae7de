"""Functions that only move entries: found by applying them to the places of the entries."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.activations.catalogue import spellings
from wellposed.convert.signal import RULES, Network, Signal, UnsupportedError, stacked


def rearranged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Builds the rule of a function that picks, repeats or reorders entries of its first argument.

    Example:
        >>> network = Network((2, 3), torch.float32, torch.device("cpu"))
        >>> rearranged(torch.transpose)(network.input, 1, 2).shape
        (1, 3, 2)
    """

    def rule(signal: Signal, *args: Any, **kwargs: Any) -> Any:
        index = function(signal.indices(), *args, **kwargs)
        if isinstance(index, Tensor):
            return signal.select(index)
        # Cut in pieces, a signal that is no state would be computed once for every piece.
        sources = signal.sources.values()
        heavy = signal.costly and (len(sources) > 1 or any(source.stored() for source in sources))
        whole = signal.as_state() if heavy else signal
        return tuple(whole.select(piece) for piece in index)

    return rule


_METHODS = (
    "chunk", "diagonal", "expand", "expand_as", "flatten", "flip", "gather", "index_select", "movedim", "moveaxis",
    "narrow", "permute", "ravel", "repeat", "repeat_interleave", "reshape", "roll", "rot90", "select", "split",
     "swapaxes", "swapdims", "t", "take", "tensor_split", "tile", "transpose", "unbind", "unflatten",
    "unfold", "unsqueeze", "view", "view_as", "reshape_as", "fliplr", "flipud",
)  # fmt: skip


def _method(name: str) -> Callable[..., Any]:
    """Calls a tensor method on the indices, however torch or ATen spells it."""

    def call(places: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = [torch.empty(value.shape) if isinstance(value, Signal) else value for value in args]
        return getattr(places, name)(*plain, **kwargs)

    return call


for _name in _METHODS:
    RULES.named(_name)(rearranged(_method(_name)))
RULES.named("_unsafe_view", "view_copy")(rearranged(_method("reshape")))
RULES.named("permute_copy")(rearranged(_method("permute")))
RULES.named("split_with_sizes")(rearranged(_method("split")))
RULES.named("broadcast_to")(rearranged(_method("expand")))
RULES.named("channel_shuffle", "native_channel_shuffle")(rearranged(torch.channel_shuffle))
RULES.named("adjoint")(rearranged(lambda places: places.mT))
RULES.function(torch.ops.aten.mT)(rearranged(lambda places: places.mT))


@RULES.named("squeeze")
def _squeezed(signal: Signal, *dims: Any, **names: Any) -> Signal:
    """Leaves the first dimension alone unless it is named: one sample is a batch still."""
    if not dims and not names:
        dims = (tuple(k for k, size in enumerate(signal.shape) if k and size == 1),)
    return signal.select(signal.indices().squeeze(*dims, **names))


@RULES.named("slice", "slice_copy")
def _sliced(signal: Signal, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Signal:
    return signal.select(torch.ops.aten.slice(signal.indices(), dim, start, end, step))


for _name in ("tril", "triu"):
    RULES.named(_name)(
        lambda signal, diagonal=0, name=_name: signal.select(getattr(signal.indices() + 1, name)(diagonal) - 1)
    )


@RULES.function(operator.getitem, "__getitem__")
def item(signal: Signal, index: Any) -> Signal:
    """Converts ``signal[index]`` with slices, numbers, None, lists and constant masks."""
    return signal.select(signal.indices()[index])


@RULES.named("index")
def _index(signal: Signal, indices: Sequence[Tensor | None]) -> Signal:
    return item(signal, tuple(slice(None) if index is None else index for index in indices))


def as_signal(value: Any, network: Network) -> Signal:
    """Returns a signal as it is and anything else as a constant one."""
    return value if isinstance(value, Signal) else network.constant(value)


def joined(function: Callable[..., Tensor], signals: Sequence[Any], **kwargs: Any) -> Signal:
    """Joins signals (and constants) as a function like torch.cat joins tensors.

    Example:
        >>> network = Network((2,), torch.float32, torch.device("cpu"))
        >>> joined(torch.cat, [network.input, torch.ones(1, 3)], dim=1).shape
        (1, 5)
    """
    network = next(part.network for part in signals if isinstance(part, Signal))
    wide = [as_signal(part, network) for part in signals]
    starts = [sum(part.size for part in wide[:k]) for k in range(len(wide))]
    places = function([part.indices() + start for part, start in zip(wide, starts, strict=True)], **kwargs)
    return stacked(wide).select(places)


@RULES.function(*spellings("cat"), torch.concat, torch.concatenate)
def concatenated(tensors: Sequence[Any], dim: int = 0, **names: int) -> Signal:
    """Converts torch.cat."""
    return joined(torch.cat, tensors, dim=names.get("axis", dim))


@RULES.named("stack")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Signal:
    return joined(torch.stack, tensors, dim=dim)


for _name in ("hstack", "vstack", "dstack", "column_stack", "row_stack"):
    RULES.named(_name)(lambda tensors, name=_name: joined(getattr(torch, name), tensors))


def _scattered(name: str) -> Callable[..., Signal]:
    """Builds the rule of a function that puts one tensor in the place of a part of another."""

    def rule(target: Any, source: Any, *args: Any, **kwargs: Any) -> Signal:
        return joined(lambda places: getattr(torch, name)(places[0], places[1], *args, **kwargs), [target, source])

    return rule


for _name in ("slice_scatter", "select_scatter", "diagonal_scatter"):
    RULES.named(_name)(_scattered(_name))


@RULES.named("copy")
def _copied(target: Any, source: Any, *rest: Any) -> Any:
    shape = tuple(target.shape)
    if isinstance(source, Signal):
        return source.select(source.indices().broadcast_to(shape))
    return torch.as_tensor(source).broadcast_to(shape)


RULES.named("fill", "zero")(lambda signal, value=0.0: torch.full(signal.shape, float(value), dtype=signal.dtype))


@RULES.function(nn.functional.pixel_shuffle, torch.ops.aten.pixel_shuffle)
def _pixel_shuffle(signal: Signal, upscale_factor: int) -> Signal:
    return rearranged(nn.functional.pixel_shuffle)(signal, upscale_factor)


@RULES.function(nn.functional.pixel_unshuffle, torch.ops.aten.pixel_unshuffle)
def _pixel_unshuffle(signal: Signal, downscale_factor: int) -> Signal:
    return rearranged(nn.functional.pixel_unshuffle)(signal, downscale_factor)


@RULES.module(nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
def _rearranging_layer(module: nn.Module, signal: Signal) -> Signal:
    return signal.select(module(signal.indices()))


@RULES.module(
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)
def _nothing(module: nn.Module, signal: Signal) -> Signal:
    return signal


@RULES.named("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
@RULES.named("feature_dropout", "native_dropout")
def _dropout(signal: Signal, p: float = 0.5, training: bool | None = None, *rest: Any, **others: Any) -> Signal:
    if (training is None or training) and p > 0:
        raise UnsupportedError(
            f"dropout with p={p} is switched on also in evaluation, so the network is random; pass "
            "training=self.training, or export it after eval()"
        )
    return signal


@RULES.named("contiguous", "clone", "detach", "alias", "lift_fresh", "cpu", "cuda", "requires_grad")
def _same(signal: Signal, *args: Any, **kwargs: Any) -> Signal:
    return signal


@RULES.named("to", "type", "type_as", "_to_copy")
def _converted(signal: Signal, *args: Any, **kwargs: Any) -> Signal:
    """Passes casts through that leave the dtype as it is; raises for others."""
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    wanted += [value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor | Signal)]
    return _require_type(signal, wanted)


def _require_type(signal: Signal, wanted: Sequence[torch.dtype]) -> Signal:
    if any(kind != signal.dtype for kind in wanted):
        raise UnsupportedError(
            f"the network turns {signal.dtype} into {wanted[0]}; convert all of it to one type, network.to(...)"
        )
    return signal


for _name, _kind in {"float": torch.float32, "double": torch.float64, "half": torch.float16}.items():
    RULES.function(_name)(lambda signal, *args, kind=_kind: _require_type(signal, [kind]))
RULES.function("bfloat16")(lambda signal, *args: _require_type(signal, [torch.bfloat16]))


@RULES.function(getattr)
def attribute(signal: Signal, name: str, *default: Any) -> Any:
    """Converts ``signal.shape`` and its like."""
    attributes = {"shape": torch.Size(signal.shape), "ndim": len(signal.shape), "dtype": signal.dtype}
    attributes |= {"device": signal.device, "is_cuda": signal.device.type == "cuda", "requires_grad": False}
    if name in attributes:
        return attributes[name]
    if name in ("T", "mT", "H", "mH"):
        return signal.select(getattr(signal.indices(), name))
    if name == "data":
        return signal
    raise UnsupportedError(f"the attribute {name!r} of a tensor has no meaning during conversion")


@RULES.function("size", torch.ops.aten.sym_size, torch.ops.aten.size)
def _size(signal: Signal, dim: int | None = None) -> Any:
    return torch.Size(signal.shape) if dim is None else signal.shape[dim]


RULES.function("dim", "ndimension", torch.ops.aten.dim)(lambda signal: len(signal.shape))
RULES.function("numel", "nelement", torch.numel, torch.ops.aten.sym_numel)(lambda signal: math.prod(signal.shape))
RULES.named("_assert_tensor_metadata")(lambda signal, *args, **kwargs: None)
RULES.function(len)(lambda signal: signal.shape[0])
RULES.function("is_contiguous", "is_floating_point", torch.is_floating_point)(lambda signal: True)
RULES.function("get_device", "is_complex", torch.is_complex)(lambda signal: False)


def _constant(name: str) -> Callable[..., Tensor]:
    def rule(signal: Signal, *args: Any, **kwargs: Any) -> Tensor:
        example = torch.empty(signal.shape, dtype=signal.dtype, device=signal.device)
        made: Tensor = getattr(example if name.startswith("new_") else torch, name)(
            *(args if name.startswith("new_") else (example, *args)), **kwargs
        )
        return made

    return rule


for _name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"):
    RULES.named(_name)(_constant(_name))
