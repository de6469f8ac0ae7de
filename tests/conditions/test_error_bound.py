"""Error bounds against solutions of higher precision: never violated, and not useless."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pairwise import first

from wellposed.activations import Activation, get_activation, group_sort, leaky_relu, max_pool
from wellposed.conditions.certificate import Certificate, ErrorBounder, comparison
from wellposed.conditions.conditions import CONDITIONS
from wellposed.conditions.rounding import map_rounding, operand_roundoff, reciprocal_gap, upward

BATCH = 16
LONG = {
    "relu": lambda z: np.maximum(z, 0),
    "identity": lambda z: z,
    "tanh": np.tanh,
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "hardtanh": lambda z: np.clip(z, -1, 1),
    "leaky_relu": lambda z: np.where(z > 0, z, np.longdouble(0.01) * z),
}


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_to(A, factor):
    return A * (factor / A.abs().sum(-1, keepdim=True).clamp(min=1e-9))


def build(name, seed, n, factor):
    """A matrix whose certificate has a value close to the factor."""
    A = normal(seed, n, n)
    if name == "inf":
        return rows_to(A, factor)
    if name == "weighted":
        omega = 2 * normal(seed + 1, n)
        return rows_to(A, factor) * (omega[:, None] - omega[None]).exp()
    if name == "mu":
        off = rows_to(A - A.diag().diag(), factor)
        depth = 5 * normal(seed + 1, n).abs()
        return off * (1 + depth / factor)[:, None] - depth.diag()
    if name == "spectral":
        return A * (factor / torch.linalg.matrix_norm(A, 2))
    if name == "monotone":
        skew = A - A.mT
        return skew / torch.linalg.matrix_norm(skew, 2) + factor * torch.eye(n, dtype=A.dtype)
    if name == "triangular":
        return A.triu(1) + (factor * torch.rand(n, generator=torch.Generator().manual_seed(seed))).double().diag()
    raise KeyError(name)


CASES = [
    ("inf", "relu", 0.9),
    ("inf", "relu", 0.999),
    ("inf", "tanh", 0.999),
    ("inf", "sigmoid", 3.8),
    ("inf", "leaky_relu", 0.99),
    ("inf", "identity", 0.999),
    ("weighted", "relu", 0.9),
    ("weighted", "tanh", 0.99),
    ("mu", "relu", 0.9),
    ("mu", "tanh", 0.99),
    ("spectral", "relu", 0.99),
    ("spectral", "tanh", 0.9),
    ("monotone", "relu", 0.5),
    ("monotone", "hardtanh", 0.0),
    ("triangular", "relu", 0.9),
    ("triangular", "tanh", 0.5),
]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "activation", "factor"), CASES)
def test_bound_holds_for_truncated_and_converged_states(name, activation, factor, dtype):
    condition, phi = CONDITIONS[name], get_activation(activation)
    looseness = []
    for seed in range(3):
        n = (3, 8, 20)[seed]
        A = build(name, seed, n, factor).to(dtype)
        B, u = (
            normal(seed + 20, n, 5).to(dtype),
            (10.0 ** (2 * seed - 2) * normal(seed + 30, BATCH, 5)).to(dtype),
        )
        certificate = condition.certify(A, phi)
        assert certificate.holds
        bounder = ErrorBounder(certificate, A, phi)
        # The input term is exact in long double, so that the rounding of Bu is part of the map.
        v_long = u.double().numpy().astype(np.longdouble) @ B.double().numpy().astype(np.longdouble).T
        exact, left = solve_exactly(A, v_long, condition, phi, activation)
        system = condition.equivalent(A, phi)
        x, v = torch.zeros(BATCH, n, dtype=dtype), u @ B.mT
        checkpoints = {1, 3, 10, 50, 300}
        for step in range(1, 301):
            x = (1 - system.damping) * x + system.damping * phi(x @ system.A.mT + system.scale * v)
            if step not in checkpoints:
                continue
            fx = phi(x @ A.mT + u @ B.mT)
            rounding = map_rounding(A, x, u.abs() @ B.abs().mT * (1 + 1e-6), phi, n + 5 + 2)
            bound = bounder((x - fx).abs(), rounding).numpy()
            error = np.abs(x.double().numpy().astype(np.longdouble) - exact).max(1).astype(np.float64)
            assert (error <= bound + left).all(), (seed, step, float((error / bound).max()))
            looseness.append(np.median(bound / (error + left + 1e-300)))
    assert min(looseness) < 1e4


def solve_exactly(A, v_long, condition, phi, activation):
    """Iterates the equivalent system, first in float64 and then in long double."""
    system = condition.equivalent(A.double(), phi)
    x, v = torch.zeros(v_long.shape, dtype=torch.float64), torch.from_numpy(v_long.astype(np.float64))
    for _ in range(2000):
        new = (1 - system.damping) * x + system.damping * phi(x @ system.A.mT + system.scale * v)
        if torch.equal(new, x):
            break
        x = new
    M, scale = system.A.numpy().astype(np.longdouble), system.scale.numpy().astype(np.longdouble)
    A_long, x = A.double().numpy().astype(np.longdouble), x.numpy().astype(np.longdouble)
    for _ in range(100):
        x = (1 - system.damping) * x + system.damping * LONG[activation](x @ M.T + scale * v_long)
    residual = np.abs(x - LONG[activation](x @ A_long.T + v_long)).max()
    gain = condition.certify(A, phi).gain
    return x, float(residual) * (gain if math.isfinite(gain) else 1e4) * A.shape[0]


@pytest.mark.parametrize("seed", first(40, range(125)))
def test_bound_holds_on_many_small_systems_at_any_state(seed):
    """Random states, not iterates: 125 systems x 64 states in float32 against float64."""
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 12, (), generator=generator))
    name = ("inf", "weighted", "mu", "spectral", "triangular")[seed % 5]
    phi = get_activation(("relu", "tanh", "softplus", "elu", "relu6")[seed // 5 % 5])
    factor = (0.3, 0.9, 0.99, 0.999)[seed % 4]
    A = build(name, seed, n, factor).float()
    certificate = CONDITIONS[name].certify(A, phi)
    assert certificate.holds
    v = normal(seed + 1, 64, n).float() * 10
    system = CONDITIONS[name].equivalent(A.double(), phi)
    exact = torch.zeros(64, n, dtype=torch.float64)
    for _ in range(1500):
        new = (1 - system.damping) * exact + system.damping * phi(exact @ system.A.mT + system.scale * v.double())
        if torch.equal(new, exact):
            break
        exact = new
    left = (exact - phi(exact @ A.double().mT + v.double())).abs().max() * 1e4
    x = (exact + 10.0 ** -torch.arange(64)[:, None] * normal(seed + 2, 64, n)).float()
    fx = phi(x @ A.mT + v)
    bound = ErrorBounder(certificate, A, phi)((x - fx).abs(), map_rounding(A, x, v.abs(), phi, n + 2))
    assert ((x.double() - exact).abs().amax(-1) <= bound + left).all()


def test_rounding_is_what_makes_the_bound_sound():
    """Without the rounding of the map the bound is violated."""
    violated = 0
    for seed in range(8):
        A = rows_to(normal(seed, 20, 20), 0.99).float()
        v = (100 * normal(seed + 1, BATCH, 20)).float()
        x, exact = torch.zeros(BATCH, 20), torch.zeros(BATCH, 20, dtype=torch.float64)
        for _ in range(1000):
            x, exact = torch.relu(x @ A.mT + v), torch.relu(exact @ A.double().mT + v.double())
        residual = (x - torch.relu(x @ A.mT + v)).abs()
        certificate = CONDITIONS["inf"].certify(A, get_activation("relu"))
        bounder = ErrorBounder(certificate, A, get_activation("relu"))
        error = (x.double() - exact).abs().amax(-1)
        violated += int((error > bounder(residual, torch.zeros_like(residual))).sum())
        sound = bounder(residual, map_rounding(A, x, v.abs(), get_activation("relu"), 22))
        assert (error <= sound).all()
    assert violated > 20


@pytest.mark.parametrize(
    "phi", [get_activation("softmax"), max_pool(2), group_sort(3), max_pool(3)], ids=lambda phi: phi.name
)
@pytest.mark.parametrize("name", ["inf", "block", "spectral"])
def test_block_maps(phi, name):
    n = 6
    for seed in range(4):
        raw = normal(seed, n, n) * 3
        if name == "block" and phi.block:
            A = torch.block_diag(
                *[rows_to(normal(seed + k, phi.block, phi.block), 0.9) for k in range(n // phi.block)]
            )
            A = A + 5 * torch.ones(n, n, dtype=A.dtype).triu(1).triu(phi.block)
        else:
            A = CONDITIONS[name].parametrise(raw, 0.95 / phi.lipschitz(), phi)
        A = A.float()
        certificate = CONDITIONS[name].certify(A, phi)
        if not certificate.holds:
            assert name == "block"
            continue
        v = normal(seed + 2, BATCH, n).float()
        exact = torch.zeros(BATCH, n, dtype=torch.float64)
        for _ in range(200):
            exact = phi(exact @ A.double().mT + v.double())
        for amplitude in (0.0, 1e-6, 1e-2, 1.0):
            x = (exact + amplitude * normal(seed + 3, BATCH, n)).float()
            fx = phi(x @ A.mT + v)
            rounding = map_rounding(A, x, v.abs(), phi, n + 2)
            bound = CONDITIONS[name].error_bound(certificate, A, phi, (x - fx).abs(), rounding)
            assert ((x.double() - exact).abs().amax(-1) <= bound).all()
            assert bound.isfinite().all()


def test_block_condition_covers_pools_that_no_norm_covers():
    A = torch.zeros(4, 4)
    A[:2, 2:] = 30.0
    phi = max_pool(2)
    certificate = CONDITIONS["block"].certify(A, phi)
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    v = torch.tensor([[0.0, 0.0, 1.0, 2.0]])
    exact = torch.tensor([60.0, 0.0, 2.0, 0.0])
    bound = ErrorBounder(certificate, A, phi)((x - phi(x @ A.mT + v)).abs(), torch.zeros(1, 4))
    assert float((x - exact).abs().max()) <= float(bound) < 200


def test_componentwise_refinement_is_sharp():
    """On a linear system with a non-negative matrix the bound equals the error."""
    A = rows_to(normal(0, 30, 30).abs(), 0.95)
    phi = get_activation("identity")
    certificate = CONDITIONS["inf"].certify(A, phi)
    x, v = torch.zeros(1, 30, dtype=torch.float64), normal(1, 1, 30).abs()
    exact = torch.linalg.solve(torch.eye(30, dtype=torch.float64) - A, v[0])
    bound = float(ErrorBounder(certificate, A, phi)(v, torch.zeros_like(v)))
    assert float(exact.max()) <= bound <= float(exact.max()) * (1 + 1e-4)
    norm = float(v.max()) * certificate.gain
    assert bound < norm
    assert x.shape == v.shape


def test_refinement_accepts_weakly_coupled_systems():
    """The inverse is wrong by rounding where the coupling is weak; the candidate must be verified anyway."""
    A = rows_to(normal(0, 40, 40).abs() ** 20 + 1e-14, 0.999)
    phi = get_activation("identity")
    bounder = ErrorBounder(CONDITIONS["inf"].certify(A, phi), A, phi)
    spikes = torch.eye(40, dtype=torch.float64)
    exact = torch.linalg.inv(torch.eye(40, dtype=torch.float64) - A).amax(0)
    refined = bounder.bounds[-1](spikes)
    assert refined.isfinite().all()
    assert (refined >= exact * (1 - 1e-12)).all()
    assert (refined <= exact * 1.01).all()


def test_large_systems_use_the_norm_and_large_triangular_ones_are_solved():
    n = 600
    A = rows_to(normal(0, n, n), 0.9)
    A[0] *= 0.1
    phi = get_activation("relu")
    bounder = ErrorBounder(CONDITIONS["inf"].certify(A, phi), A, phi)
    spike = torch.zeros(2, n, dtype=torch.float64)
    spike[0, 0], spike[1, 1] = 1.0, 1.0
    small, large = bounder(spike, torch.zeros_like(spike))
    assert 1 <= small < 1.2
    assert 9 < large < 10.1
    chain = 3 * torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)
    triangular = ErrorBounder(CONDITIONS["triangular"].certify(chain, phi), chain, phi)
    last = torch.zeros(1, n, dtype=torch.float64)
    last[0, 40] = 1.0
    assert math.isclose(float(triangular(last, torch.zeros_like(last))), 3.0**40, rel_tol=1e-2)


def test_zero_residual_of_a_triangular_system_has_a_finite_bound():
    A = torch.ones(5, 5).triu(1)
    bounder = ErrorBounder(CONDITIONS["triangular"].certify(A, get_activation("relu")), A, get_activation("relu"))
    assert float(bounder(torch.zeros(1, 5), torch.zeros(1, 5))) < 1e-200


def test_what_is_not_certified_has_no_bound():
    A = 2 * torch.eye(3)
    phi = get_activation("relu")
    bounder = ErrorBounder(CONDITIONS["inf"].certify(A, phi), A, phi)
    assert bounder(torch.ones(2, 3), torch.ones(2, 3)).tolist() == [math.inf, math.inf]
    good = ErrorBounder(CONDITIONS["inf"].certify(A / 4, phi), A / 4, phi)
    assert good(torch.tensor([[math.nan, 0.0, 0.0]]), torch.zeros(1, 3)).tolist() == [math.inf]
    assert good(torch.tensor([[math.inf, 0.0, 0.0]]), torch.zeros(1, 3)).tolist() == [math.inf]


def test_samples_do_not_see_each_other():
    A = rows_to(normal(0, 10, 10), 0.9)
    phi = get_activation("relu")
    bounder = ErrorBounder(CONDITIONS["inf"].certify(A, phi), A, phi)
    r = normal(1, 8, 10).abs() * 10.0 ** torch.arange(-4, 4)[:, None]
    together = bounder(r, torch.zeros_like(r))
    alone = torch.cat([bounder(row[None], torch.zeros_like(row[None])) for row in r])
    assert torch.allclose(together, alone, rtol=1e-12)


def test_comparison_uses_negative_feedback():
    system = comparison(torch.tensor([[-3.0, 1.0], [0.0, 0.5]]), get_activation("relu"), "inf")
    assert torch.allclose(system.matrix, torch.tensor([[0.0, 0.25], [0.0, 0.0]]).double())
    assert torch.allclose(system.gain, torch.tensor([1.0, 2.0]).double())
    falling = comparison(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), leaky_relu(-0.5), "inf")
    assert falling.matrix[0, 1] == math.inf


@pytest.mark.parametrize("name", ["relu", "tanh", "sigmoid", "leaky_relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_map_rounding_against_long_double(name, dtype):
    phi = get_activation(name)
    for seed in range(40):
        n, p = (4, 50)[seed % 2], (3, 20)[seed // 2 % 2]
        scale = 10.0 ** (seed % 5 - 2)
        A, B, bias = (normal(seed + k, *shape).to(dtype) for k, shape in enumerate([(n, n), (n, p), (n,)]))
        x, u = (scale * normal(seed + 4, 50, n)).to(dtype), normal(seed + 5, 50, p).to(dtype)
        if seed % 3 == 0:
            bias = -(A @ x[0] + B @ u[0])  # cancellation
        computed = phi(x @ A.mT + u @ B.mT + bias)
        wide = [t.double().numpy().astype(np.longdouble) for t in (A, B, bias, x, u)]
        exact = LONG[name](wide[3] @ wide[0].T + wide[4] @ wide[1].T + wide[2])
        magnitude = u.double().abs() @ B.double().abs().mT + bias.double().abs()
        bound = map_rounding(A, x, magnitude, phi, n + p + 2).numpy()
        assert (np.abs(computed.double().numpy() - exact) <= bound).all()


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "gelu", "hardsigmoid"])
def test_map_rounding_counts_the_activation_itself(name):
    """With a zero matrix and two terms all rounding is that of phi."""
    phi = get_activation(name)
    v = torch.cat([torch.linspace(-1e-3, 1e-3, 4000), torch.linspace(-8, 8, 4000)])[:, None]
    error = (phi(v).double() - phi(v.double())).abs()
    bound = map_rounding(torch.zeros(1, 1), torch.zeros_like(v), v.abs(), phi, 1)
    assert (error <= bound).all()
    without = map_rounding(torch.zeros(1, 1), torch.zeros_like(v), v.abs(), replace(phi, rounding=0.0), 1)
    assert (error > without).any()


def test_map_rounding_is_infinite_when_the_sum_is_too_long_for_the_dtype():
    x = torch.ones(1, 300, dtype=torch.bfloat16)
    bound = map_rounding(torch.eye(300), x, torch.ones(1, 300), get_activation("relu"), 302)
    assert (bound == math.inf).all()


def test_reduced_precision_matrix_products_are_known():
    x = torch.zeros(1, 2)
    assert operand_roundoff(x) == 0
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert operand_roundoff(x) > 2.0**-8
        bound = map_rounding(torch.eye(2), torch.ones(1, 2), torch.zeros(1, 2), get_activation("relu"), 4)
        assert (bound > 2.0**-8).all()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_outward_rounding_helpers():
    assert upward(torch.tensor(3.0, dtype=torch.float64), 0) > 3
    assert reciprocal_gap(0.9) >= 10 * (1 - 1e-16)
    assert reciprocal_gap(1.0) == reciprocal_gap(2.0) == math.inf
    tiny = 1 - 2.0**-53
    assert reciprocal_gap(tiny) >= 2.0**53


@pytest.mark.parametrize("name", ["inf", "weighted", "mu", "triangular"])
def test_lipschitz_constant_of_the_input_map(name):
    condition, phi = CONDITIONS[name], get_activation("relu")
    for seed in range(4):
        A, B = build(name, seed, 6, 0.9), normal(seed + 9, 6, 3)
        constant = condition.lipschitz(condition.certify(A, phi), A, B, phi)
        u = normal(seed + 10, 200, 3)
        u = torch.cat([u, u + 1e-3 * normal(seed + 11, 200, 3).sign()])
        x, _ = solve_exactly(A, (u @ B.mT).numpy().astype(np.longdouble), condition, phi, "relu")
        change = np.abs(x[:200] - x[200:]).max(1) / (u[:200] - u[200:]).abs().amax(-1).numpy()
        assert change.max() <= constant * (1 + 1e-9)


def test_lipschitz_constant_is_exact_for_non_negative_linear_systems():
    A, B = rows_to(normal(0, 8, 8).abs(), 0.9), normal(1, 8, 3).abs()
    phi = get_activation("identity")
    exact = torch.linalg.solve(torch.eye(8, dtype=torch.float64) - A, B).sum(-1).max()
    for name in ("inf", "weighted", "mu"):
        found = CONDITIONS[name].lipschitz(CONDITIONS[name].certify(A, phi), A, B, phi)
        assert float(exact) <= found <= float(exact) * (1 + 1e-4)


@pytest.mark.parametrize("name", ["spectral", "monotone"])
def test_lipschitz_constant_in_the_2_norm(name):
    condition, phi = CONDITIONS[name], get_activation("relu")
    for seed in range(4):
        A, B = build(name, seed, 6, 0.5), normal(seed + 9, 6, 3)
        constant = condition.lipschitz(condition.certify(A, phi), A, B, phi)
        u = normal(seed + 10, 400, 3)
        x, _ = solve_exactly(A, (u @ B.mT).numpy().astype(np.longdouble), condition, phi, "relu")
        change = np.linalg.norm((x[:200] - x[200:]).astype(np.float64), axis=1)
        assert (change <= constant * torch.linalg.vector_norm(u[:200] - u[200:], dim=1).numpy()).all()


def test_block_lipschitz_constant():
    phi = get_activation("softmax")
    A, B = 1.5 * torch.eye(4, dtype=torch.float64), normal(1, 4, 3)
    certificate = CONDITIONS["block"].certify(A, phi)
    constant = CONDITIONS["block"].lipschitz(certificate, A, B, phi)
    u = normal(2, 400, 3)
    x = torch.zeros(400, 4, dtype=torch.float64)
    for _ in range(100):
        x = phi(x @ A.mT + u @ B.mT)
    change = (x[:200] - x[200:]).abs().amax(-1) / (u[:200] - u[200:]).abs().amax(-1)
    assert change.max() <= constant < math.inf


def test_error_bound_of_a_user_made_certificate_is_the_norm_bound():
    one_way = Activation("block_only", lambda z: z, block=0, constants={"2": 1.0}, rounding=0.0)
    A = 0.5 * torch.eye(3)
    bounder = ErrorBounder(CONDITIONS["spectral"].certify(A, one_way), A, one_way)
    assert float(bounder(torch.tensor([[3.0, 4.0, 0.0]]), torch.zeros(1, 3))) == pytest.approx(10.0, rel=1e-5)
    assert Certificate.of("spectral", 0.5, norm="2", gain=2.0).holds
