"""Transformers with encoder and decoder: the rolling argmax, and arrays as single tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.baselines.attention import DecoderLayer, EncoderLayer, PositionalEncoding, future
from wellposed.baselines.sequence import OUTPUTS, Output, arrange, as_sequence, require_choice
from wellposed.errors import InputError


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
        hidden = future(source.shape[-2], source.device) if masked else None
        memory = self.encoder_norm(self.encoder(source, hidden))
        y: Tensor = self.decoder_norm(self.decoder(target, memory, hidden, hidden))
        return y


class ArgmaxTransformer(nn.Module):
    """Predicts at every step of a series the index of its largest element so far (001 section 3.1, Table 4).

    The target sequence of the decoder holds the right labels, one step late: at step t the one-hot argmax of
    the elements before t, and zeros at the first step. It is a function of the input, so `forward` makes it;
    copying its last entry is right with probability 1 - 1/T. `generate` feeds back the model's own answers
    instead, which asks for training at every step (output "sequence"). Without a mask the decoder sees at
    step t the label of that very step, since it is the target of step t + 1: only the last step is a
    prediction then.

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

    @torch.no_grad()
    def generate(self, u: Tensor) -> Tensor:  # (B, T) or (B, T, 1) -> (B, T) integers
        """Answers step by step, every answer the next entry of the target sequence."""
        sequence = as_sequence(u, 1)
        source, steps = self.position(self.expansion(sequence)), range(self.length)
        target = sequence.new_zeros(len(sequence), self.length + 1, self.length)
        answers = []
        for step in steps:
            logits = self.transformer(source, self.position(target[:, : self.length]), self.masked)
            answers.append(logits[:, step].argmax(-1))
            target[:, step + 1] = F.one_hot(answers[-1], self.length).to(target)
        return torch.stack(answers, 1)


class ArrayTransformer(nn.Module):
    """Reads an array as one token, in the encoder and as the decoder's target.

    The "encoder-decoder 10 x 10 x 5, 5 attention heads" of the identity task and, with a readout
    ("x 10"), of the rolling average (001 Table 4): width 10 and 5 hidden units in the feed-forward parts.

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
