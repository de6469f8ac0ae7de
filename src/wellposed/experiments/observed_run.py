"""Runs that look at the model after every epoch of its training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from wellposed.errors import InputError
from wellposed.experiments.record import Result
from wellposed.experiments.run import Context
from wellposed.experiments.training_run import TrainingRun, joined
from wellposed.models.ensemble import Ensemble
from wellposed.tasks.task import Pair, Point
from wellposed.training import History, fit

COLUMNS = ("train_loss", "validation_loss", "steps", "failed_share", "seconds")
Scores = list[dict[str, float]]  # one a member


@dataclass
class ObservedHistory(History):
    """The numbers of every epoch, and what was seen in the tests after each."""

    seen: list[Scores] = field(default_factory=list)  # (E,) of (M,)

    def curves(self, member: int | None) -> dict[str, list[float]]:
        """Returns the test scores of one member, epoch by epoch."""
        rows = [scores[member or 0] for scores in self.seen]
        names = rows[0] if rows else ()
        return {name: [float(f"{row[name]:.6g}") for row in rows] for name in names}


@dataclass(frozen=True, kw_only=True)
class ObservedRun(TrainingRun):
    """Trains one model on one task and tests it after every epoch (000 Figure 6, 001 Figures 8 and 11).

    The tests are for the eye: nothing is chosen by them. A stopped run starts again from the beginning.

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
            part = self._epoch(model, data, runs, context, optimizer, schedule, epoch)
            history.append(**{name: getattr(part, name)[0] for name in COLUMNS})
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
        train, validation = (joined([pair[part] for pair in data], several) for part in (0, 1))
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
