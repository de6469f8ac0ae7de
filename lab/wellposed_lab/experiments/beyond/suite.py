"""Tasks whose answer is an equilibrium: linear systems, quadratic programs and shortest paths."""

from collections.abc import Sequence

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.experiments.beyond.graphs import ShortestPath
from wellposed_lab.experiments.beyond.inversion import LinearSystem, QuadraticProgram
from wellposed_lab.experiments.beyond.run import BeyondRun
from wellposed_lab.report.findings import median_of
from wellposed_lab.tasks.task import Task

TASKS = ("linear-system", "quadratic-program", "shortest-path")
PROBE = {"linear-system": 20.0, "quadratic-program": 20.0, "shortest-path": 40.0}  # where steps are counted
TRAINED = {"linear-system": 5.0, "quadratic-program": 5.0, "shortest-path": 6.0}  # the hardest of the training
HARDEST = {"linear-system": 100.0, "quadratic-program": 100.0, "shortest-path": 80.0}
DEPTH, DEEP = 12, 48
SOLVED = 0.3  # below it ours has nothing to compare
MODELS: list[tuple[Role, str, int]] = [
    ("ours", "equilibrium", 0),
    ("baseline", "tied", DEPTH),
    ("baseline", "untied", DEPTH),
    ("baseline", "mlp", 0),
    ("control", "tied-deep", DEEP),
    ("control", "equilibrium-uncapped", 0),
    ("control", "equilibrium-linear", 0),
    ("control", "linear", 0),
]

NAMES = tuple(name for _, name, _ in MODELS)
CELLS = ("equilibrium", "tied", "tied-deep", "equilibrium-uncapped", "equilibrium-linear")


def tasks(scale: Scale) -> list[Task]:
    """Returns the three tasks."""
    if scale == "tiny":
        small = {"features": 4, "samples": 64, "test_samples": 16, "points": (5.0, 20.0)}
        graphs = ShortestPath(nodes=10, samples=32, test_samples=8, layers=(2, 4), points=(4.0, 20.0))
        return [LinearSystem(**small), QuadraticProgram(**small), graphs]  # type: ignore[arg-type]
    if scale == "paper":
        large = {"features": 20, "samples": 16_384, "test_samples": 512}
        graphs = ShortestPath(nodes=32, samples=4_096, points=(3.0, 6.0, 10.0, 20.0, 40.0, 80.0, 160.0))
        return [LinearSystem(**large), QuadraticProgram(**large), graphs]  # type: ignore[arg-type]
    return [LinearSystem(samples=2048), QuadraticProgram(samples=2048), ShortestPath(test_samples=32)]


def plan(scale: Scale) -> list[BeyondRun]:
    """Returns every model on every task; on linear systems our cell is linear in its state already."""
    return [
        BeyondRun(
            suite="beyond",
            seed=0,
            scale=scale,
            role=role,
            task=task,
            model=_choice(task, name, depth),
            training=training(scale, task, name),
            probe=float(task.points[-1] or 0) if scale == "tiny" else PROBE[task.name],
            steps=(1, 4, 16) if scale == "tiny" else BeyondRun.steps,
        )
        for task in tasks(scale)
        for role, name, depth in MODELS
        if (task.name, name) != ("linear-system", "equilibrium-linear")
    ]


def _choice(task: Task, name: str, depth: int) -> Choice:
    if name in ("mlp", "linear"):
        return Choice.of(name)
    channels = 4 if task.name == "shortest-path" else 8
    return Choice.of(name, channels=channels, depth=depth) if depth else Choice.of(name, channels=channels)


