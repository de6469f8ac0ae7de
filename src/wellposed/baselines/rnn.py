"""The vanilla recurrent network with ReLU: a control that is positively homogeneous without biases."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.baselines.sequence import OUTPUTS, Output, arrange, as_sequence, require_choice
from wellposed.equilibrium.transform import under_functorch


class ReLURNN(nn.Module):
    """Iterates ``h <- relu(V s_t + W h)`` over the sequence and reads the states out linearly.

    Without biases, the default, f(au) = a f(u) for a > 0, as of a bias-free implicit model.

    Args:
        output: "last" (B, q), or "sequence" (B, T, q), which for series (B, T) and q = 1 is (B, T).
        bias: whether the layers have one.

    Example:
        >>> model = ReLURNN(1, 42, 10)
        >>> model(torch.zeros(7, 10)).shape
        torch.Size([7, 10])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        output: Output = "last",
        bias: bool = False,
    ) -> None:
        super().__init__()
        require_choice("output", output, OUTPUTS)
        self.cell = nn.RNNCell(in_features, hidden_features, bias, nonlinearity="relu")
        self.readout = nn.Linear(hidden_features, out_features, bias)
        self.output: Output = output

    def forward(self, u: Tensor) -> Tensor:  # (B, T) or (B, T, p)
        """Computes the outputs."""
        y: Tensor = self.readout(self.states(as_sequence(u, self.cell.input_size)))
        return arrange(y, u, self.output)

    def states(self, sequence: Tensor) -> Tensor:  # (B, T, p) -> (B, T, h)
        """Computes the hidden state after every step, from zero."""
        start = sequence.new_zeros(len(sequence), self.cell.hidden_size)
        if under_functorch():
            return self._steps(sequence, start)
        weights = tuple(self.cell.parameters())
        states, _ = torch.rnn_relu(
            sequence, start[None], weights, self.cell.bias, 1, 0.0, self.training, False, True
        )
        return states

    def _steps(self, sequence: Tensor, h: Tensor) -> Tensor:
        """Does what the fused kernel does, in operations that vmap knows."""
        cell, states = self.cell, []
        for step in F.linear(sequence, cell.weight_ih, cell.bias_ih).unbind(1):
            h = torch.relu(step + F.linear(h, cell.weight_hh, cell.bias_hh))
            states.append(h)
        return torch.stack(states, 1)
