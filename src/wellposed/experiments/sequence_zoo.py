"""The recurrent models of the experiments and the rules that need no training, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from wellposed.baselines.linear import LinearRegression
from wellposed.baselines.naive import CopyLastLabel, Mean, Persistence
from wellposed.baselines.sequence import Output, arrange, as_sequence
from wellposed.errors import InputError
from wellposed.experiments.config import Choice
from wellposed.models.recurrent import ImplicitRNN

Shape = tuple[int, int]  # widths of input and output
Sizes = tuple[int, int]  # of state and hidden state
# Sizes of the implicitRNN by task and paper; the rolling average has none in the papers and takes those of 001.
RECURRENT: dict[tuple[str, str], Sizes] = {
    ("rolling-average", "001"): (21, 22),
    ("rolling-argmax", "000"): (18, 22),
    ("rolling-argmax", "001"): (21, 22),
    ("spiky", "001"): (20, 20),
    ("volatility", "001"): (37, 40),
}


class SeriesRNN(nn.Module):
    """Runs an implicitRNN over scalar series.

    Args:
        rnn: with one input and a readout.
        output: "last" (B, q), or "sequence", which for q = 1 is (B, T).

    Example:
        >>> import torch
        >>> model = SeriesRNN(ImplicitRNN(1, 22, 18, out_features=10), "last")
        >>> model(torch.zeros(7, 10)).shape
        torch.Size([7, 10])
    """

    def __init__(self, rnn: ImplicitRNN, output: Output) -> None:
        super().__init__()
        self.rnn = rnn
        self.output: Output = output

    def forward(self, u: Tensor) -> Tensor:  # (B, T)
        """Computes the outputs."""
        y, _ = self.rnn(as_sequence(u, 1))
        return arrange(y, u, self.output)


def implicit_rnn(task: str, shape: Shape, choice: Choice, **forced: Any) -> SeriesRNN:
    """Builds the implicitRNN of a paper; without biases, unless options ask for them, it is homogeneous."""
    options = {**dict(choice.options), **forced}
    key = task, choice.size or "001"
    states, hidden = options.pop("state_features", None), options.pop("hidden_size", None)
    if key in RECURRENT:
        states, hidden = states or RECURRENT[key][0], hidden or RECURRENT[key][1]
    if states is None or hidden is None:
        raise InputError(f"say how large an implicitRNN is on {task!r}: state_features=..., hidden_size=...")
    output: Output = "sequence" if task == "rolling-average" else "last"
    width = 1 if output == "sequence" else shape[1]
    return SeriesRNN(ImplicitRNN(1, hidden, states, out_features=width, **options), output)


def logistic(task: str, shape: Shape, choice: Choice) -> LinearRegression:
    """Builds a logistic regression without intercept: logits ``Wu``."""
    return LinearRegression(*shape, intercept=False)


RECURRENT_MODELS: dict[str, Callable[[str, Shape, Choice], nn.Module]] = {
    "implicit-rnn": implicit_rnn,
    "implicit-rnn-bias": partial(implicit_rnn, readout_bias=True),
}
CLOSED_FORM: dict[str, Callable[[str, Shape, Choice], nn.Module]] = {
    "linear": lambda task, shape, choice: LinearRegression(*shape),
    "mean": lambda task, shape, choice: Mean(shape[1]),
    "persistence": lambda task, shape, choice: Persistence(),
    "copy-last-label": lambda task, shape, choice: CopyLastLabel(),
}
