"""TRADES, plain steps along signs, averages over random answers, and attacks through other gradients."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from wellposed.equilibrium import Gradient, Implicit, Phantom, Polished, RandomThreshold, Unrolled
from wellposed.errors import InputError
from wellposed.models import DEQ, DenseCell, Noise
from wellposed.robust import AdversarialLoss, Ramp, SignSteps, TradesLoss
from wellposed.robust.attacks import adaptive_attack, pgd, survival, through
from wellposed.robust.attacks.attack import Loss, Victim
from wellposed.robust.training import climbed, divergence


class Shaky(nn.Module):
    """Adds noise to the weights of a linear map, drawn from a generator that can be set back."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).double())
        self.generator = torch.Generator()
        self.begin()

    def begin(self) -> None:
        self.generator.manual_seed(7)

    def forward(self, u: Tensor) -> Tensor:
        noise = torch.randn(self.weight.shape, generator=self.generator, dtype=torch.float64)
        return torch.tanh(u @ (self.weight + noise).mT)


def batch(size: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(size, 5, generator=generator, dtype=torch.float64)
    return u, torch.randint(0, 3, (size,), generator=generator)


def equilibrium(gradient: Gradient | None = None, **options: object) -> nn.Module:
    torch.manual_seed(0)
    deq = DEQ(DenseCell(5, 8), solver="picard", gradient=gradient, on_failure="ignore", **options)  # type: ignore[arg-type]
    return nn.Sequential(deq, nn.Linear(8, 3)).double()


@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
def test_the_averaged_gradient_is_the_mean_of_the_gradients(loss: str) -> None:
    model, (u, target), draws = Shaky(), batch(), 5
    victim = Victim(model, u, target, draws)
    model.begin()
    outputs, slope = victim.gradient(u, Loss(loss))
    model.begin()
    parts, slopes = [], []
    for _ in range(draws):
        moving = u.clone().requires_grad_()
        found = model(moving)
        if loss == "cross_entropy":
            raised = -found.log_softmax(1)[torch.arange(6), target]
        else:
            best = torch.stack(
                [max(row[i] for i in range(3) if i != y) for row, y in zip(found, target, strict=True)]
            )
            raised = best - found[torch.arange(6), target]
        raised.sum().backward()
        parts.append(found.detach())
        slopes.append(cast(Tensor, moving.grad))
    torch.testing.assert_close(slope, sum(slopes) / draws)
    torch.testing.assert_close(outputs, sum(parts) / draws)
    assert victim.queries.tolist() == [2 * draws] * 6  # the clean inputs were asked about as well


def test_averaging_attacks_a_random_model_better_than_one_draw() -> None:
    class Jitter(nn.Module):
        """A linear map whose gradient is drowned by noise of mean zero."""

        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, u: Tensor) -> Tensor:
            slope = 0.02 + torch.randn(u.shape, generator=self.generator, dtype=u.dtype)
            return torch.stack([torch.zeros(len(u), dtype=u.dtype), (slope * (u - 0.5)).mean(1) - 0.004], 1)

    u, target = torch.full((20, 30), 0.5, dtype=torch.float64), torch.zeros(20, dtype=torch.int64)
    ends = [pgd(Jitter(), u, target, 0.5, steps=10, restarts=0, draws=draws).inputs for draws in (1, 200)]
    raised = [float((points - 0.5).mean()) for points in ends]  # the slope of the mean is 0.02 everywhere
    assert raised[1] > raised[0] + 0.05 and raised[1] > 0.1


def test_survival_counts_answers() -> None:
    model, (u, target) = Shaky(), batch(4)
    model.begin()
    share = survival(model, u, target, draws=10)
    model.begin()
    with torch.no_grad():
        right = [(model(u).argmax(1) == target).float() for _ in range(10)]
    assert torch.equal(share, torch.stack(right).mean(0)) and not set(share.tolist()) <= {0.0, 1.0}
    with pytest.raises(InputError, match="received 0"):
        survival(model, u, target, draws=0)
    with pytest.raises(InputError, match="received 0"):
        pgd(model, u, target, 0.1, draws=0)


def test_divergence_has_its_closed_form() -> None:
    p, q = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]), torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    oracle = sum(a * torch.log(a / b) for a, b in zip(p.flatten(), q.flatten(), strict=True)) / 2
    torch.testing.assert_close(divergence(p.log() + 3, q.log() - 1), oracle)
    assert float(divergence(p.log(), p.log())) == pytest.approx(0, abs=1e-7)


