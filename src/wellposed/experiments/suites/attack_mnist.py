"""Attacks on a three-layer network on MNIST (003 section 4.4, Table 4.1)."""

from collections.abc import Sequence

from wellposed.experiments.attack_run import AttackRun, Axis
from wellposed.experiments.config import Scale
from wellposed.experiments.dense import Dense
from wellposed.experiments.findings import median_of
from wellposed.experiments.papers.p003 import ATTACKS as PRINTED
from wellposed.experiments.record import Record
from wellposed.experiments.rules import Measure
from wellposed.experiments.run import Role
from wellposed.experiments.suite import Figure, Suite
from wellposed.experiments.thresholds import Threshold

DATA = "mnist"
NETWORK = Dense(DATA, hidden=(200, 100), epochs=8)  # 784 + 200 + 100 + 10 = 1094, as Figure 4.1 counts
SHARES = (0.001, 0.01, 0.1, 0.2, 0.3)
RADII = (0.01, 0.03, 0.1)
KINDS = {"attack": "random values", "signed": "values along the gradient's sign", "white": "white pixels"}
ATTACKS: tuple[tuple[Role, Axis, str, tuple[float, ...], int], ...] = (  # the last: images
    ("ours", "share", "sensitivity-attack", SHARES, 10_000),
    ("baseline", "share", "gradient-attack", SHARES, 10_000),
    ("control", "share", "random-attack", SHARES, 10_000),
    ("ours", "share", "sensitivity-signed", SHARES, 10_000),
    ("baseline", "share", "gradient-signed", SHARES, 10_000),
    ("control", "share", "random-signed", SHARES, 10_000),
    ("ours", "share", "sensitivity-white", SHARES, 10_000),
    ("baseline", "share", "gradient-white", SHARES, 10_000),
    ("control", "share", "random-white", SHARES, 10_000),
    ("baseline", "share", "jsma", SHARES[:3], 500),
    ("baseline", "share", "pgd", SHARES[1:3], 500),
    ("ours", "share", "lp", (0.1,), 6),
    ("ours", "radius", "sensitivity-attack", RADII, 10_000),
    ("baseline", "radius", "fgsm", RADII, 10_000),
    ("baseline", "radius", "pgd", RADII, 1_000),
    ("ours", "radius", "lp", RADII[:2], 20),
)


def plan(scale: Scale) -> list[AttackRun]:
    """Returns every attack; tiny runs are on digits."""
    tiny, more = scale == "tiny", 10 if scale == "paper" else 1
    network = Dense("digits", hidden=(16,), epochs=15) if tiny else NETWORK

    def run(role: Role, axis: Axis, attack: str, points: tuple[float, ...], samples: int) -> AttackRun:
        some = (points[-1:], min(samples, 20)) if tiny else (points, min(samples * more, 10_000))
        return AttackRun(suite="attack-mnist", seed=0, scale=scale, role=role, dense=network, axis=axis,
                         attack=attack, points=some[0], samples=some[1])  # fmt: skip

    return [run("baseline", "clean", "dense", (), 10_000), *(run(*line) for line in ATTACKS)]


def controls(records: Sequence[Record]) -> list[str]:
    """Says what the ranking is worth beside random pixels, and what values are worth beside the ranking."""
    sentences = [
        "How perturbed pixels get their values is not said in 003 beyond small random ones. Here they move by "
        "uniform draws of up to the whole range, cut to [0, 1]; signed attacks move them along the gradient.",
        "Success counts images that were right before, against all that were right.",
    ]
    for values in KINDS:
        sentences += [line for at in SHARES if (line := _ranking(records, values, at))]
    sentences += _nearest(records)
    correlation = median_of(records, DATA, "dense", "row_correlation")
    if correlation is not None:
        sentences.append(
            f"Two rows of the sensitivity matrix have a mean correlation of {correlation:.5f}: the ranking is "
            "nearly the same for all classes, and the maps of 003 Figure 4.4 hold nothing about a class."
        )
    return sentences + _radii(records)


def _ranking(records: Sequence[Record], values: str, at: float) -> str | None:
    names = ("sensitivity", "gradient", "random")
    found = [median_of(records, DATA, f"{name}-{values}", "success_rate", at) for name in names]
    if any(value is None for value in found):
        return None
    told = ", ".join(f"{name} {100 * (value or 0):.1f} %" for name, value in zip(names, found, strict=True))
    return f"With {100 * at:g} % of the pixels and {KINDS[values]}, success by ranking: {told}."


def _nearest(records: Sequence[Record]) -> list[str]:
    """Says which values of pixels come nearest to the printed table, and what random pixels do with them."""
    distances = {}
    for kind in KINDS:
        found = [
            (line[column], median_of(records, DATA, f"{name}-{kind}", "success_rate", line[0] / 100))
            for line in PRINTED
            for name, column in (("sensitivity", 1), ("gradient", 3))
        ]
        known = [abs(printed - 100 * ours) for printed, ours in found if ours is not None]
        if len(known) == len(found):
            distances[kind] = sum(known) / len(known)
    if len(distances) < len(KINDS):
        return []
    best = min(distances, key=lambda kind: distances[kind])
    told = ", ".join(f"{KINDS[kind]} {distance:.0f}" for kind, distance in distances.items())
    chance = {at: median_of(records, DATA, f"random-{best}", "success_rate", at) for at in (0.1, 0.3)}
    random = " and ".join(f"{100 * (value or 0):.0f} % at {100 * at:g} %" for at, value in chance.items())
    return [
        f"Mean distance from Table 4.1, in points: {told}. With {KINDS[best]}, the nearest, pixels chosen at "
        f"random, which the table leaves out, succeed with {random} of the pixels."
    ]


def _radii(records: Sequence[Record]) -> list[str]:
    sentences = []
    for at in RADII:
        names = ("sensitivity-attack", "fgsm", "pgd", "lp")
        found = [(name, median_of(records, f"{DATA}-radius", name, "success_rate", at)) for name in names]
        told = ", ".join(f"{name} {100 * value:.1f} %" for name, value in found if value is not None)
        if told:
            sentences.append(f"All pixels within {at:g}, success: {told} (fewer images for pgd and lp).")
    return sentences


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
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 5},
    figures=(
        Figure("Success by changed pixels", (DATA, "digits"), "success_rate", "share of the pixels",
               paper="003 Table 4.1", log="x", quantity="share of images that change"),
        Figure("Success by radius", (f"{DATA}-radius", "digits-radius"), "success_rate", "epsilon", log="x",
               quantity="share of images that change"),
    ),
    controls=controls,
    thresholds=_thresholds(),
)  # fmt: skip
