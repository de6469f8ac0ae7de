"""Multiscale equilibrium models and convolutional networks on CIFAR-10 under noise (004 section 4.1.2)."""

from collections.abc import Sequence

from wellposed.experiments.compare import JUDGED_SCALES
from wellposed.experiments.config import Scale
from wellposed.experiments.findings import median_of
from wellposed.experiments.noise_cifar_run import SOLVERS, CifarNoiseRun, Kind
from wellposed.experiments.record import Record
from wellposed.experiments.rules import Measure
from wellposed.experiments.run import Role
from wellposed.experiments.suite import Figure, Suite
from wellposed.experiments.thresholds import Threshold

DATA = "cifar10"
POINTS = (20.0, 10.0, 5.0, 0.0)
Settings = dict[str, object]
SETTINGS: dict[Scale, Settings] = {
    "tiny": {
        "narrow": 8,
        "side": 8,
        "images": 96,
        "epochs": 2,
        "batch_size": 32,
        "samples": 50,
        "points": (10.0,),
    },
    "default": {"side": 16, "images": 1_500, "epochs": 4, "batch_size": 50, "samples": 400, "points": (10.0,)},
    "paper": {"images": 40_000, "epochs": 12, "batch_size": 256, "samples": 10_000, "points": POINTS},
}


def plan(scale: Scale) -> list[CifarNoiseRun]:
    """Returns both networks, the equilibrium model with both solvers in the test; tiny runs are on digits."""

    def run(role: Role, model: Kind, depth: int, solver: str | None = None) -> CifarNoiseRun:
        return CifarNoiseRun(suite="noise-cifar", seed=0, scale=scale, role=role, model=model, depth=depth,
                             data="digits" if scale == "tiny" else DATA, solver=solver, **SETTINGS[scale])  # type: ignore[arg-type]  # fmt: skip

    deepest = 2 if scale == "tiny" else 4
    tested = [run("control", "mdeq", deepest, solver) for solver in SOLVERS]
    return [run("ours", "mdeq", deepest), *tested, run("baseline", "ffw", deepest)]


def findings(records: Sequence[Record]) -> list[str]:
    """Says how the models were trained beside what is published, and what noise does to each."""
    judged = [r for r in records if r.task == DATA and r.error is None]
    scales = {scale: [r for r in judged if r.scale == scale] for scale in JUDGED_SCALES}
    return [*(text for found in scales.values() for text in _told(found)), *_leads(scales)]


def _leads(scales: dict[str, list[Record]]) -> list[str]:
    """Says whether the lead of the equilibrium model outlasts a longer training."""
    told = []
    for scale, records in scales.items():
        ours, rival = (median_of(records, DATA, model, "accuracy", 10.0) for model in ("mdeq-4", "ffw-conv-4"))
        if ours is not None and rival is not None:
            told.append(f"{100 * (ours - rival):+.1f} at scale {scale}")
    if len(told) < 2:
        return []
    return [
        f"Lead of mdeq-4 over ffw-conv-4 at 10 dB in points: {' and '.join(told[::-1])}, which trains for longer."
    ]


def _told(judged: Sequence[Record]) -> list[str]:
    """Says this of the records of one scale."""
    sentences, settings = [], ("side", "epochs", "batch_size")
    seeds = {1: "one seed"}.get(count := len({r.seed for r in judged}), f"{count} seeds")
    seen = {(r.facts.get("images", 0), r.facts.get("tested", 0), *map(r.config.get, settings)) for r in judged}
    for images, tested, side, epochs, batch in sorted(seen):
        sentences.append(
            f"Trained on {images} images of {side} x {side} pixels, {epochs} epochs in batches of {batch}, and "
            f"tested on {f'{tested} images' if tested else 'images'} held out, {seeds}; published are 50000 "
            "images of 32 x 32, 100 epochs in batches of 24."
        )
    for model in ("mdeq-4", "mdeq-4-stochastic-unrolling", "ffw-conv-4"):
        found = {at: median_of(judged, DATA, model, "accuracy", at) for at in (None, *POINTS)}
        told = ", ".join(
            f"{'without noise' if at is None else f'at {at:g} dB'} {100 * value:.1f} %"
            for at, value in found.items()
            if value is not None
        )
        if told:
            sentences.append(f"Accuracy of {model}: {told}.")
    return sentences


SUITE = Suite(
    name="noise-cifar",
    title="Noise on CIFAR-10",
    claim="Under noise a multiscale equilibrium model is more accurate than a deep convolutional network, and any "
    "solver will do.",
    papers=("004 section 4.1.2", "004 Figures 1 (e) and 6", "004 Tables 3 and 4"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=(
        Figure("Accuracy under noise", (DATA, "digits"), "accuracy", "signal-to-noise ratio in decibels",
               paper="004 Figures 1 (e) and 6", log=""),
        Figure("Steps of the solvers", (DATA, "digits"), "steps", "signal-to-noise ratio in decibels", log=""),
    ),
    findings=findings,
    thresholds=tuple(
        Threshold(f"The model {model} is at least 25 % accurate without noise, far above chance.",
                  Measure("accuracy", model, DATA), "at least", 0.25)
        for model in ("mdeq-4", "ffw-conv-4")
    ),
)  # fmt: skip
