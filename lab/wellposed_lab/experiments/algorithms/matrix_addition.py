"""Matrix addition: learnt at one scale, tested at others, with noise in the state and without (004 Figure 18)."""

from collections.abc import Sequence

from wellposed_lab.config import Scale, Training
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Floor, Plateau
from wellposed_lab.experiments.algorithms.findings import independence_sentence
from wellposed_lab.experiments.algorithms.models import Design, Growth, Kind
from wellposed_lab.experiments.algorithms.run import AlgorithmRun
from wellposed_lab.experiments.algorithms.tasks import MatrixAddition
from wellposed_lab.report.findings import median_of

TASK = "matrix-addition"
WIDTH = 512  # 004 section E.4
MODELS: tuple[tuple[Role, Kind, float | None, str], ...] = (
    ("ours", "deq", None, "identity"),
    ("ours", "deq", 0.0, "identity"),
    ("baseline", "ffw", None, "relu"),
    ("baseline", "ffw", 0.0, "relu"),
)


def plan(scale: Scale) -> list[AlgorithmRun]:
    """Returns both models without and with noise."""
    tiny, paper = scale == "tiny", scale == "paper"
    task = MatrixAddition() if paper else MatrixAddition(samples=4_000, test_samples=500)
    if tiny:
        task = MatrixAddition(side=3, samples=64, test_samples=8, points=(1.0, 500.0))
    training = Training(epochs=1 if tiny else 30 if paper else 5, batch_size=100, learning_rate=1e-3, clip=1.0)

    def run(role: Role, kind: Kind, noise: float | None, projection: str) -> AlgorithmRun:
        entries = task.side**2
        design = Design(kind, "dense", 2 * entries, 16 if tiny else WIDTH, entries, Growth(0, 40), trained=12,
                        projection=projection)  # fmt: skip
        return AlgorithmRun(suite=TASK, seed=0, scale=scale, role=role, task=task, design=design,
                            training=training, noise=noise, probed=(1.0, 500.0))  # fmt: skip

    return [run(*model) for model in MODELS]


def findings(records: Sequence[Record]) -> list[str]:
    """Says how far the errors are from those of the answer zero."""

    def relative(model: str, at: float) -> float | None:
        return median_of(records, TASK, model, "relative_mse", at)

    sentences = []
    for noise, said in (("", "without noise"), ("-noise-0db", "with noise of 0 dB in the state")):
        told = []
        for at in (0.1, 1.0, 10.0, 500.0):
            deq, ffw = (relative(f"{kind}{noise}", at) for kind in ("deq", "ffw"))
            if deq is not None and ffw is not None:
                told.append(f"{deq:.3g} and {ffw:.3g} at scale {at:g}")
        if told:
            sentences.append(
                f"Mean squared error of DEQ and FFW {said}, over the mean square of the sums, which is the error "
                f"of the answer zero: {', '.join(told)}."
            )
    return [*sentences, *independence_sentence(records, TASK, (1.0, 500.0), "scale")]


SUITE = Suite(
    name=TASK,
    title="Matrix addition",
    claim="With noise in the state an equilibrium model that learnt to add matrices of scale 1 has a lower error "
    "at other scales than a feed-forward network.",
    papers=("004 section D.4", "004 section E.4", "004 Figure 18 (c)"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=(
        Figure("Error over the scale", (TASK,), "test_mse", "scale", paper="004 Figure 18 (c)",
               quantity="mean squared error"),
        Figure("Error over the scale, relative", (TASK,), "relative_mse", "scale",
               quantity="mean squared error over the mean square of the sums"),
        Figure("Error under noise in the state", (TASK,), "noisy_test_mse", "signal-to-noise ratio in decibels",
               log="y", quantity="mean squared error at scale 1"),
    ),
    findings=findings,
    floors=(Floor("relative_mse", "at most", 0.95, at=1.0),),  # one is that of the answer zero
    plateaus=(  # the entries of a sum have a mean square of 2/3 of the squared scale
        Plateau("both are where zero would be", "test_mse", "at least", 0.95 * 2 / 3 * 500**2, at=500),
    ),
    differs="30 epochs in batches of 100 are ours: neither is published.",
)  # fmt: skip
