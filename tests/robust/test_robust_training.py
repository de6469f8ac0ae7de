"""Each robust loss lowers what it penalises, on digits, through the training loop."""

from functools import partial

import pytest
import torch
from attack_cases import digits, trained
from torch import nn

from wellposed import ImplicitModel
from wellposed.errors import IllPosedError, InputError
from wellposed.models import Ensemble
from wellposed.robust import (
    AdversarialLoss,
    Box,
    CertifiedLoss,
    Crown,
    Penalised,
    Ramp,
    augment_with_attacks,
    certified_accuracy,
    lipschitz,
    norm_gain,
    norm_penalty,
    sensitivity_penalty,
    worst_case_loss,
)
from wellposed.robust.attacks import lp_attack, pgd, ranked_attack
from wellposed.robust.bounds import margin_bounds
from wellposed.robust.query import to_form
from wellposed.robust.sensitivity import differentiable_form
from wellposed.robust.training import swept_margins
from wellposed.training import fit

ENTROPY = nn.functional.cross_entropy


@pytest.fixture(scope="module")
def plain():
    return {kind: trained(kind, epochs=15) for kind in ("implicit", "layers")}


def accuracy(model):
    u, y = digits("test", 300)
    with torch.no_grad():
        return float((model(u).argmax(1) == y).double().mean())


def network(kind, dtype=torch.float64):
    torch.manual_seed(0)
    if kind == "implicit":
        return ImplicitModel(5, 3, 7).to(dtype)
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)).to(
        dtype
    )


@pytest.mark.parametrize("kind", ["implicit", "layers"])
def test_live_form_computes_what_the_model_does(kind):
    model, u = network(kind), torch.rand(4, 5, dtype=torch.float64)
    assert torch.allclose(differentiable_form(model, (5,))(u), model(u), atol=1e-7)
    assert differentiable_form(model, (5,)).B.to_dense().requires_grad


def test_sensitivity_penalty_is_the_norm_of_the_sensitivity_matrix():
    model = network("implicit")
    form = differentiable_form(model)
    A, B, C, D = (getattr(form, name).to_dense().detach().abs() for name in "ABCD")
    S = C @ torch.linalg.inv(torch.eye(7, dtype=A.dtype) - A) @ B + D
    assert float(sensitivity_penalty(model).detach()) == pytest.approx(float(S.sum(1).max()))
    assert float(sensitivity_penalty(model).detach()) == pytest.approx(lipschitz(model), rel=1e-9)
    layers = network("layers")
    weights = [part.weight.detach().abs() for part in layers if isinstance(part, nn.Linear)]
    product = weights[2] @ weights[1] @ weights[0]
    assert float(sensitivity_penalty(layers, (5,)).detach()) == pytest.approx(float(product.sum(1).max()))


def test_penalties_are_ordered_and_follow_their_formulas():
    model = network("implicit")
    form = differentiable_form(model)
    A, B, C, D = (float(getattr(form, name).to_dense().detach().abs().sum(1).max()) for name in "ABCD")
    assert float(norm_gain(model).detach()) == pytest.approx(B * C / (1 - A) + D)
    assert float(norm_penalty(model).detach()) == pytest.approx((B**2 + C**2) / 2 / (1 - A) + D)
    assert sensitivity_penalty(model) <= norm_gain(model) <= norm_penalty(model)


@pytest.mark.parametrize("penalty", [norm_penalty, norm_gain, sensitivity_penalty])
def test_gradients_of_penalties(penalty):
    model = network("implicit")
    (slope,) = torch.autograd.grad(penalty(model), model.C)
    moved = []
    for sign in (1, -1):
        with torch.no_grad():
            model.C.add_(sign * 1e-6)
        moved.append(float(penalty(model).detach()))
        with torch.no_grad():
            model.C.sub_(sign * 1e-6)
    assert float(slope.sum()) == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-4)


@pytest.mark.parametrize("penalty", [norm_penalty, sensitivity_penalty])
def test_training_lowers_what_is_penalised(plain, penalty):
    make = lambda model: Penalised(ENTROPY, partial(penalty, model), 1e-2)  # noqa: E731
    model = trained("implicit", epochs=15, make=make)
    assert penalty(model) < 0.5 * penalty(plain["implicit"])
    assert lipschitz(model) < 0.6 * lipschitz(plain["implicit"])
    assert accuracy(model) > 0.8


def test_training_lowers_the_sensitivity_of_layers(plain):
    make = lambda model: Penalised(ENTROPY, partial(sensitivity_penalty, model, (64,)), 1e-2)  # noqa: E731
    model = trained("layers", epochs=15, make=make)
    assert lipschitz(model, input_shape=(64,)) < 0.5 * lipschitz(plain["layers"], input_shape=(64,))


