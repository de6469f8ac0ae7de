"""Transformers (Vaswani et al. 2017): over series, over arrays as single tokens, and over texts.

`Attention`, `EncoderLayer` and `DecoderLayer` are the layers, in operations that vmap and repeated derivatives
know. `SequenceEncoder` reads the steps of a series, `ArrayEncoder` an array as one token. With encoder and decoder
(`EncoderDecoder`), `ArgmaxTransformer` is for the rolling argmax and `ArrayTransformer` for arrays.

`TextClassifier` has the architecture of DistilBERT (Sanh et al. 2019) in any size. `load_distilbert` reads its
weights as they are published: safetensors with the names of `transformers`.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from wellposed.errors import FileFormatError, InputError
from wellposed_lab.networks.recurrent import OUTPUTS, Output, arrange, as_sequence, require_choice


class Attention(nn.Module):
    """Computes scaled dot-product attention ``softmax(QK' / sqrt(d)) V`` in several heads.

    Args:
        width: of queries, keys, values and outputs.
        heads: into which the width is divided.
        dropout: of the attention weights.

    Example:
        >>> x = torch.zeros(7, 4, 10)
        >>> Attention(10, heads=2)(x, x).shape
        torch.Size([7, 4, 10])
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise InputError(f"heads must divide the width {width}; received {heads}")
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        bound = math.sqrt(6 / (4 * width))  # Glorot's, for the three projections as one matrix
        for layer in (self.query, self.key, self.value):
            nn.init.uniform_(layer.weight, -bound, bound)
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        x: Tensor,  # (B, T, width)
        memory: Tensor,  # (B, S, width)
        mask: Tensor | None = None,  # (T, S)
    ) -> Tensor:  # (B, T, width)
        """Computes the outputs; `mask` is True where a query may not see a key."""
        query = self._split(self.query(x)) * (self.heads / x.shape[-1]) ** 0.5
        key, value = self._split(self.key(memory)), self._split(self.value(memory))
        scores = query @ key.mT  # (B, heads, T, S)
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        mixed = self.dropout(torch.softmax(scores, -1)) @ value
        y: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return y

    def _split(self, x: Tensor) -> Tensor:  # (B, T, width) -> (B, heads, T, width / heads)
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward block with ReLU, each added to its input and then normalised.

    Args:
        feedforward: hidden width of the feed-forward block.
        dropout: everywhere; 0.1 in 001 (appendix A.1).

    Example:
        >>> EncoderLayer(10, heads=2, feedforward=20)(torch.zeros(7, 4, 10)).shape
        torch.Size([7, 4, 10])
    """

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.feedforward = FeedForwardBlock(width, feedforward, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (B, T, width), (T, T)
        """Computes the outputs; `mask` is True where a step may not see another."""
        x = self.norms[0](x + self.dropout(self.attention(x, x, mask)))
        y: Tensor = self.norms[1](x + self.feedforward(x))
        return y


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output and a feed-forward block.

    Example:
        >>> DecoderLayer(10, heads=2, feedforward=20)(torch.zeros(7, 4, 10), torch.zeros(7, 5, 10)).shape
        torch.Size([7, 4, 10])
    """

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.lookup = Attention(width, heads, dropout)
        self.feedforward = FeedForwardBlock(width, feedforward, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,  # (B, T, width)
        memory: Tensor,  # (B, S, width)
        mask: Tensor | None = None,  # (T, T)
        memory_mask: Tensor | None = None,  # (T, S)
    ) -> Tensor:  # (B, T, width)
        """Computes the outputs."""
        x = self.norms[0](x + self.dropout(self.attention(x, x, mask)))
        x = self.norms[1](x + self.dropout(self.lookup(x, memory, memory_mask)))
        y: Tensor = self.norms[2](x + self.feedforward(x))
        return y


class FeedForwardBlock(nn.Module):
    """Two linear layers with ReLU between, the same at every step."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation, self.dropout = nn.ReLU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the outputs."""
        y: Tensor = self.dropout(self.contract(self.dropout(self.activation(self.expand(x)))))
        return y


