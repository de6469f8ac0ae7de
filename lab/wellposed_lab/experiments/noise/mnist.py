"""Equilibrium and feed-forward models on MNIST under noise (004 sections 3.3, 4.1 and D.2)."""

from collections.abc import Callable
from typing import Literal

from wellposed_lab.config import Scale
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Picture, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.experiments.noise.differences import with_noise_differences
from wellposed_lab.experiments.noise.findings import (
    ALIKE,
    DATA,
    LEARNT,
    draw_depths,
    draw_sensitivity,
    noise_findings,
)
from wellposed_lab.experiments.noise.models import TOTALS, WIDTHS, Kind, Pair
from wellposed_lab.experiments.noise.run import NoiseRun

NOISES = (None, 10.0, 0.0)  # of the training, in decibels
POINTS = (20.0, 10.0, 5.0, 0.0)  # of the test
SWEEP = (20.0, 15.0, 10.0, 5.0, 0.0, -5.0)
DEFAULT = {None: (1, 3, 5, 9, 11, 13), 10.0: (1, 3, 13), 0.0: (1, 3, 9, 13)}  # layers by training noise
Settings = dict[str, object]
Make = Callable[..., NoiseRun]
LEADS = ("accuracy_gain", "averaged_gain", "sensitivity_ratio")
INJECT_LEADS = tuple(f"inject_{metric}" for metric in LEADS)
HALVES: tuple[tuple[Role, Kind], ...] = (("ours", "deq"), ("baseline", "ffw"))
SETTINGS: dict[Scale, Settings] = {
    "tiny": {"images": 400, "epochs": 1, "samples": 60, "points": (0.0,)},
    "default": {"images": 12_000, "epochs": 5, "samples": 2_000, "points": POINTS, "batch_size": 100},
    "paper": {"images": 60_000, "epochs": 30, "samples": 10_000, "points": SWEEP, "batch_size": 128},
}


def plan(scale: Scale) -> list[NoiseRun]:
    """Returns every pair under every training noise, and the controls; tiny runs are on digits."""
    tiny, paper = scale == "tiny", scale == "paper"
    layers = {None: (1, 3), 10.0: (1,)} if tiny else dict.fromkeys(NOISES, tuple(WIDTHS)) if paper else DEFAULT

    def run(
        role: Role, pair: Pair, noise: float | None = None, jacobian: float = 0.0, passes: int = 1, **other: object
    ) -> NoiseRun:
        return NoiseRun(suite="noise-mnist", seed=0, scale=scale, role=role, data="digits" if tiny else DATA,
                        pair=pair, noise=noise, jacobian=jacobian, passes=passes, **SETTINGS[scale] | other)  # type: ignore[arg-type]  # fmt: skip

    runs = [
        run(role, Pair(kind, count), noise) for noise in layers for count in layers[noise] for role, kind in HALVES
    ]
    if tiny:
        return [*runs, run("control", Pair("ffw", 13, inject=True), passes=2)]
    runs += _controls(run, tuple(WIDTHS) if paper else (9,))
    if paper:  # eq. 57 of 004 has the input in every layer, its analysis does not
        runs += [run("control", Pair("ffw", count, inject=True), noise) for noise in NOISES for count in WIDTHS]
        runs += _published(run)
    return list(dict.fromkeys(runs))


def _published(run: Make) -> list[NoiseRun]:
    """Returns the pairs with the epochs and batches of 004, without and with the input in every layer.

    The penalty on the layers of an FFW is their mean: their sum keeps nine layers from learning at all.
    """
    runs = []
    for noise in NOISES:
        for layers in WIDTHS:
            runs.append(run("ours", Pair("deq", layers), noise, epochs=30, batch_size=16))
            for inject in (False, True):
                role: Role = "control" if inject else "baseline"
                runs.append(run(role, Pair("ffw", layers, inject=inject), noise, epochs=64, batch_size=16))
    runs += [run("control", Pair("deq", layers), jacobian=1.0, epochs=30, batch_size=16) for layers in WIDTHS]
    for epochs, batch in ((64, 16), (30, 128)):
        runs.append(run("control", Pair("ffw", 9), jacobian=1 / 9, epochs=epochs, batch_size=batch))
    return runs


def _controls(run: Make, penalised: tuple[int, ...]) -> list[NoiseRun]:
    """Returns what could explain a difference besides the equilibrium.

    Args:
        run: makes a run.
        penalised: sizes of DEQs that are trained with the Jacobian penalty of 004 Table 1 too.
    """
    changed = [
        *(run("control", Pair("ffw", layers, inject=True)) for layers in (1, 5, 9, 13)),
        *(run("control", Pair("ffw", layers, xavier=True)) for layers in (9, 13)),
        run("control", Pair("ffw", 13, inject=True, wide=True)),
        run("control", Pair("ffw", 13, inject=True, tied=True)),
        run("control", Pair("ffw", 13, inject=True), 0.0),
        run("control", Pair("ffw", 13, xavier=True), passes=10),
    ]
    sized = [run("control", Pair("deq", layers, total=True)) for layers in TOTALS]
    jacobian = [run("control", Pair("deq", layers), jacobian=1.0) for layers in penalised]
    return [*changed, *sized, *jacobian, run("control", Pair("ffw", 9), jacobian=1.0)]


