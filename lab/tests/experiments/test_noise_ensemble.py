"""Ensembles of models under noise: they train and solve as their members would alone."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from wellposed_lab.config import Schedule, Training
from wellposed_lab.engine.run import Context
from wellposed_lab.experiments.noise import ensemble, solve, training
from wellposed_lab.experiments.noise.ensemble import Draws, Member, Noises, make_stack
from wellposed_lab.experiments.noise.models import (
    LOOSE,
    STEPS,
    TIGHT,
    WINDOW,
    Equilibrium,
    Pair,
)
from wellposed_lab.experiments.noise.regression import BumpRegression, PenalisedRegressionRun, RegressionRun
from wellposed_lab.experiments.noise.solve import (
    Found,
    attach,
    solve_adjoint,
    solve_at_once,
    solve_averaged,
    solve_plain,
    unrolled,
)
from wellposed_lab.experiments.noise.training import Trainer, chosen, score, train
from wellposed_lab.networks.twins import FeedForward

from wellposed.equilibrium import Implicit, MeanRelative, Relative, Stopping, Unrolled, fixed_point, watch
from wellposed.models import Noise, Noisy, jacobian_penalty
from wellposed.training import fit
from wellposed.training.checkpoint import Checkpoint

CPU, INPUTS, CLASSES = torch.device("cpu"), 12, 4
SCHEDULE = Schedule(images=48, epochs=2, batch_size=16, learning_rate=1e-3)


def stopping(noisy: bool, training: bool) -> Stopping:
    """Returns the rule of 004 Table 1: averaged under noise and in every test, plain in training without noise."""
    return MeanRelative(LOOSE, WINDOW) if noisy or not training else Relative(TIGHT, norm="2")


def under_noise(model: nn.Module, decibels: float | None, seed: int, *, training: bool) -> Noisy:
    """Returns the model with signal noise of that strength, solved as 004 solves it."""
    if isinstance(model, Equilibrium):
        model.deq.stop = stopping(decibels is not None, training)
    device = next(model.parameters()).device
    return Noisy(model, Noise(signal=decibels, generator=torch.Generator(device).manual_seed(seed)))


def penalty(model: nn.Module, u: Tensor) -> Tensor:  # ()
    """Returns the Jacobian penalty: of the cell at the equilibrium, or of every layer."""
    if isinstance(model, Equilibrium):
        with torch.no_grad():
            x = model.deq(u)
        return jacobian_penalty(model.deq.cell, x, u).mean()
    assert isinstance(model, FeedForward)
    x = z = model.encode(u)
    total = torch.zeros((), device=u.device)
    for layer in model.layers:
        total = total + jacobian_penalty(layer, z, x).mean()
        z = layer(z, x)
    return total


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (64,), generator=generator)
    return torch.rand(64, INPUTS, generator=generator), labels


def trained_alone(member: Member) -> nn.Module:
    u, labels = data()
    model = member.pair.build(INPUTS, CLASSES, member.seed)
    if isinstance(model, Equilibrium):
        model.deq.gradient = Implicit(stop=Relative(TIGHT, norm="2"))
    noisy = under_noise(model, member.noise, member.seed, training=True)
    rows = torch.randperm(len(u), generator=torch.Generator().manual_seed(member.seed))[: SCHEDULE.images]
    settings = {"epochs": SCHEDULE.epochs, "batch_size": SCHEDULE.batch_size, "seed": member.seed}
    adam = lambda parameters: torch.optim.Adam(parameters, SCHEDULE.learning_rate)  # noqa: E731
    fit(noisy, (u[rows], labels[rows]), cross_entropy, optimizer=adam, progress=False, **settings)
    return model


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize(
    ("kind", "noises"), [("deq", (None,)), ("ffw", (None, 0.0))], ids=["equilibrium", "feed-forward"]
)
def test_members_are_trained_as_models_of_the_library_are(kind: str, noises: tuple[float | None, ...]) -> None:
    members = [Member(Pair(kind, layers), noise, 1) for layers in (1, 3) for noise in noises]  # type: ignore[arg-type]
    stack = make_stack(members, INPUTS, CLASSES, "cpu")
    train(stack, *data(), SCHEDULE)
    for place, member in enumerate(stack.members):
        began = member.pair.build(INPUTS, CLASSES, member.seed)
        assert distance(stack.member(place), trained_alone(member)) < 3e-5
        assert distance(stack.member(place), began) > 3e-3


@pytest.mark.parametrize("kind", ["deq", "ffw"])
def test_a_regression_is_trained_as_by_the_library(kind: str) -> None:
    task = BumpRegression(samples=48, test_samples=20)
    training = Training(epochs=2, batch_size=16, learning_rate=1e-3, schedule=None)
    runs = [
        RegressionRun(suite="", seed=seed, scale="paper", task=task, training=training, points=(),
                      pair=Pair(kind, layers, projection=projection))  # type: ignore[arg-type]
        for projection, layers, seed in (("identity", 1, 0), ("silu", 3, 1), ("relu", 3, 0), ("identity", 3, 1))
    ]  # fmt: skip
    stack = make_stack([Member(run.pair, None, run.seed) for run in runs], 1, 1, "cpu")
    stack.unrolled = True
    losses = runs[0]._trained(stack, Context())
    for run in runs:
        alone, began = (run.pair.build(1, 1, run.seed) for _ in range(2))
        if isinstance(alone, Equilibrium):
            alone.deq.gradient = Unrolled()
        noisy = under_noise(alone, None, run.seed, training=True)
        history = fit(
            noisy, task.train(run.seed), task.loss, **training.arguments(), seed=run.seed, progress=False
        )
        place = stack.members.index(Member(run.pair, None, run.seed))
        assert distance(stack.member(place), alone) < 3e-5 and distance(alone, began) > 3e-3
        torch.testing.assert_close(losses[:, place].double(), history.train_loss, rtol=1e-4, atol=1e-5)


def test_a_penalty_keeps_the_jacobians_of_a_regression_small() -> None:
    task = BumpRegression(samples=48, test_samples=20)
    training = Training(epochs=8, batch_size=16, learning_rate=1e-3, schedule=None)
    penalties = []
    for kind in (RegressionRun, PenalisedRegressionRun):
        run = kind(suite="", seed=0, scale="paper", task=task, training=training, points=(), pair=Pair("deq", 1))
        stack = make_stack([run.member], 1, 1, "cpu")
        stack.unrolled = True
        run._trained(stack, Context())
        penalties.append(float(penalty(stack.member(0), task.test(0, None)[0]).detach()))
    assert penalties[1] < 0.9 * penalties[0]


@pytest.mark.parametrize("kind", ["deq", "ffw"])
def test_a_regression_is_read_out_at_the_mean_iterate_and_at_the_last(kind: str) -> None:
    task = BumpRegression(samples=48, test_samples=20)
    run = RegressionRun(suite="", seed=1, scale="paper", task=task, points=(0.0,), pair=Pair(kind, 1),  # type: ignore[arg-type]
                        training=Training(epochs=1, batch_size=16, learning_rate=1e-3, schedule=None))  # fmt: skip
    stack = make_stack([run.member], 1, 1, "cpu")
    result = run._result(stack, torch.zeros(1, 1), "cpu")
    noisy = under_noise(stack.member(0), 0.0, run.seed, training=False)
    u, y = task.test(run.seed, None)
    with torch.no_grad(), watch() as log:
        error = float((noisy(u) - y).square().mean())
    values = {value.metric: value.value for value in result.values if value.at == 0.0}
    assert values["test_mse"] == pytest.approx(error, rel=1e-5)
    if kind == "deq":
        assert values["last_mse"] != pytest.approx(error, rel=1e-2) and values["steps"] == log.mean_steps
    else:
        assert values.keys() == {"test_mse"}


def test_runs_with_a_penalty_are_an_ensemble_of_their_own() -> None:
    plain, penalised = (
        kind(suite="", seed=0, scale="paper", task=BumpRegression(), training=Training(1), pair=Pair("deq", 3))
        for kind in (RegressionRun, PenalisedRegressionRun)
    )
    assert (plain.labels[1], penalised.labels[1]) == ("deq-223-relu", "deq-223-relu-jacobian")
    assert plain.family != penalised.family == penalised.with_seed(1).family


def test_unrolled_gradients_are_those_of_the_library_also_where_a_solve_is_cut_off() -> None:
    generator = torch.Generator().manual_seed(0)
    W, x = 0.8 * torch.randn(3, 5, 5, generator=generator), torch.randn(3, 4, 5, generator=generator)
    weight = torch.randn(3, 4, 5, generator=generator)
    found = [part.clone().requires_grad_() for part in (W, x)]
    states, steps = unrolled(found[0], found[1])
    (states * weight).sum().backward()
    assert bool((steps == STEPS).any()) and bool((steps < STEPS).any())
    for member in range(3):
        A, u = W[member].clone().requires_grad_(), x[member].clone().requires_grad_()
        options = {
            "solver": "picard",
            "stop": Relative(TIGHT, norm="2"),
            "max_steps": STEPS,
            "on_failure": "ignore",
        }
        solution = fixed_point(lambda z, u, A=A: torch.tanh(z @ A.mT + u), torch.zeros(4, 5), u,
                               gradient=Unrolled(), **options)  # fmt: skip
        (solution.value * weight[member]).sum().backward()
        torch.testing.assert_close(states[member], solution.value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[0].grad[member], A.grad, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found[1].grad[member], u.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["deq", "ffw"])
def test_company_changes_nothing(kind: str) -> None:
    members = [Member(Pair(kind, 1), 0.0, 0), Member(Pair(kind, 3), 10.0, 1)]  # type: ignore[arg-type]
    together = make_stack(members, INPUTS, CLASSES, "cpu")
    losses = train(together, *data(), SCHEDULE)
    for member in members:
        alone = make_stack([member], INPUTS, CLASSES, "cpu")
        own = train(alone, *data(), SCHEDULE)
        place = together.members.index(member)
        torch.testing.assert_close(own[:, 0], losses[:, place], rtol=1e-4, atol=1e-5)
        assert distance(alone.member(0), together.member(place)) < 5e-5
        width = member.pair.width
        assert not together.W[0][place, width:].any() and not together.V[place, width:].any()


def test_solves_are_those_of_the_library() -> None:
    u = data()[0][:6]
    member = Member(Pair("deq", 1), None, 3)
    stack = make_stack([member], INPUTS, CLASSES, "cpu")
    model = stack.member(0)
    assert isinstance(model, Equilibrium)
    x = stack.encode(u).detach() + stack.b[0].detach()
    for at, stop in ((None, Relative(TIGHT, norm="2")), (20.0, MeanRelative(LOOSE, WINDOW))):
        model.deq.stop = stop
        model.deq.noise = Noise(signal=at, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            expected = model.deq.equilibrium(u)
        draws = Draws([member], CPU, 128)
        noises = Noises([at], draws)

        def draw(done: Tensor | None, draws: Draws = draws) -> Tensor:
            return draws(range(1), len(u), [True])

        W = stack.W[0].detach()
        found = solve_plain(W, x) if at is None else solve_averaged(W, x, noises.amplitude, draw)
        torch.testing.assert_close(found.mean[0], expected.value, rtol=1e-4, atol=1e-5)
        assert torch.equal(found.steps[0].long(), expected.steps)


def test_a_program_that_looks_at_no_values_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "compiled", lambda function, static: function)
    generator = torch.Generator().manual_seed(0)
    W, x = torch.randn(3, 9, 9, generator=generator) / 4.5, torch.randn(3, 40, 9, generator=generator)
    amplitude = torch.tensor([0.0, 0.003, 0.02])[:, None, None].expand(3, 1, 9)
    noise = torch.randn(STEPS, 3, 40, 9, generator=generator)
    found, drawn = solve_at_once(W, x, amplitude, noise), iter(noise[:, 1:])
    quiet = solve_plain(W[:1], x[:1])
    noisy = solve_averaged(W[1:], x[1:], amplitude[1:], lambda done: next(drawn))
    for name in ("value", "mean", "steps"):
        expected = torch.cat([getattr(quiet, name), getattr(noisy, name)])
        torch.testing.assert_close(getattr(found, name), expected, rtol=1e-5, atol=2e-6)
    assert all(len(part.unique()) > 1 for part in (quiet.steps, noisy.steps))


def test_halves_change_solutions_by_less_than_they_are_solved_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "compiled", lambda function, static: function)
    generator = torch.Generator().manual_seed(0)
    W, x = torch.randn(3, 128, 128, generator=generator) / 16, torch.randn(3, 16, 128, generator=generator)
    amplitude = torch.tensor([0.0, 0.01, 0.05])[:, None, None].expand(3, 1, 128)
    noise, g = torch.randn(STEPS, 3, 16, 128, generator=generator), torch.randn(3, 16, 128, generator=generator)
    slope, growth, direction = (torch.rand(3, 16, 128, generator=generator) / scale for scale in (1, 9, 9))
    whole = solve_at_once(W, x, amplitude, noise)
    adjoint = solve_adjoint(g, W, slope, growth, direction, static=True)
    monkeypatch.setattr(solve, "_halved", lambda W: W.half())
    monkeypatch.setattr(solve, "_product", lambda z, W: z.float() @ W.float())
    half = solve_at_once(W, x, amplitude, noise)
    assert half.value.isfinite().all() and int((half.steps - whole.steps).abs().max()) <= 1
    same = half.steps == whole.steps
    errors = ((half.value - whole.value).norm(dim=-1) / whole.value.norm(dim=-1))[same]
    assert float(same.float().mean()) > 0.9 and float(errors.max()) < TIGHT
    halved = solve_adjoint(g, W, slope, growth, direction, static=True)
    assert float(((halved - adjoint).norm(dim=-1) / adjoint.norm(dim=-1)).max()) < 2 * TIGHT
    torch.testing.assert_close(solve_adjoint(g, 200 * W, slope, growth, direction, static=True), g)


@pytest.mark.parametrize("kind", ["deq", "ffw"])
def test_a_fixed_program_trains_as_the_others_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ensemble, solve):
        monkeypatch.setattr(module, "compiled", lambda function, static: function)
    noises = (None, 0.0)  # at which no solve is through before its last step
    members = [
        Member(Pair(kind, layers, inject=layers == 3 and kind == "ffw"), noise, 1, jacobian)  # type: ignore[arg-type]
        for layers, noise, jacobian in ((1, noises[0], 0.0), (3, noises[1], 0.5), (3, noises[0], 0.0))
    ]
    found = []
    for static in (False, True):
        stack = make_stack(members, INPUTS, CLASSES, "cpu")
        trainer = Trainer(stack, *data(), SCHEDULE)
        stack.static = static
        if kind == "ffw":  # the same draws, whichever way they are asked for
            drawn = iter(torch.randn(12, 3, 16, 128, generator=torch.Generator().manual_seed(0)))
            trainer.noises.draws = SimpleDraws(drawn, 3)  # type: ignore[assignment]
        for rows in torch.arange(64).reshape(4, 1, 16):
            trainer.step(rows.expand(3, 16))
        found.append([stack.member(place) for place in range(3)])
    for one, other in zip(*found, strict=True):
        assert distance(one, other) < 3e-5


class SimpleDraws:
    """Hands the same draws to a network of some layers, at once or one after another."""

    def __init__(self, drawn: Iterator[Tensor], layers: int) -> None:
        self.drawn, self.layers = drawn, layers

    def many(self, count: int, batch: int) -> Tensor:
        return torch.stack([next(self.drawn) for _ in range(count)])

    def __call__(self, members: range, batch: int, busy: list[bool]) -> Tensor:
        return next(self.drawn)[: len(members)]


def test_a_training_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVED", -1)
    members = [Member(Pair("deq", 1), noise, 0) for noise in (None, 0.0)]
    whole = make_stack(members, INPUTS, CLASSES, "cpu")
    losses = train(whole, *data(), dataclasses.replace(SCHEDULE, epochs=4))
    file, again = Checkpoint(tmp_path / "run.ckpt", "a"), make_stack(members, INPUTS, CLASSES, "cpu")

    def stop(text: str) -> None:
        if text.startswith("epoch 3"):
            raise KeyboardInterrupt

    schedule = dataclasses.replace(SCHEDULE, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        train(again, *data(), schedule, stop, file=file)
    again, told = make_stack(members, INPUTS, CLASSES, "cpu"), []
    resumed = train(again, *data(), schedule, told.append, file=file)
    assert [text.split(":")[0] for text in told] == ["epoch 3", "epoch 4"]
    torch.testing.assert_close(resumed, losses)
    assert max(distance(again.member(place), whole.member(place)) for place in range(2)) < 1e-6


def test_adjoint_solves_its_linear_equation_and_gives_up_where_there_is_no_contraction() -> None:
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(1, 7, 7, generator=generator) / 5
    slope, growth, direction, g = (torch.rand(1, 3, 7, generator=generator) / 2 for _ in range(4))
    found = solve_adjoint(g, W, slope, growth, direction)
    for row in range(3):
        inner = torch.diag(slope[0, row]) + torch.outer(direction[0, row], growth[0, row])
        expected = torch.linalg.solve(torch.eye(7) - W[0].mT @ inner, g[0, row])
        torch.testing.assert_close(found[0, row], expected, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(solve_adjoint(g, 20 * W, slope, growth, direction), g)


def test_gradient_is_that_of_the_mean_map() -> None:
    generator = torch.Generator().manual_seed(2)
    W = (torch.randn(1, 6, 6, generator=generator) / 6).requires_grad_()
    x, noise = torch.randn(1, 3, 6, generator=generator), torch.randn(4, 1, 3, 6, generator=generator)
    amplitude, weights = torch.full((1, 1, 1), 0.3), torch.randn(1, 3, 6, generator=generator)
    z = torch.zeros(1, 3, 6)
    for _ in range(80):  # unrolled
        s = torch.baddbmm(x, z, W.mT)
        z = torch.tanh(s + amplitude * s.norm(dim=-1, keepdim=True) * torch.cat([noise, -noise])).mean(0)
    (expected,) = torch.autograd.grad((weights * z).sum(), W)
    found = Found(z.detach(), torch.zeros(1, 3), z.detach())
    value = attach(W, x, found, amplitude, noise)
    (gradient,) = torch.autograd.grad((weights * value).sum(), W)
    torch.testing.assert_close(value, z)
    torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("pair", [Pair("deq", 1), Pair("ffw", 3), Pair("ffw", 3, inject=True)])
def test_penalty_is_the_mean_square_of_the_jacobian(pair: Pair) -> None:
    u = data()[0][:2]
    stack = make_stack([Member(pair, None, 0, jacobian=1.0)], INPUTS, CLASSES, "cpu")
    found = stack(u[None], Noises([None], Draws(stack.members, CPU, 128)), training=True)
    model, expected = stack.member(0), 0.0
    with torch.no_grad():
        steps = [(model.deq.cell, model.deq(u), u)] if isinstance(model, Equilibrium) else []
        if isinstance(model, FeedForward):
            x = z = model.encode(u)
            for layer in model.layers:
                steps.append((layer, z, x))
                z = layer(z, x)
    for function, z, given in steps:
        for row in range(len(u)):
            one = given[row : row + 1]
            J = torch.autograd.functional.jacobian(lambda z, f=function, v=one: f(z[None], v)[0], z[row])
            expected += float(J.square().sum()) / J.shape[0] / len(u)
    assert float(found.penalty[0].detach()) == pytest.approx(expected, rel=1e-3)


def test_scores_of_some_members_and_of_several_passes() -> None:
    u, labels = data()
    members = [Member(Pair("ffw", layers), None, layers) for layers in (1, 3, 5)]
    stack = make_stack(members, INPUTS, CLASSES, "cpu")
    train(stack, u, labels, dataclasses.replace(SCHEDULE, epochs=30, learning_rate=5e-3))
    whole, clean = score(stack, u, labels, 0.0), score(stack, u, labels, None)
    part = score(chosen(stack, [2, 0]), u, labels, 0.0)
    assert part.accuracy.tolist() == [whole.accuracy[0].item(), whole.accuracy[2].item()]
    assert whole.steps is None and whole.averaged is None
    many = score(stack, u, labels, 0.0, passes=40)
    assert (many.accuracy - clean.accuracy).abs().mean() < (whole.accuracy - clean.accuracy).abs().mean()


def test_strength_of_the_noise_is_a_ratio_of_powers() -> None:
    member = Member(Pair("ffw", 1), None, 0)
    noises = Noises([0.0], Draws([member], CPU, 128))
    s = torch.ones(1, 200, 128)
    added = noises.amplitude * s.norm(dim=-1, keepdim=True) * noises.draws(range(1), 200, [True])
    assert float(added.square().mean()) == pytest.approx(1.0, rel=0.03)
    weaker = Noises([10.0], noises.draws).amplitude
    torch.testing.assert_close(weaker, noises.amplitude / math.sqrt(10))


def test_states_that_are_filled_up_have_no_noise() -> None:
    members = [Member(Pair("deq", layers), 0.0, 0) for layers in (1, 3)]
    amplitude = Noises([0.0, 0.0], Draws(members, CPU, 240)).amplitude
    for member, row in zip(members, amplitude[:, 0], strict=True):
        assert int(row.count_nonzero()) == member.pair.width and bool(row[: member.pair.width].all())


def test_penalty_counts_every_layer_and_noise_reaches_both_kinds() -> None:
    u = torch.rand(6, 8, generator=torch.Generator().manual_seed(0))
    for pair in (Pair("ffw", 3), Pair("deq", 1)):
        model = pair.build(8, 4, 0)
        value = penalty(model, u)
        assert float(value) > 0 and value.requires_grad
        quiet, noisy = (under_noise(model, at, 0, training=False)(u) for at in (None, 0.0))
        assert not torch.allclose(quiet, noisy)
