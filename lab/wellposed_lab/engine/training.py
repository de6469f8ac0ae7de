"""Runs that train a model on a task and test it along the task's axis.

`TrainingRun` tests after training, `ObservedRun` after every epoch of it.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from wellposed.conditions.conditions import certificate
from wellposed.equilibrium.method import watch
from wellposed.errors import InputError
from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel
from wellposed.training import History, fit
from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.run import Context, Role, Run
from wellposed_lab.engine.store import Result, Series, Value
from wellposed_lab.networks.by_name import SeriesRNN, build, entry
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.tasks.task import Pair, Point, Task


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Run):
    """Trains one model on one task.

    Subclasses change a step by overriding its method: `data`, `held_out`, `make_model`, `fit_model`, `measure`.

    Args:
        task: what to learn; its own configuration.
        model: by name, with options.
        training: epochs, batch size, optimiser.
        fold: in a search, the fold of the training samples that is held out.
        folds: how many there are.
    """

    task: Task
    model: Choice
    training: Training
    fold: int | None = None
    folds: int = 5
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    resumable: ClassVar[bool] = True

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.task.name, self.model.name, self.model.size

    @property
    def batch_seeds(self) -> bool:
        return entry(self.model.name).batch_seeds

    @property
    def trained(self) -> bool:
        """Whether the model is trained; else it has a closed form, and no setting of training matters."""
        return not entry(self.model.name).closed_form

    def device_for(self, wanted: str) -> str:
        return super().device_for(wanted) if self.trained else "cpu"

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        seeds = [run.seed for run in runs]
        data = [self.data(seed) for seed in seeds]
        with _random_numbers(seeds[0]):
            if not self.trained:
                return [self._closed_form(data[0], seeds[0])]
            model: nn.Module = Ensemble.of(lambda: self.make_model(data[0][0]), seeds)
            if len(seeds) == 1 or not self.batch_seeds:
                model = model.member(0)  # type: ignore[operator]
            history = self.fit_model(model, data, runs, context)
        models = [model.member(k) for k in range(len(seeds))] if isinstance(model, Ensemble) else [model]
        return [
            self.measure(one.eval(), pair, seed, history, k if isinstance(model, Ensemble) else None)
            for k, (one, pair, seed) in enumerate(zip(models, data, seeds, strict=True))
        ]

    def make_model(self, train: Pair) -> nn.Module:
        """Builds the model, untrained, for training samples of these shapes."""
        return build(self.task.name, (train[0].shape[-1], train[1].shape[-1]), self.model)

    def data(self, seed: int) -> tuple[Pair, Pair]:
        """Returns training and validation samples; in a search both come from the training samples."""
        train = self.task.train(seed)
        if self.fold is None:
            return train, self.task.validation(seed)
        if not 0 <= self.fold < self.folds:
            raise InputError(f"fold must lie in 0..{self.folds - 1}; received {self.fold}")
        held = self.held_out(len(train[0]), self.fold)
        return (train[0][~held], train[1][~held]), (train[0][held], train[1][held])

    def held_out(self, samples: int, fold: int) -> Tensor:  # (samples,)
        """Marks the training samples that a fold of a search holds out."""
        return torch.arange(samples) % self.folds == fold

    def fit_model(
        self, model: nn.Module, data: list[tuple[Pair, Pair]], runs: Sequence[Self], context: Context
    ) -> History:
        """Trains a model in place; an `Ensemble` on the data of all runs, one a member."""
        several = isinstance(model, Ensemble)
        pairs = [joined([pair[k] for pair in data], several) for k in (0, 1)]
        train, validation = ((u.to(context.device), y.to(context.device)) for u, y in pairs)
        return fit(
            model,
            train,
            self.task.loss,
            **self.training.arguments(),
            validation=validation,
            device=context.device,
            seed=None if several else runs[0].seed,
            per_member=several,
            progress=context.progress and f"{self.task.name}: {self.model.name}",
            checkpoint=context.checkpoint(runs),
        )

    def _closed_form(self, pair: tuple[Pair, Pair], seed: int) -> Result:
        model = self.make_model(pair[0])
        model.fit(*pair[0])  # type: ignore[operator]
        return self.measure(model.double(), pair, seed, None, None)

    def measure(
        self, model: nn.Module, pair: tuple[Pair, Pair], seed: int, history: History | None, member: int | None
    ) -> Result:
        """Measures a trained model.

        Args:
            model: in evaluation mode.
            pair: training and validation samples.
            seed: of its run.
            history: of its training; None for a closed form.
            member: which one of the ensemble in the history it is; None if it was trained alone.
        """
        values = [Value("parameters", float(parameter_count(model)))]
        values += self._scores(model, "train", pair[0]) + self._scores(model, "validation", pair[1])
        for at in self.task.points if self.fold is None else ():
            values += self._tested(model, seed, at)
        series = {} if history is None else _series(history, member)
        return Result((*values, *_changes(values)), series | self._picture(model, seed), _facts(model))

    def _tested(self, model: nn.Module, seed: int, at: Point) -> list[Value]:
        """Scores a model at a point of the axis; of an implicit model the mean steps and failures too."""
        u, y = self.task.test(seed, at)
        with watch() as log:
            prediction = predict(model, u)
        scores = self.task.score(prediction, y) | self.task.details(prediction, y, seed, at)
        if log.forward:
            scores |= {"steps": log.mean_steps, "failed_share": log.failed_share}
        return [Value(name, score, at) for name, score in scores.items()]

    def _scores(self, model: nn.Module, split: str, pair: Pair) -> list[Value]:
        """Scores a model on training or validation samples."""
        scores = self.task.score(predict(model, pair[0]), pair[1])
        return [Value(f"{split}_{name.removeprefix('test_')}", score) for name, score in scores.items()]

    def _picture(self, model: nn.Module, seed: int) -> Series:
        """Returns consecutive predictions for a picture, which shows one series: that of the first seed."""
        shown = self.task.excerpt(seed)
        if shown is None or seed != 0 or self.fold is not None:
            return {}
        u = self.task.test(seed, self.task.points[0])[0][shown]
        return {"prediction": [float(f"{value:.4g}") for value in predict(model, u)[:, -1].tolist()]}


def training_runs(
    suite: str,
    scale: Scale,
    tasks: Sequence[Task],
    models: Sequence[tuple[Role, Choice]],
    training: Callable[[Scale, Task, Choice], Training],
    kind: type[TrainingRun] = TrainingRun,
) -> list[TrainingRun]:
    """Returns every model on every task at seed 0, the body of a suite's plan."""
    return [
        kind(
            suite=suite,
            seed=0,
            scale=scale,
            role=role,
            task=task,
            model=model,
            training=training(scale, task, model),
        )
        for task in tasks
        for role, model in models
    ]


