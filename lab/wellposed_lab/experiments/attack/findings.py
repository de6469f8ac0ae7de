"""What the controls of the attack suites show, in sentences (003 section 4.4)."""

from collections.abc import Sequence
from dataclasses import dataclass

from wellposed_lab.engine.store import Record
from wellposed_lab.experiments.attack.plan import KINDS, PRINTED, RANKINGS, SHARES
from wellposed_lab.report.findings import median_of


@dataclass(frozen=True)
class Findings:
    """Reads the records of one suite.

    Args:
        task: the name of its images.
        columns: of the printed table: success of the sensitivity and of the gradient attack.
        radii: points of the axis of radii.
    """

    task: str
    columns: tuple[int, int]
    radii: tuple[float, ...]

    def sentences(self, records: Sequence[Record]) -> list[str]:
        """Says what the ranking is worth beside random pixels, and what values are worth beside the ranking."""
        found = [
            "How perturbed pixels get their values is not said in 003 beyond small random ones. Here they move by "
            "uniform draws of up to the whole range, cut to [0, 1]; signed attacks move them along the gradient.",
            "Success counts images that were right before, against all that were right.",
        ]
        for values in KINDS:
            found += self.ranking(records, values)
        return [
            *found,
            *self.chance(records),
            *self.nearest(records),
            *self.collinear(records),
            *self.by_radius(records),
        ]

    def success(self, records: Sequence[Record], attack: str, at: float, ending: str = "") -> float | None:
        """Returns the median success of an attack."""
        return median_of(records, self.task + ending, attack, "success_rate", at)

    def ranking(self, records: Sequence[Record], values: str) -> list[str]:
        """Compares the three rankings at all shares."""
        told = []
        for at in SHARES:
            found = [self.success(records, f"{name}-{values}", at) for _, name in RANKINGS]
            known = [f"{100 * value:.1f}" for value in found if value is not None]
            if len(known) == len(found):
                told.append(f"{' / '.join(known)} with {100 * at:g} % of the pixels")
        names = " / ".join(name for _, name in RANKINGS)
        text = ", ".join(told).replace(" of the pixels,", ",")
        return [f"With {KINDS[values]}, success by ranking ({names}), in %: {text}."] if told else []

    def chance(self, records: Sequence[Record], at: float = 0.1) -> list[str]:
        """Says whether the ranking by sensitivity is better than none."""
        ranked, random = (self.success(records, f"{name}-attack", at) for name in ("sensitivity", "random"))
        if ranked is None or random is None:
            return []
        word = "better" if ranked > random else "no better"
        return [
            f"With {100 * at:g} % of the pixels and random values ranking by sensitivity does {word} than chance: "
            f"{100 * ranked:.1f} % of the images change, and {100 * random:.1f} % by pixels chosen at random."
        ]

    def nearest(self, records: Sequence[Record]) -> list[str]:
        """Says which values of pixels come nearest to the printed table, and what random pixels do with them."""
        distances = {}
        for kind in KINDS:
            found = [
                (line[column], self.success(records, f"{name}-{kind}", line[0] / 100))
                for line in PRINTED
                for name, column in zip(("sensitivity", "gradient"), self.columns, strict=True)
            ]
            known = [abs(printed - 100 * ours) for printed, ours in found if ours is not None]
            if len(known) == len(found):
                distances[kind] = sum(known) / len(known)
        if len(distances) < len(KINDS):
            return []
        best = min(distances, key=lambda kind: distances[kind])
        told = ", ".join(f"{KINDS[kind]} {distance:.0f}" for kind, distance in distances.items())
        chance = {at: self.success(records, f"random-{best}", at) for at in (0.1, 0.3)}
        random = " and ".join(f"{100 * (value or 0):.0f} % at {100 * at:g} %" for at, value in chance.items())
        return [
            f"Mean distance from Table 4.1, in points: {told}. With {KINDS[best]}, the nearest, pixels chosen at "
            f"random, which the table leaves out, succeed with {random} of the pixels."
        ]

    def collinear(self, records: Sequence[Record]) -> list[str]:
        """Says how alike the rows of the sensitivity matrix are."""
        correlation = median_of(records, self.task, "dense", "row_correlation")
        if correlation is None:
            return []
        return [
            f"Two rows of the sensitivity matrix have a mean correlation of {correlation:.5f}: the ranking is "
            "nearly the same for all classes, and the maps of 003 Figure 4.4 hold nothing about a class."
        ]

    def by_radius(self, records: Sequence[Record]) -> list[str]:
        """Compares the attacks on all pixels."""
        sentences = []
        names = ("sensitivity-attack", "transfer", "fgsm", "pgd", "autoattack", "lp")
        for at in self.radii:
            found = [(name, self.success(records, name, at, "-radius")) for name in names]
            told = ", ".join(f"{name} {100 * value:.1f} %" for name, value in found if value is not None)
            if told:
                fewer = "fewer images for pgd, autoattack and lp"
                sentences.append(f"All pixels within {at:.3g}, success: {told} ({fewer}).")
        return sentences
