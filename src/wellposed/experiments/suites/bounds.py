"""Bounds of states and outputs by every method, on layers and on loops (003 Figure 4.3)."""

from collections.abc import Sequence

from wellposed.experiments.bounds_run import REACHED, TASKS, BoundsRun
from wellposed.experiments.config import Scale
from wellposed.experiments.findings import median_of
from wellposed.experiments.record import Record
from wellposed.experiments.rules import Measure
from wellposed.experiments.run import Role
from wellposed.experiments.suite import Figure, Suite
from wellposed.experiments.thresholds import Threshold

METHODS: tuple[tuple[Role, str], ...] = (
    ("ours", "crown"),
    ("ours", "optimised"),
    ("ours", "triangle"),
    ("baseline", "box"),
    ("baseline", "lp"),
    ("baseline", "interval"),
    ("baseline", "norm"),
    ("baseline", "l2"),
    ("control", "crown-one-pass"),
    ("control", REACHED),
)
NAMES = tuple(TASKS.values())
AT = 0.01


def plan(scale: Scale) -> list[BoundsRun]:
    """Returns every method on every model."""
    tiny = scale == "tiny"
    return [
        BoundsRun(
            suite="bounds",
            seed=0,
            scale=scale,
            role=role,
            network=network,
            method=method,
            points=(0.01,) if tiny else (0.01, 0.002, 0.05),
            samples=1 if tiny else 16 if scale == "paper" else 4,
            states=20 if tiny else 200 if scale == "paper" else 60,
            epochs=5 if tiny else 40,
        )
        for network in TASKS
        for role, method in METHODS
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """Says how the methods compare."""
    sentences = [
        "On layers interval propagation cannot be wider than the implicit box, whatever the weights: it adds the "
        "same |W| r in every layer and clips at zero afterwards. The figure of 003 shows the reverse.",
        "reached is no bound but what random points, corners and gradients found: no bound may be narrower.",
    ]
    for task in NAMES:
        for metric, what in (("width", "states"), ("output_width", "outputs")):
            found = [(name, median_of(records, task, name, metric, AT)) for _, name in METHODS]
            known = sorted((value, name) for name, value in found if value is not None)
            if known:
                told = ", ".join(f"{name} {value:.3g}" for value, name in known)
                sentences.append(
                    f"Mean width of the {what} on {task} at epsilon {AT:g} (median over seeds): {told}."
                )
    return sentences


def _over(name: str, rival: str, task: str, metric: str = "width") -> tuple[Measure, Measure]:
    return Measure(metric, name, task, AT), Measure(metric, rival, task, AT)


def _thresholds() -> tuple[Threshold, ...]:
    found = []
    for task in NAMES:
        for metric, what in (("width", "states"), ("output_width", "outputs")):
            for method in ("triangle", "crown"):
                one, other = _over(REACHED, method, task, metric)
                claim = f"On {task} nothing that was found leaves what {method} proves of the {what}."
                found.append(Threshold(claim, one, "at most", 1.0, rival=other))
        one, other = _over("crown", "interval", task)
        found.append(
            Threshold(f"On {task} CROWN is no wider than intervals.", one, "at most", 1.0 + 1e-9, rival=other)
        )
    one, other = _over("interval", "box", "state-bounds")
    found.append(
        Threshold("On layers intervals are no wider than the box.", one, "at most", 1.0 + 1e-9, rival=other)
    )
    for task in NAMES[1:]:
        one, other = _over("crown", "triangle", task, "output_width")
        claim = f"On {task} refined CROWN is within 1 % of the triangle LP."
        found.append(Threshold(claim, one, "at most", 1.01, rival=other))
    return tuple(found)


SUITE = Suite(
    name="bounds",
    title="Bounds on states and outputs",
    claim="Bounds from the implicit form enclose all states that a box of inputs can lead to; the linear program "
    "is tighter than the box.",
    papers=("003 Figure 4.3", "003 section 4.3"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    figures=(
        Figure(
            "Width of the states' bounds", NAMES, "width", "epsilon", paper="003 Figure 4.3", quantity="mean width"
        ),
        Figure("Width of the outputs' bounds", NAMES, "output_width", "epsilon", quantity="mean width"),
    ),
    findings=findings,
    thresholds=_thresholds(),
)
