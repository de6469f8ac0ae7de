"""Sparse fits to the MLP of 002 on FashionMNIST (002 section 5.2; the questions of 003 section 3.4)."""

from collections.abc import Sequence

from wellposed_lab.config import Scale
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.experiments.sparsify.findings import (
    MLA_SENTENCE,
    bound_sentences,
    drop_sentence,
    frontier_sentences,
    warm_sentence,
)
from wellposed_lab.experiments.sparsify.run import Part, SparsifyRun
from wellposed_lab.networks.trained import Dense

DATA = "fashion-mnist"
KAPPAS = (0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.99)
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
HALVINGS = (1.0, 2.0, 4.0, 6.0, 10.0)
SPEED_KAPPAS = (0.1, 0.5, 0.99)
LASSO = (0.7, 0.9)  # its strength is searched, which takes time
FRONTIER: tuple[tuple[Role, str], ...] = (
    ("ours", "state-driven"),
    ("ours", "state-driven-tuned"),
    ("baseline", "magnitude"),
    ("control", "magnitude-layerwise"),
    ("baseline", "magnitude-tuned"),
    ("baseline", "sss"),
    ("baseline", "spr"),
)


def plan(scale: Scale) -> list[SparsifyRun]:
    """Returns every method along every axis; tiny runs are on digits."""
    return sparsify_runs("sparsify-fashion", scale, Dense("digits", epochs=20) if scale == "tiny" else Dense(DATA))


def sparsify_runs(suite: str, scale: Scale, network: Dense) -> list[SparsifyRun]:
    """Returns the runs of a suite on some images."""
    tiny, few = scale == "tiny", network.data == "digits"
    shares = tuple(at for at in SHARES if at >= 0.05) if few else SHARES
    samples, every = (500, 1000) if few else (500, 5000)

    def run(
        part: Part,
        role: Role,
        model: str,
        points: Sequence[float] = (),
        samples: int = samples,
        level: float = 0.0,
    ) -> SparsifyRun:
        chosen = tuple(points[-1:] if tiny else points)
        epochs = 2 if not few else network.epochs // 2
        return SparsifyRun(suite=suite, seed=0, scale=scale, role=role, network=network, part=part, model=model,
                           points=chosen, samples=samples, epochs=epochs if part == "sparsity" else 0,
                           level=level)  # fmt: skip

    return [
        run("dense", "baseline", "dense", KAPPAS),
        run("kappa", "ours", "state-driven", KAPPAS, every),
        run("kappa", "control", "state-driven-row", KAPPAS, every),
        run("kappa", "control", "state-driven-literal", KAPPAS, every),
        *(run("sparsity", role, model, SPARSITIES, every) for role, model in FRONTIER),
        run("sparsity", "control", "state-driven-lasso", LASSO, every),
        run("data", "ours", "state-driven", shares),
        run("data", "ours", "state-driven-sparse", shares, level=0.9),
        *(run("iterations", "ours", f"kappa-{kappa:g}", HALVINGS, level=kappa) for kappa in SPEED_KAPPAS),
        run("speed", "ours", "warm-start", SPEED_KAPPAS),
        run("speed", "control", "cold-start", SPEED_KAPPAS),
        run("speed", "ours", "partial-data", SPEED_KAPPAS, level=0.2),
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    return sparsify_findings(records, DATA)


def sparsify_findings(records: Sequence[Record], data: str) -> list[str]:
    """Says what the controls show on some images."""
    return [
        *bound_sentences(records, data, 0.99),
        *drop_sentence(records, data, 0.9),
        *frontier_sentences(records, data, SPARSITIES),
        "Fits see some thousand images without their classes; SSS, SPR and training after pruning see all of them "
        "with their classes. SSS and SPR remove whole units, which is worth more at inference than single zeros.",
        *warm_sentence(records, data, SPEED_KAPPAS),
        MLA_SENTENCE,
    ]


def figures(data: str) -> tuple[Figure, ...]:
    """Returns the figures of a suite; tiny runs are always on digits."""
    tasks = {ending: tuple(dict.fromkeys((data + ending, "digits" + ending))) for ending in
             ("", "-sparsity", "-data", "-iterations")}  # fmt: skip
    return (
        Figure("Accuracy at equal sparsity", tasks["-sparsity"], "accuracy", "share of zero weights", log=""),
        Figure("Accuracy under the cap", tasks[""], "accuracy", "kappa", paper="003 Table 3.1", log="x"),
        Figure("Sparsity under the cap", tasks[""], "sparsity", "kappa", paper="003 Table 3.1", log="x"),
        Figure("Part of the data", tasks["-data"], "accuracy", "share of the training images",
               paper="003 Figure 3.6", log="x"),
        Figure("Accuracy while Algorithm 1 runs", tasks["-iterations"], "accuracy", "halvings in every row",
               paper="003 Figure 3.2", log=""),
        Figure("Sweeps of Algorithm 1", tasks[""], "steps", "kappa", paper="003 Figure 3.4", log="y"),
    )  # fmt: skip


def thresholds(data: str) -> tuple[Threshold, ...]:
    """Returns what every seed has to reach."""
    caps = [Measure("accuracy_drop", "state-driven", data, kappa) for kappa in (0.3, 0.99)]
    sparse = Measure("accuracy_drop", "state-driven", f"{data}-sparsity", 0.9)
    return (
        *(Threshold(f"At kappa = {cap.at} the fit loses at most half a point of accuracy at its own equilibrium.",
                    cap, "at most", 0.005) for cap in caps),
        Threshold("With 90 % of the weights zero it loses at most 2 points.", sparse, "at most", 0.02),
    )  # fmt: skip


SUITE = Suite(
    name="sparsify-fashion",
    title="Sparse fits on FashionMNIST",
    claim="An implicit model fitted to the states of a trained network is as accurate as the network, on few "
    "samples and with few weights.",
    papers=("002 section 5.2", "003 section 3.4"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    figures=figures(DATA),
    findings=findings,
    thresholds=thresholds(DATA),
    differs="The questions of 003 are asked of the MLP of 002, whose training is not published.",
)
