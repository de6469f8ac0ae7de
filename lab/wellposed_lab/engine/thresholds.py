"""What every seed of a suite has to reach, and whether it did.

A `Threshold` is a limit on our own numbers. A `Floor` says what a model reaches that has learnt anything, a
`Plateau` where a metric says nothing; by these two the judge leaves out what decides no order.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from wellposed.errors import InputError
from wellposed_lab.config import JUDGED_SCALES
from wellposed_lab.engine.claims import Measure, is_sentence
from wellposed_lab.engine.store import Record, settings, trained_alike
from wellposed_lab.tasks.task import Point

State = Literal["met", "not met", "not run"]


class HasThresholds(Protocol):
    """A suite, as far as thresholds are concerned."""

    @property
    def name(self) -> str:
        """Of the suite, as its records have it."""

    @property
    def thresholds(self) -> tuple["Threshold", ...]:
        """What every seed has to reach."""

    @property
    def alike(self) -> tuple[str, ...]:
        """Settings in which all models that are compared agree."""


@dataclass(frozen=True)
class Threshold:
    """A limit on our own numbers: every seed keeps to it, or the report says which does not.

    Args:
        claim: what is asked, in a sentence.
        measure: our number; its size should be given where a model has several.
        kind: on which side of the limit it has to be.
        limit: the largest or smallest value that is allowed.
        rival: another number; then the measure over the rival is judged, seed by seed.
        across: points of the task's axis; then the largest minus the smallest value over them is judged.
        middle: whether the median over the seeds is judged and not every seed.

    Example:
        >>> far = Measure("test_mse", "implicit", "identity", at=205)
        >>> Threshold("The error at 205 is at most 1.", far, "at most", 1.0).text
        'test_mse of implicit on identity at 205 at most 1'
    """

    claim: str
    measure: Measure
    kind: Literal["at most", "at least"]
    limit: float
    rival: Measure | None = None
    across: tuple[Point, ...] = ()
    middle: bool = False

    def __post_init__(self) -> None:
        if not is_sentence(self.claim):
            raise InputError(f"claim must be a sentence; received {self.claim!r}")
        if self.kind not in ("at most", "at least"):
            raise InputError(f"kind must be 'at most' or 'at least'; received {self.kind!r}")
        if self.rival is not None and self.across:
            raise InputError("a threshold is on a ratio or on a spread; received both a rival and points")

    @property
    def text(self) -> str:
        """What is judged, in a line."""
        spread = f"spread over {len(self.across)} points of " if self.across else ""
        median = "median " if self.middle else ""
        over = "" if self.rival is None else f" over that of {_named(self.rival, self.measure)}"
        return f"{median}{spread}{_named(self.measure)}{over} {self.kind} {self.limit:g}"

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The numbers from which the judged one is computed."""
        if self.across:
            return tuple(replace(self.measure, at=at) for at in self.across)
        return (self.measure,) if self.rival is None else (self.measure, self.rival)

    def holds(self, value: float) -> bool:
        """Whether a value keeps to the limit; what is not a number does not."""
        return _keeps(value, self.kind, self.limit)

    def combine(self, values: Sequence[float]) -> float:
        """Computes the judged number of one seed from those of `measures`."""
        if self.across:
            return max(values) - min(values)
        return values[0] if self.rival is None else _ratio(values[0], values[1])


@dataclass(frozen=True)
class Floor:
    """What a model reaches that has learnt its task; no order is judged in a seed in which a side does not.

    Args:
        metric: of the same record.
        kind, limit: what it has to be.
        task: to which it applies; all if empty.
        judging: metrics to whose claims it applies; all if empty.
        side: the name of what has not learnt; the model of the record if empty.
        at: where the metric is taken; None is in distribution.

    Example:
        >>> Floor("accuracy", "at least", 0.93).text
        'accuracy at least 0.93'
    """

    metric: str
    kind: Literal["at most", "at least"]
    limit: float
    task: str = ""
    judging: tuple[str, ...] = ()
    side: str = ""
    at: Point = None

    @property
    def text(self) -> str:
        """What is asked, in a line."""
        return f"{self.metric.replace('_', ' ')} {self.kind} {self.limit:g}"

    def missed(self, record: Record, metric: str) -> bool:
        """Whether a record, of which a metric is judged, stays behind; unknown counts as reached."""
        if self.task not in ("", record.task) or (self.judging and metric not in self.judging):
            return False
        value = record.value(self.metric, self.at)
        return value is not None and not _keeps(value, self.kind, self.limit)


@dataclass(frozen=True)
class Plateau:
    """Where a metric says nothing, at chance or saturated: no order is judged in a seed with both sides there.

    Args:
        why: what is there, e.g. ``"both are at chance"``.
        metric: of the claim.
        kind, limit: which values; a limit that is a name is another metric of the record at the same point.
        task: to which it applies; all if empty.
        at: the point; None for all.
    """

    why: str
    metric: str
    kind: Literal["at most", "at least"]
    limit: float | str
    task: str = ""
    at: Point = None

    def holds(self, record: Record, measure: Measure) -> bool:
        """Whether the value of a measure in a record lies there."""
        if (
            self.task not in ("", record.task)
            or self.metric != measure.metric
            or self.at not in (None, measure.at)
        ):
            return False
        value = record.value(measure.metric, measure.at)
        limit = record.value(self.limit, measure.at) if isinstance(self.limit, str) else self.limit
        return value is not None and limit is not None and _keeps(value, self.kind, limit)


