"""Judges every published claim by the records, with the same rules for every model.

1. What the records do not decide is "undecided", and is not held against a claim.
2. No order is judged in a seed in which a side did not learn (`Floor`),
3. nor where both sides are at chance or saturated (`Plateau`).
4. A smaller scale never overrules a larger one: where they disagree the claim is undecided. Tiny runs are never
   judged. Nor is an order judged between sides whose schedules differ where a suite says that they must not; of
   several that both sides have, one under which a side does not learn is left out.
5. A number is reproduced if its mean lies within the tolerance, an order if it has at least half of the printed
   effect, 1 % where none is printed. A difference of the other sign is refuted, and so is a count that differs at
   scale paper.
6. Below five seeds the interval is called the range of the seeds, and the verdict is marked; so is one of which
   all seeds share one network.
7. A claim counts once, however many papers make it; our own questions are counted apart.
8. Where a text leaves a choice open every reading is judged, and the claim is undecided if they differ. A reading
   under which a side does not learn is not the text's, and is left out.

A seed in which training diverged, or whose number is none, counts against the model that a claim is about (as NaN,
which no rule accepts) and is left out on the rival's side, so that no claim is won by a rival that was never
trained.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from wellposed_lab.engine.experiment import all_suites
from wellposed_lab.engine.statistics import (
    ENOUGH_SEEDS,
    MIN_SEEDS,
    Advantage,
    Interval,
    advantage,
    interval,
    mean,
    number,
)
from wellposed_lab.engine.store import Record, Store, settings

Judgement = Literal["reproduced", "better", "worse", "refuted", "undecided", "not judged"]
JUDGEMENTS: tuple[Judgement, ...] = ("reproduced", "better", "worse", "refuted", "undecided", "not judged")
DECIDED: tuple[Judgement, ...] = JUDGEMENTS[:4]
DIVERGED = "NonFiniteLossError"
DEPENDS = "It depends on the reading"
LEARNT = "Under the readings under which both sides learn"
LEAST_EFFECT = 1.01  # of an order of which no paper prints the effect: less is in no plot


@dataclass(frozen=True)
class Verdict:
    """What the records say of one published claim.

    Args:
        claim: what is published.
        record_id: the first record that it rests on; None if there is none.
        ours: our number: the mean over the seeds, for an order the ratio (or difference) to the rival.
        verdict: one of `JUDGEMENTS`.
        why: one sentence.
        interval: of `ours`, 95 % over the seeds, below five seeds their range; None where there are too few.
        scale: of the runs.
        record_ids: all records that it rests on.
        seeds: how many were compared.
        kind: what `ours` is.
        readings: where the text leaves a choice open, the verdict on every reading with its name.
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
    readings: tuple[tuple[str, "Verdict"], ...] = ()

    @property
    def marked(self) -> bool:
        """Whether it is decided by fewer than five seeds or by one network; a count needs one."""
        few = self.seeds < ENOUGH_SEEDS or self.one_network
        return self.verdict in DECIDED and few and not _is_count(self.claim.rule)

    @property
    def one_network(self) -> bool:
        """Whether all its seeds share one network."""
        suite = all_suites().get(self.claim.suite)
        return suite is not None and suite.one_network


def tally(verdicts: Iterable[Verdict]) -> dict[Judgement, int]:
    """Counts verdicts of each kind, in the order of `JUDGEMENTS`.

    Example:
        >>> tally([])["reproduced"]
        0
    """
    counts = Counter(verdict.verdict for verdict in verdicts)
    return {name: counts[name] for name in JUDGEMENTS}


