"""The suite `beyond`: what its runs record, and what its sentences make of records."""

import dataclasses

import pytest
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.store import Record, Store, Value
from wellposed_lab.experiments.beyond.suite import DEPTH, MODELS, PROBE, SUITE, TASKS, TRAINED

TRIED = {
    "linear-system": ("equilibrium", "untied"),
    "quadratic-program": ("equilibrium-linear", "linear"),
    "shortest-path": ("equilibrium", "tied", "mlp"),
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    runs = [run for run in SUITE.plan("tiny") if run.labels[1] in TRIED[run.labels[0]]]
    quick = dataclasses.replace(SUITE, plan=lambda scale: runs)
    out = tmp_path_factory.mktemp("beyond")
    state = run_suite(quick, Order("beyond", "tiny"), out)
    assert state.finished == state.planned == len(runs) and state.failed == 0
    return {(record.task, record.model): record for record in Store(out).records()}


def points(record, metric):
    return [value.at for value in record.values if value.metric == metric]


def test_every_record_has_its_axes(records):
    for (task, model), record in records.items():
        axis = [4.0] if (task, model) == ("shortest-path", "mlp") else record.config["task"]["points"]
        assert points(record, "test_accuracy") == points(record, "test_error") == axis
        assert all(0 <= value.value <= 1 for value in record.values if value.metric.endswith("accuracy"))
        has_cell = model in ("equilibrium", "tied", "equilibrium-linear")
        assert points(record, "rest_accuracy") == points(record, "path_independent") == axis * has_cell
        depth = [float(DEPTH)] if model == "untied" else []
        assert points(record, "steps_accuracy") == ([1.0, 4.0, 16.0] if has_cell else depth)
        assert ("one equilibrium" in record.facts.get("certificate", "")) == has_cell
        assert model == "linear" or len(record.series["train_loss"]) == 2


def test_certified_cells_rest_and_do_not_depend_on_the_start(records):
    for (_, model), record in records.items():
        for at in points(record, "path_independent"):
            assert record.value("path_independent", at) == 1.0 and record.value("failed_share", at) == 0.0
            assert record.value("steps", at) > 1
            if model == "equilibrium":
                assert record.value("rest_accuracy", at) == record.value("test_accuracy", at)
    tied = records["shortest-path", "tied"]
    assert tied.value("rest_error", 20.0) != tied.value("test_error", 20.0)


def test_the_same_run_gives_the_same_numbers(records, tmp_path):
    run = next(run for run in SUITE.plan("tiny") if run.labels[:2] == ("shortest-path", "equilibrium"))
    run_suite(dataclasses.replace(SUITE, plan=lambda scale: [run]), Order("beyond", "tiny"), tmp_path)
    (again,) = Store(tmp_path).records()
    before = records["shortest-path", "equilibrium"]
    assert (again.id, again.values, again.series) == (before.id, before.values, before.series)


def test_plans_cover_every_model_with_five_seeds():
    for scale in ("tiny", "default", "paper"):
        names = {run.labels[:2] for run in SUITE.plan(scale)}
        assert len(names) == len(TASKS) * len(MODELS) - 1
        for run in SUITE.plan(scale):
            assert run.probe in run.task.points
            assert scale == "tiny" or (TRAINED[run.task.name] in run.task.points and max(run.steps) > 10 * DEPTH)
    assert SUITE.seeds["default"] >= 5 and SUITE.seeds["paper"] >= 5


def record(task, model, accuracy, rest=None, seed=0):
    at = PROBE[task]
    values = [Value("test_accuracy", accuracy, at)] + ([] if rest is None else [Value("rest_accuracy", rest, at)])
    common = {
        "size": None,
        "role": "ours",
        "kind": "run",
        "config": {},
        "series": {},
        "facts": {},
        "environment": {},
    }
    return Record(
        id="", suite="beyond", scale="default", task=task, model=model, seed=seed, values=tuple(values),
        started="", seconds=0.0, **common
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tied", "deep", "said", "unsaid"),
    [
        ((0.4, 0.1), 0.5, ("are not enough", "loses", "80 points", "worse than"), "what matters"),
        ((0.1, 0.4), 0.88, ("are not enough", "gains", "as well as the model"), "what matters"),
        ((0.4, 0.4), 0.9, ("neither gains nor loses",), "worse than"),
        ((0.4, 0.89), 0.98, ("tied weights are what matters", "better than"), "not enough"),
    ],
)
def test_sentences_tell_equilibrium_from_tying(tied, deep, said, unsaid):
    found = [
        record("shortest-path", "equilibrium", 0.9, 0.9),
        record("shortest-path", "tied", *tied),
        record("shortest-path", "tied-deep", deep, deep),
        record("shortest-path", "linear", 0.02),
    ]
    text = " ".join(SUITE.findings(found))
    assert all(part in text for part in said) and unsaid not in text
    assert "equilibrium 90 %" in text and "linear 2 %" in text and "linear-system" not in text


def test_sentences_name_the_best_number_of_steps():
    tied = record("linear-system", "tied", 0.02, 0.05)
    steps = tuple(Value("steps_accuracy", value, at) for at, value in ((12.0, 0.02), (48.0, 0.52), (512.0, 0.05)))
    found = [
        record("linear-system", "equilibrium", 1.0, 1.0),
        dataclasses.replace(tied, values=(*tied.values, *steps)),
    ]
    assert "suits the test best, 48, it reaches 52 %" in " ".join(SUITE.findings(found))


def test_sentences_compare_nothing_where_ours_fails():
    failed = [record("shortest-path", "equilibrium", 0.1, 0.1), record("shortest-path", "tied", 0.1, 0.1)]
    assert "what matters" not in " ".join(SUITE.findings(failed))


def test_a_closed_form_has_no_use_for_a_gpu():
    used = {run.model.name: run.device_for("cuda:1") for run in SUITE.plan("tiny")}
    assert used.pop("linear") == "cpu" and set(used.values()) == {"cuda:1"}