def _keeps(value: float, kind: str, limit: float) -> bool:
    return value <= limit if kind == "at most" else value >= limit


@dataclass(frozen=True)
class Check:
    """A threshold with what the records say of it.

    Attributes:
        values: the judged number of every seed; NaN where its run failed.
        ids: of the records of every seed, ours first.
        state: "not run" where nothing is there to judge.
    """

    threshold: Threshold
    values: Mapping[int, float]
    ids: Mapping[int, tuple[str, ...]]
    scale: str | None = None

    @property
    def failing(self) -> list[int]:
        """The seeds beyond the limit; with a median all of them or none."""
        if not self.values:
            return []
        if self.threshold.middle:
            return [] if self.threshold.holds(self.judged) else sorted(self.values)
        return [seed for seed, value in sorted(self.values.items()) if not self.threshold.holds(value)]

    @property
    def judged(self) -> float:
        """The value of the worst seed, or the median."""
        known = list(self.values.values())
        if self.threshold.middle:
            return statistics.median(known)
        return next((v for v in known if v != v), (max if self.threshold.kind == "at most" else min)(known))

    @property
    def state(self) -> State:
        """Whether the threshold is met."""
        return "not run" if not self.values else "not met" if self.failing else "met"

    @property
    def failing_ids(self) -> list[str]:
        """The records of the model in the seeds that are beyond the limit."""
        return [self.ids[seed][0] for seed in self.failing if self.ids[seed]]


def check(thresholds: Iterable[Threshold], records: Sequence[Record], alike: Sequence[str] = ()) -> list[Check]:
    """Judges thresholds by the records of their suite, derived numbers included; tiny runs are not judged.

    Args:
        thresholds: to be judged.
        records: of the suite.
        alike: settings in which all records agree that are compared.

    Example:
        >>> far = Measure("test_mse", "implicit", "identity", at=205)
        >>> [one.state for one in check([Threshold("The error at 205 is at most 1.", far, "at most", 1.0)], [])]
        ['not run']
    """
    kept = trained_alike(records, alike)
    return [_check(threshold, kept) for threshold in thresholds]


def checks_of(suites: Iterable["HasThresholds"], records: Sequence[Record]) -> list[tuple[str, Check]]:
    """Judges the thresholds of all suites, and returns those that have something to judge by with their suite."""
    checks = []
    for suite in suites:
        own = [record for record in records if record.suite == suite.name]
        judged = check(suite.thresholds, own, suite.alike)
        checks += [(suite.name, one) for one in judged if one.state != "not run"]
    return checks


def _check(threshold: Threshold, records: Sequence[Record]) -> Check:
    for scale in JUDGED_SCALES:
        here = [record for record in records if record.scale == scale and record.kind == "run"]
        sides = [_by_seed(measure, here) for measure in threshold.measures]
        seeds = sorted(set.intersection(*(set(side) for side in sides)))
        if seeds:
            values = {seed: _value(threshold, [side[seed] for side in sides]) for seed in seeds}
            ids = {seed: tuple(dict.fromkeys(side[seed].id for side in sides)) for seed in seeds}
            return Check(threshold, values, ids, scale)
    return Check(threshold, {}, {})


def _by_seed(measure: Measure, records: Sequence[Record]) -> dict[int, Record]:
    """Returns the runs of a model, of several settings those with most seeds, then the latest."""
    groups: dict[str, dict[int, Record]] = defaultdict(dict)
    for record in records:
        fits = record.size is None or measure.size is None or record.size == measure.size
        known = record.error is not None or record.value(measure.metric, measure.at) is not None
        if (record.task, record.model) == (measure.task, measure.model) and fits and known:
            groups[settings(record)][record.seed] = record
    return max(groups.values(), key=lambda g: (len(g), max(r.started for r in g.values())), default={})


def _value(threshold: Threshold, records: Sequence[Record]) -> float:
    pairs = zip(threshold.measures, records, strict=True)
    values = [record.value(measure.metric, measure.at) for measure, record in pairs]
    known = [value for value in values if value is not None]
    return threshold.combine(known) if len(known) == len(values) else float("nan")


def _ratio(above: float, below: float) -> float:
    if below == 0:
        return float("inf") if above > 0 else float("nan")
    return above / below


def _named(measure: Measure, known: Measure | None = None) -> str:
    """Names a number; where another one differs in the model only, by the model alone."""
    model = f"{measure.model} ({measure.size})" if measure.size else measure.model
    if known is not None and replace(measure, model=known.model, size=known.size) == known:
        return model
    at = measure.at if isinstance(measure.at, str | None) else f"{measure.at:g}"
    return f"{measure.metric} of {model} on {measure.task}" + (f" at {at}" if at else "")
