"""Runs that train a network on nodes and test it by size, by difficulty and by the number of its steps."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from wellposed.equilibrium.method import watch
from wellposed.models.deq import DEQ
from wellposed.models.path_independence import path_independence
from wellposed.training import History, fit
from wellposed_lab.config import Choice, Training
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Result, Series, Value
from wellposed_lab.experiments.beyond.models import Flat, NodeModel, build
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.simple import LinearRegression
from wellposed_lab.tasks.task import Pair, Point, Task

BATCH = 64  # samples that are tested at once
STARTED = 8  # samples that are solved from several starts


@dataclass(frozen=True, kw_only=True)
class BeyondRun(Run):
    """Trains one model on one task of nodes, in float32, and tests it in float64.

    ``test_accuracy`` and ``test_error`` are those of the model as it was trained: at its equilibrium, after its
    number of steps, or of its layers. Where there is a cell, ``rest_accuracy`` is that of running it to
    convergence, however it was trained, and ``path_independent`` the share of samples for which all starts lead to
    one equilibrium, both at every point of the task; ``steps_accuracy`` is that after a number of Picard steps
    from zero, at the point `probe`.

    Args:
        task: what to learn; its samples are ``(n, n + 1)``.
        model: by name, with options.
        training: epochs, batch size, optimiser.
        probe: where on the task's axis the steps are counted.
        steps: the numbers of steps.
    """

    task: Task
    model: Choice
    training: Training
    probe: float
    steps: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    resumable: ClassVar[bool] = True

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.task.name, self.model.name, self.model.size

    def device_for(self, wanted: str) -> str:
        return "cpu" if self.model.name == "linear" else super().device_for(wanted)  # linear has a closed form

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run._alone(context) for run in runs]

    def _alone(self, context: Context) -> Result:
        train, validation = self.task.train(self.seed), self.task.validation(self.seed)
        with torch.random.fork_rng(()):
            torch.manual_seed(self.seed)
            model = build(self.task.name, train[0].shape[1], self.model)
        history = self._fit(model, train, validation, context)
        model = model.to("cpu").double().eval()
        values = [Value("parameters", float(parameter_count(model)))]
        values += self._scores(model, train, "train") + self._scores(model, validation, "validation")
        for at in self.task.points:
            values += [dataclasses.replace(value, at=at) for value in self._at(model, at)]
        values += self._by_steps(model)
        facts = {} if model.cell is None else {"certificate": model.cell.certificate()}
        return Result(tuple(values), {} if history is None else _series(history), facts)

    def _fit(self, model: NodeModel, train: Pair, validation: Pair, context: Context) -> History | None:
        if isinstance(model, Flat) and isinstance(model.network, LinearRegression):
            model.network.fit(train[0].flatten(1), train[1])
            return None
        return fit(
            model,
            train,
            self.task.loss,
            **self.training.arguments(),
            validation=validation,
            device=context.device,
            seed=self.seed,
            progress=context.progress and f"{self.task.name}: {self.model.name}",
            checkpoint=context.checkpoint((self,)),
        )

    @torch.no_grad()
    def _scores(self, model: NodeModel, pair: Pair, split: str) -> list[Value]:
        prediction = torch.cat([model(batch) for batch in pair[0].double().split(BATCH)])
        return self._named(prediction, pair[1], split)

    def _named(self, prediction: Tensor, target: Tensor, split: str) -> list[Value]:
        scores = self.task.score(prediction, target)
        return [Value(name.replace("test", split, 1), score) for name, score in scores.items()]

    def _at(self, model: NodeModel, at: Point) -> list[Value]:
        """Tests at one point of the axis; returns nothing for a model of another size."""
        pair, deq = self.task.test(self.seed, at), model.as_deq()
        if not model.fits(pair[0]):
            return []
        if deq is None:
            return self._scores(model, pair, "test")
        values = self._at_equilibrium(model, deq, pair)
        own = [dataclasses.replace(value, metric=f"test{value.metric[4:]}") for value in values[:2]]
        if model.depth is not None:
            own = self._scores(model, pair, "test")
        return own + values + self._independence(deq, pair[0])

    @torch.no_grad()
    def _at_equilibrium(self, model: NodeModel, deq: DEQ, pair: Pair) -> list[Value]:
        cell = model.cell
        if cell is None:
            return []
        with watch() as log:
            prediction = torch.cat([cell.readout(deq(batch)) for batch in pair[0].double().split(BATCH)])
        scores = self._named(prediction, pair[1], "rest")
        return [*scores, Value("steps", log.mean_steps), Value("failed_share", log.failed_share)]

    def _independence(self, deq: DEQ, u: Tensor) -> list[Value]:
        generator = self.task.generator(self.seed, "starts")
        result = path_independence(deq, u[:STARTED].double(), starts=1, generator=generator)
        alignment = float(result.alignment.nan_to_num(-1.0).mean())
        return [
            Value("path_independent", float(result.independent.double().mean())),
            Value("alignment", alignment),
        ]

    def _by_steps(self, model: NodeModel) -> list[Value]:
        u, y = self.task.test(self.seed, self.probe)
        answers = model.answers(u.double(), self.steps)
        scores = {steps: self.task.score(answer, y) for steps, answer in answers.items()}
        return [Value("steps_accuracy", score["test_accuracy"], float(steps)) for steps, score in scores.items()]


def _series(history: History) -> Series:
    """Returns the curves of the training, to six digits."""
    columns = {name: getattr(history, name).tolist() for name in ("train_loss", "validation_loss", "steps")}
    return {
        name: [float(f"{value:.6g}") for value in column]
        for name, column in columns.items()
        if any(value == value for value in column)
    }
