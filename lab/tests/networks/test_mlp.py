"""The multilayer perceptron and its parameter count."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from wellposed_lab.networks.mlp import MLP, MLP_ACTIVATIONS, PReLU, parameter_count

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


TORCH = {  # the papers' names, as torch itself has them
    "hardtanh": F.hardtanh,
    "sigmoid": torch.sigmoid,
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "leaky_relu": F.leaky_relu,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "relu": torch.relu,
    "prelu": nn.PReLU(),
    "multiprelu": nn.PReLU(6),
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "logsigmoid": F.logsigmoid,
}


def test_the_activations_are_those_of_the_paper():
    assert len(MLP_ACTIVATIONS) == 16
    assert set(MLP_ACTIVATIONS) == set(TORCH)


@pytest.mark.parametrize("name", MLP_ACTIVATIONS)
def test_every_activation_is_that_of_torch(name):
    model, u = MLP([4, 6, 2], activation=name), torch.randn(7, 4)
    first, last = model.layers
    assert torch.allclose(model(u), last(TORCH[name](first(u))), atol=1e-6)


@pytest.mark.parametrize(("name", "slopes"), [("prelu", 2), ("multiprelu", 6 + 5), ("relu", 0)])
def test_learnable_slopes_are_counted_for_every_layer(name, slopes):
    sizes = [4, 6, 5, 2]
    assert parameter_count(MLP(sizes, name)) == parameter_count(MLP(sizes)) + slopes


def test_slopes_act_along_the_last_dimension():
    activation = PReLU(3)
    with torch.no_grad():
        activation.slope.copy_(torch.tensor([0.0, 1.0, -2.0]))
    assert activation(-torch.ones(2, 5, 3))[1, 4].tolist() == [0.0, -1.0, 2.0]
    assert activation(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


def test_names_beyond_the_registered_ones_are_suggested_too():
    with pytest.raises(UnknownNameError, match="did you mean 'multiprelu'"):
        MLP([2, 3, 1], activation="multipreul")
    with pytest.raises(UnknownNameError, match="did you mean 'prelu'"):
        MLP([2, 1], activation="preul")  # also where no layer uses it
    with pytest.raises(InputError, match="refused"):
        MLP([2, 3, 1], activation="sign")


def test_skip_adds_a_linear_map():
    model, u = MLP([4, 6, 2], skip=True), torch.randn(7, 4)
    with torch.no_grad():
        model.layers[-1].weight.zero_()
    assert torch.allclose(model(u), model.layers[-1].bias + u @ model.skip.weight.mT)
    assert parameter_count(model) == parameter_count(MLP([4, 6, 2])) + 8
