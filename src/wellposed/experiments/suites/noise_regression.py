"""A regression under noise: equilibrium and feed-forward models on a bump (004 section D.1, Figures 7-9)."""

from collections.abc import Sequence

from wellposed.experiments.config import Scale, Training
from wellposed.experiments.findings import median_of
from wellposed.experiments.noise_models import WIDTHS, Pair
from wellposed.experiments.record import Record
from wellposed.experiments.regression_picture import PROJECTIONS, draw_errors
from wellposed.experiments.regression_run import RegressionRun
from wellposed.experiments.run import Role
from wellposed.experiments.suite import Figure, Picture, Suite
from wellposed.tasks.bump import BumpRegression

TASK = "bump-regression"
LAYERS = {"tiny": (1,), "default": (1, 3, 11), "paper": (1, 3, 5, 7, 9, 11)}
POINTS = (20.0, 10.0, 5.0, 0.0)
UNTRAINED = 0.1  # mean squared error; the variance of the function is about 0.5


def plan(scale: Scale) -> list[RegressionRun]:
    """Returns every pair with every input activation, and the feed-forward networks with Xavier's start too."""

    def run(role: Role, pair: Pair) -> RegressionRun:
        task = {
            "tiny": BumpRegression(samples=200, test_samples=50),
            "default": BumpRegression(samples=4_000),
            "paper": BumpRegression(),
        }[scale]
        points = (0.0,) if scale == "tiny" else POINTS
        return RegressionRun(suite="noise-regression", seed=0, scale=scale, role=role, task=task, pair=pair,
                             training=_training(scale, pair), points=points)  # fmt: skip

    runs = []
    for projection in PROJECTIONS:
        for layers in LAYERS[scale]:
            runs += [
                run("ours", Pair("deq", layers, projection=projection)),
                run("baseline", Pair("ffw", layers, projection=projection)),
                run("control", Pair("ffw", layers, xavier=True, projection=projection)),
            ]
    return runs


def _training(scale: Scale, pair: Pair) -> Training:
    """Returns 30 epochs for a DEQ and 64 for an FFW with batches of 16 (004 Tables 1 and 2), or less of it."""
    deq, ffw = {"tiny": (1, 1), "default": (1, 2), "paper": (30, 64)}[scale]
    return Training(epochs=deq if pair.kind == "deq" else ffw, batch_size=16, learning_rate=1e-3, schedule=None)


def findings(records: Sequence[Record]) -> list[str]:
    """Says how much the order of the two depends on where the weights of the feed-forward network start."""

    def mse(model: str, at: float | None = 0.0) -> float | None:
        return median_of(records, TASK, model, "test_mse", at)

    sentences = []
    wins = {"": [0, 0], "-xavier": [0, 0]}
    for projection in PROJECTIONS:
        told = []
        for layers, width in WIDTHS.items():
            deq = mse(f"deq-{width}-{projection}")
            rivals = {start: mse(f"ffw-{layers}{start}-{projection}") for start in wins}
            for start, rival in rivals.items():
                if deq is not None and rival is not None:
                    wins[start][0] += deq < rival
                    wins[start][1] += 1
            if deq is not None and None not in rivals.values():
                count = f"{layers} layer" + ("s" if layers > 1 else "")
                told.append(f"{count} {deq:.3f}, {rivals['']:.3f} and {rivals['-xavier']:.3f}")
        if told:
            sentences.append(
                f"With {projection} input the mean squared error at 0 dB of the DEQ, the FFW with torch's and "
                f"with Xavier's start: {'; '.join(told)}."
            )
    (usual, of), (xavier, of_xavier) = wins[""], wins["-xavier"]
    if of:
        sentences.append(
            f"At 0 dB the DEQ has the lower median error in {usual} of {of} comparisons with torch's start of the "
            f"FFW and in {xavier} of {of_xavier} with Xavier's"
            + (", so part of the advantage is where the FFW starts." if xavier * of > usual * of_xavier else ".")
        )
    return sentences + _untrained(records)


def _untrained(records: Sequence[Record]) -> list[str]:
    """Says how many equilibrium models failed to learn the function at all."""
    clean = [record.value("test_mse") for record in records if record.model.startswith("deq") and not record.error]
    known = [value for value in clean if value is not None]
    bad = sum(not value <= UNTRAINED for value in known)
    return (
        [f"{bad} of {len(known)} DEQs did not learn: their error without noise is above {UNTRAINED}."]
        if bad
        else []
    )


SUITE = Suite(
    name="noise-regression",
    title="Noise in a regression",
    claim="In a regression under noise an equilibrium model has a lower error than a feed-forward network with as "
    "many weights, even a shallow one.",
    papers=("004 section D.1", "004 Figures 7-9"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=(
        Figure("Steps of the averaged rule", (TASK,), "steps", "signal-to-noise ratio in decibels", log=""),
    ),
    pictures=(
        Picture("Pairs under noise", draw_errors, "Medians over the seeds; the cell of the DEQ has as many "
                "weights as all layers of the FFW.", paper="004 Figures 7-9"),
    ),
    findings=findings,
)  # fmt: skip
