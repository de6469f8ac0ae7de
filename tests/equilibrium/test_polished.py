"""Damped steps from what a solver found, against loops written out and against dense solves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from wellposed.equilibrium import Gradient, Implicit, Polished, Steps, Unrolled, fixed_point
from wellposed.errors import InputError

N, K, DAMPING = 6, 9, 0.5


def problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(N, N, generator=generator, dtype=torch.float64)
    return 0.7 * W / torch.linalg.matrix_norm(W, 2), torch.randn(4, N, generator=generator, dtype=torch.float64)


def solved(W: Tensor, u: Tensor, gradient: Gradient, **options: Any) -> Tensor:
    value = fixed_point(lambda x, u: torch.tanh(x @ W.mT + u), torch.zeros_like(u), u, solver="picard",
                        gradient=gradient, **options).value  # fmt: skip
    assert isinstance(value, Tensor)
    return value


def written_out(W: Tensor, u: Tensor, steps: int, constant: bool) -> Tensor:
    x = torch.zeros_like(u)
    for _ in range(steps):
        x = torch.tanh(x @ W.mT + u)
    further = torch.tanh(x @ W.mT + u)  # whose derivative `Unrolled` takes, at the value before it
    x = x.detach() if constant else further + (x - further).detach()
    for _ in range(K):
        x = (1 - DAMPING) * x + DAMPING * torch.tanh(x @ W.mT + u)
    return x


@pytest.mark.parametrize("constant", [True, False])
def test_value_and_gradient_are_those_of_the_loop_written_out(constant: bool) -> None:
    W, u = problem()
    W.requires_grad_(), u.requires_grad_()
    rule = Polished(K, DAMPING, None if constant else Unrolled())
    ours, oracle = solved(W, u, rule, stop=Steps(8)), written_out(W, u, 8, constant)
    torch.testing.assert_close(ours, oracle)
    weights = torch.randn(4, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mine, other in zip(
        torch.autograd.grad((weights * ours).sum(), (W, u)),
        torch.autograd.grad((weights * oracle).sum(), (W, u)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_value_is_the_same_without_gradients() -> None:
    W, u = problem(1)
    with torch.no_grad():
        quiet = solved(W, u, Polished(K, DAMPING), stop=Steps(2))
    torch.testing.assert_close(quiet, solved(W, u.requires_grad_(), Polished(K, DAMPING), stop=Steps(2)).detach())
    torch.testing.assert_close(quiet, written_out(W, u, 2, True).detach())


def test_through_the_equilibrium_the_gradient_is_exact_and_without_it_is_not() -> None:
    W, u = problem(2)
    u = u[:1].requires_grad_()
    x = solved(W, u.detach(), Implicit())
    D = torch.diag(1 - x[0].square())
    exact = torch.linalg.solve(torch.eye(N, dtype=torch.float64) - D @ W, D).sum(0)
    (through,) = torch.autograd.grad(solved(W, u, Polished(3, DAMPING, Implicit())).sum(), u)
    (blind,) = torch.autograd.grad(solved(W, u, Polished(3, DAMPING)).sum(), u)
    torch.testing.assert_close(through[0], exact, rtol=1e-7, atol=1e-7)
    assert float((blind[0] - exact).abs().max()) > 0.05


def test_bad_settings() -> None:
    for steps, damping in ((0, 0.5), (3, 0.0), (3, 1.5)):
        with pytest.raises(InputError, match="received"):
            Polished(steps, damping)
