"""Derivatives in forward mode agree with those in reverse mode."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp

from wellposed import DEQ, Absolute, ImplicitModel, ImplicitRNN
from wellposed.errors import SecondDerivativeError
from wellposed.models import TransformerCell


class Cell(nn.Module):
    """``tanh(Ax + Bu)`` with the matrices of a model."""

    def __init__(self, model):
        super().__init__()
        self.A, self.B = (nn.Parameter(matrix.detach().clone()) for matrix in (model.A, model.B))

    def forward(self, x, u):
        return torch.tanh(x @ self.A.mT + u @ self.B.mT)


class Outputs(nn.Module):
    """The outputs of a recurrent network, without its last hidden states."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, u):
        return self.rnn(u)[0]


def deq(**options):
    return DEQ(Cell(ImplicitModel(3, 2, 4, activation="tanh")), state_shape=4, **{"max_steps": 60, **options})


def implicit(**options):
    return ImplicitModel(3, 2, 4, **{"activation": "tanh", **options})


def rnn(**options):
    return Outputs(ImplicitRNN(3, 2, 4, activation="tanh", batch_first=True, **options))


MODELS = {
    "relu": lambda: implicit(activation="relu", bias=True),
    "low rank": lambda: implicit(rank=2),
    "reference": lambda: implicit(executor="reference"),
    "spectral": lambda: implicit(condition="spectral"),
    "triangular": lambda: implicit(triangular=True),
    "blocks": lambda: implicit(activation="softmax", condition="block", max_steps=60),
    "phantom": lambda: implicit(gradient="phantom", max_steps=60),
    "rnn": rnn,
    "two-way rnn": lambda: rnn(num_layers=2, bidirectional=True, executor="reference"),
    "deq": deq,
    "newton": lambda: deq(solver="newton", max_steps=12),
}
HIDDEN = {"mu": "tanh", "monotone": "relu"}  # conditions that look at the values of A, as torch.func does not let


def made(build):
    torch.manual_seed(0)
    model = build().double()
    u = torch.randn((2, 3, 3) if isinstance(model, Outputs) else (3, 3), dtype=torch.float64)
    return model, u


def along(function, values, tangents):
    """The derivative along tangents, by reverse mode."""
    leaves = [value.clone().requires_grad_() for value in values]
    y = function(*leaves)
    rows = [torch.autograd.grad(part, leaves, retain_graph=True, allow_unused=True) for part in y.flatten()]
    sums = [sum((g * t).sum() for g, t in zip(row, tangents, strict=True) if g is not None) for row in rows]
    return torch.stack(sums).view_as(y)


def dual(function, values, tangents):
    with forward_ad.dual_level():
        y = function(*map(forward_ad.make_dual, values, tangents))
        return forward_ad.unpack_dual(y).tangent


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_tangents_of_inputs_and_weights(name):
    model, u = made(MODELS[name])
    names, weights = zip(*((key, value.detach()) for key, value in model.named_parameters()), strict=True)

    def function(u, *weights):
        return functional_call(model, dict(zip(names, weights, strict=True)), (u,))

    values = (u, *weights)
    tangents = tuple(torch.randn_like(value) for value in values)
    wanted = along(function, values, tangents)
    close(dual(function, values, tangents), wanted)
    close(jvp(function, values, tangents)[1], wanted)
    with torch.no_grad():
        close(dual(function, values, tangents), wanted)
    close(jacfwd(model)(u), jacrev(model)(u))


@pytest.mark.parametrize("condition", HIDDEN)
def test_dual_numbers_where_the_iteration_depends_on_the_matrix(condition):
    model, u = made(lambda: implicit(condition=condition, activation=HIDDEN[condition]))
    t = torch.randn_like(u)
    close(dual(model, (u,), (t,)), along(model, (u,), (t,)))


@pytest.mark.parametrize("build", [implicit, rnn])
def test_second_derivatives_of_all_modes(build):
    model, u = made(build)
    energy = lambda u: model(u).square().sum()  # noqa: E731
    wanted = torch.autograd.functional.hessian(energy, u)
    close(hessian(energy)(u), wanted)
    close(jacfwd(jacfwd(energy))(u), wanted)
    close(jacrev(jacfwd(energy))(u), wanted)


def test_hessian_of_a_cell_is_that_of_its_model():
    model, u = made(lambda: implicit(feedthrough=False, stop=Absolute(1e-13)))
    network = DEQ(Cell(model), state_shape=4, stop=Absolute(1e-13), max_steps=80)
    wanted = torch.autograd.functional.hessian(lambda u: model(u).square().sum(), u)
    close(hessian(lambda u: (network(u) @ model.C.mT).square().sum())(u), wanted)


def test_the_tangent_of_a_cell_is_not_differentiated_in_silence():
    model, u = made(deq)
    with forward_ad.dual_level():
        y = model(forward_ad.make_dual(u.requires_grad_(), torch.ones_like(u)))
        value, tangent = forward_ad.unpack_dual(y)
        assert torch.autograd.grad(value.sum(), u, retain_graph=True)[0].abs().sum() > 0
        with pytest.raises(SecondDerivativeError, match="first derivatives only"):
            torch.autograd.grad(tangent.sum(), u)


def test_second_derivatives_of_attention():
    torch.manual_seed(0)
    cell, u = TransformerCell(4, heads=2, hidden=4).double(), torch.randn(1, 2, 4, dtype=torch.float64)
    unrolled, network = (DEQ(cell, gradient=name, max_steps=60) for name in ("unrolled", "implicit"))
    found = torch.autograd.functional.hessian(lambda u: unrolled(u).pow(3).sum(), u)
    assert found.abs().max() > 0.1
    close(found, hessian(lambda u: network(u).pow(3).sum())(u))
    energy = network(u.requires_grad_()).pow(3).sum()
    (slope,) = torch.autograd.grad(energy, u, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="first derivatives only"):
        torch.autograd.grad(slope.sum(), u)
    u = u.detach()
    t = torch.randn_like(u)
    close(dual(network, (u,), (t,)), along(network, (u,), (t,)))
