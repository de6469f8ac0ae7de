"""What the test suite of optimistix asserts of fixed points and roots, asserted of our solvers.

From patrick-kidger/optimistix: the problems `fixed_point_fn_init_args` of `tests/helpers.py`, and
`tests/test_fixed_point.py` (F), `tests/test_root_find.py` (R), `tests/test_solve.py` (S) and
`tests/test_best_so_far.py` (B); a comment above each test names those it restates. R asks for a root of
``f(x) - x``, which is what our solvers do, so F and R become one test here. Left out are bisection and
bounds on the iterates (`test_bisection`, `test_bisection_flip`, `test_newton_bounded`'s bounds), which
this library does not have, and auxiliary outputs, which are refused (see the cases of jaxopt).

Differences by intent: states are batch-first and real, a tuple of tensors at most, and a non-finite
start is an error instead of a result.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

from wellposed.equilibrium import (
    SOLVERS,
    Absolute,
    Implicit,
    Newton,
    Phantom,
    Picard,
    Relative,
    Status,
    Unrolled,
    fixed_point,
)
from wellposed.errors import ConvergenceError, InputError, MapError

SOLVER_LIST = [*SOLVERS.factories, Newton(dense=0)]
# Unrolled Newton must be dense: products with the Jacobian by GMRES are not differentiated.
DIFFERENTIATION = [
    (Newton(dense=128) if solver == "newton" else solver, gradient)
    for solver in SOLVERS.factories
    for gradient in (Implicit(), Phantom(steps=40), Unrolled())
]
TIGHT = {"stop": Relative(1e-14), "max_steps": 300}
GENERATOR = torch.Generator().manual_seed(19)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


@dataclass(frozen=True)
class Case:
    """A map of a tuple of parts and of parameters that it captures."""

    name: str
    f: Callable
    x0: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]

    def __str__(self):
        return self.name

    def solve(self, parameters, **options):
        return fixed_point(lambda *parts: self.f(parts[0], *parameters), self.x0, **{**TIGHT, **options})


TREE = (0.5 * torch.ones(2, 3, 2, 4, dtype=torch.float64), 0.5 * torch.ones(2, 4, dtype=torch.float64))
FLAT = 28  # numbers of TREE per sample


def flattened(state):
    return torch.cat([part.flatten(1) for part in state], dim=1)


def restored(flat):
    return flat[:, :24].reshape(-1, 3, 2, 4), flat[:, 24:]


def perceptron(state, weight1, bias1, weight2, bias2):
    hidden = F.softplus(flattened(state) @ weight1.mT + bias1)
    return restored(0.1 * (hidden @ weight2.mT + bias2))


def heat(state, scale):
    """A Crank-Nicolson step; the Laplacian of the suite returns its argument, and so does this one."""
    y0 = torch.linspace(-1, 1, 100, dtype=torch.float64) ** 2
    (y,) = state
    return (scale * (y0 + 0.5 * ((1 - y) * y + (1 - y0) * y0)),)


def linear(form):
    """An implicit midpoint step of x' = Mx, from ones where the suite has zeros (and the solution zero)."""
    step = 1 / 16

    def f(state, M):
        y = flattened(state)
        at = {"y": 0.5 * (1 + y), "f": 1 + step * y, "k": 1 + y}[form]
        slope = at @ M.mT
        return restored({"y": 1 + step * slope, "f": slope, "k": step * slope}[form])

    return f


def robertson(form):
    """The same for the stiff reaction of Robertson, whose slopes reach 3e7."""
    step = 1e-8

    def slope(y, k1, k2, k3):
        a, b, c = y.unbind(1)
        first = -k1 * a + k3 * b * c
        return torch.stack([first, -first - k2 * b * b, k2 * b * b], dim=1)

    def f(state, *rates):
        y = torch.cat([state[0], state[1][:, None]], dim=1)
        at = {"y": 0.5 * (1 + y), "f": 1 + step * y, "k": 1 + y}[form]
        rate = slope(at, *rates)
        image = {"y": 1 + step * rate, "f": rate, "k": step * rate}[form]
        return image[:, :2], image[:, 2]

    return f


