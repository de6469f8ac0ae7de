"""Thresholds: judged seed by seed, with the records of what is beyond them."""

import math
from dataclasses import replace

import pytest
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Suite, all_suites
from wellposed_lab.engine.store import Record, Value
from wellposed_lab.engine.thresholds import Threshold, check, checks_of
from wellposed_lab.report.console import threshold_facts
from wellposed_lab.report.section import SuiteResults, section

from wellposed.errors import InputError

FAR = Measure("test_mse", "ours", "task", at=100.0)
LIMIT = Threshold("The error at 100 is at most 1.", FAR, "at most", 1.0)


def record(seed, values, model="ours", scale="default", error=None, size=None, started="2026-01-01", epochs=1):
    known = () if error else tuple(Value("test_mse", value, at) for at, value in values.items())
    return Record(
        id=f"{model}{size or ''}-{scale}-{epochs}-{seed}",
        suite="small",
        scale=scale,
        task="task",
        model=model,
        size=size,
        seed=seed,
        role="ours",
        kind="run",
        config={"seed": seed, "epochs": epochs},
        values=known,
        series={},
        facts={},
        environment={},
        started=started,
        seconds=1.0,
        error=error,
    )


def test_every_seed_counts():
    kept = [record(seed, {100.0: 0.5 + 0.1 * seed}) for seed in range(3)]
    (one,) = check([LIMIT], kept)
    assert (one.state, one.judged, one.failing, one.scale) == ("met", pytest.approx(0.7), [], "default")
    (one,) = check([LIMIT], [*kept, record(3, {100.0: 1.01})])
    assert (one.state, one.judged, one.failing_ids) == ("not met", 1.01, ["ours-default-1-3"])
    (one,) = check([LIMIT], [*kept, record(3, {}, error="NonFiniteLossError: inf")])
    assert one.state == "not met" and math.isnan(one.judged) and one.failing == [3]


def test_limits_from_below():
    least = Threshold("The error at 100 is at least 1.", FAR, "at least", 1.0)
    (one,) = check([least], [record(0, {100.0: 3.0}), record(1, {100.0: 0.2})])
    assert (one.state, one.judged, one.failing) == ("not met", 0.2, [1])


def test_ratios_are_taken_within_a_seed():
    rival = Measure("test_mse", "rival", "task", at=100.0)
    ratio = Threshold("The rival errs ten times as much.", rival, "at least", 10.0, rival=FAR)
    middle = Threshold("The rival errs ten times as much.", rival, "at least", 10.0, rival=FAR, middle=True)
    ours = [record(seed, {100.0: 10.0**seed}) for seed in range(3)]
    errors = (20.0, 200.0, 5.0)
    rivals = [record(seed, {100.0: error}, "rival") for seed, error in enumerate(errors)]
    every, median = check([ratio, middle], ours + rivals)
    assert every.values == pytest.approx({0: 20, 1: 20, 2: 0.05}) and every.failing_ids == ["rival-default-1-2"]
    assert (median.state, median.judged) == ("met", 20)
    assert every.ids[0] == ("rival-default-1-0", "ours-default-1-0")
    (absent,) = check([ratio], ours)
    assert absent.state == "not run" and absent.failing_ids == []


def test_spreads_are_taken_over_points():
    spread = Threshold("The error hardly varies.", FAR, "at most", 0.3, across=(1.0, 10.0, 100.0))
    calm, wild = record(0, {1.0: 1.0, 10.0: 1.2, 100.0: 1.1}), record(1, {1.0: 1.0, 10.0: 0.6, 100.0: 1.0})
    (one,) = check([spread], [calm, wild])
    assert one.values == pytest.approx({0: 0.2, 1: 0.4}) and one.failing == [1]


def test_which_runs_are_taken():
    tiny = record(0, {100.0: 9.0}, scale="tiny")
    assert check([LIMIT], [tiny])[0].state == "not run"
    default, paper = record(0, {100.0: 9.0}), record(0, {100.0: 0.1}, scale="paper")
    assert check([LIMIT], [tiny, default, paper])[0].scale == "paper"
    more = [record(seed, {100.0: 0.1}, epochs=2) for seed in range(2)]
    assert check([LIMIT], [default, *more])[0].state == "met"  # most seeds
    later = record(0, {100.0: 0.1}, epochs=2, started="2026-02-01")
    assert check([LIMIT], [later, default])[0].state == "met"
    measure = Measure("test_mse", "ours", "task", 100.0, "001")
    sized = Threshold("The error at 100 is at most 1.", measure, "at most", 1.0)
    assert check([sized], [record(0, {100.0: 0.1}, size="000")])[0].state == "not run"


def test_the_section_and_the_terminal_show_them():
    suite = Suite("small", "Small", "A claim.", (), lambda scale: [], {}, thresholds=(LIMIT,))
    records = [record(0, {100.0: 0.5}), record(1, {100.0: 7.0})]
    text = section(SuiteResults("small", suite, records, []))
    assert "1 not met" in text and "ours-default-1-1" in text and "ours-default-1-0" not in text
    (facts,) = threshold_facts(checks_of([suite], records))
    assert facts["state"] == "not met" and facts["beyond"] == ["ours-default-1-1"]
    assert checks_of([suite], [record(0, {100.0: 0.5}, scale="tiny")]) == []
    both = replace(suite, alike=("epochs",))
    later = [record(seed, {100.0: 9.0}, epochs=2, started="2026-02-01") for seed in range(2)]
    records += [record(0, {100.0: 0.5}, "rival"), *later]
    ((_, one),) = checks_of([both], records)
    assert one.values == {0: 0.5, 1: 7.0}, "a later schedule of fewer models is another comparison"
    bare = Suite("small", "Small", "A claim.", (), lambda scale: [], {})
    assert "Thresholds" not in section(SuiteResults("small", bare, records, []))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="sentence"):
        Threshold("small", FAR, "at most", 1.0)
    with pytest.raises(InputError, match="'at most' or 'at least'"):
        Threshold("The error is small.", FAR, "below", 1.0)
    with pytest.raises(InputError, match="ratio or on a spread"):
        Threshold("The error is small.", FAR, "at most", 1.0, rival=FAR, across=(1.0,))


OTHER_AXES = ("adaptive_accuracy", "noisy_accuracy")  # over names of attacks, over decibels


def test_thresholds_of_the_suites_name_models_that_they_run():
    assert sum(len(suite.thresholds) for suite in all_suites().values()) >= 25
    for suite in all_suites().values():
        planned, larger = ({run.labels: run for run in suite.plan(scale)} for scale in ("default", "paper"))
        measures = [measure for one in suite.thresholds for measure in one.measures]
        if suite.name == "volatility":  # plans what the data folder has
            measures = [measure for measure in measures if measure.task in {task for task, _, _ in planned}]
        for measure in measures:
            at_scale = [
                [
                    run
                    for (task, model, size), run in runs.items()
                    if (task, model) == (measure.task, measure.model) and measure.size in (None, size)
                ]
                for runs in (planned, larger)
            ]
            fitting = at_scale[0] or at_scale[1]
            assert len(fitting) == 1, measure
            if measure.at is not None and measure.metric not in OTHER_AXES:
                assert measure.at in getattr(fitting[0], "task", fitting[0]).points
