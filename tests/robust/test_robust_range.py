"""Bounds at the ends of the number range, against exact values in fractions."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tests.campaigns.sixty_digits import FunctionalNorm, Pooled, Residual, Scaled, network, numbers, set_digits
from wellposed.activations import get_activation
from wellposed.conditions.norms import largest_singular_value, spectral_norm
from wellposed.conditions.rounding import euclidean_norm
from wellposed.convert import to_implicit
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Block, Dense, ImplicitForm, LowRank, Product
from wellposed.robust import (
    Ball,
    Bounds,
    Box,
    MethodError,
    Separable,
    SparseBox,
    certified,
    certified_accuracy,
    lipschitz,
    margin_bounds,
    output_bounds,
    sensitivity,
    separable_bound,
    state_bounds,
)

F32, F64 = torch.float32, torch.float64
METHODS = ("norm", "box", "interval", "l2", "crown", "optimised", "lp", "triangle", "best")
CHEAP = ("box", "interval", "l2", "crown", "best")


def exact(value: float | Tensor) -> Fraction:
    return Fraction(float(value))


def holds(bounds: Bounds, truth: Fraction) -> bool:
    """Whether an exact value lies within the bounds of the only output."""
    lower, upper = float(bounds.lower[0, 0]), float(bounds.upper[0, 0])
    assert not (math.isnan(lower) or math.isnan(upper))
    below = lower == -math.inf or (math.isfinite(lower) and Fraction(lower) <= truth)
    return below and (upper == math.inf or (math.isfinite(upper) and Fraction(upper) >= truth))


def two_outputs(dtype: torch.dtype) -> tuple[ImplicitForm, Tensor]:
    """y = (c b0 u0, b1 u1) where c b0 overflows and y does not; the second output is larger."""
    b0, b1, c, u = (1e15, 1e20, 1e24, (1e-9, 1e15)) if dtype == F32 else (1e150, 1e170, 1e200, (1e-100, 1e100))
    B = torch.tensor([[b0, 0.0], [0.0, b1]], dtype=dtype)
    form = ImplicitForm(torch.zeros(2, 2, dtype=dtype), B, torch.tensor([[c, 0.0], [0.0, 1.0]], dtype=dtype))
    return form, torch.tensor([u], dtype=dtype)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("method", METHODS)
def test_no_class_is_certified_by_a_coefficient_that_overflows(method, dtype):
    form, u = two_outputs(dtype)
    try:
        bounds = margin_bounds(form, Box(u, u), torch.tensor([0]), method)
    except MethodError:
        return
    assert int(form(u).argmax()) == 1
    assert not certified(form, Box(u, u), torch.tensor([0]), method).any()
    assert certified_accuracy(form, Box(u, u), torch.tensor([0]), method) == 0
    assert (bounds.lower <= bounds.upper).all()
    assert (bounds.upper > -math.inf).all() and (bounds.lower < math.inf).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_bound_is_nowhere_beyond_a_value_because_of_overflow(method):
    B = torch.tensor([[1e20]])
    form, u = ImplicitForm(torch.zeros(1, 1), B, B), torch.tensor([[1e-10]])
    assert holds(output_bounds(form, Box(u, u), method), exact(B) * exact(B) * exact(u))


def test_ends_that_prove_nothing_become_infinite_on_both_sides():
    lower = torch.tensor([[math.nan, 0.0, math.inf, 0.0, 2.0, -math.inf, 0.0, math.inf, -math.inf]])
    upper = torch.tensor([[1.0, math.nan, math.inf, -math.inf, 1.0, 1.0, math.inf, 1.0, -math.inf]])
    found = Bounds(lower, upper, "given", torch.zeros_like(lower)).stated()
    infinite = [-math.inf, math.inf]
    ends = [list(pair) for pair in zip(found.lower[0].tolist(), found.upper[0].tolist(), strict=True)]
    assert ends == [infinite] * 5 + [[-math.inf, 1.0], [0.0, math.inf], infinite, infinite]


@pytest.mark.parametrize(
    "ends", [(0.0, -math.inf), (math.nan, -1.0), (-1.0, -2.0), (-math.inf, -1.0), (-math.inf, -math.inf)]
)
def test_bounds_that_are_not_finite_or_cross_certify_nothing(ends):
    form, u = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]])), torch.ones(1, 1)

    def method(query):
        lower, upper = (torch.tensor([[0.0, end]]) for end in ends)
        return Bounds(lower, upper, "given", torch.zeros(1, 2))

    assert certified(form, Box(u, u), torch.tensor([0])).all()
    assert not certified(form, Box(u, u), torch.tensor([0]), method).any()


def test_no_method_certifies_a_class_that_the_model_does_not_give():
    form, u = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]])), torch.ones(1, 1)

    def wrong(query):
        return Bounds(torch.full((1, 2), -2.0), torch.full((1, 2), -1.0), "wrong", torch.zeros(1, 2))

    assert certified(form, Box(u, u), torch.tensor([0]), wrong).all()
    assert not certified(form, Box(u, u), torch.tensor([1]), wrong).any()


def test_intersections_forget_a_proof_that_overflowed():
    good = Bounds(torch.tensor([[0.0]]), torch.tensor([[1.0]]), "good", torch.zeros(1, 1))
    for bad in (-math.inf, math.nan):
        other = Bounds(torch.tensor([[0.5]]), torch.tensor([[bad]]), "bad", torch.zeros(1, 1))
        for found in (good.within(other), other.within(good)):
            assert (float(found.lower), float(found.upper)) == (0.0, 1.0)
    apart = Bounds(torch.tensor([[2.0]]), torch.tensor([[3.0]]), "apart", torch.zeros(1, 1))
    assert (float(good.within(apart).lower), float(good.within(apart).upper)) == (-math.inf, math.inf)


SCALES = {F32: [1e-44, 1e-38, 1e-30, 1e-23, 1e-19, 1.0, 1e18, 1e25, 1e37],
          F64: [5e-324, 1e-308, 1e-300, 1e-200, 1e-170, 1e-150, 1.0, 1e140, 1e170, 1e300]}  # fmt: skip
SCALED = [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales]


@pytest.mark.parametrize(("dtype", "scale"), SCALED)
def test_euclidean_norms_are_not_below_exact_ones_at_any_scale(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    z = (torch.randn(20, 5, generator=generator, dtype=F64) * scale).to(dtype)
    z[0, 1:] = 0
    for row, found in zip(z, euclidean_norm(z), strict=True):
        square = sum(exact(part) ** 2 for part in row)
        assert math.isinf(float(found)) or exact(found) ** 2 >= square
        if 1e6 * torch.finfo(dtype).tiny < scale < 1e-6 * torch.finfo(dtype).max:
            assert exact(found) ** 2 <= square * (1 + exact(40 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-170, 1e-154, 1.0, 1e154, 1e170, 1e300])
@pytest.mark.parametrize("bound", [largest_singular_value, spectral_norm])
def test_singular_values_are_bounded_at_any_scale(bound, scale):
    matrix = scale * torch.eye(70, dtype=F64)
    matrix[0, 1] = scale
    assert scale <= float(bound(matrix)) <= 1.7 * scale + 1e-289


@pytest.mark.parametrize(("dtype", "scale"), SCALED)
@pytest.mark.parametrize("method", METHODS)
def test_balls_hold_their_exact_extreme_point_at_any_scale(method, dtype, scale):
    """Of four inputs with |u| <= 1, (1, 1, 1, 1) / 2 leads to twice the weight."""
    B, zero = torch.full((1, 4), scale, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    ball = Ball(torch.zeros(1, 4, dtype=dtype), 1.0)
    gain = torch.full((1, 1), min(max(1e-3 / scale, 1e-30), 1e30), dtype=dtype)
    through = ImplicitForm(zero, B, gain)
    past = ImplicitForm(zero, torch.zeros_like(B), zero, B)
    for form, truth in ((through, 2 * exact(B[0, 0]) * exact(gain)), (past, 2 * exact(B[0, 0]))):
        try:
            found = output_bounds(form, ball, method)
        except InputError:  # the linear programs take finite intervals only
            continue
        assert holds(found, truth) and holds(found, Fraction(0))


def chain(dtype: torch.dtype, weights: list[float], b: float, c: float) -> ImplicitForm:
    """y = c a_n ... a_1 b u for u >= 0, a block a weight."""
    n = len(weights) + 1
    parts = {(i + 1, i): Dense(torch.tensor([[value]], dtype=dtype)) for i, value in enumerate(weights)}
    B = torch.tensor([[b]] + [[0.0]] * (n - 1), dtype=dtype)
    C = torch.tensor([[0.0] * (n - 1) + [c]], dtype=dtype)
    return ImplicitForm(Block((1,) * n, (1,) * n, parts, dtype), B, C)


CHAINS = [
    (F32, [1.1e-22], 1e30, 1.3e-22, 1.0),
    (F32, [1.23e-20], 1e30, 1.3e-24, 1.0),
    (F32, [1e30, 1e30], 1e-30, 1.0, 1e-30),
    (F32, [1e-30, 1e30, 1e-20], 1e-10, 1e25, 1e10),
    (F64, [1e200, 1e200], 1e-200, 1.0, 1e-200),
    (F64, [1e90] * 4, 1e-200, 1.0, 1e-150),
    (F64, [1e-160], 1e300, 1e-160, 1.0),
    (F64, [1e-300, 1e150], 1e-100, 1e300, 1e-20),
]


def bounded(form: ImplicitForm, inputs: Box | Ball, method: str) -> Bounds | None:
    """Bounds by a method; None where it does not apply, as where nothing is finite."""
    try:
        return output_bounds(form, inputs, method)
    except (InputError, IllPosedError):
        return None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "weights", "b", "c", "u"), CHAINS)
def test_underflow_is_paid_for_where_it_is_amplified(dtype, weights, b, c, u, method):
    form, point = chain(dtype, weights, b, c), torch.full((1, 1), u, dtype=dtype)
    truth = exact(point)
    for value in (*weights, b, c):
        truth *= exact(torch.tensor(value, dtype=dtype))
    for lower in (point, torch.zeros_like(point)):
        for inputs in (Box(lower, point), Ball(point, 0.0)):
            found = bounded(form, inputs, method)
            assert found is None or holds(found, truth)


@pytest.mark.parametrize("method", METHODS)
def test_a_loop_that_an_underflowing_load_drives_is_bounded(method):
    A = torch.tensor([[0.5, 0.0], [1e200, 0.5]], dtype=F64)
    B, u = torch.tensor([[1e-200], [0.0]], dtype=F64), torch.tensor([[1e-150]], dtype=F64)
    found = bounded(ImplicitForm(A, B, torch.tensor([[0.0, 1e200]], dtype=F64)), Box(u, u), method)
    assert found is None or holds(found, 4 * exact(B[0, 0]) * exact(u) * exact(1e200) ** 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_underflow_between_two_factors_is_paid_for(dtype, method):
    left, right = (1e30, 1e-30) if dtype == F32 else (1e200, 1e-200)
    factors = torch.tensor([[0.0], [left]], dtype=dtype), torch.tensor([[right], [0.0]], dtype=dtype)
    B, C = torch.tensor([[right], [0.0]], dtype=dtype), torch.tensor([[0.0, 1.0]], dtype=dtype)
    one = torch.ones(1, 1, dtype=dtype)
    found = bounded(ImplicitForm(LowRank(*factors), B, C), Box(one, one), method)
    truth = exact(factors[0][1, 0]) * exact(factors[1][0, 0]) * exact(B[0, 0])
    assert found is None or holds(found, truth)


def relu_network(weights: list[list[list[Fraction]]], u: list[Fraction]) -> list[Fraction]:
    """Evaluates layers without biases, ReLU between them."""
    for index, matrix in enumerate(weights):
        u = [sum((a * b for a, b in zip(row, u, strict=True)), Fraction(0)) for row in matrix]
        u = u if index == len(weights) - 1 else [max(value, Fraction(0)) for value in u]
    return u


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [F32, F64])
def test_networks_at_any_scale_stay_within_their_bounds(dtype, seed):
    """Every layer has a scale of its own, and every vertex of the box is evaluated in fractions."""
    generator = torch.Generator().manual_seed(seed)
    largest = 36.0 if dtype == F32 else 290.0
    exponents = (2 * torch.rand(4, generator=generator, dtype=F64) - 1) * largest
    exponents[2] = (-exponents[0] - exponents[1] - exponents[3]).clamp(-largest, largest)
    W = [torch.randn(m, n, generator=generator, dtype=F64) for m, n in ((3, 2), (3, 3), (1, 3))]
    W = [(matrix * 10.0 ** float(e)).to(dtype) for matrix, e in zip(W, exponents[:3], strict=True)]
    center = torch.randn(1, 2, generator=generator, dtype=F64)
    ends = [((center + shift) * 10.0 ** float(exponents[3])).to(dtype) for shift in (-0.1, 0.1)]
    A = Block((3, 3), (3, 3), {(1, 0): Dense(W[1])}, dtype)
    zeros = torch.zeros(3, 2, dtype=dtype)
    C = torch.cat([torch.zeros(1, 3, dtype=dtype), W[2]], dim=1)
    form = ImplicitForm(A, torch.cat([W[0], zeros]), C)
    layers = [[[exact(value) for value in row] for row in matrix] for matrix in W]
    corners = product(*([exact(end[0, k]) for end in ends] for k in range(2)))
    values = [relu_network(layers, list(corner))[0] for corner in corners]
    for method in METHODS:
        found = bounded(form, Box(*ends), method)
        assert found is None or all(holds(found, value) for value in values), method


PARAMETERS = [0.1, 0.01, 0.7, 0.95, 0.3, 1.7, 2.1, 1 / 3, 0.5]


@pytest.mark.parametrize("value", PARAMETERS)
def test_slopes_and_images_hold_the_parameter_and_what_torch_makes_of_it(value):
    rounded = float(torch.tensor(value, dtype=F32))
    leaky, elu = get_activation(f"leaky_relu({value})"), get_activation(f"elu({value})")
    clipped = get_activation(f"hardtanh({-value}, {value})")
    for given in (value, rounded):
        assert leaky.slope[0] <= given <= leaky.slope[1] and given <= leaky.lipschitz()
        assert given <= max(elu.slope[1], 1.0) and elu.image[0] <= -given
        assert clipped.image[0] <= -given and given <= clipped.image[1]
    for dtype in (F32, F64):
        z = torch.tensor([-60.0, -1e-3, 60.0], dtype=dtype)
        for phi in (elu, clipped, get_activation("selu")):
            assert phi.image[0] <= float(phi(z).min()) and float(phi(z).max()) <= phi.image[1]


def activated(name: str, value: Fraction, z: Fraction) -> Fraction:
    if name == "leaky_relu":
        return z if z > 0 else value * z
    if name == "hardtanh":
        return min(max(z, -value), value)
    if z >= 0:
        return z
    with localcontext() as context:
        context.prec = 60
        factor = Fraction(value) if name == "elu" else SELU[0] * SELU[1]
        return factor * (Fraction((Decimal(z.numerator) / Decimal(z.denominator)).exp()) - 1)


SELU = Fraction("1.0507009873554804934193349852946"), Fraction("1.6732632423543772848170429916717")


@pytest.mark.parametrize("value", [0.1, 0.7, 1.7])
@pytest.mark.parametrize("name", ["leaky_relu", "elu", "hardtanh", "selu"])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_bounds_hold_the_value_of_the_parameter_as_it_was_given(dtype, name, value):
    given = {"hardtanh": f"hardtanh({-value}, {value})", "selu": "selu"}.get(name, f"{name}({value})")
    one = torch.ones(1, 1, dtype=dtype)
    form = ImplicitForm(torch.zeros(1, 1, dtype=dtype), one, one, activation=given)
    for point in (-60.0, -0.4):
        u = torch.full((1, 1), point, dtype=dtype)
        truth = activated(name, Fraction(value), exact(u))
        for method in ("box", "interval", "l2", "crown"):
            for found in (output_bounds(form, Box(u, u), method), state_bounds(form, Box(u, u), method)):
                assert holds(found, truth) and holds(found, exact(form(u))), (point, method)


def normalised(network: nn.Sequential, u: Tensor) -> list[Decimal]:
    """Evaluates linear, batch normalisation, ReLU and linear in decimals, each weight as it is stored."""
    first, norm, _, last = network

    def numbers(values: Tensor) -> list[Decimal]:
        return [Decimal(float(value)) for value in values.detach()]

    def layer(part: nn.Linear, x: list[Decimal]) -> list[Decimal]:
        pairs = zip(part.weight, numbers(part.bias), strict=True)
        return [sum((a * b for a, b in zip(numbers(row), x, strict=True)), shift) for row, shift in pairs]

    statistics = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    hidden = zip(layer(first, numbers(u)), *map(numbers, statistics), strict=True)
    eps = Decimal(norm.eps)
    values = [(z - mean) / (variance + eps).sqrt() * w + b for z, mean, variance, w, b in hidden]
    return layer(last, [max(value, Decimal(0)) for value in values])


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("method", ["box", "l2", "interval", "crown"])
def test_bounds_of_a_network_hold_its_value_before_batch_norm_was_folded(method, dtype):
    for seed in range(6):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).eval().to(dtype)
        norm = network[1]
        with torch.no_grad():
            for part in (norm.running_mean, norm.weight, norm.bias):
                part.normal_()
            norm.running_var.uniform_(0.1, 3)
        u = torch.rand(1, 4).to(dtype)
        found = output_bounds(network, Box(u, u), method)
        assert found.lower.dtype == dtype
        with localcontext() as context:
            context.prec = 60
            for value, lower, upper in zip(normalised(network, u[0]), found.lower[0], found.upper[0], strict=True):
                assert Decimal(float(lower)) <= value <= Decimal(float(upper))


def folding_networks(dtype: torch.dtype) -> dict[str, nn.Sequential]:
    """Networks whose layers conversion multiplies out, so that their weights would be rounded."""

    def linear(m: int, n: int, size: float = 1.0) -> nn.Linear:
        part = nn.Linear(m, n, dtype=dtype)
        part.weight.data.mul_(size)
        return part

    def norm() -> nn.BatchNorm1d:
        part = nn.BatchNorm1d(4, dtype=dtype)
        part.weight.data.normal_()
        part.running_mean.normal_()
        part.running_var.uniform_(0.1, 3)
        return part

    large = linear(4, 4, 1e6)
    away = linear(4, 4)
    away.weight.data = -large.weight.data
    middles: dict[str, list[nn.Module]] = {
        "functional norm": [FunctionalNorm(norm())],
        "two norms": [norm(), FunctionalNorm(norm())],
        "linear chain": [linear(4, 4), linear(4, 4), linear(4, 4)],
        "cancelling chain": [large, Residual(nn.Sequential(linear(4, 4, 1e-3), linear(4, 4, 1e-3)))],
        "residual": [Residual(linear(4, 4)), Residual(nn.Sequential(norm(), nn.Tanh(), linear(4, 4)))],
        "cancelling sum": [nn.Sequential(large), Residual(away)],
        "pooling": [Pooled(3, 1, False), linear(2, 4), Pooled(2, 1, True), linear(3, 4)],
        "scaled": [Scaled()] * 12,
        "small and large": [linear(4, 4, 1e-30), linear(4, 4, 1e-30), linear(4, 4, 1e30), linear(4, 4, 1e30)],
    }
    return {
        name: nn.Sequential(linear(3, 4), *middle, nn.ReLU(), linear(4, 2)).eval()
        for name, middle in middles.items()
    }


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", folding_networks(F32))
def test_bounds_of_a_network_hold_its_value_whatever_conversion_multiplies_out(name, dtype):
    torch.manual_seed(3)
    set_digits(dtype)
    module = folding_networks(dtype)[name]
    u = torch.rand(2, 3, dtype=dtype)
    truth = network(module, numbers(u))
    for method, inputs in (
        ("box", Box(u, u)),
        ("l2", Ball(u, 0.0)),
        ("interval", Ball(u, 0.0)),
        ("crown", Box(u, u)),
    ):
        found = output_bounds(module, inputs, method)
        assert (numbers(found.lower) <= truth).all() and (numbers(found.upper) >= truth).all(), method
        if name != "small and large":
            assert float(found.width.max()) < 1e-2 * (1 + float(found.upper.abs().max()))
    states = to_implicit(module, (3,)).sizes[0]
    assert state_bounds(module, Box(u, u), "interval").lower.shape == (2, states)
    target = found.lower.argmax(1)
    proven = certified(module, Box(u, u), target)
    assert all(truth[k, t] > truth[k, 1 - t] for k, t in enumerate(target.tolist()) if proven[k])


@pytest.mark.parametrize("dtype", [F32, F64])
def test_sets_hold_every_point_within_their_radius(dtype):
    u = torch.tensor([[1.0, 0.3, 1e-30, -7.0]], dtype=dtype)
    for radius in (0.7, 0.1, 1e-10, 1e-40):
        for box in (Box.around(u, radius, None, None), SparseBox(u, radius, 1).box(), Ball(u, radius).box()):
            for k in range(4):
                assert exact(box.lower[0, k]) <= exact(u[0, k]) - Fraction(radius)
                assert exact(box.upper[0, k]) >= exact(u[0, k]) + Fraction(radius)


@pytest.mark.parametrize("method", METHODS)
def test_products_of_operators_that_underflow_while_they_are_formed_are_bounded(method):
    small, large = (Dense(torch.tensor([[value]], dtype=F64)) for value in (1e-187, 1e211))
    B, one = Product((large, small, small)), torch.ones(1, 1, dtype=F64)
    form, u = ImplicitForm(0 * one, B, one), torch.full((1, 1), 1e200, dtype=F64)
    truth = exact(1e-187) ** 2 * exact(1e211) * exact(u)
    for inputs in (Box(u, u), SparseBox(u, 0.0, 1), Ball(u, 0.0)):
        found = bounded(form, inputs, method)
        assert found is None or holds(found, truth)
    assert exact(sensitivity(form)) >= exact(1e-187) ** 2 * exact(1e211)


EMPTY = {"no states": (0, 3, 2), "no inputs": (2, 0, 1), "no outputs": (2, 3, 0), "nothing": (0, 0, 0)}


@pytest.mark.parametrize("name", EMPTY)
def test_forms_without_states_inputs_or_outputs_are_bounded_or_refused(name):
    n, p, q = EMPTY[name]
    form = ImplicitForm(torch.zeros(n, n), torch.ones(n, p), torch.ones(q, n), torch.ones(q, p))
    u = torch.ones(2, p)
    for inputs in (Box(u, u), Ball(u, 0.5), SparseBox(u, 0.5, min(1, p))):
        for method in METHODS:
            for ask in (output_bounds, state_bounds):
                try:
                    found = ask(form, inputs, method)
                except (InputError, IllPosedError):
                    continue
                assert found.lower.shape == (2, q if ask is output_bounds else n)
    assert form(u).shape == (2, q) and sensitivity(form).shape == (q, p)
    assert all(lipschitz(form, norm) >= 0 for norm in ("1", "2", "inf"))
    assert bool(torch.isfinite(separable_bound(form, Box(u, u), Separable(torch.square, "convex"))).all())
