"""Solves end by the error, not by the residual alone: at any scale, in saturation, and where gains are large.

The oracles are dense float64 solves that share no code with the library.
"""

import warnings

import pytest
import torch
from torch import Tensor

from wellposed import ImplicitModel, ImplicitRNN
from wellposed.equilibrium.stopping import Absolute

EXECUTORS = ("auto", "reference")
PHI = {
    "relu": (torch.relu, lambda z: (z > 0).double()),
    "tanh": (torch.tanh, lambda z: 1 / torch.cosh(z) ** 2),
    "sigmoid": (torch.sigmoid, lambda z: torch.sigmoid(z) * torch.sigmoid(-z)),
}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def newton(A: Tensor, v: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Solves ``x = phi(Ax + v)`` in float64 by dense Newton steps; returns x and the slopes."""
    phi, slope = PHI[activation]
    x, identity = torch.zeros_like(v), torch.eye(len(A)).double()
    for _ in range(60):
        z = x @ A.T + v
        r = phi(z) - x
        if float(r.abs().max()) <= 1e-15 * float(x.abs().max()):
            break
        x = x + torch.linalg.solve(identity - slope(z)[:, :, None] * A, r)
    z = x @ A.T + v
    return phi(z), slope(z)


def off(found: Tensor, truth: Tensor) -> float:
    """Returns the largest difference relative to the largest entry."""
    return float((found.double() - truth).abs().max() / truth.abs().max())


def matrices(n: int, p: int, q: int, norm: float, kind: str, seed: int) -> list[Tensor]:
    """Draws A with rows of an exact l1 norm, B, C, and a bias in float32."""
    torch.manual_seed(seed)
    A = torch.randn(n, n).double()
    A = A.abs() if kind == "positive" else A
    A = A / A.abs().sum(1, keepdim=True) * norm
    B, C = torch.randn(n, p).double() / p**0.5, torch.randn(q, n).double() * 0.1 / n**0.5
    bias = torch.full((n,), 0.5 if kind == "positive" else 0.1)
    return [A.float(), B.float(), C.float(), bias]


def seen_scales(dtype: torch.dtype) -> list[int]:
    """Exponents of two up to about 1e30 in float32 and 1e290 in float64."""
    return [-100, -61, -30, -7, 5, 40, 77, 100] if dtype == torch.float32 else [-960, -333, -40, 9, 500, 960]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kappa", [0.5, 0.95, 0.99])
def test_positively_homogeneous(executor: str, dtype: torch.dtype, kappa: float) -> None:
    torch.manual_seed(0)
    model = ImplicitModel(5, 3, 24, kappa=kappa, executor=executor).to(dtype)
    with torch.no_grad():
        model.state.raw.mul_(24)
        model.state.raw.abs_()
    u = torch.randn(6, 5, dtype=dtype)
    y, x = model(u).detach(), model.equilibrium(u).value.detach()
    for exponent in seen_scales(dtype):
        scale = 2.0**exponent
        assert torch.equal(model(u * scale).detach(), y * scale), exponent
        assert torch.equal(model.equilibrium(u * scale).value.detach(), x * scale), exponent
    few = 16 * torch.finfo(dtype).eps / (1 - kappa) + (2e-10 if dtype == torch.float64 else 0)  # the tolerance
    for scale in (1e-30, 1e-9, 3.0, 1e11, 1e30) if dtype == torch.float32 else (1e-290, 1e-70, 3.0, 1e290):
        scaled = model(u * scale).detach().double() / scale
        assert off(scaled, y.double()) <= few, scale


@pytest.mark.parametrize("executor", EXECUTORS)
def test_homogeneous_sequences_and_forms(executor: str) -> None:
    torch.manual_seed(1)
    rnn = ImplicitRNN(3, 4, 16, executor=executor, batch_first=True)
    s = torch.randn(2, 5, 3)
    y = rnn(s)[0].detach()
    form = rnn.cell(0).form()
    u = torch.randn(4, 7)
    z = form(u)
    for exponent in seen_scales(torch.float32):
        assert torch.equal(rnn(s * 2.0**exponent)[0].detach(), y * 2.0**exponent), exponent
        assert torch.equal(form(u * 2.0**exponent), z * 2.0**exponent), exponent


@pytest.mark.covering
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("bias", [-31.0, -25.0, -12.0, 12.0, 25.0])
@pytest.mark.parametrize("activation", ["sigmoid", "tanh"])
def test_saturated_states(executor: str, bias: float, activation: str) -> None:
    A, B, C, _ = matrices(6, 2, 3, 0.9, "positive", 2)
    bias = bias / 2 if activation == "tanh" else bias
    b = torch.full((6,), bias)
    model = ImplicitModel.from_matrices(A, B, C, bias=b, activation=activation, executor=executor)
    u = torch.rand(4, 2)
    y = model(u)
    y.sum().backward()
    wide = [part.double() for part in (A, B, C)]
    x, slope = newton(wide[0], u.double() @ wide[1].T + b.double(), activation)
    assert off(y.detach(), x @ wide[2].T) <= 1e-5
    systems = torch.eye(6).double() - slope[:, :, None] * wide[0]
    w = torch.linalg.solve(systems.mT, torch.ones(4, 3).double() @ wide[2])
    assert off(model.bias.grad, (slope * w).sum(0)) <= 2e-5


@pytest.mark.covering
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", ["positive", "signed"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_gradients_of_a_layer_near_the_edge(executor: str, kind: str, activation: str) -> None:
    A, B, C, bias = matrices(300, 8, 5, 0.99, kind, 3)
    model = ImplicitModel.from_matrices(A, B, C, bias=bias, activation=activation, executor=executor)
    u, g = torch.randn(6, 8, requires_grad=True), torch.randn(6, 5)
    y = model(u)
    y.backward(g)
    A, B, C = A.double(), B.double(), C.double()
    x, slope = newton(A, u.detach().double() @ B.T + bias.double(), activation)
    w = torch.linalg.solve((torch.eye(300).double() - slope[:, :, None] * A).mT, g.double() @ C)
    adjoint = slope * w
    assert off(y.detach(), x @ C.T) <= 2e-5
    pairs = [
        (model.state.raw.grad, adjoint.T @ x),
        (model.B.grad, adjoint.T @ u.detach().double()),
        (model.C.grad, g.double().T @ x),
        (model.bias.grad, adjoint.sum(0)),
        (u.grad, adjoint @ B),
    ]
    for found, truth in pairs:
        assert off(found, truth) <= 2e-5


def through_time(A: Tensor, B: Tensor, C: Tensor, bias: Tensor, s: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Differentiates a recurrent ReLU model by dense solves in float64."""
    A, B, C, bias, s, g = (part.detach().double() for part in (A, B, C, bias, s, g))
    hidden, p, kept = torch.zeros(len(s), len(C)).double(), s.shape[2], []
    for t in range(s.shape[1]):
        u = torch.cat([s[:, t], hidden], 1)
        x, slope = newton(A, u @ B.T + bias, "relu")
        kept.append((u, x, slope))
        hidden = x @ C.T
    found = {
        "A": torch.zeros_like(A),
        "B": torch.zeros_like(B),
        "C": torch.zeros_like(C),
        "s": torch.zeros_like(s),
    }
    found["y"], carry = torch.stack([x @ C.T for _, x, _ in kept], 1), torch.zeros_like(hidden)
    for t in range(s.shape[1] - 1, -1, -1):
        (u, x, slope), total = kept[t], g[:, t] + carry
        w = torch.linalg.solve((torch.eye(len(A)).double() - slope[:, :, None] * A).mT, total @ C)
        y = slope * w
        found["A"] += y.T @ x
        found["B"] += y.T @ u
        found["C"] += total.T @ x
        found["s"][:, t], carry = (y @ B)[:, :p], (y @ B)[:, p:]
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", ["positive", "signed"])
def test_gradients_of_sequences_near_the_edge(executor: str, kind: str) -> None:
    A, B, C, bias = matrices(128, 8 + 16, 16, 0.99, kind, 4)
    rnn = ImplicitRNN.from_matrices(A, B, C, bias=bias, executor=executor, batch_first=True)
    s, g = torch.randn(4, 20, 8, requires_grad=True), torch.randn(4, 20, 16)
    y = rnn(s)[0]
    y.backward(g)
    truth, cell = through_time(A, B, C, bias, s, g), rnn.cell(0)
    found = {"A": cell.state.raw.grad, "B": cell.B.grad, "C": cell.C.grad, "s": s.grad, "y": y.detach()}
    for name, value in found.items():
        assert off(value, truth[name]) <= 2e-5, name


@pytest.mark.parametrize("executor", EXECUTORS)
def test_inputs_of_zero_after_others_end_at_once(executor: str) -> None:
    torch.manual_seed(5)
    rnn = ImplicitRNN(3, 4, 16, kappa=0.95, executor=executor, batch_first=True)
    with torch.no_grad():
        rnn.cell(0).B[:, 3:] = 0
        rnn.cell(0).state.raw.abs_().mul_(16)
    s = torch.randn(2, 6, 3)
    s[:, 3:] = 0
    found = rnn.equilibria(s)
    assert not found.failed.any() and not found.states[0][:, 3:].any()


def test_wide_computation_only_where_it_is_needed() -> None:
    small, large = ImplicitModel(2, 1, 4, kappa=0.95), ImplicitModel(2, 1, 4, kappa=0.99)
    assert small.compute_dtype == torch.float32 and large.compute_dtype == torch.float64
    assert ImplicitModel(2, 1, 4, kappa=0.99, stop=Absolute(1e-6)).compute_dtype == torch.float32
    assert large(torch.ones(1, 2)).dtype == large.equilibrium(torch.ones(1, 2)).value.dtype == torch.float32
    assert large.double().compute_dtype == torch.float64
    assert "relu, float64" in ImplicitRNN(3, 5, 8, kappa=0.99).explain(torch.zeros(4, 2, 3))
