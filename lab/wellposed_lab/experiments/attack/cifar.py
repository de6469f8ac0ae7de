"""Attacks on a ResNet-20 on CIFAR-10 (003 section 4.4, Table 4.1)."""

from collections.abc import Sequence

from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Gallery, Suite
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.experiments.attack.findings import Findings
from wellposed_lab.experiments.attack.plan import ALL, SHARES, AttackPlan, Line, ranked_lines
from wellposed_lab.networks.trained import ResidualNetwork
from wellposed_lab.report.findings import median_of

DATA = "cifar10"
HELD_OUT = f"{DATA}-holdout"
RADII, SPECKLES = (0.5 / 255, 1 / 255, 2 / 255, 8 / 255), (0.1, 0.2, 0.5)
LINES = (  # images are per seed
    Line("baseline", "clean", "dense", (), ALL, holdout=True),
    *ranked_lines(200, gallery=0.1, holdout=True),
    Line("baseline", "share", "pgd", SHARES[1:3], 25),
    Line("control", "share", "salt-and-pepper", SHARES, 300, gallery=0.1),
    Line("ours", "radius", "sensitivity-attack", RADII, 300),
    Line("baseline", "radius", "transfer", RADII, 300),
    Line("baseline", "radius", "fgsm", RADII, 200, holdout=True),
    Line("baseline", "radius", "pgd", RADII[1:], 40, gallery=8 / 255, holdout=True),
    Line("baseline", "radius", "autoattack", (8 / 255,), 40),
    Line("ours", "radius", "lp-dual", RADII[1:], 40, gallery=8 / 255),
    Line("control", "speckle", "speckle", SPECKLES, 300, gallery=0.5),
)
FINDINGS = Findings(DATA, (2, 4), RADII)
PLAN = AttackPlan("attack-cifar", LINES, ResidualNetwork(), ResidualNetwork("digits", depth=8, epochs=6), more=10)


def findings(records: Sequence[Record]) -> list[str]:
    """Says what the ranking is worth beside random pixels, and what was left out."""
    found = [
        "There is one network for all seeds, trained on data_batch_1 to data_batch_4, not for robustness; a seed "
        "draws images and random values. A pixel has three inputs, which are ranked and counted one by one.",
        "The linear program of 003 Figure 4.6 is out of reach: it has some 190 thousand states here. A dual point "
        "of it, by CROWN, proposes one image for every class. Projected gradients show what all pixels can do.",
    ]
    return [*found, *_dual(records), *FINDINGS.sentences(records), *_held_out(records)]


def _dual(records: Sequence[Record]) -> list[str]:
    """Compares the dual point with projected gradients."""
    at = RADII[-1]
    dual, pgd = (median_of(records, f"{DATA}-radius", model, "success_rate", at) for model in ("lp-dual", "pgd"))
    if dual is None or pgd is None:
        return []
    return [f"Within 8/255 the dual point changes the class of {100 * dual:.0f} % of the images, PGD of "
            f"{100 * pgd:.0f} %: the intervals on which its triangles stand grow with every layer."]  # fmt: skip


def _held_out(records: Sequence[Record]) -> list[str]:
    """Compares the official test images with those that were held out."""
    pairs = [
        ("clean accuracy", "dense", "accuracy", None, ""),
        ("success of the sensitivity attack on 10 % of the pixels", "sensitivity-attack", "success_rate", 0.1, ""),
        ("of the gradient attack", "gradient-attack", "success_rate", 0.1, ""),
        ("of random pixels", "random-attack", "success_rate", 0.1, ""),
        ("of PGD within 1/255", "pgd", "success_rate", 1 / 255, "-radius"),
    ]
    told = []
    for what, model, metric, at, ending in pairs:
        one, other = (median_of(records, task + ending, model, metric, at) for task in (DATA, HELD_OUT))
        if one is not None and other is not None:
            told.append(f"{what} {100 * one:.1f} and {100 * other:.1f} %")
    if not told:
        return []
    return ["On the official test images (the first 1 000 where no more are at hand) and on data_batch_5, which "
            f"was held out: {', '.join(told)}."]  # fmt: skip


def _thresholds() -> tuple[Threshold, ...]:
    clean = [
        Threshold(f"The network is at least 89 % accurate on {task}.", Measure("accuracy", "dense", task),
                  "at least", 0.89)
        for task in (DATA, HELD_OUT)
    ]  # fmt: skip
    pgd, fgsm, auto = (
        Measure("success_rate", name, f"{DATA}-radius", 8 / 255) for name in ("pgd", "fgsm", "autoattack")
    )
    rows = Measure("row_correlation", "dense", DATA)
    return (
        *clean,
        Threshold("PGD does no worse than FGSM by more than a twentieth.", pgd, "at least", 0.95, rival=fgsm),
        Threshold("AutoAttack leaves no image its class at 8/255.", auto, "at least", 1.0),
        Threshold("The rows of the sensitivity matrix are nearly collinear.", rows, "at least", 0.99),
    )


SUITE = Suite(
    name="attack-cifar",
    title="Attacks on CIFAR-10",
    claim="Changing the pixels that rank highest in the sensitivity matrix of a ResNet-20, which knows no input, "
    "is as effective as changing those with the largest gradient.",
    papers=("003 Table 4.1", "003 section 4.4", "003 Figures 4.5 and 4.6"),
    plan=PLAN,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    one_network=True,
    figures=(
        Figure("Success by changed pixels", (DATA, HELD_OUT, "digits"), "success_rate", "share of the pixels",
               paper="003 Table 4.1", log="x", quantity="share of images that change"),
        Figure("Success by radius", (f"{DATA}-radius", f"{HELD_OUT}-radius", "digits-radius"), "success_rate",
               "epsilon", log="x", quantity="share of images that change"),
    ),
    galleries=(
        Gallery("The most sensitive pixels, by random values", (DATA,), "sensitivity-attack",
                "A tenth of the inputs, which lie together; uniform draws of up to the whole range.",
                "003 Figure 4.5, bottom"),
        Gallery("The most sensitive pixels, made white", (DATA,), "sensitivity-white",
                "A tenth of the inputs, set to one."),
        Gallery("All pixels, by a dual point of the linear program", (f"{DATA}-radius", "digits-radius"),
                "lp-dual", "Within 8/255; 003 shows images changed by its linear program.", "003 Figure 4.6"),
        Gallery("All pixels, by projected gradients", (f"{DATA}-radius", "digits-radius"), "pgd", "Within 8/255."),
        Gallery("Salt and pepper", (DATA,), "salt-and-pepper", "A tenth of the inputs; nobody chose them."),
        Gallery("Speckle", (f"{DATA}-speckle", "digits-speckle"), "speckle",
                "Every input times 1 + 0.5 N(0, 1)."),
    ),
    findings=findings,
    thresholds=_thresholds(),
    differs="The attacked network is a ResNet-20, that of the paper is not described; how values are drawn is not "
    "either, so there are three kinds.",
)  # fmt: skip
