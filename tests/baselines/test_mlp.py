"""The multilayer perceptron and its parameter count."""

import pytest
import torch
from torch import nn

from wellposed.baselines.mlp import MLP, parameter_count
from wellposed.errors import InputError, UnknownNameError


def test_it_is_the_usual_network():
    model = MLP([4, 6, 5, 2]).double()
    a, b, c = model.layers
    twin = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c)
    u = torch.randn(7, 4, dtype=torch.float64)
    assert torch.allclose(model(u), twin(u))
    assert model(u[None]).shape == (1, 7, 2)


@pytest.mark.parametrize(
    ("sizes", "bias", "count"),
    [([50, 10, 10, 1], True, 631), ([50, 20, 20, 1], True, 1461), ([50, 20, 20, 1], False, 1420)],
)
def test_parameter_counts(sizes, bias, count):
    assert parameter_count(MLP(sizes, bias=bias)) == count


def test_tied_and_frozen_parameters_are_counted_right():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    assert parameter_count(model) == 6


@pytest.mark.parametrize("bias", [True, False])
def test_homogeneous_without_bias_only(bias):
    model = MLP([4, 6, 6, 2], bias=bias).double()
    u = torch.randn(7, 4, dtype=torch.float64)
    assert torch.allclose(model(100 * u), 100 * model(u), rtol=1e-10) is not bias


def test_activation_by_name():
    u = torch.randn(3, 2)
    model = MLP([2, 3, 1], activation="tanh")
    assert torch.allclose(model(u), model.layers[1](torch.tanh(model.layers[0](u))))
    with pytest.raises(UnknownNameError, match="did you mean 'relu'"):
        MLP([2, 3, 1], activation="rleu")


@pytest.mark.parametrize("sizes", [[], [3], [3, 0], [3, 2.0]])
def test_wrong_sizes(sizes):
    with pytest.raises(InputError, match="at least two positive integers"):
        MLP(sizes)
