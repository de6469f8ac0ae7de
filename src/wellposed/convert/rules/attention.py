"""Attention and torch's transformers: products of matrices, and a softmax for every query.

`attention` and `multihead` convert single layers; `encoder_layer`, `decoder_layer`, `encoder` and `decoder` those
of torch's transformers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.activations import softmax
from wellposed.convert.convert import convert_module
from wellposed.convert.rules.activation import hidden_score
from wellposed.convert.rules.arithmetic import average, matrix_multiplied
from wellposed.convert.rules.linear import linear
from wellposed.convert.rules.recurrent import Layout
from wellposed.convert.rules.shape import concatenated
from wellposed.convert.signal import RULES, Signal, UnsupportedError
from wellposed.errors import InputError


def masked(scores: Signal, mask: Any) -> Signal:
    """Adds a mask to scores: True lets a query see a key, numbers are added, minus infinity hides.

    Hidden scores are replaced and not added to, so that their weight is zero whatever they were.
    """
    if isinstance(mask, Signal):
        return scores.plus(mask.select(mask.indices().broadcast_to(scores.shape)))
    wide = mask.broadcast_to(scores.shape)
    hidden = ~wide if wide.dtype == torch.bool else wide == -math.inf
    seen = scores.select(scores.indices().masked_fill(hidden, -1)) if bool(hidden.any()) else scores
    added = torch.zeros(wide.shape, dtype=scores.dtype, device=wide.device) if wide.dtype == torch.bool else wide
    return seen.shifted(added.masked_fill(hidden, hidden_score(scores.dtype)))


def _unseeing(mask: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Marks queries that see no key; None if every one sees some."""
    if mask is None or isinstance(mask, Signal):
        return None
    wide = mask.broadcast_to(shape)
    blind = (~wide if wide.dtype == torch.bool else wide == -math.inf).all(-1)
    return blind if bool(blind.any()) else None


@RULES.named("scaled_dot_product_attention")
def attention(
    query: Signal,
    key: Signal,
    value: Signal,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    name: str = "",
) -> Signal:  # (..., L, e), (..., S, e), (..., S, v) -> (..., L, v)
    """Converts ``softmax(Q K' scale + mask) V``: products of matrices, a softmax a query, products again.

    The products have a Lipschitz constant where their factors are bounded, for instance by tanh (003,
    section 2.4); queries that see no key return zero, as in torch.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((5, 4), torch.float32, torch.device("cpu"))
        >>> x = network.input
        >>> attention(x, x, x).shape, [activation.name for activation in network.activations]
        ((1, 5, 4), ['matrix_product(5, 4, 5)', 'softmax(5)', 'matrix_product(5, 5, 4)'])
    """
    if dropout_p > 0:
        raise UnsupportedError(f"attention with dropout_p={dropout_p} is random; pass 0.0 in evaluation")
    if enable_gqa:
        raise UnsupportedError("attention with enable_gqa has no implicit form; repeat keys and values instead")
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return _attended(query, key, value, attn_mask, scale, name)[0]


