"""The identity function under a shift of scale (000 Figure 1, 001 Figure 3, 002 Figure 2, 003 Figure 5.5)."""

from collections.abc import Sequence

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.engine.training import TrainingRun, training_runs
from wellposed_lab.report.findings import ratio_sentence
from wellposed_lab.tasks.mathematics import Identity
from wellposed_lab.tasks.task import Task

MODELS: list[tuple[Role, Choice]] = [
    ("ours", Choice.of("implicit", kappa=0.5, solver="picard")),
    ("baseline", Choice("mlp", "001")),
    ("baseline", Choice("transformer-5-heads", "001")),
    ("baseline", Choice("mlp", "000")),
    ("baseline", Choice("transformer-encoder-single-head", "000")),
    ("control", Choice("linear", "001")),
    ("control", Choice("mlp-wide", "001")),
    ("control", Choice("mlp-bias-free", "001")),
    ("control", Choice("mlp-skip", "001")),
    ("control", Choice.of("implicit-bias", kappa=0.5, solver="picard")),
    ("control", Choice.of("implicit-no-feedthrough", kappa=0.5, solver="picard")),
    ("control", Choice.of("implicit-no-feedback", kappa=0.5, solver="picard")),
]


def plan(scale: Scale) -> list[TrainingRun]:
    """Returns every model once."""
    task = Identity(samples=300, test_samples=200) if scale == "tiny" else Identity()
    return training_runs("identity", scale, [task], MODELS, training)


def training(scale: Scale, task: Task, model: Choice) -> Training:
    """Chooses settings by the validation loss; at paper scale those of 000 section 3."""
    transformer = model.name.startswith("transformer")
    if scale == "tiny":
        return Training(epochs=2, batch_size=100, learning_rate=0.01)
    if scale == "paper":
        epochs = 500 if model.name.startswith("mlp") else 1000
        return Training(epochs=epochs, learning_rate=0.01, schedule=None)
    if transformer:
        return Training(epochs=20, batch_size=250, learning_rate=3e-3)
    return Training(epochs=60, batch_size=500, learning_rate=0.03)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    at = 205.0
    return [
        "The target is linear, so a linear regression is its exact solution. An implicit model without bias is "
        "positively homogeneous, f(au) = a f(u) for a > 0, so under a shift of scale its squared error is that of "
        "training times the square of the scale; a bias-free MLP shares the property.",
        *ratio_sentence(
            records, "identity", at, "implicit-bias", "implicit", "adding a bias to the implicit model"
        ),
        *ratio_sentence(
            records, "identity", at, "implicit-no-feedthrough", "implicit", "taking the linear part D away"
        ),
        *ratio_sentence(records, "identity", at, "implicit-no-feedback", "implicit", "taking the feedback A away"),
        *ratio_sentence(records, "identity", at, "mlp", "mlp-bias-free", "giving the MLP biases"),
    ]


def _error(model: str, at: float, size: str | None = None) -> Measure:
    return Measure("test_mse", model, "identity", at, size)


SUITE = Suite(
    name="identity",
    title="The identity function",
    claim="An implicit model learns f(u) = u and keeps to it far outside the training range, where MLP and "
    "transformers fail.",
    papers=("000 Figure 1", "001 Figure 3", "002 Figure 2", "003 Figure 5.5"),
    plan=plan,
    seeds={"tiny": 2, "default": 5, "paper": 5},
    figures=(
        Figure(
            "Test error under shift",
            ("identity",),
            "test_mse",
            "k, test inputs from U(-k, k)",
            paper="000 Figure 1, 001 Figure 3",
        ),
        Figure("Training error", ("identity",), "train_loss", "epoch", over="epoch", log="y"),
    ),
    findings=findings,
    grid=(("learning_rate", (0.003, 0.01, 0.03)), ("batch_size", (100, 500))),
    thresholds=(
        Threshold("The implicit model errs by 0.05 at most at k = 30.", _error("implicit", 30), "at most", 0.05),
        Threshold("The implicit model errs by 1 at most at k = 205.", _error("implicit", 205), "at most", 1.0),
        Threshold(
            "At k = 205 the MLP of 001 errs 1,000 times as much as the implicit model at least.",
            _error("mlp", 205, "001"),
            "at least",
            1e3,
            rival=_error("implicit", 205),
        ),
    ),
    floors=(Floor("validation_mse", "at most", 8.2),),  # the mean has 8.25
    differs="Batches of 128 are ours: their size is not published.",
)
