"""The Triton kernels against the reference loop: on a GPU, and by Triton's interpreter on the CPU (`test_gpu`)."""

import os

import pytest
import torch
from problems import state_matrix

from wellposed import ImplicitModel
from wellposed.activations import get_activation, leaky_relu
from wellposed.conditions.projections import project_rows
from wellposed.equilibrium import Absolute, Anderson, Picard, Relative, Status, Steps
from wellposed.equilibrium.affine import AffineMap, TransposedMap
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.method import SolveOptions
from wellposed.equilibrium.stopping import Settled
from wellposed.kernels.engine import TRITON
from wellposed.kernels.gpu.engine import STATES, run_kernel
from wellposed.kernels.layer import run_layer
from wellposed.kernels.spec import LINEAR, RELU, kernel_spec, kind_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
pytest.importorskip("triton")
gpu_launch = pytest.importorskip("wellposed.kernels.gpu.launch")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ACTIVATIONS = ["relu", leaky_relu(0.2), "tanh", "sigmoid", "identity"]
DTYPES = [torch.float32, torch.float64, torch.float16]
DTYPES += [] if INTERPRETED else [torch.bfloat16]  # the interpreter multiplies its bits
TILES = gpu_launch.Shape(16, 16, 16, 16, 4, 1)  # streams what is small enough for the chip
WIDE = gpu_launch.Shape(16, 16, 16, 16, 4, 1, wide=True)  # takes a launch a step, as for many states
KERNELS = {"resident": None, "streamed": TILES, "wide": WIDE}
SIZES = [(1, 5), (3, 40), (17, 1), (33, 5), (65, 5), (130, 5)]  # states, batch
CASES = [
    pytest.param(
        *(n, batch, activation, dtype),
        id=f"{n}-{batch}-{get_activation(activation).name}-{dtype}",
        marks=pytest.mark.slow if INTERPRETED and n > 100 and dtype != torch.float16 else (),
    )
    for i, (n, batch) in enumerate(
        SIZES if INTERPRETED else [*SIZES, (130, 40), (190, 300), (600, 70), (1024, 33), (1500, 70), (2048, 20)]
    )
    for j, activation in enumerate(ACTIVATIONS)
    for k, dtype in enumerate(DTYPES)
    if (i + j + 2 * k) % 5 == 0  # every size, activation and dtype, not every triple
    and n <= STATES[dtype.itemsize]
]


def forward_map(n, batch, activation="relu", dtype=torch.float32, norm=0.7, family="positive"):
    generator = torch.Generator().manual_seed(n)
    A = state_matrix(family, n, norm, generator).to(DEVICE, dtype)
    v = torch.randn(batch, n, dtype=torch.float64, generator=generator).to(DEVICE, dtype)
    return AffineMap((A,), v, get_activation(activation))


def adjoint_map(n, batch, activation="relu", dtype=torch.float32):
    f = forward_map(n, batch, activation, dtype)
    slope = f.activation.slope_at(f.v)
    g = torch.randn(batch, n, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    return TransposedMap((f.factors[0].mT,), slope, slope * g, 1.0)


def solve(f, solver, stop, max_steps=200, x0=None, shape=None, trace=False, points=False):
    affine, options = isinstance(f, AffineMap), SolveOptions(solver, stop, max_steps)
    v, d = (f.v, None) if affine else (f.offset, f.slope)
    start = torch.zeros_like(v) if x0 is None else x0
    kind = kind_of(f.activation) if affine else (LINEAR, 0.0)
    spec = kernel_spec(kind, options, start.dtype, points=points)
    with pytest.MonkeyPatch.context() as patch:
        if shape is not None:
            patch.setattr(gpu_launch, "choose_shape", lambda *sizes: shape)
        return run_kernel(f.factors[0], v, d, start, spec, trace=trace)


def exact(f):
    """Solves the same equation in float64."""
    wide = [part.double() for part in f.factors]
    if isinstance(f, TransposedMap):
        f = TransposedMap(tuple(wide), f.slope.double(), f.offset.double(), 1.0)
    else:
        f = AffineMap(tuple(wide), f.v.double(), f.activation)
    return iterate(f, torch.zeros_like(f.offset if isinstance(f, TransposedMap) else f.v), Anderson(),
                   Absolute(1e-12), 2000).value  # fmt: skip


def assert_agree(f, solver, stop, max_steps=200, x0=None, shape=None, norm=0.7):
    start = torch.zeros_like(f.v if isinstance(f, AffineMap) else f.offset) if x0 is None else x0
    found = solve(f, solver, stop, max_steps, x0, shape)
    plain = iterate(f, start, solver, stop, max_steps)
    assert torch.equal(found.status, plain.status)
    assert int((found.steps - plain.steps).abs().max()) <= 1
    rounding = f.rounding(plain.value, f(plain.value))[:, None] / (1 - norm)
    same = (found.steps == plain.steps)[:, None]  # a step more is a step closer, not rounding
    assert ((found.value - plain.value).abs() <= 10 * rounding)[same.expand_as(plain.value)].all()
    torch.testing.assert_close(found.value, plain.value, rtol=1e-3, atol=1e-3)


def assert_solves(f, stop, tolerance, shape=None, norm=0.7):
    """For short dtypes, in which the reference loop is no oracle."""
    found, truth = solve(f, Anderson(), stop, shape=shape), exact(f)
    assert (found.status <= Status.STAGNATED).all()
    size = truth.abs().amax(1, keepdim=True).clamp_min(1)
    error = (found.value.double() - truth).abs() / size
    assert float(error.max()) <= (tolerance + 8 * torch.finfo(found.value.dtype).eps) / (1 - norm)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("n", "batch", "activation", "dtype"), CASES)
