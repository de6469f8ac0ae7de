"""Features that can be removed, on FashionMNIST (002 section 5.2, Figure 9)."""

from collections.abc import Sequence

from wellposed_lab.config import Scale
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Role
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.experiments.sparsify.eliminate import EliminateRun
from wellposed_lab.networks.trained import Dense
from wellposed_lab.report.findings import median_of

DATA = "fashion-mnist"
POINTS = (0.25, 0.5, 0.75, 0.9, 0.95)
RUNS: tuple[tuple[Role, str, dict[str, object]], ...] = (
    ("ours", "state-driven", {}),
    ("ours", "state-driven-tuned", {"epochs": 2}),
    ("ours", "state-driven-5000", {"samples": 5000}),
    ("control", "share-order", {"order": "share"}),
    ("control", "random-order", {"order": "random"}),
    ("control", "certified", {"method": "certified", "support": "layered"}),
    ("baseline", "dual-literal", {"method": "dual-literal", "support": "layered"}),
)


def plan(scale: Scale) -> list[EliminateRun]:
    """Returns every order of removal; tiny runs are on digits."""
    network = Dense("digits", epochs=20) if scale == "tiny" else Dense(DATA)
    points = (0.5, 0.9) if scale == "tiny" else POINTS
    return [
        EliminateRun(
            suite="eliminate-fashion",
            seed=0,
            scale=scale,
            role=role,
            network=network,
            model=model,
            points=points,
            **options,  # type: ignore[arg-type]
        )
        for role, model, options in RUNS
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """Says how much the order of removal matters, and what is certified."""
    sentences = [
        "Of the 896 columns of (X, U) no row reads the 16 of the last layer; shares are of the other 880.",
    ]
    for at in (0.5, 0.9):
        drops = [median_of(records, DATA, m, "accuracy_drop", at) for m in ("state-driven", *ORDERS)]
        if all(drop is not None for drop in drops):
            ours, share, chance = (100 * drop for drop in drops if drop is not None)
            sentences.append(
                f"With {100 * at:g} % of the features gone in the order of the least rise of the misfit, accuracy "
                f"is {ours:.2g} points lower; in the order of the largest share {share:.2g}, in random order "
                f"{chance:.2g}."
            )
    certified = median_of(records, DATA, "certified", "certified")
    if certified is not None:
        sentences.append(
            f"Certified to be zero in every row that matters are {certified:g} features in the median; removing "
            "them changes no row of the solution of P(kappa). That solution caps (a, b), so it is sparse and not "
            "accurate; models are fitted again with a cap on a alone, and for that nothing is certified of inputs."
        )
    needed = median_of(records, DATA, "dual-literal", "needed_removed")
    if needed is not None:
        sentences.append(
            "The rule of 002 section 5.1, applied to the multipliers of an interior-point method, removes "
            f"{needed:g} features that the exact solution uses (median); such multipliers are all positive."
        )
    return sentences


ORDERS = ("share-order", "random-order")
SUITE = Suite(
    name="eliminate-fashion",
    title="Feature elimination on FashionMNIST",
    claim="Most features of a fitted implicit model can go at a small loss of accuracy.",
    papers=("002 section 5.2", "002 Figure 9"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    figures=(
        Figure("Accuracy against removed features", (DATA, "digits"), "accuracy", "share of features removed",
               paper="002 Figure 9", log=""),
    ),
    findings=findings,
    thresholds=(
        Threshold(
            "Without half of the features the fit on 5,000 samples loses at most a point of accuracy.",
            Measure("accuracy_drop", "state-driven-5000", DATA, 0.5),
            "at most",
            0.01,
        ),
    ),
    differs="How the network was trained, and on how many samples models are fitted, is not published.",
)  # fmt: skip