def training(scale: Scale, task: Task, name: str) -> Training:
    """Returns settings chosen among a few on seed 0, without a search."""
    paths = task.name == "shortest-path"
    batch, rate = (32, 0.1) if paths else (128, 0.01)
    if name == "mlp":
        batch, rate = 64, 1e-3
    epochs = {"tiny": 2, "default": 16, "paper": 30}[scale] * (4 if name == "mlp" and scale != "tiny" else 1)
    return Training(epochs=epochs, batch_size=batch, learning_rate=rate, clip=1.0)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what is due to the equilibrium, to tied weights and to depth."""
    sentences = [
        "Depth alone cannot do it. After k steps a node knows nothing of what is more than k edges away, and k "
        "linear steps with M have a worst relative error of at least about 2 q to the power k, where q is "
        "(s - 1)/(s + 1) and s the root of the condition number. Whatever its weights, such a network fails on "
        "inputs that are hard enough.",
        "All networks with a cell know the structure of the task: they multiply with M, or pass messages along "
        "edges and read off a logarithm. What they learn is the map; compared are ways to train and use it.",
    ]
    for task in TASKS:
        sentences += _on(records, task)
    return sentences


def _on(records: Sequence[Record], task: str) -> list[str]:
    at, inside = PROBE[task], TRAINED[task]

    def shares(metric: str, names: Sequence[str], point: float) -> str:
        medians = [(name, median_of(records, task, name, metric, point)) for name in names]
        return ", ".join(f"{name} {100 * value:.0f} %" for name, value in medians if value is not None)

    rows = [
        ("at {at:g}, beyond the training, the answers that are right (median)", "test_accuracy", NAMES, at),
        ("at {at:g}, the edge of the training", "test_accuracy", NAMES, inside),
        ("run to rest at {at:g}, whatever the training", "rest_accuracy", CELLS, at),
        ("samples whose equilibrium does not depend on the start, at {at:g}", "path_independent", CELLS, at),
    ]
    listed = [(text.format(at=point), shares(metric, names, point)) for text, metric, names, point in rows]
    sentences = [f"On {task}, {text}: {numbers}." for text, numbers in listed if numbers]
    return sentences + _running_longer(records, task) + _deep(records, task)


def _running_longer(records: Sequence[Record], task: str) -> list[str]:
    """Returns whether the tied network gains from more steps than it was trained with."""
    own, longer, ours = (
        median_of(records, task, name, metric, PROBE[task])
        for name, metric in (
            ("tied", "test_accuracy"),
            ("tied", "rest_accuracy"),
            ("equilibrium", "rest_accuracy"),
        )
    )
    if own is None or longer is None or ours is None or ours < SOLVED:
        return []
    if longer >= ours - 0.05:
        return [
            f"On {task} tied weights are what matters: the network of {DEPTH} steps, run to rest, does as well as "
            "the model that was trained at its equilibrium."
        ]
    change = "gains" if longer > own + 0.05 else "loses" if longer < own - 0.05 else "neither gains nor loses"
    return [
        f"On {task} tied weights are not enough: the network of {DEPTH} steps {change} when it is run to rest, "
        f"and stays {100 * (ours - longer):.0f} points below the model trained at its equilibrium. Its cell was "
        f"fitted to be right after that many steps, not at rest.{_best_steps(records, task)}"
    ]


def _best_steps(records: Sequence[Record], task: str) -> str:
    """Says what the tied network reaches if the number of its steps is chosen by looking at the answers."""
    accuracies = [(median_of(records, task, "tied", "steps_accuracy", float(n)), n) for n in BeyondRun.steps]
    known = [(value, n) for value, n in accuracies if value is not None]
    if not known:
        return ""
    best, steps = max(known)
    return f" With the number of steps that suits the test best, {steps}, it reaches {100 * best:.0f} %."


def _deep(records: Sequence[Record], task: str) -> list[str]:
    """Returns whether many unrolled steps do as well as the implicit function theorem, both run to rest."""
    sentences = []
    for at in (PROBE[task], HARDEST[task]):
        deep, ours = (median_of(records, task, name, "rest_accuracy", at) for name in ("tied-deep", "equilibrium"))
        if deep is None or ours is None or max(deep, ours) < SOLVED:
            continue
        better = "as well as" if abs(deep - ours) <= 0.05 else "better than" if deep > ours else "worse than"
        sentences.append(
            f"On {task} at {at:g} a network trained through {DEEP} tied steps and run to rest does {better} the "
            f"model trained at its equilibrium, {100 * deep:.0f} % against {100 * ours:.0f} %."
        )
    return sentences


def _thresholds() -> tuple[Threshold, ...]:
    """Returns what every seed has to reach; the figures show how far beyond the training it goes."""
    thresholds = []
    for task in TASKS:
        far = 20.0 if task == "shortest-path" else 10.0
        thresholds += [
            Threshold(
                f"On {task} the equilibrium is mostly right at {far:g}; the training ends at {TRAINED[task]:g}.",
                Measure("test_accuracy", "equilibrium", task, at=far),
                "at least",
                0.7,
            ),
            Threshold(
                f"On {task} a linear regression fails within the training already.",
                Measure("test_accuracy", "linear", task, at=TRAINED[task]),
                "at most",
                0.2,
            ),
            Threshold(
                f"On {task} the equilibrium does not depend on the start, as certified.",
                Measure("path_independent", "equilibrium", task, at=PROBE[task]),
                "at least",
                1.0,
            ),
        ]
    return tuple(thresholds)


SUITE = Suite(
    name="beyond",
    title="Beyond linear targets",
    claim="Where the answer itself is a fixed point, a model trained at its equilibrium keeps solving problems "
    "that are harder than those it was trained on, given more steps; no linear model and no network of fixed "
    "depth does.",
    papers=(),
    plan=plan,
    seeds={"tiny": 1, "default": 5, "paper": 5},
    figures=(
        Figure(
            "Accuracy against the steps at test time",
            TASKS,
            "steps_accuracy",
            "plain steps from zero (condition 20; 40 layers)",
            log="x",
            quantity="share of right answers",
        ),
        Figure(
            "Accuracy under a shift of difficulty",
            TASKS,
            "test_accuracy",
            "condition number, or layers of the graph",
            log="x",
            quantity="share of right answers",
        ),
        Figure(
            "Accuracy when run to rest",
            TASKS,
            "rest_accuracy",
            "condition number, or layers of the graph",
            log="x",
            quantity="share of right answers",
        ),
        Figure(
            "Error under a shift of difficulty", TASKS, "test_error", "condition number, or layers of the graph"
        ),
        Figure(
            "Share of path-independent samples",
            TASKS,
            "path_independent",
            "condition number, or layers of the graph",
            log="x",
        ),
        Figure("Steps until rest", TASKS, "steps", "condition number, or layers of the graph"),
        Figure("Training error", TASKS, "train_loss", "epoch", over="epoch", log="y"),
    ),
    findings=findings,
    thresholds=_thresholds(),
    differs="No paper has run this; all settings are ours.",
)