@dataclass
class Sample:
    """The runs of one configuration that have a measure, by seed."""

    measure: Measure
    scale: str
    suite: str
    size: str | None
    values: dict[int, float] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
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

    def shared(self, names: Sequence[str]) -> str:
        """Some of its settings, as text."""
        config = next(iter(self.records.values())).config
        return ", ".join(f"{name} {config.get(name)}" for name in names)

    @property
    def diverged(self) -> list[int]:
        """The seeds in which training diverged."""
        return sorted(seed for seed, error in self.errors.items() if error.startswith(DIVERGED))

    def not_learnt(self, order: bool) -> dict[int, str]:
        """The seeds in which the task was not learnt, in words; but for orders only those of a rival in a lead."""
        suite = all_suites().get(self.suite)
        floors = [floor for floor in (suite.floors if suite else ()) if order or floor.judging]
        return {
            seed: f"{floor.side or self.name} did not learn ({floor.text} is asked for)"
            for seed, record in self.records.items()
            for floor in floors
            if floor.missed(record, self.measure.metric)
        }

    def plateaus(self) -> dict[int, str]:
        """The seeds in which the value says nothing, with the reason."""
        suite = all_suites().get(self.suite)
        return {
            seed: plateau.why
            for seed, record in self.records.items()
            for plateau in (suite.plateaus if suite else ())
            if plateau.holds(record, self.measure)
        }


Index = dict[tuple[str, str], list[Record]]
Schedules = dict[str, list[Sample]]  # by the settings that both sides share, the first choice first
Printed = dict[Measure, float]


def verdicts(store: Store | Iterable[Record], claims: Sequence[PublishedClaim] | None = None) -> list[Verdict]:
    """Judges claims by records, one verdict a claim, by the rules at the top of this module.

    A number is "better" or "worse" only if its whole interval over the seeds lies beyond the tolerance, an order
    "reproduced" only if the whole interval of the paired ratio does, and "worse" if it is right but too small; a
    limit is "reproduced" if every seed keeps to it. All of these need three seeds, an exact count needs one. A
    claim that is no target is "not judged", and its reason is the why.

    Args:
        store: the records, or where they are.
        claims: None for all that are published.

    Example:
        >>> {verdict.verdict for verdict in verdicts([])}
        {'not judged'}
    """
    index: Index = defaultdict(list)
    for record in with_derived(store.records() if isinstance(store, Store) else store):
        if record.kind == "run":
            index[record.task, record.model].append(record)
    wanted = load_claims() if claims is None else claims
    printed: Printed = {
        claim.rule.measure: float(claim.value or 0.0)
        for claim in (*load_claims(), *wanted)
        if isinstance(claim.rule, Number)
    }
    return [_judge_readings(claim, index, printed) for claim in wanted]


def _judge_readings(claim: PublishedClaim, index: Index, printed: Printed) -> Verdict:
    """Judges a claim under every reading; one that depends on the reading is undecided."""
    first = _judge(claim, index, printed)
    if not claim.readings:
        return first
    others = [(name, _judge(replace(claim, rule=rule), index, printed)) for name, rule in claim.readings]
    readings = ((claim.reading, first), *others)
    telling = [(name, one) for name, one in readings if one.verdict != "not judged" and one.ours is not None]
    said = "; ".join(f"{name}, {one.verdict} ({number(one.ours)})" for name, one in telling)
    if len({one.verdict for _, one in telling}) > 1:
        why = f"{DEPENDS}: {said}."
        return replace(first, verdict="undecided", why=why, readings=readings)
    if not telling or telling[0][1] is first:
        return replace(first, readings=readings)
    why = f"{LEARNT}: {said}."
    return replace(telling[0][1], claim=claim, why=why, readings=readings)


def _judge(claim: PublishedClaim, index: Index, printed: Printed) -> Verdict:
    if isinstance(claim.rule, NotATarget):
        return _not_judged(claim, claim.rule.reason)
    candidates = [_samples(measure, index) for measure in claim.rule.measures]
    scales = _choices(claim, candidates)
    if not scales:
        return _not_judged(claim, _missing(claim, candidates, index))
    judged = [{name: _judge_sides(claim, chosen, printed) for name, chosen in own.items()} for own in scales]
    return _across_scales(claim, [_across_schedules(own) for own in judged], printed)


def _judge_sides(claim: PublishedClaim, chosen: Sequence[Sample], printed: Printed) -> Verdict:
    failed = [sample for sample in chosen if not sample.values and not sample.diverged]
    if failed:
        return _not_judged(claim, _failure(failed[0]), chosen)
    if isinstance(claim.rule, Number):
        return _judge_number(claim, claim.rule, chosen[0])
    if isinstance(claim.rule, Beats):
        return _judge_order(claim, claim.rule, printed, *chosen)
    if isinstance(claim.rule, AtMost | AtLeast):
        return _judge_limit(claim, claim.rule, chosen[0])
    raise InputError(f"a claim is judged by a rule of wellposed_lab.engine.claims; received {claim.rule!r}")


