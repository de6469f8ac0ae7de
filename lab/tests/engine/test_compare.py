"""Verdicts on synthetic records whose right judgement is known."""

import math
from dataclasses import replace

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
from wellposed_lab.engine.judge import JUDGEMENTS, verdicts
from wellposed_lab.engine.store import Record, Store, Value

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
    assert all(one.verdict == "not run" and one.record_id is None and one.ours is None for one in found)
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


def test_an_interval_that_reaches_the_tolerance_reproduces():
    found = number(seeds([1.05, 1.1, 1.2, 1.3, 1.4]))
    assert found.ours == pytest.approx(1.21) and found.verdict == "reproduced"
    assert "reaches the tolerance" in found.why
    assert number(seeds([1.11, 1.12, 1.2, 1.3, 1.4])).verdict == "worse"
    assert number(seeds([0.89, 0.88, 0.8, 0.7, 0.6])).verdict == "better"


def test_two_seeds_call_nothing_better_or_worse():
    for value in (0.1, 10.0):
        found = number(seeds([value, value]))
        assert found.verdict == "not run" and found.interval is None and found.ours == value
        assert "too few" in found.why and found.record_id is not None
    assert number(seeds([1.0, 1.05])).verdict == "reproduced"
    assert number(seeds([0.1, 0.1, 0.1])).verdict == "better"


def test_counts_are_exact_and_need_one_seed():
    rule = Number(Measure("parameters", "implicit", "identity", size="001"), tolerance=0.0)
    assert judge(rule, seeds([1.0]), 196).verdict == "reproduced"
    assert judge(rule, seeds([1.0]), 197).verdict == "worse"
    spread = [record(seed=s, metric="parameters", value=v, at=None) for s, v in enumerate((196.0, 197.0, 195.0))]
    assert judge(rule, [replace(one, values=one.values[:1]) for one in spread], 196).verdict == "worse"
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
    assert found.verdict == "not run" and "plum" in found.why and found.record_id is not None


def test_not_a_number_is_worse():
    assert number(seeds([1.0, math.nan, 1.0])).verdict == "worse"
    assert number(seeds([math.inf, 1.0, 1.0])).verdict == "worse"


