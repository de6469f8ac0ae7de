"""Runs that train a defended classifier against attacks and examine it under others (004 section 4.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from wellposed.robust import Ramp
from wellposed_lab.cache import CACHE
from wellposed_lab.config import Schedule
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Result, Value
from wellposed_lab.experiments.adversarial.evaluation import RADIUS, Budget, Evaluation
from wellposed_lab.experiments.adversarial.models import Classifier, Defended, Shape
from wellposed_lab.experiments.adversarial.training import AttackedStep, Trainer
from wellposed_lab.networks.trained import images


@dataclass(frozen=True)
class AdversarialSchedule(Schedule):
    """How a model is trained: by Adam with the largest second moments, on inputs attacked within a growing radius.

    Args:
        steps: of the attack, each 0.1 long where the radius is 0.3, and shorter in proportion before.
        grown: the share of the training after which the radius is 0.3.
        weight: of the second term of TRADES.
    """

    steps: int = 10
    grown: float = 0.5
    weight: float = 6.0
    record_type: ClassVar[str] = "Lesson"


@dataclass(frozen=True, kw_only=True)
class AdversarialRun(Run):
    """Trains one defended model and examines it.

    ``accuracy`` is that without attack; ``pgd_accuracy`` is over the steps of the plain attack within 0.3,
    ``epsilon_accuracy`` over its radius; ``autoattack_accuracy``, ``autoattack_rand_accuracy``,
    ``salt_and_pepper_accuracy`` and ``speckle_accuracy`` over their strength; ``adaptive_accuracy`` is within 0.3
    by the name of the attack. Of the best defended DEQ ``pgd_gain`` is its lead over the best defended FFW.

    Args:
        data: name of the images.
        model: with its defence.
        shape: its sizes.
        schedule: of its training.
        budget: of the examination.
    """

    data: str
    model: Defended
    shape: Shape
    schedule: AdversarialSchedule
    budget: Budget
    record_fields: ClassVar[Mapping[str, str]] = {"schedule": "lesson"}
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    resumable: ClassVar[bool] = True

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.data, self.model.name, None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run.measured(context) for run in runs]

    def measured(self, context: Context) -> Result:
        """Trains, attacks and returns all numbers of this run."""
        evaluation = self.evaluation(self.model, context)
        values = evaluation.values()
        if self.model.kind == "deq" and (self.model.place, self.model.decibels) == ("input", 0.0):
            twin = self.evaluation(self.model.twin, replace(context, folder=None))
            own = {value.at: value.value for value in values if value.metric == "pgd_accuracy"}
            for steps in self.budget.pgd_steps:
                rival = twin.share_correct(twin.signed(steps, RADIUS))
                values.append(Value("pgd_gain", own[float(steps)] - rival, float(steps)))
        weights = sum(parameter.numel() for parameter in evaluation.model.parameters())
        notes = {"notes": sorted(set(evaluation.notes))} if evaluation.notes else {}
        return Result((*values, Value("parameters", float(weights))), facts=notes)

    def evaluation(self, model: Defended, context: Context) -> Evaluation:
        """Returns the examination of a model that is trained as this run says."""
        u, target = pair_of(self.data, "test", self.budget.samples, self.seed)
        key = model, self.shape, self.data, self.schedule, self.seed, context.device
        trained = CACHE.get(key, lambda: self._trained(model, context))
        return Evaluation(trained, u.to(context.device), target.to(context.device), self.budget, self.seed)

    def _trained(self, model: Defended, context: Context) -> Classifier:
        schedule, seed = self.schedule, self.seed
        u, labels = pair_of(self.data, "train", schedule.images, seed)
        network = model.build(self.shape, u.shape[1], len(images(self.data, "train").classes), seed)
        network.to(context.device).reseed(seed)
        step = AttackedStep(
            network, schedule.steps, schedule.weight, seed, schedule.learning_rate, schedule.batch_size
        )
        ramp = Ramp(RADIUS, steps=int(schedule.grown * schedule.epochs * -(-len(u) // schedule.batch_size)))
        Trainer(step, (u, labels), ramp, schedule.epochs, seed, context.checkpoint((self,))).train()
        return network.eval()


def pair_of(data: str, split: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws images and their classes."""
    found = images(data, split)
    found = found.subset(count, seed) if count < len(found) else found
    return found.to_float(), found.labels
