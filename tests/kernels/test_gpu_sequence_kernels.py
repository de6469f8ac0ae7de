"""The Triton loops over time against the plain loop: on a GPU, and interpreted (`test_gpu_sequence`)."""

import copy
import os
import warnings

import pytest
import torch

from wellposed import Absolute, ImplicitRNN, Relative, Status, Steps
from wellposed.activations import leaky_relu
from wellposed.equilibrium import watch
from wellposed.equilibrium.loop import PATIENCE, PERIOD
from wellposed.equilibrium.method import WarnOnce
from wellposed.errors import ConvergenceError, ConvergenceWarning, InputError
from wellposed.models.recurrent import _Pass

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter, at 0 / 0
]
pytest.importorskip("triton")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
compiled = pytest.mark.skipif(INTERPRETED, reason="takes the interpreter too long, or needs tensors on a GPU")

# Activation, inputs, hidden states, states, length, batch and options: odd sizes, single ones, and paddings.
CASES = {
    "relu": ("relu", (2, 4, 5), (4, 5), {"bias": True}),
    "one of each": ("relu", (1, 1, 1), (2, 1), {"feedthrough": False}),
    "leaky": (leaky_relu(0.2), (3, 5, 17), (1, 1), {"feedthrough": False, "bias": True}),
    "tanh": ("tanh", (70, 3, 6), (1, 18), {}),
    "sigmoid": ("sigmoid", (2, 18, 3), (2, 5), {"warm_start": False}),
    "identity": ("identity", (2, 3, 4), (2, 2), {"solver": "picard"}),
}


def build(sizes, **options):
    """Returns the same network twice: whole sequences in Triton, and the plain loop in float64."""
    torch.manual_seed(3)
    mine = ImplicitRNN(*sizes, **{"batch_first": True, **options})
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            if name.endswith(("raw", "D", "bias")):
                parameter.normal_(std=0.2)
    plain = copy.deepcopy(mine).double()
    for cell, other in zip(mine.cells, plain.cells, strict=True):
        cell.executor, other.executor = "triton", "reference"
        other.stop = other.stop and Relative(1e-12)
    return mine.to(DEVICE), plain


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def compute(rnn, s, h0=None, lengths=None):
    """Returns reports, values and the gradients of a loss that looks at outputs, last hidden states and states."""
    like = next(rnn.parameters())
    s = s.to(like).requires_grad_()
    h0 = None if h0 is None else h0.to(like).requires_grad_()
    found = rnn.equilibria(s, h0, lengths)
    loss = found.output.sin().sum() + found.h_n.square().sum() + sum(x.cos().sum() for x in found.states)
    wanted = [s, *([] if h0 is None else [h0]), *rnn.parameters()]
    return found, (found.output, found.h_n, *found.states), torch.autograd.grad(loss, wanted)


def agree(ours, theirs, tolerance=2e-5):
    for a, b in zip(ours, theirs, strict=True):
        a = a.detach().cpu().double()
        torch.testing.assert_close(a, b.detach(), rtol=tolerance, atol=tolerance * max(1, float(b.abs().max())))


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_plain_loop(case):
    activation, sizes, (length, batch), options = CASES[case]
    mine, plain = build(sizes, activation=activation, stop=Relative(2e-5), **options)
    s, h0 = draw(batch, length, sizes[0]), draw(1, batch, sizes[1])
    assert mine.explain(s).startswith("triton: whole sequences in one call")
    ours, values, gradients = compute(mine, s, h0)
    theirs, wanted, exact = compute(plain, s, h0)
    assert (ours.status == Status.CONVERGED).all() and ours.steps.dtype == torch.int64
    limit = mine.cell(0).options().stop.rtol * ours.states[0].abs().amax(2).clamp_min(1e-3)
    assert (ours.residual[..., 0] <= 2 * limit).all() and (ours.residual > 0).any()
    agree(values, wanted)
    agree(gradients, exact)
    assert float(ours.steps.sum()) <= 1.5 * float(theirs.steps.sum())


def test_directions_and_lengths():
    mine, plain = build((2, 3, 4), bidirectional=True, stop=Relative(2e-5))
    s, h0, lengths = draw(3, 3, 2), draw(2, 3, 3), torch.tensor([2, 3, 1])
    ours, values, gradients = compute(mine, s, h0, lengths)
    _, wanted, exact = compute(plain, s, h0, lengths)
    agree(values, wanted)
    agree(gradients, exact)
    assert (ours.status[ours.present] == Status.CONVERGED).all() and not ours.failed.any()