def _across_schedules(judged: dict[str, Verdict]) -> Verdict:
    """Takes the verdict of the first schedule under which enough seeds say something, else that of the first."""
    schedule, first = next(iter(judged.items()))
    for one in judged.values():
        if one.verdict in DECIDED or (one.ours is not None and one.seeds >= MIN_SEEDS):
            aside = "" if one is first else f"; with {schedule}, {first.why[0].lower()}{first.why[1:-1]}"
            return replace(one, why=f"{one.why.rstrip('.')}{aside}.")
    return first


def _across_scales(claim: PublishedClaim, judged: Sequence[Verdict], printed: Printed) -> Verdict:
    """Takes the verdict of the largest scale, or of a smaller one with more seeds if the larger says the same."""
    first = judged[0]
    least = 1 if _is_count(claim.rule) else MIN_SEEDS
    others = [one for one in judged[1:] if one.verdict in DECIDED]
    if first.verdict in DECIDED or first.seeds >= least or not others:
        return first
    count = f"{first.seeds} {_plural('seed', first.seeds)} at scale {first.scale}"
    if _leaning(claim, first, printed) == _leaning(claim, others[0], printed):
        return replace(others[0], why=f"{others[0].why.rstrip('.')}; {count} {_verb('agree', first.seeds)}.")
    other = f"scale {others[0].scale} says {others[0].verdict}, which {count} do not decide"
    return replace(first, verdict="undecided", why=f"{first.why.rstrip('.')}; {other}.")


def _leaning(claim: PublishedClaim, verdict: Verdict, printed: Printed) -> str | bool | None:
    """Says what a mean alone would decide, however few its seeds."""
    if verdict.ours is None:
        return None
    if isinstance(claim.rule, Number):
        return claim.rule.outcome(float(claim.value or 0.0), verdict.ours)
    if isinstance(claim.rule, Beats):
        return verdict.ours > _needed(claim.rule, verdict.kind == "ratio", printed)[0]
    return isinstance(claim.rule, AtMost | AtLeast) and claim.rule.holds(verdict.ours)


def _samples(measure: Measure, index: Index) -> list[Sample]:
    """Groups the runs of a measure's model by everything but the seed."""
    by_settings: dict[str, Sample] = {}
    for record in index.get((measure.task, measure.model), ()):
        value = record.value(measure.metric, measure.at)
        if not _fits(record.size, measure.size) or (value is None and record.error is None):
            continue
        sample = by_settings.setdefault(settings(record), Sample(measure, record.scale, record.suite, record.size))
        sample.records[record.seed] = record
        sample.started = max(sample.started, record.started)
        if record.error is not None:
            sample.errors[record.seed] = record.error
        elif value is not None:
            sample.values[record.seed] = value
    return list(by_settings.values())


def _fits(ours: str | None, wanted: str | None) -> bool:
    return ours is None or wanted is None or ours == wanted


def _choices(claim: PublishedClaim, candidates: list[list[Sample]]) -> list[Schedules]:
    """Picks one configuration for each measure at every scale, the largest first, under every schedule.

    Both sides are of one scale, and of the claim's own suite if that has both, else of another that has. Runs that
    failed are taken where there are no others.
    """
    whole = [[one for one in samples if one.values] for samples in candidates]
    own = [[one for one in samples if one.suite == claim.suite] for samples in whole]
    for usable in (own, whole, candidates):
        by_scale = [
            [[one for one in samples if one.scale == scale] for samples in usable] for scale in JUDGED_SCALES
        ]
        choices = [chosen for here in by_scale if all(here) and (chosen := _within_suite(claim.suite, here))]
        if choices:
            return choices
    return []


def _within_suite(first: str, candidates: list[list[Sample]]) -> Schedules:
    others = sorted({one.suite for samples in candidates for one in samples} - {first})
    for suite in (first, *others):
        here = [[one for one in samples if one.suite == suite] for samples in candidates]
        if all(here):
            return _alike(suite, here)
    return {"": [max(samples, key=lambda one: (one.suite == first, *one.rank)) for samples in candidates]}