@pytest.mark.parametrize(
    ("kind", "method"),
    [("implicit", "interval"), pytest.param("layers", "interval", marks=pytest.mark.slow), ("layers", "crown")],
)
def test_certified_loss_raises_certified_accuracy(plain, kind, method):
    u, y = digits("test", 100)
    box, ramp = Box.around(u, 0.1), Ramp(0.1, warmup=20, steps=40)
    model = trained(kind, epochs=15, make=lambda m: CertifiedLoss(m, ramp, method=method))
    assert certified_accuracy(model, box, y) > certified_accuracy(plain[kind], box, y) + 0.2
    before, after = (worst_case_loss(m, box, y, method=method).mean() for m in (plain[kind], model))
    assert after < 0.6 * before
    assert ramp.taken == 90 and accuracy(model) > 0.8


@pytest.mark.parametrize("kind", ["implicit", pytest.param("layers", marks=pytest.mark.slow)])
def test_adversarial_loss_raises_attacked_accuracy(plain, kind):
    u, y = digits("test", 200)
    model = trained(kind, epochs=15, make=lambda m: AdversarialLoss(m, Ramp(0.1, steps=10)))
    assert pgd(model, u, y, 0.1).accuracy > pgd(plain[kind], u, y, 0.1).accuracy + 0.2


def test_examples_added_back_are_learnt(plain):
    u, y = digits("train", 150)
    model = trained("layers")
    found = [lp_attack(model, u, y, 0.08, goals=1), ranked_attack(model, u, y, 1.0, 12, values="gradient")]
    inputs, classes = augment_with_attacks(u, y, *found)
    count = sum(int(one.success.sum()) for one in found)
    assert len(inputs) == 150 + count and count > 50
    wrong = (model(inputs[150:]).argmax(1) != classes[150:]).double().mean()
    fit(model, (inputs, classes), ENTROPY, epochs=15, progress=False)
    assert wrong == 1.0 and (model(inputs[150:]).argmax(1) != classes[150:]).double().mean() < 0.5


def test_evaluation_uses_the_last_radius_and_takes_no_step():
    model, ramp = network("layers", torch.float32), Ramp(0.1, warmup=5)
    loss = CertifiedLoss(model, ramp, share=1.0)
    u, y = torch.rand(6, 5), torch.randint(3, (6,))
    assert float(loss(model(u), y).detach()) == pytest.approx(float(ENTROPY(model(u), y).detach()))
    assert ramp.taken == 1
    model.eval()
    with torch.no_grad():
        assert loss(model(u), y) > ENTROPY(model(u), y) and ramp.taken == 1


def test_certified_loss_bounds_the_loss_on_attacked_inputs():
    model = network("layers", torch.float32)
    loss, u, y = CertifiedLoss(model, 0.1, share=1.0, method="crown"), torch.rand(6, 5), torch.randint(3, (6,))
    found = pgd(model, u, y, 0.1, loss="cross_entropy")
    worst = loss(model(u), y)
    assert worst >= ENTROPY(model(found.inputs), y) >= ENTROPY(model(u), y)


def test_attacks_do_not_change_what_is_remembered():
    model = network("implicit", torch.float32)
    loss, u, y = AdversarialLoss(model, 0.1, share=0.5), torch.rand(6, 5), torch.randint(3, (6,))
    predictions = model(u)
    assert torch.equal(loss(predictions, y), loss(predictions, y))
    assert model.training and torch.equal(loss.watch.batch(predictions), u)
    loss.watch.close()
    model(torch.zeros(6, 5))
    assert torch.equal(loss.watch.batch(predictions), u)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="share lies in"):
        AdversarialLoss(nn.Linear(2, 2), 0.1, share=2.0)
    with pytest.raises(InputError, match="finite radius"):
        Ramp(-0.1)
    with pytest.raises(InputError, match="did not see the inputs"):
        AdversarialLoss(nn.Linear(2, 2), 0.1)(torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(IllPosedError, match="sensitivity_penalty"):
        norm_penalty(
            nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2)).double(),
            (2,),
        )
    ensemble = Ensemble([nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2)])
    loss = CertifiedLoss(ensemble, 0.1, share=1.0, loss=lambda predictions, target: predictions.mean())
    with pytest.raises(InputError, match="Ensemble"):
        loss(ensemble(torch.rand(3, 2)), torch.zeros(3, dtype=torch.int64))


def test_convolutions_are_trained_with_bounds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    loss, u, y = CertifiedLoss(model, 0.1, share=1.0), torch.rand(6, 1, 4, 4) / 4, torch.arange(6) % 2
    u[1::2] += 0.75
    optimiser, losses = torch.optim.Adam(model.parameters(), 0.03), []
    for _ in range(60):
        losses.append(loss(model(u), y))
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert float(losses[-1]) < 0.7 * float(losses[0])


def rotating_model():
    """A monotone model of which no norm proves anything, on two classes of points."""
    torch.manual_seed(0)
    model = ImplicitModel(4, 2, 8, condition="monotone", kappa=0.5, bias=True, feedthrough=False)
    with torch.no_grad():
        skew = torch.randn(8, 8)
        for parameter in model.state.parameters():
            parameter.copy_(0.4 * torch.eye(8) + 0.6 * (skew - skew.mT))
    return model


