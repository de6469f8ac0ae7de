"""What each way of training for robustness buys, in clean, attacked and certified accuracy (003 chapter 4)."""

from collections.abc import Sequence

from wellposed.experiments.certified_run import CertifiedRun, Recipe
from wellposed.experiments.config import Scale
from wellposed.experiments.findings import median_of
from wellposed.experiments.record import Record
from wellposed.experiments.rules import Measure
from wellposed.experiments.run import Role
from wellposed.experiments.suite import Figure, Suite
from wellposed.experiments.thresholds import Threshold

TASKS = ("digits-loops", "digits-layers")
POINTS = (0.02, 0.05, 0.1)
RECIPES: tuple[tuple[Role, Recipe, float], ...] = (  # the last: weight of a penalty
    ("control", "plain", 0.0),
    ("baseline", "norm-penalty", 1e-3),
    ("ours", "sensitivity-penalty", 3e-3),
    ("ours", "certified-interval", 0.0),
    ("ours", "certified-crown", 0.0),
    ("baseline", "adversarial", 0.0),
)
GUARANTEED = ("sensitivity-penalty", "certified-interval", "certified-crown")


def plan(scale: Scale) -> list[CertifiedRun]:
    """Returns every recipe on loops and on layers; the norm penalty needs a cap on A, which layers have not."""
    tiny = scale == "tiny"
    return [
        CertifiedRun(
            suite="certified-training",
            seed=0,
            scale=scale,
            role=role,
            loops=loops,
            recipe=recipe,
            penalty=penalty,
            epochs=2 if tiny else 40 if scale == "paper" else 20,
            states=10 if tiny else 40,
            hidden=(16,) if tiny else (64, 32),
            points=(0.05,) if tiny else POINTS,
            samples=40 if tiny else 355,
            programs=0 if tiny else 20,
        )
        for loops in (True, False)
        for role, recipe, penalty in RECIPES
        if loops or recipe != "norm-penalty"
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """Says what each recipe costs and buys."""
    sentences = [
        "The norm penalty (003 eq. 4.7, printed again as 4.9) asks for a cap on the rows of A, so it is tried on "
        "the model with loops only. Weights and the radius of training, 0.05, were set by trying a few on seed 0.",
    ]
    for task in TASKS:
        for _, recipe, _ in RECIPES:
            clean = median_of(records, task, recipe, "accuracy")
            found = [
                (
                    at,
                    *(
                        median_of(records, task, recipe, f"{kind}_accuracy", at)
                        for kind in ("certified", "attacked")
                    ),
                )
                for at in POINTS
            ]
            told = [
                f"{100 * proven:.1f} to {100 * left:.1f} % at {at:g}"
                for at, proven, left in found
                if proven is not None and left is not None
            ]
            if clean is not None and told:
                sentences.append(
                    f"On {task}, {recipe}: {100 * clean:.1f} % clean; robust accuracy lies from certified to "
                    f"attacked, {', '.join(told)} (medians)."
                )
    return sentences


def _thresholds() -> tuple[Threshold, ...]:
    found = []
    for task in TASKS:
        for _, recipe, _ in RECIPES:
            if task == "digits-layers" and recipe == "norm-penalty":
                continue
            for at in POINTS:
                claim = f"On {task} at {at:g} no sample of {recipe} is both proven and changed by an attack."
                found.append(Threshold(claim, Measure("certified_excess", recipe, task, at), "at most", 0.0))
            claim = f"On {task} {recipe} keeps a clean accuracy of 90 %."
            found.append(Threshold(claim, Measure("accuracy", recipe, task), "at least", 0.9))
        for proven in GUARANTEED:
            measure, plain = (Measure("certified_accuracy", name, task, 0.1) for name in (proven, "plain"))
            claim = f"On {task} {proven} certifies at least twice as many images at 0.1 as plain training."
            found.append(Threshold(claim, measure, "at least", 2.0, rival=plain))
    return tuple(found)


SUITE = Suite(
    name="certified-training",
    title="Training for robustness",
    claim="Penalties on how far outputs can move, and losses that are bounds, train models of which more can be "
    "proven, at little cost in clean accuracy.",
    papers=(),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    figures=(
        Figure("Certified accuracy", TASKS, "certified_accuracy", "epsilon", log="", quantity="share of images"),
        Figure("Attacked accuracy", TASKS, "attacked_accuracy", "epsilon", log="", quantity="share of images"),
    ),
    findings=findings,
    thresholds=_thresholds(),
)
