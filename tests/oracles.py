"""Slow and obviously right versions of what the library computes fast."""

import torch
from torch import Tensor


def picard(A: Tensor, v: Tensor, phi: object = torch.relu, steps: int = 100_000) -> Tensor:
    """Iterates x = phi(Ax + v) in float64 until nothing changes."""
    A, v = A.double(), v.double()
    x = torch.zeros_like(v)
    for _ in range(steps):
        new = phi(x @ A.mT + v)  # type: ignore[operator]
        if torch.equal(new, x):
            break
        x = new
    return x


def implicit_gradient(A: Tensor, x: Tensor, slope: Tensor, gradient: Tensor) -> Tensor:
    """Solves y = d (A' y + g) by one dense system a sample."""
    rows = []
    for d, g in zip(slope, gradient, strict=True):
        system = torch.eye(len(d), dtype=A.dtype) - d[:, None] * A.mT
        rows.append(torch.linalg.solve(system, d * g))
    return torch.stack(rows)
