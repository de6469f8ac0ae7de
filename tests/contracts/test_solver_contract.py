"""What every solver must satisfy. A new solver joins by being registered in SOLVERS."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import PROBLEMS, state_matrix

from wellposed.equilibrium import SOLVERS, Absolute, Relative, Status, fixed_point
from wellposed.equilibrium.solvers import Newton

SOLVER_LIST = [*SOLVERS.factories, Newton(dense=0)]
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda z: z}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_reaches_the_known_solution(problem, solver):
    found = fixed_point(problem.f, problem.x0, *problem.inputs, solver=solver, stop=Relative(1e-12), max_steps=500)
    assert found.converged.all()
    torch.testing.assert_close(found.value, problem.solution, rtol=1e-9, atol=1e-10)


@given(
    solver=st.sampled_from(SOLVER_LIST),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    family=st.sampled_from(["positive", "random", "ring", "shift", "sparse"]),
    n=st.integers(1, 12),
    batch=st.integers(2, 9),
    norm=st.sampled_from([0.5, 0.9, 0.99]),
    seed=st.integers(0, 10_000),
)
def test_a_sample_does_not_depend_on_its_companions(solver, activation, family, n, batch, norm, seed):
    generator = torch.Generator().manual_seed(seed)
    A, phi = state_matrix(family, n, norm, generator), ACTIVATIONS[activation]
    # companions of very different difficulty, some of which finish at once
    scale = 10.0 ** torch.randint(-3, 4, (batch, 1), generator=generator)
    u = scale * torch.randn(batch, n, dtype=torch.float64, generator=generator)
    options = {"solver": solver, "max_steps": 4000, "stop": Relative(1e-9)}

    def f(x, u):  # unlike a matrix product, rounds a row the same way in a batch of any size
        return phi((x[:, None, :] * A).sum(-1) + u)

    together = fixed_point(f, torch.zeros_like(u), u, **options)
    for i in range(batch):
        alone = fixed_point(f, torch.zeros(1, n, dtype=torch.float64), u[i : i + 1], **options)
        assert abs(int(alone.steps[0]) - int(together.steps[i])) <= (0 if n > 1 else 1)
        assert alone.status[0] == together.status[i]
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_any_state_shape_and_tuples(solver):
    u, w = torch.randn(4, 2, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def f(state, u, w):
        x, s = state
        return 0.3 * torch.tanh(x) + u, 0.5 * torch.sin(s) + w + x.mean((1, 2))

    found = fixed_point(f, (torch.zeros_like(u), torch.zeros_like(w)), u, w, solver=solver, stop=Relative(1e-12))
    assert found.value[0].shape == u.shape and found.value[1].shape == w.shape
    for value, image in zip(found.value, f(found.value, u, w), strict=True):
        torch.testing.assert_close(value, image, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
@pytest.mark.filterwarnings("ignore::wellposed.errors.ConvergenceWarning")
def test_failures_are_statuses(solver):
    def f(x, kind):
        bad = torch.where(kind[:, None] == 1, torch.nan, 0.5 * x + 1)
        return torch.where(kind[:, None] == 2, x + 1, bad)

    kind = torch.tensor([0, 1, 2])
    found = fixed_point(f, torch.zeros(3, 2, dtype=torch.float64), kind, solver=solver, max_steps=60)
    assert Status(int(found.status[0])) == Status.CONVERGED
    assert Status(int(found.status[1])) == Status.NONFINITE
    assert found.failed.tolist() == [False, True, True]
    assert found.value.isfinite().all()


@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_empty_batch(solver):
    found = fixed_point(lambda x, u: 0.5 * x + u, torch.zeros(0, 3), torch.zeros(0, 3), solver=solver)
    assert found.value.shape == (0, 3) and found.status.shape == (0,) and not found.failed.any()


@pytest.mark.parametrize("solver", SOLVER_LIST, ids=str)
def test_stagnation_at_rounding_level_is_its_own_status(solver, recwarn):
    A = state_matrix("random", 30, 0.9, torch.Generator().manual_seed(0), torch.float32)
    u = 1e4 * torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    found = fixed_point(
        lambda x, u: torch.relu(x @ A.mT + u),
        torch.zeros_like(u),
        u,
        solver=solver,
        stop=Absolute(0.0),
        max_steps=300,
    )
    assert not found.failed.any()
    assert int(found.steps.max()) < 200  # a solver that extrapolates goes on by plain steps first
    assert not [w for w in recwarn if "equilibrium" in str(w.message)]
