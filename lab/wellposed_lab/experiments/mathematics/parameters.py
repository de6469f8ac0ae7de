"""The published numbers of parameters (000 section 3, 001 Table 4, 002 Table 1), counted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from torch import nn

from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN
from wellposed_lab.config import Choice, Scale
from wellposed_lab.engine.experiment import Suite
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Record, Result, Value
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.published import PUBLISHED

Key = tuple[str, str, str | None]  # task, model, size


def _rnn(states: int, hidden: int, outputs: int) -> Callable[[], nn.Module]:
    return partial(ImplicitRNN, 1, hidden, states, out_features=outputs, readout_bias=True, batch_first=True)


def _implicit(inputs: int, outputs: int, states: int) -> Callable[[], nn.Module]:
    return partial(ImplicitModel, inputs, outputs, states)


LAYER = 128  # width of the feed-forward layers of 004
EARLY: dict[tuple[str, str], Callable[[], nn.Module]] = {
    ("identity", "implicit"): _implicit(10, 10, 4),
    ("rolling-average", "implicit"): _implicit(10, 10, 200),
    ("rolling-argmax", "implicit"): _implicit(10, 10, 33),
    ("rolling-argmax", "implicit-rnn"): _rnn(18, 22, 10),
    ("spiky", "implicit-rnn"): _rnn(20, 20, 1),
}
LATE: dict[tuple[str, str], Callable[[], nn.Module]] = {
    ("identity", "implicit"): _implicit(10, 10, 4),
    ("addition", "implicit"): _implicit(50, 1, 20),
    ("rolling-average", "implicit"): _implicit(10, 10, 32),
    ("rolling-argmax", "implicit"): _implicit(10, 10, 36),
    ("rolling-argmax", "implicit-rnn"): _rnn(21, 22, 10),
    ("spiky", "implicit-rnn"): _rnn(20, 20, 1),
    ("volatility", "implicit"): _implicit(60, 1, 53),
    ("volatility", "implicit-rnn"): _rnn(37, 40, 1),
    ("earthquake", "implicit"): _implicit(30, 4, 190),
}
BUILDERS: dict[Key, Callable[[], nn.Module]] = {
    **{(task, model, size): make for size in ("000", "002") for (task, model), make in EARLY.items()},
    **{(task, model, "001"): make for (task, model), make in LATE.items()},
    ("earthquake", "implicit", "002"): LATE["earthquake", "implicit"],
    ("hard-addition", "implicit", None): _implicit(100, 1, 50),
    **{key: entry.make for key, entry in PUBLISHED.items() if entry.task != "cifar10"},
}


@dataclass(frozen=True, kw_only=True)
class CountRun(Run):
    """Builds a network and counts its parameters."""

    task: str
    model: Choice

    @property
    def labels(self) -> Key:
        return self.task, self.model.name, self.model.size

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        model = BUILDERS[self.labels]()
        return [Result((Value("parameters", float(parameter_count(model))),))]


@dataclass(frozen=True, kw_only=True)
class WidthRun(Run):
    """Computes the width of an equilibrium model with as many weights as layers of width 128 (004 section 4.1).

    One layer is the cell itself. For more layers their weights and biases fill one square matrix.

    Args:
        layers: of the feed-forward networks.
    """

    layers: tuple[int, ...] = (1, 3, 5, 7, 9, 11, 13)

    @property
    def labels(self) -> Key:
        return "mnist", "deq", None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        widths = {count: LAYER if count == 1 else _side(count * (LAYER**2 + LAYER)) for count in self.layers}
        return [Result(tuple(Value("state_width", float(width), float(count)) for count, width in widths.items()))]


def _side(weights: int) -> int:
    """Returns the side of the smallest square with at least that many entries."""
    return math.isqrt(weights - 1) + 1


def plan(scale: Scale) -> list[Run]:
    """Returns every network of the tables, and the widths of 004."""
    counted: list[Run] = [
        CountRun(
            suite="parameters",
            seed=0,
            scale=scale,
            role="ours" if model.startswith("implicit") else "baseline",
            task=task,
            model=Choice(model, size),
        )
        for task, model, size in BUILDERS
    ]
    return [*counted, WidthRun(suite="parameters", seed=0, scale=scale)]


def findings(records: Sequence[Record]) -> list[str]:
    """Says what counting shows."""
    blind = sorted({f"{entry.model} on {entry.task}" for entry in PUBLISHED.values() if "depend" in entry.note})
    return [
        f"By its count the {name} has layers of width 1. Layer norm makes the output of such a network "
        "independent of its input."
        for name in blind
    ]


SUITE = Suite(
    name="parameters",
    title="Numbers of parameters",
    claim="The networks that the papers compare have the sizes that they print.",
    papers=("000 section 3", "001 Table 4", "002 Table 1", "004 section 4.1"),
    plan=plan,
    seeds={"tiny": 1, "default": 1, "paper": 1},
    findings=findings,
)
