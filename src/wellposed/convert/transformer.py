"""The layers of torch's transformers."""

from collections.abc import Callable
from typing import Any

from torch import nn

from wellposed.convert.attention import additive, multihead
from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.sequence import Layout
from wellposed.convert.signal import Signal
from wellposed.convert.trace import convert_module
from wellposed.errors import InputError


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _part(module: nn.Module, name: str, place: str, signal: Signal) -> Signal:
    """Converts one of a module's own modules."""
    found = convert_module(getattr(module, name), _inside(place, name), (signal,), {})
    assert isinstance(found, Signal)
    return found


def _attend(module: nn.Module, name: str, place: str, x: Signal, memory: Signal, masks: tuple[Any, Any]) -> Signal:
    """Applies the attention of a layer to the rows of x."""
    attention = getattr(module, name)
    shape = (x.shape[0], attention.num_heads, x.shape[1], memory.shape[1])
    return multihead(attention, x, memory, memory, additive(*masks, shape), _inside(place, name))[0]


def _feedforward(module: Any, place: str, x: Signal) -> Signal:
    hidden = _part(module, "linear1", place, x)
    x.network.place = _inside(place, "activation")
    return _part(module, "linear2", place, activated(module.activation, hidden, _inside(place, "activation")))


def activated(function: Callable[..., Any], signal: Signal, place: str) -> Signal:
    """Applies an activation that a layer was given, a function or a module."""
    if isinstance(function, nn.Module):
        found = convert_module(function, place, (signal,), {})
    else:
        rule = RULES.of_function(function)
        if rule is None:
            name = getattr(function, "__name__", repr(function))
            raise UnsupportedError(
                f"the activation {name} at {place!r} has no rule; give one with "
                f"@to_implicit.register_function({name})"
            )
        found = rule(signal)
    assert isinstance(found, Signal)
    return found


Step = Callable[[Signal], Signal]


def _residual(module: Any, place: str, x: Signal, norm: str, step: Step) -> Signal:
    """Adds what a step makes of x, which is normalised before or after."""
    if module.norm_first:
        x.network.place = _inside(place, "sum")
        x = x.gathered()
        return x.plus(step(_part(module, norm, place, x)))
    return _part(module, norm, place, x.plus(step(x)))


def encoder_layer(module: nn.TransformerEncoderLayer, x: Signal, masks: tuple[Any, Any], place: str) -> Signal:
    """Converts self-attention and the feed-forward part, each with its residual; the batch comes first."""
    x = _residual(module, place, x, "norm1", lambda z: _attend(module, "self_attn", place, z, z, masks))
    return _residual(module, place, x, "norm2", lambda z: _feedforward(module, place, z))


def decoder_layer(
    module: nn.TransformerDecoderLayer,
    x: Signal,
    memory: Signal,
    masks: tuple[Any, Any],
    memory_masks: tuple[Any, Any],
    place: str,
) -> Signal:
    """Converts self-attention, attention to the memory and the feed-forward part."""
    x = _residual(module, place, x, "norm1", lambda z: _attend(module, "self_attn", place, z, z, masks))
    x = _residual(
        module, place, x, "norm2", lambda z: _attend(module, "multihead_attn", place, z, memory, memory_masks)
    )
    return _residual(module, place, x, "norm3", lambda z: _feedforward(module, place, z))


def encoder(module: Any, x: Signal, masks: tuple[Any, Any], place: str) -> Signal:
    """Converts a stack of layers."""
    for number, layer in enumerate(module.layers):
        _require(layer, nn.TransformerEncoderLayer)
        x = encoder_layer(layer, x, masks, _inside(place, f"layers.{number}"))
    return x if module.norm is None else _part(module, "norm", place, x)


def decoder(
    module: Any,
    x: Signal,
    memory: Signal,
    masks: tuple[Any, Any],
    memory_masks: tuple[Any, Any],
    place: str,
) -> Signal:
    """Converts a stack of layers that all read the same memory."""
    memory = memory.gathered()
    for number, layer in enumerate(module.layers):
        _require(layer, nn.TransformerDecoderLayer)
        x = decoder_layer(layer, x, memory, masks, memory_masks, _inside(place, f"layers.{number}"))
    return x if module.norm is None else _part(module, "norm", place, x)


def _require(part: nn.Module, kind: type[nn.Module]) -> None:
    if not isinstance(part, kind):
        raise UnsupportedError(
            f"a transformer of torch with {type(part).__name__} in place of {kind.__name__} has no implicit form; "
            "register a rule for the module that holds it"
        )


def _first(layer: Any) -> bool:
    return bool(layer.self_attn.batch_first)


def _require_memory(module: nn.Module, memory: Any) -> Signal:
    if isinstance(memory, Signal):
        return memory
    raise InputError(
        f"{type(module).__name__} reads a second input that depends on the first; convert a module that calls it"
    )


@RULES.module(nn.TransformerEncoderLayer)
def _encoder_layer(
    module: Any, src: Signal, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Signal:
    place = src.network.place
    layout = Layout.of(src, _first(module), type(module).__name__, alone=not place)
    return layout.restored(encoder_layer(module, layout.rows(), (src_mask, src_key_padding_mask), place))


@RULES.module(nn.TransformerEncoder)
def _encoder(
    module: Any, src: Signal, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
) -> Signal:
    place = src.network.place
    layout = Layout.of(src, _first(module.layers[0]), type(module).__name__, alone=not place)
    return layout.restored(encoder(module, layout.rows(), (mask, src_key_padding_mask), place))


@RULES.module(nn.TransformerDecoderLayer, nn.TransformerDecoder)
def _decoder(
    module: Any,
    tgt: Signal,
    memory: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Signal:
    given, name, place = _require_memory(module, memory), type(module).__name__, tgt.network.place
    stack = isinstance(module, nn.TransformerDecoder)
    first = _first(module.layers[0] if stack else module)
    layout, source = Layout.of(tgt, first, name), Layout.of(given, first, name)
    masks, memory_masks = (tgt_mask, tgt_key_padding_mask), (memory_mask, memory_key_padding_mask)
    convert = decoder if stack else decoder_layer
    found = convert(module, layout.rows(), source.rows(), masks, memory_masks, place)
    return layout.restored(found)


@RULES.module(nn.Transformer)
def _transformer(
    module: nn.Transformer,
    src: Signal,
    tgt: Any = None,
    src_mask: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    src_key_padding_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    **hints: Any,
) -> Signal:
    target, place, first = _require_memory(module, tgt), src.network.place, module.batch_first
    if not isinstance(module.encoder, nn.TransformerEncoder) or not isinstance(
        module.decoder, nn.TransformerDecoder
    ):
        raise UnsupportedError("a Transformer with an encoder or decoder of one's own needs a rule of its own")
    source, layout = (Layout.of(signal, first, "Transformer") for signal in (src, target))
    masks = (src_mask, src_key_padding_mask), (tgt_mask, tgt_key_padding_mask)
    memory = encoder(module.encoder, source.rows(), masks[0], _inside(place, "encoder"))
    memory_masks = memory_mask, memory_key_padding_mask
    found = decoder(module.decoder, layout.rows(), memory, masks[1], memory_masks, _inside(place, "decoder"))
    return layout.restored(found)
