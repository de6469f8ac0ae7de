"""Memory of a training step: constant with implicit and phantom gradients, growing with unrolled ones.

Counted are the bytes of tensors alive at once, which do not depend on the machine or on what else it does.
"""

import pytest
import torch
from torch import nn

from benchmarks.harness import peak_bytes
from wellposed.equilibrium import (
    Anderson,
    Broyden,
    Implicit,
    Phantom,
    Picard,
    Status,
    Steps,
    Unrolled,
    fixed_point,
)

STATE = 2 * 8 * 16 * 16 * 4  # bytes of the state below


@pytest.fixture
def train():
    """One training step of a convolutional cell, for a number of solver steps."""
    kernel = torch.rand(8, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    cell = nn.Conv2d(8, 8, 3, padding=1, bias=False)
    cell.weight.data.copy_(0.98 * kernel / kernel.sum((1, 2, 3), keepdim=True))
    u = 0.1 * torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(1))

    def step(steps, gradient, solver):
        cell.zero_grad()
        found = fixed_point(
            lambda x, u: torch.tanh(cell(x) + u),
            torch.zeros_like(u),
            u,
            solver=solver,
            gradient=gradient,
            stop=Steps(steps),
        )
        assert (found.status == Status.STEPS_DONE).all()
        (found.value**2).sum().backward()

    def peak(steps, gradient, solver):
        step(steps, gradient, solver)  # whatever is allocated once
        return peak_bytes(lambda: step(steps, gradient, solver))

    return peak


# Anderson has all it ever keeps when its second cycle begins, after nine steps.
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("solver", "start"), [(Picard(), 10), (Anderson(), 20), (Broyden(memory=5), 10)], ids=str)
@pytest.mark.parametrize("gradient", [Implicit(), Phantom(steps=1), Phantom(steps=5)], ids=str)
def test_memory_does_not_depend_on_the_number_of_steps(train, gradient, solver, start):
    few, many = train(start, gradient, solver), train(40, gradient, solver)
    assert few > 2 * STATE
    assert many == pytest.approx(few, rel=0.02)


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(memory=5)], ids=str)
def test_memory_of_unrolling_grows_by_at_least_a_state_a_step(train, solver):
    few, many = train(10, Unrolled(), solver), train(40, Unrolled(), solver)
    assert many - few >= 30 * STATE


def test_phantom_memory_grows_with_its_own_steps(train):
    peaks = [train(10, Phantom(steps), Picard()) for steps in (5, 9, 13)]  # below that the solve has the peak
    assert peaks[1] - peaks[0] >= 4 * STATE
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.2)


def test_the_meter_counts_what_is_alive_at_once():
    def chain(length):
        x = torch.ones(1000)
        for _ in range(length):
            x = x + 1
        return x

    assert peak_bytes(lambda: chain(3)) == peak_bytes(lambda: chain(30)) == 8000
    outside = torch.ones(1000)
    assert peak_bytes(lambda: outside.view(10, 100)[2:].mul_(2)) == 0  # views and in-place work allocate nothing
    assert peak_bytes(lambda: [torch.ones(1000) for _ in range(7)]) == 28_000


def test_the_meter_counts_what_a_graph_keeps():
    leaf = torch.ones(1000, requires_grad=True)

    def graph(length):
        x = leaf
        for _ in range(length):
            x = torch.sin(x)
        x.sum().backward()
        leaf.grad = None

    assert peak_bytes(lambda: graph(30)) - peak_bytes(lambda: graph(10)) == 20 * 4000
