"""The exact equilibrium and its gradients: float64, dense, one system a sample."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problems import Problem

PHI = {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda z: z}
SLOPE = {
    "relu": lambda z: (z > 0).to(z),
    "tanh": lambda z: 1 - torch.tanh(z) ** 2,
    "identity": torch.ones_like,
}


@dataclass(frozen=True)
class Exact:
    """Outputs and gradients of a problem."""

    output: Tensor  # (batch, 10)
    gradients: dict[str, Tensor]  # of A, B and C


def _state(A: Tensor, v: Tensor, activation: str) -> Tensor:
    """Iterates from zero to the neighbourhood of the equilibrium and polishes by Newton's method."""
    x, identity = torch.zeros_like(v), torch.eye(A.shape[0], dtype=A.dtype)
    for _ in range(3000):
        x = PHI[activation](x @ A.mT + v)
    for _ in range(3):
        z = x @ A.mT + v
        system = identity - SLOPE[activation](z)[:, :, None] * A
        x = x + torch.linalg.solve(system, PHI[activation](z) - x)
    return x


def exact(problem: Problem) -> Exact:
    """Solves the equation and its adjoint ``w = A' d w + C' weights`` for every sample."""
    leaf = problem.A.double().requires_grad_()
    capped = problem.capped(leaf)
    A, B, C = capped.detach(), problem.B.double(), problem.C.double()
    u, weights = problem.u.double(), problem.weights.double()
    x = _state(A, u @ B.mT, problem.activation)
    slope = SLOPE[problem.activation](x @ A.mT + u @ B.mT)
    system = torch.eye(problem.states, dtype=A.dtype) - slope[:, :, None] * A
    w = slope * torch.linalg.solve(system.mT, weights @ C)
    (by_matrix,) = torch.autograd.grad(capped, leaf, w.mT @ x)
    return Exact(x @ C.mT, {"A": by_matrix, "B": w.mT @ u, "C": weights.mT @ x})


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Returns the largest error relative to the largest entry."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())
