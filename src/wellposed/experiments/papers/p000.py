"""000: On the Abilities of Mathematical Extrapolation with Implicit Models."""

from wellposed.experiments.papers.early import Places, early_rows
from wellposed.experiments.papers.names import MODELS, TASKS
from wellposed.experiments.papers.row import Row, Sheet
from wellposed.experiments.rules import Measure

PLACES = Places(
    text="section 4",
    related="section 2",
    identity="Figure 1",
    training="Figure 2",
    arithmetic="Figure 3",
    argmax="Figure 4",
    sequences="Figure 5",
    activations="Table 1",
    hard="Table 2",
    epochs="Figure 6",
)

TEN_OUTPUTS = "A single output gives 41,301; the count is that of 10 outputs."
ENCODER_DECODER = (
    "The layers behind it are not said; an encoder and a decoder layer of width 10 with feed-forward 10, final "
    "norms and a 1-to-10 embedding have this count."
)
COUNTS = (  # task, model, parameters, note
    ("identity", "mlp", 220, ""),
    (
        "identity",
        "transformer-encoder-single-head",
        43498,
        "One encoder layer of width 10 with feed-forward 2,048 has it.",
    ),
    ("rolling-average", "lstm", 42210, TEN_OUTPUTS),
    ("rolling-average", "implicit", 44100, ""),
    ("rolling-argmax", "implicit-rnn", 1870, "The 22-to-10 layer with its bias is included."),
    ("rolling-argmax", "lstm", 1872, ""),
    ("rolling-argmax", "transformer-decoder-masked", 1920, ENCODER_DECODER),
    ("rolling-argmax", "transformer-decoder-unmasked", 1920, ENCODER_DECODER),
    ("rolling-argmax", "implicit", 1849, ""),
    ("spiky", "implicit-rnn", 1661, "The 20-to-1 layer with its bias is included."),
    ("spiky", "transformer-spiky", 43529, "One layer of width 10 between a 1-to-10 and a 10-to-1 layer has it."),
    ("spiky", "lstm", 1861, ""),
)
REPEATED_COUNT = (
    "The figure repeats that of the LSTM, and one layer of width 10 with feed-forward 2,048 has 43,498 parameters."
)


def count(sheet: Sheet, place: str, task: str, model: str, parameters: int, note: str = "") -> Row:
    """Writes one parameter count."""
    claim = f"On {TASKS[task]} the {MODELS[model]} has {parameters:,} parameters."
    return sheet.count(place, claim, parameters, Measure("parameters", model, task, size=sheet.paper), note)


def counts(paper: str, place: str) -> tuple[Row, ...]:
    """Writes the parameter counts that 000 prints in its text and 002 in a table."""
    sheet = Sheet(paper, "parameters")
    rows = [count(sheet, place, *case) for case in COUNTS]
    claim = "On the rolling average the transformer encoder has 42,210 parameters."
    return (*rows, sheet.excluded(place, claim, 42210, REPEATED_COUNT, "parameters"))


ROWS: tuple[Row, ...] = (
    *early_rows("000", PLACES),
    count(Sheet("000", "parameters"), "section 3", "identity", "implicit", 196),
    *counts("000", "section 3"),
)