def test_extrapolation_saves_steps_and_nobody_depends_on_companions():
    torch.manual_seed(0)
    A = 0.97 * torch.softmax(torch.randn(20, 20), 1)
    B, C = torch.rand(20, 3), torch.rand(1, 20) / 50
    s = torch.rand(18, 1, 2)
    rnn = ImplicitRNN.from_matrices(A, B, C, executor="triton", stop=Relative(3e-4), batch_first=True).to(DEVICE)
    found = rnn.equilibria(s.to(DEVICE))
    assert int(found.steps.max()) < 40  # plain steps, which gain 3 % each, would be 200
    alone = rnn.equilibria(s[17:].to(DEVICE))
    assert torch.equal(alone.steps[0], found.steps[17])
    torch.testing.assert_close(alone.output[0], found.output[17], rtol=1e-6, atol=0)
    exact = torch.linalg.solve(torch.eye(20) - A, B[:, :2] @ s[:, 0].mT)  # all states are positive
    torch.testing.assert_close(found.states[0][:, 0].cpu(), exact.mT, rtol=1e-3, atol=0)


def test_rules_that_count():
    counted, plain = build((2, 3, 4), stop=Steps(2))
    plain.cell(0).stop = Steps(2)
    ours, values, _ = compute(counted, draw(2, 2, 2))
    agree(values, compute(plain, draw(2, 2, 2))[1])
    assert (ours.status == Status.STEPS_DONE).all() and (ours.steps == 3).all()
    settled, plain = build((2, 3, 4), triangular=True)
    ours, values, gradients = compute(settled, draw(2, 2, 2))
    _, wanted, exact = compute(plain, draw(2, 2, 2))
    agree(values, wanted)
    agree(gradients, exact)
    assert (ours.status == Status.CONVERGED).all() and int(ours.steps.max()) <= 5


def test_rounding_is_all_that_is_left_where_the_tolerance_is_below_it():
    generator = torch.Generator().manual_seed(2)
    A = torch.softmax(torch.randn(20, 20, generator=generator), 1) * 0.8
    B, C = torch.rand(20, 2, generator=generator), torch.zeros(1, 20)
    rnn = ImplicitRNN.from_matrices(A, B, C, executor="triton", stop=Absolute(1e-9), batch_first=True).to(DEVICE)
    u = 1e4 * torch.rand(16, 1, 1, generator=generator)
    found = rnn.equilibria(u.to(DEVICE))
    stuck = found.status == Status.STAGNATED  # the others have found a point that rounding leaves alone
    assert (stuck | (found.residual <= 1e-9)).all() and int(found.steps.max()) < 60 + 2 * PATIENCE * PERIOD
    assert (found.residual[..., 0] <= 2 * torch.finfo(torch.float32).eps * found.states[0].abs().amax(-1)).all()
    exact = torch.linalg.solve(torch.eye(20) - A, B[:, :1] @ u[:, 0].mT).mT
    torch.testing.assert_close(found.states[0][:, 0].cpu(), exact, rtol=1e-5, atol=0)


def test_residuals_are_those_of_the_last_points():
    mine, plain = build((2, 3, 4), stop=Relative(1e-2), solver="picard")
    plain.cell(0).stop = Relative(1e-2)
    ours, theirs = mine.equilibria(draw(5, 3, 2).to(DEVICE)), plain.equilibria(draw(5, 3, 2).double())
    assert torch.equal(ours.steps.cpu(), theirs.steps) and int(ours.steps.max()) > 2
    agree([ours.residual], [theirs.residual])


def test_failures_are_reported_once_with_their_time():
    options = {"max_steps": 2, "stop": Relative(1e-9)}
    mine, plain = build((2, 3, 4), **options)
    messages = []
    for rnn in (mine, plain):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, _, _ = compute(rnn, draw(2, 2, 2))
        messages.append([str(w.message) for w in caught if w.category is ConvergenceWarning])
        assert (found.status == Status.MAX_STEPS).all() and (found.steps == 2).all()
    assert messages[0] == messages[1] and len(messages[0]) == 1 and "time step 0: 2 of 2" in messages[0][0]
    strict, _ = build((2, 3, 4), on_failure="raise", **options)
    with torch.no_grad(), pytest.raises(ConvergenceError, match="equilibrium at time step 0"):
        strict(draw(2, 2, 2).to(DEVICE))


