"""Attention, encoder and decoder layers agree with those of torch."""

import math

import pytest
import torch
from torch import nn
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.transformers import (
    Attention,
    DecoderLayer,
    EncoderDecoder,
    EncoderLayer,
    PositionalEncoding,
    future,
)

from wellposed.errors import InputError


def copy_linear(target, source):
    target.load_state_dict(source.state_dict())


@torch.no_grad()
def randomize(model):
    """Draws every parameter anew: biases that start at zero could hide a mistake."""
    for parameter in model.parameters():
        parameter.copy_(0.5 * torch.randn_like(parameter))


@torch.no_grad()
def copy_attention(target, source):
    parts = (source.query, source.key, source.value)
    target.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
    target.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    copy_linear(target.out_proj, source.out)


def copy_rest(target, source):
    copy_linear(target.linear1, source.feedforward.expand)
    copy_linear(target.linear2, source.feedforward.contract)
    for index, norm in enumerate(source.norms, start=1):
        copy_linear(getattr(target, f"norm{index}"), norm)


def encoder_twin(layer, width=6, heads=2, feedforward=9):
    twin = nn.TransformerEncoderLayer(width, heads, feedforward, dropout=0.1, batch_first=True)
    copy_attention(twin.self_attn, layer.attention)
    copy_rest(twin, layer)
    return twin


def decoder_twin(layer, width=6, heads=2, feedforward=9):
    twin = nn.TransformerDecoderLayer(width, heads, feedforward, dropout=0.1, batch_first=True)
    copy_attention(twin.self_attn, layer.attention)
    copy_attention(twin.multihead_attn, layer.lookup)
    copy_rest(twin, layer)
    return twin


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_attention(heads, masked):
    layer, twin = Attention(6, heads), nn.MultiheadAttention(6, heads, batch_first=True)
    randomize(layer)
    copy_attention(twin, layer)
    x, memory = torch.randn(3, 5, 6), torch.randn(3, 5, 6)
    hidden = future(5) if masked else None
    expected = twin(x, memory, memory, attn_mask=hidden, need_weights=False)[0]
    assert torch.allclose(layer(x, memory, hidden), expected, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_encoder_layer(masked):
    layer = EncoderLayer(6, 2, 9).eval()
    randomize(layer)
    x, hidden = torch.randn(3, 5, 6), future(5) if masked else None
    assert torch.allclose(layer(x, hidden), encoder_twin(layer).eval()(x, hidden), atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_decoder_layer(masked):
    layer = DecoderLayer(6, 2, 9).eval()
    randomize(layer)
    x, memory, hidden = torch.randn(3, 5, 6), torch.randn(3, 5, 6), future(5) if masked else None
    expected = decoder_twin(layer).eval()(x, memory, hidden, hidden)
    assert torch.allclose(layer(x, memory, hidden, hidden), expected, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_encoder_decoder_is_the_transformer_of_torch(masked):
    model = EncoderDecoder(6, 2, 9).eval()
    randomize(model)
    twin = nn.Transformer(6, 2, 1, 1, 9, batch_first=True).eval()
    twin.encoder.layers[0] = encoder_twin(model.encoder).eval()
    twin.decoder.layers[0] = decoder_twin(model.decoder).eval()
    copy_linear(twin.encoder.norm, model.encoder_norm)
    copy_linear(twin.decoder.norm, model.decoder_norm)
    source, target = torch.randn(3, 5, 6), torch.randn(3, 5, 6)
    hidden = future(5) if masked else None
    expected = twin(source, target, src_mask=hidden, tgt_mask=hidden, memory_mask=hidden)
    assert torch.allclose(model(source, target, masked), expected, atol=1e-5)
    assert parameter_count(model) == parameter_count(twin)


def test_dropout_acts_in_training_only():
    layer, x = EncoderLayer(6, 2, 9, dropout=0.5), torch.randn(3, 5, 6)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_attention_starts_like_that_of_torch():
    layer = Attention(64, 4)
    bound = math.sqrt(6 / (64 + 3 * 64))
    weight = torch.cat([layer.query.weight, layer.key.weight, layer.value.weight])
    assert 0.99 * bound < weight.abs().max() <= bound
    assert layer.query.bias.abs().max() == layer.out.bias.abs().max() == 0


@pytest.mark.parametrize("width", [1, 4, 5])
def test_positions_are_sines_and_cosines(width):
    added = PositionalEncoding(width, 7, dropout=0.0)(torch.zeros(2, 6, width))
    for t in range(6):
        for i in range(width):
            angle = t / 10000 ** (2 * (i // 2) / width)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert added[1, t, i].item() == pytest.approx(expected, abs=1e-6)


def test_wrong_arguments():
    with pytest.raises(InputError, match="heads must divide the width 10"):
        Attention(10, 3)
    with pytest.raises(InputError, match="8 steps, the positional encoding 7; raise max_length"):
        PositionalEncoding(4, 7)(torch.zeros(2, 8, 4))
