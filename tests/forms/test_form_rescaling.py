"""Other units of the states: a smaller |A|, and the same outputs to the last bit."""

import math

import pytest
import torch
from form_cases import F64, FORMS, LOOPS, two_blocks
from form_cases import loop_inside as inside

from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Block, Convolution, Dense, Identity, ImplicitForm, LowRank, Product, Selection, Sparse
from wellposed.forms.operators.plain import Diagonal

ROOM = {"pooled_loop": 1.25, "softmax_loop": 1.25}  # whose activations have slopes below one
BITS = pytest.mark.parametrize("layers", [20, 50])


def norm(form):
    """|A|_inf, formed in float64."""
    return float(form.A.to(F64).to_dense().abs().sum(1).max())


def network(layers, activations=("relu",), width=8, gain=3.0, dtype=torch.float32, seed=0):
    """A random feed-forward net, last layer first, with gains around `gain` and biases."""
    generator = torch.Generator().manual_seed(seed)

    def dense(height, wide):
        draw = torch.randn(height, wide, generator=generator, dtype=F64)
        return Dense((gain * draw / wide**0.5).to(dtype))

    sizes = (width,) * layers
    A = Block(sizes, sizes, {(k, k + 1): dense(width, width) for k in range(layers - 1)}, dtype)
    B = Block(sizes, (4,), {(layers - 1, 0): dense(width, 4)}, dtype)
    C = Block((3,), sizes, {(0, 0): dense(3, width), (0, layers // 2): dense(3, width)}, dtype)
    bias = torch.randn(layers * width, generator=generator, dtype=F64).to(dtype)
    phi = [activations[k % len(activations)] for k in range(layers)]
    D, c = dense(3, 4), torch.randn(3, generator=generator, dtype=F64).to(dtype)
    return ImplicitForm(A, B, C, D, bias, phi, output_bias=c, labels=[f"layer {k}" for k in range(layers)])


def inputs(form, batch=6, scale=1.0):
    return (scale * torch.randn(batch, form.sizes[1], dtype=F64)).to(form.dtype)


@BITS
@pytest.mark.parametrize("kappa", [0.95, 0.5])
@pytest.mark.parametrize(
    "activations",
    [("relu",), ("tanh",), ("relu", "max_pool(2)"), ("sigmoid", "leaky_relu(0.1)", "softmax(4)", "group_sort(8)")],
)
def test_deep_networks_keep_every_bit(layers, activations, kappa):
    form = network(layers, activations)
    small, u = form.rescale(kappa), inputs(form)
    assert norm(form) > 2 and norm(small) < kappa
    y = form(u)
    assert y.isfinite().all() and torch.equal(small(u), y)
    assert small.dtype == torch.float32 and small.labels == form.labels and small.partition == form.partition
    assert small.certificate().value == 0


@BITS
def test_the_rescaled_form_is_a_contraction_in_one_block_too(layers):
    """The point of it: every row of A lies in the ball, so that the condition "inf" holds."""
    form = network(layers, width=3)
    flat = form.rescale(0.9).to_dense()
    assert flat.certificate().condition == "inf" and flat.certificate().value < 0.9
    u = inputs(form)
    torch.testing.assert_close(flat(u), form(u), rtol=1e-5, atol=1e-5)


def test_single_blocks_are_rescaled_state_by_state():
    form = network(20, width=4).to_dense()
    assert form.partition == (80,)
    small, u = form.rescale(0.9), inputs(form)
    assert norm(small) < 0.9 and torch.equal(small(u), form(u))
    bent = form.replaced(activation="tanh")
    assert torch.equal(bent.rescale(0.9)(u), bent(u))


@pytest.mark.parametrize("case", FORMS)
def test_every_kind_of_form(case):
    form, u = case(), torch.randn(4, 3, dtype=F64)
    if case.__name__ == "negative_loop":  # |A| of the loop is above one, whatever the units
        with pytest.raises(IllPosedError, match="no diagonal scaling"):
            form.rescale(0.95)
        return
    kappa = ROOM.get(case.__name__, 0.95)
    small = form.rescale(kappa)
    assert norm(small) < kappa
    exact = {"stop": "relative", "max_steps": 500}
    scale = (small.equilibrium(u, **exact).value / form.equilibrium(u, **exact).value).nan_to_num(1.0)
    torch.testing.assert_close(small(u), form(u), rtol=1e-4, atol=1e-4)
    assert small.certificate().holds
    if case not in LOOPS:
        assert torch.equal(small(u), form(u))
        assert torch.equal(scale.log2(), scale.log2().round())


def test_operators_keep_their_kind():
    conv = Convolution(3 * torch.randn(2, 2, 3), (2, 5), (1,), (1,), (1,))
    parts = {
        (0, 1): conv,
        (1, 2): Identity(10),
        (2, 3): Selection(torch.tensor([0, 0, -1, 3, 4, 5, 6, 7, 8, 9]), 10),
        (1, 3): conv @ Selection(torch.randperm(10), 10),
        (0, 3): Sparse(4 * torch.eye(10).to_sparse()),
        (0, 2): LowRank(torch.randn(10, 2), torch.randn(10, 2)),
        (3, 4): Selection(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]), 10).T,
        (0, 4): conv + Identity(10),
    }
    sizes = (10,) * 5
    C = Block((10,), sizes, {(0, 0): Identity(10), (0, 3): Selection(torch.arange(9, -1, -1), 10)})
    form = ImplicitForm(Block(sizes, sizes, parts), Block(sizes, (10,), {(4, 0): conv}), C)
    small, u = form.rescale(0.5), torch.randn(3, 10)
    assert norm(small) < 0.5 and torch.equal(small(u), form(u))
    kinds = {key: type(part) for key, part in small.A.parts.items()}
    assert kinds[0, 1] is Convolution and kinds[0, 3] is Sparse and kinds[0, 2] is LowRank
    assert kinds[1, 2] is Diagonal and kinds[2, 3] is kinds[3, 4] is Product


def test_tiny_kappa_needs_the_range():
    form = network(6, gain=1.0)
    for kappa in (1e-2, 1e-4):
        small, u = form.rescale(kappa), inputs(form)
        assert norm(small) < kappa and torch.equal(small(u), form(u))
    with pytest.raises(InputError, match=r"range of torch.float32; convert the form to float64"):
        form.rescale(1e-20)
    double = form.to(F64)
    assert norm(double.rescale(1e-20)) < 1e-20
    u = inputs(double)
    assert torch.equal(double.rescale(1e-20)(u), double(u))
    with pytest.raises(InputError, match="kappa"):
        form.rescale(0.0)
    with pytest.raises((IllPosedError, InputError), match=r"2\^900|range"):
        network(60, gain=1.0, dtype=F64).rescale(1e-30)


@pytest.mark.parametrize(
    "operator", [Identity(1), Selection(torch.tensor([0]), 1), Dense(torch.ones(1, 1))], ids=repr
)
def test_factors_out_of_range_are_refused_in_every_operator(operator):
    sizes = (1, 1)
    A = Block(sizes, sizes, {(0, 1): Dense(torch.full((1, 1), 2.0**120))})
    B = Block(sizes, (1,), {(0, 0): operator, (1, 0): operator})
    form = ImplicitForm(A, B, Block((1,), sizes, {(0, 0): operator}))
    small = form.rescale(2.0**10)
    assert norm(small) < 2.0**10
    with pytest.raises(InputError, match=r"range of torch.float32"):
        form.rescale(2.0**-150)


def test_digits_lost_near_the_smallest_numbers_are_noticed():
    """A weight that would become subnormal keeps a value, but not its last bits."""
    third, sizes = torch.full((1, 1), 1 / 3), (1, 1)
    A = Block(sizes, sizes, {(0, 1): Dense(torch.full((1, 1), 2.0**40))})
    B = Block(sizes, (1,), {(0, 0): Dense(third * 2.0**-88), (1, 0): Dense(third)})
    with pytest.raises(InputError, match="range"):
        ImplicitForm(A, B, torch.eye(2)).rescale(0.5)
    bias = torch.tensor([2.0**-88 / 3, 1.0])
    with pytest.raises(InputError, match="range"):
        ImplicitForm(A, torch.eye(2), torch.eye(2), bias=bias).rescale(0.5)


def test_loops_leave_room_or_raise():
    """The gain around the loop is 0.8: no units bring |A| below that."""
    form, u = two_blocks(), torch.randn(4, 3, dtype=F64)
    small = form.rescale(0.92)
    assert norm(form) == pytest.approx(4.0) and norm(small) < 0.92
    torch.testing.assert_close(small(u), form(u), rtol=1e-4, atol=1e-4)
    with pytest.raises(IllPosedError, match="raise kappa or shrink A"):
        form.rescale(0.85)
    with pytest.raises(IllPosedError):
        inside().rescale(math.sqrt(0.74))


def test_activations_carry_their_units():
    form = network(4, ("tanh",))
    small = form.rescale(0.5)
    assert any(phi.name.startswith("rescaled('tanh'") for phi in small.activations)
    assert small.rescale(0.1)(inputs(form)).shape == (6, 3)
    u = inputs(form)
    assert torch.equal(small.rescale(0.1)(u), form(u))
