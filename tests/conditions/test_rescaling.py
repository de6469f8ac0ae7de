import math
from fractions import Fraction

import pytest
import torch
from pairwise import first

from wellposed.activations import check_constants, get_activation, max_pool
from wellposed.conditions.conditions import CONDITIONS
from wellposed.conditions.norms import depth, power_of_two_scaling
from wellposed.conditions.rescaling import Rescaling, apply_rescaling, rescaling
from wellposed.errors import IllPosedError, InputError

RELU = get_activation("relu")


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def network(layers, width, inputs=3, outputs=2, gain=1.0, seed=0):
    """x_1 = phi(W_0 u), x_{l+1} = phi(W_l x_l), y = W_L x_L with state (x_L, ..., x_1), in float32."""
    weights = [gain * math.sqrt(2 / width) * normal(seed + layer, width, width).float() for layer in range(layers)]
    weights[0] = normal(seed + 100, width, inputs).float()
    n = layers * width
    A, B, C = torch.zeros(n, n), torch.zeros(n, inputs), torch.zeros(outputs, n)
    for layer in range(1, layers):
        row, column = (layers - 1 - layer) * width, (layers - layer) * width
        A[row : row + width, column : column + width] = weights[layer]
    B[-width:], C[:, :width] = weights[0], normal(seed + 200, outputs, width).float()
    return A, B, C, weights


def run_chain(A, B, C, bias, phi, u, layers):
    """The state after `layers` applications of the map is the equilibrium of a feed-forward net."""
    x = torch.zeros(len(u), len(A))
    for _ in range(layers):
        x = phi(x @ A.mT + u @ B.mT + (0 if bias is None else bias))
    return x @ C.mT


@pytest.mark.parametrize("kappa", [0.5, 0.95])
@pytest.mark.parametrize(
    ("layers", "width", "gain"), [(2, 5, 1.0), (20, 10, 1.0), (50, 8, 1.0), (50, 8, 0.3), (20, 6, 8.0)]
)
def test_deep_relu_nets_keep_every_bit(layers, width, gain, kappa):
    A, B, C, _ = network(layers, width, gain=gain)
    bias = 0.1 * normal(7, len(A)).float()
    scale = rescaling(A, kappa)
    assert scale.power_of_two
    assert torch.equal(scale.log2, scale.log2.round())
    result = apply_rescaling(A, B, C, bias, scale, RELU)
    assert result.activation is RELU
    assert result.exact
    assert result.A.double().abs().sum(-1).max() < kappa
    assert CONDITIONS["inf"].certify(result.A, RELU).value < kappa
    u = normal(8, 16, 3).float()
    before = run_chain(A, B, C, bias, RELU, u, layers)
    after = run_chain(result.A, result.B, result.C, result.bias, RELU, u, layers)
    assert torch.equal(before, after)
    assert before.abs().max() > 0


def test_layer_by_layer_evaluation_is_the_same_network():
    A, B, C, weights = network(6, 4)
    u = normal(8, 16, 3).float()
    x = u
    for weight in weights:
        x = torch.relu(x @ weight.mT)
    assert torch.allclose(run_chain(A, B, C, None, RELU, u, 6), x @ C[:, :4].mT, rtol=1e-5)


def test_a_plain_solve_is_not_enough_in_float32():
    """v = (I - |A|)^-1 1 gives norm >= 1 in float32 already at a moderate depth."""
    A, *_ = network(50, 8)
    v = torch.linalg.solve(torch.eye(len(A)) - A.abs(), torch.ones(len(A)))
    assert not (A.abs() * v / v[:, None]).sum(-1).max() < 1
    assert rescaling(A, 0.95).norm < 0.95


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "elu", "softplus", "hardtanh"])
def test_other_maps_are_carried_along(name):
    phi = get_activation(name)
    A, B, C, _ = network(8, 5)
    bias = 0.3 * normal(9, len(A)).float()
    scale = rescaling(A, 0.9)
    result = apply_rescaling(A, B, C, bias, scale, phi)
    assert result.activation.slope == phi.slope
    assert not result.activation.homogeneous
    u = normal(8, 16, 3).float()
    before = run_chain(A, B, C, bias, phi, u, 8)
    assert torch.equal(run_chain(result.A, result.B, result.C, result.bias, result.activation, u, 8), before)
    z = normal(10, 4, len(A))
    slope = torch.func.vjp(result.activation.function, z)[1](torch.ones_like(z))[0]
    assert torch.allclose(result.activation.slope_at(z), slope, atol=1e-9)