class PositionalEncoding(nn.Module):
    """Adds ``sin(t w_i)`` to the even and ``cos(t w_i)`` to the odd features, ``w_i = 10000^(-2i / width)``.

    Args:
        max_length: the longest sequence.
        dropout: of the sum.

    Example:
        >>> PositionalEncoding(4, max_length=3, dropout=0.0)(torch.zeros(1, 2, 4))[0, 0]
        tensor([0., 1., 0., 1.])
    """

    table: Tensor

    def __init__(self, width: int, max_length: int, dropout: float = 0.1) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(max_length)[:, None] * frequencies  # (T, ceil(width / 2))
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
        self.register_buffer("table", table, persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width)
        """Computes the sum."""
        length, limit = x.shape[-2], len(self.table)
        if length > limit:
            raise InputError(f"the sequence has {length} steps, the positional encoding {limit}; raise max_length")
        y: Tensor = self.dropout(x + self.table[:length])
        return y


def future(length: int, device: torch.device | None = None) -> Tensor:  # (T, T)
    """Returns the mask of a causal layer: True where the key comes after the query.

    Example:
        >>> future(3).int()
        tensor([[0, 1, 1],
                [0, 0, 1],
                [0, 0, 0]], dtype=torch.int32)
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


Head = Literal["flatten", "step"]
HEADS: tuple[Head, ...] = ("flatten", "step")


class SequenceEncoder(nn.Module):
    """Reads a series step by step: expansion, encoder layers, linear head.

    The sequential encoders of the arithmetic and volatility tasks flatten all steps into one head; the spiky
    task's "expansion, masked decoder, contraction" is causal with a head at every step, and the published
    43,529 parameters (002 Table 1) show that its decoder has no attention to an encoder.

    With `width` 1 the network ignores its input: layer normalisation over a single feature subtracts that
    feature from itself, so the head sees a constant. The 6,208 parameters of the sequential encoder of 002
    (Table 1) are those of width 1 and a 50 x 1 head, and the "60x1 linear layer" of 001 for volatility fits
    nothing else: as described, both are constant predictors.

    Args:
        length: steps of the series, the longest one with head "step".
        in_features: of every step; where it equals `width` there is no expansion.
        width, heads, feedforward, layers: of the encoder.
        head: "flatten" maps all steps together to (B, q), "step" each one by itself.
        output: with head "step", "last" (B, q) or "sequence" (B, T, q), (B, T) for series and q = 1.
        causal: whether a step sees only itself and those before.
        position: whether sinusoidal positions are added.
        dropout: 0.1 in 001 (appendix A.1).

    Example:
        >>> import torch
        >>> model = SequenceEncoder(10, 1, width=10, heads=10, head="step", causal=True)
        >>> model(torch.zeros(7, 10)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([7, 1]), 43529)
    """

    def __init__(
        self,
        length: int,
        out_features: int,
        *,
        in_features: int = 1,
        width: int = 10,
        heads: int = 1,
        feedforward: int = 2048,
        layers: int = 1,
        head: Head = "flatten",
        output: Output = "last",
        causal: bool = False,
        position: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        require_choice("head", head, HEADS)
        require_choice("output", output, OUTPUTS)
        self.length, self.in_features, self.causal = length, in_features, causal
        self.head_kind: Head = head
        self.output: Output = output
        self.expansion = nn.Identity() if in_features == width else nn.Linear(in_features, width)
        self.position = PositionalEncoding(width, length, dropout) if position else nn.Identity()
        self.layers = nn.ModuleList(EncoderLayer(width, heads, feedforward, dropout) for _ in range(layers))
        self.head = nn.Linear(length * width if head == "flatten" else width, out_features)

    def forward(self, u: Tensor) -> Tensor:  # (B, T) or (B, T, p)
        """Computes the outputs."""
        sequence = as_sequence(u, self.in_features)
        steps = sequence.shape[1]
        if self.head_kind == "flatten" and steps != self.length:
            raise InputError(f"the head reads {self.length} steps at once; received {steps}; use head='step'")
        mask = future(steps, u.device) if self.causal else None
        x = self.position(self.expansion(sequence))
        for layer in self.layers:
            x = layer(x, mask)
        y: Tensor = self.head(x.flatten(1) if self.head_kind == "flatten" else x)
        return y if self.head_kind == "flatten" else arrange(y, u, self.output)


class ArrayEncoder(nn.Module):
    """Reads a whole array as one token of as many features.

    This is the "smallest encoder" of the identity task (43,498 parameters: one layer of width 10 and nothing
    else), the encoder of the rolling average, and the "depth-wise" one of the arithmetic tasks (217,349: one
    layer of width 50 and a 50 x 1 readout), 002 Table 1. A lone token attends to itself with weight one, so
    the attention is a linear map; there is no position to encode.

    Args:
        features: of the array, the width of the encoder.
        out_features: of the readout; None returns the encoder's output.
        heads, feedforward, layers: of the encoder.

    Example:
        >>> import torch
        >>> model = ArrayEncoder(10)
        >>> model(torch.zeros(7, 10)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([7, 10]), 43498)
    """

    def __init__(
        self,
        features: int,
        out_features: int | None = None,
        *,
        heads: int = 1,
        feedforward: int = 2048,
        layers: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(features, heads, feedforward, dropout) for _ in range(layers))
        self.readout = nn.Identity() if out_features is None else nn.Linear(features, out_features)

    def forward(self, u: Tensor) -> Tensor:  # (B, p) -> (B, q)
        """Computes the outputs."""
        x = u.unsqueeze(-2)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.readout(x.squeeze(-2))
        return y


class EncoderDecoder(nn.Module):
    """One encoder layer and one decoder layer, each followed by a normalisation (Vaswani et al. 2017).

    Args:
        width, heads, feedforward: of both layers.
        dropout: 0.1 in 001 (appendix A.1).

    Example:
        >>> model = EncoderDecoder(10, heads=2, feedforward=10)
        >>> model(torch.zeros(7, 5, 10), torch.zeros(7, 5, 10)).shape
        torch.Size([7, 5, 10])
    """

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = EncoderLayer(width, heads, feedforward, dropout)
        self.decoder = DecoderLayer(width, heads, feedforward, dropout)
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        source: Tensor,  # (B, T, width)
        target: Tensor,  # (B, T, width)
        masked: bool = False,
    ) -> Tensor:  # (B, T, width)
        """Computes the outputs; `masked` hides later steps of the source and of the target."""
        mask = future(source.shape[-2], source.device) if masked else None
        memory = self.encoder_norm(self.encoder(source, mask))
        y: Tensor = self.decoder_norm(self.decoder(target, memory, mask, mask))
        return y


class ArgmaxTransformer(nn.Module):
    """Predicts at every step of a series the index of its largest element so far (001 section 3.1, Table 4).

    The target sequence of the decoder holds the right labels, one step late: at step t the one-hot argmax of
    the elements before t, and zeros at the first step. It is a function of the input, so `forward` makes it;
    copying its last entry is right with probability 1 - 1/T. Without a mask the decoder sees at step t the label
    of that very step, since it is the target of step t + 1: only the last step is a prediction then.

    The encoder reads the scalars through a 1 x width expansion; labels enter and logits leave without a
    further layer, so the width is the length. That makes the 1,920 parameters of 002 (Table 1).

    Args:
        length: steps of the series and number of classes.
        masked: whether a step sees only what comes no later.
        position: whether sinusoidal positions are added to source and target.
        output: "last" (B, T) or "sequence" (B, T, T), logits.

    Example:
        >>> model = ArgmaxTransformer(10)
        >>> model(torch.rand(7, 10)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([7, 10]), 1920)
    """

    def __init__(
        self,
        length: int = 10,
        *,
        heads: int = 2,
        feedforward: int = 10,
        masked: bool = True,
        position: bool = True,
        output: Output = "last",
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        require_choice("output", output, OUTPUTS)
        self.length, self.masked = length, masked
        self.output: Output = output
        self.expansion = nn.Linear(1, length)
        self.position = PositionalEncoding(length, length, dropout) if position else nn.Identity()
        self.transformer = EncoderDecoder(length, heads, feedforward, dropout)

    def forward(self, u: Tensor, target: Tensor | None = None) -> Tensor:  # (B, T) or (B, T, 1), (B, T, T)
        """Computes the logits from the series and a target sequence, by default the shifted labels."""
        sequence = as_sequence(u, 1)
        if sequence.shape[1] != self.length:
            raise InputError(f"the series must have {self.length} steps; received {sequence.shape[1]}")
        if target is None:
            target = shifted_argmax(sequence.squeeze(-1))
        source = self.position(self.expansion(sequence))
        y: Tensor = self.transformer(source, self.position(target), self.masked)
        return arrange(y, u, self.output)


class ArrayTransformer(nn.Module):
    """Reads an array as one token, in the encoder and as the decoder's target.

    The "encoder-decoder 10 x 10 x 5, 5 attention heads" of the identity task and, with a readout
    ("x 10"), of the rolling average (001 Table 4): width 10 and 5 hidden units in the feed-forward blocks.

    Args:
        features: of the array, the width of the transformer.
        out_features: of the readout; None returns the decoder's output.

    Example:
        >>> ArrayTransformer(10, 10)(torch.zeros(7, 10)).shape
        torch.Size([7, 10])
    """

    def __init__(
        self,
        features: int,
        out_features: int | None = None,
        *,
        heads: int = 5,
        feedforward: int = 5,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.transformer = EncoderDecoder(features, heads, feedforward, dropout)
        self.readout = nn.Identity() if out_features is None else nn.Linear(features, out_features)

    def forward(self, u: Tensor) -> Tensor:  # (B, p) -> (B, q)
        """Computes the outputs."""
        token = u.unsqueeze(-2)
        y: Tensor = self.readout(self.transformer(token, token).squeeze(-2))
        return y


def shifted_argmax(u: Tensor) -> Tensor:  # (B, T) -> (B, T, T)
    """Returns the one-hot argmax of the elements before each step; zeros at the first.

    Example:
        >>> shifted_argmax(torch.tensor([[0.2, 0.9, 0.4]]))
        tensor([[[0., 0., 0.],
                 [1., 0., 0.],
                 [0., 1., 0.]]])
    """
    labels = F.one_hot(u.cummax(-1).indices, u.shape[-1]).to(u)
    return F.pad(labels[:, :-1], (0, 0, 1, 0))


Pooling = Literal["first", "mean"]
SMALL = 1e-12  # under the root of layer normalisation, as in BERT


@dataclass(frozen=True)
class TextShape:
    """The sizes of a `TextClassifier`; those of DistilBERT by default.

    Args:
        vocabulary: words, the padding included.
        length: of the longest text.
        width, layers, heads, feedforward: of the encoder.
        classes: number of logits.
        pooling: what the head reads: the first word, as DistilBERT does, or the mean over all words.
        dropout: everywhere.
    """

    vocabulary: int = 30522
    length: int = 512
    width: int = 768
    layers: int = 6
    heads: int = 12
    feedforward: int = 3072
    classes: int = 20
    pooling: Pooling = "first"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.pooling not in ("first", "mean"):
            raise InputError(f"pooling must be 'first' or 'mean'; received {self.pooling!r}")


class TextClassifier(nn.Module):
    """Embeds words and their positions, applies encoder layers with GELU, and classifies.

    Word 0 is padding, which nothing attends to.

    Args:
        shape: all sizes.

    Example:
        >>> model = TextClassifier(TextShape(50, 10, 8, 1, 2, 16, 3)).eval()
        >>> model(torch.tensor([[4, 7, 0], [5, 0, 0]])).shape
        torch.Size([2, 3])
    """

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width, padding_idx=0)
        self.places = nn.Embedding(shape.length, shape.width)
        self.norm = nn.LayerNorm(shape.width, SMALL)
        self.layers = nn.ModuleList(TextLayer(shape) for _ in range(shape.layers))
        self.hidden, self.readout = nn.Linear(shape.width, shape.width), nn.Linear(shape.width, shape.classes)
        self.dropout = nn.Dropout(shape.dropout)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, u: Tensor) -> Tensor:  # (B, T) int64 -> (B, classes)
        """Computes the logits."""
        if u.shape[1] > self.shape.length:
            raise InputError(f"a text has at most {self.shape.length} words; received {u.shape[1]}")
        known = u != 0
        mask = ~known[:, None, None, :]
        mask[..., 0] = False  # a text without words attends to its first position
        x = self.dropout(self.norm(self.words(u) + self.places.weight[: u.shape[1]]))
        for layer in self.layers:
            x = layer(x, mask)
        y: Tensor = self.readout(self.dropout(torch.relu(self.hidden(self._pooled(x, known)))))
        return y

    def _pooled(self, x: Tensor, known: Tensor) -> Tensor:  # (B, T, width), (B, T) -> (B, width)
        if self.shape.pooling == "first":
            return x[:, 0]
        weights = known.to(x)
        return (weights[:, :, None] * x).sum(1) / weights.sum(1, keepdim=True).clamp(min=1.0)


class TextLayer(nn.Module):
    """Self-attention and two linear layers with GELU between, each added to its input and then normalised."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.attention = Attention(shape.width, shape.heads, shape.dropout)
        self.expand = nn.Linear(shape.width, shape.feedforward)
        self.contract = nn.Linear(shape.feedforward, shape.width)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width, SMALL) for _ in range(2))
        self.activation, self.dropout = nn.GELU(), nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # (B, T, width), (B, 1, 1, T)
        """Computes the outputs; `mask` is True where a word may not be seen."""
        x = self.norms[0](x + self.attention(x, x, mask))
        y: Tensor = self.norms[1](x + self.dropout(self.contract(self.activation(self.expand(x)))))
        return y


