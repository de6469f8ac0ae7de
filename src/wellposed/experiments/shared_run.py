"""Runs that make networks with shared rows sparse: residual networks and transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from wellposed.experiments.newsgroups import Newsgroups
from wellposed.experiments.record import Result, Value
from wellposed.experiments.run import Context, Run
from wellposed.experiments.shared_measures import (
    dense_scores,
    frontier,
    kappas,
    partial_data,
    partial_speed,
    warm_starts,
)
from wellposed.experiments.trained_network import FoldedResNet

Part = Literal["dense", "level", "sparsity", "kappa", "data", "speed", "words"]
ENDINGS: dict[str, str] = {"level": "-sparsity", "sparsity": "-sparsity", "data": "-data"}


@dataclass(frozen=True, kw_only=True)
class SharedRun(Run):
    """Measures one method along one axis.

    Args:
        subject: the network and its data.
        part: the axis: the sparsity to reach, the cap kappa, the share of the data; "speed" is against kappa too,
            "dense" is the network itself, "level" as a line beside those sparsities, and "words" needs no network.
        model: the method.
        points: on the axis.
        path: all sparsities that fits go through, from the lowest on.
        samples: training samples that a fit sees.
        steps: of training afterwards.
        level: sparsity of "data", share of "speed".
    """

    subject: FoldedResNet | Newsgroups
    part: Part
    model: str
    points: tuple[float, ...] = ()
    path: tuple[float, ...] = ()
    samples: int = 256
    steps: int = 0
    level: float = 0.0

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.subject.data + ENDINGS.get(self.part, ""), self.model, None

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run.measured() for run in runs]

    def measured(self) -> Result:
        """Returns all numbers of this run."""
        subject, seed, points = self.subject, self.seed, self.points
        if self.part in ("dense", "level"):
            found = dense_scores(subject, seed)
            values = [Value(metric, value) for metric, value in found.items()]
            level = [Value(metric, value, at) for at in points for metric, value in found.items()]
            return Result((*values, *level))
        if self.part == "words" and isinstance(subject, Newsgroups):
            accuracy = subject.linear_accuracy()
            return Result((Value("accuracy", accuracy), *(Value("accuracy", accuracy, at) for at in points)))
        if self.part == "sparsity":
            return frontier(subject, seed, self.model, points, self.path, self.samples, self.steps)
        if self.part == "kappa":
            return kappas(subject, seed, points, self.samples)
        if self.part == "data":
            return partial_data(subject, seed, points, self.level)
        if self.model == "partial-data":
            return partial_speed(subject, seed, points, self.samples, self.level)
        return warm_starts(subject, seed, points, self.samples, self.model == "warm-start")
