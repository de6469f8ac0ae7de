"""A suite: what a claim is, the runs that test it, and how the results are shown; all suites by name.

`Figure`, `Gallery` and `Picture` are ways to show results, and a `Suite` has some of each. `all_suites` finds the
suites of all experiment folders, `get_suite` one of them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Literal

from wellposed.errors import InputError, unknown_name
from wellposed_lab.config import SCALES, Scale
from wellposed_lab.engine.run import Run
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Floor, Plateau, Threshold
from wellposed_lab.tasks.task import Point

Plan = Callable[[Scale], Sequence[Run]]  # one run for every model and task, at seed 0


@dataclass(frozen=True)
class Figure:
    """A plot of a metric along the axis of some tasks, in the style of a paper's figure.

    Args:
        title: what is seen.
        tasks: one panel each.
        metric: on the vertical axis; one of the values or, along epochs or time, of the series of a record.
        axis: label of the horizontal axis.
        over: what runs along it.
        paper: the figure that it restates, e.g. ``"001 Figure 4"``.
        log: which axes are logarithmic.
        quantity: what the metric is, for readers; the metric's name in words if empty.
        only: points of the axis that are drawn; all if empty.
        models: which are drawn; all if empty.
        alike: settings in which all models drawn agree, by their names in records.
    """

    title: str
    tasks: tuple[str, ...]
    metric: str
    axis: str
    over: Literal["points", "epoch", "time"] = "points"
    paper: str = ""
    log: Literal["", "x", "y", "xy"] = "xy"
    quantity: str = ""
    only: tuple[Point, ...] = ()
    models: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What stands at the vertical axis."""
        return self.quantity or self.metric.replace("_", " ")


@dataclass(frozen=True)
class Gallery:
    """Pictures that records carry; see `attack_thumbnails` in `experiments.attack.run`.

    Args:
        title: what is seen.
        tasks: of the records; the first one that has pictures is shown.
        model: whose records they are.
        note: what a reader should know.
        paper: the figure that it restates.
    """

    title: str
    tasks: tuple[str, ...]
    model: str
    note: str = ""
    paper: str = ""


@dataclass(frozen=True)
class Picture:
    """A drawing of its own kind, made from records.

    Args:
        title: what is seen.
        draw: makes a PNG from the records of the suite; None where they have nothing to draw.
        note: what a reader should know.
        paper: the figure that it restates.
    """

    title: str
    draw: Callable[[Sequence[Record]], bytes | None]
    note: str = ""
    paper: str = ""


@dataclass(frozen=True)
class Suite:
    """Experiments that belong together.

    Args:
        name: as on the command line.
        title: of its section in the report.
        claim: what the papers say, in one sentence.
        papers: the texts with places, e.g. ``"001 Figure 3"``.
        plan: returns the runs of a scale at seed 0.
        seeds: how many seeds each scale has.
        figures: what the report draws.
        galleries: pictures of attacked inputs that it shows.
        pictures: drawings of other kinds, a map for instance.
        findings: says in sentences what the records show, the controls above all.
        grid: settings tried by a search, by field: of the training, or an option of the model.
        thresholds: what every seed has to reach.
        derived: adds numbers that are made from several of its records, such as the lead over a rival.
        floors: what a model reaches that has learnt its task.
        plateaus: where a metric says nothing.
        one_network: whether all seeds share one network, so that intervals say nothing of others.
        alike: settings in which the two sides of an order must agree, by their names in records.
        differs: in which points the scale "paper" is not as published, in a sentence; empty if in none.
        unavailable: tasks whose data are not at hand, each with a sentence that says so.
    """

    name: str
    title: str
    claim: str
    papers: tuple[str, ...]
    plan: Plan
    seeds: dict[str, int]
    figures: tuple[Figure, ...] = ()
    galleries: tuple[Gallery, ...] = ()
    pictures: tuple[Picture, ...] = ()
    findings: Callable[[Sequence[Record]], list[str]] = lambda records: []
    grid: tuple[tuple[str, tuple[object, ...]], ...] = ()
    thresholds: tuple[Threshold, ...] = ()
    derived: Callable[[Sequence[Record]], Sequence[Record]] | None = None
    floors: tuple[Floor, ...] = ()
    plateaus: tuple[Plateau, ...] = ()
    one_network: bool = False
    alike: tuple[str, ...] = ()
    differs: str = ""
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def runs(self, scale: Scale = "default", seeds: int | None = None) -> list[Run]:
        """Returns all runs of a scale, seed by seed."""
        if scale not in SCALES:
            raise unknown_name("scale", scale, SCALES)
        count = self.seeds[scale] if seeds is None else seeds
        if count < 1:
            raise InputError(f"seeds must be at least 1; received {seeds}")
        return [run.with_seed(seed) for run in self.plan(scale) for seed in range(count)]

    def resumable(self, scale: Scale = "default") -> bool:
        """Returns whether a stopped run of a scale may go on from its last epoch; others begin again."""
        return any(run.resumable for run in self.plan(scale))


@functools.cache
def all_suites() -> dict[str, Suite]:
    """Finds the suites of all experiment folders, in the order of the papers, and returns them by name.

    Example:
        >>> list(all_suites())[:2]
        ['identity', 'arithmetic']
    """
    package = import_module("wellposed_lab.experiments")
    folders = [
        import_module(f"{package.__name__}.{module.name}").SUITES for module in iter_modules(package.__path__)
    ]
    folders.sort(key=lambda folder: min((section for suite in folder for section in suite.papers), default="999"))
    return {suite.name: suite for folder in folders for suite in folder}


def get_suite(name: str) -> Suite:
    """Returns a suite, or says which ones there are.

    Example:
        >>> get_suite("identity").papers[0]
        '000 Figure 1'
    """
    if name not in all_suites():
        raise unknown_name("suite", name, all_suites())
    return all_suites()[name]
