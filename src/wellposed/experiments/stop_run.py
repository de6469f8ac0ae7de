"""Runs that count how many steps two stopping rules take in a trained classifier under noise (004 Figure 5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from wellposed.equilibrium import MeanRelative, Relative, watch
from wellposed.experiments.config import identity
from wellposed.experiments.noise_ensemble import Member, make_stack
from wellposed.experiments.noise_models import WINDOW, Equilibrium, Pair
from wellposed.experiments.noise_run import pair_of
from wellposed.experiments.noise_training import NoiseSchedule, train
from wellposed.experiments.record import Result, Value
from wellposed.experiments.run import Context, Run
from wellposed.models import Noise, Noisy


@dataclass(frozen=True, kw_only=True)
class StopRun(Run):
    """Trains a DEQ of width 128 without noise and solves for test images under noise until a rule stops.

    At every strength of noise, ``steps`` is their mean number, ``fired`` the share of images on which the rule
    stopped at all, and ``accuracy`` what its answers are worth.

    Args:
        data: name of the images.
        rule: "relative" or "mean-relative", at the tolerance.
        images, epochs, batch_size: of the training.
        points: decibels.
        samples: test images.
    """

    data: str
    rule: str
    tolerance: float = 0.01
    images: int = 12_000
    epochs: int = 5
    batch_size: int = 100
    points: tuple[float, ...] = (40.0, 30.0, 20.0, 10.0, 0.0)
    samples: int = 1_000

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.data, f"deq-128-{self.rule}", None

    @property
    def together(self) -> bool:
        return True

    @property
    def family(self) -> str:
        """The same for runs that look at the same trained model."""
        return identity((self.suite, self.scale, self.seed, self.data, self.images, self.epochs, self.batch_size))

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        u, labels = pair_of(self.data, "train")
        stack = make_stack([Member(Pair("deq", 1), None, self.seed)], u.shape[1], int(labels.max()) + 1, "cpu")
        train(stack, u, labels, NoiseSchedule(self.images, self.epochs, self.batch_size, 1e-3))
        model = stack.member(0)
        assert isinstance(model, Equilibrium)
        return [Result(tuple(value for at in run.points for value in run.measured(model, at))) for run in runs]

    @torch.no_grad()
    def measured(self, model: Equilibrium, decibels: float) -> list[Value]:
        """Returns the numbers of one strength of noise."""
        relative = Relative(self.tolerance, norm="2")
        model.deq.stop = relative if self.rule == "relative" else MeanRelative(self.tolerance, WINDOW)
        noise = Noise(signal=decibels, generator=torch.Generator().manual_seed(self.seed))
        u, labels = (part[: self.samples] for part in pair_of(self.data, "test"))
        with watch() as log:
            right = (Noisy(model, noise)(u).argmax(1) == labels).double().mean()
        numbers = {"steps": log.mean_steps, "fired": 1 - log.failed_share, "accuracy": float(right)}
        return [Value(name, value, decibels) for name, value in numbers.items()]
