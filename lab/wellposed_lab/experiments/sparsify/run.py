"""Runs that make a trained network sparse, or fit models to its states.

`SparsifyRun` is for MLPs, whose rows are fitted at once; `SharedRun` for residual networks and transformers, whose
rows are shared by positions and fitted layer by layer.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from wellposed.errors import InputError
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Result, Value
from wellposed_lab.experiments.sparsify.measures import (
    frontier,
    iterations,
    kappas,
    level_line,
    partial_data,
    partial_speed,
    warm_starts,
)
from wellposed_lab.experiments.sparsify.texts import Newsgroups
from wellposed_lab.networks.trained import TrainedNetwork

Part = Literal["dense", "level", "kappa", "sparsity", "data", "iterations", "speed", "words"]
ENDINGS: dict[str, str] = {
    "level": "-sparsity",
    "sparsity": "-sparsity",
    "data": "-data",
    "iterations": "-iterations",
}


@dataclass(frozen=True, kw_only=True)
class SparsifyingRun(Run):
    """Measures one method along one axis.

    Args:
        network: with its data; it says how its rows are fitted.
        part: the axis: the cap kappa, the sparsity to reach, the share of the data, the halvings of Algorithm 1;
            "speed" is against kappa too, "dense" is the network itself, a level line, "level" the same beside
            sparsities, and "words" needs no network.
        model: the method.
        points: on the axis.
        samples: training samples that a fit sees.
        level: kappa of "iterations", sparsity of "data" (zero: none is asked for), share of "speed".
    """

    network: TrainedNetwork
    part: Part
    model: str
    points: tuple[float, ...] = ()
    samples: int
    level: float = 0.0

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.network.data + ENDINGS.get(self.part, ""), self.model, None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run.measured() for run in runs]

    def measured(self) -> Result:
        """Returns all numbers of this run."""
        network, seed, points = self.network, self.seed, self.points
        if self.part in ("dense", "level"):
            return level_line(network, seed, points)
        if self.part == "words":
            return self._words()
        if self.part == "kappa":
            return kappas(network, seed, self.model, points, self.samples)
        if self.part == "sparsity":
            return self.frontier()
        if self.part == "data":
            return partial_data(network, seed, points, self.level or None)
        if self.part == "iterations":
            return iterations(network, seed, self.level, points, self.samples)
        if self.model == "partial-data":
            return partial_speed(network, seed, points, self.samples, self.level)
        return warm_starts(network, seed, points, self.samples, self.model == "warm-start")

    @abc.abstractmethod
    def frontier(self) -> Result:
        """Makes networks of given sparsity."""

    def _words(self) -> Result:
        if not isinstance(self.network, Newsgroups):
            raise InputError(f"only texts are classified by their words; received {self.network}")
        accuracy = self.network.linear_accuracy()
        return Result(tuple(Value("accuracy", accuracy, at) for at in (None, *self.points)))


@dataclass(frozen=True, kw_only=True)
class SparsifyRun(SparsifyingRun):
    """Fits all rows of an MLP at once.

    Args:
        epochs: of training after pruning, and with a penalty.
    """

    samples: int = 500
    epochs: int = 0
    record_fields: ClassVar[Mapping[str, str]] = {"network": "dense"}

    def frontier(self) -> Result:
        return frontier(self.network, self.seed, self.model, self.points, self.samples, self.epochs)


@dataclass(frozen=True, kw_only=True)
class SharedRun(SparsifyingRun):
    """Fits rows that positions share, layer by layer: residual networks and transformers.

    Args:
        path: all sparsities that fits go through, from the lowest on.
        steps: of training afterwards.
    """

    samples: int = 256
    path: tuple[float, ...] = ()
    steps: int = 0
    record_fields: ClassVar[Mapping[str, str]] = {"network": "subject"}

    def frontier(self) -> Result:
        return frontier(self.network, self.seed, self.model, self.points, self.samples, self.steps, self.path)
