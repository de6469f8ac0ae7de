"""The attacks under which a defended model is examined, each by what a user of the model would see afterwards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium import Gradient
from wellposed.robust.attacks import adaptive_attack, autoattack, pgd, salt_and_pepper, speckle, survival
from wellposed.robust.training import SignSteps
from wellposed_lab.engine.store import Value
from wellposed_lab.experiments.adversarial.models import Classifier
from wellposed_lab.experiments.adversarial.training import FixedModel

RADIUS, LENGTH = 0.3, 0.1  # of 004 (section 4.2)
NOISES = {"salt_and_pepper": salt_and_pepper, "speckle": speckle}
CAREFUL = 8  # times as many answers choose the worst attack
FRESH = 1_000_000  # seeds of the answers after an attack lie apart from those during it


@dataclass(frozen=True)
class Budget:
    """How much an examination asks.

    Args:
        samples: test images.
        pgd_steps: of the plain attack within 0.3.
        epsilons: radii of the plain attack of ten steps.
        auto_epsilons: radii of AutoAttack; its version for random models runs at the last.
        auto_samples, auto_steps, queries: of AutoAttack, which has 100 steps and 5000 queries of Square Attack.
        levels: of salt and pepper, and of speckle.
        adaptive_steps: of the attacks through other gradients.
        draws: answers that these average over, of models with random ones.
        answers: new answers by which a model is judged after an attack.
        part: images at once.
    """

    samples: int = 100
    pgd_steps: tuple[int, ...] = (1, 5, 10, 20, 40)
    epsilons: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
    auto_epsilons: tuple[float, ...] = (0.3,)
    auto_samples: int = 40
    auto_steps: int = 10
    queries: int = 300
    levels: tuple[float, ...] = (0.1, 0.3, 0.5)
    adaptive_steps: int = 10
    draws: int = 4
    answers: int = 4
    part: int = 250


class Evaluation:
    """Attacks one model on test images.

    Args:
        model: trained.
        u, target: the images, in [0, 1].
        seed: of everything that is drawn.
    """

    def __init__(self, model: Classifier, u: Tensor, target: Tensor, budget: Budget, seed: int) -> None:
        self.model, self.u, self.target, self.budget, self.seed = model, u, target, budget, seed
        self.fixed = FixedModel(model)
        self.draws = 1 if model.defended.steady else budget.draws
        self.found: dict[str, Tensor] = {}  # attacked inputs within 0.3, by attack
        self.notes: list[str] = []

    def values(self) -> list[Value]:
        """Returns everything that is measured."""
        clean = self.share_correct(self.u)
        return [
            Value("accuracy", clean),
            *self.plain(clean),
            *self.noisy(clean),
            *self.auto(),
            *self.adaptive(),
        ]

    def share_correct(self, points: Tensor) -> float:
        """Returns the accuracy at points, by new answers of the model."""
        return float(self.survival(points, FRESH).mean())

    def survival(self, points: Tensor, seed: int, times: int = 1) -> Tensor:  # (B,)
        """Returns the share of new answers that are right, for every image; `times` as many answers as usual."""
        draws = 1 if self.model.defended.steady else times * self.budget.answers
        self.fixed.reseed(seed + self.seed)
        pairs = zip(points.split(self.budget.part), self.target.split(self.budget.part), strict=True)
        return torch.cat([survival(self.fixed, some, classes, draws=draws) for some, classes in pairs])

    def plain(self, clean: float) -> Iterator[Value]:
        """Runs the attack of 004, along the model's own gradient, over steps and radii."""
        for metric in ("pgd_accuracy", "epsilon_accuracy"):
            yield Value(metric, clean, 0.0)
        for steps in self.budget.pgd_steps:
            yield Value("pgd_accuracy", self.share_correct(self.signed(steps, RADIUS)), float(steps))
        for radius in self.budget.epsilons:
            yield Value("epsilon_accuracy", self.share_correct(self.signed(10, radius)), radius)

    def signed(self, steps: int, radius: float) -> Tensor:
        """Attacks by plain steps along signs."""
        generator = torch.Generator(self.u.device).manual_seed(self.seed)
        attack = SignSteps(steps, LENGTH, generator=generator)
        return self._attacked(lambda some, classes: attack(self.fixed, some, classes, radius))

    def noisy(self, clean: float) -> Iterator[Value]:
        """Disturbs the images with noise that nobody chose."""
        for name, disturb in NOISES.items():
            yield Value(f"{name}_accuracy", clean, 0.0)
            for level in self.budget.levels:
                generator = torch.Generator(self.u.device).manual_seed(self.seed)
                yield Value(
                    f"{name}_accuracy", self.share_correct(disturb(self.u, level, generator=generator)), level
                )

    def auto(self) -> Iterator[Value]:
        """Runs AutoAttack along the model's own gradient, and its version for random models."""
        few = slice(self.budget.auto_samples)
        clean = float(self.survival(self.u, FRESH)[few].mean())
        for version in ("standard", "rand"):
            metric = "autoattack_accuracy" if version == "standard" else "autoattack_rand_accuracy"
            radii = self.budget.auto_epsilons if version == "standard" else self.budget.auto_epsilons[-1:]
            yield Value(metric, clean, 0.0)
            for radius in radii:
                points = self._auto(radius, version=version)
                yield Value(metric, float(self.survival(points, FRESH)[few].mean()), radius)
                if radius == RADIUS:
                    self.found[f"autoattack-{version}"] = points

    def _auto(self, radius: float, few: int | None = None, **options: Any) -> Tensor:
        few = self.budget.auto_samples if few is None else few
        self.fixed.reseed(self.seed)
        options |= {"steps": self.budget.auto_steps, "square_queries": self.budget.queries, "seed": self.seed}
        found = autoattack(self.fixed, self.u[:few], self.target[:few], radius, **options)
        self.notes += found.notes
        return torch.cat([found.inputs, self.u[few:]])

    def adaptive(self) -> Iterator[Value]:
        """Attacks through other gradients and averaged over answers, without gradients, and takes the worst."""
        self.found["construction"] = self.signed(self.budget.pgd_steps[-1], RADIUS)
        for name, gradient in self.model.gradients.items():
            self.found[f"{name}-eot"] = self._attacked(partial(self._climbed, gradient))
        self.found["square"] = self._auto(RADIUS, len(self.u), attacks=["square"])
        for at, points in self.found.items():
            if not at.startswith("auto"):  # which has fewer images, and values of its own
                yield Value("adaptive_accuracy", self.share_correct(points), at)
        yield Value("adaptive_accuracy", self._worst(), "worst")

    def _climbed(self, gradient: Gradient | None, u: Tensor, target: Tensor) -> Tensor:
        options: dict[str, Any] = {"steps": self.budget.adaptive_steps, "restarts": 0, "draws": self.draws}
        if gradient is None:
            return pgd(self.fixed, u, target, RADIUS, seed=self.seed, **options).inputs
        options["gradient"] = gradient
        return adaptive_attack(self.model, u, target, RADIUS, seed=self.seed, **options).inputs

    def _attacked(self, attack: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Attacks all images, some at a time."""
        self.fixed.reseed(self.seed)
        pairs = zip(self.u.split(self.budget.part), self.target.split(self.budget.part), strict=True)
        return torch.cat([attack(some, classes) for some, classes in pairs])

    def _worst(self) -> float:
        """Returns the accuracy under the worst attack for every image, or for all images if that is lower.

        The attack of an image is chosen by many answers and judged by others: few would choose by luck.
        """
        chosen = torch.stack([self.survival(points, 2 * FRESH, CAREFUL) for points in self.found.values()])
        judged = torch.stack([self.survival(points, 3 * FRESH) for points in self.found.values()])
        each = judged.gather(0, chosen.argmin(0, keepdim=True)).mean()
        return float(torch.minimum(each, judged.mean(1).min()))