def joined(pairs: list[Pair], several: bool) -> Pair:
    """Stacks the samples of all members of an ensemble; those of a single model stay as they are."""
    if not several:
        return pairs[0]
    return torch.stack([u for u, _ in pairs]), torch.stack([y for _, y in pairs])


@torch.no_grad()
def predict(model: nn.Module, u: Tensor) -> Tensor:
    """Computes outputs on the device of a model and in its dtype, and returns them on the CPU."""
    like = next(model.parameters(), u)
    return torch.cat([model(batch.to(like)).to("cpu") for batch in u.split(1000)])


def _facts(model: nn.Module) -> dict[str, Any]:
    inner = model.rnn.cell(0) if isinstance(model, SeriesRNN) else model
    if not isinstance(inner, ImplicitModel):
        return {}
    return {"certificate": str(certificate(copy.deepcopy(inner).to("cpu")))}


def _changes(values: Sequence[Value]) -> list[Value]:
    """Compares every point of the axis with the one in distribution, where there is one."""
    inside = {value.metric: value.value for value in values if value.at is None}
    changes = []
    for value in values:
        if value.at is not None and value.metric == "accuracy" and "accuracy" in inside:
            changes.append(Value("accuracy_drop", inside["accuracy"] - value.value, value.at))
        if value.at is not None and value.metric == "test_mse" and inside.get("test_mse", 0.0) > 0:
            changes.append(Value("test_mse_growth", value.value / inside["test_mse"], value.at))
    return changes


