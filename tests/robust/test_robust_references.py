"""Bounds agree with closed forms and with references written from scratch."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from robust_cases import (
    F64,
    alpha_crown_reference,
    crown_reference,
    dense_layers,
    exact,
    looped,
    mlp,
    points,
    propagated,
    triangular,
)
from wellposed_lab.networks.trained import Dense

from wellposed.activations import get_activation
from wellposed.convert import to_implicit
from wellposed.data import MissingDataError
from wellposed.errors import IllPosedError, InputError, UnknownNameError
from wellposed.forms import ImplicitForm, LowRank, Zero
from wellposed.robust import (
    METHODS,
    Ball,
    Box,
    Crown,
    MethodError,
    SparseBox,
    margin_bounds,
    output_bounds,
    state_bounds,
)
from wellposed.robust.crown import lines_of
from wellposed.robust.sets import Interval


def linear(n=6):
    form = looped(n, "identity")
    A, B, C, D = (getattr(form, name).to_dense() for name in "ABCD")
    inverse = torch.linalg.inv(torch.eye(n, dtype=F64) - A)
    return form, C @ inverse @ B + D, C @ inverse @ form.bias + form.output_bias


@pytest.mark.parametrize("make", [
    lambda u: Box.around(u, 0.2), lambda u: SparseBox(u, 0.3, 2, 0.0, 1.0), lambda u: Ball(u, 0.5)
])  # fmt: skip
def test_crown_of_a_linear_model_is_the_closed_form(make):
    form, gain, offset = linear()
    inputs = make(torch.rand(3, 4, dtype=F64))
    found = output_bounds(form, inputs, Crown(0))
    torch.testing.assert_close(found.upper, inputs.support(gain) + offset, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lower, -inputs.support(-gain) + offset, rtol=1e-5, atol=1e-5)


def test_norm_and_box_are_the_formulas():
    form = looped(7)
    u, radius = torch.rand(2, 4, dtype=F64), torch.rand(4, dtype=F64) / 10
    inputs = Box.around(u, radius, None, None)
    A, B, C, D = (getattr(form, name).to_dense().abs() for name in "ABCD")
    x, y = exact(form, u)
    sigma = torch.linalg.solve(torch.eye(7, dtype=F64) - A, B @ radius)
    norm = (B @ radius).max() / (1 - A.sum(1).max())
    close = {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(state_bounds(form, inputs, "box").upper, x + sigma, **close)
    torch.testing.assert_close(output_bounds(form, inputs, "box").lower, y - C @ sigma - D @ radius, **close)
    torch.testing.assert_close(state_bounds(form, inputs, "norm").upper, x + norm, **close)
    sparse = SparseBox(u, radius, 2)
    rows = (B * radius).topk(2, dim=1).values.sum(1).max()
    torch.testing.assert_close(state_bounds(form, sparse, "norm").lower, x - rows / (1 - A.sum(1).max()), **close)


def test_box_of_few_changes_takes_the_largest_of_every_row_of_the_gains():
    form = looped(7)
    u = torch.rand(2, 4, dtype=F64)
    sparse = SparseBox(u, 0.1, 2)
    A, B, C, D = (getattr(form, name).to_dense().abs() for name in "ABCD")
    x, y = exact(form, u)
    gains = torch.linalg.solve(torch.eye(7, dtype=F64) - A, B)
    largest = lambda rows: 0.1 * rows.topk(2, dim=1).values.sum(1)  # noqa: E731
    states, outputs = state_bounds(form, sparse, "box"), output_bounds(form, sparse, "box")
    torch.testing.assert_close(states.upper, x + largest(gains), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(outputs.upper, y + largest(C @ gains + D), rtol=1e-6, atol=1e-8)
    loose = torch.linalg.solve(torch.eye(7, dtype=F64) - A, largest(B))
    assert (states.upper - x < loose).all()
    ball = Ball(u, 0.1)
    norms = 0.1 * torch.linalg.vector_norm(C @ gains + D, dim=1)
    torch.testing.assert_close(output_bounds(form, ball, "box").upper, y + norms, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", [None, "dense"])
def test_interval_of_a_network_is_interval_bound_propagation(form):
    network = mlp((5, 9, 7, 3))
    form = to_implicit(network, (5,)) if form is None else _dense(network)
    u = torch.rand(4, 5, dtype=F64)
    found = output_bounds(form, Box.around(u, 0.1), "interval")
    box = Box.around(u, 0.1)
    for b in range(4):
        lower, upper = propagated(dense_layers(network), box.lower[b], box.upper[b])[-1]
        torch.testing.assert_close(found.lower[b], lower, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.upper[b], upper, rtol=1e-9, atol=1e-9)


def _dense(network):
    form = to_implicit(network, (5,))
    return form.to_dense()


@pytest.mark.parametrize("eps", [0.02, 0.2])
def test_refined_crown_of_a_network_is_crown(eps):
    network = mlp((6, 12, 10, 8, 3))
    box = Box.around(torch.rand(5, 6, dtype=F64), eps)
    found = output_bounds(network, box, Crown(1))
    layers = dense_layers(network)
    pairs = [crown_reference(layers, box.lower[b], box.upper[b])[-1] for b in range(5)]
    lower, upper = (torch.stack(part) for part in zip(*pairs, strict=True))
    torch.testing.assert_close(found.upper, upper, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.lower, lower, rtol=1e-6, atol=1e-6)
    assert found.width.mean() < 0.8 * output_bounds(network, box, "interval").width.mean()


def test_optimised_slopes_are_as_tight_as_those_of_the_reference():
    network = mlp((6, 12, 10, 8, 3))
    box = Box.around(torch.rand(2, 6, dtype=F64), 0.1)
    pairs = [alpha_crown_reference(dense_layers(network), box.lower[b], box.upper[b]) for b in range(2)]
    lower, upper = (torch.stack(part) for part in zip(*pairs, strict=True))
    plain = output_bounds(network, box, Crown(1)).width.mean()
    found = output_bounds(network, box, Crown(1, slope_steps=60))
    assert (upper - lower).mean() < 0.98 * plain
    assert found.width.mean() <= 1.01 * (upper - lower).mean()  # ours optimises the units before the outputs too
    y = torch.stack([exact(to_implicit(network, (6,)), u)[1] for u in points(to_implicit(network, (6,)), box)])
    assert ((y >= lower - 1e-9) & (y <= upper + 1e-9)).all()


@pytest.mark.parametrize("data", ["digits", pytest.param("fashion-mnist", marks=pytest.mark.slow)])
def test_refined_crown_is_nearly_as_tight_as_optimised_slopes_on_a_trained_network(data, capsys):
    """A network with biases and three hidden layers, 8 test images: within 3 % at .002 and within 10 % at .01."""
    dense = Dense(data, epochs=15 if data == "digits" else 3)
    try:
        u = dense.pair("test")[0][: 1 if data == "digits" else 8].double()
    except MissingDataError as error:
        pytest.skip(str(error))
    network = copy.deepcopy(dense.trained(0)).double()
    for eps, most in ((0.002, 1.03), (0.01, 1.10)):
        box = Box.around(u, eps)
        pairs = [
            alpha_crown_reference(dense_layers(network), *ends) for ends in zip(box.lower, box.upper, strict=True)
        ]
        alpha = float(torch.stack([upper - lower for lower, upper in pairs]).mean())
        with torch.no_grad():
            refined, optimised = (
                float(output_bounds(network, box, method).width.mean()) for method in ("crown", "optimised")
            )
        with capsys.disabled():
            print(f"\n{data}, eps {eps}: refined {refined:.5f}, reference {alpha:.5f}, optimised {optimised:.5f}")
        assert refined <= most * alpha and optimised <= 1.01 * alpha


def test_dense_triangular_form_is_bounded_as_tightly_as_its_blocks():
    network = mlp((5, 8, 6, 3))
    box = Box.around(torch.rand(3, 5, dtype=F64), 0.1)
    blocks, dense = output_bounds(network, box, Crown(4)), output_bounds(_dense(network), box, Crown(4))
    assert (dense.width <= 1.02 * blocks.width + 1e-9).all()


@pytest.mark.parametrize("method", ["norm", "box", "interval", "l2", "crown"])
def test_sparse_and_low_rank_matrices_are_bounded_as_dense_ones(method):
    form, box = looped(12), Box.around(torch.rand(2, 4, dtype=F64), 0.1)
    A = form.A.to_dense() * (torch.rand(12, 12) < 0.3)
    left, right = torch.randn(12, 2, dtype=F64), torch.randn(12, 2, dtype=F64)
    left = 0.9 * left / (left @ right.mT).abs().sum(1).max()
    for kept, dense in ((A.to_sparse(), A), (LowRank(left, right), left @ right.mT)):
        found = output_bounds(form.replaced(A=kept), box, method)
        expected = output_bounds(form.replaced(A=dense), box, method)
        torch.testing.assert_close(found.upper, expected.upper, rtol=1e-9, atol=1e-9)


def test_every_step_tightens():
    form = looped(20, kappa=0.95)
    box = Box.around(torch.rand(4, 4, dtype=F64), 0.1)
    methods = ["norm", "box", "interval", Crown(0), Crown(3), Crown(3, slope_steps=15)]
    widths = [float(output_bounds(form, box, method).width.mean()) for method in methods]
    assert widths == sorted(widths, reverse=True) and widths[-1] < 0.999 * widths[-2] < 0.5 * widths[2]
    best = output_bounds(form, box, "best")
    assert best.method.startswith("best (interval + l2 + crown + crown, slopes optimised")
    for method in ["interval", "l2", "crown"]:
        assert (best.width <= output_bounds(form, box, method).width + 1e-12).all()


def test_margins_are_tighter_than_differences():
    form = looped(20, q=4)
    box = Box.around(torch.rand(3, 4, dtype=F64), 0.1)
    target = torch.tensor([0, 3, 1])
    margins, outputs = margin_bounds(form, box, target), output_bounds(form, box)
    apart = outputs.upper - outputs.lower.gather(1, target[:, None])
    own = torch.nn.functional.one_hot(target, 4).bool()
    assert (margins.upper <= apart + 1e-9)[~own].all() and margins.upper[own].abs().max() < 1e-9
    assert margins.width[~own].mean() < 0.9 * (2 * outputs.width.mean())


@given(
    st.sampled_from(["relu", "leaky_relu(0.2)", "leaky_relu(3.0)", "tanh", "sigmoid", "hardtanh", "relu6"]),
    st.floats(-8, 8), st.floats(0, 10), st.floats(-3, 3), st.sampled_from([0.0, 0.3, 1.0, None]),
)  # fmt: skip
def test_lines_hold_everywhere_on_the_interval(name, low, width, nu, share):
    phi = get_activation(name)
    lines = lines_of(phi)
    z = Interval(torch.tensor([low], dtype=F64), torch.tensor([low + width], dtype=F64))
    slopes = lines.slopes(z)
    coefficient = torch.tensor([nu], dtype=F64)
    chosen = (
        (slopes.upper if nu > 0 else slopes.lower) if share is None else share * phi.slope[1] + 0 * slopes.upper
    )
    lam = chosen * coefficient
    every = torch.linspace(0, 1, 4001, dtype=F64) * width + low
    gap = coefficient * phi(every) - lam * every
    intercept = lines.intercept(coefficient, lam, z)
    assert (gap <= intercept + 1e-12 * (1 + abs(nu) * 20)).all()
    missed = 2 * abs(nu) * max(phi.slope) * width / 4000  # by points that are not a kink
    assert float(intercept - gap.max()) <= missed + 1e-9  # and touches


@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_lower_intercepts_of_sigmoidal_maps_are_not_zero(name):
    lines = lines_of(get_activation(name))
    z = Interval(torch.tensor([1.0], dtype=F64), torch.tensor([3.0], dtype=F64))
    nu = torch.tensor([-1.0], dtype=F64)
    assert lines.intercept(nu, lines.slopes(z).lower * nu, z).abs() > 0.05


@pytest.mark.parametrize("method", ["interval", Crown(2)])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_gradients_of_bounds_are_those_of_small_changes(method, activation):
    form = looped(6, activation)
    parts = {name: getattr(form, name).to_dense().clone() for name in "ABCD"} | {"bias": form.bias.clone()}
    box = Box.around(torch.rand(2, 4, dtype=F64), 0.1)

    def widths(values):
        return output_bounds(ImplicitForm(**values, activation=activation), box, method).upper.sum()

    leaves = {name: value.requires_grad_() for name, value in parts.items()}
    gradients = torch.autograd.grad(widths(leaves), list(leaves.values()))
    for (name, value), gradient in zip(leaves.items(), gradients, strict=True):
        direction = torch.randn_like(value)
        ends = [{**leaves, name: value.detach() + sign * 1e-5 * direction} for sign in (1, -1)]
        with torch.no_grad():
            quotient = (widths(ends[0]) - widths(ends[1])) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(float(quotient), rel=0.02, abs=0.02), name


def test_bad_questions_say_what_is_wrong():
    form, box = looped(5), Box.around(torch.rand(2, 4, dtype=F64), 0.1)
    with pytest.raises(UnknownNameError, match="did you mean 'crown'"):
        output_bounds(form, box, "crwn")
    with pytest.raises(InputError, match="takes 4 inputs"):
        output_bounds(form, Box.around(torch.rand(2, 5, dtype=F64), 0.1))
    with pytest.raises(InputError, match="float32"):
        output_bounds(form, box.to(torch.float32))
    with pytest.raises(InputError, match="classes are 0 to 2"):
        margin_bounds(form, box, torch.tensor([0, 3]))
    with pytest.raises(InputError, match="one class a sample"):
        margin_bounds(form, box, torch.tensor([0.0, 1.0]))
    with pytest.raises(InputError, match="positive number of seconds"):
        output_bounds(form, box, budget=0.0)
    with pytest.raises(InputError, match="ImplicitForm, ImplicitModel or module"):
        output_bounds("model", box)
    with pytest.raises(InputError, match="not negative"):
        Crown(rounds=-1)
    with pytest.raises(MethodError, match=r"use form\.rescale"):
        output_bounds(triangular(), box, "norm")
    with pytest.raises(IllPosedError, match="nothing proves"):
        output_bounds(form.replaced(A=2 * torch.ones(5, 5, dtype=F64)), box, "box")


def test_method_without_lines_says_so_and_products_have_no_norm():
    pooled = looped(8, "max_pool(2)")
    assert output_bounds(pooled, Box.around(torch.rand(1, 4, dtype=F64), 0.1)).method.endswith("at max_pool(2))")
    zero = Zero((2, 2), F64)
    unbounded = ImplicitForm(zero, torch.eye(2, dtype=F64), torch.eye(2, dtype=F64), activation="multiply()")
    box = Box(torch.tensor([[-1.0, 2.0]], dtype=F64), torch.tensor([[0.5, 3.0]], dtype=F64))
    with pytest.raises(IllPosedError, match="no Lipschitz constant"):
        output_bounds(unbounded, box, "norm")
    bounds = output_bounds(unbounded, box, "interval")
    corners = torch.tensor([[u, v] for u in (-1.0, 0.5) for v in (2.0, 3.0)], dtype=F64)
    values = unbounded(corners)
    assert (bounds.lower <= values.amin(0)).all() and (values.amax(0) <= bounds.upper).all()
    assert (bounds.upper - bounds.lower <= 1.2 * (values.amax(0) - values.amin(0)) + 1e-9).all()


def test_a_registered_method_is_found(monkeypatch):
    monkeypatch.setitem(METHODS.factories, "triangle", METHODS.factories["box"])
    form, box = looped(5), Box.around(torch.rand(2, 4, dtype=F64), 0.1)
    assert output_bounds(form, box, "triangle").method == "box"
    assert "optimised + box" in output_bounds(form, box, "best").method


def test_points_reach_most_of_the_refined_bound():
    """Guards against bounds that are sound and useless: an attack reaches most of the width."""
    form = looped(30, kappa=0.8)
    box = Box.around(torch.rand(3, 4, dtype=F64), 0.02)
    y = torch.stack([exact(form, u)[1] for u in points(form, box, 100)])
    assert (y.amax(0) - y.amin(0)).mean() > 0.7 * output_bounds(form, box).width.mean()
