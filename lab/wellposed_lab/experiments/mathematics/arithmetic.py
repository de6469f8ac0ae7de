"""Addition and subtraction under shifts (000 Figures 2-3, 001 Figure 4, 002 Figures 3-4, 003 Figure 5.6)."""

from collections.abc import Sequence

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.engine.training import TrainingRun, training_runs
from wellposed_lab.experiments.mathematics.relative import LEARNT, with_relative_errors
from wellposed_lab.report.findings import ratio_sentence
from wellposed_lab.tasks.mathematics import Addition, Subtraction
from wellposed_lab.tasks.task import Task

# MLP, NALU, NAC and iNALU have the same shape in 000 and 001, so one run of each serves both.
MODELS: list[tuple[Role, Choice]] = [
    ("ours", Choice.of("implicit", kappa=0.5, solver="picard")),
    ("baseline", Choice("mlp")),
    ("baseline", Choice("nalu")),
    ("baseline", Choice("transformer-encoder-sequential", "001")),
    ("baseline", Choice("transformer-encoder-depthwise", "001")),
    ("baseline", Choice("transformer-encoder-depthwise", "000")),
    ("control", Choice("linear")),
    ("control", Choice("nac")),
    ("control", Choice("inalu")),
    ("control", Choice("mlp-bias-free")),
    ("control", Choice("mlp-skip")),
    ("control", Choice.of("implicit-bias", kappa=0.5, solver="picard")),
    ("control", Choice.of("implicit-no-feedthrough", kappa=0.5, solver="picard")),
    ("control", Choice.of("implicit-no-feedback", kappa=0.5, solver="picard")),
]


# Its output cannot depend on its input (layer norm of width 1): its error is the variance of the target, and a few
# samples are enough to measure that. Training on all of them takes hours, which are spent at paper scale only.
CONSTANT: tuple[Role, Choice] = ("baseline", Choice("transformer-encoder-sequential", "000"))


def plan(scale: Scale) -> list[TrainingRun]:
    """Returns every model on both operations."""
    few = tasks(scale) if scale == "paper" else operations(300, 200)
    constant = training_runs("arithmetic", scale, few, [CONSTANT], training)
    return training_runs("arithmetic", scale, tasks(scale), MODELS, training) + constant


def tasks(scale: Scale) -> list[Task]:
    """Returns the two operations."""
    return operations(300, 200) if scale == "tiny" else operations(10_000, 3_000)


def operations(samples: int, tests: int) -> list[Task]:
    """Returns addition and subtraction with these numbers of samples."""
    return [kind(samples=samples, test_samples=tests) for kind in (Addition, Subtraction)]


def training(scale: Scale, task: Task, model: Choice) -> Training:
    """Chooses settings by the validation loss."""
    transformer = model.name.startswith("transformer")
    if scale == "tiny":
        return Training(epochs=2, batch_size=100, learning_rate=0.01)
    if scale == "paper":
        return Training(epochs=1000, learning_rate=0.01, schedule=None)
    if transformer:
        return Training(epochs=5, batch_size=250, learning_rate=3e-3)
    return Training(epochs=60, batch_size=200, learning_rate=0.03 if model.name.startswith("implicit") else 0.01)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    sentences = [
        "Both operations are linear in the input, and a linear regression or a NAC solves them to rounding. What "
        "separates the models under a shift of scale is the bias: without one, implicit model and MLP alike are "
        "positively homogeneous, f(au) = a f(u) for a > 0, so that inputs a times larger multiply their squared "
        "error by the square of a; the biases of an ordinary MLP destroy that. What is measured is the price of a "
        "bias, not a merit that only implicit models have.",
    ]
    for task in ("addition", "subtraction"):
        sentences += ratio_sentence(records, task, 100.0, "mlp", "mlp-bias-free", "giving the MLP biases")
        sentences += ratio_sentence(records, task, 100.0, "implicit-bias", "implicit", "giving ours a bias")
        sentences += ratio_sentence(
            records, task, 100.0, "implicit-no-feedback", "implicit", "taking the feedback A away"
        )
    return sentences


def _thresholds(task: str) -> list[Threshold]:
    def error(model: str, at: float) -> Measure:
        return Measure("test_mse", model, task, at)

    claim = f"On {task} the MLP's error at k = 100 is in the median five times the implicit model's at least."
    mlp, ours = error("mlp", 100), error("implicit", 100)
    return [
        Threshold(
            f"On {task} the implicit model errs by 0.5 at most at k = 50.", error("implicit", 50), "at most", 0.5
        ),
        Threshold(f"On {task} the implicit model errs by 1 at most at k = 100.", ours, "at most", 1.0),
        Threshold(claim, mlp, "at least", 5.0, rival=ours, middle=True),
    ]


SUITE = Suite(
    name="arithmetic",
    title="Addition and subtraction",
    claim="An implicit model learns to add and subtract ranges of its input and keeps a test loss below 1 up to a "
    "shift of 100, better than MLP, NALU and transformers.",
    papers=("000 Figures 2-3", "001 Figure 4", "002 Figures 3-4", "003 Figure 5.6"),
    plan=plan,
    seeds={"tiny": 2, "default": 5, "paper": 5},
    figures=(
        Figure(
            "Test error under shift",
            ("addition", "subtraction"),
            "test_mse",
            "k, test inputs from U(-k/2, k/2)",
            paper="000 Figure 3, 001 Figure 4",
        ),
        Figure(
            "Training error",
            ("addition", "subtraction"),
            "train_loss",
            "epoch",
            over="epoch",
            log="y",
            paper="000 Figure 2",
        ),
    ),
    findings=findings,
    grid=(("learning_rate", (0.003, 0.01, 0.03)), ("batch_size", (100, 500))),
    thresholds=(*_thresholds("addition"), *_thresholds("subtraction")),
    derived=with_relative_errors,
    floors=(LEARNT,),
    differs="1,000 epochs in batches of 128 are ours: neither is published.",
)
