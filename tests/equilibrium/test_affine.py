import pytest
import torch
from oracles import implicit_gradient, picard
from problems import state_matrix

from wellposed.activations import get_activation
from wellposed.equilibrium import Anderson, Picard, Relative
from wellposed.equilibrium.affine import REFERENCE, AffineSolve, AffineSpec, affine_equilibrium
from wellposed.equilibrium.gradients import Implicit
from wellposed.equilibrium.method import Solve, SolveOptions

ACTIVATIONS = ["relu", "tanh", "sigmoid", "leaky_relu", "silu"]


def problem(activation, direct=0, solver=None):
    options = SolveOptions(solver or Anderson(), Relative(1e-14), 3000)
    gradient = Implicit(solver=None if direct else options.solver)  # an own solver is never replaced
    return AffineSolve(AffineSpec(get_activation(activation), options, gradient), REFERENCE, Solve(options))


def solve(activation, v, *factors, **options):
    return affine_equilibrium(problem(activation, **options), v, torch.zeros_like(v), v.detach(), *factors)[0]


@pytest.fixture
def system():
    generator = torch.Generator().manual_seed(0)
    A = state_matrix("random", 5, 0.8, generator).requires_grad_()
    v = torch.randn(4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    L, R = (torch.randn(5, 2, dtype=torch.float64, generator=generator).mul(0.3).requires_grad_() for _ in "LR")
    return A, v, L, R


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fast", "whole"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("direct", [0, 16])
def test_first_and_second_derivatives(system, activation, direct, fast_mode):
    A, v, L, R = system
    for factors in ((A,), (L, R)):

        def run(v, *factors):
            return solve(activation, v, *factors, direct=direct)

        assert torch.autograd.gradcheck(run, (v, *factors), fast_mode=fast_mode)
        assert torch.autograd.gradgradcheck(run, (v, *factors), fast_mode=fast_mode)


@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=str)
def test_value_and_gradient_against_dense_oracles(solver):
    generator = torch.Generator().manual_seed(1)
    A = state_matrix("positive", 30, 0.95, generator).requires_grad_()
    v = torch.randn(8, 30, dtype=torch.float64, generator=generator, requires_grad=True)
    g = torch.randn(8, 30, dtype=torch.float64, generator=generator)
    x = solve("relu", v, A, solver=solver)
    torch.testing.assert_close(x.detach(), picard(A.detach(), v.detach()), rtol=1e-11, atol=1e-12)
    grad_A, grad_v = torch.autograd.grad(x, (A, v), g)
    y = implicit_gradient(A.detach(), x.detach(), (x > 0).double().detach(), g)
    torch.testing.assert_close(grad_v, y, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(grad_A, y.mT @ x.detach(), rtol=1e-8, atol=1e-10)


def test_tiny_and_huge_gradients_are_solved_to_the_same_relative_accuracy(system):
    A, v, *_ = system
    x = solve("tanh", v, A)
    g = torch.randn_like(x)
    reference = torch.autograd.grad(x, v, g, retain_graph=True)[0]
    for scale in (1e-30, 1e30):
        scaled = torch.autograd.grad(x, v, scale * g, retain_graph=True)[0]
        torch.testing.assert_close(scaled / scale, reference, rtol=1e-10, atol=0)
    assert torch.autograd.grad(x, v, torch.zeros_like(x))[0].eq(0).all()


def test_transforms_agree_with_loops(system):
    A, v, L, R = (t.detach() for t in system)
    stack_A, stack_v = torch.stack([A, 0.5 * A, A.mT * 0.3]), torch.randn(3, 4, 5, dtype=torch.float64)
    solve_tanh = lambda v, *factors: solve("tanh", v, *factors)  # noqa: E731
    by_loop = torch.stack([solve_tanh(v_i, A_i) for v_i, A_i in zip(stack_v, stack_A, strict=True)])
    torch.testing.assert_close(torch.func.vmap(solve_tanh)(stack_v, stack_A), by_loop)
    shared = torch.func.vmap(solve_tanh, in_dims=(0, None))(stack_v, A)
    torch.testing.assert_close(shared, torch.stack([solve_tanh(v_i, A) for v_i in stack_v]))
    low = torch.func.vmap(solve_tanh, in_dims=(0, None, None))(stack_v, L, R)
    torch.testing.assert_close(low[1], solve_tanh(stack_v[1], L, R))
    stack_L = torch.stack([L, 0.5 * L, -L])
    half = torch.func.vmap(solve_tanh, in_dims=(0, 0, None))(stack_v, stack_L, R)
    torch.testing.assert_close(half[1], solve_tanh(stack_v[1], stack_L[1], R))
    jacobian = torch.func.jacrev(solve_tanh, 1)(v, A)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(lambda A: solve_tanh(v, A), A))
    nested = torch.func.vmap(torch.func.jacrev(lambda v, A: solve_tanh(v, A).sum(), 1))(stack_v, stack_A)
    single = torch.func.jacrev(lambda A: solve_tanh(stack_v[2], A).sum())(stack_A[2])
    torch.testing.assert_close(nested[2], single)
    hessian = torch.func.jacrev(torch.func.jacrev(lambda v: solve_tanh(v, A).sum()))(v)
    expected = torch.autograd.functional.hessian(lambda v: solve_tanh(v, A).sum(), v)
    torch.testing.assert_close(hessian, expected)


def test_ensemble_of_ensembles(system):
    A, *_ = (t.detach() for t in system)
    stack = torch.stack([A, 0.5 * A])[:, None].expand(2, 3, 5, 5)
    v = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    twice = torch.func.vmap(torch.func.vmap(lambda v, A: solve("tanh", v, A)))(v, stack)
    torch.testing.assert_close(twice[1, 2], solve("tanh", v[1, 2], 0.5 * A))
