import math

import pytest
import torch
from torch import nn

from wellposed.activations import check_constants, get_activation, matrix_product, multiply
from wellposed.convert import Network, to_implicit
from wellposed.convert.rules.arithmetic import bounds, limit, matrix_multiplied, multiplied, picked, rounded_up
from wellposed.convert.signal import stacked
from wellposed.errors import InputError
from wellposed.forms import Dense


@pytest.fixture
def network():
    return Network((3, 4), torch.float64, torch.device("cpu"))


def values(network, signal, u):
    """Evaluates a signal by the form that has it as output."""
    return network.form(signal)(u).reshape(len(u), *signal.shape[1:])


def inputs(scale=1.0, count=40):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(count, 3, 4, generator=generator, dtype=torch.float64)


def weight(rows, columns, seed=1):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projected(signal, matrix):  # along the last dimension, as a dense matrix over all entries
    blocks = torch.block_diag(*[matrix] * (signal.size // signal.shape[-1]))
    return signal.linear(Dense(blocks), (*signal.shape[:-1], len(matrix)))


@pytest.mark.parametrize("shape", [(1, 3, 4), (1, 1, 4), (1, 3, 1), (4,), (1, 1, 1)])
def test_product_of_two_signals_broadcasts_as_torch_does(network, shape):
    u, x = inputs(), network.input
    index = x.indices()[tuple(slice(0, size) for size in shape)] if len(shape) == 3 else x.indices()[0, 1]
    other = x.activate("tanh").select(index)
    product = multiplied(x, other)
    place = index.reshape(shape)
    expected = u * u.tanh().flatten(1)[:, place.reshape(-1)].reshape(
        len(u), *((1,) * (3 - len(shape)) + shape)[1:]
    )
    torch.testing.assert_close(values(network, product, u), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(values(network, multiplied(other, x), u), expected, rtol=1e-13, atol=1e-13)


def test_square_and_powers_share_their_source(network):
    u, x = inputs(), network.input
    cube = multiplied(multiplied(x, x), x)
    torch.testing.assert_close(values(network, cube, u), u**3, rtol=1e-13, atol=1e-13)
    assert [activation.name for activation in network.activations] == ["multiply()"] * 2
    assert len(network.sources[0].terms) == 1


def test_products_with_offsets_and_sums(network):
    u, x = inputs(), network.input
    a, b = x.scaled(2.0).shifted(1.0).plus(x.activate("relu")), x.activate("sigmoid").shifted(-3.0)
    expected = (2 * u + 1 + u.relu()) * (u.sigmoid() - 3)
    torch.testing.assert_close(values(network, multiplied(a, b), u), expected, rtol=1e-13, atol=1e-13)


def test_constant_factors_make_no_states(network):
    u, x = inputs(), network.input
    row = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    found = values(network, multiplied(x, network.constant(row)), u)
    torch.testing.assert_close(found, u * row)
    assert not multiplied(network.constant(torch.zeros(4)), x).terms
    m, n = weight(2, 4), weight(3, 4)
    right, left = network.constant(m.mT.expand(1, 4, 2)), network.constant(torch.stack([n.mT, -n.mT]))
    torch.testing.assert_close(values(network, matrix_multiplied(x, right), u), u @ m.mT)
    product = matrix_multiplied(left, x)
    assert product.shape == (2, 4, 4) and not network.sources
    both = network.form(product)(u).reshape(-1, 2, 4, 4)
    torch.testing.assert_close(both, torch.stack([n.mT @ u, -n.mT @ u], 1))


def test_shapes_that_do_not_fit(network):
    x = network.input
    with pytest.raises(InputError, match=r"\(1, 3, 4\) and \(1, 4, 3\)"):
        multiplied(x, x.select(x.indices().mT))
    with pytest.raises(InputError, match="as matrices"):
        matrix_multiplied(x, x)
    with pytest.raises(InputError, match="batches"):
        matrix_multiplied(stacked([x, x]).reshape((2, 3, 4)), stacked([x] * 3).reshape((3, 4, 3)))


@pytest.mark.parametrize("columns", [1, 3, 40])
def test_matrix_product_equals_matmul(network, columns):
    u, x = inputs(), network.input
    m = weight(columns, 4)
    right = projected(x, m)  # (1, 3, columns)
    product = matrix_multiplied(x.select(x.indices().mT), right)
    torch.testing.assert_close(values(network, product, u), u.mT @ (u @ m.mT), rtol=1e-12, atol=1e-12)
    rows = (4, 3, columns)
    assert network.activations[-1].name == f"matrix_product{rows}"
    assert network.sources[-1].size == max(4 * 3 + 3 * columns, 4 * columns)


@pytest.mark.parametrize("shapes", [((4,), (1, 4, 3)), ((1, 3, 4), (4,)), ((4,), (4,)), ((2, 1, 3, 2), (3, 2, 2))])
def test_matrix_products_of_vectors_and_batches(network, shapes):
    u, x = inputs(), network.input
    flat = [torch.arange(math.prod(shape)).reshape(shape) % 12 for shape in shapes]
    a, b = x.select(flat[0]), x.activate("tanh").select(flat[1])
    product = matrix_multiplied(a, b)
    found = network.form(product)(u)
    for sample, row in zip(u.flatten(1), found, strict=True):
        expected = sample[flat[0]] @ sample.tanh()[flat[1]]
        assert product.shape == tuple(expected.shape)
        torch.testing.assert_close(row, expected.reshape(-1), rtol=1e-12, atol=1e-12)


def test_padding_of_a_matrix_product_is_read_by_nobody(network):
    x = network.input
    form = network.form(matrix_multiplied(x, x.select(x.indices().mT)))
    size = form.A.shape[0]
    assert size == 24 and form.C.shape == (9, 24)
    assert not form.C.to_dense()[:, 9:].any()


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "softsign", "hardtanh", "sin", "relu6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_hold_on_random_inputs_and_at_extremes(activation, dtype):
    network = Network((6,), dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(50, 6, generator=generator, dtype=dtype)
    signal = network.input.activate(activation).linear(Dense(matrix), (1, 50), matrix[:, 0])
    low, high = bounds(signal)
    form = network.form(signal)
    extremes = 1e4 * torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 6)
    u = torch.cat([extremes, torch.randn(500, 6, generator=generator)]).to(dtype)
    y = form(u).double()
    assert (y >= low).all() and (y <= high).all()
    reach = (y.amax(0) - y.amin(0)) / (high - low)[0]
    if activation not in ("softsign", "sin"):
        assert reach.min() > 0.9  # the signs of the inputs reach the ends of the intervals


def test_bounds_of_whole_numbers_are_exact_and_others_have_room(network):
    x = network.input
    gate = x.activate("sigmoid")
    low, high = bounds(gate.scaled(-1.0).shifted(1.0))
    assert (low == 0).all() and (high == 1).all()
    low, high = bounds(gate.scaled(0.3))
    assert (high > 0.3).all() and (high < 0.31).all() and (low < 0).all()
    assert bounds(x) is None and bounds(x.activate("relu")) is None and limit(x) is None
    assert limit(gate.plus(x.activate("tanh"))) == 2.0
    assert bounds(network.constant(torch.tensor([2.0, -3.0])))[0].tolist() == [2.0, -3.0]


def test_limits_are_rounded_up():
    for value in (1.0, 0.1, 3.3333, 1e-9, 123456.789, 1 / 3):
        assert value <= rounded_up(value) <= value * (1 + 2**-8)


@pytest.mark.parametrize("scale", [0.37, 1.0, 5.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_at_the_bounds_never_changes_a_product(scale, dtype):
    network = Network((3, 4), dtype, torch.device("cpu"))
    x = network.input
    a, b = x.activate("tanh").scaled(scale).shifted(0.1), x.activate("sigmoid").scaled(-scale / 3)
    product, total = multiplied(a, b), matrix_multiplied(a, b.select(b.indices().mT))
    clipped = [activation.name for activation in network.activations[-2:]]
    assert clipped[0].startswith("multiply(0") or clipped[0].startswith(f"multiply({int(scale)}")
    u = torch.cat([inputs(1e3), inputs(1.0), 1e6 * torch.ones(1, 3, 4)]).to(dtype)
    form = network.form(stacked([product, total]))
    free = [get_activation("multiply()") if a.name == clipped[0] else a for a in form.activations]
    free = [get_activation("matrix_product(3, 4, 3)") if a.name == clipped[1] else a for a in free]
    assert torch.equal(form(u), form.replaced(activation=free)(u))


def quotients(activation, norm, scale):
    generator = torch.Generator().manual_seed(5)
    z = scale * torch.randn(3000, activation.block, generator=generator, dtype=torch.float64)
    steps = torch.randn(z.shape, generator=generator, dtype=torch.float64)
    axis = torch.eye(activation.block, dtype=torch.float64)[torch.arange(len(z)) % activation.block]
    found = []
    for other in (z + 1e-3 * steps, z + 1e-3 * steps.sign(), z + 1e-3 * axis, z + steps, -z):
        distance = torch.linalg.vector_norm(z - other, float(norm), -1)
        found.append(torch.linalg.vector_norm(activation(z) - activation(other), float(norm), -1) / distance)
    return float(torch.stack(found).max())


@pytest.mark.parametrize(
    "activation",
    [multiply(1.0, 3.0), multiply(0.5, 0.5), matrix_product(3, 2, 5, 1.0, 0.5), matrix_product(1, 4, 2, 2, 1)],
)
def test_declared_constants_of_products_bound_difference_quotients(activation):
    check_constants(activation)
    for norm in ("1", "2", "inf"):
        worst = max(quotients(activation, norm, scale) for scale in (0.1, 1.0, 10.0))
        assert worst <= activation.lipschitz(norm) * (1 + 1e-9)
        assert worst > 0.25 * activation.lipschitz(norm)


def test_constants_of_matrix_products_are_attained():
    # P of ones and Q moved in one entry; P moved in one entry and Q of ones
    phi = matrix_product(3, 2, 5, 1.0, 0.5)
    z = torch.cat([torch.ones(6), 0.5 * torch.ones(10)]).double()
    step = torch.zeros(16, dtype=torch.float64)
    step[6] = -0.25
    assert (phi(z + step) - phi(z)).abs().sum() / 0.25 == 3.0 == phi.lipschitz("1")
    wide = matrix_product(2, 2, 5, 1.0, 0.5)
    z = torch.cat([torch.ones(4), 0.5 * torch.ones(10)]).double()
    step = torch.zeros(14, dtype=torch.float64)
    step[0] = -0.25
    assert (wide(z + step) - wide(z)).abs().sum() / 0.25 == 2.5 == wide.lipschitz("1")
    z, step = torch.ones(2).double(), torch.full((2,), -1e-9).double()
    one = matrix_product(1, 1, 1, 1.0, 1.0)
    assert float((one(z + step) - one(z)).abs().max() / 1e-9) == pytest.approx(one.lipschitz("inf"), rel=1e-6)


def test_products_are_found_again_by_their_names():
    for phi in (multiply(1.0, 2.5), multiply(), matrix_product(2, 3, 4), matrix_product(2, 3, 4, 1.0, 0.1)):
        again = get_activation(phi.name)
        z = torch.randn(2 * phi.block, dtype=torch.float64)
        assert torch.equal(again(z), phi(z)) and again.constants == phi.constants and again.image == phi.image


def test_bounded_factors_give_lipschitz_products_and_unbounded_ones_none():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.value = nn.Linear(4, 5), nn.Linear(4, 5)

        def forward(self, x):
            return torch.sigmoid(self.gate(x)) * torch.tanh(self.value(x)) + self.value(x) * self.gate(x)

    network = Gated().double()
    form = to_implicit(network, (4,))
    u = torch.randn(20, 4, dtype=torch.float64)
    torch.testing.assert_close(form(u), network(u).detach(), rtol=1e-12, atol=1e-12)
    constants = {a.name: a.lipschitz("1") for a in form.activations if a.name.startswith("multiply")}
    assert constants == {"multiply(1.0, 1.0)": 1.0, "multiply()": math.inf}
    assert form.certificate().value == 0.0


def test_picked_equals_a_selection_from_stacked(network):
    u, x = inputs(), network.input
    parts = [x.scaled(2.0), x.activate("tanh").shifted(1.0), projected(x, weight(2, 4)), x.activate("relu")]
    whole = stacked(parts)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        index = torch.randint(-1, whole.size, (17,), generator=generator)
        torch.testing.assert_close(network.form(picked(parts, index))(u), network.form(whole.select(index))(u))
        torch.testing.assert_close(network.form(picked([whole], index))(u), network.form(whole.select(index))(u))
    assert set(picked(parts, torch.arange(12, 24)).terms) == {0}
