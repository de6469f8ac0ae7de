"""Runs that attack a trained network, along the share of changed pixels or along the radius."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from wellposed.experiments.dense import Dense
from wellposed.experiments.record import Result, Value
from wellposed.experiments.run import Context, Run
from wellposed.robust import sensitivity
from wellposed.robust.attacks import Attack, fgsm, jsma, lp_attack, pgd, ranked_attack
from wellposed.robust.attacks.attack import Loss, under_attack
from wellposed.robust.pictures import row_correlation

Axis = Literal["clean", "share", "radius"]
RANKED = {  # ranking and values of the attacks that change single pixels at once
    "sensitivity-attack": ("sensitivity", "uniform"),
    "gradient-attack": ("gradient", "uniform"),
    "random-attack": ("random", "uniform"),
    "sensitivity-signed": ("sensitivity", "gradient"),
    "gradient-signed": ("gradient", "gradient"),
    "random-signed": ("random", "gradient"),
    "sensitivity-white": ("sensitivity", "white"),
    "gradient-white": ("gradient", "white"),
    "random-white": ("random", "white"),
}
GOALS = 2  # classes that the linear program tries for
PART = 500


@dataclass(frozen=True, kw_only=True)
class AttackRun(Run):
    """Attacks one network in one way.

    Of the images that were right before, ``success_rate`` is the share that are wrong afterwards;
    ``lost_accuracy`` counts the same images against all.

    Args:
        dense: the network and its images.
        axis: "clean" only measures; "share" changes a share of the pixels by up to the whole range, cut to
            [0, 1]; "radius" changes all pixels by up to a radius.
        attack: which one.
        points: on the axis.
        samples: test images, the first ones.
    """

    dense: Dense
    axis: Axis
    attack: str
    points: tuple[float, ...] = ()
    samples: int = 10_000

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.dense.data + ("-radius" if self.axis == "radius" else ""), self.attack, None

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [Result(tuple(run.measured())) for run in runs]

    def measured(self) -> list[Value]:
        """Returns all numbers of this run."""
        network = self.dense.trained(self.seed).eval()
        if self.axis == "clean":
            S = _sensitivity(self.dense, self.seed)
            clean = self.dense.accuracy(network)
            return [Value("accuracy", clean), Value("row_correlation", row_correlation(S)), *_sizes(S)]
        u, target = (part[: self.samples] for part in self.dense.pair("test"))
        values = []
        for at in self.points:
            right, changed, pixels = self._tried(network, u, target, at)
            values += [
                Value("success_rate", changed / max(right, 1), at),
                Value("lost_accuracy", changed / len(u), at),
                Value("changed_pixels", pixels / len(u), at),
            ]
        return values

    def _tried(self, network: nn.Module, u: Tensor, target: Tensor, at: float) -> tuple[int, int, float]:
        """Counts images that are right, those of them that the attack changes, and changed pixels."""
        right = changed = 0
        pixels = 0.0
        for part, classes in zip(u.split(PART), target.split(PART), strict=True):
            with torch.no_grad():
                clean = network(part).argmax(1) == classes
            found = self._attacked(network, part, classes, at)
            right += int(clean.sum())
            changed += int((clean & found.success).sum())
            pixels += float((found.inputs != part).sum())
        return right, changed, pixels

    def _attacked(self, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
        few = max(1, round(at * u[0].numel()))
        epsilon, count = (at, None) if self.axis == "radius" else (1.0, few)
        if self.attack in RANKED:
            ranking, values = RANKED[self.attack]
            S = _sensitivity(self.dense, self.seed)
            if values == "white":
                return white_attack(network, u, target, few, ranking, S, self.seed)
            how: dict[str, Any] = {"ranking": ranking, "values": values, "seed": self.seed, "S": S}
            return ranked_attack(network, u, target, epsilon, count, **how)
        if self.attack == "jsma":
            return jsma(network, u, target, few, epsilon)
        if self.attack == "lp":
            return lp_attack(network, u, target, epsilon, count, goals=GOALS)
        along: dict[str, Callable[..., Attack]] = {"fgsm": fgsm, "pgd": pgd}
        return along[self.attack](network, u, target, epsilon, count=count)


def white_attack(
    network: nn.Module, u: Tensor, target: Tensor, count: int, ranking: str, S: Tensor, seed: int
) -> Attack:
    """Sets the pixels that rank highest to one: no draws, and all changes have the same sign."""
    with under_attack(network, u, target) as victim:
        if ranking == "sensitivity":
            scores = S[target]
        elif ranking == "gradient":
            scores = victim.gradient(u, Loss("margin"))[1].abs()
        else:
            scores = torch.rand(u.shape, generator=torch.Generator().manual_seed(seed))
        chosen = torch.zeros_like(u, dtype=torch.bool).scatter_(1, scores.topk(count, dim=1).indices, True)
        victim.try_(torch.where(chosen, 1.0, u))
    return victim.attack(f"{ranking} ranked, white")


@lru_cache(maxsize=8)
def _sensitivity(dense: Dense, seed: int) -> Tensor:
    return sensitivity(dense.trained(seed), (dense.shape[0],))


def _sizes(S: Tensor) -> list[Value]:
    return [Value("sensitivity_outputs", float(len(S))), Value("sensitivity_inputs", float(S.shape[1]))]