def test_forward_and_adjoint(n, batch, activation, dtype):
    maps = [forward_map(n, batch, activation, dtype), adjoint_map(n, batch, activation, dtype)]
    for f in maps if not INTERPRETED else maps[n % 2 :][:1]:
        if dtype in (torch.float32, torch.float64):
            assert_agree(f, Anderson(), Relative())
        else:
            assert_solves(f, Absolute(2e-2), 2e-2)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("solver", [Anderson(), Anderson(memory=2), Picard()], ids=str)
@pytest.mark.parametrize("shape", KERNELS.values(), ids=KERNELS)
def test_both_kernels(solver, shape):
    f = forward_map(20, 18, "relu", norm=0.8)
    assert_agree(f, solver, Absolute(1e-3), x0=torch.randn_like(f.v), shape=shape, norm=0.8)
    assert_agree(adjoint_map(18, 3, "tanh"), solver, Absolute(1e-3), shape=shape)


@pytest.mark.parametrize("shape", KERNELS.values(), ids=KERNELS)
def test_slow_problems_in_float64(shape):
    # Many jumps, accepted and rejected.
    for family in ("ring",) if INTERPRETED else ("positive", "ring", "shift", "sparse"):
        f = forward_map(15, 12, "relu", torch.float64, 0.9, family)
        assert_agree(f, Anderson(memory=3), Absolute(1e-3), 400, shape=shape, norm=0.9)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("shape", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("stop", [Steps(0), Steps(9), Settled(7)], ids=str)
def test_rules_that_count(stop, shape):
    f = forward_map(7, 5, "relu", torch.float64)
    f = AffineMap((f.factors[0].triu(1),), f.v, f.activation)
    assert_agree(f, Picard(), stop, stop.limit(), shape=shape)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("shape", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("solver", [Anderson(), Picard()], ids=str)
def test_every_status(solver, shape):
    n, v = 5, torch.zeros(5, 5, dtype=torch.float64)
    A = torch.eye(n, dtype=torch.float64)
    A[0, 0], A[1, 1] = 0.5, 3.0
    v[0, 0] = v[3, 0] = 1.0  # converges
    v[1, 1] = 1.0  # grows
    v[2, 2] = 1.0  # x + 1: neither falls nor grows
    v[4, 3] = torch.nan
    f = AffineMap((A.to(DEVICE),), v.to(DEVICE), get_activation("relu"))
    found = solve(f, solver, Absolute(1e-6), 30, shape=shape)
    plain = iterate(f, torch.zeros_like(f.v), solver, Absolute(1e-6), 30)
    names = [Status(int(code)).name for code in found.status]
    growing = "DIVERGED" if isinstance(solver, Picard) else "MAX_STEPS"  # ever new jumps to the point that repels
    assert names == ["CONVERGED", growing, "MAX_STEPS", "CONVERGED", "NONFINITE"]
    assert torch.equal(found.steps, plain.steps) and torch.equal(found.status, plain.status)
    assert found.value.isfinite().all()


def test_the_flag_tells_of_failures():
    f = forward_map(6, 20, norm=0.9)
    for limit, raised in ((3, 1), (200, 0)):
        spec = kernel_spec((RELU, 0.0), SolveOptions(Picard(), Absolute(1e-4), limit), torch.float32)
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        gpu_launch.launch(f.factors[0], f.v, None, None, spec, flag)
        assert int(flag) == raised


def test_overflow_is_not_finite():
    v = torch.tensor([[1.0, 1.0], [1e-3, 1e-3]], device=DEVICE)
    f = AffineMap((1e30 * torch.eye(2, device=DEVICE),), v, get_activation("identity"))
    found, plain = solve(f, Picard(), Absolute(1e-6), 50), iterate(f, v * 0, Picard(), Absolute(1e-6), 50)
    assert (found.status == Status.NONFINITE).all() and torch.equal(found.steps, plain.steps)
    torch.testing.assert_close(found.value, plain.value, rtol=1e-6, atol=0)


def test_stagnation_at_rounding_level():
    """Errors of a map that turns them around end in cycles of two, however sums are rounded."""
    v = 1e4 * forward_map(30, 8).v
    f = AffineMap((-0.9 * torch.eye(30, device=DEVICE),), v, get_activation("identity"))
    found = solve(f, Picard(), Absolute(0.0), 300)
    assert (found.status == Status.STAGNATED).all()
    assert float((f(found.value) - found.value).abs().max()) < 0.1


@pytest.mark.parametrize("shape", KERNELS.values(), ids=KERNELS)
def test_points_are_accepted_again_and_their_images_are_the_results(shape):
    f, stop = adjoint_map(9, 5, dtype=torch.float64), Relative(1e-3)
    points = solve(f, Picard(), stop, shape=shape, points=True)
    images = solve(f, Picard(), stop, shape=shape)
    again = solve(f, Picard(), stop, x0=points.value, shape=shape)
    assert (points.steps == images.steps).all() and int(points.steps.min()) > 2 and (again.steps == 1).all()
    torch.testing.assert_close(f(points.value), images.value)
    torch.testing.assert_close(again.value, images.value)


@pytest.mark.parametrize("shape", KERNELS.values(), ids=KERNELS)
def test_a_sample_does_not_depend_on_its_companions(shape):
    f = forward_map(19, 21, norm=0.8)
    scale = 10.0 ** torch.randint(-3, 4, (21, 1), generator=torch.Generator().manual_seed(0))
    f = AffineMap(f.factors, f.v * scale.to(f.v), f.activation)
    together = solve(f, Anderson(), Relative(), shape=shape)
    assert len(together.steps.unique()) > 1
    for rows in (slice(0, 1), slice(5, 21)):
        alone = solve(AffineMap(f.factors, f.v[rows], f.activation), Anderson(), Relative(), shape=shape)
        assert torch.equal(alone.value, together.value[rows]) and torch.equal(alone.steps, together.steps[rows])


@pytest.mark.parametrize("trace", [False, True])
def test_residuals(trace):
    f = forward_map(9, 7, "tanh", torch.float64)
    found = solve(f, Anderson(), Relative(), trace=trace)
    plain = iterate(f, torch.zeros_like(f.v), Anderson(), Relative(), 200)
    seen, rest = plain.residuals.split(
        [found.residuals.shape[1], plain.residuals.shape[1] - int(found.steps.max())], 1
    )
    torch.testing.assert_close(found.residuals, seen, rtol=1e-6, atol=1e-12, equal_nan=True)
    assert rest.isnan().all()
    torch.testing.assert_close(found.last_residual, (f(found.value) - found.value).abs().amax(1))


def test_no_samples_and_strided_operands():
    f = forward_map(6, 10, dtype=torch.float64)
    empty = solve(AffineMap(f.factors, f.v[:0], f.activation), Anderson(), Relative(), 10)
    assert empty.value.shape == (0, 6) and empty.status.shape == (0,)
    wide = torch.zeros(12, 12, dtype=torch.float64, device=DEVICE)
    wide[::2, ::2] = f.factors[0]
    strided = AffineMap((wide[::2, ::2],), f.v.mT.contiguous().mT, f.activation)
    assert torch.equal(solve(strided, Anderson(), Relative()).value, solve(f, Anderson(), Relative()).value)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("n", [1, 7, 40] if INTERPRETED else [1, 7, 40, 190, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projection(n, dtype):
    projection = pytest.importorskip("wellposed.kernels.gpu.projection")
    W = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(DEVICE, dtype)
    W[: n // 3] *= 0.1 / n  # these rows stay as they are
    W[n // 2] *= 1e8
    W.requires_grad_()
    g = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    plain = project_rows(W, 0.8)
    plain.backward(g)
    found, levels = projection.project(W.detach(), 0.8)
    torch.testing.assert_close(found, plain.detach(), rtol=1e-6, atol=8 * torch.finfo(dtype).eps)
    assert torch.equal(found[: n // 3], W.detach()[: n // 3])
    assert float(found.double().abs().sum(1).max()) <= 0.8
    torch.testing.assert_close(projection.project_backward(W.detach(), levels, g), W.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("condition", ["inf", "weighted"])
def test_a_whole_layer(condition):
    torch.manual_seed(3)
    options = {"bias": True, "condition": condition, "stop": Absolute(1e-6), "on_failure": "ignore"}
    model = ImplicitModel(5, 4, 6, executor="reference", **options).to(DEVICE, torch.float64)
    with torch.no_grad():
        model.state.raw.abs_().mul_(3)
    u, g = (torch.randn(7, k, dtype=torch.float64, device=DEVICE) for k in (5, 4))
    spec, radius = ImplicitModel(5, 4, 6, **options).to(DEVICE, torch.float64).spec(), model.state.row_radius
    W = model.A if radius is None else model.state.raw
    rest = W, model.B, model.C, model.D, model.bias
    u.requires_grad_()
    wanted = [u, *model.parameters()]
    truth = model(u)
    found = run_layer(TRITON, spec, radius, u, *rest)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)
    expected, ours = (torch.autograd.grad(y, wanted, g, allow_unused=True) for y in (truth, found))
    for fast, plain in zip(ours, expected, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        same = run_layer(TRITON, spec, radius, u, *rest)
    assert torch.equal(same, found)
