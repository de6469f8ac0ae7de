"""Training that is looked at after every epoch."""

import dataclasses

import pytest
from wellposed_lab.config import Choice, Training
from wellposed_lab.engine import training
from wellposed_lab.engine.run import Context
from wellposed_lab.engine.training import ObservedRun, TrainingRun
from wellposed_lab.tasks.mathematics import Identity

from wellposed.errors import InputError
from wellposed.training import fit

FIELDS = {
    "suite": "small",
    "seed": 0,
    "scale": "tiny",
    "task": Identity(samples=60, test_samples=20, points=(10.0, 30.0)),
    "model": Choice.of("implicit", kappa=0.5, solver="picard"),
    "training": Training(epochs=3, batch_size=20, learning_rate=0.02),
}
RUN = ObservedRun(**FIELDS, observed=30.0)


def carried_out(run, seeds=None):
    return run.execute([run.with_seed(seed) for seed in seeds or (run.seed,)], Context())


def test_the_last_look_is_the_final_test_and_earlier_ones_differ():
    (result,) = carried_out(RUN)
    final = next(value.value for value in result.values if (value.metric, value.at) == ("test_mse", 30.0))
    assert result.series["test_mse"][-1] == pytest.approx(final, rel=1e-4)
    assert len({*result.series["test_mse"]}) == 3 == len(result.series["train_loss"])
    assert all(steps > 1 for steps in result.series["steps"])


def test_seeds_trained_together_are_those_trained_alone():
    together = carried_out(RUN, (0, 1))
    for seed, result in enumerate(together):
        (alone,) = carried_out(RUN.with_seed(seed))
        assert result.series["test_mse"] == pytest.approx(alone.series["test_mse"], rel=1e-3)
    assert together[0].series["test_mse"] != together[1].series["test_mse"]


def test_training_is_the_usual_one_cut_in_epochs():
    once = Training(epochs=1, batch_size=20, learning_rate=0.02)
    (observed,) = carried_out(dataclasses.replace(RUN, training=once))
    (plain,) = TrainingRun(**{**FIELDS, "training": once}).execute([TrainingRun(**FIELDS)], Context())
    assert observed.series["train_loss"] == plain.series["train_loss"]


def test_every_epoch_of_every_seed_has_an_order_of_its_own(monkeypatch):
    seeds = []
    monkeypatch.setattr(
        training, "fit", lambda *args, **options: seeds.append(options["seed"]) or fit(*args, **options)
    )
    carried_out(RUN, (0, 1))
    assert len(seeds) == 3 and len({seed for pair in seeds for seed in pair}) == 6


def test_the_learning_rate_follows_the_schedule_through_all_epochs():
    (cosine,) = carried_out(RUN)
    (constant,) = carried_out(dataclasses.replace(RUN, training=dataclasses.replace(RUN.training, schedule=None)))
    assert cosine.series["train_loss"][0] == constant.series["train_loss"][0]
    assert cosine.series["train_loss"][-1] != constant.series["train_loss"][-1]


def test_a_fold_of_a_search_sees_no_test():
    (result,) = carried_out(dataclasses.replace(RUN, fold=1, kind="search"))
    assert "test_mse" not in result.series and not any(value.metric == "test_mse" for value in result.values)


def test_patience_is_refused():
    patient = dataclasses.replace(RUN, training=dataclasses.replace(RUN.training, patience=3))
    with pytest.raises(InputError, match="patience; received 3"):
        carried_out(patient)
