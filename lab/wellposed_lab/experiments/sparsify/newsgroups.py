"""Sparse fits to a transformer on 20 Newsgroups, row by row (003 section 3.4)."""

from collections.abc import Sequence

from wellposed_lab.config import Scale
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.experiments.sparsify.findings import (
    cap_sentence,
    lead_sentences,
    loss_sentence,
    recorded_sentence,
    warm_sentence,
)
from wellposed_lab.experiments.sparsify.run import Part, SharedRun
from wellposed_lab.experiments.sparsify.texts import Newsgroups
from wellposed_lab.report.findings import median_of

NAME, DATA = "sparsify-newsgroups", "newsgroups"
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
TUNED = (0.9, 0.98)
KAPPAS = (0.005, 0.01, 0.05, 0.1, 0.5, 0.99)
SPEED_KAPPAS = (0.1, 0.5, 0.99)
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
HALVINGS = (1.0, 2.0, 4.0, 6.0, 10.0)
METHODS: tuple[tuple[Role, str, tuple[float, ...]], ...] = (
    ("ours", "state-driven", SPARSITIES),
    ("control", "state-driven-recorded", (0.8, 0.9, 0.95)),
    ("ours", "state-driven-tuned", TUNED),
    ("baseline", "magnitude", SPARSITIES),
    ("control", "magnitude-layerwise", SPARSITIES),
    ("baseline", "magnitude-tuned", TUNED),
    ("control", "dense-tuned", TUNED[:1]),
    ("baseline", "sss", (0.487, TUNED[0])),  # first the sparsity of 003 Table 3.2
    ("baseline", "spr", (0.505, TUNED[0])),
    ("baseline", "mla", (0.518, TUNED[0])),
)
RIVALS = ("sss", "spr", "mla")
KEPT = (
    "Sparse are the linear layers of the encoder: queries, keys, values, outputs and both layers of the "
    "feed-forward parts. Embeddings, normalisation, attention itself and the head stay. No cap is asked for: "
    "products of states in attention have no Lipschitz constant, and without a loop the network is well-posed "
    "anyway. One network serves all seeds, which differ in the texts drawn for fits and for training afterwards."
)
DISTILBERT = (
    "Not run: DistilBERT, whose weights are not part of the library; a folder distilbert in the data folder is "
    "used at scale paper."
)


