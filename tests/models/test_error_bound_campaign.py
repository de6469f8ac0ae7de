"""The distance to the true equilibrium never exceeds the error bound, rounding included."""

import numpy as np
import pytest
import torch
from problems import state_matrix

from wellposed import Absolute, ImplicitModel, Relative, Steps

SAMPLES = 500
FAMILIES = ["positive", "random", "ring", "shift", "sparse"]


def sigmoid(z):
    return 0.5 + 0.5 * np.tanh(z / 2)


PHI = {
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "sigmoid": (sigmoid, lambda z: sigmoid(z) * (1 - sigmoid(z))),
}


def true_equilibrium(A, B, u, bias, x, activation):
    """Newton's method with residuals in extended precision, starting from a computed state."""
    phi, slope = PHI[activation]
    A, B, u, bias, x = (t.detach().double().numpy().astype(np.longdouble) for t in (A, B, u, bias, x))
    v = u @ B.T + bias
    for _ in range(12):
        z = x @ A.T + v
        r = phi(z) - x
        system = np.eye(len(A)) - slope(z.astype(float))[:, :, None] * A.astype(float)
        x = x + np.linalg.solve(system, r.astype(float)[:, :, None])[:, :, 0]
    assert np.abs(phi(x @ A.T + v) - x).max() <= 1e-17 * max(1.0, float(np.abs(x).max()))
    return x


def draw_case(index, dtype):
    generator = torch.Generator().manual_seed(index)
    pick = lambda values: values[int(torch.randint(len(values), (), generator=generator))]  # noqa: E731
    n, activation = pick([1, 2, 5, 12, 24]), pick(sorted(PHI))
    lipschitz = 0.25 if activation == "sigmoid" else 1.0
    norm = pick([0.3, 0.9, 0.99, 0.999, 0.99999]) / lipschitz
    A = state_matrix(pick(FAMILIES), n, norm, generator, dtype)
    B, bias = torch.randn(n, 3, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    scale = 10.0 ** pick([-4, 0, 4])
    u = (scale * torch.randn(SAMPLES, 3, generator=generator)).to(dtype)
    stop = pick([Absolute(1e-3), Absolute(0.0), Relative(), Relative(1e-2), Steps(3), Steps(40)])
    options = {"stop": stop, "solver": pick(["picard", "anderson"]), "max_steps": 600, "on_failure": "ignore"}
    C = torch.zeros(1, n, dtype=dtype)
    return ImplicitModel.from_matrices(A, B, C, bias=bias, activation=activation, **options), u, activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("systems", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_never_violated(dtype, systems):
    solves, tight = 0, []
    for index in range(systems):
        model, u, activation = draw_case(index, dtype)
        found = model.equilibrium(u)
        exact = true_equilibrium(model.A, model.B, u, model.bias, found.value, activation)
        error = np.abs(found.value.detach().double().numpy().astype(np.longdouble) - exact).max(1)
        bound = found.error_bound.double().numpy()
        assert (error <= bound).all(), f"case {index}: {error.max()} > {bound[np.argmax(error - bound)]}"
        solves += len(u)
        tight.append(float(np.median(bound / np.maximum(error, 1e-300))))
    assert solves == systems * SAMPLES
    assert np.median(tight) < 1e4  # a bound that is never violated because it is absurd is no use