def test_adjoint_failures_and_logs():
    mine, _ = build((2, 3, 4), stop=Relative(2e-4))
    mine.cell(0).gradient = type(mine.cell(0).gradient)(max_steps=2)
    with watch() as log, pytest.warns(ConvergenceWarning, match="adjoint solve at time step 1: 2 of 2") as record:
        mine(draw(2, 2, 2).to(DEVICE))[0].sum().backward()
    assert sum(w.category is ConvergenceWarning for w in record) == 1
    assert len(log.forward) == len(log.adjoint) == 2


def test_values_that_are_not_finite_are_statuses():
    matrices = torch.zeros(1, 1), torch.tensor([[1.0, 1e20]]), torch.ones(1, 1)
    rnn = ImplicitRNN.from_matrices(*matrices, on_failure="ignore", executor="triton", batch_first=True).to(DEVICE)
    found = rnn.equilibria(torch.ones(2, 4, 1, device=DEVICE))
    assert found.status[..., 0].tolist() == [[1, 1, 6, 6]] * 2 and found.output.isfinite().all()


def one_pass(cell, data, h0):
    task = _Pass(cell, True, True, "", WarnOnce())
    hidden = task.run(data, [3, 3], h0, backwards=False)
    return hidden, task.packed("status"), task.last, task.packed("residual")


def test_nan_in_an_input_is_seen():
    mine, _ = build((2, 3, 4), on_failure="ignore")
    s = draw(6, 2).to(DEVICE)  # two times of three sequences
    good, cell = s.clone(), mine.cell(0)
    s[1, 0] = torch.nan
    h0 = torch.zeros(3, 3, device=DEVICE)
    with torch.no_grad():
        (bad, status, last, residual), (fine, *_) = (one_pass(cell, data, h0) for data in (s, good))
        assert status.tolist() == [1, 6, 1, 1, 6, 1]
        assert residual.isnan().tolist() == [value == 6 for value in status]
        assert torch.equal(bad[::2][[0, 1]], fine[::2][[0, 1]]) and last[1].isnan().all()
        cell.on_failure = "warn"
        with pytest.raises(InputError, match="input must be finite; received 1 of"):
            one_pass(cell, s, h0)


def test_second_derivatives():
    mine, plain = build((1, 2, 2), activation="tanh", stop=Relative(2e-5))
    found = []
    for rnn in (mine, plain):
        s = draw(1, 2, 1).to(next(rnn.parameters())).requires_grad_()
        (first,) = torch.autograd.grad(rnn(s)[0].square().sum(), s, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [s, rnn.cell(0).B]))
    agree(*found, tolerance=1e-3)


@compiled
def test_tensors_on_a_gpu_take_the_kernel_unasked():
    rnn = ImplicitRNN(2, 22, 21, bias=True, batch_first=True).cuda()
    s = draw(300, 10, 2)
    assert rnn.explain(s.cuda()) == "triton: whole sequences in one call, relu, float32, 21 states, Anderson"
    plain = copy.deepcopy(rnn).cpu().double()
    for cell in plain.cells:
        cell.executor, cell.stop = "reference", Relative(1e-12)
    rnn.cell(0).stop = Relative(1e-6)
    _, values, gradients = compute(rnn, s)
    _, wanted, exact = compute(plain, s)
    agree(values, wanted)
    agree(gradients, exact, 1e-4)
    with pytest.raises(InputError, match="input must be finite"):
        rnn(torch.full((2, 3, 2), torch.nan, device="cuda"))


@compiled
@pytest.mark.parametrize("states", [33, 64, 100, 128])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_larger_blocks(states, activation):
    mine, plain = build((70, states, states), activation=activation, stop=Relative(2e-5))
    _, values, gradients = compute(mine, draw(40, 3, 70) / 8)
    _, wanted, exact = compute(plain, draw(40, 3, 70) / 8)
    agree(values, wanted)
    agree(gradients, exact, 1e-4)
