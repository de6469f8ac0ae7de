"""What every gradient must satisfy, over every solver."""

import pytest
import torch
from problems import state_matrix

from wellposed.equilibrium import GRADIENTS, SOLVERS, Implicit, Phantom, Picard, Relative, Unrolled, fixed_point
from wellposed.errors import SecondDerivativeError

TIGHT = {"stop": Relative(1e-14), "max_steps": 500}


def equilibrium(W, u, **options):
    def f(x, u):
        return torch.tanh(x @ W.mT + u)

    return fixed_point(f, torch.zeros_like(u), u, **{**TIGHT, **options}).value


@pytest.fixture
def leaves():
    generator = torch.Generator().manual_seed(0)
    W = state_matrix("random", 5, 0.8, generator).requires_grad_()
    u = torch.randn(4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    return W, u


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fast", "whole"])
@pytest.mark.parametrize("solver", SOLVERS.factories)
@pytest.mark.parametrize("gradient", [Implicit(), Unrolled(), Phantom(steps=80)], ids=str)
def test_gradcheck(leaves, solver, gradient, fast_mode):
    def run(W, u):
        return equilibrium(W, u, solver=solver, gradient=gradient)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=fast_mode)


@pytest.mark.parametrize("solver", SOLVERS.factories)
def test_implicit_agrees_with_unrolled_and_with_a_dense_solve(leaves, solver):
    W, u = leaves
    g = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = equilibrium(W, u, solver=solver)
    implicit = torch.autograd.grad(x, leaves, g)
    unrolled = torch.autograd.grad(equilibrium(W, u, solver="picard", gradient=Unrolled()), leaves, g)
    d = 1 - x.detach() ** 2
    rows = [torch.linalg.solve(torch.eye(5) - d[i][:, None] * W.detach().mT, d[i] * g[i]) for i in range(4)]
    y = torch.stack(rows)
    for mine, other, dense in zip(implicit, unrolled, (y.mT @ x.detach(), y), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(mine, dense, rtol=1e-8, atol=1e-8)


def test_every_gradient_is_registered():
    assert {type(GRADIENTS.get(name)) for name in GRADIENTS.factories} == {Implicit, Phantom, Unrolled}


def test_non_leaf_inputs_captured_parameters_and_two_forwards(leaves):
    W, u = leaves
    layer = torch.nn.Linear(5, 5, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(W)

    def loss(gradient):
        layer.zero_grad()
        total = 0.0
        for scale in (1.0, 0.3):
            hidden = torch.sin(scale * u)
            x = fixed_point(
                lambda x, h: torch.tanh(layer(x) + h),
                torch.zeros_like(hidden),
                hidden,
                gradient=gradient,
                **TIGHT,
            ).value
            total = total + (x**2).sum()
        return torch.autograd.grad(total, [u, *layer.parameters()])

    for mine, other in zip(loss(Implicit()), loss(Unrolled()), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-9)


def test_retained_graph_gives_the_same_gradient_twice(leaves):
    y = equilibrium(*leaves).sum()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    second = torch.autograd.grad(y, leaves)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_random_layers_use_the_same_draw_forward_and_backward(leaves):
    W, u = leaves
    mask = None

    def f(x, u):
        return torch.tanh(x @ W.mT + u) * mask

    torch.manual_seed(0)
    mask = torch.nn.functional.dropout(torch.ones(5, dtype=torch.float64))
    x = fixed_point(f, torch.zeros_like(u), u, **TIGHT).value
    mine = torch.autograd.grad(x.sum(), W)[0]
    x = fixed_point(f, torch.zeros_like(u), u, gradient=Unrolled(), **TIGHT).value
    torch.testing.assert_close(mine, torch.autograd.grad(x.sum(), W)[0], rtol=1e-8, atol=1e-9)


def test_adjoint_reports_its_status(leaves):
    W, u = leaves
    found = fixed_point(lambda x, u: torch.tanh(x @ W.mT + u), torch.zeros_like(u), u, **TIGHT)
    assert found.adjoint is None
    found.value.sum().backward()
    assert found.adjoint is not None and found.adjoint.converged.all() and (found.adjoint.steps > 0).all()


def test_adjoint_failure_is_reported(leaves):
    W, u = leaves
    gradient = Implicit(solver=Picard(), stop=Relative(1e-14), max_steps=2)
    x = equilibrium(W, u, gradient=gradient)
    with pytest.warns(Warning, match="adjoint solve: 4 of 4 samples"):
        x.sum().backward()


def test_second_derivative_of_a_general_map_is_refused_with_the_alternative(leaves):
    W, u = leaves
    (first,) = torch.autograd.grad(equilibrium(W, u).sum(), u, create_graph=True)
    with pytest.raises(SecondDerivativeError, match=r"Unrolled\(\)"):
        first.sum().backward()
    (first,) = torch.autograd.grad(equilibrium(W, u, gradient=Unrolled()).sum(), u, create_graph=True)
    assert torch.autograd.grad(first.sum(), u)[0].isfinite().all()


def test_no_graph_without_grad_mode(leaves):
    with torch.no_grad():
        assert not equilibrium(*leaves).requires_grad


def test_value_is_the_same_with_and_without_gradient(leaves):
    with torch.no_grad():
        plain = equilibrium(*leaves)
    assert torch.equal(plain, equilibrium(*leaves).detach())


def test_no_graph_where_nothing_is_differentiable(leaves):
    W, u = (leaf.detach() for leaf in leaves)
    assert not equilibrium(W, u).requires_grad
    assert equilibrium(W, u.clone().requires_grad_()).requires_grad
