"""A transformer that classifies texts, of the architecture of DistilBERT (Sanh et al. 2019) in any size."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from wellposed.baselines.attention import Attention
from wellposed.errors import InputError

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
    """Embeds words and places, applies encoder layers with GELU, and classifies.

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
        hidden = ~known[:, None, None, :]
        hidden[..., 0] = False  # a text without words attends to its first place
        x = self.dropout(self.norm(self.words(u) + self.places.weight[: u.shape[1]]))
        for layer in self.layers:
            x = layer(x, hidden)
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

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:  # (B, T, width), (B, 1, 1, T)
        """Computes the outputs; `hidden` is True where a word may not be seen."""
        x = self.norms[0](x + self.attention(x, x, hidden))
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
    parts = ("attention.query", "attention.key", "attention.value", "attention.out", "expand", "contract")
    return [f"layers.{k}.{part}" for k in range(count) for part in parts]
