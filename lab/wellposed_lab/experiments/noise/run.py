"""Runs that train the pairs of 004 as ensembles and test them under noise of any strength."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from wellposed_lab.config import Schedule, identity
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Result, Series, Value
from wellposed_lab.experiments.noise.ensemble import Member, Stack, make_stack
from wellposed_lab.experiments.noise.models import Pair, sensitivities, weight_eigenvalues
from wellposed_lab.experiments.noise.training import Score, chosen, score, train
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.trained import images

PROBED = 8  # images whose sensitivity is measured
BINS, WIDEST = 30, 3.0  # of the histogram of eigenvalues, and their largest modulus


@dataclass(frozen=True, kw_only=True)
class NoiseRun(Run):
    """Trains a classifier and measures its accuracy under signal noise.

    ``accuracy`` without a point is without noise, at a point it is under noise of so many decibels. A DEQ is read
    out at the iterate at which it stops; ``averaged_accuracy`` is that of the mean over its last ten. Models
    trained without noise also get ``sensitivity``, ``jacobian_radius``, ``weight_radius`` and a histogram of the
    eigenvalues of their weights. What compares models (``accuracy_gain``, ``sensitivity_ratio``) is made from
    records.

    Runs of one kind are one ensemble: at scale "paper" all widths or depths, strengths of noise and seeds, else
    those of one width, for a CPU has no use for states that are filled up with zeros.

    Args:
        data: name of the images.
        pair: the model.
        noise: decibels of the noise in training; None for none.
        jacobian: weight of the Jacobian penalty.
        images, epochs, batch_size, learning_rate: of the training, by Adam.
        points: decibels of the noise in the test.
        samples: test images.
        passes: whose mean probabilities decide, the control for the averaging that an equilibrium does by itself.
    """

    data: str
    pair: Pair
    noise: float | None = None
    jacobian: float = 0.0
    images: int = 12_000
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 1e-3
    points: tuple[float, ...] = (20.0, 10.0, 0.0)
    samples: int = 2_500
    passes: int = 1
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    resumable: ClassVar[bool] = True

    @property
    def labels(self) -> tuple[str, str, str | None]:
        trained = "" if self.noise is None else f"-noise-{self.noise:g}db"
        extra = ("-jacobian" if self.jacobian else "") + (f"-mean-{self.passes}" if self.passes > 1 else "")
        return self.data, f"{self.pair.name}{trained}{extra}", None

    @property
    def batch_seeds(self) -> bool:
        return True

    @property
    def family(self) -> str:
        """The same for runs of one ensemble."""
        one_width = self.pair.kind == "ffw" or self.scale != "paper"
        tied = (self.pair.tied, self.pair.layers if self.pair.tied else 0)
        shape = (self.pair.kind, *tied, self.pair.width if one_width else 0, self.pair.projection)
        deep = self.jacobian if self.pair.kind == "ffw" else 0.0  # a penalty on all layers costs the others time
        tested = (self.points, self.samples)
        return identity((self.suite, self.scale, self.data, shape, self._schedule, deep, tested))

    @property
    def member(self) -> Member:
        """The model in its ensemble."""
        return Member(self.pair, self.noise, self.seed, self.jacobian)

    @property
    def _schedule(self) -> Schedule:
        return Schedule(self.images, self.epochs, self.batch_size, self.learning_rate)

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        u, labels = (part.to(context.device) for part in pair_of(self.data, "train"))
        members = list(dict.fromkeys(run.member for run in runs))
        classes = len(images(self.data, "train").classes)
        stack = make_stack(members, u.shape[1], classes, context.device)
        tell = print if context.progress else lambda text: None
        losses = train(stack, u, labels, self._schedule, tell, file=context.checkpoint(runs))
        scores = self._scores(stack, runs, context.device)
        return [run._result(stack, losses, scores[run.passes], context.device) for run in runs]

    def _scores(self, stack: Stack, runs: Sequence[Self], device: str) -> "dict[int, Scores]":
        """Tests all members with one pass, and with several those that are to have them."""
        u, labels = (part[: self.samples].to(device) for part in pair_of(self.data, "test"))
        found = {}
        for passes in sorted({run.passes for run in runs}):
            wanted = {run.member for run in runs if run.passes == passes}
            places = [place for place, member in enumerate(stack.members) if member in wanted]
            part = stack if len(places) == len(stack.members) else chosen(stack, places)
            tests = {at: score(part, u, labels, at, passes) for at in (None, *self.points)}
            found[passes] = Scores(part.members, tests)
        return found

    def _result(self, stack: Stack, losses: Tensor, scores: "Scores", device: str) -> Result:
        place = stack.members.index(self.member)
        model = stack.member(place)
        values = [*scores.values(self.member), Value("parameters", float(parameter_count(model)))]
        series: Series = {"train_loss": [float(f"{loss:.6g}") for loss in losses[:, place].tolist()]}
        if self.noise is None and self.passes == 1:
            measured, series["eigenvalues"] = self._sensitivity(model, device)
            values += measured
        trained: dict[str, Any] = {"images": min(self.images, len(images(self.data, "train")))}
        return Result(tuple(values), series, trained | {"ensemble": len(stack.members)})

    def _sensitivity(self, model: nn.Module, device: str) -> tuple[list[Value], list[float]]:
        u = pair_of(self.data, "test")[0][:PROBED].to(device)
        own, radius = sensitivities(model.to(device), u, self.seed)
        sizes = weight_eigenvalues(model.cpu()).abs()
        counts = torch.histc(sizes.clamp_max(WIDEST), BINS, 0, WIDEST) / sizes.numel()
        largest = float(sizes.amax(-1).mean())
        numbers = {"sensitivity": own, "jacobian_radius": radius, "weight_radius": largest}
        return [Value(name, value) for name, value in numbers.items()], [round(x, 4) for x in counts.tolist()]


@dataclass(frozen=True)
class Scores:
    """What the tests of an ensemble found, by decibels."""

    members: tuple[Member, ...]
    tests: dict[float | None, Score]

    def values(self, member: Member) -> list[Value]:
        """Returns the numbers of one member."""
        place, values = self.members.index(member), []
        for at, found in self.tests.items():
            values.append(Value("accuracy", round(float(found.accuracy[place]), 6), at))
            if found.averaged is not None:
                values.append(Value("averaged_accuracy", round(float(found.averaged[place]), 6), at))
            if found.steps is not None and at is not None:
                values.append(Value("steps", float(found.steps[place]), at))
        return values


def pair_of(data: str, split: str) -> tuple[Tensor, Tensor]:
    """Returns flat images and classes of a split."""
    found = images(data, split)
    return found.flat(), found.labels