def _alike(suite: str, candidates: list[list[Sample]]) -> Schedules:
    """Picks what agrees in the settings that the suite asks both sides to share; nothing if no two agree."""
    known = all_suites().get(suite)
    names = known.alike if known else ()
    best = [{one.shared(names): one for one in sorted(some, key=lambda one: one.rank)} for some in candidates]
    both = [schedule for schedule in best[0] if all(schedule in other for other in best)]
    ranked = sorted(both, key=lambda schedule: best[0][schedule].rank, reverse=True)
    return {schedule: [some[schedule] for some in best] for schedule in ranked}


def _missing(claim: PublishedClaim, candidates: list[list[Sample]], index: Index) -> str:
    """Says what a claim would need."""
    suite = all_suites().get(claim.suite)
    for measure, samples in zip(claim.rule.measures, candidates, strict=True):
        if not samples and suite and measure.task in suite.unavailable:
            return suite.unavailable[measure.task]
        known = [r for r in index.get((measure.task, measure.model), ()) if _fits(r.size, measure.size)]
        if not known:
            return f"There is no run of {_model(measure.model, measure.size)} on {measure.task}."
        if not samples:
            point = "" if measure.at is None else f" {_at(measure)}"
            return f"The runs of {measure.model} on {measure.task} do not have {measure.metric}{point}."
    if all(one.scale not in JUDGED_SCALES for samples in candidates for one in samples):
        return "Only a tiny run exists, which is for tests."
    return "Its two sides were not run at the same scale, or not trained alike."


def _judge_number(claim: PublishedClaim, rule: Number, sample: Sample) -> Verdict:
    published = float(claim.value or 0.0)
    against = f"published is {number(published)}{_trouble(sample)}."
    if _is_count(rule) and sample.values:
        return _count(claim, published, against, sample)
    values = [*sample.values.values(), *(math.nan for _ in sample.diverged)]
    ours, ends = mean(values), interval(values) if len(values) >= MIN_SEEDS else None
    outcome, text = rule.outcome(published, ours), f"Ours is {number(ours)}{_seeds(len(values), ends)}"
    if ends is None:
        return _verdict(claim, "undecided", f"{text}, too few to decide; {against}", [sample], ours)
    if outcome == "reproduced":
        return _verdict(claim, outcome, f"{text}; {against}", [sample], ours, ends)
    if math.isfinite(ours) and _overlap(ends, published, rule.tolerance):
        why = f"{text}: the mean is beyond the tolerance and the seeds reach it; {against}"
        return _verdict(claim, "undecided", why, [sample], ours, ends)
    if outcome == "refuted":
        judged: Judgement = "undecided" if ends[0] < 0 < ends[1] else "refuted"
        return _verdict(claim, judged, f"{text}, of the other sign; {against}", [sample], ours, ends)
    beyond = "" if math.isnan(ours) else f", beyond the tolerance of {100 * rule.tolerance:g} %"
    return _verdict(claim, outcome, f"{text}{beyond}; {against}", [sample], ours, ends)


def _is_count(rule: object) -> bool:
    """Whether a number has no spread and does not depend on how training ends."""
    return isinstance(rule, Number) and rule.better is None and rule.tolerance == 0


def _count(claim: PublishedClaim, published: float, against: str, sample: Sample) -> Verdict:
    values = list(sample.values.values())
    text = f"Ours is {number(mean(values))}; {against}"
    if all(value == published for value in values):
        return _verdict(claim, "reproduced", text, [sample], mean(values))
    if sample.scale == JUDGED_SCALES[0]:
        return _verdict(claim, "refuted", text, [sample], mean(values))
    why = f"{text.rstrip('.')}, and runs at scale {sample.scale} may be smaller."
    return _verdict(claim, "undecided", why, [sample], mean(values))


def _overlap(ends: Interval, published: float, tolerance: float) -> bool:
    margin = tolerance * abs(published)
    return ends[0] <= published + margin and ends[1] >= published - margin


