"""The suites of sequences at tiny scale: their numbers, their controls and what the claims ask of them."""

import dataclasses

import pytest
import torch
from wellposed_lab.config import Choice, Training
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.judge import verdicts
from wellposed_lab.engine.run import Context
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.search import candidates, search_runs
from wellposed_lab.engine.store import Store
from wellposed_lab.engine.training import TrainingRun
from wellposed_lab.networks.by_name import build, implicit_rnn
from wellposed_lab.report.drawing import figure_html
from wellposed_lab.report.figures import curves, styles
from wellposed_lab.tasks.sequences import RollingArgmax, RollingAverage, Spiky

from wellposed.errors import InputError

NAMES = ("rolling-average", "rolling-argmax", "spiky")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("sequences")
    for name in NAMES:
        state = run_suite(get_suite(name), Order(name, "tiny", seeds=1), out)
        assert state.finished == state.planned and state.failed == 0
    return Store(out).records()


def of(records, task, model, size=None):
    return next(r for r in records if (r.task, r.model, r.size) == (task, model, size))


def test_every_claim_finds_its_numbers(records):
    # As if the tiny runs had been made in earnest, three times.
    earnest = [
        dataclasses.replace(r, scale="default", seed=seed, id=f"{r.id}{seed}", config={**r.config, "seed": seed})
        for r in records
        for seed in range(3)
    ]
    claims = [claim for claim in load_claims() if claim.suite in NAMES]
    found = verdicts(earnest, claims)
    assert len(found) > 45
    assert not [(one.claim.says, one.why) for one in found if one.verdict == "not judged"]


def test_published_sizes_are_built(records):
    counts = {
        ("rolling-average", "implicit", "000"): 44_100,
        ("rolling-average", "lstm", "000"): 42_210,
        ("rolling-argmax", "implicit", "000"): 1_849,
        ("rolling-argmax", "implicit-rnn", "000"): 1_860,  # 1,870 with a bias in the readout
        ("rolling-argmax", "implicit-rnn-bias", "001"): 2_122,
        ("rolling-argmax", "logistic", None): 100,
        ("spiky", "implicit-rnn", None): 1_661,
        ("spiky", "lstm", None): 1_861,
        ("spiky", "transformer-spiky", "000"): 43_529,
    }
    assert {key: of(records, *key).value("parameters") for key in counts} == counts


def test_changes_are_measured_against_the_point_in_distribution(records):
    lstm = of(records, "rolling-argmax", "lstm", "001")
    assert lstm.value("accuracy_drop", 10.0) == lstm.value("accuracy") - lstm.value("accuracy", 10.0)
    average = of(records, "rolling-average", "lstm", "001")
    expected = average.value("test_mse", 100.0) / average.value("test_mse")
    assert average.value("test_mse_growth", 100.0) == pytest.approx(expected)
    assert average.value("test_mse_growth") is None
    names = [value.metric for value in average.values if value.at is None]
    assert len(names) == len(set(names)) and {"train_mse", "validation_mse", "test_mse"} <= set(names)


def test_an_rnn_without_biases_answers_alike_at_every_scale():
    torch.manual_seed(0)
    u = torch.rand(50, 10)
    choices = [Choice.of("implicit-rnn", "001", readout_bias=bias) for bias in (False, True)]
    plain, biased = (implicit_rnn("rolling-argmax", (10, 10), choice) for choice in choices)
    assert torch.allclose(plain(1e5 * u), 1e5 * plain(u), rtol=1e-3, atol=1.0)
    assert not torch.allclose(biased(1e5 * u), 1e5 * biased(u), rtol=1e-3, atol=1.0)


def test_controls_that_learn_nothing(records):
    task = RollingArgmax(test_samples=20_000, points=(None, 1e5))
    run = TrainingRun(
        suite="x", seed=0, scale="default", task=task, model=Choice("copy-last-label"), training=Training(1)
    )
    (result,) = run.execute([run], Context())
    accuracies = [value.value for value in result.values if value.metric == "accuracy"]
    assert len(accuracies) == 2 and all(abs(value - 0.9) < 0.01 for value in accuracies)
    assert not run.trained and result.series == {}
    names = ("mean", "persistence", "linear")
    mean, last, linear = (of(records, "spiky", name).value("test_mse") for name in names)
    _, y = Spiky(samples=700, test_samples=400, regions=2).test(0)
    _, seen = Spiky(samples=700, test_samples=400, regions=2).train(0)
    assert mean == pytest.approx(float(((y - seen.mean()) ** 2).mean()), rel=1e-4)
    assert linear < last < mean


