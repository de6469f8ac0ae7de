"""The layers of a transformer (Vaswani et al. 2017), in operations that vmap and repeated derivatives know."""

import math

import torch
from torch import Tensor, nn

from wellposed.errors import InputError


class Attention(nn.Module):
    """Lets every query look at the keys: ``softmax(QK' / sqrt(d)) V`` in several heads.

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
        hidden: Tensor | None = None,  # (T, S)
    ) -> Tensor:  # (B, T, width)
        """Computes the outputs; `hidden` is True where a query may not see a key."""
        query = self._split(self.query(x)) * (self.heads / x.shape[-1]) ** 0.5
        key, value = self._split(self.key(memory)), self._split(self.value(memory))
        scores = query @ key.mT  # (B, heads, T, S)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        mixed = self.dropout(torch.softmax(scores, -1)) @ value
        y: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return y

    def _split(self, x: Tensor) -> Tensor:  # (B, T, width) -> (B, heads, T, width / heads)
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward part with ReLU, each added to its input and then normalised.

    Args:
        feedforward: hidden width of the feed-forward part.
        dropout: of all parts; 0.1 in 001 (appendix A.1).

    Example:
        >>> EncoderLayer(10, heads=2, feedforward=20)(torch.zeros(7, 4, 10)).shape
        torch.Size([7, 4, 10])
    """

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.feedforward = FeedForwardPart(width, feedforward, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:  # (B, T, width), (T, T)
        """Computes the outputs; `hidden` is True where a step may not see another."""
        x = self.norms[0](x + self.dropout(self.attention(x, x, hidden)))
        y: Tensor = self.norms[1](x + self.feedforward(x))
        return y


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output and a feed-forward part.

    Example:
        >>> DecoderLayer(10, heads=2, feedforward=20)(torch.zeros(7, 4, 10), torch.zeros(7, 5, 10)).shape
        torch.Size([7, 4, 10])
    """

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.lookup = Attention(width, heads, dropout)
        self.feedforward = FeedForwardPart(width, feedforward, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,  # (B, T, width)
        memory: Tensor,  # (B, S, width)
        hidden: Tensor | None = None,  # (T, T)
        hidden_memory: Tensor | None = None,  # (T, S)
    ) -> Tensor:  # (B, T, width)
        """Computes the outputs."""
        x = self.norms[0](x + self.dropout(self.attention(x, x, hidden)))
        x = self.norms[1](x + self.dropout(self.lookup(x, memory, hidden_memory)))
        y: Tensor = self.norms[2](x + self.feedforward(x))
        return y


class FeedForwardPart(nn.Module):
    """Two linear layers with ReLU between, the same at every step."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation, self.dropout = nn.ReLU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the part's outputs."""
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
    """Marks what a causal layer hides: True where the key comes after the query.

    Example:
        >>> future(3).int()
        tensor([[0, 1, 1],
                [0, 0, 1],
                [0, 0, 0]], dtype=torch.int32)
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