def _series(history: History, member: int | None) -> dict[str, list[float]]:
    def column(values: Tensor) -> list[float]:
        own = values if member is None else values[:, member]
        return [float(f"{value:.6g}") for value in own.tolist()]  # six digits are enough for curves

    names = ("train_loss", "validation_loss", "steps", "failed_share")
    series = {name: column(getattr(history, name)) for name in names}
    return {name: values for name, values in series.items() if any(value == value for value in values)}


@contextlib.contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """Gives a run random numbers of its own, whatever ran before it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


COLUMNS = ("train_loss", "validation_loss", "steps", "failed_share", "seconds")
Scores = list[dict[str, float]]  # one a member


@dataclass
class ObservedHistory(History):
    """The numbers of every epoch, and the test scores after each."""

    seen: list[Scores] = field(default_factory=list)  # (E,) of (M,)

    def curves(self, member: int | None) -> dict[str, list[float]]:
        """Returns the test scores of one member, epoch by epoch."""
        rows = [scores[member or 0] for scores in self.seen]
        names = rows[0] if rows else ()
        return {name: [float(f"{row[name]:.6g}") for row in rows] for name in names}


@dataclass(frozen=True, kw_only=True)
class ObservedRun(TrainingRun):
    """Trains one model on one task and tests it after every epoch (000 Figure 6, 001 Figures 8 and 11).

    The tests are only plotted: nothing is chosen by them. A stopped run starts again from the beginning.

    Args:
        observed: point of the task's axis at which the model is tested after every epoch.
    """

    observed: Point = None
    resumable: ClassVar[bool] = False

    def fit_model(
        self, model: nn.Module, data: list[tuple[Pair, Pair]], runs: Sequence[Self], context: Context
    ) -> ObservedHistory:
        if self.training.patience is not None:
            raise InputError(f"a run that is observed has no patience; received {self.training.patience}")
        model.to(context.device)
        tests = [self.task.test(run.seed, self.observed) for run in runs if self.fold is None]
        optimizer, history = self.training.make_optimizer(model.parameters()), ObservedHistory()
        schedule = self._schedule(optimizer)
        for epoch in range(self.training.epochs):
            record = self._epoch(model, data, runs, context, optimizer, schedule, epoch)
            history.append(**{name: getattr(record, name)[0] for name in COLUMNS})
            if tests:
                history.seen.append(self.observe(model, tests, context.device))
        return history

    def _schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        cosine = self.training.schedule == "cosine"
        return CosineAnnealingLR(optimizer, self.training.epochs) if cosine else None

    def _epoch(
        self,
        model: nn.Module,
        data: list[tuple[Pair, Pair]],
        runs: Sequence[Self],
        context: Context,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler | None,
        epoch: int,
    ) -> History:
        several = isinstance(model, Ensemble)
        train, validation = (joined([pair[k] for pair in data], several) for k in (0, 1))
        return fit(
            model,
            train,
            self.task.loss,
            epochs=1,
            optimizer=optimizer,
            schedule=None if schedule is None else lambda _: schedule,
            batch_size=self.training.batch_size,
            validation=validation,
            clip=self.training.clip,
            device=context.device,
            seed=[1_000_003 * run.seed + epoch for run in runs],  # an order of its own for every epoch
            per_member=several,
            progress=False,
        )

    @torch.no_grad()
    def observe(self, model: nn.Module, tests: list[Pair], device: str) -> Scores:
        """Tests a model after an epoch; returns the scores of every member."""
        several = isinstance(model, Ensemble)
        u, y = joined(tests, several)
        model.eval()
        predictions = model(u.to(device)).cpu()
        if not several:
            return [self.task.score(predictions, y)]
        return [self.task.score(own, target) for own, target in zip(predictions, y, strict=True)]

    def measure(
        self, model: nn.Module, pair: tuple[Pair, Pair], seed: int, history: History | None, member: int | None
    ) -> Result:
        result = super().measure(model, pair, seed, history, member)
        if isinstance(history, ObservedHistory):
            result.series.update(history.curves(member))
        return result
