"""The memory of Broyden's method: in place where nothing is differentiated, and the same everywhere."""

import pytest
import torch
from torch import Tensor

from wellposed.equilibrium import Broyden, Relative, fixed_point
from wellposed.equilibrium.maps import FunctionMap, Packing
from wellposed.equilibrium.solvers import ROOM


def equation() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    A = 1.5 * torch.randn(12, 12, generator=generator, dtype=torch.float64) / 12**0.5
    return A, torch.randn(5, 12, generator=generator, dtype=torch.float64)


def solve(A: Tensor, u: Tensor, memory: int) -> tuple[Tensor, Tensor]:
    options = {"max_steps": 25, "gradient": "unrolled", "on_failure": "ignore"}
    found = fixed_point(
        lambda x, u: torch.tanh(x @ A.mT + u),
        torch.zeros_like(u),
        u,
        solver=Broyden(memory),
        stop=Relative(1e-9),
        **options,  # type: ignore[arg-type]
    )
    assert isinstance(found.value, Tensor)
    return found.value, found.steps


@pytest.mark.parametrize("memory", [1, 3, 30])
def test_steps_are_the_same_with_and_without_gradients(memory: int) -> None:
    A, u = equation()
    with torch.no_grad():
        plain, counted = solve(A, u, memory)
    differentiated, steps = solve(A, u.requires_grad_(), memory)
    torch.testing.assert_close(plain, differentiated.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(counted, steps) and int(steps.max()) > min(memory, ROOM)
    (gradient,) = torch.autograd.grad(differentiated.sum(), u)  # raises where a saved term was overwritten
    assert gradient.isfinite().all()


@torch.no_grad()
def test_memory_grows_by_blocks_and_keeps_the_secant_equation() -> None:
    A, u = equation()
    f = FunctionMap(lambda x: torch.tanh(x @ A.mT + u), (), Packing.of(u), None)
    solver, x = Broyden(30), torch.zeros_like(u)
    state, points = solver.init(x), [(x, f(x) - x)]
    for step in range(ROOM + 3):
        x, state = solver.step(f, x, f(x), state)
        left, right, count = state[:3]
        assert count.shape[2] == step + 1
        assert left.shape[1] == right.shape[1] == (ROOM if step < ROOM else 2 * ROOM)
        assert not left[:, step + 1 :].any()
        if step:
            (old_x, old_g), (new_x, new_g) = points[-2:]
            H = torch.einsum("bki,bkj->bij", left, right) - torch.eye(12, dtype=x.dtype)
            torch.testing.assert_close(
                (H @ (new_g - old_g)[..., None])[..., 0], new_x - old_x, rtol=1e-8, atol=1e-8
            )
        points.append((x, f(x) - x))


@torch.no_grad()
def test_a_full_memory_is_forgotten() -> None:
    A, u = equation()
    f = FunctionMap(lambda x: torch.tanh(x @ A.mT + u), (), Packing.of(u), None)
    solver, x = Broyden(3), torch.zeros_like(u)
    state = solver.init(x)
    for _ in range(5):  # the first term is of a step that has no predecessor, and zero
        x, state = solver.step(f, x, f(x), state)
    left, _, count = state[:3]
    assert count.shape[2] == 3
    assert not left[:, :2].any() and left[:, 2].any(1).all()
