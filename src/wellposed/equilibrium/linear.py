"""Batches of small linear systems: factorised, or by GMRES."""

from collections.abc import Callable

import torch
from torch import Tensor


def solve_rows(system: Tensor, right: Tensor) -> Tensor:  # (B, n, n), (B, n) -> (B, n)
    """Solves one dense system a row; rows of singular systems are not finite.

    Example:
        >>> solve_rows(2 * torch.eye(2)[None], torch.ones(1, 2))
        tensor([[0.5000, 0.5000]])
    """
    wide = torch.promote_types(right.dtype, torch.float32)  # no factorisation in half precision
    return torch.linalg.solve_ex(system.to(wide), right.to(wide))[0].to(right.dtype)


def eliminate(system: Tensor, right: Tensor) -> Tensor:  # (B, m, m), (B, m, k) -> (B, m, k)
    """Solves small positive definite systems by Gauss-Jordan elimination without pivots.

    A library's factorisation of a batch may wait for the device; this one never does.

    Example:
        >>> eliminate(torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]), torch.tensor([[[3.0], [3.0]]]))
        tensor([[[1.],
                 [1.]]])
    """
    size = system.shape[1]
    table = torch.cat([system, right], dim=2)
    for pivot in range(size):
        row = table[:, pivot] / table[:, pivot, pivot, None]
        reduced = torch.addcmul(table, table[:, :, pivot, None], row[:, None], value=-1)
        table = torch.cat([reduced[:, :pivot], row[:, None], reduced[:, pivot + 1 :]], dim=1)
    return table[:, :, size:]


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
        whole = torch.linalg.vector_norm(vector, dim=1)
        for row, known in enumerate(basis):
            overlap = (vector * known).sum(1)
            hessenberg[:, row, column] = overlap
            vector = vector - overlap[:, None] * known
        length = torch.linalg.vector_norm(vector, dim=1)
        length = torch.where(length > torch.finfo(right.dtype).eps ** 0.75 * whole, length, 0)  # else noise
        hessenberg[:, column + 1, column] = length
        basis.append(_direction(vector, length))
    weights = _smallest_residual(hessenberg, start)
    return (torch.stack(basis[:-1], dim=1) * weights[:, :, None]).sum(1)


def _smallest_residual(hessenberg: Tensor, start: Tensor) -> Tensor:  # (B, m)
    """Minimises ``|start e_1 - H y|``, with a ridge at rounding level for exhausted Krylov spaces."""
    H = hessenberg.double()
    gram = H.mT @ H
    ridge = 4 * torch.finfo(torch.float64).eps * gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    gram = gram + ridge * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_ex(gram, H[:, 0] * start[:, None])[0].to(hessenberg.dtype)


def _direction(vector: Tensor, length: Tensor) -> Tensor:
    return torch.where(length > 0, 1 / length, 0)[:, None] * vector
