"""The compiled loop against the reference loop, which has oracles of its own."""

import pytest
import torch
from problems import compiled_loop, state_matrix

from wellposed import ImplicitModel
from wellposed.activations import get_activation, leaky_relu
from wellposed.equilibrium import Absolute, Anderson, Picard, Relative, Status, Steps
from wellposed.equilibrium.affine import AffineMap, TransposedMap
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.stopping import Settled

ACTIVATIONS = ["relu", leaky_relu(0.2), "tanh", "sigmoid", "identity"]
DTYPES = [torch.float32, torch.float64]
SHAPES = [(1, 1), (1, 40), (17, 1), (17, 33), (190, 3), (257, 1), (257, 35)]  # states, batch
COMPILED = compiled_loop


def name_of(activation):
    return get_activation(activation).name


def forward_map(family, norm, activation, n, batch, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A = state_matrix(family, n, norm, generator).to(dtype)
    v = torch.randn(batch, n, dtype=torch.float64, generator=generator).to(dtype)
    return AffineMap((A,), v, get_activation(activation))


def adjoint_map(family, norm, activation, n, batch, dtype):
    f = forward_map(family, norm, activation, n, batch, dtype)
    x = iterate(f, torch.zeros_like(f.v), Anderson(), Relative(), 400).value
    slope = f.activation.slope_at(torch.addmm(f.v, x, f.factors[0].mT))
    g = torch.randn(batch, n, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(dtype)
    return TransposedMap((f.factors[0].mT,), slope, slope * g, 1.0)


def assert_agree(f, x0, solver, stop, max_steps, norm):
    compiled, plain = COMPILED(f, x0, solver, stop, max_steps), iterate(f, x0, solver, stop, max_steps)
    assert torch.equal(compiled.status, plain.status)
    assert int((compiled.steps - plain.steps).abs().max()) <= 1
    rounding = f.rounding(plain.value, f(plain.value))[:, None] / (1 - norm)
    same = (compiled.steps == plain.steps)[:, None]  # a step more is a step closer, not rounding
    # A jump moves a sample by its residuals, with coefficients of a least squares problem: rounded differently on
    # every processor, these change a small share of what is left of the way.
    jumps = 1e-5 * plain.last_residual[:, None] / (1 - norm) if isinstance(solver, Anderson) else 0.0
    assert ((compiled.value - plain.value).abs() <= 10 * rounding + jumps)[same.expand_as(plain.value)].all()
    torch.testing.assert_close(compiled.value, plain.value, rtol=1e-3, atol=1e-3)
    assert same.double().mean() > 0.9
    columns = min(compiled.residuals.shape[1], plain.residuals.shape[1])
    both = same & compiled.residuals[:, :columns].isfinite()
    assert torch.equal(both, same & plain.residuals[:, :columns].isfinite())


@pytest.mark.covering
@pytest.mark.parametrize("solver", [Anderson(), Picard()], ids=["anderson", "picard"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
@pytest.mark.parametrize(("n", "batch"), SHAPES)
def test_forward(n, batch, activation, dtype, solver):
    for family in ("random", "positive"):
        f = forward_map(family, 0.7, activation, n, batch, dtype)
        assert_agree(f, torch.zeros_like(f.v), solver, Relative(), 200, 0.7)
        assert_agree(f, torch.randn_like(f.v), solver, Absolute(1e-4), 200, 0.7)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
@pytest.mark.parametrize(("n", "batch"), SHAPES)
def test_adjoint(n, batch, activation, dtype):
    f = adjoint_map("positive", 0.7, activation, n, batch, dtype)
    assert_agree(f, torch.zeros_like(f.slope), Anderson(), Relative(), 200, 0.7)


@pytest.mark.parametrize("family", ["positive", "ring", "shift", "sparse"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_slow_problems_in_float64(family, activation):
    # Many jumps, accepted and rejected, and lanes that take new samples.
    f = forward_map(family, 0.95, activation, 24, 100, torch.float64)
    assert_agree(f, torch.zeros_like(f.v), Anderson(), Absolute(3e-6), 2000, 0.95)


@pytest.mark.slow  # another memory is another kernel to compile
@pytest.mark.parametrize("memory", [1, 3])
def test_other_memories(memory):
    f = forward_map("positive", 0.9, "relu", 12, 20, torch.float64)
    assert_agree(f, torch.zeros_like(f.v), Anderson(memory=memory, patience=2.5, worth=1.5), Relative(), 300, 0.9)


@pytest.mark.parametrize("stop", [Steps(0), Steps(9), Settled(7)], ids=str)
def test_rules_that_count(stop):
    f = forward_map("random", 0.7, "relu", 7, 40, torch.float64)
    triangular = AffineMap((f.factors[0].triu(1),), f.v, f.activation)
    assert_agree(triangular, torch.zeros_like(f.v), Picard(), stop, stop.limit(), 0.7)
    found = COMPILED(triangular, torch.zeros_like(f.v), Picard(), stop, stop.limit())
    assert (found.status == (Status.STEPS_DONE if isinstance(stop, Steps) else Status.CONVERGED)).all()


@pytest.mark.parametrize("solver", [Anderson(), Picard()], ids=str)
def test_every_status(solver):
    n = 5
    A = torch.eye(n, dtype=torch.float64)
    A[0, 0], A[1, 1] = 0.5, 3.0
    v = torch.zeros(5, n, dtype=torch.float64)
    v[0, 0] = v[3, 0] = 1.0  # converges
    v[1, 1] = 1.0  # grows
    v[2, 2] = 1.0  # x + 1: neither falls nor grows
    v[4, 3] = torch.nan
    f = AffineMap((A,), v, get_activation("relu"))
    found, plain = (loop(f, torch.zeros_like(v), solver, Absolute(1e-12), 90) for loop in (COMPILED, iterate))
    names = [Status(int(code)).name for code in found.status]
    growing = "DIVERGED" if isinstance(solver, Picard) else "MAX_STEPS"  # ever new jumps to the point that repels
    assert names == ["CONVERGED", growing, "MAX_STEPS", "CONVERGED", "NONFINITE"]
    assert torch.equal(found.steps, plain.steps) and torch.equal(found.status, plain.status)
    assert found.value.isfinite().all()


def test_overflow_is_not_finite():
    v = torch.tensor([[1.0, 1.0], [1e-3, 1e-3]])
    f = AffineMap((1e30 * torch.eye(2),), v, get_activation("identity"))
    found, plain = (loop(f, torch.zeros_like(v), Picard(), Absolute(1e-6), 50) for loop in (COMPILED, iterate))
    assert (found.status == Status.NONFINITE).all() and torch.equal(found.steps, plain.steps)
    assert torch.equal(found.value, plain.value) and found.value.isfinite().all()


def test_one_step_and_no_samples():
    f = forward_map("random", 0.7, "relu", 4, 3, torch.float64)
    found = COMPILED(f, torch.zeros_like(f.v), Anderson(), Relative(), 1)
    assert (found.status == Status.MAX_STEPS).all() and (found.steps == 1).all()
    empty = AffineMap(f.factors, f.v[:0], f.activation)
    found = COMPILED(empty, torch.zeros(0, 4, dtype=torch.float64), Anderson(), Relative(), 10)
    assert found.value.shape == (0, 4) and found.status.shape == (0,) and found.residuals.shape == (0, 0)


@pytest.mark.parametrize("batch", [50, 3])  # of few numbers the reference loop looks at longer blocks
def test_stagnation_at_rounding_level(batch):
    f = forward_map("random", 0.9, "relu", 30, batch, torch.float32)
    f = AffineMap(f.factors, 1e4 * f.v, f.activation)
    found, plain = (loop(f, torch.zeros_like(f.v), Picard(), Absolute(0.0), 300) for loop in (COMPILED, iterate))
    # Whether the last digit comes to rest or goes on changing depends on the order of the sums.
    for one in (found, plain):
        assert ((one.status == Status.STAGNATED) | (one.status == Status.CONVERGED)).all()
    same = found.status == plain.status
    assert int((found.steps - plain.steps)[same].abs().max()) <= 8
    assert ((found.value - plain.value).abs() <= 10 * f.rounding(plain.value, plain.value)[:, None] / 0.1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_does_not_depend_on_its_companions(dtype):
    f = forward_map("positive", 0.95, "relu", 19, 90, dtype)
    f = AffineMap(f.factors, f.v * 10.0 ** torch.randint(-3, 4, (90, 1)).to(dtype), f.activation)
    x0 = torch.zeros_like(f.v)
    together = COMPILED(f, x0, Anderson(), Relative(), 500)
    for rows in (slice(0, 1), slice(5, 8), slice(30, 71), slice(89, 90)):
        part = AffineMap(f.factors, f.v[rows], f.activation)
        alone = COMPILED(part, x0[rows], Anderson(), Relative(), 500)
        assert torch.equal(alone.value, together.value[rows]) and torch.equal(alone.steps, together.steps[rows])
        assert torch.equal(alone.status, together.status[rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads):
    f = forward_map("positive", 0.9, "relu", 130, 300, torch.float32)
    before = torch.get_num_threads()
    plain = COMPILED(f, torch.zeros_like(f.v), Anderson(), Relative(), 200)
    try:
        torch.set_num_threads(threads)
        found = COMPILED(f, torch.zeros_like(f.v), Anderson(), Relative(), 200)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.value, plain.value) and torch.equal(found.steps, plain.steps)


def test_residuals_are_found_when_asked_for():
    f = forward_map("positive", 0.9, "tanh", 9, 40, torch.float64)
    traced, late = (
        COMPILED(f, torch.zeros_like(f.v), Anderson(), Relative(), 200, trace=trace) for trace in (True, False)
    )
    torch.testing.assert_close(late.residuals, traced.residuals, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(late.last_residual, (f(late.value) - late.value).abs().amax(1))


def test_strided_matrices_and_vectors():
    f = forward_map("random", 0.7, "relu", 6, 10, torch.float64)
    wide = torch.zeros(12, 12, dtype=torch.float64)
    wide[::2, ::2] = f.factors[0]
    strided = AffineMap((wide[::2, ::2],), f.v.mT.contiguous().mT, f.activation)
    found, plain = (COMPILED(g, torch.zeros_like(f.v), Anderson(), Relative(), 99) for g in (strided, f))
    assert torch.equal(found.value, plain.value)


def test_samples_that_newton_takes_over_are_as_exact_as_plain_steps():
    A, n = 0.99 * state_matrix("ring", 64, 1.0, torch.Generator().manual_seed(0)), 64
    u = torch.randn(512, n, generator=torch.Generator().manual_seed(0))
    model = ImplicitModel.from_matrices(
        A.float(), torch.eye(n), torch.eye(n), executor="numba", stop=Absolute(3e-6), max_steps=3000
    )
    with torch.no_grad():
        found = model.equilibrium(u)
    A, v, x = A.float().double(), u.double(), found.value.double()
    for _ in range(20):  # Newton's method on dense systems
        z = x @ A.mT + v
        x = x - torch.linalg.solve(torch.eye(n) - (z > 0).double()[:, :, None] * A, x - torch.relu(z))
    assert (x - torch.relu(x @ A.mT + v)).abs().max() <= 1e-12
    plain = torch.zeros_like(u)
    for _ in range(2000):
        plain = torch.relu(plain @ A.float().mT + u)
    assert (found.value - x).abs().max() <= 2 * (plain - x).abs().max()


@pytest.mark.parametrize("executor", ["reference", "numba"])
def test_extrapolation_is_as_exact_as_plain_steps_where_rounding_ends_both(executor):
    generator = torch.Generator().manual_seed(0)
    A = torch.rand(20, 20, generator=generator)
    A = 0.99 * A / A.sum(1, keepdim=True)
    u = torch.randn(128, 20, generator=generator)
    model = ImplicitModel.from_matrices(A, torch.eye(20), torch.eye(20), executor=executor, stop=Absolute(3e-6))
    found = model.equilibrium(u)
    plain, exact = torch.zeros(128, 20), torch.zeros(128, 20, dtype=torch.float64)
    for _ in range(2000):
        plain = torch.relu(plain @ A.mT + u)
        exact = torch.relu(exact @ A.double().mT + u.double())
    error, best = ((value - exact).abs().amax() for value in (found.value, plain))
    assert error <= 2 * best
    stuck = found.status == Status.STAGNATED
    assert (stuck | found.converged).all()
    assert found.converged.all() if executor == "numba" else stuck.any()  # numba finishes them by elimination
    unit = torch.finfo(torch.float32).eps * found.value.detach().abs().amax(1)
    assert (found.residual[stuck] <= 3 * unit[stuck]).all()
    assert int(found.steps.max()) < 1000
