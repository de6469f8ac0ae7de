"""002: Towards Efficient and Robust Out-of-Distribution Deep Learning with Implicit Models."""

from collections.abc import Iterator

from wellposed.experiments.papers.early import OPERATIONS, Places, early_rows
from wellposed.experiments.papers.late import BANDS, location_rows
from wellposed.experiments.papers.names import MODELS
from wellposed.experiments.papers.p000 import counts
from wellposed.experiments.papers.p001 import earthquake_counts
from wellposed.experiments.papers.row import Row, Sheet, share
from wellposed.experiments.rules import Measure

PLACES = Places(
    text="section 3.2",
    related="section 2",
    identity="Figure 2",
    training="Figure 3",
    arithmetic="Figure 4",
    argmax="Figure 5",
    sequences="Figure 6",
    activations="Table 2",
    hard="Table 3",
    epochs="Figure 10",
)
LEAK = (
    "Stations are fixed for each epicentre, so a random split puts every test epicentre into training too; on new "
    "epicentres the error is far larger."
)
SWAPPED = (
    "{} is the count of one layer of width {} with feed-forward 2,048 and a 50-to-1 read-out: this count and the "
    "other encoder's look swapped, or their heads."
)


def arithmetic_counts() -> Iterator[Row]:
    """Yields the counts of Table 1 that 000 does not print; every operation has the same models."""
    sheet, place = Sheet("002", "parameters"), "Table 1"
    yield sheet.excluded(
        place,
        "On arithmetic the MLP 50-10-10-1 has 1,497 parameters.",
        1497,
        "With biases a 50-10-10-1 network has 631 parameters; 1,497 is the count of 50-17-17-17-1.",
        "parameters",
    )
    cases = (
        ("nalu", 1530, "The printed shape 50-10-10-1 has 1,830; 1,530 is the count of 50-10-1."),
        ("transformer-encoder-sequential", 6208, SWAPPED.format("6,208", 1)),
        ("transformer-encoder-depthwise", 217349, SWAPPED.format("217,349", 50)),
    )
    for model, count, note in cases:
        claim = f"On arithmetic the {MODELS[model]} has {count:,} parameters."
        yield sheet.count(place, claim, count, Measure("parameters", model, OPERATIONS[0], size="002"), note)


def earthquake() -> Iterator[Row]:
    sheet, place = Sheet("002", "earthquake"), "section 4.3"
    losses = {model: Measure("test_mse", model, "earthquake-random-split") for model in ("eikonet", "implicit")}
    for model, loss in (("eikonet", 1.73e-3), ("implicit", 1.98e-3)):
        claim = f"The in-distribution test loss of the {MODELS[model]}."
        yield sheet.number(place, claim, loss, losses[model], "lower", note=LEAK)
    claim = "In distribution EikoNet has a slightly lower test loss than the implicit model."
    note = "In 001 the implicit model is the better one by the same difference."
    yield sheet.order(place, claim, losses["eikonet"], "implicit", "lower", note=note)
    yield from location_rows(sheet, place, "Figure 8 (right)")
    claim = "At k = 9 the implicit model's test loss is below EikoNet's."
    measure = Measure("test_mse", "implicit", "earthquake", 9)
    yield sheet.order("Figure 8 (left)", claim, measure, "eikonet", "lower", note=BANDS)
    for where, count, what, metric, note in (
        ("section 4.2", 30, "features", "features", "Five listed features of five stations make 25."),
        (
            "section 4.2",
            900720,
            "training and validation samples",
            "samples",
            "This is 1,296 epicentres at 695 depths; the text says 1,295.",
        ),
        ("Table 1", 720576, "training samples", "train_samples", "They are 80 % of 900,720."),
        ("Table 1", 20016, "test samples in each band", "test_samples", ""),
    ):
        claim = f"The earthquake task has {count:,} {what}."
        yield sheet.count(where, claim, count, Measure(metric, "data", "earthquake"), note)


