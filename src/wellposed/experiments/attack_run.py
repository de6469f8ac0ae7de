"""Runs that attack a trained network, along the share of changed inputs, the radius or the level of noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from wellposed.experiments.attack_kinds import Attempt, Axis, Split, sensitivity_matrix
from wellposed.experiments.cache import cached
from wellposed.experiments.record import Result, Value
from wellposed.experiments.run import Context, Run
from wellposed.experiments.thumbnails import attack_thumbnails
from wellposed.experiments.trained_network import Dense, ImageNetwork
from wellposed.robust.attacks import Attack
from wellposed.robust.pictures import row_correlation

PART = 100  # images at a time


@dataclass(frozen=True, kw_only=True)
class AttackRun(Run):
    """Attacks one network in one way.

    Of the images that were right before, ``success_rate`` is the share that are wrong afterwards;
    ``lost_accuracy`` counts the same images against all.

    Args:
        victim: the network and its images.
        axis: "clean" only measures; the others are those of `Attempt`.
        attack: which one.
        points: on the axis.
        samples: images; fewer than there are are drawn by the seed.
        split: "test", or "holdout", which has not been trained on either.
        gallery: the point at which a few attacked images are kept for the report, with seed 0 only.
        epochs: of a surrogate.
    """

    victim: ImageNetwork
    axis: Axis
    attack: str
    points: tuple[float, ...] = ()
    samples: int = 10_000
    split: Split = "test"
    gallery: float | None = None
    epochs: int = 10

    @property
    def labels(self) -> tuple[str, str, str | None]:
        split = "" if self.split == "test" else f"-{self.split}"
        axis = f"-{self.axis}" if self.axis in ("radius", "speckle") else ""
        return f"{self.victim.data}{split}{axis}", self.attack, None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as data; records have an MLP under attack inside an `AttackedDense`."""
        config = super().config
        if isinstance(self.victim, Dense):
            config["victim"] = {"type": "AttackedDense", "dense": config["victim"]}
        return config

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run.measured() for run in runs]

    def measured(self) -> Result:
        """Returns all numbers of this run, and pictures where they are wanted."""
        if self.axis == "clean":
            clean = _clean_accuracy(self.victim, self.victim.own(self.seed), self.split, self.samples)
            return Result((Value("accuracy", clean), *self._about_sensitivity()))
        network = self.victim.trained(self.seed)
        u, target = self.victim.sample(self.split, self.samples, self.seed)
        right = _right(network, u, target)
        values: list[Value] = []
        facts: dict[str, Any] = {}
        for at in self.points:
            found = self.attacked(u, target, at)
            values += self._counted(found, u, right, at)
            if at == self.gallery and self.seed == 0:
                facts["gallery"] = attack_thumbnails(network, u, found, target, self.victim.classes, at)
            if found.notes:
                facts["notes"] = sorted({*facts.get("notes", ()), *found.notes})
        return Result(tuple(values), facts=facts)

    def attacked(self, u: Tensor, target: Tensor, at: float) -> Attack:
        """Attacks all images, some at a time, each time with other random values."""
        parts = []
        for number, (some, classes) in enumerate(zip(u.split(PART), target.split(PART), strict=True)):
            draw = 1000 * self.seed + number
            attempt = Attempt(self.victim, self.axis, self.attack, self.split, self.seed, draw, self.epochs)
            parts.append(attempt(some, classes, at))
        return _joined(parts)

    def _counted(self, found: Attack, u: Tensor, right: Tensor, at: float) -> list[Value]:
        changed = int((right & found.success).sum())
        return [
            Value("success_rate", changed / max(int(right.sum()), 1), at),
            Value("lost_accuracy", changed / len(u), at),
            Value("changed_pixels", float((found.inputs != u).sum()) / len(u), at),
        ]

    def _about_sensitivity(self) -> list[Value]:
        S = sensitivity_matrix(self.victim, self.seed)
        sizes = Value("sensitivity_outputs", float(len(S))), Value("sensitivity_inputs", float(S.shape[1]))
        return [Value("row_correlation", row_correlation(S)), *sizes]


def _joined(parts: Sequence[Attack]) -> Attack:
    names = ("inputs", "success", "outputs", "queries")
    inputs, success, outputs, queries = (torch.cat([getattr(part, name) for part in parts]) for name in names)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Attack(inputs, success, outputs, queries, parts[0].name, notes)


@cached
def _clean_accuracy(victim: ImageNetwork, seed: int, split: Split, samples: int) -> float:
    u, target = victim.sample(split, samples, seed)
    return float(_right(victim.trained(seed), u, target).double().mean())


@torch.no_grad()
def _right(network: nn.Module, u: Tensor, target: Tensor) -> Tensor:  # (B,)
    return torch.cat([network(part).argmax(1) for part in u.split(PART)]) == target