def encoder_layers(network: nn.Module) -> list[str]:
    """Names the linear layers of the encoder, in the order of evaluation.

    Example:
        >>> encoder_layers(TextClassifier(TextShape(50, 10, 8, 1, 2, 16, 3)))[-2:]
        ['layers.0.expand', 'layers.0.contract']
    """
    count = len(network.layers) if isinstance(network, TextClassifier) else 0
    if not count:
        raise InputError(f"a TextClassifier has encoder layers; received {type(network).__name__}")
    sublayers = ("attention.query", "attention.key", "attention.value", "attention.out", "expand", "contract")
    return [f"layers.{k}.{sublayer}" for k in range(count) for sublayer in sublayers]


PREFIX = "distilbert."
OUTSIDE = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "places",
    "embeddings.LayerNorm": "norm",
}
LAYER = {
    "attention.q_lin": "attention.query",
    "attention.k_lin": "attention.key",
    "attention.v_lin": "attention.value",
    "attention.out_lin": "attention.out",
    "sa_layer_norm": "norms.0",
    "ffn.lin1": "expand",
    "ffn.lin2": "contract",
    "output_layer_norm": "norms.1",
}
HEAD = {"pre_classifier": "hidden", "classifier": "readout"}
HEAD_WIDTH = 64  # of one attention head in the published models


