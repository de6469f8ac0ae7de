"""Feedback in A removed, with or without the cap on A (001 Table 2 and Figure 10, 003 Table 5.4)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Floor
from wellposed_lab.engine.training import TrainingRun, training_runs
from wellposed_lab.experiments.mathematics.relative import LEARNT, with_relative_errors
from wellposed_lab.tasks.mathematics import Addition, Subtraction
from wellposed_lab.tasks.sequences import RollingArgmax, RollingAverage
from wellposed_lab.tasks.task import Task

CAP = 0.5
MODELS: list[tuple[Role, Choice]] = [
    ("ours", Choice.of("implicit", kappa=CAP, solver="picard")),
    ("baseline", Choice("implicit-triangular")),
    ("control", Choice.of("implicit-triangular-capped", kappa=CAP)),
    ("control", Choice.of("implicit-no-feedback", kappa=CAP, solver="picard")),
]
RIVALS = {
    "implicit-triangular": "a strictly triangular A without a cap, the papers' ablation",
    "implicit-triangular-capped": f"a strictly triangular A with the same cap of {CAP} on its rows",
    "implicit-no-feedback": "A = 0, which leaves one hidden layer beside D",
}
METRICS = {
    "addition": "test_mse",
    "subtraction": "test_mse",
    "rolling-average": "test_mse",
    "rolling-argmax": "accuracy",
}
AT = 100.0


def plan(scale: Scale) -> list[TrainingRun]:
    """Returns the four matrices on the four tasks of the table."""
    return training_runs("feedback", scale, tasks(scale), MODELS, training)


def tasks(scale: Scale) -> list[Task]:
    """Returns the tasks of the table."""
    samples, tests = (300, 200) if scale == "tiny" else (10_000, 3_000)
    kinds = (Addition, Subtraction, RollingArgmax, RollingAverage)
    return [kind(samples=samples, test_samples=tests) for kind in kinds]


def training(scale: Scale, task: Task, model: Choice) -> Training:
    """Returns the same settings for all four matrices."""
    if scale == "tiny":
        return Training(epochs=2, batch_size=100, learning_rate=0.01)
    if scale == "paper":
        return Training(epochs=1000, learning_rate=0.01, schedule=None)
    if task.name == "rolling-argmax":
        return Training(epochs=20, batch_size=200, learning_rate=0.01)
    if task.name == "rolling-average":
        return Training(epochs=30, batch_size=100, learning_rate=0.01)
    return Training(epochs=60, batch_size=200, learning_rate=0.03)


@dataclass(frozen=True)
class Wins:
    """How often the full A is better than a rival, seed by seed.

    Args:
        won, seeds: in how many of how many.
        ratio: median of the rival's error over ours; above one where feedback helps.
    """

    won: int
    seeds: int
    ratio: float

    @property
    def side(self) -> str:
        """The side that a sign test would favour, which takes at least 7 of 8 seeds."""
        needed = self.seeds - self.seeds // 8
        if self.won >= needed:
            return "full"
        return "rival" if self.seeds - self.won >= needed else "neither"


def wins(records: Sequence[Record], task: str, rival: str) -> Wins | None:
    """Compares the full A with a rival at a shift of 100; None where there are no common seeds."""
    sides = [_errors(records, task, name) for name in ("implicit", rival)]
    seeds = sorted(sides[0].keys() & sides[1].keys())
    if not seeds:
        return None
    ratios = [sides[1][seed] / max(sides[0][seed], 1e-300) for seed in seeds]
    return Wins(sum(ratio > 1 for ratio in ratios), len(seeds), statistics.median(ratios))


def _errors(records: Sequence[Record], task: str, model: str) -> dict[int, float]:
    """Returns the error of every seed: the mean squared one, or the share of wrong answers."""
    metric = METRICS[task]
    chosen = [r for r in records if (r.task, r.model, r.kind, r.error) == (task, model, "run", None)]
    values = {record.seed: record.value(metric, AT) for record in chosen}
    known = {seed: value for seed, value in values.items() if value is not None}
    return {seed: 1 - value for seed, value in known.items()} if metric == "accuracy" else known


def findings(records: Sequence[Record]) -> list[str]:
    """Counts the wins and says what they mean."""
    sentences = [
        "A strictly triangular A is well-posed without a cap on its rows, so the papers' ablation changes two "
        "things at once: it takes the feedback away and the cap with it. The capped triangular A changes the "
        "first alone."
    ]
    for task in METRICS:
        counts = {rival: wins(records, task, rival) for rival in RIVALS}
        known = {rival: count for rival, count in counts.items() if count is not None}
        sentences += [_sentence(task, rival, count) for rival, count in known.items()]
        if len(known) == len(RIVALS):
            sentences.append(f"On {task}: {conclusion(known)}")
    return sentences


def _sentence(task: str, rival: str, count: Wins) -> str:
    seeds = f"in {count.won} of {count.seeds} seeds"
    won = f"On {task} at a shift of 100 the full A is better {seeds} than {RIVALS[rival]}"
    if abs(count.ratio - 1) < 0.01:
        return f"{won}; the errors are equal within 1 % (median)."
    larger, factor = ("larger", count.ratio) if count.ratio >= 1 else ("smaller", 1 / max(count.ratio, 1e-300))
    return f"{won}; the rival's error is {factor:.3g} times {larger} (median)."


def conclusion(counts: dict[str, Wins]) -> str:
    """Says in words what made the difference.

    Example:
        >>> sure, even, lost = Wins(8, 8, 1.6), Wins(4, 8, 1.0), Wins(1, 8, 0.8)
        >>> conclusion(dict(zip(RIVALS, (sure, even, lost), strict=True)))
        'it is the cap, not the feedback. A model without any A is better still.'
        >>> conclusion(dict(zip(RIVALS, (sure, sure, sure), strict=True)))
        'feedback helps, with the same cap too.'
    """
    free, capped, none = (counts[rival].side for rival in RIVALS)
    if capped == "full":
        text = "feedback helps, with the same cap too."
    elif capped == "rival":
        text = "feedback harms: with the same cap the triangular A is better."
    elif free == "full":
        text = "it is the cap, not the feedback."
    elif free == "rival":
        text = "feedback does not help: the papers' triangular A is better here."
    else:
        text = "the seeds show no advantage of feedback."
    return text + (" A model without any A is better still." if none == "rival" else "")


SUITE = Suite(
    name="feedback",
    title="Feedback in A",
    claim="Closed-loop feedback, the diagonal and the lower triangle of A, helps a model to extrapolate: without "
    "it the test error at a shift of 100 is higher.",
    papers=("001 Table 2", "001 Figure 10", "003 Table 5.4"),
    plan=plan,
    seeds={"tiny": 2, "default": 8, "paper": 8},
    figures=(
        Figure(
            "Test error under shift",
            ("addition", "subtraction", "rolling-average"),
            "test_mse",
            "k, the shift of the test inputs",
            paper="001 Figure 10",
        ),
        Figure(
            "Accuracy under shift",
            ("rolling-argmax",),
            "accuracy",
            "k, test inputs from U(0, k)",
            paper="001 Figure 10",
            log="x",
        ),
        Figure("Training error", tuple(METRICS), "train_loss", "epoch", over="epoch", log="y"),
    ),
    findings=findings,
    grid=(("learning_rate", (0.003, 0.01, 0.03)),),
    floors=(
        LEARNT,
        Floor("validation_mse", "at most", 0.28, "rolling-average"),
        Floor("validation_accuracy", "at least", 0.2, "rolling-argmax"),  # chance is 0.1
    ),
    derived=with_relative_errors,
    differs="1,000 epochs in batches of 128 are ours: neither is published.",
)
