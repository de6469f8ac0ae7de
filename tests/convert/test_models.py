"""This library's own models and networks."""

import pytest
import torch
from torch import nn
from wellposed_lab.networks.mlp import MLP, MLP_ACTIVATIONS
from wellposed_lab.networks.nalu import NAC, NALU
from wellposed_lab.networks.twins import ConvNet

from wellposed.convert import UnsupportedError, to_implicit
from wellposed.equilibrium.stopping import Relative
from wellposed.models import ImplicitModel


def assert_same(network, shape, tolerance=1e-9):
    network = network.double().eval()
    u = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    form = to_implicit(network, shape)
    expected = network(u).detach().reshape(4, -1)
    torch.testing.assert_close(form(u), expected, rtol=tolerance, atol=tolerance)
    return form


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "activation": "tanh"}, {"rank": 2}, {"feedthrough": False}, {"triangular": True}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_implicit_model(options, shape):
    torch.manual_seed(0)
    model = ImplicitModel(4, 3, 6, stop=Relative(1e-11), **options)
    for parameter in (model.bias, model.D):
        if parameter is not None:
            nn.init.normal_(parameter)
    form = assert_same(nn.Sequential(nn.Linear(4, 4), model), shape, 1e-7)
    loops = [key for key in form.A.parts if key[0] == key[1]]
    assert len(loops) == 1 and form.certificate().holds


@pytest.mark.parametrize("activation", [name for name in MLP_ACTIVATIONS if name != "hardshrink"])
def test_perceptrons_with_every_activation_of_the_papers(activation):
    torch.manual_seed(0)
    network = MLP([4, 7, 6, 2], activation)
    for name, parameter in network.named_parameters():
        if name.endswith("slope"):
            nn.init.uniform_(parameter, -0.5, 1.5)
    assert_same(network, (4,))


def test_jumping_activation_is_refused():
    with pytest.raises(UnsupportedError, match=r"Hardshrink at 'activations.0'.*jumps"):
        to_implicit(MLP([4, 7, 2], "hardshrink"), (4,))


def test_other_baselines():
    assert_same(NAC([4, 3, 2]), (4,))
    assert_same(ConvNet(1, channels=32, final_channels=None, grid=4, batch_norm=False), (1, 8, 8))
    with pytest.raises(UnsupportedError, match=r"log at 'layers.0' has no implicit form yet"):
        to_implicit(NALU([4, 3, 2]), (4,))
