"""GMRES for a batch of linear systems."""

from collections.abc import Callable

import torch
from torch import Tensor


def gmres(product: Callable[[Tensor], Tensor], right: Tensor, steps: int) -> Tensor:
    """Solves ``M y = right`` row by row with one Krylov space a row (Saad and Schultz 1986).

    Args:
        product: ``y -> M y`` on ``(B, n)``, every row by its own matrix.
        right: ``(B, n)``.
        steps: dimension of the Krylov space at most.

    Example:
        >>> right = torch.tensor([[2.0, 6.0]])
        >>> gmres(lambda y: y * torch.tensor([1.0, 2.0]), right, 2)
        tensor([[2., 3.]])
    """
    steps = min(steps, right.shape[1])
    start = torch.linalg.vector_norm(right, dim=1)
    basis = [_direction(right, start)]
    hessenberg = right.new_zeros(right.shape[0], steps + 1, steps)
    for column in range(steps):
        vector = product(basis[column])
        for row, known in enumerate(basis):
            overlap = (vector * known).sum(1)
            hessenberg[:, row, column] = overlap
            vector = vector - overlap[:, None] * known
        length = torch.linalg.vector_norm(vector, dim=1)
        hessenberg[:, column + 1, column] = length
        basis.append(_direction(vector, length))
    target = torch.zeros_like(hessenberg[:, :, :1])
    target[:, 0, 0] = start
    weights = torch.linalg.pinv(hessenberg) @ target
    return (torch.stack(basis[:-1], dim=1) * weights).sum(1)


def _direction(vector: Tensor, length: Tensor) -> Tensor:
    tiny = torch.finfo(vector.dtype).tiny
    return vector / length.clamp_min(tiny)[:, None]
