"""The adversarial suite: its models, its runs and what it says about them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.run import Context
from wellposed_lab.engine.store import Record, Value
from wellposed_lab.experiments.adversarial.evaluation import Budget, Evaluation
from wellposed_lab.experiments.adversarial.findings import sentences
from wellposed_lab.experiments.adversarial.models import THRESHOLD, Classifier, Defended, ImageCell, Shape
from wellposed_lab.experiments.adversarial.run import AdversarialRun, AdversarialSchedule
from wellposed_lab.experiments.adversarial.training import AttackedStep, FixedModel, Trainer

from wellposed.equilibrium import Polished, RandomThreshold
from wellposed.robust import AdversarialLoss, Ramp, SignSteps, TradesLoss
from wellposed.robust.attacks import survival
from wellposed.training import Checkpoint, fit

SMALL = Shape(4, 3, 2, 2, "picard")
EVERY = [run.model for run in get_suite("adversarial").runs("default", 1) if isinstance(run, AdversarialRun)]


def images(count: int = 5) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_tiny_runs_measure_what_the_claims_ask_for() -> None:
    runs = get_suite("adversarial").runs("tiny", 1)
    assert len({run.labels for run in runs}) == len(runs) == 3
    claims = [claim for claim in load_claims() if claim.suite == "adversarial"]
    wanted = {measure.metric for claim in claims for measure in claim.rule.measures}
    found = set()
    for run in runs:
        (result,) = run.execute([run], Context())
        assert all(math.isfinite(value.value) for value in result.values)
        found |= {value.metric for value in result.values}
        assert any("reduced" in note for note in result.facts["notes"])
    assert wanted <= found


def test_the_default_plan_has_all_models_of_the_claims_and_points_of_the_thresholds() -> None:
    suite = get_suite("adversarial")
    names = {model.name for model in EVERY}
    measures = [m for claim in load_claims() if claim.suite == "adversarial" for m in claim.rule.measures]
    measures += [m for threshold in suite.thresholds for m in threshold.measures]
    assert {measure.model for measure in measures} <= names
    budget = Budget()
    points: dict[str, tuple[object, ...]] = {
        "accuracy": (None,),
        "pgd_accuracy": budget.pgd_steps,
        "pgd_gain": budget.pgd_steps,
        "epsilon_accuracy": budget.epsilons,
        "autoattack_accuracy": budget.auto_epsilons,
        "autoattack_rand_accuracy": budget.auto_epsilons[-1:],
        "adaptive_accuracy": ("construction", "steps-eot", "square", "worst"),
        "speckle_accuracy": budget.levels,
        "salt_and_pepper_accuracy": budget.levels,
    }
    assert all(measure.at in points[measure.metric] for measure in measures)


@pytest.mark.parametrize("model", EVERY, ids=lambda model: model.name)
def test_answers_are_random_where_they_should_be_and_follow_the_seed(model: Defended) -> None:
    network, u = model.build(SMALL, 1, 10, 0).eval(), images()
    with torch.no_grad():
        network.reseed(3)
        first, second = network(u), network(u)
        network.reseed(3)
        assert torch.equal(first, network(u))
    assert torch.equal(first, second) == model.steady
    if model.kind == "deq":
        assert network.deq is not None and network.deq.gradient == Polished(9, 0.5)
        assert isinstance(network.deq.stop, RandomThreshold) == model.random
        assert list(network.gradients) == ["construction", "implicit", "steps"]


def test_the_pair_shares_its_cell_and_differs_in_how_often_it_is_applied() -> None:
    deq, ffw = (Defended(kind).build(SMALL, 1, 10, 0) for kind in ("deq", "ffw"))
    assert [p.shape for p in deq.parameters()] == [p.shape for p in ffw.parameters()]
    assert deq.deq is not None
    u, cell = images(), deq.deq.cell
    assert isinstance(cell, ImageCell) and isinstance(ffw.cell, ImageCell)
    injection = torch.relu(cell.input(u))
    oracle = ffw.readout(torch.tanh(ffw.cell.state(torch.relu(ffw.cell.input(u)))))
    torch.testing.assert_close(ffw(u), oracle)
    x = torch.zeros_like(injection)
    for _ in range(200):
        x = torch.tanh(cell.state(x) + injection)
    torch.testing.assert_close(deq(u), deq.readout(x), rtol=1e-2, atol=1e-2)
    assert THRESHOLD == 8


def test_noise_reaches_the_state_of_a_network_of_one_cell() -> None:
    network, u = Defended("ffw", "state", 10.0).build(SMALL, 1, 10, 0).double(), images(100).double()
    assert isinstance(network.cell, ImageCell)
    network.cell.state = torch.nn.Identity()  # type: ignore[assignment]
    with torch.no_grad():
        x = network.cell.inject(u)
        noise = torch.atanh(network._applied(u)) - x
    power = noise.flatten(1).square().sum(1) / x.flatten(1).square().sum(1)
    assert float(power.mean()) == pytest.approx(0.1, rel=0.1)


def library_loss(network: Classifier, schedule: AdversarialSchedule, ramp: Ramp) -> AdversarialLoss | TradesLoss:
    """What `AttackedStep` computes, by the losses of the library."""
    generator = torch.Generator().manual_seed(0)
    if network.defended.trained_by == "trades":
        return TradesLoss(network, ramp, weight=schedule.weight, steps=schedule.steps, generator=generator)
    share = 0.0 if network.defended.trained_by == "clean" else 1.0
    return AdversarialLoss(network, ramp, attack=SignSteps(schedule.steps, generator=generator), share=share)


@pytest.mark.parametrize("model", EVERY, ids=lambda model: model.name)
def test_the_fixed_program_trains_as_the_library_does(model: Defended) -> None:
    schedule, ramps = AdversarialSchedule(40, 2, 16, 3e-3, steps=3), [Ramp(0.3, steps=3) for _ in range(2)]
    u, labels = images(40), torch.arange(40) % 4
    ours, theirs = (model.build(SMALL, 1, 4, 0) for _ in range(2))
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    loss = library_loss(theirs, schedule, ramps[0])
    fit(theirs, (u, labels), loss, epochs=2, batch_size=16, seed=0, schedule="cosine", progress=False,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 3e-3, amsgrad=True))  # fmt: skip
    step = AttackedStep(ours, schedule.steps, schedule.weight, 0, 3e-3, 16)
    history = Trainer(step, (u, labels), ramps[1], 2, 0).train()
    assert len(history) == 2 and all(map(math.isfinite, history))
    for own, other, start in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
        assert float((own - start).detach().abs().max()) > 1e-3


class StoppingRamp(Ramp):
    """A ramp that stops the training in its second epoch."""

    def next(self) -> float:
        if self.taken == 4:
            raise KeyboardInterrupt
        return super().next()


@pytest.mark.parametrize("model", [EVERY[1], EVERY[5], EVERY[8]], ids=lambda model: model.name)
def test_a_stopped_training_goes_on_to_the_same_weights(model: Defended, tmp_path: Path) -> None:
    u, labels = images(40), torch.arange(40) % 4

    def trainer(name: str, ramp: Ramp) -> Trainer:
        step = AttackedStep(model.build(SMALL, 1, 4, 0), 2, 6.0, 0, 3e-3, 16)
        return Trainer(step, (u, labels), ramp, 3, 0, Checkpoint(tmp_path / name))

    with pytest.raises(KeyboardInterrupt):
        trainer("stopped", StoppingRamp(0.3, steps=3)).train()
    both = [trainer(name, Ramp(0.3, steps=3)) for name in ("whole", "stopped")]
    histories = [one.train() for one in both]
    assert histories[0] == histories[1] and len(histories[0]) == 3
    for own, other in zip(*(one.step.network.parameters() for one in both), strict=True):
        assert torch.equal(own, other)
    finished = trainer(
        "stopped", StoppingRamp(0.3, steps=3)
    )  # which would raise if there were anything left to do
    assert finished.train() == histories[0]


@pytest.mark.parametrize("model", EVERY, ids=lambda model: model.name)
def test_the_fixed_model_answers_as_the_classifier_does(model: Defended) -> None:
    network = model.build(SMALL, 1, 4, 0).eval()
    fixed, found = FixedModel(network), []
    for one in (network, fixed):
        u = images().requires_grad_()
        one.reseed(3)
        with torch.no_grad():
            answers = one(u)
        logits = one(u)
        (slopes,) = torch.autograd.grad(logits[:, 0].sum(), u)
        found.append((answers, logits.detach(), slopes))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


def test_the_worst_attack_is_chosen_image_by_image() -> None:
    network = Defended("ffw").build(SMALL, 1, 10, 0).eval()
    u = 20 * images(30) - 10
    with torch.no_grad():
        target = network(u).argmax(1)
    evaluation = Evaluation(network, u, target, Budget(part=7), 0)
    halves = torch.arange(30)[:, None, None, None] < 15
    evaluation.found = {"one": torch.where(halves, -u, u), "other": torch.where(halves, u, -u)}
    both = survival(network, -u, target)
    assert evaluation.share_correct(u) == 1.0 and float(both.mean()) < 0.9
    assert evaluation._worst() == pytest.approx(float(both.mean()))


def test_the_worst_attack_is_never_weaker_than_any_for_all_images() -> None:
    network = Defended("ffw", "state", 0.0).build(SMALL, 1, 10, 0).eval()
    u = 20 * images(40) - 10
    network.reseed(0)
    with torch.no_grad():
        target = network(u).argmax(1)
    evaluation = Evaluation(network, u, target, Budget(answers=2), 0)
    evaluation.found = {str(scale): scale * u for scale in (1.0, 0.9, 1.1, -1.0)}
    lowest = min(float(evaluation.survival(points, 3_000_000).mean()) for points in evaluation.found.values())
    assert evaluation._worst() <= lowest < evaluation.share_correct(u)


def test_findings_say_whether_robustness_survives() -> None:
    run = replace(get_suite("adversarial").runs("default", 1)[1], seed=0)

    def record(model: str, **accuracies: float) -> Record:
        values = tuple(Value("adaptive_accuracy", value, at.replace("_", "-")) for at, value in accuracies.items())
        return Record(run.id, "adversarial", "default", "mnist", model, None, 0, "ours", "run", {},
                      (Value("accuracy", 0.9), *values), {}, {}, {}, "", 1.0)  # fmt: skip

    records = [
        record("deq-conv", construction=0.5, worst=0.49),
        record("deq-conv-input-0db", construction=0.6, construction_eot=0.5, steps_eot=0.35, worst=0.3),
        record("ffw-conv-state-0db", construction=0.5, worst=0.4),
    ]
    told = " ".join(sentences(records, [model.name for model in EVERY]))
    assert (
        "points: deq-conv 1, deq-conv-input-0db 30; of networks, whose gradient is exact, ffw-conv-state" in told
    )
    assert "as many draws), in points: deq-conv-input-0db 15." in told
    assert "deq-conv-input-0db -19" in told and "60 and 50 % under the attack of 004, 30 and 40 % under" in told
    assert sentences([], ["deq-conv"]) == []
