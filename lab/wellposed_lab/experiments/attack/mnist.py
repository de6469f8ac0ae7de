"""Attacks on a three-layer network on MNIST (003 section 4.4, Table 4.1)."""

from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Gallery, Suite
from wellposed_lab.engine.thresholds import Threshold
from wellposed_lab.experiments.attack.findings import Findings
from wellposed_lab.experiments.attack.plan import ALL, SHARES, AttackPlan, Line, ranked_lines
from wellposed_lab.networks.trained import Dense

DATA = "mnist"
NETWORK = Dense(DATA, hidden=(200, 100), epochs=8)  # 784 + 200 + 100 + 10 = 1094, as Figure 4.1 counts
RADII, SPECKLES = (0.01, 0.03, 0.1), (0.2, 0.5)
LINES = (
    Line("baseline", "clean", "dense", (), ALL),
    *ranked_lines(ALL, gallery=0.1),
    Line("baseline", "share", "jsma", SHARES[:3], 500),
    Line("baseline", "share", "pgd", SHARES[1:3], 500),
    Line("ours", "share", "lp", (0.1,), 8, gallery=0.1),
    Line("control", "share", "salt-and-pepper", SHARES, ALL),
    Line("ours", "radius", "sensitivity-attack", RADII, ALL, gallery=0.1),
    Line("baseline", "radius", "transfer", RADII, 1_000),
    Line("baseline", "radius", "fgsm", RADII, ALL),
    Line("baseline", "radius", "pgd", RADII, 1_000),
    Line("baseline", "radius", "autoattack", (0.03,), 100),
    Line("ours", "radius", "lp", (0.01, 0.03), 20, gallery=0.03),
    Line("control", "speckle", "speckle", SPECKLES, ALL),
)
FINDINGS = Findings(DATA, (1, 3), RADII)
PLAN = AttackPlan("attack-mnist", LINES, NETWORK, Dense("digits", hidden=(16,), epochs=15), more=10)


def _thresholds() -> tuple[Threshold, ...]:
    clean = Threshold(
        "The network is at least 97 % accurate.", Measure("accuracy", "dense", DATA), "at least", 0.97
    )
    near = Measure("success_rate", "pgd", f"{DATA}-radius", 0.1)
    fgsm = Measure("success_rate", "fgsm", f"{DATA}-radius", 0.1)
    rows = Measure("row_correlation", "dense", DATA)
    return (
        clean,
        Threshold("PGD does no worse than FGSM by more than a twentieth.", near, "at least", 0.95, rival=fgsm),
        Threshold("The rows of the sensitivity matrix are nearly collinear.", rows, "at least", 0.99),
    )


SUITE = Suite(
    name="attack-mnist",
    title="Attacks on MNIST",
    claim="Changing the pixels that rank highest in the sensitivity matrix, which knows no input, is as effective "
    "as changing those with the largest gradient.",
    papers=("003 Table 4.1", "003 section 4.4", "003 Figures 4.5 and 4.7"),
    plan=PLAN,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    figures=(
        Figure("Success by changed pixels", (DATA, "digits"), "success_rate", "share of the pixels",
               paper="003 Table 4.1", log="x", quantity="share of images that change"),
        Figure("Success by radius", (f"{DATA}-radius", "digits-radius"), "success_rate", "epsilon", log="x",
               quantity="share of images that change"),
    ),
    galleries=(
        Gallery("All pixels, by small random values", (f"{DATA}-radius", "digits-radius"), "sensitivity-attack",
                "Uniform draws within the radius.", "003 Figure 4.5, top left"),
        Gallery("The most sensitive pixels, by random values", (DATA,), "sensitivity-attack",
                "A tenth of the pixels; uniform draws of up to the whole range.", "003 Figure 4.5, top right"),
        Gallery("The most sensitive pixels, made white", (DATA,), "sensitivity-white",
                "A tenth of the pixels, set to one."),
        Gallery("All pixels, by the linear program", (f"{DATA}-radius",), "lp",
                "The margin is the objective, and every point was run through the network.",
                "003 Figure 4.7, left"),
        Gallery("A tenth of the pixels, by the linear program", (DATA, "digits"), "lp",
                "The largest changes are kept.", "003 Figure 4.7, right"),
    ),
    findings=FINDINGS.sentences,
    thresholds=_thresholds(),
    differs="How the values of perturbed pixels are drawn is not published, so there are three kinds.",
)  # fmt: skip