def _judge_order(claim: PublishedClaim, rule: Beats, printed: Printed, ours: Sample, rival: Sample) -> Verdict:
    sides = [ours, rival]
    if not rival.values:
        return _not_judged(claim, _failure(rival), sides)
    values = {**ours.values, **dict.fromkeys(ours.diverged, math.nan)}
    common = sorted(values.keys() & rival.values.keys())
    if not common:
        return _not_judged(claim, "Its two sides have no seed in common.", sides)
    without = _uninformative(ours, rival)
    seeds = [seed for seed in common if seed not in without]
    if len(seeds) < min(MIN_SEEDS, len(common)):
        what = _order_subject(rule, ours, rival, "over")
        reasons = "; ".join(dict.fromkeys(without[seed] for seed in common if seed in without))
        left = f"; {len(seeds)} left {_verb('decide', len(seeds))} no order" if seeds else ""
        why = f"{what} decides nothing in {len(common) - len(seeds)} of {len(common)} seeds: {reasons}{left}."
        return _verdict(claim, "undecided", why, sides, None, None, len(common))
    lead = advantage([values[s] for s in seeds], [rival.values[s] for s in seeds], rule.better, rule.factor)
    text = _order_text(rule, lead, ours, rival, len(seeds)) + _left_out(common, without)
    if math.isnan(lead.mean):
        judged: Judgement = "refuted" if len(seeds) >= MIN_SEEDS else "undecided"
        return _verdict(claim, judged, f"{text}.", sides, None, None, len(seeds))
    if lead.interval is None:
        why = f"{text}; fewer than {MIN_SEEDS} seeds do not decide an order."
        return _verdict(claim, "undecided", why, sides, lead.mean, None, len(seeds), lead.kind)
    judged, reason = _order_outcome(lead, *_needed(rule, lead.kind == "ratio", printed))
    return _verdict(claim, judged, f"{text}; {reason}.", sides, lead.mean, lead.interval, len(seeds), lead.kind)


def _uninformative(ours: Sample, rival: Sample) -> dict[int, str]:
    """Returns the seeds in which a side did not learn, the rival has no number, or both say nothing, and why."""
    nothing = f"the {rival.measure.metric} of {rival.name} is not a number"
    reasons = {seed: nothing for seed, value in rival.values.items() if math.isnan(value)}
    for sample in (ours, rival):
        for seed, reason in sample.not_learnt(order=True).items():
            reasons.setdefault(seed, reason)
    here, there = ours.plateaus(), rival.plateaus()
    return reasons | {seed: why for seed, why in here.items() if seed in there}


def _left_out(common: Sequence[int], without: dict[int, str]) -> str:
    reasons = Counter(without[seed] for seed in common if seed in without)
    return "".join(f"; left out in {count} of {len(common)} seeds, {why}" for why, count in reasons.items())


def _needed(rule: Beats, ratio: bool, printed: Printed) -> tuple[float, bool]:
    """Returns what a lead has to exceed, and whether a paper prints it: its factor, or half of its effect."""
    if rule.factor != 1:
        return (rule.factor if ratio else 0.0), True
    sides = [printed.get(measure) for measure in (rule.measure, rule.rival)]
    small, large = sides if rule.better == "lower" else reversed(sides)
    if small is not None and large is not None and large > small:
        if not ratio:
            return (large - small) / 2, True
        if small > 0:
            return 1 + (large / small - 1) / 2, True
    return (LEAST_EFFECT if ratio else 0.0), False


def _order_outcome(lead: Advantage, needed: float, printed: bool) -> tuple[Judgement, str]:
    """Judges by how the interval lies to no difference and to what is needed, and says so."""
    low, high = lead.interval or (math.nan, math.nan)
    asked = f"the claim asks for more than {number(needed)}"
    if low > needed:
        return "reproduced", asked
    if low == high == lead.none:
        return "refuted", f"{asked}, and there is no difference"
    if high < lead.none and high <= needed:
        return "refuted", f"{asked}, and the opposite holds"
    if high <= needed and low > lead.none:
        if printed:
            return "worse", f"{asked}: the order is right, the effect is smaller"
        return "undecided", f"{asked}: the order is right, and smaller than any plot shows"
    if high <= needed and printed:
        return "refuted", f"{asked}: it is less"
    includes = "no difference" if low <= lead.none <= high else "less"
    return "undecided", f"{asked}, and the seeds include {includes}"


