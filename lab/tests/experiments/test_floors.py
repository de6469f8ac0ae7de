"""A floor is what predicting the mean does not reach, so that a model above it has learnt something."""

from pathlib import Path

import pytest
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.derived import with_derived
from wellposed_lab.engine.experiment import all_suites
from wellposed_lab.engine.judge import verdicts
from wellposed_lab.experiments.mathematics.relative import LEARNT
from wellposed_lab.report.paper import committed_records

RESULTS = Path(__file__).parents[2] / "results"

REGRESSIONS = [
    (name, floor)
    for name, suite in all_suites().items()
    for floor in suite.floors
    if floor.kind == "at most" and floor.metric in ("validation_mse", "test_mse")
]


@pytest.mark.parametrize(("name", "floor"), REGRESSIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_mean_stays_above_the_floor(name, floor):
    tasks = {run.task for run in all_suites()[name].plan("default") if hasattr(run, "task")}
    judged = [task for task in tasks if floor.task in ("", task.name)]
    assert judged
    for task in judged:
        errors = []
        for seed in range(5):
            wanted = task.validation(seed)[1].double()
            errors.append(float((wanted - task.train(seed)[1].double().mean(0)).square().mean()))
        assert 0.5 * min(errors) < floor.limit < min(errors), (task.name, errors)


def test_sums_are_learnt_where_the_mean_of_their_own_seed_is_beaten():
    floors = [floor for name in ("arithmetic", "activations", "feedback") for floor in all_suites()[name].floors]
    assert floors.count(LEARNT) == 3
    records = [record for record in with_derived(committed_records(RESULTS)) if record.suite == "arithmetic"]
    constant = [r for r in records if (r.model, r.size) == ("transformer-encoder-sequential", "000")]
    assert len(constant) > 15 and all(LEARNT.missed(record, "test_mse") for record in constant)  # sees no input
    assert any(record.value("validation_mse") < 3 for record in constant)  # less than others that have learnt
    exact = [record for record in records if record.model in ("linear", "nac", "implicit")]
    assert len(exact) > 30 and not any(LEARNT.missed(record, "test_mse") for record in exact)


def test_every_suite_with_orders_of_trained_models_has_a_floor_or_a_plateau():
    numbers = {"identity", "arithmetic", "activations", "feedback"}
    series = {"rolling-average", "rolling-argmax", "spiky", "volatility"}
    noise = {"adversarial", "noise-mnist", "noise-cifar", "noise-regression"}
    algorithms = {"prefix-sums", "mazes", "matrix-addition"}
    suites = all_suites()
    assert all(suites[name].floors or suites[name].plateaus for name in numbers | series | noise | algorithms)


def test_a_regression_is_not_judged_by_equilibria_that_are_not_reached():
    records = [record for record in committed_records(RESULTS) if record.suite == "noise-regression"]
    plain = [r for r in records if r.model.startswith("deq") and not r.model.endswith("-jacobian")]
    equilibria = [r for r in plain if r.scale == "paper"]
    assert len(equilibria) == 45 and {record.value("steps") for record in equilibria} == {60}
    (floor,) = (floor for floor in all_suites()["noise-regression"].floors if floor.metric == "steps")
    assert all(floor.missed(record, "test_mse") for record in equilibria)
    assert sum(floor.missed(r, "test_mse") for r in records if r.scale == "default") == 2  # which did not learn
    claims = [claim for claim in load_claims() if claim.suite == "noise-regression" and "DEQ" in claim.says]
    unpenalised = [record for record in records if not record.model.endswith("-jacobian")]
    assert len(claims) == 7 and {one.verdict for one in verdicts(unpenalised, claims)} == {"undecided"}


def test_volatility_is_not_judged_by_models_that_a_constant_beats():
    records = [record for record in committed_records(RESULTS) if record.suite == "volatility"]
    means = {record.task: record.value("mape") for record in records if record.model == "mean"}
    for floor in all_suites()["volatility"].floors:
        assert 0.98 * means[floor.task] < floor.limit < means[floor.task]
    claims = [claim for claim in load_claims() if claim.suite == "volatility" and claim.own]
    assert len(claims) == 8 and {one.verdict for one in verdicts(records, claims)} == {"undecided"}
