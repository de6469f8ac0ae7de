"""Equilibria on which solvers differ."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FAMILIES = ("positive", "random", "ring", "shift")
SIZES = ((20, 128), (64, 512))  # states and batch


def state_matrix(family: str, n: int, norm: float, generator: torch.Generator) -> Tensor:
    """Draws a float32 A with every row sum of |A| equal to `norm`."""
    A = {
        "positive": lambda: torch.rand(n, n, generator=generator),
        "random": lambda: torch.randn(n, n, generator=generator),
        "ring": lambda: torch.eye(n).roll(1, 0) + torch.eye(n).roll(-1, 0),
        "shift": lambda: torch.eye(n).roll(1, 0),
    }[family]()
    return norm * A / A.abs().sum(1, keepdim=True)


@dataclass(frozen=True)
class Problem:
    """``x = phi(Ax + Bu)``, ``y = Cx`` and the loss ``sum(weights * y)``, in float32.

    With a cap the matrix of the equation is not A but A scaled down to ``|A|_inf = cap``, and the gradient in A
    goes through the scaling.
    """

    name: str
    A: Tensor  # (n, n)
    B: Tensor  # (n, n)
    C: Tensor  # (10, n)
    u: Tensor  # (batch, n)
    weights: Tensor  # (batch, 10)
    activation: str = "relu"
    cap: float | None = None

    @property
    def states(self) -> int:
        """The number of states of a sample."""
        return self.A.shape[0]

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self.u.shape[0]

    def capped(self, A: Tensor) -> Tensor:
        """Returns the matrix of the equation, differentiably."""
        if self.cap is None:
            return A
        return A * (self.cap / torch.linalg.matrix_norm(A, torch.inf)).clamp_max(1)


def make_problem(
    name: str,
    A: Tensor,
    batch: int,
    generator: torch.Generator,
    activation: str = "relu",
    cap: float | None = None,
) -> Problem:
    """Adds B = I, an output of ten numbers and inputs, all of the order of one."""
    n = A.shape[0]
    C = torch.randn(10, n, generator=generator) / n**0.5
    u, weights = torch.randn(batch, n, generator=generator), torch.randn(batch, 10, generator=generator)
    return Problem(name, A, torch.eye(n), C, u, weights, activation, cap)


def problems(sizes: tuple[tuple[int, int], ...] = SIZES) -> Iterator[Problem]:
    """Yields the families at two norms, a tanh cell, an affine map and a matrix outside its ball."""
    for n, batch in sizes:
        for family in FAMILIES:
            for norm in (0.9, 0.99):
                generator = torch.Generator().manual_seed(0)
                A = state_matrix(family, n, norm, generator)
                yield make_problem(f"{family} {norm}", A, batch, generator)
        generator = torch.Generator().manual_seed(0)
        W = 0.9 * torch.randn(n, n, generator=generator) / n**0.5
        yield make_problem("tanh cell", W, batch, generator, "tanh")
        A = state_matrix("random", n, 0.95, generator)
        yield make_problem("affine", A, batch, generator, "identity")
        A = 3 * torch.rand(n, n, generator=generator) / n
        yield make_problem("capped", A, batch, generator, cap=0.9)
