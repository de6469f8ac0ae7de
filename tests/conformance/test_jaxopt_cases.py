"""What the test suite of jaxopt asserts of its fixed-point solvers, asserted of ours.

From google/jaxopt, `tests/fixed_point_iteration_test.py` (F), `tests/anderson_test.py` (A) and
`tests/broyden_test.py` (B); a comment above each test names those it restates. Left out are F/B
`jit=False` (there is no jit switch here), A `test_residuals_minimizer` in its literal form (it calls
an internal function; here its consequence is tested) and `tests/anderson_wrapper_test.py`
(acceleration of optimisers, which this library does not have).

Two things hold throughout and are differences by intent: a state is batch-first, so the problems have
a leading dimension of one or more, and every sample is judged by itself.
"""

import math

import pytest
import torch

from wellposed.equilibrium import (
    SOLVERS,
    Anderson,
    Implicit,
    Newton,
    Phantom,
    Picard,
    Relative,
    Status,
    Unrolled,
    fixed_point,
)
from wellposed.errors import InputError, MapError

SOLVER_LIST = [*SOLVERS.factories, Newton(dense=0)]
FIXED_POINT_OF_COSINE = 0.7390851332151607
TIGHT = {"stop": Relative(1e-14), "max_steps": 500}


def two_norm(tolerance):
    """The rule of jaxopt: the 2-norm of the residual, absolute."""
    return Relative(rtol=0.0, atol=tolerance, norm="2")


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


# F, A and B test_geometric_decay. The budgets are theirs: 8 000, 10 000 and 10 evaluations.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("solver", "budget"), [("picard", 8000), ("anderson", 10_000), ("broyden", 10), ("newton", 10)]
)
def test_geometric_decay(solver, budget, dtype):
    ratio = torch.tensor([0.9, 0.99, 0.999], dtype=dtype)
    x0 = torch.tensor([[1.0, 0.4, -0.2]], dtype=dtype)
    found = fixed_point(lambda x: ratio * x, x0, solver=solver, stop=two_norm(1e-5), max_steps=budget)
    assert found.converged.all()
    error = ratio * found.value - found.value
    assert float(error.norm()) <= 1e-5
    assert float(found.value.norm()) < 1e-2


# A test_support_for_scalars
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_one_number_per_sample(solver):
    found = fixed_point(lambda x: 0.5 * x + 0.5, float64([0.0, -7.0, 1.0]), solver=solver, stop=two_norm(1e-4))
    assert found.value.shape == (3,) and found.converged.all()
    torch.testing.assert_close(found.value, torch.ones(3, dtype=torch.float64), rtol=0, atol=2e-4)


def test_a_state_without_batch_dimension_is_refused_unlike_in_jaxopt():
    with pytest.raises(InputError, match=r"batch-first.*shape \(\)"):
        fixed_point(lambda x: 0.5 * x + 0.5, float64(0.0))


def cubes(state):
    """Has the solution zero, and others at 1 and about 1.11 from which plain iteration flees."""
    return torch.sin(state[0]) * state[0] ** 2, state[1] ** 3


CUBES_START = (float64([[0.6, 0.0, -0.1]]), float64([[[0.7], [0.5]]]))


# F and B test_sin_fixed_point. B asserts only that the result is a fixed point: Newton finds another one.
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_sin_fixed_point_with_a_tuple_as_state(solver):
    found = fixed_point(cubes, CUBES_START, solver=solver, stop=two_norm(1e-6), max_steps=100)
    assert found.converged.all()
    assert [part.shape for part in found.value] == [part.shape for part in CUBES_START]
    gaps = [image - part for image, part in zip(cubes(found.value), found.value, strict=True)]
    assert math.hypot(*(float(gap.norm()) for gap in gaps)) <= 1e-6
    if solver in ("picard", "anderson", "broyden"):
        assert all(float(part.abs().max()) < 1e-6 for part in found.value)


# A test_sin_fixed_point adds a part that only changes its sign: no contraction, so Picard must report it.
@pytest.mark.parametrize("solver", [*SOLVER_LIST, Anderson(memory=3)], ids=str)
def test_sin_fixed_point_with_a_part_that_alternates(solver):
    def f(state):
        return *cubes(state[:2]), -state[2]

    x0 = (*CUBES_START, float64([[-1.0, 0.0, 2.0, -0.4]]) / 3)
    policy = "ignore" if solver == "picard" else "raise"
    found = fixed_point(f, x0, solver=solver, stop=two_norm(1e-6), max_steps=1000, on_failure=policy)
    if solver == "picard":
        assert found.status.tolist() == [Status.MAX_STEPS]
        torch.testing.assert_close(found.value[2].abs(), x0[2].abs())
    else:
        assert found.converged.all() and float(found.value[2].abs().max()) < 1e-6