ONE = torch.tensor(1.0, dtype=torch.float64)
MATRIX = draw(FLAT, FLAT)
RATES = tuple(torch.tensor(rate, dtype=torch.float64) for rate in (0.04, 3e7, 1e4))
REACTANTS = (torch.ones(2, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
CASES = [
    Case("cos", lambda state, c: tuple(torch.cos(c * part) for part in state), TREE, (ONE,)),
    Case("exponential", lambda state, c: tuple(torch.exp(-c * part) for part in state), TREE, (ONE,)),
    Case("perceptron", perceptron, TREE, (draw(8, FLAT) / 5, draw(8), draw(FLAT, 8) / 3, draw(FLAT))),
    Case("heat", heat, (torch.ones(2, 100, dtype=torch.float64),), (ONE,)),
    *(Case(f"midpoint-{form}-linear", linear(form), TREE, (MATRIX,)) for form in "yfk"),
    *(Case(f"midpoint-{form}-robertson", robertson(form), REACTANTS, RATES) for form in "yfk"),
]


# F test_fixed_point and R test_root_find. Theirs allow 1e-4 and 1e-5.
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_fixed_point_and_root(solver, case):
    found = case.solve(case.parameters, solver=solver, stop=Relative(1e-12))
    assert not found.failed.any()
    for part, image in zip(found.value, case.f(found.value, *case.parameters), strict=True):
        assert float(image.abs().max()) > 1e-3  # not the trivial solution
        torch.testing.assert_close(part, image, rtol=1e-9, atol=1e-9 * float(image.abs().max()))


def tangents_of(case):
    generator = torch.Generator().manual_seed(0)
    size = [p.abs() if p.dim() == 0 else 1.0 for p in case.parameters]  # rates differ by nine orders of magnitude
    draws = [torch.randn(p.shape, dtype=torch.float64, generator=generator) for p in case.parameters]
    return [s * draw for s, draw in zip(size, draws, strict=True)]


@functools.cache
def slope_by_differences(name):
    """Central differences of a solve by plain iteration, which shares nothing with what is tested."""
    case = next(case for case in CASES if case.name == name)
    tangents = tangents_of(case)

    def solution(step):
        moved = [p + step * t for p, t in zip(case.parameters, tangents, strict=True)]
        state = case.x0
        for _ in range(200):
            state = case.f(state, *moved)
        return state

    with torch.no_grad():
        up, down = solution(1e-5), solution(-1e-5)
        return [(a - b) / 2e-5 for a, b in zip(up, down, strict=True)]


# F test_fixed_point_jvp and R test_root_find_jvp, in reverse mode: the product with random tangents.
@pytest.mark.covering
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("solver", "gradient"), DIFFERENTIATION, ids=str)
def test_vjp_against_finite_differences(solver, gradient, case):
    tangents = tangents_of(case)
    leaves = [p.clone().requires_grad_() for p in case.parameters]
    found = case.solve(leaves, solver=solver, gradient=gradient)
    assert not found.failed.any()
    cotangents = [torch.randn_like(part) / part.detach().abs().max() for part in found.value]
    gradients = torch.autograd.grad(found.value, leaves, cotangents)
    mine = sum(float((g * t).sum()) for g, t in zip(gradients, tangents, strict=True))
    slopes = slope_by_differences(case.name)
    expected = sum(float((s * c).sum()) for s, c in zip(slopes, cotangents, strict=True))
    assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


def tangents_in_forward_mode(case, tangents, **options):
    with forward_ad.dual_level():
        moving = [forward_ad.make_dual(p, t) for p, t in zip(case.parameters, tangents, strict=True)]
        found = case.solve(moving, stop=Relative(1e-12), **options)
        assert found.converged.all()
        return [forward_ad.unpack_dual(part).tangent for part in found.value]


# The same in forward mode. Theirs compares the implicit with a piggyback derivative; the three here must agree.
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("solver", "gradient"),
    [
        *((s, Implicit()) for s in ("picard", "broyden", "newton")),
        ("anderson", Phantom(steps=40)),
        ("anderson", Unrolled()),
    ],
    ids=str,
)
def test_jvp_against_finite_differences(solver, gradient, case):
    tangents = tangents_of(case)
    mine = tangents_in_forward_mode(case, tangents, solver=solver, gradient=gradient)
    for tangent, expected in zip(mine, slope_by_differences(case.name), strict=True):
        torch.testing.assert_close(tangent, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled()], ids=str)
