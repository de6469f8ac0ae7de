"""The memory of Broyden's method: in place where nothing is differentiated, and the same everywhere."""

import pytest
import torch
from torch import Tensor

from wellposed.equilibrium import Broyden, Relative, Steps, fixed_point
from wellposed.equilibrium.broyden import ROOM
from wellposed.equilibrium.map import FunctionMap
from wellposed.equilibrium.packing import Packing


def equation() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    A = 1.5 * torch.randn(12, 12, generator=generator, dtype=torch.float64) / 12**0.5
    return A, torch.randn(5, 12, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("memory", [1, 3, 30])
def test_steps_are_the_same_with_and_without_gradients(memory: int) -> None:
    A, u = equation()

    def solve(u: Tensor) -> tuple[Tensor, Tensor]:
        found = fixed_point(lambda x, u: torch.tanh(x @ A.mT + u), torch.zeros_like(u), u, solver=Broyden(memory),
                            stop=Relative(1e-9), max_steps=25, gradient="unrolled", on_failure="ignore")  # fmt: skip
        assert isinstance(found.value, Tensor)
        return found.value, found.steps

    with torch.no_grad():
        plain, counted = solve(u)
    differentiated, steps = solve(u.clone().requires_grad_())
    torch.testing.assert_close(plain, differentiated.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(counted, steps) and int(steps.max()) > min(memory, 8)


def test_memory_grows_by_blocks_and_keeps_the_secant_equation() -> None:
    A, u = equation()
    f = FunctionMap(lambda x: torch.tanh(x @ A.mT + u), (), Packing.of(u), None)
    solver, x = Broyden(30), torch.zeros_like(u)
    state = solver.init(x)
    with torch.no_grad():
        for step in range(ROOM + 3):
            old, gap = x, f(x) - x
            x, state = solver.step(f, x, f(x), state)
            left, right, count = state[:3]
            assert count.shape[2] == step + 1
            assert left.shape[1] == right.shape[1] == (ROOM if step < ROOM else 2 * ROOM)
            assert not left[:, step + 1 :].any()
            H = torch.einsum("bki,bkj->bij", left, right) - torch.eye(12, dtype=x.dtype)
            if step:
                change = torch.einsum("bij,bj->bi", H, gap - known[1])
                torch.testing.assert_close(change, old - known[0], rtol=1e-8, atol=1e-8)
            known = old, gap


def test_a_term_that_was_handed_out_does_not_change_where_steps_are_differentiated() -> None:
    A, u = equation()
    found = fixed_point(lambda x, u: torch.tanh(x @ A.mT + u), torch.zeros_like(u), u.requires_grad_(), max_steps=12,
                        solver=Broyden(4), stop=Steps(12), gradient="unrolled", on_failure="ignore")  # fmt: skip
    assert isinstance(found.value, Tensor)
    (gradient,) = torch.autograd.grad(found.value.sum(), u)
    assert gradient.isfinite().all()
