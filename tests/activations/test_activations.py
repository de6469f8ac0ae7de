import math
import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from wellposed.activations import (
    Activation,
    Traits,
    activation_names,
    block_view,
    check_constants,
    elu,
    get_activation,
    group_sort,
    hardtanh,
    leaky_relu,
    matrix_product,
    max_pool,
    multiply,
    normalise,
    register_activation,
    rescaled,
    softmax,
    softplus,
    softshrink,
)
from wellposed.activations.blockwise import piecewise
from wellposed.conditions.rounding import unit_roundoff
from wellposed.errors import InputError, UnknownNameError
from wellposed.forms.storage import registered_name

LISTED = [get_activation(name) for name in activation_names()]
BUILT = [leaky_relu(-0.5), leaky_relu(3.0), max_pool(1), max_pool(3), group_sort(2), group_sort(5)]
BUILT += [elu(0.0), elu(0.5), elu(2.5), hardtanh(-2.0, 0.5), hardtanh(1, 3), softplus(0.5), softplus(4.0)]
BUILT += [softshrink(2.0), softmax(1), softmax(3), softmax(5), normalise(1), normalise(3, 0.1), normalise(10)]
BUILT += [multiply(), multiply(1.0, 2.0), multiply(3.0, 0.0), matrix_product(1, 3, 1), matrix_product(2, 1, 3)]
BUILT += [matrix_product(3, 1, 2, 0.5, 2.0), matrix_product(1, 3, 1, 1.0, 1.0)]
BUILT += [rescaled("tanh", 3), rescaled("sigmoid", -4), rescaled("softmax(3)", -2), rescaled("elu(0.5)", 0.5)]
BUILT += [rescaled(rescaled("hardtanh", 1), -3), rescaled("normalise(3, 0.1)", 2)]
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
    pieces = ("identity", "relu", "hardtanh", "relu6", "hardsigmoid", "softshrink", "elu(0.0)")
    smooth = not any(name in activation.name for name in pieces) or activation.name.startswith("rescaled('elu")
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


@pytest.mark.parametrize("name", ["mish", "gelu_tanh", "gelu", "silu"])
def test_steepest_slopes_are_found_to_six_digits(name):
    """A fine grid around the steepest place of a coarse one."""
    activation = get_activation(name)
    coarse = torch.linspace(-8, 8, 160_001, dtype=torch.float64)
    slope = activation.slope_at(coarse)
    for place, bound, sign in (
        (slope.argmax(), activation.slope[1], 1),
        (slope.argmin(), activation.slope[0], -1),
    ):
        fine = coarse[place] + torch.linspace(-1e-4, 1e-4, 20_001, dtype=torch.float64)
        steepest = float((sign * activation.slope_at(fine)).max())
        assert sign * bound - 1e-6 < steepest <= sign * bound


