"""Runs that make a trained network sparse, or fit models to its states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from wellposed.experiments.record import Result, Value
from wellposed.experiments.run import Context, Run
from wellposed.experiments.sparsify_measures import (
    frontier,
    iterations,
    kappas,
    partial_data,
    partial_speed,
    warm_starts,
)
from wellposed.experiments.trained_network import Dense

Part = Literal["dense", "kappa", "sparsity", "data", "iterations", "speed"]
ENDINGS: dict[str, str] = {"sparsity": "-sparsity", "data": "-data", "iterations": "-iterations"}


@dataclass(frozen=True, kw_only=True)
class SparsifyRun(Run):
    """Measures one method along one axis.

    Args:
        dense: the network and its images.
        part: the axis: the cap kappa, the sparsity to reach, the share of the data, the halvings of Algorithm 1;
            "speed" is against kappa too, and "dense", the network itself, is a level line.
        model: the method.
        points: on the axis.
        samples: training images whose states are fitted.
        epochs: of training after pruning, and with a penalty.
        level: kappa of "iterations", sparsity of "data" (zero: none is asked for), share of "speed".
    """

    dense: Dense
    part: Part
    model: str
    points: tuple[float, ...] = ()
    samples: int = 500
    epochs: int = 0
    level: float = 0.0

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.dense.data + ENDINGS.get(self.part, ""), self.model, None

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [Result(tuple(run.measured())) for run in runs]

    def measured(self) -> list[Value]:
        """Returns all numbers of this run."""
        dense, seed, points = self.dense, self.seed, self.points
        if self.part == "dense":
            found = dense.score(dense.trained(seed))
            return [Value("sparsity", 0.0), *(Value("accuracy", found, at) for at in (None, *points))]
        if self.part == "kappa":
            return kappas(dense, seed, self.model, points, self.samples)
        if self.part == "sparsity":
            return frontier(dense, seed, self.model, points, self.samples, self.epochs)
        if self.part == "data":
            return partial_data(dense, seed, self.model, points, self.level or None)
        if self.part == "iterations":
            return iterations(dense, seed, self.level, points, self.samples)
        if self.model == "partial-data":
            return partial_speed(dense, seed, points, self.level)
        return warm_starts(dense, seed, points, self.samples, self.model == "warm-start")
