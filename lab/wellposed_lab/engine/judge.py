"""Judges every published claim by the records, with the same rules for every model.

A number is judged by its mean over the seeds, an order seed by seed, a limit in every seed. Runs at scale "paper"
count before those at "default", runs of the claim's own suite before others; tiny runs are for tests and judge
nothing. A seed in which training diverged counts against the model that a claim is about (as NaN, which no rule
accepts) and is left out on the rival's side, so that no claim is won by a rival that was never trained.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from wellposed.errors import InputError
from wellposed_lab.config import JUDGED_SCALES
from wellposed_lab.engine.claims import (
    AtLeast,
    AtMost,
    Beats,
    Measure,
    NotATarget,
    Number,
    PublishedClaim,
    load_claims,
)
from wellposed_lab.engine.derived import with_derived
from wellposed_lab.engine.statistics import MIN_SEEDS, Advantage, Interval, advantage, interval, mean, number
from wellposed_lab.engine.store import Record, Store, settings

Judgement = Literal["reproduced", "better", "worse", "claim does not hold", "not run"]
JUDGEMENTS: tuple[Judgement, ...] = ("reproduced", "better", "worse", "claim does not hold", "not run")
DIVERGED = "NonFiniteLossError"


@dataclass(frozen=True)
class Verdict:
    """What the records say of one published claim.

    Args:
        claim: what is published.
        record_id: the first record that it rests on; None if there is none.
        ours: our number: the mean over the seeds, for an order the ratio (or difference) to the rival.
        verdict: one of `JUDGEMENTS`.
        why: one sentence.
        interval: of `ours`, 95 % over the seeds; None where there are too few.
        scale: of the runs.
        record_ids: all records that it rests on.
        seeds: how many were compared.
        kind: what `ours` is.
    """

    claim: PublishedClaim
    record_id: str | None
    ours: float | None
    verdict: Judgement
    why: str
    interval: Interval | None = None
    scale: str | None = None
    record_ids: tuple[str, ...] = ()
    seeds: int = 0
    kind: Literal["mean", "ratio", "difference"] = "mean"


@dataclass
class Sample:
    """The runs of one configuration that have a measure, by seed."""

    measure: Measure
    scale: str
    suite: str
    size: str | None
    values: dict[int, float] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    started: str = ""

    @property
    def rank(self) -> tuple[bool, int, str]:
        """Which of several configurations is taken: the measure's size, most seeds, latest; never the best."""
        return self.size == self.measure.size, len(self.values), self.started

    @property
    def name(self) -> str:
        """The model, with the paper of its size."""
        return _model(self.measure.model, self.size)

    @property
    def diverged(self) -> list[int]:
        """The seeds in which training diverged."""
        return sorted(seed for seed, error in self.errors.items() if error.startswith(DIVERGED))


Index = dict[tuple[str, str], list[Record]]


def verdicts(store: Store | Iterable[Record], claims: Sequence[PublishedClaim] | None = None) -> list[Verdict]:
    """Judges claims by records, one verdict a claim.

    A number is "better" or "worse" only if its whole interval over the seeds lies beyond the tolerance, an order
    "reproduced" only if the whole interval of the paired ratio lies beyond its factor, a limit only if every seed
    keeps to it; all of these need three seeds, an exact count needs one. A claim that is no target is "not run",
    and its reason is the why.

    Args:
        store: the records, or where they are.
        claims: None for all that are published.

    Example:
        >>> {verdict.verdict for verdict in verdicts([])}
        {'not run'}
    """
    index: Index = defaultdict(list)
    for record in with_derived(store.records() if isinstance(store, Store) else store):
        if record.kind == "run":
            index[record.task, record.model].append(record)
    return [_judge(claim, index) for claim in (load_claims() if claims is None else claims)]