def fashion() -> Iterator[Row]:
    sheet, place = Sheet("002", "sparsify-fashion"), "section 5.2"
    dense, fitted = (Measure("accuracy", model, "fashion-mnist") for model in ("dense", "state-driven"))
    claim = "The network 784-64-32-16-10 is 82 % accurate on FashionMNIST."
    yield sheet.number(place, claim, share(82), dense, "higher", 0.02)
    yield sheet.number(
        place,
        "The implicit model fitted to its states on 500 samples is 81 % accurate.",
        share(81),
        fitted,
        "higher",
        0.02,
        note="Accuracy is lost if the ball holds rows of (A, B) and not of A, or if states are not rescaled.",
    )
    sheet = Sheet("002", "eliminate-fashion")
    features = Measure("features", "state-driven", "fashion-mnist")
    note = "These are 784 inputs and 112 hidden units."
    yield sheet.count(place, "There are 896 features before elimination.", 896, features, note)

    def drop(eliminated: float) -> Measure:
        return Measure("accuracy_drop", "state-driven", "fashion-mnist", eliminated)

    ranking = "Beyond the features certified to be zero this is a ranking and not a safe elimination."
    claim = "Eliminating 50 % of the features costs less than 1 % of accuracy."
    yield sheet.below(place, claim, share(1), drop(0.5), note=ranking)
    claim = "A loss of 5 % of accuracy occurs only after 95 % of the features are gone."
    yield sheet.below(place, claim, share(5), drop(0.95), note=ranking)
    claim = "Eliminating 90 % of the features costs about 2 % of accuracy."
    yield sheet.number("Figure 9 (left)", claim, share(2), drop(0.9), "lower", 0.25, note=ranking)


def stations() -> Iterator[Row]:
    sheet, place, task = Sheet("002", "eliminate-earthquake"), "section 5.2", "earthquake-stations"
    implicit, eikonet = (Measure("test_mse", model, task) for model in ("implicit", "eikonet"))
    yield sheet.number(place, "EikoNet's test MSE on the task with 45 stations.", 0.36, eikonet, "lower")
    yield sheet.number(
        place, "The implicit model's test MSE on the task with 45 stations.", 0.27, implicit, "lower"
    )
    claim = "With 45 stations the implicit model's test MSE is below EikoNet's."
    yield sheet.order(place, claim, implicit, eikonet, "lower")
    note = "These are 7 epicentres at 695 depths."
    count = Measure("train_samples", "data", task)
    yield sheet.count(place, "There are 4,865 training sources.", 4865, count, note)
    note = "These are 45 times 6 = 270 inputs and 4,480 hidden units, whose network is not described."
    count = Measure("features", "state-driven", task)
    yield sheet.count(place, "There are 4,750 features before elimination.", 4750, count, note)
    kappa = "The cap is printed as 1.0, at which an equilibrium need not exist."
    for eliminated, increase, where in ((30, 1.5e-2, "Figure 9 (right)"), (90, 4.0e-2, place)):
        claim = f"Eliminating {eliminated} % of the features raises the test MSE by {increase}."
        measure = Measure("test_mse_increase", "state-driven", task, share(eliminated))
        yield sheet.number(where, claim, increase, measure, "lower", 0.25, note=kappa)
    for name, degrees in (("longitude", 11), ("latitude", 2)):
        yield sheet.excluded(
            place,
            f"Eliminating 30 % of the features costs about {degrees} degrees of {name}.",
            degrees,
            "The angle is carried over from the extrapolation task because the losses differ by a similar amount.",
            "deg",
        )


ROWS: tuple[Row, ...] = (
    *early_rows("002", PLACES),
    *counts("002", "Table 1"),
    *arithmetic_counts(),
    *earthquake_counts(Sheet("002", "parameters"), "Table 1"),
    *earthquake(),
    *fashion(),
    *stations(),
)
