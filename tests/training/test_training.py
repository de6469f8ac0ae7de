"""The training loop: members as if alone, early stopping, clipping, failures."""

import signal
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_problems import QUIET, implicit, problem, seeded
from wellposed_lab.networks.mlp import MLP

from wellposed.equilibrium.method import SolveLog
from wellposed.equilibrium.solution import Status
from wellposed.errors import InputError, NonFiniteLossError, UnknownNameError
from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel
from wellposed.training import Interrupted, fit
from wellposed.training.history import solve_counts
from wellposed.training.run import EarlyStopping, clip_gradients

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("factory", [implicit, lambda: MLP([4, 5, 1])], ids=["implicit", "MLP"])
def test_members_train_as_if_alone(factory):
    options = {"epochs": 4, "batch_size": 10, "clip": 0.5, "schedule": "cosine", "validation": problem(20, 1)}
    ensemble = Ensemble.of(factory, [3, 8]).double()
    together = fit(ensemble, problem(), F.mse_loss, **options, **QUIET)
    for index, seed in enumerate([3, 8]):
        model = seeded(factory, seed)
        alone = fit(model, problem(), F.mse_loss, seed=seed, **options, **QUIET)
        assert torch.allclose(together.train_loss[:, index], alone.train_loss, atol=1e-8)
        assert torch.allclose(together.validation_loss[:, index], alone.validation_loss, atol=1e-8)
        assert torch.allclose(together.steps[:, index], alone.steps, atol=0.5, equal_nan=True)
        for name, value in ensemble.member(index).named_parameters():
            assert torch.allclose(value, model.get_parameter(name), atol=1e-8), name


def test_history_of_an_implicit_model():
    history = fit(seeded(implicit, 0), problem(), F.mse_loss, epochs=3, **QUIET)
    assert len(history) == 3
    assert history.train_loss[-1] < history.train_loss[0]
    assert (history.steps > 1).all()
    assert (history.failed_share == 0).all()
    assert history.validation_loss.isnan().all()
    assert (history.seconds > 0).all()
    assert history.best_epoch is None


def test_failures_are_counted():
    model = ImplicitModel(4, 1, 6, kappa=0.95, max_steps=2, solver="picard", on_failure="ignore").double()
    assert fit(model, problem(), F.mse_loss, epochs=1, **QUIET).failed_share > 0.3


def test_solves_are_counted_for_each_member():
    ok = torch.full((4,), Status.CONVERGED)
    log = SolveLog([(ok, torch.tensor([1, 2, 30, 40]))])
    assert solve_counts(log, torch.Size([2])).tolist() == [[3, 70], [2, 2], [0, 0], [2, 2]]
    shared = SolveLog([(ok[:3], torch.tensor([1, 2, 3]))])
    assert solve_counts(shared, torch.Size([2]))[0].tolist() == [6, 6]


def test_a_plain_module_has_no_steps():
    history = fit(seeded(lambda: MLP([4, 1]), 0), problem(), F.mse_loss, epochs=1, **QUIET)
    assert history.steps.isnan().all()


def test_early_stopping_keeps_every_members_best():
    options = {"epochs": 30, "optimizer": partial(torch.optim.Adam, lr=0.3), "batch_size": 5, "patience": 2}
    options |= {"validation": problem(30, 1)}
    seeds = [0, 1, 2, 3]
    ensemble = Ensemble.of(implicit, seeds).double()
    together = fit(ensemble, problem(20), F.mse_loss, **options, **QUIET)
    lengths = together.train_loss.isfinite().sum(0)
    assert len(set(lengths.tolist())) > 1, "the members should stop at different times"
    for index, seed in enumerate(seeds):
        model = seeded(implicit, seed)
        alone = fit(model, problem(20), F.mse_loss, seed=seed, **options, **QUIET)
        assert len(alone) == lengths[index]
        assert together.best_epoch[index] == alone.best_epoch
        for name, value in ensemble.member(index).named_parameters():
            assert torch.allclose(value, model.get_parameter(name), atol=1e-6), name


def test_a_stopped_member_ignores_later_improvement():
    ensemble = Ensemble([nn.Linear(1, 1), nn.Linear(1, 1)])
    best = EarlyStopping(ensemble, 2, torch.ones(2, dtype=torch.bool))
    for epoch, losses in enumerate([[1.0, 5.0], [2.0, 4.0], [2.0, 3.0], [0.1, 2.0]]):
        with torch.no_grad():
            ensemble.stacked.weight.fill_(epoch)
        best.update(epoch, torch.tensor(losses, dtype=torch.float64))
    assert best.active.tolist() == [False, True]
    assert best.epoch.tolist() == [0, 3]
    best.restore()
    assert ensemble.stacked.weight.flatten().tolist() == [0, 3]


