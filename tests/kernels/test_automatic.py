"""Samples that are slow go to Newton's method, whatever their companions do."""

import copy
import pickle

import pytest
import torch
from problems import compiled_loop

from wellposed import ImplicitModel, Status
from wellposed.activations import get_activation
from wellposed.equilibrium import Anderson, Implicit, Picard
from wellposed.equilibrium.affine import TransposedMap
from wellposed.equilibrium.method import SolveOptions
from wellposed.equilibrium.stopping import Absolute, Relative, Steps
from wellposed.kernels.cpu.engine import RESERVE, handover_after, handover_step

N = 40


def ring(norm, n=N):
    return (
        norm / 2 * (torch.eye(n, dtype=torch.float64).roll(1, 0) + torch.eye(n, dtype=torch.float64).roll(-1, 0))
    )


def slow_model(norm=0.999, **options):
    A = ring(norm)
    generator = torch.Generator().manual_seed(1)
    C = torch.randn(3, N, dtype=A.dtype, generator=generator)
    return ImplicitModel.from_matrices(A, torch.eye(N, dtype=A.dtype), C, **options)


def inputs(batch=24):
    return torch.randn(batch, N, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def exact_state(A, v):
    """Policy iteration by dense solves, sample by sample."""
    found = []
    for row in v:
        active = torch.ones(len(A), dtype=torch.bool)
        for _ in range(100):
            x = torch.linalg.solve(torch.eye(len(A), dtype=A.dtype) - active[:, None] * A, active * row)
            new = A @ x + row > 0
            if torch.equal(new, active):
                break
            active = new
        found.append(x)
    return torch.stack(found)


def test_slow_samples_converge_and_fast_ones_keep_their_steps():
    model, u = slow_model(max_steps=200), inputs()
    u[::2] = 0
    u[::2, 0] = -1  # the equilibrium is zero: a few steps
    solution = model.equilibrium(u)
    plain = slow_model(solver="anderson", on_failure="ignore", max_steps=200).equilibrium(u)
    limit = handover_step(N, SolveOptions(Anderson(), Relative(), 200))
    slow = plain.steps > limit
    assert solution.converged.all() and plain.failed.any() and not slow[::2].any() and limit == 200 - RESERVE
    assert torch.equal(solution.steps[~slow], plain.steps[~slow])
    assert torch.equal(solution.value[~slow], plain.value[~slow])
    assert (solution.steps[slow] > limit).all() and (solution.steps <= 200).all()
    torch.testing.assert_close(solution.value, exact_state(ring(0.999), u), rtol=1e-6, atol=1e-7)
    assert (solution.residual <= 1e-9 * solution.value.abs().amax(1) + 1e-13).all()


def test_a_sample_does_not_depend_on_its_companions():
    model, u = slow_model(), inputs()
    together = model.equilibrium(u)
    for rows in (slice(0, 1), slice(3, 10), slice(10, 24)):
        alone = model.equilibrium(u[rows])
        assert torch.equal(alone.status, together.status[rows])
        torch.testing.assert_close(alone.value, together.value[rows], rtol=1e-9, atol=1e-9)
    mixed = torch.cat([torch.zeros(50, N, dtype=u.dtype), u])  # easy companions
    torch.testing.assert_close(model(mixed)[50:], model(u), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "identity"])
@pytest.mark.parametrize("n", [12, 40])
def test_gradients_of_slow_samples(n, activation):
    """The adjoint of a nearly singular system is slow; a dense solve is the oracle."""
    A = ring(0.999, n)
    v = torch.rand(6, n, dtype=A.dtype, generator=torch.Generator().manual_seed(0)) - 0.1
    model = ImplicitModel.from_matrices(
        A, torch.eye(n, dtype=A.dtype), torch.eye(n, dtype=A.dtype), activation=activation
    )
    x = model(v)
    (x**2).sum().backward()
    state, phi = x.detach(), get_activation(activation)
    slope = phi.slope_at(v + state @ A.mT)
    systems = torch.eye(n, dtype=A.dtype) - slope[:, :, None] * A
    y = slope * torch.linalg.solve(systems.mT, 2 * state)
    torch.testing.assert_close(model.state.raw.grad, y.mT @ state, rtol=1e-6, atol=1e-8)


