"""A calm series with sudden spikes, one step ahead (000 Figure 5, 001 Table 1 and Figure 6, 003 Table 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Context, Role, Run
from wellposed_lab.engine.store import Record, Result
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.engine.training import TrainingRun, training_runs
from wellposed_lab.report.findings import median_of
from wellposed_lab.tasks.sequences import Spiky
from wellposed_lab.tasks.task import Task

# The LSTM and the implicitRNN are the same networks in 000 and 001, so one run of each serves both.
RNN = Choice.of("implicit-rnn", readout_bias=True)
MODELS: list[tuple[Role, Choice]] = [
    ("ours", RNN),
    ("ours", Choice.of("implicit", kappa=0.5, solver="picard")),
    ("baseline", Choice("lstm")),
    ("baseline", Choice("transformer-spiky", "001")),
    ("baseline", Choice("transformer-spiky", "000")),
    ("control", Choice("linear")),
    ("control", Choice("mean")),
    ("control", Choice("persistence")),
    ("control", Choice("rnn-relu")),
]


CALM = ("implicit-rnn", "lstm", "linear")  # tried on the series of 000 too


@dataclass(frozen=True, kw_only=True)
class DataRun(Run):
    """Records the true values of the picture, to be drawn beside the predictions."""

    task: Spiky

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.task.name, "data", None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        values = self.task.test(self.seed)[1][self.task.excerpt(self.seed), 0].tolist()
        shown = {"prediction": [float(f"{value:.4g}") for value in values]} if self.seed == 0 else {}
        return [Result((), shown)]


class CalmRun(TrainingRun):
    """Trains on the series of 000 and 002, whose calm values have no noise."""

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return "spiky-calm", self.model.name, self.model.size


def plan(scale: Scale) -> list[Run]:
    """Returns every model once, those of 000 on its own series too, and the data themselves."""
    task = Spiky(samples=700, test_samples=400, regions=2) if scale == "tiny" else Spiky()
    data = DataRun(suite="spiky", seed=0, scale=scale, role="control", task=task)
    runs = training_runs("spiky", scale, [task], MODELS, training)
    without = [replace(run, task=replace(task, noise=0.0)) for run in runs if run.model.name in CALM]
    calm = [CalmRun(**{field.name: getattr(run, field.name) for field in fields(run)}) for run in without]
    return [*runs, *calm, data]


def training(scale: Scale, task: Task, model: Choice) -> Training:
    """Chooses settings by the validation loss; the papers print none for this task."""
    if scale == "tiny":
        return Training(epochs=2, batch_size=100, learning_rate=0.01)
    transformer = model.name.startswith("transformer")
    epochs = 1000 if scale == "paper" else 15 if transformer else 40
    careful = transformer or model.name == "implicit-rnn"
    return Training(epochs=epochs, batch_size=100, learning_rate=3e-3 if careful else 0.01)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    names = {
        "mean": "Predicting the mean of the training series",
        "persistence": "Repeating the last value",
        "linear": "A linear regression on the window, AR(10),",
    }
    published = {
        "mean": "; 001 prints 0.011 for its LSTM",
        "persistence": "; 001 prints 0.004 for its implicitRNN",
    }
    sentences = []
    for model, title in names.items():
        error = median_of(records, "spiky", model, "test_mse")
        if error is not None:
            sentences.append(f"{title} has a median test error of {error:.2g}{published.get(model, '')}.")
    sentences += [
        "Within a spiky region the series is a sum of four sines, which a linear recursion of eight values "
        "continues exactly: what remains is the noise, and the first values of every region.",
        *_peaks(records),
    ]
    return sentences


def _peaks(records: Sequence[Record]) -> list[str]:
    listed = []
    for model in ("implicit-rnn", "lstm", "linear", "persistence"):
        location, height = (
            median_of(records, "spiky", model, f"spike_{error}_error") for error in ("location", "magnitude")
        )
        if location is not None and height is not None:
            listed.append(f"{model} {location:.2g} points and {height:.2g}")
    if not listed:
        return []
    return [f"Errors of the peaks' place and height on the scale from 0 to 1 (medians): {', '.join(listed)}."]


def _error(model: str) -> Measure:
    return Measure("test_mse", model, "spiky")


SUITE = Suite(
    name="spiky",
    title="A series with spikes",
    claim="An implicitRNN predicts a series with sudden spikes with a third of the error of LSTM and transformer, "
    "and finds the places and heights of the spikes.",
    papers=("000 Figure 5", "001 Table 1", "001 Figure 6", "002 Figure 6", "003 Table 5.3"),
    plan=plan,
    seeds={"tiny": 2, "default": 5, "paper": 5},
    figures=(
        Figure("Test error", ("spiky",), "test_mse", "test error", log="y", paper="001 Table 1"),
        Figure("Test error within spiky regions", ("spiky",), "spike_mse", "test error", log="y"),
        Figure(
            "Predictions beside the data",
            ("spiky",),
            "prediction",
            "steps of a part of the test series",
            over="time",
            log="",
            paper="001 Figure 6",
        ),
        Figure("Training error", ("spiky",), "train_loss", "epoch", over="epoch", log="y"),
    ),
    findings=findings,
    grid=(("learning_rate", (0.003, 0.01, 0.03)), ("batch_size", (100, 500))),
    thresholds=(
        Threshold("The implicitRNN errs by 0.002 at most.", _error("implicit-rnn"), "at most", 0.002),
        Threshold(
            "The implicitRNN errs by a fifth of the mean predictor's error at most.",
            _error("implicit-rnn"),
            "at most",
            0.2,
            rival=_error("mean"),
        ),
        Threshold(
            "The implicitRNN errs by half of the last value's error at most.",
            _error("implicit-rnn"),
            "at most",
            0.5,
            rival=_error("persistence"),
        ),
    ),
    floors=(Floor("validation_mse", "at most", 0.0108),),  # the mean has 0.0109
    differs="1,000 epochs in batches of 100 and the step size are ours: none of them is published.",
)
