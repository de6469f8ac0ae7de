import pytest
import torch
from problems import state_matrix

from wellposed.activations import get_activation
from wellposed.equilibrium import Absolute, Anderson, Broyden, Newton, Picard, Relative, fixed_point, loop
from wellposed.equilibrium.affine import AffineMap, TransposedMap
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.maps import FunctionMap, Packing, max_norm


def affine_map(n, batch, norm=0.95, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A = state_matrix("positive", n, norm, generator)
    scale = 10.0 ** torch.randint(-3, 4, (batch, 1), generator=generator)
    v = scale * torch.randn(batch, n, dtype=torch.float64, generator=generator)
    return AffineMap((A,), v, get_activation("relu"))


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Newton()], ids=str)
def test_judging_steps_together_and_dropping_rows_changes_nothing(solver, monkeypatch):
    f = affine_map(12, 40)
    monkeypatch.setattr(AffineMap, "min_size_to_gather", 1 << 30)
    monkeypatch.setattr(AffineMap, "steps_per_check", 1)
    reference = iterate(f, torch.zeros_like(f.v), solver, Relative(1e-9), 2000)
    monkeypatch.setattr(AffineMap, "min_size_to_gather", 0)
    monkeypatch.setattr(AffineMap, "steps_per_check", 8)
    found = iterate(f, torch.zeros_like(f.v), solver, Relative(1e-9), 2000)
    assert len(set(reference.steps.tolist())) > 3
    assert torch.equal(found.steps, reference.steps) and torch.equal(found.status, reference.status)
    torch.testing.assert_close(found.value, reference.value, rtol=1e-12, atol=1e-14)
    width = min(found.residuals.shape[1], reference.residuals.shape[1])
    torch.testing.assert_close(
        found.residuals[:, :width], reference.residuals[:, :width], rtol=1e-6, atol=1e-13, equal_nan=True
    )


def test_rows_really_leave_the_computation():
    sizes = []

    def f(x, rate, u):
        sizes.append(len(x))
        return rate * x + u

    rate = torch.tensor([[0.0], [0.1], [0.2], [0.99]], dtype=torch.float64)
    found = fixed_point(f, torch.zeros_like(rate), rate, torch.ones_like(rate), solver="picard", max_steps=5000)
    assert sizes[0] == 4 and sizes[-2] == 1  # the last call is the differentiable one
    torch.testing.assert_close(found.value, 1 / (1 - rate), rtol=1e-7, atol=0)


@pytest.mark.parametrize("backward", [False, True])
def test_trace_holds_the_residual_of_every_step_and_nan_after(backward):
    f, row = affine_map(6, 10), 3
    x = torch.zeros_like(f.v)
    if backward:
        f = TransposedMap((f.factors[0].mT,), (f.v > 0).double(), f.v.clamp_min(0), 1.0)
    found = iterate(f, x, Picard(), Relative(1e-8), 1000)
    for k in range(int(found.steps[row])):
        torch.testing.assert_close(found.residuals[row, k], (f(x) - x)[row].abs().max())
        x = f(x)
    assert found.residuals[row, int(found.steps[row]) :].isnan().all()
    assert torch.equal(found.value[row], x[row])  # the image of the last point


def test_a_contraction_reports_the_image_of_the_accepted_point_and_other_maps_the_point():
    A = 0.2 * state_matrix("random", 8, 1.0, torch.Generator().manual_seed(0))
    v = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x, identity = torch.zeros_like(v), torch.eye(8, dtype=torch.float64)
    for _ in range(20):  # Newton's method on a dense system
        z = x @ A.mT + v
        x = x - torch.linalg.solve(identity - (z > 0).double()[:, :, None] * A, x - torch.relu(z))
    start, stop = torch.zeros_like(v), Absolute(1e-3)
    contraction = iterate(AffineMap((A,), v, get_activation("relu")), start, Picard(), stop, 100)
    packing = Packing.of(start)
    general = iterate(
        FunctionMap(lambda x, v: torch.relu(x @ A.mT + v), (v,), packing), start, Picard(), stop, 100
    )
    assert torch.equal(contraction.last_residual, general.last_residual)
    nearer, further = max_norm(contraction.value - x), max_norm(general.value - x)
    assert (nearer <= 0.2 / 0.8 * contraction.last_residual).all()  # |f(x) - x*| <= k / (1 - k) |f(x) - x|
    assert (further >= general.last_residual / 1.2).all()  # |x - x*| >= |f(x) - x| / (1 + k)