def test_loops_without_a_norm_are_trained_by_continuation():
    model, u = rotating_model(), torch.rand(24, 4, generator=torch.Generator().manual_seed(1))
    target = (u[:, 0] > u[:, 1]).long()
    A = model.form().A.to_dense()
    assert float(A.abs().sum(1).max()) > 1 and float(torch.linalg.matrix_norm(A, 2)) > 1
    loss = CertifiedLoss(model, 0.05, method=Crown(rounds=1), share=1.0)
    bound = loss(model(u), target)
    attacked = pgd(model, u, target, 0.05, steps=10).inputs
    assert float(bound.detach()) >= float(nn.functional.cross_entropy(model(attacked), target).detach())
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(6):
        optimizer.zero_grad()
        value = loss(model(u), target)
        value.backward()
        optimizer.step()
    assert float(value.detach()) < 0.95 * float(bound.detach())


def test_part_of_a_batch_is_bounded_in_training_only():
    model, u = rotating_model(), torch.rand(6, 4)
    target = torch.zeros(6, dtype=torch.int64)
    whole, part = (CertifiedLoss(model, 0.05, method=Crown(rounds=0), share=1.0, samples=k) for k in (None, 2))
    first = CertifiedLoss(model, 0.05, method=Crown(rounds=0), share=1.0)
    bounded = float(part(model(u), target))
    assert bounded == pytest.approx(float(first(model(u[:2]), target[:2])), rel=1e-5)
    model.eval()
    assert float(part(model(u), target)) == pytest.approx(float(whole(model(u), target)), rel=1e-5)
    with pytest.raises(InputError, match="at least 1; received 0"):
        CertifiedLoss(model, 0.05, samples=0)


@pytest.mark.parametrize("kind", ["layers", "implicit"])
def test_sweeps_approach_the_intervals_from_within(kind):
    model, u, y = network(kind, torch.float64), torch.rand(6, 5, dtype=torch.float64), torch.arange(6) % 3
    form, box = to_form(model, (5,)), Box.around(u, 0.1, 0.0, 1.0)
    settled = margin_bounds(form, box, y, "interval").upper
    few, many = (swept_margins(form, box, y, sweeps) for sweeps in (2, 400))
    torch.testing.assert_close(many, settled, rtol=1e-4, atol=1e-6)  # where the method stops
    assert bool((few <= many + 1e-12).all())


@pytest.mark.parametrize("kind", ["layers", "implicit"])
def test_lines_over_the_intervals_are_those_of_crown(kind):
    model, u, y = network(kind, torch.float64), torch.rand(6, 5, dtype=torch.float64), torch.arange(6) % 3
    form, box = to_form(model, (5,)), Box.around(u, 0.1, 0.0, 1.0)
    intervals, half, lines = (swept_margins(form, box, y, 400, share) for share in (0.0, 0.5, 1.0))
    settled = margin_bounds(form, box, y, Crown(rounds=0, continuation=False)).upper
    torch.testing.assert_close(torch.minimum(lines, intervals), settled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(half, (intervals + lines) / 2)
    assert float((intervals - lines).detach().mean()) > 0.1 * float(intervals.detach().abs().mean())


def test_lines_are_of_sweeps_and_of_known_activations():
    model = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3))
    with pytest.raises(InputError, match="give their number, say sweeps=8"):
        CertifiedLoss(model, 0.1, lines=0.5)
    with pytest.raises(InputError, match=r"lines lies in \[0, 1\]; received 2"):
        CertifiedLoss(model, 0.1, sweeps=2, lines=2)
    with pytest.raises(InputError, match="no lines are known of 'gelu'; train with lines=0"):
        CertifiedLoss(model, 0.1, sweeps=2, lines=0.5)(model(torch.rand(2, 5)), torch.tensor([0, 1]))


@pytest.mark.parametrize("lines", [0.0, 1.0])
def test_sweeps_train_loops_without_a_norm(lines):
    model, u = rotating_model(), torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    target, box = (u[:, 0] > u[:, 1]).long(), Box.around(u, 0.05)
    before = certified_accuracy(model, box, target)
    loss = CertifiedLoss(model, Ramp(0.05, warmup=40, steps=40), sweeps=8, lines=lines)
    fit(model, (u, target), loss, epochs=120, batch_size=64, clip=8.0, progress=False,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.03))  # fmt: skip
    assert certified_accuracy(model, box, target) > before + 0.2


def test_the_other_term_may_be_that_of_attacked_inputs():
    model, u, y = network("implicit", torch.float32), torch.rand(6, 5), torch.arange(6) % 3
    corner = lambda model, u, target, radius: u + radius  # noqa: E731
    mixed = CertifiedLoss(model, 0.1, share=0.25, attack=corner, lower=None, upper=None)
    worst = worst_case_loss(model, Box(u - 0.1, u + 0.1), y, method="interval").mean()
    expected = 0.75 * ENTROPY(model(u + 0.1), y) + 0.25 * worst
    assert float(mixed(model(u), y).detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    with pytest.raises(InputError, match="sweeps must be at least 1"):
        CertifiedLoss(model, 0.1, sweeps=0)
