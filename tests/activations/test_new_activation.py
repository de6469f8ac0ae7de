"""One entry is all that a new activation needs."""

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed import robust
from wellposed.activations import Activation, Traits, get_activation, register_activation
from wellposed.activations.catalogue import ACTIVATIONS
from wellposed.convert import UnsupportedError
from wellposed.errors import UnknownNameError
from wellposed.models import Noise, Noisy
from wellposed.models.noise import nonlinearities


def bent(z):
    """Has the slopes 1/4, 1 and 1/2, with kinks at -1 and 2."""
    return 0.25 * z + 0.75 * torch.relu(z + 1) - 0.5 * torch.relu(z - 2) - 0.75


class Bent(nn.Module):
    def forward(self, z):
        return bent(z) if z.requires_grad or z.mean() < 1e9 else z  # a branch on values, which cannot be traced


@pytest.fixture
def entry():
    before = dict(ACTIVATIONS.factories)
    yield register_activation(Activation("bent", bent, (0.25, 1.0), traits=Traits((Bent,), kinks=(-1.0, 2.0))))
    ACTIVATIONS.factories.clear()
    ACTIVATIONS.factories.update(before)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), Bent(), nn.Linear(6, 5), Bent(), nn.Linear(5, 2)).double()


def inputs(count=50):
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1


def test_models_and_files_take_it(entry, tmp_path):
    model = wp.ImplicitModel(3, 2, 5, activation="bent").double()
    assert wp.ImplicitModel(3, 2, 5, activation=Bent()).activation is model.activation is entry
    solution = model.equilibrium(inputs())
    assert bool(solution.converged.all())
    z = solution.value @ model.A.T + inputs() @ model.B.T
    torch.testing.assert_close(solution.value, bent(z))
    wp.save(model, tmp_path / "model.safetensors")
    assert wp.load(tmp_path / "model.safetensors").activation is entry


def test_networks_with_it_are_converted(entry):
    form = wp.to_implicit(network(), (3,))
    assert [phi.name for phi in form.activations] == ["bent", "bent"]
    torch.testing.assert_close(form(inputs()), network()(inputs()))


@pytest.mark.parametrize("method", ["crown", "interval", "box"])
def test_bounds_hold_for_it(entry, method):
    form, center = wp.to_implicit(network(), (3,)), inputs(4)
    bounds = robust.output_bounds(form, wp.Box(center - 0.1, center + 0.1), method)
    for _ in range(100):
        y = form(center + 0.2 * torch.rand(4, 3, dtype=torch.float64) - 0.1)
        assert bool(((bounds.lower <= y) & (y <= bounds.upper)).all())
    if method == "crown":
        wide = robust.output_bounds(form, wp.Box(center - 0.1, center + 0.1), "interval")
        assert float((bounds.upper - bounds.lower).sum()) < 0.9 * float((wide.upper - wide.lower).sum())


def test_signal_noise_enters_before_it(entry):
    assert len(nonlinearities(network())) == 2
    noisy = Noisy(network(), Noise(signal=20.0))
    assert 1e-3 < float((noisy(inputs()) - network()(inputs())).detach().abs().mean()) < 1
    model = wp.ImplicitModel(3, 2, 5, activation="bent", on_failure="ignore").double()
    assert not torch.equal(Noisy(model, Noise(signal=20.0))(inputs()), model(inputs()))


def test_nothing_stays_behind():
    with pytest.raises(UnknownNameError, match="unknown activation 'bent'"):
        get_activation("bent")
    with pytest.raises(UnsupportedError):
        wp.to_implicit(network(), (3,))
