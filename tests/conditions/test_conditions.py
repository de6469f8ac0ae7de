"""Certificates, parametrisations and equivalent systems; the error bounds are in test_error_bound.py."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import first
from torch.autograd import gradcheck

from wellposed.activations import get_activation, group_sort, leaky_relu, max_pool
from wellposed.conditions.certificate import Certificate
from wellposed.conditions.conditions import CONDITIONS, certify
from wellposed.conditions.norms import depth, induced_norm, perron_weights, spectral_norm, symmetric_eigenvalue
from wellposed.errors import IllPosedError, InputError, UnknownNameError

RELU, TANH, SIGMOID = (get_activation(name) for name in ("relu", "tanh", "sigmoid"))
PAIRS = [
    ("inf", "relu"),
    ("inf", "sigmoid"),
    ("inf", "softmax"),
    ("weighted", "relu"),
    ("weighted", "gelu"),
    ("mu", "tanh"),
    ("mu", "sigmoid"),
    ("spectral", "relu"),
    ("spectral", "sin"),
    ("monotone", "relu"),
    ("monotone", "hardtanh"),
    ("triangular", "relu"),
    ("block", "softmax"),
]


def random_matrix(seed, n=6, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(n, n, generator=generator, dtype=torch.float64)).to(dtype)


def radius_of(M):
    return float(np.abs(np.linalg.eigvals(np.asarray(M, dtype=np.float64))).max())


def cyclic(n, weights):
    A = torch.zeros(n, n, dtype=torch.float64)
    A[torch.arange(n), (torch.arange(n) + 1) % n] = torch.tensor(weights, dtype=torch.float64)
    return A


@given(seed=st.integers(0, 10**6), n=st.sampled_from([1, 2, 5, 30]), single=st.booleans())
@settings(max_examples=60, deadline=None)
def test_inf_value_bounds_the_exact_row_sum(seed, n, single):
    A = random_matrix(seed, n, 1 / n, torch.float32 if single else torch.float64)
    exact = max(sum(abs(Fraction(entry)) for entry in row) for row in A.tolist())
    value = CONDITIONS["inf"].certify(A, RELU).value
    assert exact <= Fraction(value) <= exact * (1 + Fraction(1, 10**12))


def test_rows_that_sum_to_one_are_refused():
    """x = relu(x + b) with b > 0 has no solution."""
    A = torch.full((4, 4), 0.25)
    for name in ("inf", "weighted", "mu", "spectral", "monotone"):
        assert not CONDITIONS[name].certify(A, RELU).holds
    with pytest.raises(IllPosedError, match="inf: 1 >= 1 fails"):
        certify(A, "relu")
    assert certify(A, "sigmoid").condition == "inf"


ZOO = {
    "dense": random_matrix(0, 20).abs(),
    "defective": torch.tensor([[1.0, 1e3, 0.0], [0.0, 1.0, 1e3], [0.0, 0.0, 1.0]], dtype=torch.float64),
    "cycle": cyclic(6, [1e-4, 3e3, 0.2, 50.0, 1e-2, 1.0]),
    "even cycle with bipartite signs": -cyclic(2, [7.0, 0.3]),
    "reducible": torch.block_diag(random_matrix(1, 4).abs(), 0.1 * random_matrix(2, 5).abs()),
    "coupled blocks": torch.block_diag(random_matrix(1, 4).abs(), random_matrix(2, 5).abs())
    + 1e4 * torch.ones(9, 9, dtype=torch.float64).triu(5),
    "scaled": random_matrix(3, 12).abs() * torch.logspace(-8, 8, 12, dtype=torch.float64)[:, None],
    "scalar": torch.ones(1, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("target", [1e-6, 0.5, 0.99, 1 - 1e-6, 1 + 1e-6, 2.0, 1e8])
def test_weighted_holds_exactly_below_the_perron_root(name, target):
    A = ZOO[name] * (target / radius_of(ZOO[name].abs()))
    certificate = CONDITIONS["weighted"].certify(A, RELU)
    assert certificate.holds == (target < 1)
    assert certificate.value >= target * (1 - 1e-4 if name == "defective" else 1 - 1e-9)
    if certificate.holds:
        image = A.abs() @ certificate.weights
        assert (image <= certificate.value * certificate.weights).all()
        assert certificate.weights.max() == 1


@pytest.mark.parametrize("seed", first(14, range(40)))
def test_weighted_on_random_sparse_matrices(seed):
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(2, 40, (), generator=generator))
    A = random_matrix(seed, n) * torch.exp(3 * random_matrix(seed + 1, n)[:, :1])
    A = A * (torch.rand(n, n, generator=generator) < 0.3)
    radius = radius_of(A.abs())
    if radius < 1e-3:
        assert depth(A.abs()) is not None
        assert CONDITIONS["weighted"].certify(A, RELU).holds
        return
    for target in (0.3, 0.9, 0.9999, 1.0001, 3.0):
        assert CONDITIONS["weighted"].certify(A * (target / radius), TANH).holds == (target < 1)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("gain", [0.1, 1.0, 10.0, 500.0])
def test_weighted_holds_on_deep_chains_in_both_orders(transpose, gain):
    width, layers = 4, 30
    A = torch.zeros(width * layers, width * layers)
    for layer in range(layers - 1):
        rows = slice(width * layer, width * (layer + 1))
        A[rows, width * (layer + 1) : width * (layer + 2)] = gain * random_matrix(layer, width).float()
    A = A.mT.contiguous() if transpose else A
    assert CONDITIONS["weighted"].certify(A, RELU).holds
    assert CONDITIONS["triangular"].certify(A, get_activation("gelu")).value == 0


def test_perron_weights_bound_the_radius_even_when_they_fail():
    for seed in range(20):
        M = random_matrix(seed, 7).abs()
        _, value = perron_weights(M)
        assert value >= radius_of(M)


@given(
    seed=st.integers(0, 10**6),
    n=st.sampled_from([1, 2, 5, 30]),
    scale=st.sampled_from([1e-200, 1e-3, 1.0, 1e30]),
)
@settings(max_examples=60, deadline=None)
def test_spectral_bounds_are_upper_and_tight(seed, n, scale):
    A = random_matrix(seed, n, scale)
    exact = np.linalg.norm(A.numpy().astype(np.float64), 2)
    assert exact * (1 - 1e-15) <= float(spectral_norm(A)) <= exact * (1 + 1e-9)
    largest = np.linalg.eigvalsh((A + A.T).numpy() / 2)[-1]
    assert largest - 1e-15 * exact <= symmetric_eigenvalue(A) <= largest + 1e-9 * exact


@pytest.mark.parametrize("factor", [0.5, 0.999999])
def test_spectral_bounds_do_not_trust_the_decomposition(monkeypatch, factor):
    A = random_matrix(0, 6)
    norm, largest = np.linalg.norm(A.numpy(), 2), np.linalg.eigvalsh((A + A.T).numpy() / 2)[-1]
    svd, eigh = torch.linalg.svd, torch.linalg.eigh
    monkeypatch.setattr(
        torch.linalg, "svd", lambda M, **k: (svd(M, **k)[0], factor * svd(M, **k)[1], svd(M, **k)[2])
    )
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: (factor * eigh(M)[0], eigh(M)[1]))
    assert float(spectral_norm(A)) >= norm
    assert symmetric_eigenvalue(A) >= largest
    monkeypatch.setattr(
        torch.linalg, "svd", lambda M, **k: (factor * svd(M, **k)[0], svd(M, **k)[1], svd(M, **k)[2])
    )
    assert float(spectral_norm(A)) >= norm


def test_spectral_norm_of_an_exact_isometry_is_not_below_one():
    for n in (2, 4, 16):
        hadamard = torch.ones(1, 1, dtype=torch.float64)
        while len(hadamard) < n:
            hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
        A = hadamard / math.sqrt(n)  # exact for n = 4 and 16
        exact = 1.0 if n != 2 else 2 * Fraction(float(A[0, 0])) ** 2
        assert Fraction(float(spectral_norm(A))) ** 2 >= exact
        assert not CONDITIONS["spectral"].certify(hadamard / math.sqrt(n), RELU).holds or n == 2


@pytest.mark.parametrize(("p", "q"), [(p, q) for p in ("1", "2", "inf") for q in ("1", "2", "inf")])
def test_induced_norms_against_search(p, q):
    A = random_matrix(5, 4)
    bound, exact = induced_norm(A, p, q)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 4)
    probes = torch.cat(
        [
            signs,
            torch.eye(4, dtype=torch.float64),
            torch.randn(4000, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64),
        ]
    )
    probes = torch.cat([probes, A, A.mT, torch.linalg.svd(A)[2]])
    probes = probes / torch.linalg.vector_norm(probes, float(p), -1, keepdim=True)
    found = float(torch.linalg.vector_norm(probes @ A.mT, float(q), -1).max())
    assert found <= float(bound)
    assert exact == ((p == "1") or (q == "inf") or (p == q == "2"))
    if exact:
        assert float(bound) <= found * (1 + 1e-3)


def test_mu_value_and_its_negative_range():
    A = torch.tensor([[-5.0, 4.0], [0.5, 0.0]])
    assert math.isclose(CONDITIONS["mu"].certify(A, RELU).value, 0.5)
    negative = CONDITIONS["mu"].certify(-torch.eye(3), RELU)
    assert math.isclose(negative.value, -1.0)
    assert negative.gain <= 1.0000001


@pytest.mark.parametrize("seed", first(12, range(30)))
def test_mu_and_monotone_against_numpy(seed):
    A = random_matrix(seed, 6)
    M = A.numpy()
    mu = (np.diag(M) + np.abs(M).sum(1) - np.abs(np.diag(M))).max()
    assert mu <= CONDITIONS["mu"].certify(A, RELU).value <= mu + 1e-12
    largest = np.linalg.eigvalsh((M + M.T) / 2)[-1]
    assert largest <= CONDITIONS["monotone"].certify(A, RELU).value + 1e-15
    assert CONDITIONS["monotone"].certify(A, RELU).value <= largest + 1e-10


def test_triangular():
    upper = torch.tensor([[-9.0, 50.0, 3.0], [0.0, 0.5, 1e9], [0.0, 0.0, 0.999]])
    assert CONDITIONS["triangular"].certify(upper, RELU).value == pytest.approx(0.999)
    assert CONDITIONS["triangular"].certify(upper.mT, RELU).holds
    assert not CONDITIONS["triangular"].certify(upper + torch.eye(3) * 0.001, RELU).holds
    assert CONDITIONS["triangular"].certify(3.9 * torch.eye(2), SIGMOID).holds
    assert not CONDITIONS["triangular"].certify(torch.ones(2, 2), RELU).holds
    falling = leaky_relu(-0.5)
    assert CONDITIONS["triangular"].certify(torch.tensor([[-1.9]]), falling).holds
    assert not CONDITIONS["triangular"].certify(torch.tensor([[-2.1]]), falling).holds
    assert CONDITIONS["triangular"].certify(torch.ones(3, 3).triu(1), get_activation("gelu")).value == 0


def test_block_condition_on_pools_and_softmax():
    pool = max_pool(2)
    A = torch.block_diag(torch.full((2, 2), 0.4), torch.full((2, 2), 0.4))
    assert certify(A, pool).condition == "inf"
    chain = torch.zeros(4, 4)
    chain[:2, 2:] = 30.0
    assert not CONDITIONS["inf"].certify(chain, pool).holds
    certificate = certify(chain, pool)
    assert certificate.condition == "block"
    assert "induced norms exact" in str(certificate)
    assert certificate.weights.shape == (2,)
    softmax = get_activation("softmax")
    assert certify(1.9 * torch.eye(3), softmax).value == pytest.approx(0.95)
    rotation = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    assert CONDITIONS["block"].certify(1.9 * rotation, softmax).norm == "2"
    assert CONDITIONS["block"].certify(0.9 * rotation, group_sort(2)).value == pytest.approx(0.9)


def test_search_order_and_error_text():
    assert certify(torch.eye(2) * 0.5, "relu").condition == "inf"
    assert certify(torch.tensor([[0.0, 4.0], [0.1, 0.0]]), "relu").condition == "weighted"
    assert certify(torch.tensor([[-3.0, 1.0], [0.0, 0.5]]), "relu").condition == "triangular"
    assert certify(torch.tensor([[-5.0, 4.0], [0.5, -4.0]]), "relu").condition == "mu"
    assert certify(0.9 * torch.tensor([[0.6, 0.8], [-0.8, 0.6]]), "relu").condition == "spectral"
    assert certify(torch.tensor([[0.5, 7.0], [-7.0, -1.0]]), "relu").condition == "monotone"
    with pytest.raises(IllPosedError) as caught:
        certify(torch.tensor([[0.5, 7.0], [7.0, -1.0]]), "relu")
    for name in ("inf", "weighted", "triangular", "mu", "spectral", "monotone"):
        assert f"{name}: " in str(caught.value)
    assert "lower kappa" in str(caught.value)
    with pytest.raises(IllPosedError, match="inf: 7"):
        certify(torch.tensor([[0.0, 7.0], [0.0, 0.0]]), "relu", "inf")
    with pytest.raises(UnknownNameError, match="weighted"):
        certify(torch.eye(2), "relu", "weigthed")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_matrices_that_are_not_finite_prove_nothing(bad):
    A = torch.tensor([[0.0, bad], [0.0, 0.0]])
    for name in ("inf", "weighted", "triangular", "mu", "spectral", "monotone"):
        assert not CONDITIONS[name].certify(A, RELU).holds
    with pytest.raises(IllPosedError, match="NaN or infinite"):
        certify(A, "relu")


def test_conditions_that_cannot_apply_say_so():
    for name, activation in [
        ("monotone", "tanh"),
        ("mu", "gelu"),
        ("weighted", "softmax"),
        ("block", "relu"),
    ]:
        with pytest.raises(InputError, match="cannot apply"):
            CONDITIONS[name].certify(torch.eye(2) / 2, get_activation(activation))
    with pytest.raises(InputError, match="square"):
        certify(torch.zeros(2, 3), "relu")
    assert CONDITIONS.get(CONDITIONS["mu"]) is CONDITIONS["mu"]


def test_certificate_reads_well():
    certificate = Certificate.of("inf", 0.75, gain=4.0)
    assert str(certificate) == "inf: 0.75 < 1 holds (margin 0.25)"
    assert certificate.margin <= 0.25
    assert str(Certificate.of("inf", 2.0)) == "inf: 2 >= 1 fails"
    assert Certificate.of("inf", math.nan).holds is False


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize(("name", "activation"), PAIRS)
def test_parametrisation_satisfies_its_condition(name, activation, scale, dtype):
    condition, phi = CONDITIONS[name], get_activation(activation)
    gamma = phi.lipschitz(condition.norm_name(phi))
    kappa = 0.95 / gamma
    for seed in range(5):
        A = condition.parametrise(random_matrix(seed, 8, scale, dtype), kappa, phi)
        certificate = condition.certify(A, phi)
        slack = 1e-12
        if name in ("spectral", "monotone"):
            slack = 1000 * torch.finfo(dtype).eps * (1 + float(A.abs().max()))
        assert certificate.value <= gamma * kappa + slack
        assert certificate.holds
        assert A.dtype == dtype


def test_weighted_parametrisation_with_weights():
    condition = CONDITIONS["weighted"]
    wider = 0
    for seed in range(10):
        omega = 2 * random_matrix(seed + 50, 8, dtype=torch.float32)[0]
        A = condition.parametrise(random_matrix(seed, 8, dtype=torch.float32), 0.95, RELU, omega)
        v = omega.double().exp()
        assert (A.double().abs() @ v <= 0.95 * v).all()
        assert condition.certify(A, RELU).holds
        wider += not CONDITIONS["inf"].certify(A, RELU).holds
    assert wider > 5


@pytest.mark.parametrize(("name", "activation"), PAIRS)
def test_parametrisation_gradient_vmap_and_identity(name, activation):
    condition, phi = CONDITIONS[name], get_activation(activation)
    kappa = 0.9 / phi.lipschitz()
    weights = 0.3 * random_matrix(1, 4)[0]
    raw = random_matrix(2, 4, 3.0).requires_grad_()
    assert gradcheck(lambda raw, weights: condition.parametrise(raw, kappa, phi, weights), (raw, weights))
    stack = torch.stack([random_matrix(seed, 4) for seed in range(3)])
    expected = torch.stack([condition.parametrise(raw, kappa, phi) for raw in stack])
    found = torch.func.vmap(lambda raw: condition.parametrise(raw, kappa, phi))(stack)
    assert torch.allclose(found, expected, atol=1e-12)
    small = 0.01 * random_matrix(3, 4)
    small = small.triu(1) if name == "triangular" else small
    assert torch.equal(condition.parametrise(small, kappa, phi), small)


def test_weighted_gradient_in_the_weights():
    raw, omega = random_matrix(4, 4).requires_grad_(), random_matrix(5, 4)[0].requires_grad_()
    assert gradcheck(lambda raw, omega: CONDITIONS["weighted"].parametrise(raw, 0.9, RELU, omega), (raw, omega))


def test_triangular_without_cap_is_the_strict_part():
    raw = random_matrix(6, 5, 10.0)
    assert torch.equal(CONDITIONS["triangular"].parametrise(raw, None, RELU), raw.triu(1))
    capped = CONDITIONS["triangular"].parametrise(raw, 0.9, RELU)
    assert capped.abs().sum(-1).max() <= 0.9


@pytest.mark.parametrize("kappa", [1.0, 0.0, -0.5, math.nan, None])
def test_kappa_that_proves_nothing_is_refused(kappa):
    with pytest.raises(InputError, match="choose 0 < kappa < 1"):
        CONDITIONS["inf"].parametrise(torch.eye(2), kappa, RELU)
    assert CONDITIONS["inf"].parametrise(torch.eye(2), 3.9, SIGMOID) is not None


SYSTEMS = [
    ("inf", "relu", lambda raw: CONDITIONS["inf"].parametrise(raw, 0.9, RELU)),
    ("weighted", "tanh", lambda raw: CONDITIONS["weighted"].parametrise(raw, 0.9, TANH, 2 * raw[0])),
    ("mu", "relu", lambda raw: CONDITIONS["mu"].parametrise(raw - 8 * torch.eye(len(raw)), 0.9, RELU)),
    ("mu", "sigmoid", lambda raw: CONDITIONS["mu"].parametrise(20 * raw, 3.0, SIGMOID)),
    ("spectral", "tanh", lambda raw: CONDITIONS["spectral"].parametrise(raw, 0.9, TANH)),
    ("monotone", "relu", lambda raw: CONDITIONS["monotone"].parametrise(raw - 0.5 * raw.mT, 0.5, RELU)),
    ("monotone", "hardtanh", lambda raw: CONDITIONS["monotone"].parametrise(raw - 0.5 * raw.mT, 0.5, RELU)),
    (
        "triangular",
        "relu",
        lambda raw: raw.triu(1) - 4 * torch.eye(len(raw)) + raw.diag().diag().clamp(max=4.5),
    ),
    ("triangular", "tanh", lambda raw: raw.tril(-1) - 4 * torch.eye(len(raw))),
    ("triangular", "identity", lambda raw: raw.triu(1) - 4 * torch.eye(len(raw))),
]


@pytest.mark.parametrize(("name", "activation", "build"), SYSTEMS)
def test_equivalent_system_converges_to_the_same_equilibrium(name, activation, build):
    condition, phi = CONDITIONS[name], get_activation(activation)
    for seed in range(5):
        A = build(random_matrix(seed, 7))
        assert condition.certify(A, phi).holds
        system = condition.equivalent(A, phi)
        v = random_matrix(seed + 100, 7)[:3]
        x = torch.zeros_like(v)
        for _ in range(5000):
            step = phi(x @ system.A.mT + system.scale * v)
            previous, x = x, (1 - system.damping) * x + system.damping * step
            if torch.equal(previous, x):
                break
        assert (x - phi(x @ A.mT + v)).abs().max() < 1e-10 * (1 + x.abs().max())


@pytest.mark.parametrize(("name", "activation", "build"), SYSTEMS)
def test_equivalent_system_is_differentiable_in_A(name, activation, build):
    condition, phi = CONDITIONS[name], get_activation(activation)
    A = build(random_matrix(0, 5)).detach().requires_grad_()
    system = condition.equivalent(A, phi)
    system.A.sum().backward()
    assert A.grad is not None
    assert A.grad.isfinite().all()


def test_monotone_step_converges_on_the_worst_case():
    """I - A = m I + skew: a step above 2 m / L^2 diverges."""
    turn = torch.tensor([[0.0, 3.0], [-3.0, 0.0]], dtype=torch.float64)
    A = 0.5 * torch.eye(2, dtype=torch.float64) + turn
    phi = get_activation("identity")
    system = CONDITIONS["monotone"].equivalent(A, phi)
    v, x = torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    for _ in range(2500):
        x = x @ system.A.mT + system.scale * v
    assert torch.allclose(x @ (torch.eye(2, dtype=torch.float64) - A).mT, v)


def test_monotone_step_contracts_at_the_promised_rate():
    A = CONDITIONS["monotone"].parametrise(5 * random_matrix(3, 6), 0.5, RELU)
    system = CONDITIONS["monotone"].equivalent(A, RELU)
    m, distance = 0.5, np.linalg.norm(np.eye(6) - A.numpy(), 2)
    assert np.linalg.norm(system.A.numpy(), 2) <= math.sqrt(1 - (m / distance) ** 2) + 1e-9
    with pytest.raises(IllPosedError, match="no step"):
        CONDITIONS["monotone"].equivalent(2 * torch.eye(2), RELU)
