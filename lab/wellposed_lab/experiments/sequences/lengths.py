"""Longer sequences, which 001 section 3.1 asks for: does the implicit layer learn what to remember?"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from wellposed.training import History
from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record, Result, Value
from wellposed_lab.engine.thresholds import Floor
from wellposed_lab.engine.training import TrainingRun
from wellposed_lab.report.findings import median_of
from wellposed_lab.tasks.sequences import RollingAverage
from wellposed_lab.tasks.task import Pair

NAME, TASK = "sequence-length", "rolling-average-length"
LENGTHS = (10, 20, 50, 100, 200)
SHIFT = 5.0
MODELS: tuple[tuple[Role, Choice], ...] = (
    ("ours", Choice("implicit-rnn", "001")),
    ("baseline", Choice("lstm", "001")),
    ("control", Choice("rnn-relu", "001")),
)


@dataclass(frozen=True, kw_only=True)
class LengthRun(TrainingRun):
    """Trains on rolling averages of one length; its numbers stand at that length.

    ``length_mse`` is in distribution, ``shifted_mse`` where all elements are five larger.
    """

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return TASK, self.model.name, self.model.size

    def measure(
        self, model: nn.Module, pair: tuple[Pair, Pair], seed: int, history: History | None, member: int | None
    ) -> Result:
        result = super().measure(model, pair, seed, history, member)
        length = float(self.task.length)  # type: ignore[attr-defined]
        errors = {value.at: value.value for value in result.values if value.metric == "test_mse"}
        own = Value("length_mse", errors[None], length), Value("shifted_mse", errors[SHIFT], length)
        return dataclasses.replace(result, values=(*result.values, *own))


def plan(scale: Scale) -> list[LengthRun]:
    """Returns every model at every length."""
    tiny = scale == "tiny"
    samples, tests = (200, 100) if tiny else (10_000, 3_000) if scale == "paper" else (4_000, 1_000)

    def run(role: Role, model: Choice, length: int) -> LengthRun:
        task = RollingAverage(length=length, samples=samples, test_samples=tests, points=(None, SHIFT))
        rate = 3e-3 if model.name == "implicit-rnn" else 0.01
        training = Training(
            epochs=1 if tiny else 100 if scale == "paper" else 20, batch_size=100, learning_rate=rate
        )
        return LengthRun(suite=NAME, seed=0, scale=scale, role=role, task=task, model=model, training=training)

    return [run(role, model, length) for role, model in MODELS for length in (LENGTHS[:2] if tiny else LENGTHS)]


def findings(records: Sequence[Record]) -> list[str]:
    """Says how the errors change with the length."""
    sentences = []
    for metric, where in (("length_mse", "in distribution"), ("shifted_mse", "at a shift of 5")):
        listed = []
        for _, model in MODELS:
            errors = [median_of(records, TASK, model.name, metric, float(length)) for length in LENGTHS]
            known = [f"{error:.2g}" for error in errors if error is not None]
            if len(known) == len(LENGTHS):
                listed.append(f"{model.name} {', '.join(known)}")
        if listed:
            lengths = ", ".join(map(str, LENGTHS))
            sentences.append(
                f"Errors of the last average {where} at lengths {lengths} (medians): {'; '.join(listed)}."
            )
    if sentences:
        sentences.append("The answer three, the mean of training, has an error of one over the length.")
    return sentences


SUITE = Suite(
    name=NAME,
    title="Longer sequences",
    claim="001 conjectures that an implicit layer learns what to remember, and asks for longer sequences.",
    papers=("001 section 3.1", "003 section 5.3 (mathematics)"),
    plan=plan,
    seeds={"tiny": 1, "default": 5, "paper": 5},
    figures=(
        Figure("Error over the length", (TASK,), "length_mse", "length of the sequence"),
        Figure("Error over the length at a shift of 5", (TASK,), "shifted_mse", "length of the sequence"),
    ),
    findings=findings,
    floors=tuple(Floor("length_mse", "at most", 1 / length, at=float(length)) for length in LENGTHS),
    differs="No paper has run this; lengths, samples and epochs are ours.",
)
