"""The plots and tables of docs/concepts/extrapolation.md, from the committed records.

Every section of the page includes a file extrapolation-*.inc that is written here, with the plot beside it; one
whose records are missing says which command makes them.

Run: python -m benchmarks.figures.extrapolation [--out FOLDER]
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from wellposed_lab.engine.experiment import Figure
from wellposed_lab.engine.statistics import number
from wellposed_lab.engine.store import Record, Store
from wellposed_lab.experiments.depth.suite import TASKS as DEPTH_TASKS
from wellposed_lab.experiments.depth.suite import bias_steps
from wellposed_lab.experiments.mathematics.feedback import METRICS, RIVALS, conclusion, wins
from wellposed_lab.report.figures import draw
from wellposed_lab.report.findings import median_of
from wellposed_lab.tasks.task import Point

from benchmarks.harness import docs_folder

RESULTS = Path(__file__).parents[2] / "lab" / "results"

Records = list[Record]
Column = tuple[str, str, str, Point]  # heading, task, metric, point
SCALE_MODELS = {
    "implicit": "implicit model",
    "implicit-bias": "implicit, with a bias",
    "implicit-no-feedthrough": "implicit, without D",
    "implicit-no-feedback": "implicit, A = 0",
    "mlp": "MLP",
    "mlp-bias-free": "MLP without biases",
    "mlp-skip": "MLP with a linear skip",
    "linear": "linear regression",
}
TRANSLATION_MODELS = {
    "implicit": "implicit model",
    "implicit-no-feedthrough": "implicit, without D",
    "implicit-no-feedback": "implicit, A = 0",
    "mlp-relu": "MLP",
    "mlp-bias-free": "MLP without biases",
    "lstm": "LSTM",
    "lstm-normalised": "LSTM on normalised input",
    "linear": "linear regression",
}
ARGMAX_MODELS = {
    "implicit": "implicit model",
    "implicit-bias": "implicit, with a bias",
    "implicit-rnn": "implicitRNN",
    "lstm": "LSTM",
    "lstm-normalised": "LSTM on normalised input",
    "logistic": "logistic regression without bias",
}

BEYOND_MODELS = {
    "equilibrium": "trained at its equilibrium",
    "tied": "12 tied steps",
    "tied-deep": "48 tied steps",
    "untied": "12 layers",
    "equilibrium-uncapped": "equilibrium, no cap",
    "equilibrium-linear": "equilibrium, linear cell",
    "mlp": "MLP",
    "linear": "linear regression",
}
BEYOND_POINTS = {"linear-system": 20.0, "quadratic-program": 20.0, "shortest-path": 40.0}


def load(*suites: str) -> Records:
    """Reads the records of some suites; nothing where one was not run."""
    stores = [Store(RESULTS / f"{suite}.jsonl").records() for suite in suites]
    return [record for records in stores for record in records] if all(stores) else []


def table(records: Sequence[Record], models: Mapping[str, str], columns: Sequence[Column]) -> list[str]:
    """Writes medians over the seeds; models of which nothing is known are left out."""
    lines = [
        "| " + " | ".join(["", *(heading for heading, *_ in columns)]) + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for model, title in models.items():
        values = [median_of(records, task, model, metric, at) for _, task, metric, at in columns]
        if any(value is not None for value in values):
            lines.append("| " + " | ".join([title, *map(number, values)]) + " |")
    return lines


def picture(figure: Figure, records: Sequence[Record], models: Mapping[str, str], path: Path) -> list[str]:
    """Draws some models and returns the line that shows the plot."""
    chosen = [
        replace(record, model=models[record.model], size=None)
        for record in records
        if record.model in models and record.size in (None, "001")
    ]
    draw(figure, chosen, path)
    return ["", f"![{figure.title}]({path.name})", ""]


def scale(pages: Path) -> list[str]:
    """Writes the section on shifts of scale."""
    records = load("identity", "arithmetic")
    if not records:
        return missing("identity", "arithmetic")
    columns: list[Column] = [
        ("identity, k = 5", "identity", "test_mse", 5.0),
        ("identity, k = 205", "identity", "test_mse", 205.0),
        ("addition, k = 100", "addition", "test_mse", 100.0),
        ("subtraction, k = 100", "subtraction", "test_mse", 100.0),
    ]
    near, far = (median_of(records, "identity", "implicit", "test_mse", at) for at in (5.0, 205.0))
    growth = number(far / near) if near and far else "-"
    figure = Figure("Test error under a shift of scale", ("identity", "addition"), "test_mse", "k")
    return [
        *table(records, SCALE_MODELS, columns),
        "",
        f"From k = 5 to k = 205 the error of the implicit model on the identity grows by {growth} (its medians "
        f"over the seeds); homogeneity says {number((205 / 5) ** 2)}, but for the draw of the samples.",
        *picture(figure, records, SCALE_MODELS, pages / "extrapolation-scale.png"),
    ]


def argmax(pages: Path) -> list[str]:
    """Writes the section on the argmax."""
    records = load("rolling-argmax")
    if not records:
        return missing("rolling-argmax")
    columns: list[Column] = [
        (f"accuracy, k = {number(at)}", "rolling-argmax", "accuracy", at) for at in (1.0, 100.0, 1e5)
    ]
    figure = Figure("Accuracy under a shift of scale", ("rolling-argmax",), "accuracy", "k", log="x")
    shown = picture(figure, records, ARGMAX_MODELS, pages / "extrapolation-argmax.png")
    return [*table(records, ARGMAX_MODELS, columns), *shown]


def translation(pages: Path) -> list[str]:
    """Writes the section on translations."""
    records = load("activations", "rolling-average")
    if not records:
        return missing("activations", "rolling-average")
    columns: list[Column] = [
        ("addition, U(2, 5)", "hard-addition", "test_mse", None),
        ("subtraction, U(2, 5)", "hard-subtraction", "test_mse", None),
        ("rolling average, shift 100", "rolling-average", "test_mse", 100.0),
    ]
    figure = Figure(
        "Test error under a translation", ("rolling-average",), "test_mse", "shift of the mean", log="y"
    )
    own = [record for record in records if record.suite == "rolling-average"]
    return [
        *table(records, TRANSLATION_MODELS, columns),
        *picture(figure, own, TRANSLATION_MODELS, pages / "extrapolation-translation.png"),
    ]


def feedback(pages: Path) -> list[str]:
    """Writes the section on feedback."""
    records = load("feedback")
    if not records:
        return missing("feedback")
    heads = ("triangular, no cap", "triangular, same cap", "A = 0")
    lines = [
        "| at a shift of 100 | " + " | ".join(f"against {name}" for name in heads) + " | |",
        "|---" * 5 + "|",
    ]
    for task in METRICS:
        counts = {rival: wins(records, task, rival) for rival in RIVALS}
        known = {rival: count for rival, count in counts.items() if count is not None}
        if len(known) == len(RIVALS):
            cells = [f"{c.won} of {c.seeds} seeds, {number(c.ratio)}" for c in known.values()]
            lines.append("| " + " | ".join([task, *cells, conclusion(known)]) + " |")
    models = {
        "implicit": "full A",
        "implicit-triangular": "triangular, no cap",
        "implicit-triangular-capped": "triangular, same cap",
        "implicit-no-feedback": "A = 0",
    }
    figure = Figure("Test error with and without feedback", ("addition", "subtraction"), "test_mse", "k")
    return [*lines, *picture(figure, records, models, pages / "extrapolation-feedback.png")]


def depth(pages: Path) -> list[str]:
    """Writes the section on depth."""
    records = load("depth")
    if not records:
        return missing("depth")
    heads = ("absolute, c = 1", "c = 1e5", "slope", "1 / log(1 / rho)", "relative, c = 1", "c = 1e5", "cap 0.5")
    lines = ["| steps | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    wanted: tuple[tuple[str, str, Point], ...] = (
        ("implicit-absolute", "scaled_absolute", 1.0),
        ("implicit-absolute", "scaled_absolute", 1e5),
        ("implicit-absolute", "steps_slope", None),
        ("implicit-absolute", "predicted_slope", None),
        ("implicit-absolute", "scaled_relative", 1.0),
        ("implicit-absolute", "scaled_relative", 1e5),
        ("implicit-absolute-half", "scaled_absolute", 1.0),
    )
    for task in DEPTH_TASKS:
        values = [median_of(records, task, model, metric, at) for model, metric, at in wanted]
        lines.append("| " + " | ".join([task, *map(number, values)]) + " |")
    models = {
        "implicit-absolute": "cap 0.95",
        "implicit-absolute-half": "cap 0.5",
        "implicit-bias": "cap 0.95, with a bias",
    }
    pair = ("addition", "rolling-argmax")
    absolute = Figure(
        "Steps of the same inputs times c, absolute tolerance",
        pair,
        "scaled_absolute",
        "c",
        log="x",
        quantity="steps",
    )
    relative = Figure(
        "Steps of the same inputs times c, relative tolerance",
        pair,
        "scaled_relative",
        "c",
        log="x",
        quantity="steps",
    )
    inside = Figure(
        "Steps within the training distribution", pair, "steps_by_rate", "decile of rho", log="", quantity="steps"
    )
    return [
        *lines,
        *picture(absolute, records, models, pages / "extrapolation-depth-absolute.png"),
        *picture(relative, records, models, pages / "extrapolation-depth-relative.png"),
        *picture(inside, records, models, pages / "extrapolation-depth-inside.png"),
        *_spreads(records),
    ]


def _spreads(records: Sequence[Record]) -> list[str]:
    """Says how samples of one distribution, and scales of a model with a bias, differ."""
    lines = []
    for task in DEPTH_TASKS:
        names = ("steps_low", "steps_high", "rate_correlation", "error_correlation")
        values = [median_of(records, task, "implicit", name) for name in names]
        steps = bias_steps(records, task)
        if steps and None not in values:
            spread = max(steps) / min(steps) - 1
            low, high, rate, error = (value if value is not None else math.nan for value in values)
            lines.append(
                f"- {task}: {number(low)} to {number(high)} steps between the 5 % and the 95 % quantile; rank "
                f"correlation {rate:.2f} with rho, {error:.2f} with the error. With a bias the steps spread by "
                f"{100 * spread:.0f} % over the scales 1e-3 to 1e5."
            )
    return lines


def beyond(pages: Path) -> list[str]:
    """Writes the section on tasks for which an equilibrium matters."""
    records = load("beyond")
    if not records:
        return missing("beyond")
    columns: list[Column] = [
        (f"{task} at {number(at)}{end}", task, metric, at)
        for task, at in BEYOND_POINTS.items()
        for metric, end in (("test_accuracy", ""), ("rest_accuracy", ", at rest"))
    ]
    figure = Figure(
        "Right answers against steps at test time",
        tuple(BEYOND_POINTS),
        "steps_accuracy",
        "steps",
        log="x",
        quantity="share of right answers",
    )
    return [
        *table(records, BEYOND_MODELS, columns),
        *picture(figure, records, BEYOND_MODELS, pages / "extrapolation-beyond.png"),
    ]


def missing(*suites: str) -> list[str]:
    """Says how to make records that are not there."""
    commands = ", ".join(f"`wellposed run {suite}`" for suite in suites)
    return [f"*The records of this section are made by {commands}.*"]


SECTIONS: dict[str, Callable[[Path], list[str]]] = {
    "scale": scale,
    "argmax": argmax,
    "translation": translation,
    "feedback": feedback,
    "depth": depth,
    "beyond": beyond,
}


def write_sections(pages: Path) -> None:
    """Writes all sections and their plots into the folder of the page."""
    for name, write in SECTIONS.items():
        text = "\n".join(write(pages)).strip() + "\n"
        (pages / f"extrapolation-{name}.inc").write_text(text, encoding="utf-8")


def main() -> None:
    """Writes all sections."""
    write_sections(docs_folder(__doc__, __file__) / "concepts")


if __name__ == "__main__":
    main()
