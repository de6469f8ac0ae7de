"""A small model as one compiled call each way: the same numbers and reports as by single operations."""

import warnings

import pytest
import torch

import wellposed.kernels.cpu.engine as cpu_engine
from wellposed import Absolute, Implicit, ImplicitModel, Picard, Relative
from wellposed.errors import ConvergenceError, ConvergenceWarning, InputError

SHAPES = {  # inputs, outputs, states, batch
    "wide": (20, 10, 20, 70),
    "one sample": (3, 50, 7, 1),
    "more columns than lanes": (70, 33, 45, 17),
    "several blocks": (4, 3, 5, 300),
}


@pytest.fixture
def calls(monkeypatch):
    """The directions of the calls of the fused kernel."""
    met, run = [], cpu_engine.run_fused
    monkeypatch.setattr(
        cpu_engine,
        "run_fused",
        lambda plan, rest, *args: met.append(rest is plan.backward) or run(plan, rest, *args),
    )
    return met


def model(shape="wide", dtype=torch.float64, **options):
    inputs, outputs, states, batch = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    options = {"kappa": 0.9, "bias": True} | options
    implicit = ImplicitModel(inputs, outputs, states, **options).to(dtype)
    with torch.no_grad():
        for parameter in implicit.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=dtype, generator=generator) / 2)
    return implicit, torch.randn(batch, inputs, dtype=dtype, generator=generator)


def results(implicit, u):
    """Outputs, and the gradients of inputs and parameters."""
    u = u.clone().requires_grad_()
    y = implicit(u)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return y.detach(), *torch.autograd.grad((weights * y).sum(), [u, *implicit.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "tanh", "bias": False}, {"activation": "leaky_relu", "feedthrough": False}],
    ids=["relu", "tanh without bias", "leaky_relu without D"],
)
def test_numbers_are_those_of_single_operations(options, shape, dtype, calls, monkeypatch):
    implicit, u = model(shape, dtype, stop=Absolute(1e-6 if dtype == torch.float32 else 1e-12), **options)
    fused = results(implicit, u)
    assert calls == [False, True]
    monkeypatch.setattr(cpu_engine, "FUSED", 0)
    single = results(implicit, u)
    assert calls == [False, True]
    tolerance = 2e-5 if dtype == torch.float32 else 1e-11
    for found, wanted in zip(fused, single, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wanted", ["u", "state.raw", "B", "C", "D", "bias"])
def test_any_single_gradient(wanted):
    implicit, u = model()
    names = ["u", *(name for name, _ in implicit.named_parameters())]
    everything = dict(zip(names, results(implicit, u)[1:], strict=True))
    implicit.requires_grad_(False)
    leaf = u.requires_grad_() if wanted == "u" else implicit.get_parameter(wanted).requires_grad_()
    y = implicit(u)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    (found,) = torch.autograd.grad((weights * y).sum(), [leaf])
    assert torch.equal(found, everything[wanted])


def test_tensors_with_gaps(calls):
    implicit, u = model()
    with torch.no_grad():
        implicit.B = torch.nn.Parameter(implicit.B.detach().t().contiguous().t())
    wide = torch.stack([u, u], -1)
    assert torch.equal(implicit(wide[..., 0]), implicit(u))
    for found, wanted in zip(results(implicit, wide[..., 0]), results(implicit, u), strict=True):
        assert torch.equal(found, wanted)
    assert calls == [False, False, False, True, False, True]


def test_slow_samples_go_to_newton_as_ever(calls, monkeypatch):
    implicit, u = model(kappa=1 - 1e-7, stop=Relative(1e-12), max_steps=100_000)
    with torch.no_grad():
        implicit.state.raw.copy_(torch.eye(20).roll(1, 0))
        implicit.bias.fill_(0.1)
    fused = results(implicit, u)
    assert calls == [False, True]
    monkeypatch.setattr(cpu_engine, "FUSED", 0)
    for found, wanted in zip(fused, results(implicit, u), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8 * float(wanted.abs().max()))


@pytest.mark.parametrize("stage", ["equilibrium", "adjoint solve"])
def test_failed_solves_are_reported(stage, calls):
    gradient = {"max_steps": 2} if stage == "equilibrium" else {"gradient": Implicit(solver=Picard(), max_steps=2)}
    implicit, u = model(solver="picard", stop=Absolute(1e-12), **gradient)
    with pytest.warns(ConvergenceWarning, match=f"{stage}: 70 of 70 samples.*worst residual"):
        results(implicit, u)
    implicit.on_failure = "raise"
    with pytest.raises(ConvergenceError, match=stage):
        results(implicit, u)
    assert calls


def test_values_that_are_not_finite_are_named():
    implicit, u = model()
    u[3, 2] = torch.nan
    with pytest.raises(InputError, match=r"u must be finite; received 1 of .* the first at \(3, 2\)"):
        implicit(u)


@pytest.mark.parametrize("name", ["state.raw", "B", "bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("batch", [70, 0])
def test_weights_that_are_not_finite_are_named(name, value, batch):
    implicit, u = model()
    with torch.no_grad():
        implicit.get_parameter(name).view(-1)[1] = value
    with pytest.warns(ConvergenceWarning, match=f"weights: '{name}' holds 1 of"):
        y = implicit(u[:batch])
    assert y.shape == (batch, 10) and bool(y.isnan().all())


def test_outputs_that_are_not_finite_are_reported():
    implicit, u = model()
    with torch.no_grad():
        implicit.C[0, 0] = torch.inf
    with pytest.warns(ConvergenceWarning, match="outputs: .* of 70 samples have NaN or infinite outputs"):
        implicit(u)


def test_products_beyond_the_dtype_are_no_fault_of_the_inputs():
    implicit, u = model(dtype=torch.float32)
    with torch.no_grad():
        implicit.B.fill_(1e38)
    with pytest.warns(ConvergenceWarning, match="equilibrium: 70 of 70 samples"):
        implicit(u.abs() + 100)


def test_gradients_of_gradients():
    implicit, u = model("one sample", activation="tanh")
    u.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.autograd.gradgradcheck(implicit, u)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_slow_samples_are_finished_within_the_call(activation, calls, monkeypatch):
    """Around a shift extrapolation brings little: half of the samples are solved by elimination, exactly."""

    def leave(*_):
        raise AssertionError("a sample has left the kernel")

    monkeypatch.setattr(cpu_engine, "newton_handover", leave)
    generator = torch.Generator().manual_seed(0)
    u, C = torch.randn(64, 20, generator=generator), torch.randn(3, 20, generator=generator)
    matrices = 0.99 * torch.eye(20).roll(1, 0), torch.eye(20), C
    options = {"activation": activation, "max_steps": 3000}
    fused = ImplicitModel.from_matrices(*matrices, executor="numba", stop=Absolute(3e-6), **options)
    wide = ImplicitModel.from_matrices(
        *(matrix.double() for matrix in matrices), executor="reference", stop=Absolute(1e-12), **options
    )
    for fast, exact in zip(results(fused, u), results(wide, u.double()), strict=True):
        assert (fast - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert calls == [False, True]
    solution = fused.equilibrium(u)
    limit = torch.finfo(torch.float32).eps * solution.value.detach().abs().amax(1).clamp_min(25)
    assert (solution.residual <= 2 * limit).all() and int(solution.steps.max()) > cpu_engine.handover_after(20)
