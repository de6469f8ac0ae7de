"""Where the largest element is, under a shift of scale (000 Figure 4, 001 and 002 Figure 5, 003 Figure 5.8)."""

from collections.abc import Sequence
from typing import Any

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.engine.training import ObservedRun, TrainingRun, training_runs
from wellposed_lab.report.findings import median_of
from wellposed_lab.tasks.sequences import RollingArgmax
from wellposed_lab.tasks.task import Task

OPTIONS: dict[str, Any] = {"kappa": 0.5, "solver": "picard"}
# By its printed counts, 1,870 and 2,122, the implicitRNN of both papers has a bias in its read-out.
# The masked and the unmasked transformer are the same networks in 000 and 001, so one run of each serves both.
MODELS: list[tuple[Role, Choice]] = [
    ("ours", Choice("implicit-rnn-bias", "001")),
    ("ours", Choice.of("implicit", "001", **OPTIONS)),
    ("ours", Choice("implicit-rnn-bias", "000")),
    ("ours", Choice.of("implicit", "000", **OPTIONS)),
    ("baseline", Choice("lstm", "001")),
    ("baseline", Choice("lstm", "000")),
    ("baseline", Choice("transformer-decoder-masked")),
    ("baseline", Choice("transformer-decoder-unmasked")),
    ("baseline", Choice("transformer-no-position", "001")),
    ("control", Choice("copy-last-label")),
    ("control", Choice("logistic")),
    ("control", Choice("lstm-normalised", "001")),
    ("control", Choice("rnn-relu", "001")),
    ("control", Choice("implicit-rnn", "001")),
    ("control", Choice("implicit-rnn", "000")),
    ("control", Choice.of("implicit-bias", "001", **OPTIONS)),
]
PUBLISHED = (
    "implicit-rnn-bias",
    "implicit",
    "lstm",
    "transformer-decoder-masked",
    "transformer-decoder-unmasked",
    "transformer-no-position",
)
OBSERVED = ("implicit-rnn", "implicit", "lstm")  # tested after every epoch at k = 10
TITLES = {
    "logistic": "A logistic regression without bias, 100 parameters",
    "lstm-normalised": "An LSTM that reads the sequence over its largest element",
    "rnn-relu": "A plain ReLU network without biases",
    "copy-last-label": "Copying the label of the step before, which transformers are shown",
    "implicit-rnn": "The implicitRNN without the published bias in its read-out",
    "implicit-bias": "The regular implicit model with a bias in its states",
}
NEAR, FAR = 10.0, 1e5
LEVELS = (1.0, 1e2, 1e5)


def plan(scale: Scale) -> list[TrainingRun]:
    """Returns every model once, those of 001 Figure 11 observed during training."""
    task = RollingArgmax(samples=300, test_samples=200) if scale == "tiny" else RollingArgmax()
    runs = training_runs("rolling-argmax", scale, [task], MODELS, training)
    return [_observed(run) if run.model.name in OBSERVED and run.model.size == "001" else run for run in runs]


def _observed(run: TrainingRun) -> ObservedRun:
    settings = {"suite": run.suite, "seed": run.seed, "scale": run.scale, "role": run.role}
    return ObservedRun(**settings, task=run.task, model=run.model, training=run.training, observed=NEAR)  # type: ignore[arg-type]


def training(scale: Scale, task: Task, model: Choice) -> Training:
    """Chooses settings by the validation loss; the papers print none for this task."""
    if scale == "tiny":
        return Training(epochs=2, batch_size=100, learning_rate=0.01)
    epochs = 1000 if scale == "paper" else 15 if model.name.startswith("transformer") else 40
    if scale == "default" and model.name == "rnn-relu":
        epochs = 20
    return Training(epochs=epochs, batch_size=100, learning_rate=1.0 if model.name == "logistic" else 0.01)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    sentences = [
        "The label is the argmax of a linear map, the identity, and a model without biases gives the same answer "
        "at every scale: f(au) = a f(u) for a > 0 has the same largest entry. Under a shift of scale its accuracy "
        "cannot change but by the draw of the samples.",
    ]
    for model, title in TITLES.items():
        inside, far = (median_of(records, "rolling-argmax", model, "accuracy", at) for at in (None, FAR))
        if inside is not None and far is not None:
            sentences.append(
                f"{title}: accuracy {inside:.3f} in distribution, {far:.3f} at k = {FAR:g} (medians)."
            )
    return sentences


def _thresholds() -> tuple[Threshold, ...]:
    thresholds = []
    for model, title in (("implicit-rnn", "implicitRNN"), ("implicit", "regular implicit model")):
        for at in LEVELS:
            measure = Measure("accuracy", model, "rolling-argmax", at, "001")
            claim = f"The {title} of 001 is right in 94 % at k = {at:g}."
            thresholds.append(Threshold(claim, measure, "at least", 0.94))
        spread = Measure("accuracy", model, "rolling-argmax", size="001")
        claim = f"The accuracy of the {title} of 001 varies by 3 % at most from k = 1 to 1e5."
        thresholds.append(Threshold(claim, spread, "at most", 0.03, across=LEVELS))
    for at in (10.0, 1e2, 1e5):
        measure = Measure("accuracy", "lstm", "rolling-argmax", at, "001")
        claim = f"The LSTM of 001 is right in 30 % at most at k = {at:g}."
        thresholds.append(Threshold(claim, measure, "at most", 0.3))
    return tuple(thresholds)


SUITE = Suite(
    name="rolling-argmax",
    title="The rolling argmax",
    claim="Implicit models find the largest element of a sequence whatever its scale, better than the LSTM, which "
    "fails outside the training range, and than transformers, which are shown the label of the step before.",
    papers=("000 Figure 4", "001 Figure 5", "001 Figure 11", "002 Figure 5", "003 Figure 5.8"),
    plan=plan,
    seeds={"tiny": 2, "default": 5, "paper": 5},
    figures=(
        Figure(
            "Accuracy at the last step under shift",
            ("rolling-argmax",),
            "accuracy",
            "k, test inputs from U(0, k)",
            paper="001 Figure 5 (right)",
            log="x",
            models=PUBLISHED,
        ),
        Figure(
            "Accuracy at k = 10 during training",
            ("rolling-argmax",),
            "accuracy",
            "epoch",
            over="epoch",
            log="",
            paper="000 Figure 4 (left), 001 Figure 11 (bottom)",
        ),
        Figure("Training loss", ("rolling-argmax",), "train_loss", "epoch", over="epoch", log="y"),
        Figure(
            "Accuracy of the controls under shift",
            ("rolling-argmax",),
            "accuracy",
            "k, test inputs from U(0, k)",
            log="x",
            models=(PUBLISHED[0], *TITLES),
        ),
    ),
    findings=findings,
    grid=(("learning_rate", (0.003, 0.01, 0.03)), ("batch_size", (100, 500))),
    thresholds=_thresholds(),
    floors=(Floor("validation_accuracy", "at least", 0.2),),  # chance is 0.1
    differs="1,000 epochs in batches of 100 and the step size are ours: none of them is published.",
)
