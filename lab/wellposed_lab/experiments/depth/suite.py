"""How many steps an implicit model takes, and what decides it (000 section 4, 001 section 4 and Figure 8)."""

from collections.abc import Sequence
from typing import Any

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.statistics import rank_correlation
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.experiments.depth.run import SCALES, DepthRun
from wellposed_lab.report.findings import median_of
from wellposed_lab.tasks.mathematics import Addition, Identity, Subtraction
from wellposed_lab.tasks.sequences import RollingArgmax
from wellposed_lab.tasks.task import Task

TASKS = ("identity", "addition", "subtraction", "rolling-argmax")
CAP = 0.95
LIMIT = 300  # steps in training; the papers have a limit and do not print it
PAPERS: dict[str, Any] = {"solver": "picard", "stop": "absolute", "max_steps": LIMIT, "on_failure": "ignore"}
MODELS: list[tuple[Role, Choice]] = [
    ("ours", Choice.of("implicit-absolute", kappa=CAP, **PAPERS)),
    ("ours", Choice.of("implicit", kappa=CAP, solver="picard", max_steps=LIMIT, on_failure="ignore")),
    ("control", Choice.of("implicit-absolute-half", kappa=0.5, **PAPERS)),
    ("control", Choice.of("implicit-bias", kappa=CAP, solver="picard", max_steps=LIMIT, on_failure="ignore")),
]


def plan(scale: Scale) -> list[DepthRun]:
    """Returns every model on every task, observed where it was trained."""
    return [
        DepthRun(
            suite="depth",
            seed=0,
            scale=scale,
            role=role,
            task=task,
            model=model,
            training=training(scale, task),
            observed=task.points[0],
        )
        for task in tasks(scale)
        for role, model in MODELS
    ]


def tasks(scale: Scale) -> list[Task]:
    """Returns the tasks whose iterations the papers count."""
    samples, tests = (300, 200) if scale == "tiny" else (10_000, 3_000 if scale == "paper" else 1_000)
    kinds = (Identity, Addition, Subtraction, RollingArgmax)
    return [kind(samples=samples, test_samples=tests) for kind in kinds]