def test_rescaled_activation_has_the_constants_it_declares():
    phi = apply_rescaling(
        torch.zeros(16, 16),
        torch.eye(16),
        torch.eye(16),
        None,
        Rescaling(torch.arange(16.0), True, 0.0),
        get_activation("tanh"),
    ).activation
    assert phi.image == (-(2.0**15), 2.0**15) and float(phi(torch.full((16,), 2.0**20)).max()) == 2.0**15
    single = Rescaling(torch.full((16,), -3.0), True, 0.0)
    assert phi.rounding == get_activation("tanh").rounding
    softmax = get_activation("softmax")
    carried = apply_rescaling(torch.zeros(16, 16), torch.eye(16), torch.eye(16), None, single, softmax).activation
    z = normal(1, 5, 16)
    assert torch.allclose(carried(z), softmax(8 * z) / 8) and carried.image == (0.0, 0.125)
    steepest = phi.slope_at(normal(2, 1000, 16)).max()
    assert steepest <= 1
    check_constants(get_activation("tanh"))


def test_blocks_share_their_scale():
    pool = max_pool(2)
    A = torch.zeros(6, 6)
    A[:2, 2:4], A[2:4, 4:] = torch.tensor([[9.0, 1.0], [0.1, 0.0]]), torch.tensor([[0.5, 40.0], [0.0, 3.0]])
    free, tied = rescaling(A, 0.9), rescaling(A, 0.9, blocks=2)
    assert not torch.equal(free.log2[0::2], free.log2[1::2])
    assert torch.equal(tied.log2[0::2], tied.log2[1::2])
    B, C = torch.eye(6), torch.ones(1, 6)
    with pytest.raises(InputError, match="blocks=2"):
        apply_rescaling(A, B, C, None, free, pool)
    result = apply_rescaling(A, B, C, None, tied, pool)
    u = normal(3, 9, 6).float()
    assert torch.equal(run_chain(A, B, C, None, pool, u, 3), run_chain(*result[:4], pool, u, 3))
    assert CONDITIONS["inf"].certify(result.A, pool).value < 0.9


@pytest.mark.parametrize("seed", first(10, range(30)))
def test_cyclic_matrices_below_and_above_the_limit(seed):
    A = normal(seed, 7, 7) * (2 * normal(seed + 50, 7)).exp()[:, None]
    radius = torch.linalg.eigvals(A.abs()).abs().max()
    for target, possible in [(0.3, True), (0.94, True), (0.951, False), (2.0, False)]:
        scaled = A * (target / radius)
        if not possible:
            with pytest.raises(IllPosedError, match="no diagonal scaling"):
                rescaling(scaled, 0.95)
            continue
        found = rescaling(scaled, 0.95)
        assert found.norm < 0.95
        result = apply_rescaling(scaled, torch.eye(7).double(), torch.eye(7).double(), None, found, RELU)
        assert result.A.abs().sum(-1).max() < 0.95
        assert result.exact == found.power_of_two


def test_powers_of_two_are_impossible_near_the_limit_and_it_is_said():
    A = torch.tensor([[0.0, 3.0], [0.3, 0.0]], dtype=torch.float64)  # rho = 0.9487
    found = rescaling(A, 0.95)
    assert not found.power_of_two
    assert found.norm < 0.95
    roomy = rescaling(A / 2, 0.95)
    assert roomy.power_of_two


def test_blocks_without_powers_of_two():
    A = torch.zeros(4, 4, dtype=torch.float64)
    A[:2, 2:] = torch.tensor([[2.0, 1.0], [0.1, 0.0]])
    A[2:, :2] = torch.tensor([[0.01, 0.0], [0.1, 0.2]])
    found = rescaling(A, 0.95, blocks=2)
    assert not found.power_of_two
    assert torch.equal(found.log2[0::2], found.log2[1::2])
    assert found.norm < 0.95


