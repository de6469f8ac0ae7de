"""Ensembles that are trained by one Triton program a member, as by the torch program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from wellposed_lab.experiments.noise import ensemble, training
from wellposed_lab.experiments.noise.ensemble import Member, Stack, make_stack
from wellposed_lab.experiments.noise.models import STEPS, Pair
from wellposed_lab.experiments.noise.training import NoiseSchedule, Trainer

from wellposed.training.checkpoint import Checkpoint

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
INPUTS, CLASSES, UPDATES, RATE = 12, 4, 2, 1e-3
DRAWN = [*range(STEPS), *range(STEPS + 1, STEPS + 1 + ensemble.DRAWS), STEPS]  # the torch program's order


def fused():
    return pytest.importorskip("wellposed_lab.experiments.noise.fused")


def trained(members: list[Member], seeds: int) -> tuple[Stack, Stack, object]:
    """Returns the ensemble as the torch program and as the kernels leave it, and the trainer of the latter."""
    generator = torch.Generator().manual_seed(0)
    u, labels = torch.rand(64, INPUTS, generator=generator), torch.randint(0, CLASSES, (64,), generator=generator)
    u, labels = u.to(DEVICE), labels.to(DEVICE)
    orders = torch.randint(0, 64, (seeds, UPDATES, 16), generator=generator)
    stack = make_stack(members, INPUTS, CLASSES, DEVICE)
    kernels = fused().FusedTrainer(stack, u, labels, orders, RATE, tf32="ieee")
    for _ in range(UPDATES):
        kernels.advance(1)
    kernels.give_back()
    plain = make_stack(members, INPUTS, CLASSES, DEVICE)
    trainer = Trainer(plain, u, labels, NoiseSchedule(64, 1, 16, RATE))
    plain.static = False
    places = torch.tensor([member.seed for member in plain.members])
    for update in range(UPDATES):
        trainer._step(orders[places, update].to(DEVICE))
    torch.testing.assert_close(kernels.losses.cpu(), trainer.losses.cpu(), rtol=1e-4, atol=1e-5)
    return plain, stack, kernels


def assert_close(plain: Stack, stack: Stack) -> None:
    began = make_stack(stack.members, INPUTS, CLASSES, DEVICE)
    for one, other, before in zip(plain.parameters(), stack.parameters(), began.parameters(), strict=True):
        assert float((one - before).detach().abs().max()) > 1e-3
        # Adam turns rounding into steps of either sign where a gradient is nearly zero
        assert float(((one - other).detach().abs() > 3e-5).double().mean()) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "members",
    [
        [Member(Pair("deq", 1), None, 0)],
        [Member(Pair("ffw", layers, inject=inject), None, 1) for layers, inject in ((3, True), (1, False))]
        + [Member(Pair("ffw", 1), None, 0)],
    ],
    ids=["equilibrium", "feed-forward"],
)
def test_members_are_trained_as_by_the_torch_program(members: list[Member]) -> None:
    plain, stack, _ = trained(members, 2)
    assert_close(plain, stack)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [Pair("deq", 1), Pair("ffw", 3)], ids=["equilibrium", "feed-forward"])
def test_noise_acts_as_in_the_torch_program(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    order = DRAWN if pair.kind == "deq" else range(pair.layers)
    drawn = iter([(update, index) for update in range(UPDATES) for index in order])

    def draw(self: object, members: range, batch: int, busy: object) -> Tensor:
        return normal(*next(drawn))[None]

    monkeypatch.setattr(ensemble.Draws, "__call__", draw)
    plain, stack, kernels = trained([Member(pair, 0.0, 0)], 1)
    assert_close(plain, stack)
    assert next(drawn, None) is None
    if pair.kind == "deq":
        assert kernels.counts[0, 0] == UPDATES * STEPS  # type: ignore[attr-defined]


def normal(update: int, index: int) -> Tensor:  # (16, 128)
    """Returns what the kernels draw for member 0."""
    numbers = torch.empty(16, 128, device=DEVICE)
    fused().store_normal[(1,)](numbers, update, index, N=128)
    return numbers


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [None, 0.0])
def test_an_adjoint_that_overflows_float16_leaves_finite_weights(noise: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    u, labels = torch.rand(64, INPUTS, generator=generator), torch.randint(0, CLASSES, (64,), generator=generator)
    stack = make_stack([Member(Pair("deq", 1), noise, 0)], INPUTS, CLASSES, DEVICE)
    with torch.no_grad():
        stack.W[0].mul_(20.0)  # far from a contraction
    orders = torch.randint(0, 64, (1, 1, 16), generator=generator)
    trainer = fused().FusedTrainer(stack, u.to(DEVICE), labels.to(DEVICE), orders, RATE)
    trainer.advance(1)
    assert int(trainer.counts[0, 3]) > 0  # samples whose adjoint did not settle
    assert bool(trainer.weights.isfinite().all()) and bool(trainer.losses.isfinite().all())


@pytest.mark.gpu
def test_draws_are_normal_and_differ() -> None:
    numbers = torch.stack([normal(update, index) for update in range(8) for index in range(4)])
    assert abs(float(numbers.mean())) < 0.02 and abs(float(numbers.std()) - 1) < 0.02
    assert abs(float(numbers.pow(4).mean()) - 3) < 0.2
    correlations = torch.corrcoef(numbers.flatten(1)).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 0.12


@pytest.mark.gpu
def test_a_stopped_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    u, labels = torch.rand(32, INPUTS, device=DEVICE), torch.zeros(32, dtype=torch.int64, device=DEVICE)
    schedule, file = NoiseSchedule(32, 2, 16, RATE), Checkpoint(tmp_path / "run.ckpt")
    monkeypatch.setattr(training, "SAVED", 0)

    def train(tell: training.Progress, file: Checkpoint | None = None) -> tuple[Stack, Tensor]:
        stack = make_stack([Member(Pair("ffw", 1), 10.0, 0)], INPUTS, CLASSES, DEVICE)
        own = training.orders([0], len(u), schedule)
        return stack, training._train_fused(stack, u, labels, schedule, tell, own, file)

    def stop(text: str) -> None:
        if text.startswith("epoch 2"):
            raise KeyboardInterrupt

    whole, losses = train(lambda text: None)
    with pytest.raises(KeyboardInterrupt):
        train(stop, file)
    told: list[str] = []
    resumed, same = train(told.append, file)
    assert [text[:7] for text in told] == ["epoch 2"] and torch.equal(losses, same)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.gpu
def test_a_lost_member_is_no_diverged_seed() -> None:
    u, labels = torch.rand(32, INPUTS, device=DEVICE), torch.zeros(32, dtype=torch.int64, device=DEVICE)
    stack = make_stack([Member(Pair("ffw", 1), None, seed) for seed in (0, 1)], INPUTS, CLASSES, DEVICE)
    with torch.no_grad():
        stack.e[1] = torch.nan
    schedule = NoiseSchedule(32, 1, 16, RATE)
    own = training.orders([member.seed for member in stack.members], len(u), schedule)
    with pytest.raises(RuntimeError, match=r"lost 1 of 2 members in epoch 1.*exact=True"):
        training._train_fused(stack, u, labels, schedule, lambda text: None, own, None)


def test_the_kernels_in_the_interpreter() -> None:
    # Triton looks at the variable when it is imported, and other tests may have done that.
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        __file__,
    ]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "9 passed" in run.stdout, run.stdout[-4000:] + run.stderr[-1000:]
