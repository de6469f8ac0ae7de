"""The attacks of a suite as a table, and the runs of its scales."""

from dataclasses import dataclass

from wellposed_lab.config import Scale
from wellposed_lab.engine.run import Role
from wellposed_lab.experiments.attack.run import AttackRun, Axis, Split
from wellposed_lab.networks.trained import ImageNetwork

# 003 Table 4.1 in per cent: perturbed pixels; success of sensitivity on MNIST and CIFAR-10, of gradient on both
PRINTED = (
    (0.1, 1.01, 3.04, 2.42, 1.75),
    (1, 13.41, 10.16, 26.92, 6.66),
    (10, 70.67, 36.21, 74.90, 33.18),
    (20, 89.82, 57.01, 87.10, 52.57),
    (30, 90.22, 67.45, 89.82, 66.59),
)
SHARES = tuple(line[0] / 100 for line in PRINTED)
KINDS = {"attack": "random values", "signed": "values along the gradient's sign", "white": "white pixels"}
RANKINGS: tuple[tuple[Role, str], ...] = (("ours", "sensitivity"), ("baseline", "gradient"), ("control", "random"))
TINY_RADIUS, TINY_SAMPLES = 0.3, 8
ALL = 10_000  # images


@dataclass(frozen=True)
class Line:
    """One attack of a plan.

    Args:
        role, axis, attack, points: as in a run.
        samples: images at the default scale.
        gallery: the point at which some of them are kept.
        holdout: whether the images that were held out are attacked too.
    """

    role: Role
    axis: Axis
    attack: str
    points: tuple[float, ...]
    samples: int
    gallery: float | None = None
    holdout: bool = False


def ranked_lines(samples: int, gallery: float, holdout: bool = False) -> tuple[Line, ...]:
    """Lists all rankings with all kinds of values, random ones on twice the images; `holdout` as in a line.

    Example:
        >>> [line.attack for line in ranked_lines(10, 0.1)][:3]
        ['sensitivity-attack', 'gradient-attack', 'random-attack']
    """
    lines = []
    for kind in KINDS:
        for role, name in RANKINGS:
            shown = gallery if name == "sensitivity" and kind != "signed" else None
            count = min(2 * samples, ALL) if kind == "attack" else samples
            lines.append(Line(role, "share", f"{name}-{kind}", SHARES, count, shown, holdout))
    return tuple(lines)


@dataclass(frozen=True)
class AttackPlan:
    """Makes the runs of a suite.

    Args:
        suite: its name.
        lines: its attacks.
        victim, tiny: what is attacked, and what is at the tiny scale.
        more: how many times more images the paper's scale has.
    """

    suite: str
    lines: tuple[Line, ...]
    victim: ImageNetwork
    tiny: ImageNetwork
    more: int

    def __call__(self, scale: Scale) -> list[AttackRun]:
        """Returns every attack on the test images, and those on held-out ones."""
        splits: tuple[Split, ...] = ("test", "holdout")
        return [self._run(line, split, scale) for split in splits for line in self.lines
                if line.holdout or split == "test"]  # fmt: skip

    def _run(self, line: Line, split: Split, scale: Scale) -> AttackRun:
        tiny = scale == "tiny"
        points, shown, samples = line.points, line.gallery, line.samples
        if tiny and line.axis != "clean":
            points = (TINY_RADIUS,) if line.axis == "radius" else line.points[-1:]
            shown, samples = (points[0] if line.gallery else None), min(samples, TINY_SAMPLES)
        elif scale == "paper":
            samples = min(samples * self.more, ALL)
        return AttackRun(
            suite=self.suite,
            seed=0,
            scale=scale,
            role=line.role,
            victim=self.tiny if tiny else self.victim,
            axis=line.axis,
            attack=line.attack,
            points=points,
            samples=samples,
            split=split,
            gallery=shown if split == "test" else None,
            epochs=2 if tiny else 10,
        )
