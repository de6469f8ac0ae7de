"""The average of a sequence under a shift of its mean (000 and 001 Figure 5, 002 Figure 6, 003 Figure 5.7)."""

from collections.abc import Sequence
from typing import Any

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.engine.training import TrainingRun, training_runs
from wellposed_lab.report.findings import median_of, ratio_sentence
from wellposed_lab.tasks.sequences import RollingAverage
from wellposed_lab.tasks.task import Task

OPTIONS: dict[str, Any] = {"kappa": 0.5, "solver": "picard"}
MODELS: list[tuple[Role, Choice]] = [
    ("ours", Choice.of("implicit", "001", **OPTIONS)),
    ("ours", Choice.of("implicit", "000", **OPTIONS)),
    ("ours", Choice("implicit-rnn", "001")),
    ("baseline", Choice("lstm", "001")),
    ("baseline", Choice("transformer-5-heads", "001")),
    ("baseline", Choice("lstm", "000")),
    ("baseline", Choice("transformer-encoder", "000")),
    ("control", Choice("linear")),
    ("control", Choice("lstm-normalised", "001")),
    ("control", Choice("rnn-relu", "001")),
    ("control", Choice.of("implicit-bias", "001", **OPTIONS)),
    ("control", Choice.of("implicit-no-feedthrough", "001", **OPTIONS)),
    ("control", Choice.of("implicit-no-feedback", "001", **OPTIONS)),
]
FAR = 100.0


def plan(scale: Scale) -> list[TrainingRun]:
    """Returns every model once."""
    task = RollingAverage(samples=300, test_samples=200) if scale == "tiny" else RollingAverage()
    return training_runs("rolling-average", scale, [task], MODELS, training)


def training(scale: Scale, task: Task, model: Choice) -> Training:
    """Chooses settings by the validation loss; the papers print none for this task."""
    if scale == "tiny":
        return Training(epochs=2, batch_size=100, learning_rate=0.01)
    transformer = model.name.startswith("transformer")
    careful = transformer or model.name == "implicit-rnn" or (model.name, model.size) == ("lstm", "000")
    long = model.name.startswith("implicit") and not careful
    epochs = 1000 if scale == "paper" else 15 if transformer else 40 if long else 20
    return Training(epochs=epochs, batch_size=100, learning_rate=3e-3 if careful else 0.01)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    name = "rolling-average"
    sentences = [
        "The average is linear in the input, so a linear regression is its exact solution. A shift of the mean "
        "adds the same to all elements: a model of a bounded state such as the LSTM cannot follow, and one with a "
        "linear path from input to output can.",
    ]
    taken = median_of(records, name, "lstm-normalised", "test_mse", FAR)
    plain = median_of(records, name, "lstm", "test_mse", FAR, "001")
    if taken is not None and plain is not None:
        sentences.append(
            "An LSTM that reads the sequence minus its first element, and adds that at the end, has an error of "
            f"{taken:.2g} at a shift of {FAR:g} where the same LSTM without has {plain:.2g} (medians): what it "
            "lacks is not a latent state but a translation."
        )
    changes = {
        "implicit-bias": "adding a bias to the implicit model",
        "implicit-no-feedthrough": "taking the linear part D away",
        "implicit-no-feedback": "taking the feedback A away",
        "rnn-relu": "a plain ReLU network without biases in its place",
    }
    for control, change in changes.items():
        sentences += ratio_sentence(records, name, FAR, control, "implicit", change)
    return sentences


def _error(model: str, size: str) -> Measure:
    return Measure("test_mse", model, "rolling-average", FAR, size)


SUITE = Suite(
    name="rolling-average",
    title="The rolling average",
    claim="An implicit model averages a sequence with an error that hardly grows when the mean is shifted by up "
    "to 100, where LSTM and transformers keep predicting the mean of the training data.",
    papers=("000 Figure 5", "001 Figure 5", "002 Figure 6", "003 Figure 5.7"),
    plan=plan,
    seeds={"tiny": 2, "default": 5, "paper": 5},
    figures=(
        Figure(
            "Test error of the last step under shift",
            ("rolling-average",),
            "test_mse",
            "k, test inputs from N(3 + k, 1)",
            paper="001 Figure 5 (left)",
            log="y",
        ),
        Figure(
            "Mean prediction under shift",
            ("rolling-average",),
            "mean_prediction",
            "k; the true mean is 3 + k",
            log="",
        ),
        Figure("Training error", ("rolling-average",), "train_loss", "epoch", over="epoch", log="y"),
    ),
    findings=findings,
    grid=(("learning_rate", (0.003, 0.01, 0.03)), ("batch_size", (100, 500))),
    thresholds=(
        Threshold(
            "At a shift of 100 the implicit model of 001 errs by 1e-4 at most.",
            _error("implicit", "001"),
            "at most",
            1e-4,
        ),
        Threshold(
            "At a shift of 100 the LSTM of 001 errs by 1,000 at least.", _error("lstm", "001"), "at least", 1e3
        ),
        Threshold(
            "At a shift of 100 the LSTM of 000 errs by 1,000 at least.", _error("lstm", "000"), "at least", 1e3
        ),
    ),
    floors=(Floor("validation_mse", "at most", 0.28),),  # the mean has 0.284
    differs="1,000 epochs in batches of 100 and the step size are ours: none of them is published.",
)
