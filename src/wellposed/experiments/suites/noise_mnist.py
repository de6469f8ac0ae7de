"""Equilibrium and feed-forward models on MNIST under noise (004 sections 3.3, 4.1 and D.2)."""

from collections.abc import Callable, Sequence
from typing import Literal

from wellposed.experiments.config import Scale
from wellposed.experiments.findings import median_of
from wellposed.experiments.noise_models import TOTALS, Kind, Pair
from wellposed.experiments.noise_run import NoiseRun
from wellposed.experiments.papers.p004 import WIDTHS
from wellposed.experiments.record import Record
from wellposed.experiments.rules import Measure
from wellposed.experiments.run import Role
from wellposed.experiments.suite import Figure, Suite
from wellposed.experiments.thresholds import Threshold

DATA = "mnist"
NOISES = (None, 10.0, 0.0)  # of the training, in decibels
POINTS = (20.0, 10.0, 5.0, 0.0)  # of the test
DEFAULT = {None: (1, 3, 5, 9, 11, 13), 10.0: (1, 3, 13), 0.0: (1, 3, 9, 13)}  # layers by training noise
Settings = dict[str, object]
Make = Callable[..., NoiseRun]
HALVES: tuple[tuple[Role, Kind], ...] = (("ours", "deq"), ("baseline", "ffw"))


def plan(scale: Scale) -> list[NoiseRun]:
    """Returns every pair under every training noise, and the controls; tiny runs are on digits."""
    tiny, paper = scale == "tiny", scale == "paper"
    layers = {None: (1, 13), 10.0: (1,)} if tiny else dict.fromkeys(NOISES, tuple(WIDTHS)) if paper else DEFAULT

    def run(
        role: Role, pair: Pair, noise: float | None = None, jacobian: float = 0.0, passes: int = 1
    ) -> NoiseRun:
        settings: Settings = {"images": 12_000, "epochs": 5, "samples": 2_000, "points": POINTS, "batch_size": 100}
        if paper:  # 004 Tables 1 and 2: 30 epochs for the DEQ, 64 for the FFW, batches of 16
            epochs = 30 if pair.kind == "deq" else 64
            settings = {"images": 60_000, "epochs": epochs, "samples": 10_000, "points": POINTS, "batch_size": 16}
        if tiny:
            settings = {"images": 400, "epochs": 1, "samples": 60, "points": (0.0,)}
        return NoiseRun(suite="noise-mnist", seed=0, scale=scale, role=role, data="digits" if tiny else DATA,
                        pair=pair, noise=noise, jacobian=jacobian, passes=passes, **settings)  # type: ignore[arg-type]  # fmt: skip

    runs = [
        run(role, Pair(kind, count), noise) for noise in layers for count in layers[noise] for role, kind in HALVES
    ]
    if tiny:
        return [*runs, run("control", Pair("ffw", 13, inject=True), passes=2)]
    return runs + _controls(run)


def _controls(run: Make) -> list[NoiseRun]:
    """Returns what could explain a difference besides the equilibrium."""
    deep = [
        run("control", Pair("ffw", 13, inject=True)),
        run("control", Pair("ffw", 13, inject=True, wide=True)),
        run("control", Pair("ffw", 13, inject=True, tied=True)),
        run("control", Pair("ffw", 13, xavier=True)),
        run("control", Pair("ffw", 13, inject=True), 0.0),
        run("control", Pair("ffw", 13, xavier=True), passes=10),
    ]
    sized = [run("control", Pair("deq", layers, total=True)) for layers in TOTALS]
    jacobian = [run("control", Pair("deq", 9), jacobian=1.0), run("control", Pair("ffw", 9), jacobian=1.0)]
    return [*deep, *sized, *jacobian]


def controls(records: Sequence[Record]) -> list[str]:
    """Says from which depth on the DEQ leads, and which changes of the FFW take its lead away."""

    def accuracy(model: str, at: float | None = 0.0) -> float | None:
        return median_of(records, DATA, model, "accuracy", at)

    sentences = []
    for noise in ("", "-noise-10db", "-noise-0db"):
        leads = {n: median_of(records, DATA, f"deq-{w}{noise}", "accuracy_gain", 0.0) for n, w in WIDTHS.items()}
        known = {n: 100 * value for n, value in leads.items() if value is not None}
        if known:
            told = ", ".join(f"{n} {value:+.1f}" for n, value in known.items())
            trained = noise.removeprefix("-noise-").replace("db", " dB") or "no noise"
            sentences.append(f"Trained with {trained}, the lead of the DEQ at 0 dB in points, by layers: {told}.")
    deq = accuracy("deq-467")
    names = {
        "ffw-13": "as it is",
        "ffw-13-xavier": "with Xavier's start",
        "ffw-13-inject": "with the input in every layer",
        "ffw-13-inject-tied": "with the input and one weight for all layers",
        "ffw-13-inject-wide": "with the input and the width of the DEQ",
        "ffw-13-xavier-mean-10": "with Xavier's start and the mean of ten passes",
    }
    told = ", ".join(
        f"{how} {100 * value:.1f} %" for name, how in names.items() if (value := accuracy(name)) is not None
    )
    if deq is not None and told:
        sentences.append(
            f"Accuracy at 0 dB of the FFW of 13 layers: {told}; of the DEQ of width 467 {100 * deq:.1f} %."
        )
    sized = ", ".join(
        f"{layers} layers {100 * value:.1f} %"
        for layers, width in TOTALS.items()
        if (value := accuracy(f"deq-{width}")) is not None
    )
    if sized:
        sentences.append(f"A DEQ with as many parameters in all as the FFW has at 0 dB, against {sized}.")
    return sentences


def _thresholds() -> tuple[Threshold, ...]:
    def gain(width: int, limit: float, kind: Literal["at least", "at most"] = "at least") -> Threshold:
        layers = next(n for n, w in WIDTHS.items() if w == width)
        side = f"leads the FFW of {layers} layers by at least {100 * limit:g} points"
        if kind == "at most":
            side = f"is at least {-100 * limit:g} points behind the FFW of {layers} layers"
        measure = Measure("accuracy_gain", f"deq-{width}", DATA, 0)
        return Threshold(f"At 0 dB the DEQ of width {width} {side}.", measure, kind, limit)

    clean = Measure("accuracy", "deq-128", DATA)
    return (
        Threshold("The DEQ of width 128 is at least 93 % accurate without noise.", clean, "at least", 0.93),
        gain(128, -0.06, "at most"),
        gain(288, 0.02),
        gain(386, 0.12),
        gain(467, 0.20),
    )


SUITE = Suite(
    name="noise-mnist",
    title="Noise on MNIST",
    claim="Under noise an equilibrium model is more accurate than a deep feed-forward network with as many "
    "weights, and training with noise makes both better.",
    papers=("004 section 4.1", "004 Figures 1, 2 and 10-13"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=(
        Figure("Accuracy under noise", (DATA, "digits"), "accuracy", "signal-to-noise ratio in decibels",
               paper="004 Figures 10-12", log=""),
        Figure("Steps of the averaged rule", (DATA, "digits"), "steps", "signal-to-noise ratio in decibels",
               paper="004 Figure 5", log=""),
    ),
    controls=controls,
    thresholds=_thresholds(),
)  # fmt: skip
