"""Groups of sequences in lanes: full and partial ones, every stopping rule, what is kept and what is skipped."""

import copy

import pytest
import torch
import torch.nn.functional as F

from wellposed import Absolute, ImplicitRNN, Relative, Steps
from wellposed.activations import get_activation
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.stopping import Settled
from wellposed.kernels.cpu.engine import columns, run_kernel
from wellposed.kernels.spec import kernel_spec, kind_of, slopes

pytest.importorskip("numba")


def build(states=7, hidden=3, **options):
    """Returns the same network twice: whole sequences in one call, and the plain loop."""
    torch.manual_seed(5)
    mine = ImplicitRNN(2, hidden, states, bias=True, **{"batch_first": True, **options}).double()
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            if name.endswith(("raw", "D", "bias")):
                parameter.normal_(std=0.4)
    plain = copy.deepcopy(mine)
    for cell in plain.cells:
        cell.executor = "reference"
    return mine, plain


def sequences(batch, length):
    return torch.randn(batch, length, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def results(rnn, s, lengths):
    """Returns everything that a training step sees."""
    s = s.clone().requires_grad_()
    found = rnn.equilibria(s, lengths=lengths)
    loss = found.output.sin().sum() + found.h_n.square().sum() + sum(x.cos().sum() for x in found.states)
    gradients = torch.autograd.grad(loss, [s, *rnn.parameters()])
    return [found.output, found.h_n, found.residual, *found.states, *gradients], found


@pytest.mark.parametrize("batch", [1, 8, 9, 16, 17, 32, 43])
def test_groups_of_every_size_agree_with_the_plain_loop(batch):
    mine, plain = build(stop=Relative(1e-13), max_steps=2000, bidirectional=True)
    s, generator = sequences(batch, 5), torch.Generator().manual_seed(batch)
    lengths = torch.randint(1, 6, (batch,), generator=generator).index_fill_(0, torch.tensor([batch // 2]), 5)
    (ours, here), (theirs, there) = results(mine, s, lengths), results(plain, s, lengths)
    assert mine.explain(s).startswith("numba: whole sequences") and plain.explain(s).startswith("time by time")
    assert torch.equal(here.status, there.status)
    assert int((here.steps - there.steps).abs().max()) <= 1
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("stop", [Steps(4), Steps(11), Settled(40), Absolute(1e-3)], ids=str)
@pytest.mark.parametrize("solver", ["anderson", "picard"])
def test_every_stopping_rule_ends_where_the_plain_loop_ends(stop, solver):
    mine, plain = build(stop=stop, solver=solver, max_steps=60, on_failure="ignore")
    s = sequences(20, 4)
    ours, theirs = mine.equilibria(s), plain.equilibria(s)
    assert mine.explain(s).startswith("numba: whole sequences")
    settled = isinstance(stop, Settled)  # rounding decides when, and whether, the last digit stops changing
    if settled:
        for one in (ours, theirs):
            assert ((one.status == Status.CONVERGED) | (one.status == Status.STAGNATED)).all()
    else:
        assert torch.equal(ours.status, theirs.status) and torch.equal(ours.steps, theirs.steps)
    # On the way to an equilibrium a jump magnifies the rounding of its least squares problem.
    tolerance = 1e-7 if solver == "anderson" and not settled else 1e-11
    torch.testing.assert_close(ours.states[0], theirs.states[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.residual, theirs.residual, rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("stop", [Steps(11), Absolute(1e-3), Relative(1e-13)], ids=str)
def test_a_time_step_is_the_solve_of_the_single_kernel(stop):
    rnn, _ = build(stop=stop, max_steps=200, on_failure="ignore")
    cell, s = rnn.cell(0), sequences(40, 1)
    kernel = kernel_spec(kind_of(cell.activation), cell.options(), torch.float64)
    with torch.no_grad():
        v = F.linear(torch.cat([s[:, 0], s.new_zeros(40, 3)], 1), cell.B, cell.bias)
        single = run_kernel(cell.A, v, None, torch.zeros_like(v), kernel, trace=False)
    found = rnn.equilibria(s)
    assert torch.equal(found.status[:, 0, 0], single.status) and torch.equal(found.steps[:, 0, 0], single.steps)
    # On the way to an equilibrium a jump magnifies the rounding of its least squares problem.
    tolerance = 1e-13 if isinstance(stop, Relative) else 1e-7
    torch.testing.assert_close(found.states[0][:, 0], single.value, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("wanted", ["inputs", "matrices", "one matrix"])
def test_only_wanted_gradients_are_computed_and_they_are_the_same(wanted):
    found = []
    for rnn in build(stop=Relative(1e-13), max_steps=2000):
        names = {"inputs": (), "matrices": ("raw", "B", "C", "D", "bias"), "one matrix": ("C",)}[wanted]
        for name, parameter in rnn.named_parameters():
            parameter.requires_grad_(name.endswith(names) if names else False)
        s = sequences(6, 3).requires_grad_(wanted == "inputs")
        (rnn(s)[0] ** 2).sum().backward()
        tensors = [s, *rnn.parameters()]
        assert [tensor.grad is not None for tensor in tensors] == [tensor.requires_grad for tensor in tensors]
        found.append([tensor.grad for tensor in tensors if tensor.requires_grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_nothing_to_differentiate_gives_no_graph():
    rnn, _ = build()
    rnn.requires_grad_(False)
    assert rnn(sequences(2, 3))[0].grad_fn is None


@pytest.mark.parametrize("name", ["relu", "identity", "tanh", "sigmoid"])
def test_slopes_follow_from_images(name):
    function = {"relu": torch.relu, "identity": lambda z: z, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[name]
    z = torch.linspace(-3, 3, 24, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(function(z).sum(), z)
    torch.testing.assert_close(slopes(*kind_of(get_activation(name)), function(z).detach()), wanted)


@pytest.mark.parametrize("elements", [1, 16, 1024, 7680])
def test_rows_do_not_share_cache_lines_of_the_same_number(elements):
    room = columns(40, elements, torch.zeros(1))
    lines = {row * room.stride(0) * 4 // 64 % 64 for row in range(40)}
    assert room.shape == (40, elements) and len(lines) == 40
