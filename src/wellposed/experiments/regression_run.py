"""Runs that fit a bump with one half of a pair of 004 and test it under signal noise (section D.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn

from wellposed.equilibrium import Unrolled, watch
from wellposed.experiments.config import Training
from wellposed.experiments.noise_models import Equilibrium, Pair, under_noise
from wellposed.experiments.record import Result, Value
from wellposed.experiments.run import Context, Run
from wellposed.tasks.bump import BumpRegression
from wellposed.training import fit


@dataclass(frozen=True, kw_only=True)
class RegressionRun(Run):
    """Fits a function without noise and measures its error under signal noise.

    ``test_mse`` without a point is without noise, at a point it is under noise of so many decibels; ``steps`` are
    those of the averaged stopping rule. A DEQ is differentiated through all steps of its solves: here they often
    end at the 60 steps that 004 allows, and an implicit gradient at such a point leads astray.

    Args:
        task: the function and its samples.
        pair: the model; its name here ends with the activation of the input projection.
        training: epochs, batch size and so on.
        points: decibels of the noise in the test.
    """

    task: BumpRegression
    pair: Pair
    training: Training
    points: tuple[float, ...] = (20.0, 10.0, 5.0, 0.0)
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    resumable: ClassVar[bool] = True

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.task.name, f"{self.pair.name}-{self.pair.projection}", None

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run.result(context) for run in runs]

    def result(self, context: Context) -> Result:
        """Trains and measures."""
        model = self.pair.build(1, 1, self.seed).to(context.device)
        if isinstance(
            model, Equilibrium
        ):  # a solve that is cut off has no implicit gradient, and 60 steps are few
            model.deq.gradient = Unrolled()
        quiet = under_noise(model, None, self.seed, training=True)
        history = fit(quiet, self.task.train(self.seed), self.task.loss, **self.training.arguments(),
                      seed=self.seed, device=context.device, checkpoint=context.checkpoint([self]),
                      progress=context.progress and ": ".join(self.labels[:2]))  # fmt: skip
        values = [Value("parameters", float(sum(p.numel() for p in model.parameters())))]
        for at in (None, *self.points):
            values += self._tested(model.eval(), at)
        losses = [float(f"{loss:.5g}") for loss in history.train_loss.tolist()]
        return Result(tuple(values), {"train_loss": losses})

    @torch.no_grad()
    def _tested(self, model: nn.Module, at: float | None) -> list[Value]:
        u, y = self.task.test(self.seed, None)
        noisy = under_noise(model, at, self.seed, training=False)
        with watch() as log:
            prediction = noisy(u.to(next(model.parameters()).device)).cpu()
        values = [Value(name, score, at) for name, score in self.task.score(prediction, y).items()]
        return values + ([Value("steps", log.mean_steps, at)] if log.forward else [])
