"""DEQs as forms: the cell's own form, which reads its output in the place of its state.

The oracle iterates the cell itself in float64, many plain steps, and shares no code with forms or solvers.
"""

import pytest
import torch
from torch import nn

from wellposed.convert import UnsupportedError, exact_form, to_implicit
from wellposed.convex.states import _FormSource, record_states
from wellposed.errors import IllPosedError, InputError
from wellposed.forms.draw.spy import spy
from wellposed.models import DEQ, Noise
from wellposed.models.cells import (
    ConvCell,
    DenseCell,
    MultiscaleCell,
    PlainConvCell,
    RecallCell,
    TransformerCell,
)
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.norms import weight_norm
from wellposed.robust import Box, output_bounds
from wellposed.robust.attacks import pgd


class TwoRooms(nn.Module):
    """Two states that read one another, one of them averaged with itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.input = nn.Linear(3, 2), nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, x, u):
        a, b = x
        return torch.tanh(self.second(b) + self.input(u)), 0.5 * b + 0.25 * torch.relu(self.first(a))


class Residual(nn.Module):
    """Reads its state three times and returns an affine function of a state."""

    def __init__(self):
        super().__init__()
        self.state, self.input, self.mix = nn.Linear(5, 5), nn.Linear(4, 5), nn.Linear(5, 5)

    def forward(self, x, u):
        return self.mix(torch.relu(self.state(x) + self.input(u)) * 0.5 + torch.sigmoid(x)) + 0.1


def weak(cell, share=0.4):
    """Makes a cell contract."""
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_(share if parameter.dim() > 1 else 1.0)
    return cell


PROVEN = {
    "dense": (lambda: DEQ(weak(DenseCell(4, 6))), (4,)),
    "dense of three layers": (lambda: DEQ(weak(DenseCell(4, 6, depth=3, activation="relu"))), (4,)),
    "dense on rows": (lambda: DEQ(weak(DenseCell(4, 6, activation="relu", projection="identity"))), (3, 4)),
    "plain convolution": (lambda: DEQ(weak(PlainConvCell(2, 3, projection="silu"))), (2, 5)),
    "plain convolution of images": (lambda: DEQ(weak(PlainConvCell(1, 2, dims=2))), (1, 4, 4)),
    "recall": (lambda: DEQ(weak(RecallCell(2, 3), 0.3)), (2, 5)),
    "recall of images": (lambda: DEQ(weak(RecallCell(1, 2, dims=2, depth=1, activation="relu"))), (1, 4, 4)),
    "weight norm": (lambda: DEQ(weight_norm(weak(DenseCell(4, 6)))), (4,)),
    "own": (lambda: DEQ(weak(Residual()), state_shape=(5,)), (4,)),
    "own of two states": (lambda: DEQ(weak(TwoRooms()), state_shape=((3,), (2,))), (4,)),
}
NOT_PROVEN = {  # the last: a radius at which one branch is proven
    "convolution": (lambda: DEQ(ConvCell(1, 4, groups=2)), (1, 4, 4), "normalise", 1e-4),
    "transformer": (lambda: DEQ(TransformerCell(4, 2, 6)), (3, 4), "matrix_product", 1e-4),
    "multiscale": (lambda: DEQ(MultiscaleCell((2, 4), groups=2)), (2, 4, 4), "normalise", 1e-5),
    "gated": (lambda: DEQ(Gated(), state_shape=(5,)), (4,), "multiply", 1e-3),
}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRUCell(4, 5)

    def forward(self, x, u):
        return self.gru(u, x)


def drawn(shape, count=3):
    return torch.rand(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def iterated(deq, u, steps=600):
    """The equilibrium by plain steps from zero; the first state if there are several."""
    x = deq.start(u)
    for _ in range(steps):
        x = deq.cell(x, u)
    residual = [(one - two).abs().max() for one, two in zip(listed(x), listed(deq.cell(x, u)), strict=True)]
    assert max(residual) < 1e-10
    return listed(x)[0]


def listed(x):
    return [x] if isinstance(x, torch.Tensor) else list(x)


@torch.no_grad()
def iterated_form(form, u, steps=3000):
    """The outputs of a form by plain steps of its equation, whatever is proven of it."""
    v = form.B.apply(u.flatten(1)) + (0.0 if form.bias is None else form.bias)
    x = torch.zeros_like(v)
    for _ in range(steps):
        x = form.activation.function(form.A.apply(x) + v)
    return form.C.apply(x) + form.D.apply(u.flatten(1)) + (0.0 if form.output_bias is None else form.output_bias)


@pytest.mark.parametrize("name", PROVEN)
def test_every_ready_cell_is_a_form(name):
    torch.manual_seed(0)
    make, shape = PROVEN[name]
    deq, u = make().double(), drawn(shape)
    form = to_implicit(deq, shape)
    assert form.certificate().holds and form.order.loops
    expected = iterated(deq, u).flatten(1)
    torch.testing.assert_close(form(u), expected, rtol=1e-7, atol=1e-7)
    exact, states = exact_form(deq, shape)
    torch.testing.assert_close(exact(u), expected, rtol=1e-7, atol=1e-7)
    assert len(states) == form.sizes[0]


@pytest.mark.parametrize("name", PROVEN)
def test_bounds_of_a_network_with_a_loop_hold(name):
    torch.manual_seed(1)
    make, shape = PROVEN[name]
    deq = make().double()
    features = len(iterated(deq, drawn(shape, 1)).flatten())
    head = nn.Linear(features, 3).double()
    first = type("First", (nn.Module,), {"forward": lambda self, x: listed(x)[0]})()
    network = nn.Sequential(nn.Unflatten(1, shape), nn.Tanh(), deq, first, nn.Flatten(), head)
    u = drawn((torch.Size(shape).numel(),), 1)
    bounds = output_bounds(network, Box(u - 0.05, u + 0.05))
    points = u + 0.05 * (2 * drawn((u.shape[1],), 40) - 1)
    points = torch.cat([points, u + 0.05 * (2 * drawn((u.shape[1],), 20) - 1).sign()])
    y = head(iterated(deq, torch.tanh(points.unflatten(1, shape))).flatten(1)).detach()
    assert bool(((y >= bounds.lower) & (y <= bounds.upper)).all())
    assert bool((bounds.width < 30 * (y.amax(0) - y.amin(0)) + 1e-6).all())


@pytest.mark.parametrize("name", NOT_PROVEN)
def test_what_is_not_proven_says_so_in_one_line(name):
    torch.manual_seed(0)
    make, shape, culprit, _ = NOT_PROVEN[name]
    deq, u = make().double(), drawn(shape)
    form = to_implicit(deq, shape)
    torch.testing.assert_close(
        iterated_form(form, u), iterated(deq, u).flatten(1), rtol=1e-6, atol=1e-6
    )  # the form is right, though nothing is proven of it
    with pytest.raises(IllPosedError, match=rf"not proven.*{culprit}") as refusal:
        form.certificate()
    assert "\n" not in str(refusal.value)
    with pytest.raises(IllPosedError) as other:
        form(u)
    assert str(other.value) == str(refusal.value)


@pytest.mark.parametrize("name", NOT_PROVEN)
def test_one_branch_of_what_is_not_proven_is_bounded(name):
    """Plain steps of the cell from the equilibrium at the center stay on its branch."""
    torch.manual_seed(0)
    make, shape, _, radius = NOT_PROVEN[name]
    deq, u = make().double(), drawn(shape, 1)
    bounds = output_bounds(to_implicit(deq, shape), Box.around(u, radius, None, None))
    assert bounds.branch.proven.all() and "for the branch through" in bounds.method
    signs = (2 * drawn(shape, 30) - 1).sign()
    y = iterated(deq, torch.cat([u + radius * signs, u + radius * (2 * drawn(shape, 30) - 1)])).flatten(1)
    assert bool(((y >= bounds.lower) & (y <= bounds.upper)).all())
    assert bool((bounds.width < 100 * (y.amax(0) - y.amin(0)) + 1e-6).all())
    wide = output_bounds(to_implicit(deq, shape), Box.around(u, 3.0, None, None))
    assert not wide.branch.proven.any() and not wide.lower.isfinite().any() and wide.branch.why_not[0]


@pytest.mark.parametrize("name", [*PROVEN, *NOT_PROVEN])
def test_attacks_pictures_and_records_take_every_cell(name, tmp_path):
    torch.manual_seed(0)
    make, shape, *_ = {**PROVEN, **NOT_PROVEN}[name]
    deq, u = make().double().eval(), drawn(shape)
    first = type("First", (nn.Module,), {"forward": lambda self, x: listed(x)[0]})()
    network = nn.Sequential(deq, first, nn.Flatten(), nn.LazyLinear(3).double())
    target = network(u).argmax(1)
    attack = pgd(network, u, target, 0.3, steps=4)
    assert bool(((attack.inputs - u).abs() <= 0.3 + 1e-9).all()) and not torch.equal(attack.inputs, u)
    torch.testing.assert_close(attack.outputs, network(attack.inputs), rtol=1e-4, atol=1e-4)
    form, states = to_implicit(network, shape), record_states(network, u)
    x, z = torch.as_tensor(states.X), torch.as_tensor(states.Z)
    torch.testing.assert_close(form.activation.function(z), x, rtol=1e-4, atol=1e-4)
    y = network[2:](iterated(deq, u)).detach()
    torch.testing.assert_close(form.C.apply(x) + form.output_bias, y, rtol=1e-4, atol=1e-4)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    spy(form, tmp_path / "spy.png", pixels=100)
    assert (tmp_path / "spy.png").stat().st_size > 1000


def test_states_of_another_equilibrium_than_the_network_has_are_not_recorded():
    class Bistable(nn.Module):
        def forward(self, x, u):
            return torch.tanh(3 * x + u)

    class Started(nn.Module):
        """Starts its solver far from zero, on the other branch."""

        def __init__(self):
            super().__init__()
            self.deq = DEQ(Bistable(), state_shape=(1,)).double()

        def forward(self, u):
            return -self.deq(u)

    u = torch.full((2, 1), 0.1, dtype=torch.float64)
    assert (record_states(DEQ(Bistable(), state_shape=(1,)).double(), u).X > 0.9).all()
    form = to_implicit(DEQ(Bistable(), state_shape=(1,)).double(), (1,)).to(torch.float64)
    with pytest.raises(InputError, match="the network finds another one than steps from zero"):
        _FormSource(form, Started()).run(u)


def test_multiscale_classifier():
    torch.manual_seed(0)
    model = MultiscaleDEQ(1, 3, channels=(2, 4), head_channels=(2, 4), final_channels=4, groups=2).double().eval()
    u = drawn((1, 4, 4))
    form = to_implicit(model, (1, 4, 4))
    with torch.no_grad():
        states = model.deq.start(model.stem(u))
        for _ in range(600):
            states = model.deq.cell(states, model.stem(u))
        expected = model.classifier(model.head(states))
    torch.testing.assert_close(iterated_form(form, u), expected, rtol=1e-6, atol=1e-6)


def test_a_cell_that_returns_its_state_is_kept_as_it_is():
    """x + g(x) is a loop of x with itself, which no condition proves; half of it is."""

    class Step(nn.Module):
        def __init__(self, share):
            super().__init__()
            self.share, self.state = share, nn.Linear(3, 3)

        def forward(self, x, u):
            return self.share * x + 0.2 * torch.tanh(self.state(x) + u)

    torch.manual_seed(0)
    deq, u = DEQ(Step(0.5)).double(), drawn((3,))
    torch.testing.assert_close(to_implicit(deq, (3,))(u), iterated(deq, u), rtol=1e-7, atol=1e-7)
    with pytest.raises(IllPosedError, match="nothing proves"):
        to_implicit(DEQ(Step(1.0)), (3,)).certificate()


def test_refusals():
    with pytest.raises(UnsupportedError, match="DEQ at '0': noise disturbs its solves"):
        to_implicit(nn.Sequential(DEQ(DenseCell(2, 3), noise=Noise(state=20.0))), (2,))

    class Branching(nn.Module):
        def forward(self, x, u):
            return x / 2 if float(u.sum()) > 0 else u

    class Wider(nn.Module):
        def forward(self, x, u):
            return x / 2 + u

    with pytest.raises(UnsupportedError, match="Branching at 'cell' can be traced neither by"):
        to_implicit(DEQ(Branching()), (2,))
    with pytest.raises(UnsupportedError, match="give state_shape"):
        to_implicit(DEQ(Wider(), state_shape=(1,)), (2,))


def test_parameters_get_gradients_through_the_form():
    torch.manual_seed(0)
    deq, u = DEQ(weak(DenseCell(4, 3))).double(), drawn((4,))
    form = to_implicit(deq, (4,), detach=False)
    weight = deq.cell.layers[0].weight
    (gradient,) = torch.autograd.grad(form(u).sum(), weight)
    (expected,) = torch.autograd.grad(deq(u).sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
