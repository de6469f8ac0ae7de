"""Transformer encoders of the papers: over the steps of a series, and over an array as one token."""

from typing import Literal

from torch import Tensor, nn

from wellposed.baselines.attention import EncoderLayer, PositionalEncoding, future
from wellposed.baselines.sequence import OUTPUTS, Output, arrange, as_sequence, require_choice
from wellposed.errors import InputError

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
        hidden = future(steps, u.device) if self.causal else None
        x = self.position(self.expansion(sequence))
        for layer in self.layers:
            x = layer(x, hidden)
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