def test_nested_tuples_are_refused_unlike_in_jaxopt():
    state = (torch.ones(1, 3), (torch.ones(1, 2), torch.ones(1, 4)))
    with pytest.raises(InputError, match="tuple of tensors; received Tensor, tuple"):
        fixed_point(lambda state: state, state)


# F, A and B test_cos_fixed_point. At pi/2 the slope is -1 and plain iteration needs 12 / tolerance^2 steps: F
# asks for 1e-2 only and here, for the sake of time, Picard is asked for 5e-2.
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_cos_fixed_point_with_parameters(solver):
    x0, theta = float64([[0.3, math.pi / 4]]), float64([[0.0, math.pi / 2]])
    tolerance = 5e-2 if solver == "picard" else 1e-6
    found = fixed_point(
        lambda x, theta: torch.cos(x) + theta, x0, theta, solver=solver, stop=two_norm(tolerance), max_steps=5000
    )
    assert found.converged.all()
    exact = float64([[FIXED_POINT_OF_COSINE, math.pi / 2]])
    torch.testing.assert_close(found.value, exact, rtol=0, atol=tolerance)


# F and B test_has_aux: a chaotic companion must not hinder the solve.
@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_a_chaotic_companion_does_not_hinder_the_others(solver):
    def f(x, chaotic):
        return torch.where(chaotic, 3.95 * x * (1 - x), torch.cos(x))

    x0, chaotic = float64([[1.0], [0.6]]), torch.tensor([[False], [True]])
    found = fixed_point(f, x0, chaotic, solver=solver, stop=two_norm(1e-10), on_failure="ignore")
    assert found.status[0] == Status.CONVERGED
    assert abs(float(found.value[0]) - FIXED_POINT_OF_COSINE) < 1e-9
    if solver == "picard":
        assert found.failed[1]
    else:  # extrapolation may well find the unstable solution 1 - 1 / 3.95; then it must be one
        assert found.failed[1] or abs(float(found.value[1]) - (1 - 1 / 3.95)) < 1e-8


def test_auxiliary_output_is_refused_unlike_in_jaxopt():
    with pytest.raises(MapError, match="must return the shape of its state"):
        fixed_point(lambda x: (torch.cos(x), x), torch.zeros(1, 2))


DIFFERENTIATION = [
    (solver, gradient) for solver in SOLVERS.factories for gradient in (Implicit(), Phantom(steps=150), Unrolled())
]


# F, A and B test_simple_grads, against the closed form 1 / (1 + sin x) instead of finite differences. Theirs
# has theta = pi/2 as well, where the slope is -1 and Picard's gradients do not converge; here it is 1/2.
@pytest.mark.parametrize(("solver", "gradient"), DIFFERENTIATION, ids=str)
def test_simple_grads(solver, gradient):
    theta = float64([[0.0, 0.5]]).requires_grad_()
    x = fixed_point(
        lambda x, theta: torch.cos(x) + theta,
        float64([[0.0, math.pi / 4]]),
        theta,
        solver=solver,
        gradient=gradient,
        **TIGHT,
    ).value
    (mine,) = torch.autograd.grad(x.sum(), theta)
    torch.testing.assert_close(mine, 1 / (1 + torch.sin(x.detach())), rtol=1e-7, atol=1e-7)


# F, A and B test_grads_flat_landscape: the solution is zero whatever theta is.
@pytest.mark.parametrize(("solver", "gradient"), DIFFERENTIATION, ids=str)
def test_grads_flat_landscape(solver, gradient):
    theta = float64([0.05, 0.2]).requires_grad_()
    x0 = float64([[1.0, -0.5]])
    found = fixed_point(lambda x: theta * x, x0, solver=solver, gradient=gradient, stop=two_norm(1e-12))
    assert found.converged.all() and float(found.value.detach().abs().max()) < 2e-12
    (mine,) = torch.autograd.grad(found.value.sum(), theta)
    torch.testing.assert_close(mine, torch.zeros_like(theta), rtol=0, atol=1e-9)