def _attended(
    query: Signal, key: Signal, value: Signal, mask: Any, scale: float | None, name: str
) -> tuple[Signal, Signal]:
    """Returns the mixed values and the weights."""
    label = name or query.network.path
    scores = matrix_multiplied(query, key.select(key.indices().mT), f"{label} scores".strip())
    scores = scores.scaled(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    blind = _unseeing(mask, scores.shape)
    seen = scores if mask is None else masked(scores, mask)
    weights = seen.activate(softmax(seen.shape[-1]), f"{label} weights".strip())
    if blind is not None:
        weights = weights.select(weights.indices().masked_fill(blind[..., None], -1))
    return matrix_multiplied(weights, value, f"{label} values".strip()), weights


def multihead(
    module: nn.MultiheadAttention, query: Signal, key: Signal, value: Signal, mask: Tensor | None, path: str
) -> tuple[Signal, Signal]:  # (N, L, E), (N, S, kdim), (N, S, vdim), (N or 1, heads or 1, L, S) of numbers
    """Converts the heads of a layer with the batch first; returns the outputs and the weights of every head."""
    query, key, value = _projected(module, query, key, value)
    if module.bias_k is not None and module.bias_v is not None:
        key, value = _appended(key, module.bias_k), _appended(value, module.bias_v)
    if module.add_zero_attn:
        zero = torch.zeros(1, 1, module.embed_dim, dtype=query.dtype, device=query.device)
        key, value = _appended(key, zero), _appended(value, zero)
    if mask is not None:  # what was appended is seen by all
        mask = F.pad(mask, (0, key.shape[1] - mask.shape[-1]))
        if _unseeing(mask, (key.shape[0], module.num_heads, query.shape[1], key.shape[1])) is not None:
            raise InputError(f"the mask of {path or 'the attention'} hides all keys from a query; torch gives NaN")
    query, key, value = (_split(part, module.num_heads) for part in (query, key, value))
    mixed, weights = _attended(query, key, value, mask, None, path)
    joined = mixed.select(mixed.indices().transpose(1, 2).flatten(2))
    return linear(joined, module.out_proj.weight, module.out_proj.bias), weights


def _projected(module: nn.MultiheadAttention, *signals: Signal) -> list[Signal]:
    """Applies the matrices of query, key and value."""
    once = {id(signal): signal.gathered() for signal in signals}
    joint: Tensor | None = module.in_proj_weight
    separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    weights = separate if joint is None else joint.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [linear(once[id(s)], w, b) for s, w, b in zip(signals, weights, biases, strict=True)]


def _appended(signal: Signal, row: Tensor) -> Signal:  # (N, S, E), (1, 1, E) -> (N, S + 1, E)
    return concatenated([signal, row.expand(signal.shape[0], 1, -1)], 1)


def _split(signal: Signal, heads: int) -> Signal:  # (N, S, E) -> (N, heads, S, E / heads)
    return signal.select(signal.indices().unflatten(-1, (heads, -1)).transpose(1, 2))


def additive(attn_mask: Any, padding: Any, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Joins the masks of torch's layers, where True hides, in one that is added: ``(N or 1, heads or 1, L, S)``.

    Args:
        attn_mask: ``(L, S)`` or ``(N heads, L, S)``.
        padding: ``(N, S)``.
        shape: N, heads, L and S.
    """
    count, heads, queries, keys = shape
    total = None
    if attn_mask is not None:
        mask = _constant_mask(attn_mask)
        _require_shape(mask, ((queries, keys), (count * heads, queries, keys)))
        total = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (count, heads))
    if padding is not None:
        mask = _constant_mask(padding)
        _require_shape(mask, ((count, keys),))
        total = mask[:, None, None] if total is None else total + mask[:, None, None]
    return total


def _require_shape(mask: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise InputError(f"a mask of one sample has the shape {wanted} here; received {tuple(mask.shape)}")


def _constant_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        raise UnsupportedError("a mask that depends on the input has no implicit form; masks must be constant")
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=torch.get_default_dtype(), device=mask.device).masked_fill(
        mask, -math.inf
    )


@RULES.module(nn.MultiheadAttention)
def _layer(
    module: nn.MultiheadAttention,
    query: Signal,
    key: Signal | None = None,
    value: Signal | None = None,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Signal, Signal | None]:
    if key is None or value is None:
        raise InputError(
            "MultiheadAttention takes query, key and value, a network one input; convert a module that calls it"
        )
    if is_causal and attn_mask is None:
        raise InputError("is_causal is only a hint; give the mask too, as torch demands: attn_mask")
    path = query.network.path
    layouts = {id(s): Layout.of(s, module.batch_first, "MultiheadAttention") for s in (query, key, value)}
    rows = {which: layout.rows() for which, layout in layouts.items()}
    q, k, v = (rows[id(s)] for s in (query, key, value))
    mask = additive(attn_mask, key_padding_mask, (q.shape[0], module.num_heads, q.shape[1], k.shape[1]))
    output, weights = multihead(module, q, k, v, mask, path)
    attended = layouts[id(query)].restored(output)
    if not need_weights:
        return attended, None
    return attended, average(weights, 1) if average_attn_weights else weights


@RULES.module(nn.Embedding, nn.EmbeddingBag)
def _embedding(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        f"{type(module).__name__} reads whole numbers, and a form real ones; convert the network behind the "
        "embedding, with the embedded tokens as its input"
    )


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _part(module: nn.Module, name: str, path: str, signal: Signal) -> Signal:
    """Converts one of a module's own modules."""
    converted = convert_module(getattr(module, name), _inside(path, name), (signal,), {})
    assert isinstance(converted, Signal)
    return converted


def _attend(module: nn.Module, name: str, path: str, x: Signal, memory: Signal, masks: tuple[Any, Any]) -> Signal:
    """Applies the attention of a layer to the rows of x."""
    attention = getattr(module, name)
    shape = (x.shape[0], attention.num_heads, x.shape[1], memory.shape[1])
    return multihead(attention, x, memory, memory, additive(*masks, shape), _inside(path, name))[0]


def _feedforward(module: Any, path: str, x: Signal) -> Signal:
    hidden = _part(module, "linear1", path, x)
    x.network.path = _inside(path, "activation")
    return _part(module, "linear2", path, activated(module.activation, hidden, _inside(path, "activation")))


def activated(function: Callable[..., Any], signal: Signal, path: str) -> Signal:
    """Applies an activation that a layer was given, a function or a module."""
    if isinstance(function, nn.Module):
        converted = convert_module(function, path, (signal,), {})
    else:
        rule = RULES.of_function(function)
        if rule is None:
            name = getattr(function, "__name__", repr(function))
            raise UnsupportedError(
                f"the activation {name} at {path!r} has no rule; give one with "
                f"@to_implicit.register_function({name})"
            )
        converted = rule(signal)
    assert isinstance(converted, Signal)
    return converted


Step = Callable[[Signal], Signal]


def _residual(module: Any, path: str, x: Signal, norm: str, step: Step) -> Signal:
    """Adds what a step makes of x, which is normalised before or after."""
    if module.norm_first:
        x.network.path = _inside(path, "sum")
        x = x.gathered()
        return x.plus(step(_part(module, norm, path, x)))
    return _part(module, norm, path, x.plus(step(x)))


def encoder_layer(module: nn.TransformerEncoderLayer, x: Signal, masks: tuple[Any, Any], path: str) -> Signal:
    """Converts self-attention and the feed-forward part, each with its residual; the batch comes first."""
    x = _residual(module, path, x, "norm1", lambda z: _attend(module, "self_attn", path, z, z, masks))
    return _residual(module, path, x, "norm2", lambda z: _feedforward(module, path, z))


def decoder_layer(
    module: nn.TransformerDecoderLayer,
    x: Signal,
    memory: Signal,
    masks: tuple[Any, Any],
    memory_masks: tuple[Any, Any],
    path: str,
) -> Signal:
    """Converts self-attention, attention to the memory and the feed-forward part."""
    x = _residual(module, path, x, "norm1", lambda z: _attend(module, "self_attn", path, z, z, masks))
    x = _residual(
        module, path, x, "norm2", lambda z: _attend(module, "multihead_attn", path, z, memory, memory_masks)
    )
    return _residual(module, path, x, "norm3", lambda z: _feedforward(module, path, z))


def encoder(module: Any, x: Signal, masks: tuple[Any, Any], path: str) -> Signal:
    """Converts a stack of layers."""
    for number, layer in enumerate(module.layers):
        _require(layer, nn.TransformerEncoderLayer)
        x = encoder_layer(layer, x, masks, _inside(path, f"layers.{number}"))
    return x if module.norm is None else _part(module, "norm", path, x)


def decoder(
    module: Any,
    x: Signal,
    memory: Signal,
    masks: tuple[Any, Any],
    memory_masks: tuple[Any, Any],
    path: str,
) -> Signal:
    """Converts a stack of layers that all read the same memory."""
    memory = memory.gathered()
    for number, layer in enumerate(module.layers):
        _require(layer, nn.TransformerDecoderLayer)
        x = decoder_layer(layer, x, memory, masks, memory_masks, _inside(path, f"layers.{number}"))
    return x if module.norm is None else _part(module, "norm", path, x)


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
    path = src.network.path
    layout = Layout.of(src, _first(module), type(module).__name__, alone=not path)
    return layout.restored(encoder_layer(module, layout.rows(), (src_mask, src_key_padding_mask), path))


@RULES.module(nn.TransformerEncoder)
def _encoder(
    module: Any, src: Signal, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
) -> Signal:
    path = src.network.path
    layout = Layout.of(src, _first(module.layers[0]), type(module).__name__, alone=not path)
    return layout.restored(encoder(module, layout.rows(), (mask, src_key_padding_mask), path))


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
    given, name, path = _require_memory(module, memory), type(module).__name__, tgt.network.path
    stack = isinstance(module, nn.TransformerDecoder)
    first = _first(module.layers[0] if stack else module)
    layout, source = Layout.of(tgt, first, name), Layout.of(given, first, name)
    masks, memory_masks = (tgt_mask, tgt_key_padding_mask), (memory_mask, memory_key_padding_mask)
    convert = decoder if stack else decoder_layer
    decoded = convert(module, layout.rows(), source.rows(), masks, memory_masks, path)
    return layout.restored(decoded)


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
    target, path, first = _require_memory(module, tgt), src.network.path, module.batch_first
    if not isinstance(module.encoder, nn.TransformerEncoder) or not isinstance(
        module.decoder, nn.TransformerDecoder
    ):
        raise UnsupportedError("a Transformer with an encoder or decoder of one's own needs a rule of its own")
    source, layout = (Layout.of(signal, first, "Transformer") for signal in (src, target))
    masks = (src_mask, src_key_padding_mask), (tgt_mask, tgt_key_padding_mask)
    memory = encoder(module.encoder, source.rows(), masks[0], _inside(path, "encoder"))
    memory_masks = memory_mask, memory_key_padding_mask
    decoded = decoder(module.decoder, layout.rows(), memory, masks[1], memory_masks, _inside(path, "decoder"))
    return layout.restored(decoded)
