"""The LSTM of the sequence tasks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.baselines.sequence import (
    NORMALISATIONS,
    OUTPUTS,
    Normalisation,
    Output,
    arrange,
    as_sequence,
    normalised,
    require_choice,
)
from wellposed.equilibrium.transform import under_functorch
from wellposed.errors import InputError


class LSTM(nn.Module):
    """Runs one LSTM layer over the sequence and reads its states out linearly.

    The papers' "LSTM a x h x h x o" is this network with a inputs, h units and o outputs: their parameter
    counts (002 Table 1) hold one LSTM layer with two bias vectors, as torch has it, and one readout.

    Args:
        output: "last" (B, q), or "sequence" (B, T, q), which for series (B, T) and q = 1 is (B, T).
        normalise: "first" subtracts the first element of each sequence, "max" divides by its largest
            magnitude; the controls that take a shift or a factor away.
        restore: whether the outputs get back what `normalise` took, as a regression needs; then translating
            or scaling the input does the same to the output. Logits do not want it.
        bias: whether the layers have one.

    Example:
        >>> model = LSTM(1, 19, 10)
        >>> model(torch.zeros(7, 10)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([7, 10]), 1872)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        output: Output = "last",
        normalise: Normalisation | None = None,
        restore: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        require_choice("output", output, OUTPUTS)
        if normalise is not None:
            require_choice("normalise", normalise, NORMALISATIONS)
        if normalise == "first" and restore and in_features not in (1, out_features):
            raise InputError(
                f"restore adds the first element (of {in_features} features) to {out_features} outputs; "
                "pass restore=False, or as many outputs as features"
            )
        self.cell = nn.LSTMCell(in_features, hidden_features, bias)
        self.readout = nn.Linear(hidden_features, out_features, bias)
        self.output: Output = output
        self.normalise, self.restore = normalise, restore

    def forward(self, u: Tensor) -> Tensor:  # (B, T) or (B, T, p)
        """Computes the outputs."""
        sequence, shift, scale = normalised(as_sequence(u, self.cell.input_size), self.normalise)
        y: Tensor = self.readout(self.states(sequence))
        if self.restore and self.normalise is not None:
            y = y * scale + shift
        return arrange(y, u, self.output)

    def states(self, sequence: Tensor) -> Tensor:  # (B, T, p) -> (B, T, h)
        """Computes the hidden state after every step, from zero."""
        start = sequence.new_zeros(len(sequence), self.cell.hidden_size)
        if under_functorch():
            return self._steps(sequence, start)
        weights = tuple(self.cell.parameters())
        begin = (start[None], start[None])
        states, _, _ = torch.lstm(sequence, begin, weights, self.cell.bias, 1, 0.0, self.training, False, True)
        return states

    def _steps(self, sequence: Tensor, start: Tensor) -> Tensor:
        """Does what the fused kernel does, in operations that vmap knows."""
        cell, h, c, states = self.cell, start, start, []
        inputs = F.linear(sequence, cell.weight_ih, cell.bias_ih)
        for step in inputs.unbind(1):
            i, f, g, o = (step + F.linear(h, cell.weight_hh, cell.bias_hh)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1)