def test_picard_converges_at_the_spectral_radius_of_the_linearisation():
    generator = torch.Generator().manual_seed(3)
    A = state_matrix("random", 20, 0.99, generator)
    u = torch.randn(1, 20, dtype=torch.float64, generator=generator)
    found = fixed_point(
        lambda x, u: torch.tanh(x @ A.mT + u), torch.zeros_like(u), u, solver="picard", stop=Relative(1e-14)
    )
    slope = 1 - found.value.detach()[0] ** 2
    radius = torch.linalg.eigvals(slope[:, None] * A).abs().max()
    trace = found.residuals[0]
    trace = trace[~trace.isnan()]
    trace = trace[(trace > 1e-12) & (trace < 1e-4)]
    # complex eigenvalues make single ratios oscillate: fit a line
    k = torch.arange(len(trace), dtype=torch.float64)
    slope_fit = ((k - k.mean()) * (trace.log() - trace.log().mean())).sum() / ((k - k.mean()) ** 2).sum()
    assert abs(float(slope_fit.exp()) - float(radius)) < 0.05 * float(radius)


def test_newton_converges_quadratically():
    found = fixed_point(
        lambda x, u: torch.tanh(2 * x) * 0.9 + u,
        torch.full((1, 1), 0.9, dtype=torch.float64),
        torch.full((1, 1), 0.3, dtype=torch.float64),
        solver="newton",
        stop=Relative(1e-15),
    )
    trace = found.residuals[0]
    trace = trace[~trace.isnan()]
    trace = trace[trace > 1e-13]
    orders = (trace[2:] / trace[1:-1]).log() / (trace[1:-1] / trace[:-2]).log()
    assert float(orders[-1]) == pytest.approx(2, abs=0.2)


def test_gradient_flows_through_dropped_rows(monkeypatch):
    rate = torch.tensor([[0.0], [0.1], [0.2], [0.9]], dtype=torch.float64, requires_grad=True)
    u = torch.ones(4, 1, dtype=torch.float64)
    for gradient in ("unrolled", "implicit"):
        found = fixed_point(
            lambda x, r, u: r * x + u,
            torch.zeros_like(u),
            rate,
            u,
            solver="picard",
            gradient=gradient,
            max_steps=999,
        )
        (grad,) = torch.autograd.grad(found.value.sum(), rate)
        torch.testing.assert_close(grad, 1 / (1 - rate.detach()) ** 2, rtol=1e-6, atol=1e-8)


def test_a_slow_solve_in_float32_is_not_taken_for_one_that_stands_still():
    generator = torch.Generator().manual_seed(0)
    A, u = 0.99 * torch.eye(20).roll(1, 0), torch.randn(128, 20, generator=generator)
    found = fixed_point(
        lambda x, u: torch.relu(x @ A.mT + u),
        torch.zeros_like(u),
        u,
        solver="picard",
        stop=Absolute(3e-6),
        max_steps=4000,
    )
    assert found.converged.all() and int(found.steps.max()) > 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leaving_an_unstable_state_is_no_run_off(dtype):
    u = torch.tensor([[1e-4], [1e-3], [1e-1]], dtype=dtype)
    found = fixed_point(lambda x, u: torch.tanh(3 * x + u), torch.zeros_like(u), u, solver="picard")
    assert found.converged.all() and (found.value > 0.99).all()


def rotating(x, u):
    """A map with slow samples, fast ones, one that runs off and one that leaves the numbers."""
    rate = torch.linspace(-0.9, 0.98, x.shape[1], dtype=x.dtype)
    shift = u * torch.ones_like(x)
    mixed = torch.tanh(x @ torch.linspace(-1, 1, 25, dtype=x.dtype).reshape(5, 5)) / 2
    grown = torch.where(u > 5, x + 1, rate * torch.tanh(x.roll(1, 1)) + mixed * rate / 9 + shift)
    return torch.where(u > 7, x * 1e200 + 1e200, grown)


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden()], ids=lambda solver: type(solver).__name__)
def test_how_long_a_map_takes_changes_nothing(solver, monkeypatch):
    u = torch.cat([torch.linspace(-2, 2, 20, dtype=torch.float64), torch.tensor([6.0, 8.0])])[:, None]
    results = []
    for limit in (0.0, torch.inf):  # every map is slow, every map is cheap
        monkeypatch.setattr(loop, "CHEAP", limit)
        start = torch.zeros(22, 5, dtype=torch.float64)
        results.append(fixed_point(rotating, start, u, solver=solver, max_steps=150, on_failure="ignore"))
    slow, cheap = results
    assert torch.equal(slow.status, cheap.status) and torch.equal(slow.steps, cheap.steps)
    assert torch.equal(slow.value, cheap.value)
    torch.testing.assert_close(slow.residuals, cheap.residuals, rtol=0, atol=0, equal_nan=True)
    assert not slow.converged[-2:].any() and slow.converged[:-2].all()


def test_maps_that_draw_are_evaluated_once_a_step(monkeypatch):
    monkeypatch.setattr(loop, "CHEAP", torch.inf)
    counts = {}
    for draws in (False, True):
        calls = []

        def f(x, draws=draws, calls=calls):
            calls.append(torch.rand(()) if draws else 0)
            return 0.5 * x + 1

        steps = int(fixed_point(f, torch.zeros(2, 1), solver="picard", gradient="phantom").steps.max())
        counts[draws] = len(calls) - steps
    assert counts[True] < counts[False]