def _order_text(rule: Beats, lead: Advantage, ours: Sample, rival: Sample, seeds: int) -> str:
    """Says which side has how much more, and what is to know of the runs."""
    trouble = _trouble(ours) + _trouble(rival, left_out=True)
    if ours.suite != rival.suite:
        trouble += f"; the runs are of two suites, {ours.suite} and {rival.suite}"
    if math.isnan(lead.mean):
        return f"{_order_subject(rule, ours, rival, 'over')} is not a number{trouble}"
    times = f"{number(rule.factor)} times " if lead.kind == "difference" and rule.factor != 1 else ""
    joint = "over" if lead.kind == "ratio" else f"minus {times}".rstrip()
    amount = f"{number(lead.mean)}{_seeds(seeds, lead.interval)}"
    return f"{_order_subject(rule, ours, rival, joint)} is {amount}{trouble}"


def _order_subject(rule: Beats, ours: Sample, rival: Sample, joint: str) -> str:
    names = [ours.name, rival.name]
    if ours.measure.at != rival.measure.at:
        names = [f"{sample.name} {_at(sample.measure)}" for sample in (ours, rival)]
    point = f" {_at(rule.measure)}" if rule.measure.at == rule.rival.at is not None else ""
    large, small = reversed(names) if rule.better == "lower" else names
    return f"The {rule.measure.metric}{point} of {large} {joint} that of {small}"


def _judge_limit(claim: PublishedClaim, rule: AtMost | AtLeast, sample: Sample) -> Verdict:
    without = sample.not_learnt(order=False)
    values = [value for seed, value in sample.values.items() if seed not in without]
    values += [math.nan for _ in sample.diverged]
    bound = f"at {'most' if isinstance(rule, AtMost) else 'least'} {number(rule.limit)}"
    aside = _left_out(sorted(sample.values), without)
    if not values:
        why = f"Published is {bound}, and nothing is left to judge{aside}."
        return _verdict(claim, "undecided", why, [sample], None, None, len(sample.values))
    ours, ends = mean(values), interval(values) if len(values) >= MIN_SEEDS else None
    holding = sum(rule.holds(value) for value in values)
    text, count = f"Ours is {number(ours)}{_seeds(len(values), ends)}", len(values)
    if ends is None:
        why = f"{text}, too few to judge a limit; published is {bound}{_trouble(sample)}{aside}."
        return _verdict(claim, "undecided", why, [sample], ours, None, count)
    if holding == len(values):
        why = f"{text}; published is {bound}, and every seed keeps to it{aside}."
        return _verdict(claim, "reproduced", why, [sample], ours, ends, count)
    how = f"{holding} of {len(values)} seeds keep to it" if holding else "no seed keeps to it"
    judged: Judgement = "undecided" if holding or sample.diverged else "refuted"
    why = f"{text}; published is {bound}, and {how}{_trouble(sample)}{aside}."
    return _verdict(claim, judged, why, [sample], ours, ends, count)


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
    ids = tuple(dict.fromkeys(sample.records[seed].id for sample in samples for seed in sorted(sample.records)))
    known = ours if ours is not None and not math.isnan(ours) else None
    shown = ends if ends is not None and not math.isnan(ends[0]) else None
    count = len(samples[0].values) + len(samples[0].diverged) if seeds is None else seeds
    return Verdict(claim, ids[0], known, judged, why, shown, samples[0].scale, ids, count, kind)


def _not_judged(claim: PublishedClaim, why: str, samples: Sequence[Sample] = ()) -> Verdict:
    if not samples:
        return Verdict(claim, None, None, "not judged", why)
    return _verdict(claim, "not judged", why, samples, None)


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
    total, diverged = len(sample.records), len(sample.diverged)
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
    if count < ENOUGH_SEEDS:
        return f" (range of {seeds} {number(ends[0])} to {number(ends[1])})"
    return f" ({seeds}, 95 % interval {number(ends[0])} to {number(ends[1])})"


def _verb(word: str, count: int) -> str:
    return f"{word}s" if count == 1 else word


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _model(name: str, size: str | None) -> str:
    return f"{name} ({size})" if size else name


def _at(measure: Measure) -> str:
    if measure.at is None:
        return "in distribution"
    return f"at {measure.at}" if isinstance(measure.at, str) else f"at {measure.at:g}"
