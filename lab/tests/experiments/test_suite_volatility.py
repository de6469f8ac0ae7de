"""The volatility suite at tiny scale: its runs, its verdicts, its picture, and what it says of its data."""

import dataclasses

import numpy as np
import pytest
import torch
from wellposed_lab.config import Choice, Training
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.judge import verdicts
from wellposed_lab.engine.run import Context
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.statistics import number
from wellposed_lab.engine.store import Store
from wellposed_lab.experiments.volatility.findings import draw_history, findings
from wellposed_lab.experiments.volatility.models import CLOSED
from wellposed_lab.experiments.volatility.run import HistoryRun, VolatilityRun, history, range_variance
from wellposed_lab.experiments.volatility.suite import MODELS, plan
from wellposed_lab.experiments.volatility.task import CSI500, Generated, Regimes
from wellposed_lab.report.figures import curves
from wellposed_lab.report.section import SuiteResults, section

SUITE = get_suite("volatility")
SMALL = Generated(market=Regimes(days=14, shift=11))
SIZES = {
    "implicit-rnn": 6_047,
    "implicit": 6_102,
    "lstm": 6_271,
    "mlp": 6_230,
    "linear-sgd": 61,
    "transformer-volatility": 6_218,
    "garch": 4,
    "recent-variance": 0,
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    pytest.importorskip("arch")
    out = tmp_path_factory.mktemp("volatility")
    state = run_suite(SUITE, Order("volatility", "tiny", seeds=1), out)
    assert state.finished == state.planned == len(MODELS) + 1 and state.failed == 0
    return Store(out).records()


def of(records, model):
    return next(record for record in records if record.model == model)


def test_published_sizes_are_built(records):
    for model, parameters in SIZES.items():
        assert of(records, model).value("parameters") == parameters, model


def test_every_record_says_which_data_were_used(records):
    assert {record.task for record in records} == {"volatility-generated"}
    assert all("two regimes, made up" in record.facts["data"] for record in records)
    assert all(record.value("mape") is not None for record in records if record.model != "data")


def test_rules_that_learn_nothing_have_the_numbers_of_numpy(records):
    task = plan("tiny")[0].task
    found = task.windows(0, None)
    floor = task.scaling().floor * task.scaling().unit
    for model, forecast in (
        ("recent-variance", found.past[:, -10:].var(axis=1)),
        ("rolling-variance", found.past.var(axis=1)),
        ("zero", 0 * found.variance),
        ("mean", np.full(len(found), task.windows(0, "train").variance.mean())),
    ):
        error = np.abs(forecast - found.variance)
        record = of(records, model)
        assert record.value("mape") == pytest.approx((error / np.maximum(found.variance, floor)).mean(), rel=1e-3)
        assert record.value("test_rmse") == pytest.approx(np.sqrt((error**2).mean()), rel=1e-3)


def test_controls_speak_of_data_persistence_and_garch(records):
    sentences = findings(records)
    assert sentences[0].startswith("Data: two regimes, made up")
    assert any("may not be passed on" in sentence and "not run" in sentence for sentence in sentences)
    about = next(sentence for sentence in sentences if "by MAPE" in sentence and "the implicitRNN" in sentence)
    ours, theirs = (of(records, model).value("mape") for model in ("implicit-rnn", "garch"))
    assert f"{'beats' if ours < theirs else 'does not beat'} GARCH(1,1) ({number(theirs)})" in about
    assert findings([]) == []
    amc = [dataclasses.replace(record, task="volatility") for record in records]
    assert not any("may not be passed on" in sentence for sentence in findings(amc))


def test_every_claim_finds_its_numbers_where_the_data_are_supplied(records):
    tasks = ("volatility", "volatility-csi500", "volatility-squeeze")
    earnest = [
        dataclasses.replace(r, task=task, scale="default", seed=seed, id=f"{r.id}{seed}{task}", config={})
        for r in records
        for seed in range(3)
        for task in tasks
    ]
    daily = [
        dataclasses.replace(r, task="amc-daily") for r in earnest if (r.model, r.task) == ("data", "volatility")
    ]
    claims = [claim for claim in load_claims() if claim.suite == "volatility"]
    assert len(claims) == 10 + 4 * 3 + 2 + 1
    found = verdicts([*earnest, *daily], claims)
    assert not [(one.claim.says, one.why) for one in found if one.verdict == "not judged"]
    unknown = verdicts([one for one in earnest if one.task != "volatility"], claims)
    published = [one for one in unknown if one.claim.rule.measures[0].task == "volatility"]
    assert len(published) == 16 and {one.verdict for one in published} == {"not judged"}


def test_the_page_shows_figures_picture_and_data(records):
    drawn = curves(SUITE.figures[0], records)["volatility-generated"]
    assert {curve.model for curve in drawn} == {choice.name for _, choice in MODELS}
    text = section(SuiteResults("volatility", SUITE, records, []))
    assert "Data: two regimes, made up" in text and "Relative error in the test period" in text
    assert text.count("data:image/png;base64,") == 1


def test_figures_draw_only_their_points(records):
    value = dataclasses.replace(records[0].values[-1], metric="mape", value=7.0, at="2022")
    both = [dataclasses.replace(records[0], values=(*records[0].values, value))]
    figures = {figure.title: figure for figure in SUITE.figures}
    inside = curves(figures["Relative error in the test period"], both)["volatility-generated"][0]
    later = curves(figures["Relative error in 2022"], both)["volatility-generated"][0]
    assert inside.middle == (records[0].value("mape"),) and later.middle == (7.0,)


# --- the parts ---------------------------------------------------------------------------------------------------


def run(model, **settings):
    training = Training(epochs=1, batch_size=50)
    return VolatilityRun(suite="x", seed=0, scale="tiny", task=SMALL, model=model, training=training, **settings)


def test_folds_of_a_search_are_days_in_a_row():
    whole = SMALL.train(0)[0]
    for fold in range(3):
        (kept, _), (held, _) = run(Choice("mlp"), fold=fold, folds=3).data(0)
        first = int((whole == held[0]).all(1).nonzero()[0])
        assert torch.equal(whole[first : first + len(held)], held) and len(kept) + len(held) == len(whole)


@pytest.mark.parametrize("model", ["implicit-centred", "mlp-centred"])
def test_centred_models_do_not_see_the_level(model):
    made = run(Choice(model)).make_model(SMALL.train(0))
    u = SMALL.train(0)[0][:5]
    assert torch.allclose(made(u), made(u + 3.0), atol=1e-4)
    assert not torch.allclose(made(u), made(2 * u), atol=1e-4)


def test_closed_forms_are_not_trained():
    assert all(not run(Choice(name)).trained for name in (*CLOSED, "mean", "linear"))
    assert all(run(Choice(name)).trained for name in ("linear-sgd", "mlp-centred", "lstm", "implicit"))


def test_history_averages_days_and_dates_them():
    days = np.arange("2020-12-01", "2021-02-01", dtype="datetime64[D]")
    values = np.where(days <= np.datetime64("2020-12-31"), 1.0, 5.0)
    result = history(days, values, np.datetime64("2020-12-31"), 21, drawn=True)
    assert [(value.at, value.value) for value in result.values] == [("training", 1.0), ("test", 5.0)]
    year, mean = result.series["year"], result.series["rolling_volatility"]
    assert year[0] == pytest.approx(2020 + 355 / 366, abs=1e-4) and len(year) == len(mean) == 9
    assert mean[0] == 1.0 and mean[-1] == 5.0 and year == sorted(year)
    assert history(days, values, np.datetime64("2020-12-31"), 21, drawn=False).series == {}


def test_the_daily_range_estimates_the_variance_of_ten_minutes():
    generator = torch.Generator().manual_seed(0)
    steps = 1e-3 / 20 * torch.randn(800, 390 * 20, generator=generator)  # fine steps, so that the range is seen
    paths = 30 * steps.cumsum(1).double().exp().numpy()
    estimate = range_variance(paths.max(1), paths.min(1), paths[:, -1]).mean()
    minutes = paths[:, 19::20]
    truth = minutes.reshape(800, 39, 10).var(axis=2).mean()
    assert estimate == pytest.approx(truth, rel=0.1)


def test_a_record_without_history_has_no_picture(records):
    assert draw_history([of(records, "mlp")]) is None
    assert draw_history(records).startswith(b"\x89PNG")


def test_the_plan_takes_what_the_data_folder_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    monkeypatch.setenv("WELLPOSED_CACHE", str(tmp_path / "cache"))
    assert {run.labels[0] for run in plan("default")} == {"volatility-generated"}
    (tmp_path / "minute_bars").mkdir()
    (tmp_path / "minute_bars" / "AMC_1min_2015_2021.csv").write_text("time,vwap\n2016-01-04 09:30,5.0\n")
    runs = plan("default")
    assert {run.labels[0] for run in runs} == {"volatility"} and all(run.task.digest for run in runs)
    assert {run.task.stride for run in plan("paper")} == {1}
    result = run_suite(SUITE, Order("volatility", "default", seeds=1), tmp_path / "out")
    assert result.failed == len(runs)
    errors = {record.error for record in Store(tmp_path / "out").records()}
    assert all("70 minutes in a row" in error or "InputError" in error for error in errors)


def test_the_history_of_a_task_is_its_data(monkeypatch):
    result = HistoryRun(suite="x", seed=0, scale="tiny", task=SMALL).execute([], Context())[0]
    assert len(result.series["prediction"]) == len(SMALL.test(0)[1])
    assert CSI500.name in {task for figure in SUITE.figures for task in figure.tasks}
