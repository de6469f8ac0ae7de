"""The printed and the triangle program: oracles, order and soundness."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from robust_cases import F64, looped, mlp, points
from scipy.optimize import linprog
from torch import nn

from wellposed.convert import to_implicit
from wellposed.errors import UnknownNameError
from wellposed.forms import Dense, ImplicitForm, LowRank
from wellposed.robust import (
    Ball,
    Box,
    Crown,
    MethodError,
    Query,
    Relaxation,
    SparseBox,
    margin_bounds,
    output_bounds,
    state_bounds,
)
from wellposed.robust.linear_programs import ReluConstraints, side_by_side, tightest_intervals
from wellposed.robust.sets import Interval


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def settled(form, u):
    """States and outputs by so many plain steps that they no longer change."""
    wide = form.to(F64)
    A, B, C, D = (getattr(wide, name).to_dense() for name in "ABCD")
    x, b = torch.zeros(len(u), len(A), dtype=F64), 0.0 if wide.bias is None else wide.bias
    pairs = zip(wide.activations, wide.partition, strict=True)
    relu = torch.cat([torch.full((n,), phi.name == "relu") for phi, n in pairs])
    for _ in range(700):
        z = x @ A.mT + u.to(F64) @ B.mT + b
        x = torch.where(relu, z.clamp(min=0), z)
    y = x @ C.mT + u.to(F64) @ D.mT
    return x, y if wide.output_bias is None else y + wide.output_bias


def triangle_by_scipy(form, box, index, x, z, row):
    """The triangle program in the variables (x, u), with ``x <= h (z - l) / (h - l)`` written out."""
    A, B, C, D = (getattr(form, name).to_dense().numpy() for name in "ABCD")
    b, n = form.bias.numpy(), len(A)
    low, high = z.lower[index].numpy(), z.upper[index].numpy()
    on, off = low >= 0, high <= 0
    open_ = ~on & ~off
    slope = np.where(open_, high / np.where(open_, high - low, 1.0), 0.0)
    rows = [np.hstack([A - np.eye(n), B]), np.hstack([np.eye(n) - slope[:, None] * A, -slope[:, None] * B])[open_]]
    sides = [-b, (slope * (b - low))[open_]]
    equations = {"A_eq": np.hstack([np.eye(n) - A, -B])[on], "b_eq": b[on]} if on.any() else {}
    states = np.stack([x.lower[index].numpy(), np.where(off, 0.0, x.upper[index].numpy())], axis=1)
    ends = np.vstack([states, np.stack([box.lower[index].numpy(), box.upper[index].numpy()], axis=1)])
    cost = np.concatenate([row @ C, row @ D])
    solved = linprog(-cost, np.vstack(rows), np.concatenate(sides), bounds=ends, **equations)
    return -solved.fun + float(row @ form.output_bias.numpy())


@pytest.mark.parametrize("make", [lambda: looped(12), lambda: to_implicit(mlp(), (4,))], ids=["loop", "layers"])
def test_triangle_equals_scipy(make):
    form = make()
    box = Box.around(torch.rand(3, 4, dtype=F64), 0.1)
    q = form.sizes[2]
    unit = torch.eye(q, dtype=F64).expand(3, -1, -1)
    enclosure = tightest_intervals(Query(form, box, unit), 3)
    x, z = side_by_side(enclosure.states), side_by_side(enclosure.preactivations)
    assert ((z.lower < 0) & (z.upper > 0)).any()
    found = output_bounds(form, box, "triangle")
    for index in range(3):
        for i in range(q):
            row = np.eye(q)[i]
            assert float(found.upper[index, i]) == pytest.approx(
                triangle_by_scipy(form, box, index, x, z, row), abs=1e-6
            )
            assert float(found.lower[index, i]) == pytest.approx(
                -triangle_by_scipy(_negated(form), box, index, x, z, row), abs=1e-6
            )


def _negated(form):
    C, D = -form.C.to_dense(), -form.D.to_dense()
    return form.replaced(C=C, D=D, output_bias=-form.output_bias)


def printed_by_scipy(form, box, x0, sigma, cost):
    A, B = form.A.to_dense().numpy(), form.B.to_dense().numpy()
    low = np.maximum(x0 - sigma, 0.0)
    ends = np.vstack([np.stack([low, x0 + sigma], 1), np.stack([box.lower[0].numpy(), box.upper[0].numpy()], 1)])
    rows = np.hstack([A - np.eye(len(A)), B])
    return -linprog(-np.concatenate([cost, np.zeros(B.shape[1])]), rows, -form.bias.numpy(), bounds=ends).fun


def test_printed_program_equals_scipy():
    form = looped(10)
    box = Box.around(torch.rand(1, 4, dtype=F64), 0.05)
    A, B = form.A.to_dense().abs(), form.B.to_dense().abs()
    x0 = settled(form, box.center)[0][0].numpy()
    sigma = torch.linalg.solve(torch.eye(10, dtype=F64) - A, B @ (box.upper - box.lower)[0] / 2).numpy()
    found = state_bounds(form, box, "lp")
    for i in range(10):
        unit = np.eye(10)[i]
        assert float(found.upper[0, i]) == pytest.approx(printed_by_scipy(form, box, x0, sigma, unit), abs=1e-6)
        assert float(found.lower[0, i]) == pytest.approx(-printed_by_scipy(form, box, x0, sigma, -unit), abs=1e-6)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", ["lp", "triangle"])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_no_point_leaves_the_bounds(kind, dtype):
    for make in (lambda: looped(9), lambda: to_implicit(mlp(), (4,)), affine_between):
        form = make().to(dtype)
        u = torch.rand(2, 4, dtype=dtype)
        for inputs in (Box.around(u, 0.1), SparseBox(u, 0.4, 2, lower=0.0, upper=1.0), Ball(u, 0.2)):
            outputs, states = output_bounds(form, inputs, kind), state_bounds(form, inputs, kind)
            tried = points(form, inputs, 30)
            x, y = (value.view(*tried.shape[:2], -1) for value in settled(form, tried.flatten(0, 1)))
            assert outputs.contains(y).all() and states.contains(x).all()


def affine_between():
    """Two ReLU layers with an affine block between them."""
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Identity(), nn.Linear(5, 3))
    return to_implicit(network.double(), (4,))


def test_widths_are_ordered():
    for make in (lambda: looped(15), lambda: to_implicit(mlp(), (4,))):
        form, box = make(), Box.around(torch.rand(2, 4, dtype=F64), 0.05)
        width = {name: output_bounds(form, box, name).width for name in ("box", "lp", "triangle", "crown")}
        assert (width["triangle"] <= width["lp"] * (1 + 1e-9)).all()
        assert (width["lp"] <= width["box"] * (1 + 1e-9)).all()
        assert (width["triangle"] <= width["crown"] * (1 + 1e-6)).all()
        assert width["triangle"].mean() < 0.5 * width["lp"].mean()


def test_crown_on_loops_is_within_a_percent_of_the_triangle():
    form = looped(120, p=20, q=5)
    box = Box.around(torch.rand(2, 20, dtype=F64), 0.01)
    triangle = output_bounds(form, box, "triangle").width.mean()
    assert triangle <= output_bounds(form, box, Crown()).width.mean() <= 1.01 * triangle


def test_few_changes_of_an_affine_model_are_bounded_exactly():
    """With every unit active outputs are affine in u, and their range is that of the support function."""
    form = looped(6).replaced(bias=torch.full((6,), 9.0, dtype=F64))
    inputs = SparseBox(torch.rand(2, 4, dtype=F64), 0.1, 2, lower=0.0, upper=1.0)
    A, B, C, D = (getattr(form, name).to_dense() for name in "ABCD")
    gain = C @ torch.linalg.inv(torch.eye(6, dtype=F64) - A)
    range_ = inputs.image(gain @ B + D)
    offset = gain @ form.bias + form.output_bias
    found = output_bounds(form, inputs, "triangle")
    assert torch.allclose(found.upper, range_.upper + offset, atol=1e-7)
    assert torch.allclose(found.lower, range_.lower + offset, atol=1e-7)
    dense = output_bounds(form, Box.around(inputs.center, 0.1), "triangle")
    assert (found.width < dense.width).all()


def test_rounding_of_products_is_paid_for():
    """Entries of A cancel in a product, so the matrix that is formed is another one; the sides allow for that."""
    left, right = 1e8 * torch.randn(5, 2, dtype=F64), torch.randn(5, 2, dtype=F64)
    left, right = torch.cat([left, left[:, :1]], dim=1), torch.cat([right, 1e-9 - right[:, :1]], dim=1)
    form = ImplicitForm(LowRank(left, right), Dense(torch.eye(5, dtype=F64)), torch.eye(5, dtype=F64))
    x = torch.rand(5, dtype=F64)
    matrix, lower, upper = ReluConstraints.of(form, "triangle").equations(Interval(x, x), Interval(x, x))
    for i in range(5):
        formed = sum(Fraction(matrix[i, j]) * Fraction(float(x[j % 5])) for j in range(10))
        products = [
            Fraction(float(a)) * Fraction(float(b))
            for j in range(5)
            for a, b in zip(left[i], right[j], strict=True)
        ]
        states = sum(Fraction(float(x[j])) * sum(products[3 * j : 3 * j + 3]) for j in range(5))
        assert abs(formed + states) > 0
        assert Fraction(lower[i]) <= formed + states <= Fraction(upper[i])  # x - Ax - u, without x and u


def test_rounding_of_combinations_is_paid_for():
    """A combination of outputs that nearly cancel has coefficients of few digits."""
    for _ in range(5):
        C = torch.rand(3, 4, dtype=F64)
        C[1] = C[0] * (1 + 1e-9)
        form = ImplicitForm(torch.zeros(4, 4, dtype=F64), torch.eye(4, dtype=F64), C)
        u, row = torch.rand(1, 4, dtype=F64), torch.tensor([1e8, -1e8, 1e-3], dtype=F64)
        found = Relaxation()(Query(form, Box(u, u), row[None, None]))
        entries = [Fraction(float(r)) * Fraction(float(c)) * Fraction(float(v))
                   for r, line in zip(row, C, strict=True) for c, v in zip(line, u[0], strict=True)]  # fmt: skip
        assert Fraction(float(found.lower)) <= sum(entries) <= Fraction(float(found.upper))


def test_margins_and_best():
    form, box = looped(9), Box.around(torch.rand(2, 4, dtype=F64), 0.05)
    target = torch.tensor([0, 2])
    triangle = margin_bounds(form, box, target, "triangle")
    best = margin_bounds(form, box, target, "best")
    assert "triangle" in best.method
    assert (best.width <= triangle.width + 1e-12).all()
    assert triangle.upper.gather(1, target[:, None]).abs().max() < 1e-9


def test_late_bounds_hold():
    form, box = looped(9), Box.around(torch.rand(2, 4, dtype=F64), 0.05)
    full = output_bounds(form, box, "triangle")
    late = output_bounds(form, box, "triangle", budget=1e-9)
    assert (late.lower <= full.lower + 1e-9).all() and (late.upper >= full.upper - 1e-9).all()
    assert late.width.mean() > full.width.mean()


def test_other_activations_are_refused_with_what_applies():
    form = looped(5, "tanh")
    box = Box.around(torch.rand(1, 4, dtype=F64), 0.05)
    for kind in ("lp", "triangle"):
        with pytest.raises(MethodError, match=r"tanh.*'crown'"):
            output_bounds(form, box, kind)


def test_bad_settings_are_refused():
    with pytest.raises(UnknownNameError, match="lp, triangle"):
        Relaxation("square")