@pytest.mark.parametrize("activation", ALL, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_lie_in_the_declared_image(activation, dtype):
    generator = torch.Generator().manual_seed(0)
    low, high = activation.image
    assert low <= high
    for scale in (1e-3, 0.3, 1.0, 5.0, 100.0, 1e4):
        z = (scale * torch.randn(400, 30, generator=generator, dtype=torch.float64)).to(dtype)
        value = activation(z)
        assert low <= value.min() and value.max() <= high
    if activation.componentwise and dtype == torch.float64:  # and no wider than it need be
        value = activation(torch.linspace(-40, 40, 80_001, dtype=dtype))
        widths = abs(low) if math.isfinite(low) else 1.0, abs(high) if math.isfinite(high) else 1.0
        assert value.min() < (low + 0.03 * widths[0] + 1e-3 if math.isfinite(low) else -0.3)
        assert value.max() > (high - 0.03 * widths[1] - 1e-3 if math.isfinite(high) else 5)


@pytest.mark.parametrize("activation", ALL, ids=named)
def test_names_lead_back(activation):
    again, z = get_activation(activation.name), points()
    assert torch.equal(again(z), activation(z))
    same = ("name", "slope", "block", "image", "homogeneous", "projection", "rounding", "constants")
    assert all(getattr(again, field) == getattr(activation, field) for field in same)
    if activation.componentwise:
        assert torch.equal(again.slope_at(z), activation.slope_at(z))


FUNCTIONS = {
    "elu(0.5)": lambda z: np.where(z > 0, z, 0.5 * np.expm1(z)),
    "elu": lambda z: np.where(z > 0, z, np.expm1(z)),
    "hardtanh(-2.0, 0.5)": lambda z: np.clip(z, -2, 0.5),
    "hardtanh": lambda z: np.clip(z, -1, 1),
    "softplus(4.0)": lambda z: np.log1p(np.exp(4 * z)) / 4,
    "softplus": lambda z: np.log1p(np.exp(z)),
    "softshrink(2.0)": lambda z: np.sign(z) * np.maximum(np.abs(z) - 2, 0),
    "softshrink": lambda z: np.sign(z) * np.maximum(np.abs(z) - 0.5, 0),
    "softshrink(0.0)": lambda z: z,
    "mish": lambda z: z * np.tanh(np.log1p(np.exp(z))),
    "hardswish": lambda z: z * np.clip(z + 3, 0, 6) / 6,
    "logsigmoid": lambda z: -np.log1p(np.exp(-z)),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "rescaled('tanh', 3.0)": lambda z: 8 * np.tanh(z / 8),
    "rescaled('sigmoid', -1.5)": lambda z: 2**-1.5 / (1 + np.exp(-z * 2**1.5)),
    "rescaled('relu', 3.0)": lambda z: np.maximum(z, 0),
    "softmax(3)": lambda z: np.exp(z) / np.repeat(np.exp(z).reshape(-1, 3).sum(1), 3),
    "multiply()": lambda z: np.where(np.arange(30) % 2, 0, z * np.roll(z, -1)),
    "multiply(1.0, 2.0)": lambda z: np.where(
        np.arange(30) % 2, 0, np.clip(z, -1, 1) * np.clip(np.roll(z, -1), -2, 2)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_what_their_names_say(name):
    z = points(3.0)
    assert np.allclose(get_activation(name)(z).numpy(), FUNCTIONS[name](z.numpy()), rtol=1e-12, atol=1e-13)


def test_normalise_has_mean_zero_and_variance_one():
    value = normalise(5, 0.0)(points(count=30)).reshape(6, 5)
    assert torch.allclose(value.mean(1), torch.zeros(6, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(value.square().mean(1), torch.ones(6, dtype=torch.float64))
    z = points(count=10)
    spread = z.reshape(2, 5).var(1, correction=0, keepdim=True) + 0.3
    centred = z.reshape(2, 5) - z.reshape(2, 5).mean(1, keepdim=True)
    assert torch.allclose(normalise(5, 0.3)(z), (centred / spread.sqrt()).flatten())
    assert normalise(5, 0.0).lipschitz("2") == math.inf
    assert math.isclose(normalise(4, 0.25).lipschitz("2"), 2.0) and normalise(4, 0.25).lipschitz("inf") == 4.0


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (2, 3, 2), (3, 1, 4), (1, 4, 2)])
@pytest.mark.parametrize("bounds", [(), (1.5, 0.5)])
def test_matrix_product_multiplies_matrices(rows, inner, columns, bounds):
    activation = matrix_product(rows, inner, columns, *bounds)
    size = activation.block
    assert size == max(rows * inner + inner * columns, rows * columns)
    z = points(1.0, 2 * size).reshape(2, size)
    value = activation(z.flatten()).reshape(2, size)
    for block, found in zip(z, value, strict=True):
        left = block[: rows * inner].reshape(rows, inner)
        right = block[rows * inner : rows * inner + inner * columns].reshape(inner, columns)
        if bounds:
            left, right = left.clamp(-1.5, 1.5), right.clamp(-0.5, 0.5)
        assert torch.allclose(found[: rows * columns], (left @ right).flatten())
        assert not found[rows * columns :].any()


def test_bounds_of_products_are_attained():
    """Constants that are true but loose would cost certificates: the worst pairs of clipped factors."""
    z = torch.tensor([1.0, 2.0], dtype=torch.float64)
    jacobian = torch.func.jacrev(multiply(1.0, 2.0).function)(0.999999 * z)
    for norm in ("1", "2", "inf"):
        found = float(torch.linalg.matrix_norm(jacobian, float(norm)))
        assert found == pytest.approx(multiply(1.0, 2.0).lipschitz(norm), rel=1e-5)
    assert multiply().constants == dict.fromkeys(("1", "2", "inf"), math.inf)
    assert matrix_product(1, 2, 3).lipschitz() == math.inf


def test_rescaled_values_are_scaled_bit_by_bit():
    for name in ("tanh", "softmax", "elu(0.3)", "max_pool(3)", "hardtanh", "normalise(5, 0.0)"):
        for exponent in (-7, 5.0):
            z, scaled = points().float(), rescaled(name, exponent)
            assert torch.equal(scaled(z * 2**exponent), get_activation(name)(z) * 2**exponent)
            assert scaled.constants == get_activation(name).constants
    assert rescaled("relu", 4) is get_activation("relu") and rescaled("tanh", 0) is get_activation("tanh")
    assert rescaled("sigmoid", 2).image == (0.0, 4.0) and rescaled("sigmoid", 2).slope == (0.0, 0.25)


BAD = {
    "alpha of elu must be a finite number >= 0; received -1": lambda: elu(-1),
    "alpha of elu must be a finite number >= 0; received nan": lambda: elu(math.nan),
    "slope of leaky_relu must be a finite number; received inf": lambda: leaky_relu(math.inf),
    "slope of leaky_relu must be a finite number; received 'a'": lambda: leaky_relu("a"),
    "hardtanh needs low < high; received 1.0 and 1.0": lambda: hardtanh(1, 1),
    "high of hardtanh must be a finite number": lambda: hardtanh(0, math.inf),
    "beta of softplus must be a finite number > 0; received 0": lambda: softplus(0),
    "margin of softshrink must be a finite number >= 0": lambda: softshrink(-0.1),
    "size of softmax must be a whole number, at least one; received 0": lambda: softmax(0),
    "size of group_sort must be a whole number, at least one; received 2.0": lambda: group_sort(2.0),
    "size of normalise must be a whole number": lambda: normalise(-3),
    "eps of normalise must be a finite number >= 0; received -1e-05": lambda: normalise(3, -1e-5),
    "multiply takes bounds of both factors or of none; received 1.0 and None": lambda: multiply(1.0),
    "second bound of multiply must be a finite number >= 0; received -2": lambda: multiply(1.0, -2),
    "inner of matrix_product must be a whole number": lambda: matrix_product(2, 0, 1),
    "matrix_product takes bounds of both factors or of none": lambda: matrix_product(2, 1, 1, second=1.0),
    "exponent of rescaled must be a finite number": lambda: rescaled("tanh", math.nan),
    "exponent of rescaled must lie within": lambda: rescaled("tanh", 2000),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_parameters_are_refused(message):
    with pytest.raises(InputError, match=message):
        BAD[message]()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("elu(-1.0)", "alpha of elu must be"),
        ("elu(1.0, 2.0)", "elu does not take"),
        ("max_pool()", "max_pool does not take"),
        ("max_pool(2.5)", "whole number"),
        ("softmax(k)", "softmax does not take"),
        ("leaky_relu(0.1", "unknown activation"),
        ("rescaled('nothing', 2)", "unknown activation 'nothing'"),
        ("rescaled('tanh', 3000)", "within"),
        ("tanh(2)", "unknown activation"),
        ("softmax(3)(4)", "unknown activation|does not take"),
    ],
)
def test_bad_names_are_refused(name, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        get_activation(name)


def test_empty_batches_and_whole_vectors_of_nothing():
    for activation in BLOCKWISE:
        assert activation(torch.zeros(0, 30)).shape == (0, 30)
    assert block_view(torch.zeros(3, 0), 0).shape == (3, 1, 0)
    assert get_activation("softmax")(torch.zeros(3, 0)).shape == (3, 0)


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
    with pytest.raises(InputError, match="size of max_pool must be a whole number, at least one; received 0"):
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


def test_traits_hold_for_their_function_and_not_for_the_name():
    named = [
        get_activation(name) for name in ("relu", "tanh", "leaky_relu(0.3)", "hardtanh(-2, 1)", "max_pool(2)")
    ]
    kernels = [("relu", 0.0), ("tanh", 0.0), ("sloped", 0.3), None, None]
    assert [phi.traits.kernel for phi in named] == kernels
    assert [phi.traits.kinks for phi in named] == [(0.0,), None, (0.0,), (-2.0, 1.0), None]
    for phi in named:
        assert replace(phi, name="mine").traits == pickle.loads(pickle.dumps(phi)).traits == phi.traits != Traits()
        assert replace(phi, function=lambda z: z / 2).traits == Traits()
        assert phi.derivative is None or replace(phi, derivative=torch.ones_like).traits == Traits()
        assert not phi.componentwise or replace(phi, slope=(-1.0, 2.0)).traits == Traits()
        own = Traits(kinks=(7.0,))
        assert replace(phi, function=lambda z: z / 2, traits=own).traits == own
    assert rescaled("tanh", 3).traits == Traits() and Activation("relu", torch.tanh).traits == Traits()


def test_what_a_map_is_follows_from_its_constants():
    assert [name for name in activation_names() if get_activation(name).is_relu] == ["relu"]
    assert [name for name in activation_names() if get_activation(name).is_identity] == ["identity"]
    assert leaky_relu(1.0).is_identity and not leaky_relu(0.0).is_identity and not hardtanh(0.0, 1e9).is_relu
    ordered = [
        phi.name for phi in (max_pool(2), group_sort(3), softmax(2), get_activation("gelu")) if phi.increasing
    ]
    assert ordered == ["max_pool(2)", "group_sort(3)"]


@pytest.mark.parametrize(
    ("function", "traits", "claim"),
    [
        (lambda z: torch.relu(z - 1), Traits(kinks=(0.0,)), "kinks"),
        (torch.tanh, Traits(kinks=(0.0,)), "kinks"),
        (torch.tanh, Traits(stretch=0.5), "stretch"),
        (torch.neg, Traits(increasing=True), "increasing"),
    ],
)
def test_false_traits_are_refused(function, traits, claim):
    block = {"block": 2, "constants": {"inf": 1.0}} if traits.increasing else {}
    with pytest.raises(InputError, match=f"violates {claim}"):
        check_constants(Activation("mine", function, traits=traits, **block))


@pytest.mark.parametrize(
    "name", ["tanh(steep)", "relu(shifted)", "leaky_relu(0.2)", "elu(", "rescaled('tanh', 1)", "max_pool(abs)"]
)
def test_names_that_read_like_another_activation_are_refused(name):
    with pytest.raises(InputError, match="reads like"):
        register_activation(Activation(name, lambda z: torch.tanh(3 * z), (0.0, 3.0)))
    assert name not in activation_names()


def test_names_of_the_library_are_replaced_only_when_asked_for():
    own, known = Activation("tanh", lambda z: torch.tanh(2 * z), (0.0, 2.0)), get_activation("tanh")
    with pytest.raises(InputError, match="replace=True"):
        register_activation(own)
    assert get_activation("tanh") is known
    assert register_activation(known) is known and register_activation(leaky_relu(0.2)).name == "leaky_relu(0.2)"
    try:
        assert get_activation(register_activation(own, replace=True).name) is own
        with pytest.raises(InputError, match="not the registered"):
            registered_name(own)  # a file would be read elsewhere as what the name says
    finally:
        register_activation(known, replace=True)
    assert get_activation("tanh") is known


def test_maps_of_one_name_are_not_one_map():
    first, second = (Activation("mine", lambda z, k=k: k * z, (0.5, 0.5)) for k in (0.5, -0.5))
    phi = piecewise([first, second], [1, 1])
    assert torch.equal(phi(torch.ones(1, 2)), torch.tensor([[0.5, -0.5]]))
    same = piecewise([leaky_relu(0.2), leaky_relu(0.2)], [1, 1])
    assert same.name == "leaky_relu(0.2)"