def test_jvp_of_a_solve_that_ends_at_rounding_level(gradient):
    theta = torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(theta, torch.ones_like(theta))
        found = fixed_point(
            lambda x, theta: 0.8 * torch.cos(x) + theta,
            torch.zeros_like(theta),
            moving,
            gradient=gradient,
            stop=Absolute(0.0),
        )
        assert found.status.tolist() == [Status.STAGNATED]
        value, tangent = forward_ad.unpack_dual(found.value)
    assert tangent is not None
    torch.testing.assert_close(tangent, 1 / (1 + 0.8 * torch.sin(value)))


# S test_fixed_point and test_root_find: the map is a constant, given by a tensor that it captures.
@pytest.mark.parametrize(("solver", "gradient"), DIFFERENTIATION, ids=str)
def test_trivial_map_has_the_trivial_gradient(solver, gradient):
    offset = torch.tensor([[0.0], [2.5]], dtype=torch.float64, requires_grad=True)
    found = fixed_point(lambda x: offset.clone(), torch.zeros_like(offset), solver=solver, gradient=gradient)
    torch.testing.assert_close(found.value, offset, rtol=0, atol=0)
    (mine,) = torch.autograd.grad(found.value.sum(), offset)
    torch.testing.assert_close(mine, torch.ones_like(offset), rtol=0, atol=0)


@pytest.mark.parametrize(("solver", "gradient"), DIFFERENTIATION, ids=str)
def test_a_start_at_the_solution_ends_at_once_and_still_has_a_gradient(solver, gradient):
    offset = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    start = 2 * offset.detach()
    found = fixed_point(lambda x, b: 0.5 * x + b, start, offset, solver=solver, gradient=gradient)
    assert found.steps.tolist() == [1] and torch.equal(found.value.detach(), start)
    (mine,) = torch.autograd.grad(found.value.sum(), offset)
    # Unrolled has a single step to differentiate, and only Newton's has the gradient of the solution
    expected = 1.0 if gradient == Unrolled() and not isinstance(solver, Newton) else 2.0
    torch.testing.assert_close(mine, torch.full_like(mine, expected), rtol=1e-9, atol=0)


# B test_fixed_point and test_root_find
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_shifted_tanh(solver):
    x0 = torch.zeros(1, 1, dtype=torch.float64)
    found = fixed_point(lambda x: torch.tanh(x + 1), x0, solver=solver, stop=Relative(1e-6, 1e-6))
    assert float(found.value) == pytest.approx(0.96118069, rel=1e-5, abs=1e-5)