@pytest.mark.parametrize(
    ("rival", "better", "factor", "verdict", "words"),
    [
        (10.0, "lower", 1.0, "reproduced", "more than 1"),
        (10.0, "lower", 5.0, "reproduced", "more than 5"),
        (10.0, "lower", 50.0, "claim does not hold", "the factor is not"),
        (0.1, "lower", 1.0, "claim does not hold", "opposite"),
        (1.0, "lower", 1.0, "claim does not hold", "no difference"),
        (0.1, "higher", 1.0, "reproduced", "more than 1"),
        (10.0, "higher", 1.0, "claim does not hold", "opposite"),
        (0.7, "lower", 0.5, "reproduced", "more than 0.5"),
        (0.3, "lower", 0.5, "claim does not hold", "opposite"),
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
    assert found.verdict == "claim does not hold" and "includes no difference: undecided" in found.why
    found = order([1.0] * 5, [4.0, 6.0, 4.5, 5.5, 5.0], factor=5.0)
    assert found.verdict == "claim does not hold" and "includes less: undecided" in found.why


def test_orders_are_paired_by_seed():
    ours, rival = [1.0, 10.0, 100.0, 1e3, 1e4], [2.0, 20.0, 200.0, 2e3, 2e4]
    assert order(ours, rival).verdict == "reproduced"
    assert order(ours, rival[::-1]).verdict == "claim does not hold"
    shuffled = [*reversed(seeds(ours)), *seeds(rival, "mlp")]
    assert judge(Beats(OURS, RIVAL, "lower"), shuffled).verdict == "reproduced"
    apart = [*seeds(ours), *(replace(one, seed=one.seed + 10) for one in seeds(rival, "mlp"))]
    assert "no seed in common" in judge(Beats(OURS, RIVAL, "lower"), apart).why


def test_ties_do_not_count_and_are_called_so():
    found = order([1.0] * 5, [1.0] * 5)
    assert found.verdict == "claim does not hold" and "there is no difference" in found.why


def test_orders_of_values_that_are_not_positive():
    found = order([-1.0, -2.0, 0.0], [1.0, 1.0, 1.5])
    assert found.verdict == "reproduced" and found.kind == "difference" and "minus that of" in found.why
    assert order([0.0, 0.0, 0.0], [0.0, 1.0, -1.0]).verdict == "claim does not hold"


def test_two_seeds_decide_no_order():
    found = order([1.0, 1.0], [9.0, 9.0])
    assert found.verdict == "not run" and found.ours == pytest.approx(9) and "fewer than 3 seeds" in found.why


def test_a_rival_that_diverged_wins_nothing_for_the_claim():
    def against(*errors):
        rivals = [record("mlp", s, 9.0, error=error) for s, error in enumerate(errors)]
        return judge(Beats(OURS, RIVAL, "lower"), [*seeds([1.0] * 5), *rivals])

    found = against(None, None, None, DIVERGED, DIVERGED)
    assert found.verdict == "reproduced" and found.seeds == 3
    assert "mlp (001) diverged and is left out in 2 of 5 seeds" in found.why
    found = against(*[DIVERGED] * 5)
    assert found.verdict == "not run" and "failed in all 5 seeds" in found.why and DIVERGED[:-1] in found.why


def test_a_winner_that_diverged_loses():
    records = [*seeds([1.0] * 4), record(seed=4, error=DIVERGED), *seeds([9.0] * 5, "mlp")]
    found = judge(Beats(OURS, RIVAL, "lower"), records)
    assert found.verdict == "claim does not hold" and found.ours is None
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
    assert found.verdict == "claim does not hold" and "4 of 5 seeds keep to it: undecided" in found.why
    found = judge(rule, seeds([1 + sign * 0.1] * 5), 1.0)
    assert found.verdict == "claim does not hold" and "no seed keeps to it." in found.why
    found = judge(rule, [*seeds(values[:4]), record(seed=4, error=DIVERGED)], 1.0)
    assert found.verdict == "claim does not hold" and "diverged in 1 of 5" in found.why
    found = judge(rule, seeds(values[:2]), 1.0)
    assert found.verdict == "not run" and "too few" in found.why


def test_what_is_no_target_gives_its_reason():
    found = judge(NotATarget("The base of the growth is not stated."), seeds(CLOSE))
    assert (found.verdict, found.why) == ("not run", "The base of the growth is not stated.")


def test_paper_scale_counts_before_default_and_tiny_never():
    tiny, default, paper = (seeds([v] * 5, scale=s) for v, s in ((1.0, "tiny"), (2.0, "default"), (3.0, "paper")))
    found = number([*paper, *default, *tiny])
    assert (found.ours, found.scale) == (3.0, "paper")
    assert number([*default, *tiny]).ours == 2.0
    found = number(tiny)
    assert (found.verdict, found.why) == ("not run", "Only a tiny run exists, which is for tests.")
    failed = [replace(one, values=(), error=DIVERGED) for one in paper]
    assert number([*failed, *default]).ours == 2.0


def test_seeds_enough_to_decide_count_before_a_larger_scale():
    sides = [*seeds([1.0] * 3), *seeds([9.0] * 3, "mlp")]
    few = [*seeds([9.0] * 2, scale="paper"), *seeds([1.0] * 2, "mlp", scale="paper")]
    found = judge(Beats(OURS, RIVAL, "lower"), [*sides, *few])
    assert (found.verdict, found.scale) == ("reproduced", "default")
    assert judge(Beats(OURS, RIVAL, "lower"), few).scale == "paper"


def test_both_sides_of_an_order_are_of_one_scale():
    default = [*seeds([1.0] * 5), *seeds([9.0] * 5, "mlp")]
    paper = seeds([100.0] * 5, scale="paper")
    found = judge(Beats(OURS, RIVAL, "lower"), [*default, *paper])
    assert found.verdict == "reproduced" and found.scale == "default"
    found = judge(Beats(OURS, RIVAL, "lower"), [*paper, *seeds([9.0] * 5, "mlp")])
    assert found.verdict == "not run" and "same scale" in found.why


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
    assert number(seeds(CLOSE, task="addition")).verdict == "not run"
    assert number(seeds(CLOSE, at=45.0)).why == "The runs of implicit on identity do not have test_mse at 30."
    assert number(seeds(CLOSE, metric="mape")).verdict == "not run"
    assert number(seeds(CLOSE, at=30)).verdict == "reproduced"


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
    assert sum(one.verdict != "not run" for one in found) > 12
    assert {one.verdict for one in found} < set(JUDGEMENTS)
    for one in found:
        assert is_sentence(one.why) and ". " not in one.why.replace("vs. ", ""), one.why
