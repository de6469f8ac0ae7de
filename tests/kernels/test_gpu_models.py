"""Models on a GPU: agreement with the reference executor, gradients, waits and memory."""

import warnings

import pytest
import torch

from wellposed import Absolute, ImplicitModel, Relative
from wellposed.activations import leaky_relu
from wellposed.equilibrium import Anderson, Status
from wellposed.errors import ConvergenceError, ConvergenceWarning, InputError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")


def model(states=20, dtype=torch.float32, **options):
    torch.manual_seed(3)
    found = ImplicitModel(5, 4, states, **options)
    with torch.no_grad():
        found.state.raw.abs_().mul_(3)
    return found.to("cuda", dtype)


def inputs(batch=70, dtype=torch.float32):
    return torch.randn(batch, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to("cuda", dtype)


def gradients(found, u, y):
    found.zero_grad()
    u.grad = None
    (y * torch.linspace(-1, 1, 4, device="cuda", dtype=y.dtype)).sum().backward()
    return [u.grad.clone(), *(p.grad.clone() for p in found.parameters())]


@pytest.mark.parametrize("states", [20, 150])
@pytest.mark.parametrize(
    "activation",
    ["relu", leaky_relu(0.1), "tanh", "sigmoid", "identity"],
    ids=lambda phi: getattr(phi, "name", phi),
)
def test_outputs_and_gradients_agree_with_the_reference(states, activation):
    results = []
    for executor in ("triton", "reference"):
        fast = model(states, activation=activation, bias=True, kappa=0.8, executor=executor, stop=Absolute(1e-6))
        u = inputs().requires_grad_()
        y = fast(u)
        results.append([y.detach(), *gradients(fast, u, y)])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


@pytest.mark.parametrize(("states", "batch"), [(1030, 70), (2048, 300), (5000, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_models_agree_with_a_dense_solve(states, batch, dtype):
    """The oracle shares no step with the kernels: the equation on the active states is solved by elimination."""
    options = {"bias": True, "kappa": 0.9, "executor": "triton", "stop": Absolute(1e-6)}
    wide, u = model(states, dtype, **options), inputs(batch, dtype).requires_grad_()
    y = wide(u)
    found = [y.detach(), *gradients(wide, u, y)]
    x = wide.equilibrium(u).value.detach().double()
    A, B, C, D, b = (getattr(wide, name).detach().double() for name in ("A", "B", "C", "D", "bias"))
    rows = slice(0, 5)
    inputs_, z = u.detach().double(), x @ A.T + u.detach().double() @ B.T + b
    eye, g = (
        torch.eye(states, dtype=torch.float64, device="cuda"),
        torch.linspace(-1, 1, 4, device="cuda").double(),
    )
    for k in range(*rows.indices(batch)):
        active = (z[k] > 0).double()
        solved = torch.linalg.solve(eye - active[:, None] * A, active * (inputs_[k] @ B.T + b))
        assert float((x[k] - solved).abs().max()) <= 1e-5 * float(solved.abs().max())
        output = solved @ C.T + inputs_[k] @ D.T
        assert float((found[0][k].double() - output).abs().max()) <= 1e-4 * float(output.abs().max())
        adjoint = torch.linalg.solve(eye - (active[:, None] * A).T, g @ C)
        by_u = (active * adjoint) @ B + g @ D
        assert float((found[1][k].double() - by_u).abs().max()) <= 1e-4 * float(by_u.abs().max())


def test_a_wide_solve_is_captured():
    """All steps are in the graph; those that no sample needs do nothing."""
    wide, u = model(1100, kappa=0.8, on_failure="ignore", max_steps=100), inputs()
    truth, side = wide(u).detach(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        wide(u)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = wide(u)
    graph.replay()
    assert torch.equal(y, truth)
    u.mul_(0.5)
    graph.replay()
    torch.testing.assert_close(y, wide(u).detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    options = {"kappa": 0.8, "activation": "tanh"}  # no corners, across which rounding moves states or entries
    narrow = model(dtype=dtype, stop=Relative(1e-10), **options)  # never below the rounding of a dtype
    wide = model(executor="reference", **options).double()
    with torch.no_grad():
        narrow.state.raw.mul_(0.05)
        for target, source in zip(wide.parameters(), narrow.parameters(), strict=True):
            target.copy_(source)
    u = inputs(dtype=dtype).requires_grad_()
    v = u.detach().double().requires_grad_()
    ours, truth = narrow(u), wide(v)
    tolerance = 1e-8 if dtype == torch.float64 else 64 * torch.finfo(dtype).eps
    found, expected = gradients(narrow, u, ours), gradients(wide, v, truth)
    for fast, plain in zip([ours, *found], [truth, *expected], strict=True):
        assert fast.dtype == dtype
        assert float((fast.double() - plain).abs().max()) <= tolerance * float(plain.abs().max())


@pytest.mark.parametrize("condition", ["weighted", "spectral"])
def test_other_conditions(condition):
    results = []
    for executor in ("auto", "reference"):
        fast, u = model(condition=condition, executor=executor, stop=Absolute(1e-6)), inputs().requires_grad_()
        y = fast(u)
        results.append([y.detach(), *gradients(fast, u, y)])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-4)


def test_second_derivatives():
    fast = model(6, torch.float64, activation="tanh", stop=Absolute(1e-13), max_steps=2000)
    u = inputs(3, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(fast, (u,))
    assert torch.autograd.gradgradcheck(fast, (u,))


def test_equilibrium_with_a_warm_start_and_residuals():
    fast = model(40, stop=Relative(1e-5))
    u = inputs()
    cold = fast.equilibrium(u)
    warm = fast.equilibrium(u, cold.value.detach())
    assert cold.converged.all() and warm.converged.all() and int(warm.steps.max()) <= 2
    assert cold.residuals.shape[1] == int(cold.steps.max())
    torch.testing.assert_close(warm.value, cold.value, rtol=1e-4, atol=1e-4)
    cold.value.sum().backward()
    assert cold.adjoint is not None and cold.adjoint.converged.all()


@pytest.mark.parametrize(
    ("states", "options", "text"),
    [
        (20, {}, "triton: relu, float32, 20 states, batch 70, Anderson, A on the chip"),
        (
            150,
            {"solver": "picard"},
            "triton: relu, float32, 150 states, batch 70, Picard, A in tiles from the cache",
        ),
        (
            6,
            {"solver": Anderson(memory=9)},
            "not triton: Anderson with a memory beyond 6 has no kernel on the GPU",
        ),
        (6, {"executor": "numba"}, "not numba: device cuda has no kernel of numba"),
        (1030, {}, "triton: relu, float32, 1030 states, batch 70, Anderson, a product of all samples a step"),
    ],
)
def test_explain(states, options, text):
    assert text in model(states, **options).explain(inputs()).splitlines()


def test_forced_kernels():
    u = inputs()
    assert torch.equal(model(executor="triton")(u), model()(u))
    with pytest.raises(InputError, match="device cuda has no kernel of numba"):
        model(executor="numba")(u)
    with pytest.raises(InputError, match="solver Broyden has no kernel"):
        model(executor="triton", solver="broyden")(u)


def test_failures_are_told():
    u = inputs()
    with pytest.warns(ConvergenceWarning, match="equilibrium: 70 of 70 samples"):
        model(max_steps=3, solver="picard")(u)
    with pytest.raises(ConvergenceError, match="max_steps was reached"):
        model(max_steps=3, solver="picard", on_failure="raise")(u)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(max_steps=3, solver="picard", on_failure="ignore")(u)
    found = model(max_steps=3, on_failure="ignore").equilibrium(u)
    assert (found.status == Status.MAX_STEPS).all()


def test_inputs_must_be_finite():
    u = inputs()
    u[3, 1] = torch.nan
    with pytest.raises(InputError, match="u"):
        model()(u)
    with pytest.raises(InputError, match="u"):
        model().equilibrium(u)


@pytest.mark.parametrize("on_failure", ["ignore", "warn"])
def test_nothing_is_copied_to_the_host(on_failure):
    # The wait for the alarm of "warn" copies nothing, so that this mode does not notice it.
    fast, u = model(bias=True, on_failure=on_failure), inputs().requires_grad_()
    g = torch.ones(70, 4, device="cuda")
    fast(u).backward(g)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast(u).backward(g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_in_a_captured_graph():
    fast, u = model(on_failure="ignore"), inputs()
    with torch.no_grad():
        expected = fast(u)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(u)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


def test_a_training_step_in_a_captured_graph():
    u, target, losses = inputs(), torch.ones(70, 4, device="cuda"), []
    for captured in (False, True):
        fast = model(on_failure="ignore")
        optimiser = torch.optim.SGD(fast.parameters(), lr=0.01)

        def train(fast=fast, optimiser=optimiser):
            optimiser.zero_grad(set_to_none=True)
            loss = (fast(u) - target).square().mean()
            loss.backward()
            optimiser.step()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                loss = train()
        for _ in range(5):
            if captured:
                graph.replay()
            else:
                loss = train()
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_memory_does_not_grow_with_steps():
    peaks, steps = [], []
    for kappa in (0.3, 0.95):  # beyond, models are computed in float64
        fast, u = model(190, kappa=kappa, max_steps=3000), inputs(1024)
        steps.append(int(fast.equilibrium(u).steps.max()))
        fast(u).sum().backward()
        fast.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fast(u).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert steps[1] > 2 * steps[0] and peaks[1] <= 1.01 * peaks[0]
