"""MLPs of fifteen activations against the implicit model (000 Tables 1-2, 002 Tables 2-3, 003 Tables 5.1-5.2)."""

from collections.abc import Sequence

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.engine.training import ObservedRun, TrainingRun, training_runs
from wellposed_lab.experiments.mathematics.relative import LEARNT, with_relative_errors
from wellposed_lab.networks.by_name import ACTIVATED
from wellposed_lab.report.findings import median_of, ratio_sentence
from wellposed_lab.tasks.mathematics import HardAddition, HardSubtraction, Identity
from wellposed_lab.tasks.task import Task

MODELS: list[tuple[Role, Choice]] = [
    ("ours", Choice.of("implicit", kappa=0.5, solver="picard")),
    *(("baseline", Choice(name)) for name in ACTIVATED),
    ("control", Choice("linear")),
    ("control", Choice("mlp-bias-free")),
]


OBSERVED = ("implicit", "mlp-relu", "mlp-relu6", "mlp-bias-free")  # tested after every epoch in R^100


def plan(scale: Scale) -> list[TrainingRun]:
    """Returns every activation on the three tasks of the tables, some of them observed during training."""
    runs = training_runs("activations", scale, tasks(scale), MODELS, training)
    return [_observed(run) if run.task.name != "identity" and run.model.name in OBSERVED else run for run in runs]


def _observed(run: TrainingRun) -> ObservedRun:
    return ObservedRun(
        suite=run.suite,
        seed=run.seed,
        scale=run.scale,
        role=run.role,
        task=run.task,
        model=run.model,
        training=run.training,
    )


def tasks(scale: Scale) -> list[Task]:
    """Returns the identity with one test distribution, and the two operations in R^100."""
    samples, tests = (300, 200) if scale == "tiny" else (10_000, 3_000)
    operations = [kind(samples=samples, test_samples=tests) for kind in (HardAddition, HardSubtraction)]
    return [Identity(samples=samples, test_samples=tests, points=(None,)), *operations]


def training(scale: Scale, task: Task, model: Choice) -> Training:
    """Chooses settings by the validation loss; at paper scale on the identity those of 000 section 3."""
    if scale == "tiny":
        return Training(epochs=2, batch_size=100, learning_rate=0.01)
    if scale == "paper":
        epochs = 500 if task.name == "identity" and model.name.startswith("mlp") else 1000
        return Training(epochs=epochs, learning_rate=0.01, schedule=None)
    return Training(epochs=40, batch_size=500 if task.name == "identity" else 100, learning_rate=0.01)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    sentences = []
    for task in ("identity", "hard-addition", "hard-subtraction"):
        errors = {name: median_of(records, task, name, "test_mse") for name in ACTIVATED}
        known = {name: error for name, error in errors.items() if error is not None}
        if known:
            best = min(known, key=lambda name: known[name])
            sentences.append(
                f"On {task} the best of {len(known)} activations is {best}, {known[best]:.2g} (median)."
            )
        sentences += ratio_sentence(records, task, None, "mlp-bias-free", "implicit", "an MLP without biases")
        sentences += ratio_sentence(records, task, None, "linear", "implicit", "a linear regression")
    return sentences


SUITE = Suite(
    name="activations",
    title="Fifteen activations",
    claim="No activation lets an MLP extrapolate as the implicit model does, on the identity and on arithmetic "
    "from U(1, 2) to U(2, 5) in R^100.",
    papers=("000 Tables 1-2", "000 Figure 6", "001 Figure 11", "002 Tables 2-3", "003 Tables 5.1-5.2"),
    plan=plan,
    seeds={"tiny": 2, "default": 5, "paper": 5},
    figures=(
        Figure(
            "Test error",
            ("identity", "hard-addition", "hard-subtraction"),
            "test_mse",
            "test error",
            log="y",
            paper="000 Tables 1-2",
        ),
        Figure(
            "Training error",
            ("identity", "hard-addition", "hard-subtraction"),
            "train_loss",
            "epoch",
            over="epoch",
            log="y",
        ),
        Figure(
            "Test error during training",
            ("hard-addition", "hard-subtraction"),
            "test_mse",
            "epoch",
            over="epoch",
            log="y",
            paper="000 Figure 6, 001 Figure 11",
        ),
    ),
    findings=findings,
    grid=(("learning_rate", (0.003, 0.01, 0.03)),),
    thresholds=tuple(
        Threshold(f"On {name} the implicit model errs by 0.1 at most.", measure, "at most", 0.1)
        for name in ("hard-addition", "hard-subtraction")
        for measure in (Measure("test_mse", "implicit", name),)
    ),
    floors=(
        Floor("validation_mse", "at most", 8.2, "identity"),  # the mean has 8.25
        LEARNT,
    ),
    derived=with_relative_errors,
    differs="Batches of 128 are ours, and 1,000 epochs on addition and subtraction: neither is published.",
)