def affine(n, seed=0):
    """A symmetric M with spectral radius 1/2, offsets and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    M = 2 * torch.rand(n, n, dtype=torch.float64, generator=generator) - 1
    M = M + M.mT
    M = M / (2 * torch.linalg.eigvalsh(M).abs().max() + 1e-4)
    b = torch.rand(2, n, dtype=torch.float64, generator=generator)
    return M, b, torch.randn(2, n, dtype=torch.float64, generator=generator)


# F, A and B test_affine_contractive_mapping, against dense solves instead of finite differences. M stands for
# a captured parameter, b for an input.
@pytest.mark.parametrize(("solver", "gradient"), DIFFERENTIATION, ids=str)
def test_affine_contractive_mapping_and_its_gradients(solver, gradient):
    n = 200 if solver != "newton" else 60  # above 64 states Newton is matrix-free; see the next test
    M, b, cotangent = affine(n)
    identity = torch.eye(n, dtype=torch.float64)
    exact = torch.linalg.solve(identity - M, b.mT).mT
    adjoint = torch.linalg.solve((identity - M).mT, cotangent.mT).mT
    M.requires_grad_(), b.requires_grad_()
    found = fixed_point(
        lambda x, b: x @ M.mT + b, torch.zeros_like(b), b, solver=solver, gradient=gradient, **TIGHT
    )
    assert float(found.residual.max()) <= 1e-6 and not found.failed.any()
    torch.testing.assert_close(found.value.detach(), exact, rtol=1e-10, atol=1e-10)
    by_matrix, by_offset = torch.autograd.grad(found.value, (M, b), cotangent)
    torch.testing.assert_close(by_offset, adjoint, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(by_matrix, adjoint.mT @ exact, rtol=1e-6, atol=1e-7)


def test_affine_with_matrix_free_newton_which_refuses_to_be_unrolled():
    M, b, cotangent = affine(200)
    adjoint = torch.linalg.solve(torch.eye(200, dtype=torch.float64) - M.mT, cotangent.mT).mT
    b.requires_grad_()

    def f(x, b):
        return x @ M.mT + b

    x = fixed_point(f, torch.zeros_like(b), b, solver="newton", **TIGHT).value
    torch.testing.assert_close(torch.autograd.grad(x, b, cotangent)[0], adjoint, rtol=1e-9, atol=1e-9)
    with pytest.raises(InputError, match="GMRES"):
        fixed_point(f, torch.zeros_like(b), b, solver="newton", gradient=Unrolled())


# A test_mixing_frequency: here jumps alternate with as many plain steps as the memory is long.
@pytest.mark.parametrize("memory", [1, 5, 10])
def test_any_mixing_converges(memory):
    M, b, _ = affine(10)
    found = fixed_point(
        lambda x, b: x @ M.mT + b,
        torch.zeros_like(b),
        b,
        solver=Anderson(memory=memory),
        stop=two_norm(1e-6),
        max_steps=100,
    )
    assert found.converged.all()


# A test_residuals_minimizer: weights that add up to one and minimise the combined residual solve an affine
# problem of `memory` states in the first jump. One weight off, and it needs many more steps.
@pytest.mark.parametrize("memory", [2, 4, 6])
def test_the_weights_minimise_the_residual(memory):
    M, b, _ = affine(memory)
    found = fixed_point(
        lambda x, b: x @ M.mT + b, torch.zeros_like(b), b, solver=Anderson(memory=memory), stop=two_norm(1e-8)
    )
    assert found.converged.all() and int(found.steps.max()) <= memory + 3
    plain = fixed_point(lambda x, b: x @ M.mT + b, torch.zeros_like(b), b, solver=Picard(), stop=two_norm(1e-8))
    assert int(plain.steps.min()) > 2 * (memory + 3)


# A test_rotation_map: no contraction, so the theorem of Banach does not help, and Picard must report it.
@pytest.mark.parametrize("solver", [*SOLVER_LIST, Anderson(memory=10)], ids=str)
def test_rotation_map(solver):
    angles = math.pi / float64([2, 3, 4, 5, 6, 1.27, 1.73])
    blocks = [torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]], dtype=torch.float64) for a in angles]
    R, center = torch.block_diag(*blocks), torch.arange(1, 15, dtype=torch.float64)
    x0 = torch.rand(1, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = fixed_point(
        lambda x: (x - center) @ R.mT + center,
        x0,
        solver=solver,
        stop=two_norm(1e-4),
        max_steps=400,
        on_failure="ignore",
    )
    if solver == "picard":
        assert found.status.tolist() == [Status.MAX_STEPS]
        torch.testing.assert_close((found.value - center).norm(), (x0 - center).norm())  # it went round and round
    else:
        assert found.converged.all()
        torch.testing.assert_close(found.value[0], center, rtol=0, atol=1e-3)
