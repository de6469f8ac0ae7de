"""Runs that remove features of a trained network and fit a model on what is left (002 Figure 9)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from wellposed.convex import EliminationPath, States, eliminate_features, support_mask
from wellposed.convex.assemble import fitting_units
from wellposed.convex.eliminate import FeatureProblem
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Result, Value
from wellposed_lab.experiments.sparsify.rows import Layers
from wellposed_lab.networks.trained import TrainedNetwork

Order = Literal["misfit", "share", "random"]
NEEDED = 1e-3  # share of a row above which an entry counts as needed


@dataclass(frozen=True, kw_only=True)
class EliminateRun(Run):
    """Removes features by one method.

    Args:
        network: the network and its data; it says what is scored, and which features are removed together.
        model: as tables name it.
        method, order: of `eliminate_features`.
        points: shares of all features to remove, where the method can choose.
        support: of the rows; in "triangular" a layer may read all layers before it, and the input.
        samples: training samples whose states are fitted.
        kappa: cap.
        ridge: on the fits of what is left; without it 500 samples are too few for some 500 columns.
        epochs: of training by gradients on what is left; zero: the fit alone.
    """

    network: TrainedNetwork
    model: str
    method: Literal["certified", "ranked", "dual-literal"] = "ranked"
    order: Order = "misfit"
    points: tuple[float, ...] = ()
    support: str = "triangular"
    samples: int = 500
    kappa: float = 0.3
    ridge: float = 0.01
    epochs: int = 0
    record_fields: ClassVar[Mapping[str, str]] = {"network": "dense"}

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.network.data, self.model, None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run._result() for run in runs]

    def _result(self) -> Result:
        states = self.network.states(self.seed, self.samples)
        path = self._path(states)
        before = self.network.score(self.network.trained(self.seed), self.seed)
        values = [
            Value("features", float(len(path.features))),
            Value("certified", float(path.certified.sum())),
        ]
        scores = self._scores(path)
        first: dict[str, float] = {}
        for at, score, details in scores:
            change = self.network.change(score, before, scores[0][1])
            values += [Value(self.network.metric, score, at), Value(self.network.change_metric, change, at)]
            first = first or details
            for name, value in details.items():
                values += [Value(name, value, at), Value(f"{name}_increase", value - first[name], at)]
        if self.method != "ranked":
            values.append(Value("needed_removed", float(self._needed(states, path))))
        return Result(tuple(values))

    def _scores(self, path: EliminationPath) -> list[tuple[float, float, dict[str, float]]]:
        """Returns the removed share (as asked for, where the method can choose), the score and details by step."""
        asked = (0.0, *self.points) if self.method == "ranked" else [round(s.fraction, 3) for s in path.steps]
        scores = []
        for at, step in zip(asked, path.steps, strict=True):
            if step.model is None or step.report is None:
                continue
            model: nn.Module = step.model
            score = step.score
            if self.epochs:
                model = Layers(step.model, step.report.blocks, step.report.exponents)
                self.network.train(model, self.seed, self.epochs)
                score = self.network.score(model, self.seed)
            scores.append((at, score, self.network.details(model, self.seed)))
        return scores

    def _path(self, states: States) -> EliminationPath:
        options: dict[str, Any] = {"order": self.order}
        if self.method == "ranked":
            options["keep"] = [1 - point for point in self.points]
        return eliminate_features(
            states,
            kappa=self.kappa,
            method=self.method,
            support=self.support,
            ridge=self.ridge,
            groups=self.network.groups(states),
            evaluate=lambda model: self.network.score(model, self.seed),
            **options,
        )

    def _needed(self, states: States, path: EliminationPath) -> int:
        """Counts removed features that some row of the exact solution of P(kappa) uses."""
        mask = support_mask(states, self.support)
        factors = fitting_units(states, self.kappa, mask).factors
        work = FeatureProblem.of(states, self.kappa, 0.0, "row", mask, factors)
        needed = work.screened(work.features).share > NEEDED
        return int(torch.count_nonzero(needed & work.features & ~path.steps[-1].kept))