def test_an_explicit_solver_is_respected():
    u = inputs()
    for solver in (Picard(), Anderson(), "anderson"):
        model = slow_model(solver=solver, on_failure="ignore")
        assert model.equilibrium(u).failed.any() and "Newton" not in model.explain(u)
    model = slow_model(gradient=Implicit(solver=Picard()), on_failure="ignore")
    solution = model.equilibrium(u)
    solution.value.sum().backward()
    assert solution.converged.all() and solution.adjoint.failed.any()


def test_explains_when_newton_comes_in():
    u = inputs(4)
    text = slow_model().explain(u)
    assert text.startswith(
        "numba: relu, float64, 40 states, batch 4, Anderson, after 375 steps Newton for samples"
    )
    assert "Newton" not in slow_model(activation="tanh").explain(u)
    assert "Newton" not in slow_model(max_steps=30).explain(u)


@pytest.mark.parametrize(
    ("stop", "max_steps", "expected"),
    [(Relative(), 9000, handover_after(N)), (Absolute(), 200, 152), (Relative(), 90, 90), (Steps(300), 300, 300)],
)
def test_the_step_of_the_handover(stop, max_steps, expected):
    assert handover_step(N, SolveOptions(Anderson(), stop, max_steps)) == expected


def test_too_many_states_are_not_factorised():
    assert handover_step(600, SolveOptions(Anderson(), Relative(), 200)) == 200


def test_the_trace_ends_with_the_last_residual():
    u = inputs(3)
    solution = slow_model().equilibrium(u)
    assert solution.residuals.shape[1] == int(solution.steps.max())
    last = solution.residuals.gather(1, solution.steps[:, None] - 1)[:, 0]
    f = torch.relu(solution.value @ ring(0.999).mT + u)
    torch.testing.assert_close(last, (f - solution.value).abs().amax(1), rtol=0, atol=1e-12)


def test_linear_equations_are_handed_over_too():
    A, n = ring(0.9999), N
    slope, offset = torch.ones(5, n, dtype=A.dtype), inputs(5)
    f = TransposedMap((A.mT,), slope, offset, 1.0)
    found = compiled_loop(f, torch.zeros_like(offset), Anderson(), Relative(), 200, automatic=True)
    assert (found.status == Status.CONVERGED).all()
    exact = torch.linalg.solve(torch.eye(n, dtype=A.dtype) - A.mT, offset.mT).mT
    torch.testing.assert_close(found.value, exact, rtol=1e-5, atol=1e-6)


def test_nothing_that_is_not_finite_is_called_converged():
    model = slow_model(on_failure="ignore")
    start = torch.zeros(4, N, dtype=torch.float64)
    with torch.no_grad():
        model.B[0, 0] = torch.nan
    found = model.equilibrium(torch.ones_like(start))
    assert (found.status == Status.NONFINITE).all()


def test_one_node_of_the_graph_agrees_with_several(monkeypatch):
    u = inputs(9).requires_grad_()
    results, ones = [], torch.ones(2, N, dtype=u.dtype)
    for general in (False, True):
        model = ImplicitModel.from_matrices(
            ring(0.8), torch.eye(N, dtype=u.dtype), ones, ones,
            bias=torch.linspace(-1, 1, N, dtype=u.dtype),
        )  # fmt: skip
        if general:
            monkeypatch.setattr(model, "_runs_plainly", lambda u, B: False)
        y = model(u)
        assert ("Layer" in type(y.grad_fn).__name__) != general
        gradients = torch.autograd.grad((y**2).sum(), [u, *model.parameters()])
        results.append([y, *gradients])
    for one, several in zip(*results, strict=True):
        torch.testing.assert_close(one, several, rtol=1e-9, atol=1e-9)


def test_changed_options_change_the_plan():
    model, u = slow_model(on_failure="ignore"), inputs(3)
    accurate = model(u)
    model.stop, model.solver = Absolute(1e-1), "picard"
    assert (model(u) - accurate).abs().max() > 1e-3
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(u), model(u))