def plan(scale: Scale) -> list[SharedRun]:
    """Returns every method along every axis; tiny runs are on generated texts, paper runs on DistilBERT too."""
    tiny = scale == "tiny"
    small = Newsgroups("topics", words=200, length=24, width=16, depth=1, epochs=30) if tiny else Newsgroups(DATA)
    samples = 64 if tiny else 512

    def run(part: Part, role: Role, model: str, points: Sequence[float], level: float = 0.0,
            network: Newsgroups = small) -> SharedRun:  # fmt: skip
        sparse = part == "sparsity"
        steps = (10 if tiny else 100) if model.endswith("tuned") or model in RIVALS else 0
        return SharedRun(suite=NAME, seed=0, scale=scale, role=role, network=network, part=part, model=model,
                         points=TUNED[:1] if tiny and sparse else tuple(points[-1:] if tiny else points),
                         path=(TUNED[:1] if tiny else SPARSITIES) if sparse else (), samples=samples,
                         steps=steps, level=level)  # fmt: skip

    large = Newsgroups(DATA, "distilbert")
    return [
        run("dense", "baseline", "dense", KAPPAS),
        run("level", "baseline", "dense", SPARSITIES),
        run("words", "control", "tfidf-logistic", KAPPAS),
        *(run("sparsity", role, model, points) for role, model, points in METHODS),
        run("kappa", "control", "state-driven-row", KAPPAS),
        run("data", "ours", "state-driven", SHARES, 0.8),
        *(run("iterations", "ours", f"kappa-{kappa:g}", HALVINGS, kappa) for kappa in SPEED_KAPPAS),
        run("speed", "ours", "warm-start", SPEED_KAPPAS),
        run("speed", "control", "cold-start", SPEED_KAPPAS),
        run("speed", "ours", "partial-data", SPEED_KAPPAS, 0.3),
        *(
            run("sparsity", role, model, points, network=large)
            for role, model, points in (METHODS[0], METHODS[3])
            if scale == "paper"
        ),
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the controls show."""
    return [
        *_words_sentence(records),
        KEPT,
        *loss_sentence(records, DATA, SPARSITIES),
        *lead_sentences(records, DATA, SPARSITIES, TUNED),
        *_further_sentence(records),
        *recorded_sentence(records, DATA, 0.9),
        *cap_sentence(records, DATA, KAPPAS),
        *_rivals_sentence(records),
        *warm_sentence(records, DATA, SPEED_KAPPAS),
        *([] if any(record.task.startswith(f"{DATA}-distilbert") for record in records) else [DISTILBERT]),
    ]


def _words_sentence(records: Sequence[Record]) -> list[str]:
    dense, words = (median_of(records, DATA, model, "accuracy") for model in ("dense", "tfidf-logistic"))
    if dense is None or words is None:
        return []
    order, end = ("below", ": this task does not need one") if dense < words else ("not below", "")
    return [
        f"The transformer, trained here on posts without headers, has an accuracy of {100 * dense:.1f} %, {order} "
        f"logistic regression on TF-IDF of words with {100 * words:.1f} %{end}."
    ]


def _further_sentence(records: Sequence[Record]) -> list[str]:
    further, dense = (
        median_of(records, f"{DATA}-sparsity", model, "accuracy", TUNED[0]) for model in ("dense-tuned", "dense")
    )
    if further is None or dense is None:
        return []
    return [
        f"Trained by as many steps more, the network goes from {100 * dense:.1f} % to {100 * further:.1f} %: "
        "that much of what training afterwards gains has nothing to do with zeros."
    ]


def _rivals_sentence(records: Sequence[Record]) -> list[str]:
    """Says what removing whole units costs, at the sparsities of 003 Table 3.2 and at 90 %."""
    reached = []
    for role, model, points in METHODS:
        values = [median_of(records, f"{DATA}-sparsity", model, "accuracy", at) for at in points]
        if role == "baseline" and model in RIVALS and all(value is not None for value in values):
            pairs = zip(points, values, strict=True)
            shares = [f"{100 * (value or 0):.1f} % without {100 * at:g} %" for at, value in pairs]
            reached.append(f"{model.upper()} {' and '.join(shares)} of the weights")
    if not reached:
        return []
    return [
        f"Rivals that remove whole units and train afterwards reach accuracies of {'; '.join(reached)}. Units are "
        "queries with their keys, values and hidden units. SSS and SPR are trained for 100 steps with their "
        "penalty; the weights of MLA's losses and its order of selection are ours."
    ]


def thresholds() -> tuple[Threshold, ...]:
    """Returns what every seed has to reach."""
    sparse = [Measure("accuracy_drop", "state-driven", f"{DATA}-sparsity", at) for at in (0.8, 0.9)]
    gap = Measure("largest_gap", "state-driven", f"{DATA}-sparsity", 0.9)
    return (
        Threshold("With 80 % of the weights zero the fit loses at most 2 points, without any training.", sparse[0],
                  "at most", 0.02),
        Threshold("With 90 % of the weights zero it loses at most 4 points.", sparse[1], "at most", 0.04),
        Threshold("At 90 % every row is proven optimal to a relative gap of 1e-9.", gap, "at most", 1e-9),
    )  # fmt: skip


SUITE = Suite(
    name=NAME,
    title="Sparse fits on 20 Newsgroups",
    claim="Rows fitted to what a transformer computes keep its accuracy with a fraction of the weights.",
    papers=("003 section 3.4",),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    one_network=True,
    figures=(
        Figure("Accuracy at equal sparsity",
               (f"{DATA}-sparsity", f"{DATA}-distilbert-sparsity", "topics-sparsity"), "accuracy",
               "share of zero weights", log=""),
        Figure("Accuracy under a cap on whole rows", (DATA, "topics"), "accuracy", "kappa", paper="003 Table 3.1",
               log="x"),
        Figure("Sparsity under a cap on whole rows", (DATA, "topics"), "sparsity", "kappa", paper="003 Table 3.1",
               log="x"),
        Figure("Part of the data", (f"{DATA}-data", "topics-data"), "accuracy", "share of the training texts",
               paper="003 Figure 3.7", log="x"),
        Figure("Accuracy while Algorithm 1 runs", (f"{DATA}-iterations", "topics-iterations"), "accuracy",
               "halvings in every row", paper="003 Figure 3.3", log=""),
        Figure("Sweeps of Algorithm 1", (DATA, "topics"), "steps", "kappa", paper="003 Figure 3.5", log="y"),
    ),
    findings=findings,
    thresholds=thresholds(),
    differs="A transformer trained here stands in for DistilBERT unless its weights are in the data folder; split "
    "and layers are not published.",
)  # fmt: skip