def _judge(claim: PublishedClaim, index: Index) -> Verdict:
    if isinstance(claim.rule, NotATarget):
        return _not_run(claim, claim.rule.reason)
    candidates = [_samples(measure, index) for measure in claim.rule.measures]
    chosen = _choose(claim, candidates)
    if chosen is None:
        return _not_run(claim, _missing(claim, candidates, index))
    failed = [sample for sample in chosen if not sample.values and not sample.diverged]
    if failed:
        return _not_run(claim, _failure(failed[0]), chosen)
    if isinstance(claim.rule, Number):
        return _judge_number(claim, claim.rule, chosen[0])
    if isinstance(claim.rule, Beats):
        return _judge_order(claim, claim.rule, *chosen)
    if isinstance(claim.rule, AtMost | AtLeast):
        return _judge_limit(claim, claim.rule, chosen[0])
    raise InputError(f"a claim is judged by a rule of wellposed_lab.engine.claims; received {claim.rule!r}")


def _samples(measure: Measure, index: Index) -> list[Sample]:
    """Groups the runs of a measure's model by everything but the seed."""
    by_settings: dict[str, Sample] = {}
    for record in index.get((measure.task, measure.model), ()):
        value = record.value(measure.metric, measure.at)
        if not _fits(record.size, measure.size) or (value is None and record.error is None):
            continue
        sample = by_settings.setdefault(settings(record), Sample(measure, record.scale, record.suite, record.size))
        sample.ids[record.seed] = record.id
        sample.started = max(sample.started, record.started)
        if record.error is not None:
            sample.errors[record.seed] = record.error
        elif value is not None:
            sample.values[record.seed] = value
    return list(by_settings.values())


def _fits(ours: str | None, wanted: str | None) -> bool:
    return ours is None or wanted is None or ours == wanted


def _choose(claim: PublishedClaim, candidates: list[list[Sample]]) -> list[Sample] | None:
    """Picks one configuration for each measure: of one scale, and of one suite if there is one with all.

    Scales with enough seeds to decide go before larger ones with fewer.
    """
    for seeds in (MIN_SEEDS, 1, 0):
        usable = [[one for one in samples if one.values or not seeds] for samples in candidates]
        for scale in JUDGED_SCALES:
            here = [[one for one in samples if one.scale == scale] for samples in usable]
            if all(any(len(one.values) >= seeds for one in samples) for samples in here):
                return _within_suite(claim.suite, here)
    return None


def _within_suite(first: str, candidates: list[list[Sample]]) -> list[Sample]:
    others = sorted({one.suite for samples in candidates for one in samples} - {first})
    for suite in (first, *others):
        here = [[one for one in samples if one.suite == suite] for samples in candidates]
        if all(here):
            return [max(samples, key=lambda one: one.rank) for samples in here]
    return [max(samples, key=lambda one: (one.suite == first, *one.rank)) for samples in candidates]


def _missing(claim: PublishedClaim, candidates: list[list[Sample]], index: Index) -> str:
    """Says what a claim would need."""
    for measure, samples in zip(claim.rule.measures, candidates, strict=True):
        known = [r for r in index.get((measure.task, measure.model), ()) if _fits(r.size, measure.size)]
        if not known:
            return f"There is no run of {_model(measure.model, measure.size)} on {measure.task}."
        if not samples:
            point = "" if measure.at is None else f" {_place(measure)}"
            return f"The runs of {measure.model} on {measure.task} do not have {measure.metric}{point}."
    if all(one.scale not in JUDGED_SCALES for samples in candidates for one in samples):
        return "Only a tiny run exists, which is for tests."
    return "Its two sides were not run at the same scale."


def _judge_number(claim: PublishedClaim, rule: Number, sample: Sample) -> Verdict:
    published = float(claim.value or 0.0)
    against = f"published is {number(published)}{_trouble(sample)}."
    if rule.better is None and rule.tolerance == 0 and sample.values:
        return _count(claim, published, against, sample)
    values = _with_divergence(sample)
    ours, ends = mean(values), interval(values) if len(values) >= MIN_SEEDS else None
    outcome, text = rule.outcome(published, ours), f"Ours is {number(ours)}{_seeds(len(values), ends)}"
    if ends is None:
        if outcome == "reproduced":
            return _verdict(claim, outcome, f"{text}; {against}", [sample], ours)
        why = f"{text}, too few to call it {outcome}; {against}"
        return _verdict(claim, "not run", why, [sample], ours)
    if math.isfinite(ours) and _overlap(ends, published, rule.tolerance):
        note = "" if outcome == "reproduced" else ", and the interval reaches the tolerance"
        return _verdict(claim, "reproduced", f"{text}{note}; {against}", [sample], ours, ends)
    beyond = "" if math.isnan(ours) else f", beyond the tolerance of {100 * rule.tolerance:g} %"
    return _verdict(claim, outcome, f"{text}{beyond}; {against}", [sample], ours, ends)


