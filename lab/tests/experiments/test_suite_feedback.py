"""The suite `feedback`: the four matrices are what they should be, and wins are counted seed by seed."""

import dataclasses
import itertools

import pytest
import torch
from wellposed_lab.engine.claims import NotATarget, load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.judge import verdicts
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.store import Record, Store, Value
from wellposed_lab.experiments.mathematics.feedback import (
    CAP,
    METRICS,
    MODELS,
    RIVALS,
    SUITE,
    Wins,
    conclusion,
    plan,
    wins,
)
from wellposed_lab.networks.by_name import build

CHOICES = {choice.name: choice for _, choice in MODELS}


def record(task, model, seed, value):
    return Record(
        id=f"{task}-{model}-{seed}",
        suite="feedback",
        scale="default",
        task=task,
        model=model,
        size=None,
        seed=seed,
        role="ours",
        kind="run",
        config={},
        values=(Value(METRICS[task], value, 100.0),),
        series={},
        facts={},
        environment={},
        started="",
        seconds=0.0,
    )


def test_the_four_matrices():
    torch.manual_seed(0)
    models = {name: build("addition", (50, 1), choice) for name, choice in CHOICES.items()}
    with torch.no_grad():
        for model in models.values():
            if model.state.raw.requires_grad:
                model.state.raw.normal_(std=5.0)
    rows = {name: model.A.abs().sum(1).max().item() for name, model in models.items()}
    assert models["implicit"].A.tril().abs().sum() > 0 and rows["implicit"] == pytest.approx(CAP, rel=1e-4)
    for name in ("implicit-triangular", "implicit-triangular-capped"):
        assert models[name].A.tril().abs().sum() == 0 < models[name].A.triu(1).abs().sum()
    assert rows["implicit-triangular"] > 10 and rows["implicit-triangular-capped"] == pytest.approx(CAP, rel=1e-4)
    assert rows["implicit-no-feedback"] == 0


def test_every_claim_is_judged(tmp_path):
    claims = [one for one in load_claims() if one.suite == "feedback" and not isinstance(one.rule, NotATarget)]
    judged = {measure.model for claim in claims for measure in claim.rule.measures}
    wanted = [run for run in plan("tiny") if run.labels[1] in judged]
    run_suite(dataclasses.replace(SUITE, plan=lambda scale: wanted), Order("feedback", "tiny", seeds=3), tmp_path)
    records = [dataclasses.replace(one, scale="default") for one in Store(tmp_path).records()]
    found = verdicts(records, claims)
    assert len(found) > 12 and [one.claim.says for one in found if one.verdict == "not judged"] == []


def test_the_same_training_for_all_and_enough_seeds():
    runs = plan("default")
    for task, group in itertools.groupby(runs, key=lambda run: run.labels[0]):
        assert len({run.training for run in group}) == 1, task
    assert get_suite("feedback") is SUITE and SUITE.seeds["default"] >= 8
    assert {run.labels[0] for run in runs} == set(METRICS)


def test_wins_are_counted_by_seed():
    ours, theirs = [1.0, 1.0, 1.0], [2.0, 0.5, 4.0]
    records = [record("addition", "implicit", seed, value) for seed, value in enumerate(ours)]
    records += [record("addition", "implicit-triangular", seed, value) for seed, value in enumerate(theirs)]
    records.append(record("addition", "implicit-triangular", 7, 1e9))  # no partner
    assert wins(records, "addition", "implicit-triangular") == Wins(2, 3, 2.0)
    assert wins(records, "subtraction", "implicit-triangular") is None


def test_an_accuracy_is_won_by_the_higher_one():
    records = [record("rolling-argmax", "implicit", seed, 0.97) for seed in range(4)]
    records += [record("rolling-argmax", "implicit-no-feedback", seed, 0.94) for seed in range(4)]
    found = wins(records, "rolling-argmax", "implicit-no-feedback")
    assert (found.won, found.seeds) == (4, 4) and found.ratio == pytest.approx(2.0)


@pytest.mark.parametrize(("won", "side"), [(8, "full"), (7, "full"), (6, "neither"), (2, "neither"), (1, "rival")])
def test_a_side_is_named_only_beyond_chance(won, side):
    assert Wins(won, 8, 1.0).side == side


def test_conclusions():
    sure, even, lost = Wins(8, 8, 1.6), Wins(4, 8, 1.0), Wins(0, 8, 0.6)
    said = {
        counts: conclusion(dict(zip(RIVALS, counts, strict=True)))
        for counts in itertools.product((sure, even, lost), repeat=3)
    }
    assert said[sure, even, even] == "it is the cap, not the feedback."
    assert said[lost, even, even].startswith("feedback does not help")
    assert said[even, even, even] == "the seeds show no advantage of feedback."
    assert said[sure, lost, lost].startswith("feedback harms") and "without any A" in said[sure, lost, lost]
    assert said[even, sure, even].startswith("feedback helps") and "without any A" not in said[even, sure, even]


def test_the_sentences_count():
    records = []
    for (model, value), seed in itertools.product(
        (("implicit", 1.0), *((rival, 2.0) for rival in RIVALS)), range(8)
    ):
        records.append(record("addition", model, seed, value))
    text = " ".join(SUITE.findings(records))
    assert text.count("better in 8 of 8 seeds") == 3 and "2 times larger" in text
    assert "On addition: feedback helps" in text and "subtraction" not in text