def training(scale: Scale, task: Task) -> Training:
    """Chooses settings by the validation loss of the suites of these tasks."""
    if scale == "tiny":
        return Training(epochs=2, batch_size=100, learning_rate=0.01)
    if scale == "paper":
        return Training(epochs=1000, learning_rate=0.01, schedule=None)
    if task.name == "rolling-argmax":
        return Training(epochs=20, batch_size=200, learning_rate=0.01)
    return Training(epochs=30, batch_size=500 if task.name == "identity" else 200, learning_rate=0.03)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what decides the number of steps."""
    sentences = [
        "Without a bias x(cu) = c x(u) for c > 0, and so for every iterate from x = 0: an input c times as large "
        "has a residual c times as large, and under an absolute tolerance it takes log(c) / log(1 / rho) steps "
        "more, rho the spectral radius of phi'(z) A, whatever was learnt. A relative tolerance removes the growth."
    ]
    for task in TASKS:
        sentences += _growth(records, task) + _level(records, task)
    sentences += _levels(records) + _worst_prediction(records)
    for task in TASKS:
        sentences += _difficulty(records, task) + _bias(records, task)
    return sentences


def _growth(records: Sequence[Record], task: str) -> list[str]:
    numbers = [
        median_of(records, task, "implicit-absolute", metric, at)
        for metric, at in (
            ("steps_slope", None),
            ("predicted_slope", None),
            ("scaled_absolute", 1.0),
            ("scaled_absolute", 1e5),
            ("scaled_relative", 1.0),
            ("scaled_relative", 1e5),
        )
    ]
    if any(number is None for number in numbers):
        return []
    fitted, predicted, near, far, calm, still = (f"{number:.4g}" for number in numbers)
    return [
        f"On {task} the same inputs times 1e5 take {far} steps instead of {near} under the absolute tolerance, "
        f"and {still} instead of {calm} under the relative one. The slope of the steps against log(c) is "
        f"{fitted}, and 1 / log(1 / rho), from the Jacobians alone, is {predicted}."
    ]


def _level(records: Sequence[Record], task: str) -> list[str]:
    wide, half = (median_of(records, task, f"implicit-absolute{end}", "steps") for end in ("", "-half"))
    rates = [median_of(records, task, f"implicit-absolute{end}", "predicted_slope") for end in ("", "-half")]
    if wide is None or half is None or rates[0] is None or rates[1] is None:
        return []
    return [
        f"On {task} the same model learns to take {wide:.3g} steps with a cap of {CAP} on A and {half:.3g} with "
        f"0.5, where 1 / log(1 / rho) is {rates[0]:.3g} and {rates[1]:.3g}."
    ]


def _levels(records: Sequence[Record]) -> list[str]:
    """Returns whether the level of the steps is that of the local rates, over all tasks and caps."""
    own = [r for r in records if r.model.startswith("implicit-absolute") and r.kind == "run" and r.error is None]
    pairs = [(r.value("steps"), r.value("predicted_slope")) for r in own]
    known = [(steps, rate) for steps, rate in pairs if steps is not None and rate is not None]
    if len(known) < 10:
        return []
    return [
        f"What sets the level is the local rate that training leaves in A, below its cap: of {len(known)} models "
        f"on all tasks the rank correlation of the steps and 1 / log(1 / rho) is "
        f"{rank_correlation(*zip(*known, strict=True)):.2f}."
    ]


def _worst_prediction(records: Sequence[Record]) -> list[str]:
    """Says how far the slope is from its prediction where it is furthest."""
    own = [r for r in records if r.model in ("implicit", "implicit-absolute") and r.kind == "run" and not r.error]
    ratios = {r.id: (r.value("steps_slope"), r.value("predicted_slope")) for r in own}
    known = {name: fitted / rate for name, (fitted, rate) in ratios.items() if fitted is not None and rate}
    if not known:
        return []
    name = max(known, key=lambda key: abs(known[key] - 1))
    worst = next(r for r in own if r.id == name)
    return [
        f"The prediction holds in the limit of many steps. It is furthest off, by a factor of {known[name]:.3g}, "
        f"in record {name} on {worst.task}, where a solve takes {worst.value('scaled_absolute', 1.0):.3g} steps, "
        "too few to have forgotten how it began."
    ]


def _difficulty(records: Sequence[Record], task: str) -> list[str]:
    names = ("steps_low", "steps_high", "rate_correlation", "error_correlation")
    low, high, rate, error = (median_of(records, task, "implicit", name) for name in names)
    if low is None or high is None or rate is None or error is None:
        return []
    return [
        f"Depth does adapt within the training distribution: on {task} 5 % of the samples take at most {low:.3g} "
        f"steps and 5 % at least {high:.3g}, by the same relative rule. The rank correlation of a sample's steps "
        f"is {rate:.2f} with its local rate rho and {error:.2f} with its error: the steps tell which states are "
        f"active, {'and little about' if abs(error) < 0.3 else 'and something of'} how hard the sample is."
    ]


def _bias(records: Sequence[Record], task: str) -> list[str]:
    steps = bias_steps(records, task)
    if not steps:
        return []
    spread = max(steps) / min(steps) - 1
    if spread < 0.05:
        return [
            f"On {task} the bias that is learnt is too small to matter: the steps vary by {100 * spread:.1f} %."
        ]
    return [
        f"A bias gives inputs a scale of their own: on {task} the steps of a model with one vary by "
        f"{100 * spread:.0f} % of their least number between c = 1e-3 and 1e5 under the relative rule, from "
        f"{steps[0]:.3g} to {steps[-1]:.3g}; they settle where the bias has become negligible."
    ]


def bias_steps(records: Sequence[Record], task: str) -> list[float]:
    """Returns the steps of the model with a bias at all scales under the relative rule; nothing if unknown."""
    steps = [median_of(records, task, "implicit-bias", "scaled_relative", at) for at in SCALES]
    known = [value for value in steps if value is not None]
    return known if len(known) == len(SCALES) else []


def _thresholds() -> tuple[Threshold, ...]:
    thresholds = []
    for task in TASKS:
        for model in ("implicit-absolute", "implicit"):
            spread, error, fitted, predicted = (
                Measure(metric, model, task)
                for metric in ("relative_spread", "homogeneity_error", "steps_slope", "predicted_slope")
            )
            which = f"{model} on {task}"
            claim = f"Under the relative rule the steps of {which} change by 5 % at most from scale 1 to 1e5."
            thresholds.append(Threshold(claim, spread, "at most", 0.05))
            claim = f"The outputs of {which} are homogeneous to 1e-10."
            thresholds.append(Threshold(claim, error, "at most", 1e-10))
            claim = f"Under the absolute rule the steps of {which} grow {{}} of the predicted slope."
            least, most = claim.format("by at least 95 %"), claim.format("by at most 105 %")
            thresholds.append(Threshold(least, fitted, "at least", 0.95, rival=predicted))
            thresholds.append(Threshold(most, fitted, "at most", 1.05, rival=predicted))
    return tuple(thresholds)


SUITE = Suite(
    name="depth",
    title="Adaptive depth",
    claim="An implicit model takes 4 steps on the identity, 15 on addition, 30 on subtraction and 175 on the "
    "rolling argmax, and takes more for inputs further from its training distribution: it grows in depth.",
    papers=("000 section 4", "001 Figure 8", "003 Figures 5.12-5.13"),
    plan=plan,
    seeds={"tiny": 2, "default": 5, "paper": 5},
    figures=(
        Figure(
            "Steps under shift, absolute tolerance",
            TASKS,
            "steps_absolute",
            "k, the scale of the test inputs",
            paper="001 Figure 8 (middle and right)",
            log="x",
            quantity="steps",
        ),
        Figure(
            "Steps under shift, relative tolerance",
            TASKS,
            "steps_relative",
            "k, the scale of the test inputs",
            log="x",
            quantity="steps",
        ),
        Figure(
            "Steps of the same inputs times c, absolute tolerance",
            TASKS,
            "scaled_absolute",
            "c",
            log="x",
            quantity="steps",
        ),
        Figure(
            "Steps of the same inputs times c, relative tolerance",
            TASKS,
            "scaled_relative",
            "c",
            log="x",
            quantity="steps",
        ),
        Figure(
            "Steps during training",
            TASKS,
            "steps",
            "epoch",
            over="epoch",
            paper="001 Figure 8 (left)",
            log="",
        ),
        Figure(
            "Accuracy during training",
            ("rolling-argmax",),
            "accuracy",
            "epoch",
            over="epoch",
            paper="001 Figure 8 (left)",
            log="",
        ),
        Figure("Test error during training", TASKS[:3], "test_mse", "epoch", over="epoch", log="y"),
        Figure(
            "Steps within the training distribution",
            TASKS,
            "steps_by_rate",
            "decile of the local rate, relative tolerance",
            log="",
            quantity="steps",
        ),
    ),
    findings=findings,
    grid=(("learning_rate", (0.003, 0.01, 0.03)),),
    thresholds=_thresholds(),
    differs="The caps on A, the limit of 300 steps and batches of 128 are ours, and 1,000 epochs but on the "
    "identity: none of them is published.",
)