Side = Literal["at least", "at most"]


def _thresholds() -> tuple[Threshold, ...]:
    def lead(width: int, metric: str, limit: float, kind: Side = "at least") -> Threshold:
        layers = next(n for n, w in WIDTHS.items() if w == width)
        depth = "one layer" if layers == 1 else f"{layers} layers"
        start = " with Xavier's start" if metric == "xavier_gain" else ""
        side = f"leads the FFW of {depth}{start} by at least {100 * limit:g} points"
        if kind == "at most":
            side = f"is at least {-100 * limit:g} points behind the FFW of {depth}"
        measure = Measure(metric, f"deq-{width}", DATA, 0)
        return Threshold(f"At 0 dB the DEQ of width {width} {side}.", measure, kind, limit)

    def clean(model: str) -> Threshold:
        claim = f"The model {model} is at least {100 * LEARNT:g} % accurate without noise."
        return Threshold(claim, Measure("accuracy", model, DATA), "at least", LEARNT)

    def taught(width: int, limit: float) -> Threshold:
        claim = f"Training with 0 dB gains the DEQ of width {width} at least {100 * limit:g} points at 0 dB."
        return Threshold(claim, Measure("training_gain", f"deq-{width}-noise-0db", DATA, 0), "at least", limit)

    def ratio(layers: int, limit: float, kind: Side) -> Threshold:
        more = "more" if kind == "at least" else "less"
        depth = "one layer" if layers == 1 else f"{layers} layers"
        claim = f"Against {depth} the DEQ is {more} sensitive to noise than {limit:g} times the FFW."
        return Threshold(claim, Measure("sensitivity_ratio", f"deq-{WIDTHS[layers]}", DATA), kind, limit)

    accurate = [clean(model) for model in ("deq-128", "deq-467", "ffw-1", "ffw-9", "ffw-13-xavier")]
    leads = [lead(128, "accuracy_gain", -0.06, "at most"), lead(288, "accuracy_gain", 0.02)]
    leads += [lead(386, "accuracy_gain", 0.12), lead(467, "xavier_gain", 0.20)]
    ratios = [ratio(1, 1.2, "at least"), ratio(5, 0.8, "at most"), ratio(13, 0.6, "at most")]
    return (*accurate, *leads, taught(128, 0.06), taught(467, 0.02), *ratios)


def _figures() -> tuple[Figure, ...]:
    axis, tasks = "signal-to-noise ratio in decibels", (DATA, "digits")
    names = [f"deq-{width}" for width in WIDTHS.values()] + [f"ffw-{layers}" for layers in WIDTHS]
    trained = {"": "without noise", "-noise-10db": "with 10 dB", "-noise-0db": "with 0 dB",
               "-jacobian": "with a Jacobian penalty"}  # fmt: skip
    shown = [
        Figure(f"Accuracy under noise, trained {how}", tasks, "accuracy", axis, log="", alike=ALIKE,
               paper=f"004 Figure {10 + k}", models=tuple(name + ending for name in names))
        for k, (ending, how) in enumerate(trained.items())
    ]  # fmt: skip
    controls = tuple(
        f"ffw-13-{name}" for name in ("xavier", "xavier-mean-10", "inject", "inject-tied", "inject-wide")
    )
    steps = tuple(name for name in names if name.startswith("deq"))
    return (
        *shown,
        Figure("Accuracy of 13 layers under noise, trained without", tasks, "accuracy", axis, log="", alike=ALIKE,
               models=("deq-128", "deq-467", "ffw-13", *controls)),
        Figure("Steps of the averaged rule", tasks, "steps", axis, paper="004 Figure 5", log="", models=steps,
               alike=ALIKE),
    )  # fmt: skip


SUITE = Suite(
    name="noise-mnist",
    title="Noise on MNIST",
    claim="Under noise an equilibrium model is more accurate than a deep feed-forward network with as many "
    "weights, and training with noise makes both better.",
    papers=("004 section 4.1", "004 Figures 1, 2 and 10-13"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=_figures(),
    pictures=(
        Picture("Accuracy by depth", draw_depths, "Medians over seeds, at 0 dB.", "004 Figure 1 (a-c)"),
        Picture("Sensitivity and eigenvalues", draw_sensitivity, "Of models that were trained without noise.",
                "004 Figures 2 and 13"),
    ),
    findings=noise_findings,
    thresholds=_thresholds(),
    derived=with_noise_differences,
    floors=(
        Floor("accuracy", "at least", LEARNT),
        Floor("accuracy", "at least", LEARNT, judging=(*LEADS, *INJECT_LEADS)),  # of limits too
        Floor("twin_accuracy", "at least", LEARNT, side="the FFW of its size", judging=LEADS),
        Floor("inject_twin_accuracy", "at least", LEARNT, side="the FFW of its size with the input in every layer",
              judging=INJECT_LEADS),
    ),
    alike=ALIKE,
    differs="Beside the published epochs (30 and 64) and batches (16) there are shorter runs, 30 epochs in "
    "batches of 128, by which orders are judged where a side was not run as published, or did not learn.",
)  # fmt: skip