# R test_newton_bounded without the bounds: the start decides which of the two roots is found. One factor is a
# square, so the convergence is linear, and plain iteration on x - g(x) goes elsewhere.
@pytest.mark.parametrize("solver", [Newton(), Newton(dense=0)], ids=str)
def test_newton_finds_the_nearest_root(solver):
    def f(state):
        (a,), ((b, c), (d, e)) = state[0].mT, state[1].permute(1, 2, 0)
        g = (a + b + c + d + e) * (a - b + c - d + e), a, c**2, torch.tanh(d), e + 1
        return state[0] - g[1][:, None], state[1] - torch.stack([g[0], *g[2:]], dim=1).reshape(-1, 2, 2)

    starts = torch.tensor([[[1.1, 0.1], [0.1, -1.1]], [[-1.1, 0.1], [0.1, -1.1]]], dtype=torch.float64)
    x0 = (torch.full((2, 1), 0.1, dtype=torch.float64), starts)
    found = fixed_point(f, x0, solver=solver, stop=Relative(0.0, 1e-10))
    roots = torch.tensor([[[1.0, 0.0], [0.0, -1.0]], [[-1.0, 0.0], [0.0, -1.0]]], dtype=torch.float64)
    assert found.converged.all()
    torch.testing.assert_close(found.value[0], torch.zeros(2, 1, dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.value[1], roots, rtol=0, atol=1e-4)


# A solve inside the map of another solve, as in an implicit step whose right-hand side is a fixed point.
@pytest.mark.parametrize("inner", [Implicit(), Unrolled()], ids=str)
@pytest.mark.parametrize(
    ("solver", "outer"), [*((s, Implicit()) for s in SOLVERS.factories), ("picard", Phantom(steps=20))], ids=str
)
def test_nested_solves(solver, outer, inner):
    W = torch.tensor([[0.4, 0.1], [-0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    u = torch.tensor([[0.5, -1.0], [2.0, 0.1]], dtype=torch.float64, requires_grad=True)
    tight = {"stop": Relative(1e-13), "max_steps": 30}

    def layer(z, x, u):
        return 0.4 * torch.cos(z @ W) + 0.3 * x + u

    def nested(x, u):
        return 0.5 * torch.sin(fixed_point(layer, torch.zeros_like(x), x, u, gradient=inner, **tight).value)

    def joint(state, u):  # the same as one system of twice the size
        x, z = state
        return 0.5 * torch.sin(z), layer(z, x, u)

    found = fixed_point(nested, torch.zeros_like(u), u, solver=solver, gradient=outer, **tight)
    whole = fixed_point(joint, (torch.zeros_like(u), torch.zeros_like(u)), u, solver="picard", **TIGHT)
    torch.testing.assert_close(found.value, whole.value[0], rtol=1e-9, atol=1e-10)
    mine = torch.autograd.grad((found.value**2).sum(), (W, u))
    for one, other in zip(mine, torch.autograd.grad((whole.value[0] ** 2).sum(), (W, u)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


# `throw` of optimistix is `on_failure` here; its RESULTS are statuses per sample.
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_too_few_steps_are_reported(solver):
    case = CASES[0]
    found = case.solve(case.parameters, solver=solver, max_steps=2, on_failure="ignore")
    assert found.status.tolist() == [Status.MAX_STEPS] * 2 and found.failed.all()
    assert found.steps.tolist() == [2, 2] and "max_steps" in Status.MAX_STEPS.text
    with pytest.raises(ConvergenceError, match="2 of 2 samples did not reach an equilibrium"):
        case.solve(case.parameters, solver=solver, max_steps=2, on_failure="raise")


@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_a_map_without_fixed_point_is_reported(solver):
    x0 = torch.zeros(1, 2, dtype=torch.float64)
    found = fixed_point(lambda x: x * x + 1, x0, solver=solver, max_steps=60, on_failure="ignore")
    assert found.failed.all() and found.value.isfinite().all()


# Here the residual stays above one, and only the state grows.
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_running_off_to_infinity_is_no_convergence(solver):
    x0 = torch.zeros(1, 2, dtype=torch.float64)
    found = fixed_point(lambda x: torch.sqrt(x * x + 1) + 1, x0, solver=solver, max_steps=60, on_failure="ignore")
    assert found.failed.all()


def test_divergence_has_its_own_status():
    x0 = torch.ones(1, 1, dtype=torch.float64)
    found = fixed_point(lambda x: 1.5 * x + 1, x0, solver=Picard(), max_steps=60, on_failure="ignore")
    assert found.status.tolist() == [Status.DIVERGED]


# S test_nonfinite_input: theirs returns a result code.
def test_a_start_that_is_not_finite_is_an_error_unlike_in_optimistix():
    with pytest.raises(InputError, match="x0 must be finite"):
        fixed_point(torch.cos, torch.tensor([[math.nan]]))


# S test_mixed_dtype: theirs promotes.
def test_another_dtype_is_an_error_unlike_in_optimistix():
    M = torch.eye(10, dtype=torch.float32)
    with pytest.raises(MapError, match=r"dtype of its state, torch.float64"):
        fixed_point(lambda x: 0.5 * x.float() @ M, torch.ones(1, 10, dtype=torch.float64))


# F test_fixed_point_jvp also runs in complex128.
def test_complex_states_are_refused_unlike_in_optimistix():
    with pytest.raises(InputError, match=r"floating point; received shape .* torch.complex128"):
        fixed_point(torch.cos, torch.ones(1, 2, dtype=torch.complex128))
