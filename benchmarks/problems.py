"""State matrices on which solvers differ."""

import torch
from torch import Tensor


def state_matrix(family: str, n: int, norm: float, generator: torch.Generator) -> Tensor:
    """Draws a float32 A with every row sum of |A| equal to `norm`."""
    A = {
        "positive": lambda: torch.rand(n, n, generator=generator),
        "random": lambda: torch.randn(n, n, generator=generator),
        "ring": lambda: torch.eye(n).roll(1, 0) + torch.eye(n).roll(-1, 0),
        "shift": lambda: torch.eye(n).roll(1, 0),
    }[family]()
    return norm * A / A.abs().sum(1, keepdim=True)