def _count(claim: PublishedClaim, published: float, against: str, sample: Sample) -> Verdict:
    """Judges a number that has no spread and does not depend on how training ends."""
    values = list(sample.values.values())
    judged: Judgement = "reproduced" if all(value == published for value in values) else "worse"
    return _verdict(claim, judged, f"Ours is {number(mean(values))}; {against}", [sample], mean(values))


def _overlap(ends: Interval, published: float, tolerance: float) -> bool:
    margin = tolerance * abs(published)
    return ends[0] <= published + margin and ends[1] >= published - margin


def _judge_order(claim: PublishedClaim, rule: Beats, ours: Sample, rival: Sample) -> Verdict:
    sides = [ours, rival]
    if not rival.values:
        return _not_run(claim, _failure(rival), sides)
    values = {**ours.values, **dict.fromkeys(ours.diverged, math.nan)}
    seeds = sorted(values.keys() & rival.values.keys())
    if not seeds:
        return _not_run(claim, "Its two sides have no seed in common.", sides)
    lead = advantage([values[s] for s in seeds], [rival.values[s] for s in seeds], rule.better, rule.factor)
    text = _order_text(rule, lead, ours, rival, len(seeds))
    if math.isnan(lead.mean):
        judged: Judgement = "claim does not hold" if len(seeds) >= MIN_SEEDS else "not run"
        return _verdict(claim, judged, f"{text}.", sides, None, None, len(seeds))
    if lead.interval is None:
        why = f"{text}; fewer than {MIN_SEEDS} seeds do not decide an order."
        return _verdict(claim, "not run", why, sides, lead.mean, None, len(seeds), lead.kind)
    judged = "reproduced" if lead.interval[0] > lead.threshold else "claim does not hold"
    why = f"{text}; {_order_reason(lead)}."
    return _verdict(claim, judged, why, sides, lead.mean, lead.interval, len(seeds), lead.kind)


def _order_text(rule: Beats, lead: Advantage, ours: Sample, rival: Sample, seeds: int) -> str:
    """Says which side has how much more, and what is to know of the runs."""
    names = [ours.name, rival.name]
    if ours.measure.at != rival.measure.at:
        names = [f"{sample.name} {_place(sample.measure)}" for sample in (ours, rival)]
    point = f" {_place(rule.measure)}" if rule.measure.at == rule.rival.at is not None else ""
    large, small = reversed(names) if rule.better == "lower" else names
    trouble = _trouble(ours) + _trouble(rival, left_out=True)
    if ours.suite != rival.suite:
        trouble += f"; the runs are of two suites, {ours.suite} and {rival.suite}"
    if math.isnan(lead.mean):
        return f"The {rule.measure.metric}{point} of {large} over that of {small} is not a number{trouble}"
    amount = f"{number(lead.mean)}{_seeds(seeds, lead.interval)}"
    times = f"{number(rule.factor)} times " if lead.kind == "difference" and rule.factor != 1 else ""
    joint = "over" if lead.kind == "ratio" else f"minus {times}".rstrip()
    return f"The {rule.measure.metric}{point} of {large} {joint} that of {small} is {amount}{trouble}"


def _order_reason(lead: Advantage) -> str:
    """Says how the interval lies to what the claim asks for."""
    low, high = lead.interval or (math.nan, math.nan)
    claimed = f"the claim asks for more than {number(lead.threshold)}"
    if low > lead.threshold:
        return claimed
    if low == high == lead.none:
        return f"{claimed}, and there is no difference"
    if high < lead.none and high <= lead.threshold:
        return f"{claimed}, and the opposite holds"
    if high <= lead.threshold:
        return f"{claimed}: " + ("the order is right, the factor is not" if low > lead.none else "it is less")
    includes = "no difference" if low <= lead.none <= high else "less"
    return f"{claimed}, and the interval includes {includes}: undecided"