def test_trades_is_the_formula_at_the_point_it_finds() -> None:
    (u, target), model = batch(), nn.Linear(5, 3).double()
    u = 0.3 + 0.4 * u
    loss = TradesLoss(model, 0.1, weight=6.0, steps=4, generator=torch.Generator().manual_seed(0))
    ours = loss(model(u), target)
    generator = torch.Generator().manual_seed(0)
    points = u + 1e-3 * torch.randn(u.shape, generator=generator, dtype=torch.float64)
    p = model(u).softmax(1)
    for _ in range(4):
        points = points.detach().requires_grad_()
        (p.detach() * (p.detach().log() - model(points).log_softmax(1))).sum().backward()
        moved = points.detach() + 0.1 / 3 * cast(Tensor, points.grad).sign()
        points = torch.maximum(torch.minimum(moved, u + 0.1), u - 0.1)
    q = model(points.detach()).softmax(1)
    entropy = -p[torch.arange(6), target].log().mean()
    oracle = entropy + 6 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(ours, oracle)
    mine, other = torch.autograd.grad(ours, model.weight)[0], torch.autograd.grad(oracle, model.weight)[0]
    torch.testing.assert_close(mine, other)


def test_losses_follow_their_ramp_and_check_their_settings() -> None:
    (u, target), model = batch(), nn.Linear(5, 3).double()
    loss = TradesLoss(model, Ramp(0.1, warmup=1))
    clean = nn.functional.cross_entropy(model(u), target)
    assert torch.equal(loss(model(u), target), clean) and loss(model(u), target) > clean
    for make in (lambda: TradesLoss(model, 0.1, weight=-1.0), lambda: TradesLoss(model, 0.1, steps=0),
                 lambda: SignSteps(-1), lambda: SignSteps(1, 0.0)):  # fmt: skip
        with pytest.raises(InputError, match="received"):
            make()


def test_plain_steps_are_those_of_the_loop_written_out() -> None:
    (u, target), model = batch(), nn.Linear(5, 3).double()
    attack = SignSteps(5, 0.02, generator=torch.Generator().manual_seed(3))
    ours = attack(model, u, target, 0.07)
    lower, upper = (u - 0.07).clamp(0, 1), (u + 0.07).clamp(0, 1)
    draw = torch.rand(u.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    points = lower + draw * (upper - lower)
    for _ in range(5):
        points = points.detach().requires_grad_()
        nn.functional.cross_entropy(model(points), target).backward()
        points = torch.maximum(torch.minimum(points + 0.02 * cast(Tensor, points.grad).sign(), upper), lower)
    torch.testing.assert_close(ours, points.detach())
    assert torch.equal(climbed(lambda points: points.sum(), u, cast("object", None), 0, 1.0), u)  # type: ignore[arg-type]


def test_adversarial_loss_takes_inputs_or_attacks() -> None:
    (u, target), model = batch(), nn.Linear(5, 3).double()
    loss = AdversarialLoss(model, 0.2, attack=lambda *_: torch.zeros_like(u))
    torch.testing.assert_close(loss(model(u), target), nn.functional.cross_entropy(model(u * 0), target))


def test_through_lends_a_gradient_and_takes_it_back() -> None:
    model = equilibrium(Phantom(1))
    deq = cast(nn.Sequential, model)[0]
    with through(model, Unrolled()):
        assert isinstance(deq.gradient, Unrolled)

    def failing() -> None:
        with through(model, Unrolled()):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert isinstance(deq.gradient, Phantom)


def test_an_exact_gradient_breaks_what_a_blind_one_leaves() -> None:
    """A cell whose last step sees nothing of the input: steps from a constant have no gradient at all."""

    class Delayed(nn.Module):
        def forward(self, x: Tensor, u: Tensor) -> Tensor:
            first, rest = u, x[:, :1]  # the second state repeats what the first was a step before
            return torch.cat([first, rest], 1)

    class Readout(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.zeros_like(x[:, 1:]), x[:, 1:] - 0.5], 1)

    deq = DEQ(Delayed(), state_shape=(2,), solver="picard", gradient=Polished(1, 1.0))
    model, u = nn.Sequential(deq, Readout()), torch.tensor([[0.45], [0.3]])
    target = torch.tensor([0, 0])
    blind = pgd(model, u, target, 0.1, restarts=0)
    assert not blind.success.any() and "zero gradient" in blind.notes[0]
    for gradient in (None, Polished(1, 1.0, Implicit()), Polished(1, 1.0, Unrolled())):
        found = adaptive_attack(model, u, target, 0.1, gradient=gradient, draws=1)
        assert found.success.tolist() == [True, False]
        assert isinstance(deq.gradient, Polished) and deq.gradient.solved is None


def test_defences_stay_in_place_under_attack() -> None:
    stop = RandomThreshold(1, 8, generator=torch.Generator().manual_seed(0))
    noise = Noise(input=10.0, generator=torch.Generator().manual_seed(0))
    model, (u, target) = equilibrium(Polished(), stop=stop, noise=noise), batch(8)
    found = adaptive_attack(model, u, target, 0.2, steps=3, draws=3)
    assert ((found.inputs - u).abs() <= 0.2 + 1e-12).all() and found.name == "adaptive"
    assert (found.queries >= 3 * 3).all()
    share = survival(model, found.inputs, target, draws=20)
    assert ((share >= 0) & (share <= 1)).all()
