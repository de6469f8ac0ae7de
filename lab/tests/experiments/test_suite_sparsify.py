"""The suites of convex training at tiny scale: all runs finish, names fit the claims, controls are computed."""

import numpy as np
import pytest
import torch
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.store import Record, Store
from wellposed_lab.experiments.sparsify.measures import frontier, iterations, sufficient, warm_starts
from wellposed_lab.experiments.sparsify.row_solvers import RateRun, rate_plan
from wellposed_lab.experiments.sparsify.rows import DenseRows, Layers
from wellposed_lab.networks.trained import Dense

from wellposed.convex import fit_states, record_states
from wellposed.data import MissingDataError

QUICK = Dense("digits", epochs=8)


@pytest.fixture(scope="module")
def states():
    return QUICK.states(0, 400)


@pytest.mark.parametrize("name", ["sparsify-digits", "eliminate-fashion"])
def test_suite_runs_at_tiny_scale(name, tmp_path):
    progress = run_suite(get_suite(name), Order(name, "tiny"), tmp_path)
    assert progress.failed == 0 and progress.finished == progress.planned > 5
    records = list(Store(tmp_path).records())
    assert all(record.task.startswith("digits") for record in records)
    values = [value for record in records for value in record.values]
    assert all(0 <= value.value <= 1 for value in values if value.metric in ("accuracy", "sparsity"))
    if name == "eliminate-fashion":
        removed = {record.model: record.value("needed_removed") for record in records}
        assert removed["certified"] == 0 and removed["dual-literal"] > 0


@pytest.mark.parametrize("name", ["sparsify-fashion", "eliminate-fashion"])
def test_every_claim_can_be_judged(name):
    """Each number that a claim of the suite asks for is measured by one of its runs at default scale."""
    runs = get_suite(name).plan("default")
    labels = {run.labels[:2] for run in runs}
    points = {run.labels[:2]: {*run.points, None} for run in runs}
    claims = [measure for claim in load_claims() if claim.suite == name for measure in claim.rule.measures]
    assert len(claims) >= 4
    for measure in claims:
        key = (measure.task, measure.model)
        assert key in labels and measure.at in points[key], measure


def test_missing_images_are_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    monkeypatch.setattr("wellposed_lab.networks.trained.load_images", _missing)
    run = get_suite("sparsify-fashion").plan("default")[0]
    with pytest.raises(MissingDataError, match="not here"):
        type(run)(**{**vars(run), "network": Dense("fashion-mnist", epochs=7)}).execute([run], None)


def _missing(name, split):
    raise MissingDataError(f"{name} is not here")


@pytest.mark.parametrize("rescale", [True, False])
def test_layers_compute_what_the_model_computes(states, rescale):
    model, report = fit_states(states, kappa=0.9, rescale=rescale, support="triangular")
    layers, u = Layers(model, report.blocks, report.exponents), QUICK.pair("test")[0]
    assert torch.allclose(layers(u), model(u), atol=1e-3)
    again = record_states(QUICK.trained(0), [u]).Y
    assert float((layers(u).detach() - again).norm() / again.norm()) < (0.3 if rescale else 1.0)


@pytest.mark.parametrize(
    "model", sorted({*DenseRows.methods} - {"state-driven-lasso"})
)  # that one searches, and is slow
def test_every_method_reaches_the_sparsity(model):
    values = frontier(QUICK, 0, model, (0.6,), 400, 1).values
    reached = next(value.value for value in values if value.metric == "sparsity")
    assert reached == pytest.approx(0.6, abs=0.06)
    accuracy = next(value.value for value in values if value.metric == "accuracy")
    drop = next(value.value for value in values if value.metric == "accuracy_drop")
    assert accuracy + drop == pytest.approx(QUICK.score(QUICK.trained(0)))


def test_warm_starts_save_sweeps_and_halvings_help():
    warm, cold = (warm_starts(QUICK, 0, (0.5,), 200, start).values for start in (True, False))
    assert warm[0].metric == "steps" and warm[0].value < cold[0].value
    values = iterations(QUICK, 0, 0.99, (1.0, 10.0), 200).values
    found = [value.value for value in values if value.metric == "accuracy"]
    assert found[1] > found[0]


def test_sufficient_share_is_where_accuracy_stays():
    assert sufficient([(0.1, 0.9), (0.5, 0.5), (1.0, 0.9)]) == 1.0
    assert sufficient([(0.1, 0.895), (1.0, 0.9)]) == 0.1


def _record(task, model, **values):
    entries = tuple(
        {"metric": "accuracy", "value": value, "at": float(at[1:]) / 100} for at, value in values.items()
    )
    return Record.from_json(
        {
            "id": f"{task}{model}", "suite": "sparsify-fashion", "scale": "default", "task": task, "model": model,
            "size": None, "seed": 0, "role": "ours", "kind": "run", "config": {}, "values": entries, "series": {},
            "facts": {}, "environment": {}, "started": "", "seconds": 1.0,
        }
    )  # fmt: skip


def test_controls_say_where_the_fit_is_not_ahead():
    task = "fashion-mnist-sparsity"
    records = [
        _record(task, "state-driven", a50=0.83, a90=0.80),
        _record(task, "magnitude", a50=0.84, a90=0.30),
    ]
    text = " ".join(get_suite("sparsify-fashion").findings(records))
    assert "ahead in the median at a sparsity of 90 % and not at 50 %" in text
    assert "MLA" in text


def test_proximal_gradient_steps_solve_what_they_say():
    problem = RateRun(suite="bisection-rates", seed=3, scale="tiny").problem()
    level = float(np.abs(problem.cross).max()) / 3
    a, steps = problem.solve(level, np.zeros(40), 1e-18)
    slope = problem.cross - problem.gram @ a
    assert steps > 5 and (a != 0).any() and (a == 0).any()
    assert np.allclose(slope[a != 0], level * np.sign(a[a != 0]), atol=1e-6) and np.abs(slope).max() < level + 1e-6


def test_rates_and_lemmas_of_the_bisection():
    warm, cold, apart = (run.execute([run], None)[0] for run in rate_plan("default"))
    values = {value.metric: value.value for value in apart.values}
    assert values["lemma_4"] > 5, "sqrt(n) is not enough where all entries are alike"
    known = [{(value.metric, value.at): value.value for value in result.values} for result in (warm, cold)]
    for one in known:
        assert one["lemma_3", None] < 1 and one["complexity", 1e-10] < 1
    assert known[0]["steps", 1e-8] < known[1]["steps", 1e-8] / 2
    assert known[0]["steps", 1e-4] < known[0]["steps", 1e-8]