def test_the_best_parameters_come_back():
    model, data, checks = seeded(implicit, 0), problem(20), problem(30, 1)
    options = {"optimizer": partial(torch.optim.Adam, lr=0.5), "batch_size": 5, "validation": checks}
    history = fit(model, data, F.mse_loss, epochs=20, patience=3, **options, **QUIET)
    with torch.no_grad():
        now = F.mse_loss(model(checks[0]), checks[1])
    assert torch.allclose(now, history.validation_loss.min())
    assert history.validation_loss[-1] > history.validation_loss.min()
    assert history.best_epoch == history.validation_loss.argmin()


def test_clipping_is_per_member():
    ensemble = Ensemble.of(lambda: MLP([4, 3, 1]), range(2)).double()
    u, y = problem()
    losses = (ensemble(u) - y).square().mean((1, 2))
    (losses[0] * 1e4 + losses[1] * 1e-4).backward()
    before = [parameter.grad.clone() for parameter in ensemble.parameters()]
    clip_gradients(ensemble, 0.5)
    after = [parameter.grad for parameter in ensemble.parameters()]
    assert torch.stack([g[0].norm() for g in after]).norm() == pytest.approx(0.5, rel=1e-4)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1], new[1])


def test_project_is_called_after_the_step():
    model = ImplicitModel(4, 1, 6, kappa=0.3).double()
    fit(model, problem(), F.mse_loss, epochs=2, optimizer=SGD, project=True, **QUIET)
    assert torch.equal(model.state.raw, model.A)
    assert model.A.abs().sum(1).max() <= 0.3 + 1e-12


@pytest.mark.parametrize("factory", [implicit, lambda: MLP([4, 8, 1])], ids=["implicit", "MLP"])
@pytest.mark.parametrize("wrap", [False, True], ids=["alone", "ensemble"])
def test_autocast_trains(factory, wrap):
    model = Ensemble.of(factory, range(2)) if wrap else factory()
    data = problem(dtype=torch.float32)
    history = fit(model, data, F.mse_loss, epochs=5, autocast=torch.bfloat16, **QUIET)
    assert (history.train_loss[-1] < history.train_loss[0]).all()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_a_nonfinite_loss_names_its_place():
    u, y = problem(20)
    y[13] = torch.nan
    model = seeded(lambda: MLP([4, 1]), 0)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    with pytest.raises(NonFiniteLossError, match=f"epoch 0, batch {order.index(13) // 4} "):
        fit(model, (u, y), F.mse_loss, epochs=2, batch_size=4, **QUIET)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_interrupt_keeps_history_and_parameters():
    calls = []

    def loss(prediction, target):
        calls.append(1)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return F.mse_loss(prediction, target)

    model = seeded(implicit, 0)
    start = model.B.detach().clone()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(model, problem(20), loss, epochs=9, batch_size=10, **QUIET)
    assert isinstance(caught.value, Interrupted)
    assert len(caught.value.history) == 2
    assert not torch.equal(model.B, start)


def test_optimizer_and_mode():
    model = seeded(lambda: MLP([4, 1]), 0).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    fit(model, problem(), F.mse_loss, epochs=2, optimizer=optimizer, schedule=schedule, **QUIET)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert not model.training


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"epochs": 0}, InputError, "epochs must be positive"),
        ({"clip": -1.0}, InputError, "clip must be positive"),
        ({"patience": 3}, InputError, "pass validation"),
        ({"project": True}, InputError, "Linear has none"),
        ({"per_member": True}, InputError, "needs an Ensemble"),
        ({"seed": [1, 2]}, InputError, "each of 1 members; received 2"),
        ({"schedule": "cosin"}, UnknownNameError, "did you mean 'cosine'"),
        ({"data": (torch.zeros(3, 4), torch.zeros(2, 1))}, InputError, r"\(3, 4\), \(2, 1\)"),
        ({"data": 7}, InputError, "received int"),
        ({"data": iter([])}, InputError, "gave no batch"),
        ({"loss": lambda a, b: (a - b).square()}, InputError, "one number"),
    ],
)
def test_wrong_arguments(options, error, complaint):
    data, loss = problem(dtype=torch.float32), F.mse_loss
    options = {"data": data, "loss": loss, "epochs": 1, **QUIET, **options}
    with pytest.raises(error, match=complaint):
        fit(nn.Linear(4, 1), **options)


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": "1"}])
def test_progress_never_breaks_a_run(environment, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fit(nn.Linear(4, 1), problem(dtype=torch.float32), F.mse_loss, epochs=2, progress="label")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert bool(captured.err) == ("FORCE_COLOR" in environment)