def brute_force(M, kappa, low):
    """The greatest feasible integer exponents by enumeration."""
    best = None
    grid = torch.cartesian_prod(*[torch.arange(low, 1)] * len(M)).double()
    for e in grid:
        if ((M * torch.exp2(e[:, None] - e[None])).sum(-1) < kappa).all():
            best = e if best is None else torch.maximum(best, e)
    return best


@pytest.mark.parametrize("seed", first(10, range(25)))
def test_greedy_powers_are_the_greatest_feasible_ones(seed):
    M = (normal(seed, 3, 3).abs() * (2 * normal(seed + 9, 3)).exp()[:, None] * 0.2).round(decimals=3)
    expected = brute_force(M, 0.9, -8)
    found = power_of_two_scaling(M, 0.9)
    if expected is None:
        assert found is None or found.min() < -8
    else:
        assert torch.equal(found, expected)


def test_depth():
    assert depth(torch.zeros(3, 3)) == 1
    assert depth(torch.ones(4, 4).tril(-1)) == 4
    assert depth(torch.tensor([[0.0, 1.0], [1.0, 0.0]])) is None
    assert depth(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.5]])) is None


def test_small_rows_and_sources_keep_their_units():
    A = torch.tensor([[0.0, 1e-20], [0.0, 0.0]])
    assert torch.equal(rescaling(A, 0.9).log2, torch.zeros(2, dtype=torch.float64))


def test_spread_beyond_the_range_is_reported():
    n = 400
    A = 30 * torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)
    with pytest.raises(IllPosedError, match="acyclic"):
        rescaling(A, 0.9)
    deep = 30 * torch.diag(torch.ones(99), 1)
    scale = rescaling(deep, 0.9)
    assert scale.power_of_two
    assert abs(float(scale.log2.max() + scale.log2.min())) <= 1
    wide = torch.full((100, 1), 2.0)
    with pytest.raises(InputError, match="float64"):
        apply_rescaling(deep, wide, torch.ones(1, 100), None, scale, RELU)


def test_numbers_that_lose_bits_are_not_called_exact():
    A = torch.tensor([[0.0, 6.0], [0.0, 0.0]])
    B = torch.tensor([[1e-38], [1.0]])
    result = apply_rescaling(A, B, torch.ones(1, 2), None, rescaling(A, 1e-3), RELU)
    assert not result.exact


def test_arguments():
    with pytest.raises(InputError, match="kappa=0"):
        rescaling(torch.eye(2), 0.0)
    with pytest.raises(InputError, match="finite"):
        rescaling(torch.full((2, 2), math.nan), 0.9)
    with pytest.raises(InputError, match="square"):
        rescaling(torch.zeros(2, 3), 0.9)


def test_gradient_flows_through_the_rescaled_matrices():
    A = torch.tensor([[0.0, 6.0], [0.0, 0.0]], requires_grad=True)
    result = apply_rescaling(A, torch.eye(2), torch.ones(1, 2), None, rescaling(A, 0.9), RELU)
    result.A.sum().backward()
    assert torch.equal(A.grad, torch.tensor([[1.0, 0.125], [8.0, 1.0]]))


@pytest.mark.parametrize("seeds", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_norm_of_a_scaling_that_float32_rounds_is_still_a_bound(seeds):
    rounded = 0
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(seed)
        A = torch.rand(3, 3, generator=draw) * 10.0 ** (6 * torch.rand(3, 1, generator=draw))
        A = A / A.double().abs().mm(torch.ones(3, 1).double()).float()
        units = 10.0 ** (-8 * torch.rand(3, generator=draw))
        A = 0.999 * A * units[:, None] / units
        try:
            found = rescaling(A, 1.0)
        except IllPosedError:
            continue
        D, inverse = ([Fraction(d) for d in found.factors(sign).tolist()] for sign in (1, -1))
        rows = [[D[i] * abs(Fraction(float(A[i, j]))) * inverse[j] for j in range(3)] for i in range(3)]
        assert max(map(sum, rows)) <= Fraction(found.norm)
        rounded += not found.power_of_two
    assert rounded > seeds / 4
