"""A floor is what predicting the mean does not reach, so that a model above it has learnt something."""

import pytest
from wellposed_lab.engine.experiment import all_suites

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


def test_every_suite_with_orders_of_trained_models_has_a_floor_or_a_plateau():
    numbers = {"identity", "arithmetic", "activations", "rolling-average", "rolling-argmax", "spiky"}
    noise = {"adversarial", "noise-mnist", "noise-cifar", "noise-regression"}
    algorithms = {"prefix-sums", "mazes", "matrix-addition"}
    suites = all_suites()
    assert all(suites[name].floors or suites[name].plateaus for name in numbers | noise | algorithms)
