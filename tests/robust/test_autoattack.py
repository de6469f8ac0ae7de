"""AutoAttack by its authors' package: runs on our models, stays in the set, says what it doubts."""

import logging
import sys

import pytest
import torch
from attack_cases import digits, trained
from torch import nn

from wellposed.errors import InputError, UnknownNameError
from wellposed.robust import Ball, Box, certified
from wellposed.robust.attacks import autoattack, fgsm, pgd

QUICK = {"steps": 10, "square_queries": 40}


@pytest.fixture(scope="module")
def model():
    return trained("implicit")


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_attacks_an_implicit_model_within_its_set(model, norm):
    u, y = digits("test", 12)
    epsilon = 0.1 if norm == "inf" else 0.6
    found = autoattack(model, u, y, epsilon, norm=norm, **QUICK)
    inputs = Box.around(u, epsilon) if norm == "inf" else Ball(u, epsilon)
    change = (found.inputs - u).double()
    length = change.abs().amax(1) if norm == "inf" else torch.linalg.vector_norm(change, dim=1)
    assert (length <= epsilon * (1 + 1e-6)).all()
    assert found.inputs.min() >= 0 and found.inputs.max() <= 1
    assert not (found.success & certified(model, inputs, y)).any()
    assert found.accuracy <= fgsm(model, u, y, epsilon, norm=norm).accuracy
    assert any("reduced" in note for note in found.notes)
    with torch.no_grad():
        assert torch.equal(found.success, model(found.inputs).argmax(1) != y)


def test_random_outputs_are_noticed_and_rand_attacks_them():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, u):
            return self.inner(u) + torch.randn(len(u), 4)

    torch.manual_seed(0)
    model, u = Noisy(), torch.rand(6, 16)
    y = model.inner(u).argmax(1)
    standard = autoattack(model, u, y, 0.05, attacks=["apgd-ce"], **QUICK)
    assert any("randomized" in note for note in standard.notes)
    rand = autoattack(model, u, y, 0.05, version="rand", **QUICK)
    assert not any("randomized" in note for note in rand.notes)
    assert rand.name == "autoattack rand"


def test_masked_gradients_are_noticed():
    """A model that rounds has no gradients; Square Attack needs none and goes further."""

    class Rounded(nn.Module):
        def forward(self, u):
            coarse = (16 * u).round() / 16
            return torch.stack([coarse[:, k::4].mean(1) for k in range(4)], dim=1) * 20

    torch.manual_seed(0)
    u = 0.4 + 0.2 * torch.rand(20, 16)
    y = Rounded()(u).argmax(1)
    found = autoattack(
        Rounded(), u, y, 0.15, attacks=["apgd-ce", "apgd-dlr", "square"], steps=5, square_queries=200
    )
    text = " ".join(found.notes)
    assert "zero gradient" in text and "Square Attack has decreased" in text
    assert found.success.any()


def test_gradients_in_the_forward_pass_are_noticed_of_that_model_alone():
    class Purified(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, u):
            with torch.enable_grad():
                moving = u.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.inner(moving).square().sum(), moving)
            return self.inner(u - 0.001 * slope)

    model, u = Purified(), torch.rand(4, 16)
    y = model(u).argmax(1)
    dynamic, plain = (autoattack(m, u, y, 0.01, attacks=["apgd-ce"], **QUICK) for m in (model, model.inner))
    assert any("dynamic defense" in note for note in dynamic.notes)
    assert not any("dynamic defense" in note for note in plain.notes)


def test_probabilities_are_noticed():
    model = nn.Sequential(nn.Linear(16, 5), nn.Softmax(1))
    found = autoattack(
        model, torch.rand(4, 16), torch.zeros(4, dtype=torch.int64), 0.01, attacks=["apgd-ce"], **QUICK
    )
    assert any("probability distribution" in note for note in found.notes)


@pytest.mark.parametrize(("classes", "shape"), [(2, (7,)), (3, (1, 6, 6)), (5, (3, 4, 9))])
def test_few_classes_and_odd_shapes(classes, shape):
    torch.manual_seed(0)
    p = torch.Size(shape).numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(p, classes)).double()
    u = torch.rand(4, *shape, dtype=torch.float64)
    y = model(u).argmax(1)
    found = autoattack(model, u, y, 0.3, **QUICK)
    assert found.inputs.shape == u.shape and found.inputs.dtype == u.dtype
    assert found.success.any()
    text = " ".join(found.notes)
    assert ("too few for the DLR" in text) == (classes < 4)
    assert "more target classes" not in text and "DLR loss!" not in text


def test_logging_trace_and_random_state_stay_as_they_were(monkeypatch):
    logger, model, u = logging.getLogger("auto-attack"), nn.Linear(9, 4), torch.rand(2, 9)
    monkeypatch.setattr(logger, "propagate", True)
    outer = sys.gettrace()
    sys.settrace(lambda *_: None)
    before, state = (logger.handlers[:], logger.propagate, sys.gettrace()), torch.get_rng_state()
    one, two = (autoattack(model, u, torch.tensor([0, 1]), 0.1, **QUICK) for _ in range(2))
    after = logger.handlers, logger.propagate, sys.gettrace()
    sys.settrace(outer)
    assert after == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.inputs, two.inputs)


def test_bad_input_is_refused():
    model, u, y = nn.Linear(9, 4), torch.rand(2, 9), torch.tensor([0, 1])
    with pytest.raises(UnknownNameError, match="unknown version"):
        autoattack(model, u, y, 0.1, version="plus+")
    with pytest.raises(UnknownNameError, match="unknown attack 'magic'"):
        autoattack(model, u, y, 0.1, attacks=["magic"])
    with pytest.raises(InputError, match="classes are 0 to 3"):
        autoattack(model, u, y + 5, 0.1)
    with pytest.raises(InputError, match="not negative"):
        autoattack(model, u, y, -0.1)
    with pytest.raises(InputError, match="one epsilon"):
        autoattack(model, u, y, torch.full((9,), 0.1))


@pytest.mark.slow
def test_full_standard_version_is_no_weaker_than_pgd(model):
    u, y = digits("test", 60)
    full = autoattack(model, u, y, 0.08)
    assert full.accuracy <= pgd(model, u, y, 0.08, restarts=3).accuracy
    assert full.notes == ()