def _judge_limit(claim: PublishedClaim, rule: AtMost | AtLeast, sample: Sample) -> Verdict:
    values = _with_divergence(sample)
    ours, ends = mean(values), interval(values) if len(values) >= MIN_SEEDS else None
    holding = sum(rule.holds(value) for value in values)
    bound = f"at {'most' if isinstance(rule, AtMost) else 'least'} {number(rule.limit)}"
    text = f"Ours is {number(ours)}{_seeds(len(values), ends)}"
    if ends is None:
        why = f"{text}, too few to judge a limit; published is {bound}{_trouble(sample)}."
        return _verdict(claim, "not run", why, [sample], ours)
    if holding == len(values):
        why = f"{text}; published is {bound}, and every seed keeps to it."
        return _verdict(claim, "reproduced", why, [sample], ours, ends)
    how = f"{holding} of {len(values)} seeds keep to it" if holding else "no seed keeps to it"
    if holding or sample.diverged:
        how += ": undecided"
    why = f"{text}; published is {bound}, and {how}{_trouble(sample)}."
    return _verdict(claim, "claim does not hold", why, [sample], ours, ends)


def _with_divergence(sample: Sample) -> list[float]:
    return [*sample.values.values(), *(math.nan for _ in sample.diverged)]


def _verdict(
    claim: PublishedClaim,
    judged: Judgement,
    why: str,
    samples: Sequence[Sample],
    ours: float | None,
    ends: Interval | None = None,
    seeds: int | None = None,
    kind: Literal["mean", "ratio", "difference"] = "mean",
) -> Verdict:
    ids = tuple(dict.fromkeys(sample.ids[seed] for sample in samples for seed in sorted(sample.ids)))
    known = ours if ours is not None and not math.isnan(ours) else None
    shown = ends if ends is not None and not math.isnan(ends[0]) else None
    count = len(samples[0].values) + len(samples[0].diverged) if seeds is None else seeds
    return Verdict(claim, ids[0], known, judged, why, shown, samples[0].scale, ids, count, kind)


def _not_run(claim: PublishedClaim, why: str, samples: Sequence[Sample] = ()) -> Verdict:
    if not samples:
        return Verdict(claim, None, None, "not run", why)
    return _verdict(claim, "not run", why, samples, None)


def _failure(sample: Sample) -> str:
    seeds = len(sample.errors)
    reason = next(iter(sample.errors.values())).split("\n")[0].rstrip(".")
    return (
        f"Training of {sample.name} on {sample.measure.task} failed in all {seeds} "
        f"{_plural('seed', seeds)}, so there is nothing to compare ({reason})."
    )


def _trouble(sample: Sample, left_out: bool = False) -> str:
    """Says in how many seeds training failed."""
    sentences = []
    total, diverged = len(sample.ids), len(sample.diverged)
    if diverged:
        what = "diverged and is left out" if left_out else "diverged"
        sentences.append(f"; training of {sample.name} {what} in {diverged} of {total} seeds")
    if others := len(sample.errors) - diverged:
        sentences.append(f"; {sample.name} failed and is left out in {others} of {total} seeds")
    return "".join(sentences)


def _seeds(count: int, ends: Interval | None) -> str:
    seeds = f"{count} {_plural('seed', count)}"
    if ends is None or math.isnan(ends[0]):
        return f" ({seeds})"
    if ends[0] == ends[1]:
        return f" ({seeds}, all alike)"
    return f" ({seeds}, 95 % interval {number(ends[0])} to {number(ends[1])})"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _model(name: str, size: str | None) -> str:
    return f"{name} ({size})" if size else name


def _place(measure: Measure) -> str:
    if measure.at is None:
        return "in distribution"
    return f"at {measure.at}" if isinstance(measure.at, str) else f"at {measure.at:g}"