def load_distilbert(path: str | os.PathLike[str], *, heads: int | None = None) -> TextClassifier:
    """Loads a DistilBERT that was trained to classify, in evaluation mode.

    All sizes are read off the tensors. Tensors of the masked language model are left out.

    Args:
        path: ``model.safetensors``, or its folder.
        heads: of the attention; by default as in ``config.json`` beside the file, else one for 64 features.

    Raises:
        FileFormatError: no such file, or tensors are missing; the message says which.
    """
    weights = Path(path)
    weights = weights / "model.safetensors" if weights.is_dir() else weights
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise FileFormatError(
            f"{str(weights)!r} is not a safetensors file: {error}; give model.safetensors of a DistilBERT for "
            "sequence classification, or the folder that holds it"
        ) from error
    named = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
    renamed = _renamed(named, weights)
    shape = _shape(renamed, heads or _heads(weights))
    model = TextClassifier(shape)
    model.load_state_dict({name: value.to(model.words.weight) for name, value in renamed.items()})
    return model.eval()


def _renamed(tensors: dict[str, Tensor], weights: Path) -> dict[str, Tensor]:
    """Renames the tensors to our names."""
    pairs = dict(OUTSIDE | HEAD)
    numbers = {name.split(".")[2] for name in tensors if name.startswith("transformer.layer.")}
    for k in range(len(numbers)):
        pairs |= {f"transformer.layer.{k}.{theirs}": f"layers.{k}.{ours}" for theirs, ours in LAYER.items()}
    renamed, missing = {}, [] if numbers else ["transformer.layer.0.attention.q_lin.weight"]
    for theirs, ours in pairs.items():
        for ending in ("weight",) if "_embeddings" in theirs else ("weight", "bias"):
            if (value := tensors.get(f"{theirs}.{ending}")) is None:
                missing.append(f"{theirs}.{ending}")
            else:
                renamed[f"{ours}.{ending}"] = value
    if missing:
        hint = "; train it to classify first" if any(name.split(".")[0] in HEAD for name in missing) else ""
        raise FileFormatError(
            f"{str(weights)!r} lacks {len(missing)} tensors of a DistilBERT for sequence classification, such as "
            f"{missing[0]!r}{hint}"
        )
    return renamed


def _shape(tensors: dict[str, Tensor], heads: int | None) -> TextShape:
    (vocabulary, width), length = tensors["words.weight"].shape, len(tensors["places.weight"])
    layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    feedforward, classes = len(tensors["layers.0.expand.weight"]), len(tensors["readout.weight"])
    return TextShape(vocabulary, length, width, layers, heads or max(1, width // HEAD_WIDTH), feedforward, classes)


def _heads(weights: Path) -> int | None:
    file = weights.with_name("config.json")
    if not file.exists():
        return None
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return int(settings["n_heads"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{str(file)!r} does not say n_heads: {error}") from error