def test_the_average_is_linear(records):
    exact, lstm = of(records, "rolling-average", "linear"), of(records, "rolling-average", "lstm", "001")
    assert exact.value("test_mse", 100.0) < 1e-8 and lstm.value("test_mse", 100.0) > 1e3
    assert exact.value("mean_prediction", 100.0) == pytest.approx(103, abs=0.2)


def test_the_picture_of_the_spikes(records):
    suite = get_suite("spiky")
    own = [record for record in records if record.suite == "spiky"]
    figure = next(figure for figure in suite.figures if figure.over == "time")
    found = {curve.model: curve.middle for curve in curves(figure, own)["spiky"]}
    task = Spiky(samples=700, test_samples=400, regions=2)
    truth = task.test(0)[1][task.excerpt(0), 0]
    assert found["data"] == pytest.approx(truth.tolist(), abs=1e-3) and len(truth) == 160
    assert found["persistence"][1:] == pytest.approx(found["data"][:-1], abs=1e-3)
    assert {"implicit-rnn", "lstm", "transformer-spiky", "linear"} <= set(found)
    assert styles(own)["data"].dash == "solid" and styles(own)["linear"].dash == "dot"
    assert "One seed" in figure_html(figure, own, "key")
    other = dataclasses.replace(next(run for run in suite.plan("tiny") if run.labels[1] == "linear"), seed=1)
    assert "prediction" not in other.execute([other], Context())[0].series


def test_training_is_watched_where_the_paper_does(records):
    for model in ("implicit-rnn", "implicit", "lstm"):
        watched = of(records, "rolling-argmax", model, "001")
        assert len(watched.series["accuracy"]) == len(watched.series["train_loss"]) == 2
        assert watched.series["accuracy"][-1] == pytest.approx(watched.value("accuracy", 10.0), abs=0.011)
    assert "accuracy" not in of(records, "rolling-argmax", "rnn-relu", "001").series


def test_controls_speak(records):
    for name, word in zip(NAMES, ("translation", "logistic regression", "AR(10)"), strict=True):
        text = " ".join(get_suite(name).findings([r for r in records if r.suite == name]))
        assert word in text and "nan" not in text
        assert get_suite(name).findings([])


def test_a_search_leaves_closed_forms_out():
    for name in NAMES:
        suite = get_suite(name)
        models = {run.model.name for run in search_runs(suite, suite.runs("tiny", 1))}
        assert "implicit-rnn" in models and not models & {"linear", "mean", "persistence", "copy-last-label"}
    run = next(run for run in get_suite("spiky").runs("tiny", 1) if run.labels[1] == "lstm")
    assert len(list(candidates(run, get_suite("spiky")))) == 6


def test_shapes_of_every_model():
    for task, model, size in (
        (RollingAverage(), "implicit-rnn", "001"),
        (RollingAverage(), "transformer-5-heads", "001"),
        (RollingArgmax(), "transformer-no-position", "001"),
        (Spiky(), "rnn-relu", None),
    ):
        u, y = task.train(0)
        assert build(task.name, (10, y.shape[1]), Choice(model, size))(u[:7]).shape == y[:7].shape
    with pytest.raises(InputError, match="state_features"):
        implicit_rnn("identity", (10, 10), Choice("implicit-rnn"))


def test_numbers_of_longer_sequences_stand_at_their_length(tmp_path):
    run_suite(get_suite("sequence-length"), Order("sequence-length", "tiny"), tmp_path)
    records = Store(tmp_path).records()
    assert {record.task for record in records} == {"rolling-average-length"} and len(records) == 6
    for record in records:
        length = record.config["task"]["length"]
        assert record.value("length_mse", length) == record.value("test_mse") > 0
        assert record.value("shifted_mse", length) == record.value("test_mse", 5.0)
