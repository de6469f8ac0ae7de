"""`to_implicit(..., detach=False)`: matrices as functions of the parameters."""

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed import to_implicit

DOUBLE = torch.float64


class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))

    def forward(self, u):
        return torch.tanh(u * self.weight + self.bias)


NETWORKS = {
    "dense": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), (4,)),
    "scale": (lambda: nn.Sequential(Scale(4), nn.Linear(4, 2)), (4,)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.PReLU(3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)
        ).eval(),
        (2, 6, 6),
    ),
    "one slope": (lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 2)), (4,)),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(3, 4, batch_first=True)), (5, 3)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), (3, 4)),
    "implicit": (lambda: nn.Sequential(nn.Linear(4, 3), wp.ImplicitModel(3, 2, 5, bias=True)), (4,)),
    "implicit, low rank": (lambda: wp.ImplicitModel(4, 2, 5, rank=2), (4,)),
    "implicit recurrent": (lambda: wp.ImplicitRNN(3, 2, 4, batch_first=True), (3, 3)),
}


def build(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = make().to(DOUBLE)
    return network, shape, torch.randn(4, *shape, dtype=DOUBLE)


def output(network, u):
    y = network(u)
    return (y[0] if isinstance(y, tuple) else y).flatten(1)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_the_network(name):
    network, shape, u = build(name)
    parameters = list(network.parameters())
    wanted = torch.autograd.grad(output(network, u).square().sum(), parameters, allow_unused=True)
    form = to_implicit(network, shape, detach=False)
    found = torch.autograd.grad(form(u).square().sum(), parameters, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        zero = torch.zeros((), dtype=DOUBLE)
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_detached_form_is_a_copy(name):
    network, shape, u = build(name)
    form = to_implicit(network, shape)
    before = form(u)
    assert not before.requires_grad
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    assert torch.equal(form(u), before)


def test_no_gradients_are_recorded_where_none_are_wanted():
    network, shape, u = build("dense")
    with torch.no_grad():
        form = to_implicit(network, shape, detach=False)
    assert not form(u).requires_grad


def test_a_model_gives_its_form_with_gradients():
    model = wp.ImplicitModel(3, 2, 5, bias=True)
    form = model.form(detach=False)
    assert form(torch.ones(1, 3)).requires_grad and not model.form()(torch.ones(1, 3)).requires_grad
    torch.autograd.grad(form(torch.ones(1, 3)).sum(), list(model.parameters()))
