"""The suite `depth`: every claim is judged, and its records say what decides the steps."""

import dataclasses

import pytest
from wellposed_lab.config import Choice
from wellposed_lab.engine.claims import NotATarget, load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.judge import verdicts
from wellposed_lab.engine.run import Context
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.store import Store
from wellposed_lab.engine.thresholds import check
from wellposed_lab.experiments.depth.run import SCALES
from wellposed_lab.experiments.depth.suite import SUITE, TASKS, plan

from wellposed.errors import InputError

CLAIMS = [claim for claim in load_claims() if claim.suite == "depth"]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Tiny runs of the papers' model on all tasks, and of all models on addition; three seeds."""
    wanted = [run for run in plan("tiny") if run.labels[1] == "implicit-absolute" or run.labels[0] == "addition"]
    out = tmp_path_factory.mktemp("depth")
    state = run_suite(dataclasses.replace(SUITE, plan=lambda scale: wanted), Order("depth", "tiny", seeds=3), out)
    assert state.finished == state.planned == 3 * 7
    return Store(out).records()


def one(records, task, model):
    return next(r for r in records if (r.task, r.model, r.seed) == (task, model, 0))


def as_default(records):
    return [dataclasses.replace(record, scale="default") for record in records]


def test_it_is_registered():
    assert get_suite("depth") is SUITE and {run.labels[0] for run in plan("default")} == set(TASKS)


def test_every_claim_is_judged(records):
    assert len(CLAIMS) >= 10 and any("a third of the epochs" in claim.says for claim in CLAIMS)
    found = verdicts(as_default(records), [one for one in CLAIMS if not isinstance(one.rule, NotATarget)])
    assert [verdict.claim.says for verdict in found if verdict.verdict == "not judged"] == []
    assert all(verdict.record_id is not None for verdict in found)


def test_the_absolute_rule_counts_more_steps_for_larger_inputs_and_the_relative_one_does_not(records):
    for task in TASKS:
        record = one(records, task, "implicit-absolute")
        near, far = (record.value("scaled_absolute", at) for at in (1.0, 1e5))
        assert far > near + 2
        calm = [record.value("scaled_relative", at) for at in SCALES if at >= 1]
        assert max(calm) / min(calm) - 1 == pytest.approx(record.value("relative_spread")) and max(
            calm
        ) < 1.05 * min(calm)
        assert record.value("steps_slope") == pytest.approx((far - near) / 11.5129, rel=0.1)


def test_own_rule_and_both_rules_agree_where_they_are_the_same(records):
    record = one(records, "addition", "implicit-absolute")
    assert all(record.value("steps", at) == record.value("steps_absolute", at) for at in (2.0, 10.0, 1e5))
    assert record.value("steps") == pytest.approx(record.value("steps", 2.0), rel=0.1)
    plain = one(records, "addition", "implicit")
    assert plain.value("steps", 10.0) > plain.value("steps_relative", 10.0)  # its own tolerance is 1e-10


def test_epochs_are_recorded_beside_the_score(records):
    record = one(records, "rolling-argmax", "implicit-absolute")
    assert len(record.series["accuracy"]) == len(record.series["steps"]) == 2
    assert record.value("steps", "first-epoch") == record.series["steps"][0]
    assert record.value("steps", "last-epoch") == record.series["steps"][-1]
    assert record.value("epochs_not_converged") == 0.0


def test_float32_often_cannot_meet_the_absolute_rule_far_out(records):
    record = one(records, "addition", "implicit-absolute")
    assert record.value("not_converged_float32", 2.0) == 0.0
    assert record.value("not_converged_float32", 1e5) > 0.05


def test_a_bias_is_not_homogeneous(records):
    assert one(records, "addition", "implicit").value("homogeneity_error") < 1e-10
    assert one(records, "addition", "implicit-bias").value("homogeneity_error") > 1e-8


def test_thresholds_are_judged_by_the_records(records):
    checks = check(SUITE.thresholds, as_default(records))
    judged = {
        (one.threshold.measure.task, one.threshold.measure.metric): one.state for one in checks if one.values
    }
    assert judged["addition", "homogeneity_error"] == judged["addition", "relative_spread"] == "met"
    assert len(judged) == 3 * len(TASKS)


def test_the_sentences_name_the_law_and_the_numbers(records):
    text = " ".join(SUITE.findings(records))
    assert "log(c) / log(1 / rho)" in text and "On addition the same inputs times 1e5 take" in text
    assert "with a cap of 0.95 on A and" in text and "Depth does adapt within" in text
    assert "What sets the level" in text and ("A bias gives" in text or "the bias that is learnt" in text)
    assert len(SUITE.findings([])) == 1


def test_only_implicit_models_have_a_depth():
    run = dataclasses.replace(plan("tiny")[0], model=Choice("mlp", "001"))
    with pytest.raises(InputError, match="received MLP"):
        run.execute([run], Context())
