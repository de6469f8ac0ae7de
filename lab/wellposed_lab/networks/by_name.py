"""The models of the experiments by name.

`implicit_rnn` and `logistic` build recurrent models and a linear classifier. An `Entry` says how the model of one
name is made, rules that need no training included; `build` makes the model of a run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InputError, unknown_name
from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN
from wellposed_lab.config import Choice
from wellposed_lab.networks.mlp import MLP, MLP_ACTIVATIONS, EikoNet
from wellposed_lab.networks.published import build as build_published
from wellposed_lab.networks.recurrent import Output, arrange, as_sequence
from wellposed_lab.networks.simple import CopyLastLabel, LinearRegression, Mean, Persistence

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
        >>> model = SeriesRNN(ImplicitRNN(1, 22, 18, out_features=10, batch_first=True), "last")
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
    return SeriesRNN(ImplicitRNN(1, hidden, states, out_features=width, batch_first=True, **options), output)


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


# States of implicit models by task, or by task and the paper whose size is meant.
STATES = {"identity": 4, "addition": 20, "subtraction": 20, "hard-addition": 50, "hard-subtraction": 50}
SIZED_STATES = {
    ("rolling-average", "000"): 200,
    ("rolling-average", "001"): 32,
    ("rolling-argmax", "000"): 33,
    ("rolling-argmax", "001"): 36,
    ("spiky", "001"): 20,
    ("volatility", "001"): 53,
}


@dataclass(frozen=True)
class Entry:
    """How a model of one name is made.

    Args:
        make: from the task's name, its widths and the choice.
        batch_seeds: whether several seeds are trained as one `Ensemble`.
        closed_form: whether the model has a method ``fit(u, y)`` instead of being trained.
    """

    make: Callable[[str, Shape, Choice], nn.Module]
    batch_seeds: bool = True
    closed_form: bool = False


def build(task: str, shape: Shape, choice: Choice) -> nn.Module:
    """Builds the model of a run.

    Example:
        >>> build("identity", (10, 10), Choice.of("implicit")).state_features
        4
    """
    return entry(choice.name).make(task, shape, choice)


def entry(name: str) -> Entry:
    """Returns how a model is made; names that are not in `ZOO` are published comparators or MLPs by activation."""
    if name in ZOO:
        return ZOO[name]
    if name in PUBLISHED_NAMES:
        return Entry(_published, batch_seeds=PUBLISHED_NAMES[name])
    if name in ACTIVATED:
        return Entry(_activated)
    raise unknown_name("model", name, [*ZOO, *PUBLISHED_NAMES, *ACTIVATED])


def _implicit(task: str, shape: Shape, choice: Choice, **forced: Any) -> ImplicitModel:
    """Builds an implicit model that starts near zero: B and C have a tenth of their usual size."""
    options = {**dict(choice.options), **forced}
    sized = SIZED_STATES.get((task, choice.size or "001"))
    states = options.pop("state_features", None) or sized or STATES.get(task)
    if states is None:
        raise InputError(f"say how many states an implicit model has on {task!r}: state_features=...")
    scale = options.pop("initial_scale", 0.1)
    model = ImplicitModel(shape[0], shape[1], states, **options)
    with torch.no_grad():
        model.B.mul_(scale)
        model.C.mul_(scale)
    return model


def _no_feedback(task: str, shape: Shape, choice: Choice) -> ImplicitModel:
    """Builds ``y = C phi(Bu) + Du``: the implicit model with A = 0, held there."""
    model = _implicit(task, shape, choice)
    with torch.no_grad():
        model.state.raw.requires_grad_(False).zero_()
    return model


def _published(task: str, shape: Shape, choice: Choice) -> nn.Module:
    """Builds the comparator of a paper; in R^100, where none is published, one as large as our model."""
    if not task.startswith("hard-"):
        return build_published(task, choice.name, choice.size or "001")
    if choice.name not in _WIDE:
        raise unknown_name(f"model of the task {task!r}", choice.name, [*_WIDE, *ZOO])
    return _WIDE[choice.name]((shape[0], STATES[task], STATES[task], shape[1]))


def _activated(task: str, shape: Shape, choice: Choice) -> nn.Module:
    """Builds the MLP with another activation: that of 000 on the identity, in R^100 one as large as our model."""
    hidden = (10,) if task == "identity" else (STATES[task], STATES[task])
    return MLP((shape[0], *hidden, shape[1]), ACTIVATED[choice.name])


_WIDE: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "mlp-bias-free": lambda widths: MLP(widths, bias=False),
}

ZOO: dict[str, Entry] = {
    "implicit": Entry(_implicit),
    "implicit-bias": Entry(lambda task, shape, choice: _implicit(task, shape, choice, bias=True)),
    "implicit-no-feedthrough": Entry(
        lambda task, shape, choice: _implicit(task, shape, choice, feedthrough=False)
    ),
    "implicit-no-feedback": Entry(_no_feedback),
    "implicit-triangular": Entry(
        lambda task, shape, choice: _implicit(task, shape, choice, triangular=True, kappa=None), batch_seeds=False
    ),
    "implicit-triangular-capped": Entry(
        lambda task, shape, choice: _implicit(task, shape, choice, triangular=True), batch_seeds=False
    ),
    "implicit-absolute": Entry(_implicit),  # with the rule of 001 among its options,
    "implicit-absolute-half": Entry(_implicit),  # and with a cap of one half
    "eikonet": Entry(lambda task, shape, choice: EikoNet(*shape)),
    "eikonet-skip": Entry(lambda task, shape, choice: EikoNet(*shape, skip=True)),
    "logistic": Entry(logistic),
    **{name: Entry(make, batch_seeds=False) for name, make in RECURRENT_MODELS.items()},
    **{name: Entry(make, batch_seeds=False, closed_form=True) for name, make in CLOSED_FORM.items()},
}

ACTIVATED = {
    "mlp-log-sigmoid" if name == "logsigmoid" else f"mlp-{name.replace('_', '-')}": name
    for name in MLP_ACTIVATIONS
}

# Names of published comparators, and whether their seeds can be stacked.
PUBLISHED_NAMES = {
    "mlp": True,
    "mlp-wide": True,
    "mlp-bias-free": True,
    "mlp-skip": True,
    "nac": True,
    "nalu": True,
    "inalu": True,
    "lstm": False,
    "lstm-normalised": False,
    "rnn-relu": False,
    "transformer-encoder": False,
    "transformer-encoder-single-head": False,
    "transformer-encoder-sequential": False,
    "transformer-encoder-depthwise": False,
    "transformer-5-heads": False,
    "transformer-decoder-masked": False,
    "transformer-decoder-unmasked": False,
    "transformer-no-position": False,
    "transformer-spiky": False,
    "transformer-volatility": False,
}
