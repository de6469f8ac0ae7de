"""The recurrent rivals of the sequence tasks: a ReLU network and an LSTM.

They share shapes in and out (`as_sequence`, `arrange`) and the normalisations that serve as controls
(`normalised`). `ReLURNN` is the vanilla recurrent network: a control that is positively homogeneous without
biases. `LSTM` has one layer.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.equilibrium.tracing import under_functorch
from wellposed.errors import InputError, unknown_name

Output = Literal["sequence", "last"]
Normalisation = Literal["first", "max"]
OUTPUTS: tuple[Output, ...] = ("sequence", "last")
NORMALISATIONS: tuple[Normalisation, ...] = ("first", "max")


def as_sequence(u: Tensor, features: int) -> Tensor:  # (B, T) or (B, T, p) -> (B, T, p)
    """Gives a batch of scalar series its feature dimension.

    Example:
        >>> as_sequence(torch.zeros(7, 10), 1).shape
        torch.Size([7, 10, 1])
    """
    sequence = u.unsqueeze(-1) if u.dim() == 2 else u
    if sequence.dim() != 3 or sequence.shape[-1] != features:
        series = " or (B, T)" if features == 1 else ""
        raise InputError(f"u must be (B, T, {features}){series}; received {tuple(u.shape)}")
    return sequence


def arrange(y: Tensor, u: Tensor, output: Output) -> Tensor:  # (B, T, q)
    """Picks the outputs: of the last step (B, q), or of all; a scalar series in gives a scalar series out.

    Example:
        >>> arrange(torch.zeros(7, 10, 1), torch.zeros(7, 10), "sequence").shape
        torch.Size([7, 10])
    """
    if output == "last":
        return y[:, -1]
    return y.squeeze(-1) if u.dim() == 2 and y.shape[-1] == 1 else y


def normalised(
    sequence: Tensor, kind: Normalisation | None
) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, p), (B, 1, p), (B, 1, 1)
    """Returns ``(s - shift) / scale`` with the shift and the scale of every sequence.

    "first" takes the first element as shift, so a translation of the sequence does not show; "max" takes the
    largest magnitude as scale, so a positive factor does not. The latter looks at the whole sequence, also
    for the outputs of early steps.

    Example:
        >>> s, shift, scale = normalised(torch.tensor([[[3.0], [5.0], [-6.0]]]), "max")
        >>> s.flatten().tolist(), scale.item()
        ([0.5, 0.8333333134651184, -1.0], 6.0)
    """
    shift, scale = torch.zeros_like(sequence[:, :1]), torch.ones_like(sequence[:, :1, :1])
    if kind == "first":
        shift = sequence[:, :1]
    elif kind == "max":
        largest = sequence.abs().amax((1, 2), keepdim=True)
        scale = torch.where(largest > 0, largest, scale)
    return (sequence - shift) / scale, shift, scale


def require_choice(kind: str, value: str | None, valid: tuple[str, ...]) -> None:
    """Raises unless the value is one of the valid ones.

    Example:
        >>> require_choice("output", "lats", OUTPUTS)
        Traceback (most recent call last):
            ...
        wellposed.errors.UnknownNameError: unknown output 'lats'; valid: last, sequence; did you mean 'last'?
    """
    if value not in valid:
        raise unknown_name(kind, value, valid)


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
