"""Mazes: learnt on 9 x 9, tested on up to 59 x 59, with and without noise in the state (004 Figure 18 b)."""

from collections.abc import Sequence

from wellposed_lab.config import Scale, Training
from wellposed_lab.engine.experiment import Figure, Picture, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Plateau
from wellposed_lab.experiments.algorithms.findings import accuracy_sentences, independence_sentence
from wellposed_lab.experiments.algorithms.models import Design, Growth, Kind
from wellposed_lab.experiments.algorithms.picture import draw_answers
from wellposed_lab.experiments.algorithms.run import AlgorithmRun
from wellposed_lab.experiments.algorithms.tasks import Mazes
from wellposed_lab.report.findings import median_of

TASK = "mazes"
CHANNELS = {"tiny": 8, "default": 16, "paper": 128}  # 128 in 004 section E.4
MODELS: tuple[tuple[Role, Kind, float | None], ...] = (
    ("ours", "deq", None),
    ("baseline", "ffw", None),
    ("baseline", "ffw", 0.0),
    ("ours", "deq", 0.0),
    ("control", "recurrent", None),
)
SHOWN = (9, 21, 59)


def plan(scale: Scale) -> list[AlgorithmRun]:
    """Returns the equilibrium and the feed-forward block without and with noise, and the block without recall.

    The published mazes have squares of two pixels; smaller scales take one, and fewer channels, and "default" has
    no controls.
    """

    def run(role: Role, kind: Kind, noise: float | None) -> AlgorithmRun:
        trained, truncated = (30, 12) if scale == "paper" else (10, 5)
        design = Design(kind, "recall", 3, CHANNELS[scale], 1, Growth(6, 20), trained, truncated)
        return AlgorithmRun(suite=TASK, seed=0, scale=scale, role=role, task=_task(scale), design=design,
                            training=_training(scale), noise=noise, starts=8,
                            probed=(5,) if scale == "tiny" else (9, 21, 37),
                            shown=(5, 9) if scale == "tiny" else SHOWN)  # fmt: skip

    return [run(*model) for model in MODELS if scale != "default" or model[0] != "control"]


def _task(scale: Scale) -> Mazes:
    if scale == "tiny":
        return Mazes(size=5, samples=32, test_samples=4, pixels=1, points=(5, 9))
    return Mazes(test_samples=50) if scale == "paper" else Mazes(samples=16_000, test_samples=20, pixels=1)


def _training(scale: Scale) -> Training:
    """Returns 3,000 updates with batches of 64 at the scale of the paper, else as many of 16."""
    if scale == "paper":
        return Training(epochs=4, batch_size=64, learning_rate=1e-3, clip=1.0)
    return Training(epochs=1 if scale == "tiny" else 3, batch_size=16, learning_rate=3e-3, clip=1.0)


def findings(records: Sequence[Record]) -> list[str]:
    """Says how much of the accuracy is in the paths, and what an equilibrium needs for large mazes."""
    names = {
        "deq": "the DEQ",
        "deq-noise-0db": "the DEQ with noise of 0 dB",
        "recurrent": "the block repeated without its input",
        "ffw": "the FFW",
        "ffw-noise-0db": "the FFW with noise of 0 dB",
    }
    sentences = accuracy_sentences(records, TASK, (9, 21, 59), names, "squares a side")
    empty = [median_of(records, TASK, "deq", "without_path", at) for at in (9, 59)]
    if sentences and None not in empty:
        small, large = (100 * (value or 0) for value in empty)
        sentences.append(
            f"Most pixels are off the path: to mark none is right in {small:.1f} % of them in mazes of size 9 and "
            f"in {large:.1f} % at 59."
        )
    return [*sentences, *independence_sentence(records, TASK, (9, 21, 37), "squares a side"), *_extent(records)]


def _extent(records: Sequence[Record]) -> list[str]:
    """Says how much smaller than the published ones these networks and images are."""
    found = next((r.config for r in records if r.model == "deq" and "design" in r.config), None)
    if found is None or found["design"]["channels"] == CHANNELS["paper"]:
        return []
    channels, pixels = found["design"]["channels"], found["task"]["pixels"]
    return [
        f"Here the block has {channels} channels and a square is {pixels} pixel wide; 004 has {CHANNELS['paper']} "
        "channels, and the published mazes squares of two pixels."
    ]


SUITE = Suite(
    name=TASK,
    title="Mazes",
    claim="An equilibrium model that learnt to solve mazes of 9 x 9 solves larger ones, and is more robust to "
    "noise in its state than a feed-forward network.",
    papers=("004 section D.4", "004 section E.4", "004 Figure 18 (b)"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=(
        Figure("Accuracy over the size", (TASK,), "accuracy", "size of the maze", paper="004 Figure 18 (b)",
               log="", quantity="share of pixels that are right"),
        Figure("Mazes that are solved", (TASK,), "solved", "size of the maze", log="",
               quantity="share of mazes without a wrong pixel"),
        Figure("Steps until the state is at rest", (TASK,), "steps", "size of the maze", log=""),
        Figure("Accuracy under noise in the state", (TASK,), "noisy_accuracy", "signal-to-noise ratio in decibels",
               log="", quantity="share of pixels that are right, at 9 x 9"),
    ),
    pictures=(
        Picture("Mazes and answers", draw_answers, "One maze of every size, the first seed."),
    ),
    findings=findings,
    plateaus=(Plateau("both are below what marking nothing has", "accuracy", "at most", "without_path"),),
    differs="3,000 updates: their published number is not known.",
)  # fmt: skip
