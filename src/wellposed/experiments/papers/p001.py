"""001: The Extrapolation Power of Implicit Models."""

from collections.abc import Iterator

from wellposed.experiments.papers.late import SIZE, Places, late_rows
from wellposed.experiments.papers.names import MODELS, TASKS
from wellposed.experiments.papers.row import Row, Sheet, share
from wellposed.experiments.rules import Better, Measure

PLACES = Places(
    mathematics="section 3.1",
    forecasting="section 3.2",
    earthquake="section 3.3",
    analysis="section 4",
    identity="Figure 3",
    arithmetic="Figure 4",
    average="Figure 5 (left)",
    argmax="Figure 5 (right)",
    spikes="Figure 6",
    forecasts="Table 1",
    volatility="Figure 1",
    location="Figure 7 (left)",
    location_parts="Figure 7 (right)",
    steps_training="Figure 8 (left)",
    steps_shift="Figure 8 (middle and right)",
    feedback="Table 2",
    feedback_shift="Figure 10",
)

SHIFT = "The shift of 100 is in the caption of the same table in 003."
FEEDBACK: tuple[tuple[str, str, Better, float, float, float, str], ...] = (
    # task, metric, better, value with feedback, without, tolerance, note
    ("addition", "test_mse", "lower", 3.06, 4.07, 0.1, " The text has test losses below 1 for shifts below 100."),
    ("subtraction", "test_mse", "lower", 0.953, 1.80, 0.1, ""),
    ("rolling-argmax", "accuracy", "higher", share(93.7), share(91.8), 0.02, ""),
    ("rolling-average", "test_mse", "lower", 1e-4, 1e-3, 0.5, " Only the power of ten is printed."),
)

SHAPES = (  # task, model, shape as printed, parameters of that shape
    ("identity", "mlp", "10-9-9-10 with biases", 289),
    ("identity", "implicit", "n=4 p=10 q=10", 196),
    ("addition", "mlp", "50-10-10-1 with biases", 631),
    ("addition", "implicit", "n=20 p=50 q=1", 1470),
    ("rolling-average", "lstm", "1-18-1 with biases", 1531),
    ("rolling-average", "implicit", "n=32 p=10 q=10", 1764),
    ("rolling-argmax", "lstm", "1-21-10 with biases", 2236),
    ("rolling-argmax", "implicit", "n=36 p=10 q=10", 2116),
    ("rolling-argmax", "implicit-rnn", "n=21 p=23 q=22 and a 22-to-10 layer", 2122),
    ("spiky", "lstm", "1-20-1 with biases", 1861),
    ("spiky", "implicit-rnn", "n=20 p=21 q=20 and a 20-to-1 layer", 1661),
    ("volatility", "lstm", "1-38-1 with biases", 6271),
    ("volatility", "mlp", "60-50-27-27-27-10-1 with biases", 6230),
    ("volatility", "implicit", "n=53 p=60 q=1", 6102),
    ("volatility", "implicit-rnn", "n=37 p=41 q=40 and a 40-to-1 layer", 6047),
)
HEAD = "Counted from the printed shape and the last layer that 000 names."
INPUTS = "The table prints 270 inputs, those of the task with 45 stations; the count is that of 30 inputs."


def counts() -> Iterator[Row]:
    sheet, place = Sheet("001", "parameters"), "Table 4"
    for task, model, shape, parameters in SHAPES:
        claim = f"On {TASKS[task]} the {MODELS[model]} has the shape {shape}."
        note = HEAD if "22-to-10" in shape else "Counted from the printed shape."
        yield sheet.count(place, claim, parameters, Measure("parameters", model, task, size=SIZE), note)
    yield from earthquake_counts(sheet, place)


def earthquake_counts(sheet: Sheet, place: str) -> Iterator[Row]:
    """Yields the counts that 001 Table 4 and 002 Table 1 print alike."""
    for model, parameters in (("eikonet", 42500), ("implicit", 42680)):
        claim = f"On earthquake location the {MODELS[model]} has {parameters:,} parameters."
        yield sheet.count(
            place, claim, parameters, Measure("parameters", model, "earthquake", size=sheet.paper), INPUTS
        )
    yield sheet.excluded(
        place,
        "On earthquake location the models have 270 inputs.",
        270,
        "The printed parameter counts belong to 30 inputs, the number of features given for this task.",
        "features",
    )


def feedback() -> Iterator[Row]:
    sheet = Sheet("001", "feedback")
    for task, metric, better, loops, none, tolerance, note in FEEDBACK:
        name = "accuracy" if metric == "accuracy" else "test MSE"
        for model, how, value in (("implicit", "with", loops), ("implicit-triangular", "without", none)):
            claim = f"The {name} of the implicit model {how} feedback on {TASKS[task]} at a shift of 100."
            measure = Measure(metric, model, task, 100)
            yield sheet.number("Table 2", claim, value, measure, better, tolerance, note=SHIFT + note)


def appendix() -> Iterator[Row]:
    yield Sheet("001", "activations").order(
        "Figure 11 (top and middle)",
        "On addition from U(1, 2) to U(2, 5) the MLP's test loss explodes and the implicit model's does not.",
        Measure("test_mse", "implicit", "hard-addition"),
        "mlp-relu",
        "lower",
    )
    yield Sheet("001", "rolling-argmax").order(
        "Figure 11 (bottom)",
        "At k = 10 the implicitRNN is about as accurate as in distribution.",
        Measure("accuracy", "implicit-rnn", "rolling-argmax", 10, SIZE),
        Measure("accuracy", "implicit-rnn", "rolling-argmax", size=SIZE),
        "higher",
        factor=0.95,
        note="About as accurate is read as a loss of at most 5 %.",
    )
    sheet = Sheet("001", "earthquake")
    for count, what, metric, note in (
        (30, "features", "features", "Five listed features of five stations make 25; the sixth is not named."),
        (720576, "training samples", "train_samples", "They are 80 % of the 900,720 of 002."),
        (20016, "test samples in each band", "test_samples", ""),
    ):
        claim = f"The earthquake task has {count:,} {what}."
        yield sheet.count("Table 3", claim, count, Measure(metric, "data", "earthquake"), note)


ROWS: tuple[Row, ...] = (*late_rows("001", PLACES), *counts(), *feedback(), *appendix())
