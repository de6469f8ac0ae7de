import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from wellposed.activations import (
    Activation,
    activation_names,
    block_view,
    check_constants,
    get_activation,
    group_sort,
    leaky_relu,
    max_pool,
    register_activation,
)
from wellposed.equilibrium.rounding import unit_roundoff
from wellposed.errors import InputError, UnknownNameError

LISTED = [get_activation(name) for name in activation_names()]
BUILT = [leaky_relu(-0.5), leaky_relu(3.0), max_pool(1), max_pool(3), group_sort(2), group_sort(5)]
ALL = LISTED + BUILT
COMPONENTWISE = [activation for activation in ALL if activation.componentwise]
BLOCKWISE = [activation for activation in ALL if not activation.componentwise]


def named(activation):
    return activation.name


def points(scale=5.0, count=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("activation", ALL, ids=named)
def test_declared_constants_survive_sampling(activation):
    check_constants(activation, seed=1)


@pytest.mark.parametrize("activation", COMPONENTWISE, ids=named)
def test_slope_bounds_are_attained(activation):
    """Upper bounds that are true but loose would cost expressive power: compare with a fine grid."""
    z = torch.linspace(-40, 40, 800_001, dtype=torch.float64)
    slope = activation.slope_at(z)
    assert slope.max() <= activation.slope[1]
    assert slope.min() >= activation.slope[0]
    assert slope.max() > activation.slope[1] - 2e-3
    assert slope.min() < activation.slope[0] + 2e-3


@pytest.mark.parametrize("activation", COMPONENTWISE, ids=named)
def test_derivative_agrees_with_differences_and_is_differentiable(activation):
    z = points()
    step = 1e-6
    difference = (activation(z + step) - activation(z - step)) / (2 * step)
    assert torch.allclose(activation.slope_at(z), difference, atol=1e-8)
    smooth = activation.name not in {"identity", "relu", "hardtanh", "relu6", "hardsigmoid", "softshrink"}
    if smooth and not activation.homogeneous:
        assert gradcheck(activation.slope_at, points(count=5).requires_grad_(), atol=1e-6)


def test_slope_falls_back_to_autograd_and_keeps_the_graph():
    cubic = Activation("cubic", lambda z: z**3 / 3, slope=(0.0, 100.0))
    z = points(1.0).requires_grad_()
    slope = cubic.slope_at(z)
    assert torch.allclose(slope, z**2)
    (second,) = torch.autograd.grad(slope.sum(), z)
    assert torch.allclose(second, 2 * z)
    assert torch.allclose(torch.func.vmap(cubic.slope_at)(z.detach()), z.detach() ** 2)


@pytest.mark.parametrize("name", ["elu", "selu"])
def test_derivative_does_not_overflow_for_large_arguments(name):
    z = torch.tensor([1e4, -1e4], requires_grad=True)
    slope = get_activation(name).slope_at(z)
    (second,) = torch.autograd.grad(slope.sum(), z)
    assert slope.isfinite().all()
    assert torch.equal(second, torch.zeros(2))


@pytest.mark.parametrize("activation", ALL, ids=named)
def test_rounding_of_the_implementation_is_declared(activation):
    """The float32 value against the float64 one, at every magnitude."""
    width = 30
    magnitude = torch.logspace(-30, 4, 400 * width, dtype=torch.float64)
    z = torch.stack([magnitude, -magnitude]).flatten()[torch.randperm(800 * width, generator=torch.Generator())]
    z = z.reshape(-1, width).float()
    error = (activation(z).double() - activation(z.double())).abs()
    origin = activation(torch.zeros(width, dtype=torch.float64)).abs()
    size = z.double().abs()
    units = activation.rounding
    if not activation.componentwise:
        size = block_view(size, activation.block or 0).amax(-1, keepdim=True)
        size = size.expand(*size.shape[:-1], activation.block or width).flatten(-2)
        units += (activation.block or width) if units else 0
    allowed = units * unit_roundoff(torch.float32) * (origin + activation.lipschitz() * size) + 1e-37
    assert (error <= allowed).all(), float((error / allowed).max())


def test_softplus_has_no_jump_where_torch_has_one():
    z = torch.tensor([20.0 - 1e-12, 20.0 + 1e-12], dtype=torch.float64)
    rise = get_activation("softplus")(z).diff()
    assert 0 <= rise <= 3e-12


@pytest.mark.parametrize("norm", ["1", "2", "inf"])
@pytest.mark.parametrize("activation", BLOCKWISE, ids=named)
def test_jacobian_norms_of_block_maps(activation, norm):
    width = activation.block or 4
    worst = 0.0
    for seed in range(60):
        z = points(10.0 ** (seed % 4 - 3), width, seed)
        jacobian = torch.func.jacrev(activation.function)(z)
        worst = max(worst, float(torch.linalg.matrix_norm(jacobian, float(norm))))
    assert worst <= activation.lipschitz(norm) * (1 + 1e-12)


def test_softmax_constant_is_one_half_and_not_less():
    z = torch.zeros(2, dtype=torch.float64)
    jacobian = torch.func.jacrev(get_activation("softmax").function)(z)
    for norm in ("1", "2", "inf"):
        assert math.isclose(float(torch.linalg.matrix_norm(jacobian, float(norm))), 0.5)
        assert get_activation("softmax").lipschitz(norm) == 0.5


def test_closed_forms():
    gelu = get_activation("gelu").slope[1]
    root = math.sqrt(2)
    exact = 0.5 * (1 + math.erf(1)) + root * math.exp(-1) / math.sqrt(2 * math.pi)
    assert exact <= gelu <= exact + 1e-9
    selu = get_activation("selu")
    product = Fraction("1.0507009873554804934193349852946") * Fraction("1.6732632423543772848170429916717")
    assert product <= Fraction(selu.lipschitz()) <= product * (1 + Fraction(1, 10**15))
    assert Fraction(1, 6) <= Fraction(get_activation("hardsigmoid").lipschitz())


def test_max_pool_keeps_the_maximum_first():
    z = points(count=12).reshape(2, 6)
    expected = np.zeros((2, 6))
    expected[:, 0], expected[:, 3] = z[:, :3].amax(-1), z[:, 3:].amax(-1)
    assert np.array_equal(max_pool(3)(z).numpy(), expected)


def test_block_maps_refuse_a_wrong_width_and_a_slope():
    with pytest.raises(InputError, match="blocks of 4 got 6"):
        group_sort(4)(torch.zeros(6))
    with pytest.raises(InputError, match="Jacobian"):
        max_pool(2).slope_at(torch.zeros(4))
    with pytest.raises(InputError, match="at least one entry"):
        max_pool(0)


WRONG = [
    (Activation("steep", lambda z: 1.001 * torch.tanh(z)), "slope"),
    (Activation("falling", lambda z: -0.01 * z), "slope"),
    (Activation("jump", lambda z: torch.where(z.abs() > 0.5, z, 0.0)), "slope"),
    (Activation("understated", torch.tanh, constants={"inf": 0.9}), r"constants\['inf'\]"),
    (Activation("not_homogeneous", torch.tanh, homogeneous=True), "homogeneous"),
    (Activation("not_projection", torch.tanh, projection=True), "projection"),
    (Activation("wrong_slope", torch.relu, derivative=lambda z: (z > 0.1).to(z)), "derivative"),
    (Activation("hidden_softmax", lambda z: torch.softmax(z, -1)), "block=None"),
    (
        Activation("sharp", lambda z: torch.softmax(z, -1), block=0, constants={"2": 0.45}),
        r"constants\['2'\]",
    ),
    (
        Activation("leaking", lambda z: 0.9 * z + 0.01 * z.mean(-1, True), block=2, constants={"inf": 1.0}),
        "block=2",
    ),
]


@pytest.mark.parametrize(("activation", "claim"), WRONG, ids=lambda value: getattr(value, "name", ""))
def test_wrong_declarations_are_found_and_not_registered(activation, claim):
    with pytest.raises(InputError, match=f"violates {claim}"):
        register_activation(activation)
    assert activation.name not in activation_names()


def test_registry():
    assert get_activation(LISTED[0]) is LISTED[0]
    with pytest.raises(UnknownNameError, match="did you mean 'relu'"):
        get_activation("rellu")
    for name in ("hardshrink", "sign", "rrelu"):
        with pytest.raises(InputError, match="refused"):
            get_activation(name)
    with pytest.raises(InputError, match="refused"):
        register_activation(Activation("hardshrink", torch.relu))
    with pytest.raises(InputError, match="no Lipschitz constant in the norm '7'"):
        get_activation("relu").lipschitz("7")
    with pytest.raises(InputError, match="declares no constants"):
        Activation("blocky", torch.relu, block=2)
    with pytest.raises(InputError, match="name the norms"):
        Activation("odd", torch.relu, constants={"3": 1.0})


@pytest.mark.parametrize("activation", ALL, ids=named)
def test_activations_travel(activation):
    z = points(count=30)
    copy = pickle.loads(pickle.dumps(activation))
    assert torch.equal(copy(z), activation(z))
    assert hash(activation) == hash(activation)
    assert torch.equal(torch.func.vmap(activation.function)(z.reshape(1, 30))[0], activation(z))
