"""The feed-forward twin: structure, injection, tied weights, and access layer by layer."""

import pytest
import torch
from torch import nn
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.twins import FeedForward

from wellposed.equilibrium import Picard, Relative, fixed_point
from wellposed.errors import InputError


@pytest.mark.parametrize("depth", [1, 3, 13])
def test_parameter_counts(depth):
    hidden = 128 * 128 + 128
    ends = 784 * 128 + 128 + 128 * 10 + 10
    assert parameter_count(FeedForward(784, 10, depth=depth)) == ends + depth * hidden
    assert parameter_count(FeedForward(784, 10, depth=depth, tied=True)) == ends + hidden


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("projection", ["relu", "silu", "identity"])
def test_it_is_the_formula(inject, projection):
    model = FeedForward(4, 2, width=6, depth=3, projection=projection, inject=inject)
    u = torch.randn(7, 4)
    function = {"relu": torch.relu, "silu": nn.functional.silu, "identity": lambda z: z}[projection]
    x = z = function(model.projection(u))
    for layer in model.layers:
        z = torch.tanh(z @ layer.linear.weight.mT + layer.linear.bias + (x if inject else 0))
    assert torch.allclose(model(u), model.readout(z), atol=1e-6)


def test_noise_goes_between_the_layers():
    model, u = FeedForward(4, 2, width=6, depth=3, inject=True), torch.randn(7, 4)

    def run(noise):
        x = z = model.encode(u)
        for layer in model.layers:
            z = layer.activation(layer.signal(z, x) + noise)
        return model.readout(z)

    assert torch.allclose(run(0.0), model(u))
    assert not torch.allclose(run(0.1), model(u))


def test_tied_and_injected_it_unrolls_an_equilibrium_model():
    model = FeedForward(4, 2, width=6, depth=60, inject=True, tied=True).double()
    layer, u = model.layers[0], torch.randn(7, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.linear.weight.mul_(0.5 / torch.linalg.matrix_norm(layer.linear.weight, 2))
    x = model.encode(u)
    solution = fixed_point(layer, torch.zeros_like(x), x, solver=Picard(), stop=Relative(1e-13))
    assert torch.allclose(model(u), model.readout(solution.value), atol=1e-10)


@pytest.mark.parametrize("activation", ["tanh", "prelu"])
def test_tied_layers_share_every_parameter(activation):
    model = FeedForward(4, 2, width=6, depth=5, activation=activation, tied=True)
    assert len(model.layers) == 5
    for layer in model.layers[1:]:
        assert layer is not model.layers[0]
        pairs = zip(layer.parameters(), model.layers[0].parameters(), strict=True)
        assert all(mine is theirs for mine, theirs in pairs)
    first, second, *_ = FeedForward(4, 2, depth=5).layers
    assert first.linear.weight is not second.linear.weight


def test_wrong_depth():
    with pytest.raises(InputError, match="depth must be at least 1; received 0"):
        FeedForward(4, 2, depth=0)
