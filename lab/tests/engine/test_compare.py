"""Verdicts on synthetic records whose right judgement is known."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from wellposed_lab.engine.claims import (
    AtLeast,
    AtMost,
    Beats,
    Measure,
    NotATarget,
    Number,
    PublishedClaim,
    is_sentence,
    load_claims,
)
from wellposed_lab.engine.experiment import all_suites, get_suite
from wellposed_lab.engine.judge import DECIDED, JUDGEMENTS, tally, verdicts
from wellposed_lab.engine.store import Record, Store, Value
from wellposed_lab.report.paper import committed_records

from wellposed.errors import InputError

RESULTS = Path(__file__).parents[2] / "results"

OURS = Measure("test_mse", "implicit", "identity", at=30, size="001")
RIVAL = replace(OURS, model="mlp")
CLOSE = (0.98, 0.99, 1.0, 1.01, 1.02)  # five seeds around one
DIVERGED = "NonFiniteLossError: the loss became NaN."
MISSING = "MissingExtraError: 'plum' is needed here and is not installed."


def record(model="implicit", seed=0, value=1.0, *, metric="test_mse", at=30.0, **fields):
    scale, suite = fields.get("scale", "default"), fields.get("suite", "identity")
    config = {"seed": seed, "scale": scale, "suite": suite, "options": fields.pop("options", None)}
    empty = fields.get("error") is not None
    known = {
        "task": "identity",
        "size": "001",
        "role": "ours",
        "kind": "run",
        "started": "2026-01-01T00:00:00+00:00",
        "values": () if empty else (Value(metric, value, at), Value("parameters", 196.0)),
        **fields,
    }
    name = "-".join(
        str(part) for part in (suite, scale, model, known["task"], known["size"], seed, config["options"])
    )
    nothing = {"series": {}, "facts": {}, "environment": {}, "seconds": 1.0}
    return Record(
        **{"id": name, "suite": suite, "scale": scale, "config": config, **nothing, **known},
        model=model,
        seed=seed,
    )


def seeds(values, model="implicit", **fields):
    return [record(model, seed, value, **fields) for seed, value in enumerate(values)]


def claim(rule, value=None, suite="identity"):
    return PublishedClaim((("001", "Figure 3"),), "Something is claimed.", value, suite, rule)


def judge(rule, records, value=None, **fields):
    (found,) = verdicts(records, [claim(rule, value, **fields)])
    return found


def number(records, value=1.0, better="lower", tolerance=0.1):
    return judge(Number(OURS, better, tolerance), records, value)


def order(ours, rival, better="lower", factor=1.0, **fields):
    records = [*seeds(ours, **fields), *seeds(rival, "mlp", **fields)]
    return judge(Beats(OURS, RIVAL, better, factor), records)


def test_every_claim_is_judged_in_order_and_nothing_is_run_without_records(tmp_path):
    found = verdicts([])
    assert [one.claim for one in found] == list(load_claims())
    assert all(one.verdict == "not judged" and one.record_id is None and one.ours is None for one in found)
    assert all(is_sentence(one.why) for one in found)
    store = Store(tmp_path)
    store.append(*seeds(CLOSE))
    assert verdicts(store, [claim(Number(OURS), 1.0)])[0].verdict == "reproduced"


@pytest.mark.parametrize(
    ("middle", "better", "verdict"),
    [
        (1.0, "lower", "reproduced"),
        (1.09, "lower", "reproduced"),
        (0.5, "lower", "better"),
        (2.0, "lower", "worse"),
        (2.0, "higher", "better"),
        (0.5, "higher", "worse"),
        (0.5, None, "worse"),
        (2.0, None, "worse"),
    ],
)
def test_a_number_is_judged_by_its_interval(middle, better, verdict):
    found = number(seeds([middle * factor for factor in CLOSE]), 1.0, better)
    assert found.verdict == verdict
    assert found.ours == pytest.approx(middle)
    assert found.interval[0] < middle < found.interval[1]
    assert (found.seeds, found.scale, found.kind) == (5, "default", "mean")
    assert "5 seeds" in found.why and "published is 1" in found.why and "95 % interval" in found.why


def test_an_interval_that_reaches_the_tolerance_decides_nothing():
    found = number(seeds([1.05, 1.1, 1.2, 1.3, 1.4]))
    assert found.ours == pytest.approx(1.21) and found.verdict == "undecided"
    assert "the mean is beyond the tolerance and the seeds reach it" in found.why
    assert number(seeds([1.11, 1.12, 1.2, 1.3, 1.4])).verdict == "worse"
    assert number(seeds([0.89, 0.88, 0.8, 0.7, 0.6])).verdict == "better"


def test_two_seeds_decide_no_number():
    for value in (0.1, 10.0):
        found = number(seeds([value, value]))
        assert found.verdict == "undecided" and found.interval is None and found.ours == value
        assert "too few" in found.why and found.record_id is not None
    assert number(seeds([1.0, 1.05])).verdict == "undecided"
    assert number(seeds([0.1, 0.1, 0.1])).verdict == "better"


def test_counts_are_exact_and_need_one_seed():
    rule = Number(Measure("parameters", "implicit", "identity", size="001"), tolerance=0.0)
    assert judge(rule, seeds([1.0]), 196).verdict == "reproduced"
    assert judge(rule, seeds([1.0], scale="paper"), 197).verdict == "refuted"
    smaller = judge(rule, seeds([1.0]), 197)
    assert smaller.verdict == "undecided" and "may be smaller" in smaller.why
    counts = enumerate((196.0, 197.0, 195.0))
    spread = [record(seed=s, metric="parameters", value=v, at=None, scale="paper") for s, v in counts]
    assert judge(rule, [replace(one, values=one.values[:1]) for one in spread], 196).verdict == "refuted"
    diverged = [*seeds([1.0] * 2), record(seed=2, error=DIVERGED)]
    assert judge(rule, diverged, 196).verdict == "reproduced"


def test_divergence_makes_a_number_worse_and_other_failures_are_left_out():
    good = seeds(CLOSE[:4])
    found = number([*good, record(seed=4, error=DIVERGED)])
    assert (found.verdict, found.ours, found.interval) == ("worse", None, None)
    assert "diverged in 1 of 5 seeds" in found.why
    found = number([*good, record(seed=4, error=MISSING)])
    assert found.verdict == "reproduced" and found.seeds == 4 and "left out in 1 of 5 seeds" in found.why
    found = number([record(seed=s, error=DIVERGED) for s in range(5)])
    assert found.verdict == "worse"
    found = number([record(seed=s, error=MISSING) for s in range(5)])
    assert found.verdict == "not judged" and "plum" in found.why and found.record_id is not None


def test_not_a_number_is_worse():
    assert number(seeds([1.0, math.nan, 1.0])).verdict == "worse"
    assert number(seeds([math.inf, 1.0, 1.0])).verdict == "worse"


@pytest.mark.parametrize(
    ("rival", "better", "factor", "verdict", "words"),
    [
        (10.0, "lower", 1.0, "reproduced", "more than 1"),
        (10.0, "lower", 5.0, "reproduced", "more than 5"),
        (10.0, "lower", 50.0, "worse", "the effect is smaller"),
        (0.1, "lower", 1.0, "refuted", "opposite"),
        (1.0, "lower", 1.0, "undecided", "no difference"),
        (0.1, "higher", 1.0, "reproduced", "more than 1"),
        (10.0, "higher", 1.0, "refuted", "opposite"),
        (0.7, "lower", 0.5, "reproduced", "more than 0.5"),
        (0.3, "lower", 0.5, "refuted", "opposite"),
    ],
)
def test_orders(rival, better, factor, verdict, words):
    noise = (1.01, 0.98, 1.02, 0.99, 1.0)
    found = order(CLOSE, [rival * value for value in noise], better, factor)
    assert found.verdict == verdict
    assert words in found.why and "5 seeds" in found.why
    assert found.ours == pytest.approx(rival if better == "lower" else 1 / rival, rel=0.05)
    assert found.kind == "ratio" and len(found.record_ids) == 10 and found.record_id == found.record_ids[0]


def test_an_interval_around_the_factor_is_undecided():
    found = order([1.0] * 5, [0.5, 2.0, 3.0, 0.8, 2.0])
    assert found.verdict == "undecided" and "the seeds include no difference" in found.why
    found = order([1.0] * 5, [4.0, 6.0, 4.5, 5.5, 5.0], factor=5.0)
    assert found.verdict == "undecided" and "the seeds include less" in found.why


def test_orders_are_paired_by_seed():
    ours, rival = [1.0, 10.0, 100.0, 1e3, 1e4], [2.0, 20.0, 200.0, 2e3, 2e4]
    assert order(ours, rival).verdict == "reproduced"
    assert order(ours, rival[::-1]).verdict == "undecided"
    shuffled = [*reversed(seeds(ours)), *seeds(rival, "mlp")]
    assert judge(Beats(OURS, RIVAL, "lower"), shuffled).verdict == "reproduced"
    apart = [*seeds(ours), *(replace(one, seed=one.seed + 10) for one in seeds(rival, "mlp"))]
    assert "no seed in common" in judge(Beats(OURS, RIVAL, "lower"), apart).why


def test_ties_do_not_count_and_are_called_so():
    found = order([1.0] * 5, [1.0] * 5)
    assert found.verdict == "refuted" and "there is no difference" in found.why


def test_orders_of_values_that_are_not_positive():
    found = order([-1.0, -2.0, 0.0], [1.0, 1.0, 1.5])
    assert found.verdict == "reproduced" and found.kind == "difference" and "minus that of" in found.why
    assert order([0.0, 0.0, 0.0], [0.0, 1.0, -1.0]).verdict == "undecided"


def test_two_seeds_decide_no_order():
    found = order([1.0, 1.0], [9.0, 9.0])
    assert found.verdict == "undecided" and found.ours == pytest.approx(9) and "fewer than 3 seeds" in found.why


def test_a_rival_that_diverged_wins_nothing_for_the_claim():
    def against(*errors):
        rivals = [record("mlp", s, 9.0, error=error) for s, error in enumerate(errors)]
        return judge(Beats(OURS, RIVAL, "lower"), [*seeds([1.0] * 5), *rivals])

    found = against(None, None, None, DIVERGED, DIVERGED)
    assert found.verdict == "reproduced" and found.seeds == 3
    assert "mlp (001) diverged and is left out in 2 of 5 seeds" in found.why
    found = against(*[DIVERGED] * 5)
    assert found.verdict == "not judged" and "failed in all 5 seeds" in found.why and DIVERGED[:-1] in found.why


def test_a_rival_without_a_number_neither_wins_nor_loses():
    found = order([1.0] * 5, [9.0, 9.0, math.nan, 9.0, math.nan])
    assert found.verdict == "reproduced" and found.seeds == 3
    assert "left out in 2 of 5 seeds, the test_mse of mlp (001) is not a number" in found.why
    assert order([1.0] * 5, [math.nan] * 5).verdict == "undecided"
    assert order([1.0, 1.0, math.nan, 1.0, 1.0], [9.0] * 5).verdict == "refuted"


def test_a_winner_that_diverged_loses():
    records = [*seeds([1.0] * 4), record(seed=4, error=DIVERGED), *seeds([9.0] * 5, "mlp")]
    found = judge(Beats(OURS, RIVAL, "lower"), records)
    assert found.verdict == "refuted" and found.ours is None
    assert "implicit (001) diverged in 1 of 5 seeds" in found.why


def test_a_rival_that_overflowed_is_beaten():
    found = order([1.0] * 5, [math.inf] * 5)
    assert found.verdict == "reproduced" and found.ours == math.inf


@pytest.mark.parametrize("rule", [AtMost(OURS, 1.0), AtLeast(OURS, 1.0)])
def test_limits_hold_in_every_seed(rule):
    sign = 1 if isinstance(rule, AtMost) else -1
    values = [1.0 - sign * gap for gap in (0.0, 0.1, 0.2, 0.3, 0.4)]
    assert judge(rule, seeds(values), 1.0).verdict == "reproduced"
    found = judge(rule, seeds([*values[:4], 1 + sign * 1e-3]), 1.0)
    assert found.verdict == "undecided" and "4 of 5 seeds keep to it" in found.why
    found = judge(rule, seeds([1 + sign * 0.1] * 5), 1.0)
    assert found.verdict == "refuted" and "no seed keeps to it." in found.why
    found = judge(rule, [*seeds(values[:4]), record(seed=4, error=DIVERGED)], 1.0)
    assert found.verdict == "undecided" and "diverged in 1 of 5" in found.why
    found = judge(rule, seeds(values[:2]), 1.0)
    assert found.verdict == "undecided" and "too few" in found.why


def test_what_is_no_target_gives_its_reason():
    found = judge(NotATarget("The base of the growth is not stated."), seeds(CLOSE))
    assert (found.verdict, found.why) == ("not judged", "The base of the growth is not stated.")


def test_paper_scale_counts_before_default_and_tiny_never():
    tiny, default, paper = (seeds([v] * 5, scale=s) for v, s in ((1.0, "tiny"), (2.0, "default"), (3.0, "paper")))
    found = number([*paper, *default, *tiny])
    assert (found.ours, found.scale) == (3.0, "paper")
    assert number([*default, *tiny]).ours == 2.0
    found = number(tiny)
    assert (found.verdict, found.why) == ("not judged", "Only a tiny run exists, which is for tests.")
    failed = [replace(one, values=(), error=DIVERGED) for one in paper]
    assert number([*failed, *default]).ours == 2.0


def test_a_smaller_scale_never_overrules_a_larger_one():
    rule = Beats(OURS, RIVAL, "lower")
    default = [*seeds([1.0] * 3), *seeds([9.0] * 3, "mlp")]

    def paper(ours, rival, count):
        return [*seeds([ours] * count, scale="paper"), *seeds([rival] * count, "mlp", scale="paper")]

    found = judge(rule, [*default, *paper(9.0, 1.0, 2)])
    assert (found.verdict, found.scale, found.seeds) == ("undecided", "paper", 2)
    assert "scale default says reproduced, which 2 seeds at scale paper do not decide" in found.why
    found = judge(rule, [*default, *paper(1.0, 9.0, 2)])
    assert (found.verdict, found.scale, found.seeds) == ("reproduced", "default", 3)
    assert "2 seeds at scale paper agree" in found.why
    assert judge(rule, [*default, *paper(9.0, 1.0, 3)]).verdict == "refuted"
    assert judge(rule, paper(1.0, 9.0, 2)).scale == "paper"
    found = number([*seeds([1.0] * 3), *seeds([2.0] * 2, scale="paper")])
    assert (found.verdict, found.ours) == ("undecided", 2.0)


def test_both_sides_of_an_order_are_of_one_scale():
    default = [*seeds([1.0] * 5), *seeds([9.0] * 5, "mlp")]
    paper = seeds([100.0] * 5, scale="paper")
    found = judge(Beats(OURS, RIVAL, "lower"), [*default, *paper])
    assert found.verdict == "reproduced" and found.scale == "default"
    found = judge(Beats(OURS, RIVAL, "lower"), [*paper, *seeds([9.0] * 5, "mlp")])
    assert found.verdict == "not judged" and "same scale" in found.why


def test_sizes_match_where_either_leaves_them_open():
    rule = Number(OURS, "lower")
    assert judge(rule, seeds(CLOSE, size=None), 1.0).verdict == "reproduced"
    assert judge(rule, seeds(CLOSE, size="000"), 1.0).why == "There is no run of implicit (001) on identity."
    anything = Number(replace(OURS, size=None), "lower")
    assert judge(anything, seeds(CLOSE, size="000"), 1.0).verdict == "reproduced"
    for count in (4, 1):  # the size counts before the number of seeds
        found = judge(rule, [*seeds([5.0] * 5, size=None), *seeds([1.0] * count)], 1.0)
        assert found.ours == 1.0


def test_the_own_suite_counts_first_then_one_with_both_sides():
    own, other = seeds([1.0] * 5), seeds([5.0] * 5, suite="activations")
    assert number([*other, *own]).ours == 1.0 and number(other).ours == 5.0
    larger = seeds([5.0] * 5, suite="activations", scale="paper")
    assert number([*larger, *own]).ours == 1.0, "at whatever scale"
    rule = Beats(OURS, RIVAL, "lower")
    rival = seeds([9.0] * 5, "mlp", suite="activations")
    found = judge(rule, [*own, *other, *rival])
    assert found.ours == pytest.approx(9 / 5) and "two suites" not in found.why
    found = judge(rule, [*own, *rival])
    assert found.ours == pytest.approx(9) and "two suites, identity and activations" in found.why


def test_of_several_settings_the_most_seeds_count_and_not_the_best():
    many, few = seeds([3.0] * 5, options="a"), seeds([1.0] * 4, options="b")
    assert number([*few, *many]).ours == number([*many, *few]).ours == 3.0
    late = seeds([2.0] * 5, options="c", started="2026-02-01T00:00:00+00:00")
    assert number([*late, *many]).ours == number([*many, *late]).ours == 2.0


def test_searches_other_points_and_other_tasks_do_not_count():
    assert number(seeds(CLOSE, kind="search")).why == "There is no run of implicit (001) on identity."
    assert number(seeds(CLOSE, task="addition")).verdict == "not judged"
    assert number(seeds(CLOSE, at=45.0)).why == "The runs of implicit on identity do not have test_mse at 30."
    assert number(seeds(CLOSE, metric="mape")).verdict == "not judged"
    assert number(seeds(CLOSE, at=30)).verdict == "reproduced"


def test_a_task_without_data_says_so():
    measure = Measure("mape", "implicit-rnn", "volatility")
    found = judge(Number(measure), [], 1.0, suite="volatility")
    assert (found.verdict, found.why) == ("not judged", get_suite("volatility").unavailable["volatility"])
    found = judge(Number(replace(measure, task="volatility-csi500")), [], 1.0, suite="volatility")
    assert found.why == "There is no run of implicit-rnn on volatility-csi500."


def test_one_model_at_two_points_is_compared_with_itself():
    rule = Beats(replace(OURS, at=80), replace(OURS, at=10), "higher")
    values = (Value("test_mse", 8.0, 80.0), Value("test_mse", 2.0, 10.0))
    found = judge(rule, [replace(one, values=values) for one in seeds(CLOSE)])
    assert found.verdict == "reproduced" and len(found.record_ids) == 5
    assert "of implicit (001) at 80 over that of implicit (001) at 10 is 4" in found.why


def test_every_why_is_one_sentence_and_every_verdict_known():
    measures = [measure for one in load_claims() for measure in one.rule.measures]
    models = {measure.model for measure in measures if measure.task == "identity"}
    points = tuple(Value("test_mse", 2.0 + at, at) for at in (10.0, 15.0, 30.0, 80.0, 205.0))
    records = [
        replace(record(model, seed, size=size), values=points)
        for model in models
        for size in ("000", "001")
        for seed in range(5)
    ]
    found = [one for one in verdicts(records) if one.claim.suite == "identity"]
    assert sum(one.verdict != "not judged" for one in found) > 11
    assert {one.verdict for one in found} < set(JUDGEMENTS)
    for one in found:
        assert is_sentence(one.why) and ". " not in one.why.replace("vs. ", ""), one.why


NOISY = {"suite": "noise-mnist", "task": "mnist", "size": None}


def noisy(model, values, clean, *, metric="accuracy", at=0.0):
    """Records of noise-mnist with an accuracy without noise, one a seed."""
    return [
        replace(one, values=(Value(metric, value, at), Value("accuracy", base)))
        for one, value, base in zip(seeds(values, model, **NOISY), values, clean, strict=True)
    ]


def test_what_is_not_decided_is_not_held_against_a_claim():
    assert order([1.0] * 5, [0.5, 2.0, 3.0, 0.8, 2.0]).verdict == "undecided"
    assert judge(AtMost(OURS, 1.0), seeds([0.9, 0.9, 1.1]), 1.0).verdict == "undecided"
    assert "undecided" in JUDGEMENTS and "undecided" not in DECIDED


def test_no_order_is_won_against_a_side_that_did_not_learn():
    ours = noisy("deq-386", [0.7] * 3, [0.97] * 3)
    rule = Beats(Measure("accuracy", "deq-386", "mnist", 0), Measure("accuracy", "ffw-9", "mnist", 0), "higher")
    assert judge(rule, [*ours, *noisy("ffw-9", [0.5] * 3, [0.97] * 3)]).verdict == "reproduced"
    found = judge(rule, [*ours, *noisy("ffw-9", [0.1135] * 3, [0.1135] * 3)])
    assert found.verdict == "undecided" and found.ours is None
    assert "ffw-9 did not learn (accuracy at least 0.93 is asked for)" in found.why
    four = [
        *noisy("deq-386", [0.7] * 4, [0.97] * 4),
        *noisy("ffw-9", [0.5, 0.5, 0.5, 0.1], [0.97, 0.97, 0.97, 0.1]),
    ]
    found = judge(rule, four)
    assert (found.verdict, found.seeds) == ("reproduced", 3) and "left out in 1 of 4 seeds" in found.why


def test_a_lead_over_a_network_that_did_not_learn_is_none():
    rule = AtMost(Measure("sensitivity_ratio", "deq-467", "mnist"), 1.0)
    both = [
        replace(one, values=(Value("accuracy", clean), Value("sensitivity", sensitivity)))
        for model, clean, sensitivity in (("deq-467", 0.97, 1.0), ("ffw-13", 0.11, 9.0))
        for one in seeds([1.0] * 3, model, **NOISY)
    ]
    found = judge(rule, both, 1.0)
    assert found.verdict == "undecided" and "the FFW of its size did not learn" in found.why
    better = [replace(one, values=(Value("accuracy", 0.97), *one.values[1:])) for one in both]
    assert judge(rule, better, 1.0).verdict == "reproduced"
    worse = [replace(one, values=(Value("accuracy", 0.9), *one.values[1:])) for one in both[:3]]
    found = judge(rule, [*worse, *better[3:]], 1.0)
    assert "deq-467 did not learn" in found.why, "of a limit the model itself has to learn too"


def test_no_order_is_judged_between_sides_of_different_schedules():
    def of(model, value, batch, started):
        rows = noisy(model, [value, value + 0.01, value - 0.01], [0.97] * 3)
        return [replace(one, id=f"{one.id}-{batch}", started=started, config=one.config | {"batch_size": batch})
                for one in rows]  # fmt: skip

    rule = Beats(
        Measure("accuracy", "deq-386", "mnist", at=0.0), Measure("accuracy", "ffw-9", "mnist", at=0.0), "higher"
    )
    deq, short, long = (
        of("deq-386", 0.6, 128, "2026-01"),
        of("ffw-9", 0.7, 128, "2026-01"),
        of("ffw-9", 0.4, 16, "2026-02"),
    )
    alone = judge(rule, [*deq, *long], suite="noise-mnist")
    assert alone.verdict == "not judged" and "trained alike" in alone.why
    assert judge(rule, [*deq, *long, *short], suite="noise-mnist").verdict == "refuted"
    both = [*deq, *long, *short, *of("deq-386", 0.5, 16, "2026-02")]
    assert judge(rule, both, suite="noise-mnist").verdict == "reproduced"
    lost = [replace(one, values=(*one.values[:-1], Value("accuracy", 0.8))) for one in both[-3:]]
    found = judge(rule, [*both[:-3], *lost], suite="noise-mnist")
    assert found.verdict == "refuted" and "with batch_size 16, the accuracy at 0 of deq-386" in found.why


def test_no_order_is_judged_where_both_sides_say_nothing():
    fields = {"suite": "prefix-sums", "task": "prefix-sums", "size": None, "metric": "accuracy", "at": 512}
    rule = Beats(
        Measure("accuracy", "ffw", "prefix-sums", 512),
        Measure("accuracy", "ffw-noise-0db", "prefix-sums", 512),
        "higher",
    )
    chance = seeds([0.50] * 5, "ffw-noise-0db", **fields)
    found = judge(rule, [*seeds([0.52] * 5, "ffw", **fields), *chance])
    assert found.verdict == "undecided" and "both are at chance" in found.why
    assert judge(rule, [*seeds([0.9] * 5, "ffw", **fields), *chance]).verdict == "reproduced"
    alone = [*seeds([0.50] * 5, "ffw", **fields), *seeds([0.9] * 5, "ffw-noise-0db", **fields)]
    assert judge(rule, alone).verdict == "refuted"


def test_a_limit_of_a_plateau_may_be_another_metric_of_the_record():
    where = {"suite": "mazes", "task": "mazes", "size": None}
    rule = Beats(Measure("accuracy", "deq", "mazes", 59), Measure("accuracy", "ffw", "mazes", 59), "higher")

    def mazes(model, accuracy):
        values = (Value("accuracy", accuracy, 59), Value("without_path", 0.87, 59))
        return [replace(one, values=values) for one in seeds([1.0] * 5, model, **where)]

    assert judge(rule, [*mazes("deq", 0.86), *mazes("ffw", 0.7)]).verdict == "undecided"
    assert judge(rule, [*mazes("deq", 0.9), *mazes("ffw", 0.7)]).verdict == "reproduced"


def test_an_order_needs_half_of_the_printed_effect():
    printed = [claim(Number(OURS, "lower"), 1.0), claim(Number(RIVAL, "lower"), 3.0)]

    def against(effect, claims=()):
        records = [*seeds([1.0] * 5), *seeds([effect] * 5, "mlp")]
        return verdicts(records, [claim(Beats(OURS, RIVAL, "lower")), *claims])[0]

    assert against(1.4).verdict == "reproduced"
    found = against(1.4, printed)
    assert found.verdict == "worse" and "more than 2: the order is right, the effect is smaller" in found.why
    assert against(2.1, printed).verdict == "reproduced"
    found = against(1.0005)
    assert found.verdict == "undecided" and "smaller than any plot shows" in found.why


def test_a_difference_of_the_other_sign_is_refuted_and_never_better():
    found = number(seeds([-13.0, -13.5, -14.0]), 9.2, better="lower")
    assert found.verdict == "refuted" and "of the other sign" in found.why
    assert number(seeds([-1.0, -1.5, 0.5]), 9.2, better="lower").verdict == "undecided"
    assert number(seeds([1.0, 1.5, 0.5]), 9.2, better="lower").verdict == "better"


def test_below_five_seeds_an_interval_is_a_range_and_a_verdict_is_marked():
    three, five = (order([1.0] * count, [5.0, 6.0, 7.0, 5.0, 6.0][:count]) for count in (3, 5))
    assert three.verdict == five.verdict == "reproduced" and three.marked and not five.marked
    assert "(range of 3 seeds 5 to 7)" in three.why and "95 %" not in three.why
    assert "5 seeds, 95 % interval" in five.why and not order([1.0] * 2, [9.0] * 2).marked
    rule = Number(Measure("parameters", "implicit", "identity", size="001"), tolerance=0.0)
    assert not judge(rule, seeds([1.0]), 196).marked


def test_seeds_that_share_one_network_are_marked():
    records = committed_records(RESULTS)
    shared = {name for name, suite in all_suites().items() if suite.one_network}
    dense = defaultdict(set)
    for one in records:
        if one.model == "dense" and (accuracy := one.value("accuracy")) is not None:
            dense[one.suite, one.scale, one.task].add(accuracy)
    assert shared == {suite for (suite, _, _), values in dense.items() if len(values) == 1}
    decided = [one for one in verdicts(records) if one.claim.suite in shared and one.verdict in DECIDED]
    assert len(decided) > 20 and all(one.marked for one in decided)


def test_a_claim_counts_once_and_questions_of_ours_apart():
    claims = load_claims()
    rules = [(one.rule, one.value, one.suite, one.own) for one in claims if not isinstance(one.rule, NotATarget)]
    assert len(set(rules)) == len(rules)
    judged = verdicts(committed_records(RESULTS), claims)
    told = [(one.claim.suite, one.claim.says, one.record_ids) for one in judged if one.record_ids]
    assert len(set(told)) == len(told)  # not even for two sizes of which one run serves both
    own = [one for one in claims if one.own]
    assert 20 < len(own) < 50 and {one.suite for one in own} == {
        "volatility",
        "sparsify-fashion",
        "sparsify-cifar",
        "sequence-length",
        "prefix-sums",
        "adversarial",
    }
    assert sum(tally(verdicts([], claims)).values()) == len(claims)


def test_every_reading_is_judged_and_a_claim_that_depends_on_it_is_undecided():
    rule, other = Beats(OURS, RIVAL, "lower"), Beats(OURS, replace(RIVAL, model="lstm"), "lower")
    both = replace(claim(rule), reading="plain", readings=(("injected", other),))
    records = [*seeds([1.0] * 5), *seeds([9.0] * 5, "mlp")]
    (found,) = verdicts([*records, *seeds([0.1] * 5, "lstm")], [both])
    assert found.verdict == "undecided" and found.why.startswith(
        "It depends on the reading: plain, reproduced (9)"
    )
    assert [(name, one.verdict) for name, one in found.readings] == [
        ("plain", "reproduced"),
        ("injected", "refuted"),
    ]
    (found,) = verdicts([*records, *seeds([7.0] * 5, "lstm")], [both])
    assert found.verdict == "reproduced" and len(found.readings) == 2
    (found,) = verdicts(records, [both])
    assert found.verdict == "reproduced" and found.readings[1][1].verdict == "not judged"


def test_a_reading_under_which_a_side_does_not_learn_is_left_out():
    rule = Beats(Measure("accuracy", "deq-386", "mnist", 0), Measure("accuracy", "ffw-9", "mnist", 0), "higher")
    other = replace(rule, rival=replace(rule.rival, model="ffw-9-inject"))
    both = replace(claim(rule), suite="noise-mnist", reading="plain", readings=(("injected", other),))
    ours, dead = noisy("deq-386", [0.7] * 3, [0.97] * 3), noisy("ffw-9", [0.1] * 3, [0.1] * 3)
    (found,) = verdicts([*ours, *dead, *noisy("ffw-9-inject", [0.9] * 3, [0.97] * 3)], [both])
    assert found.verdict == "refuted" and found.claim is both
    assert found.why == "Under the readings under which both sides learn: injected, refuted (0.778)."
    assert [one.verdict for _, one in found.readings] == ["undecided", "refuted"]
    (found,) = verdicts([*ours, *dead], [both])
    assert found.verdict == "undecided" and "did not learn" in found.why


def test_one_claim_in_two_wordings_is_refused(tmp_path, monkeypatch):
    entry = """
[[claim]]
where = ["00{paper} Table 1"]
says = "{says}"
value = 196
suite = "parameters"
rule = "number"
measure = {{ metric = "parameters", model = "implicit", task = "identity" }}
"""
    path = tmp_path / "claims.toml"
    head = '[metrics]\nparameters = "how many"\n[tasks]\nidentity = "the identity"\n'
    texts = (
        entry.format(paper=0, says="It has 196 weights."),
        entry.format(paper=1, says="There are 196 of them."),
    )
    path.write_text(head + "".join(texts))
    monkeypatch.setattr("wellposed_lab.engine.claims.claim_files", lambda: [path])
    with pytest.raises(InputError, match="one entry with all its places"):
        load_claims.__wrapped__()
