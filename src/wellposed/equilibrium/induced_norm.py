"""Induced norms |A|_{p->q} = max |A xi|_q over |xi|_p <= 1: exact where tractable, else proven bounds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.equilibrium.rounding import EPS, double, upward
from wellposed.errors import InputError


class NormBound(NamedTuple):
    """An upper bound of an induced norm; `exact` says whether it is the norm itself up to rounding."""

    value: Tensor  # (...)
    exact: bool


def block_sizes(n: int, blocks: int | Sequence[int]) -> list[int]:
    """Writes a partition of n states as a list of sizes; one number stands for equal blocks, 0 for one.

    Example:
        >>> block_sizes(6, 2), block_sizes(6, 0), block_sizes(3, [2, 1])
        ([2, 2, 2], [6], [2, 1])
    """
    sizes = list(blocks) if isinstance(blocks, Sequence) else [blocks or n] * (n // (blocks or n))
    if sum(sizes) != n or min(sizes, default=0) < 1:
        raise InputError(f"blocks {blocks} do not partition {n} states; give positive sizes that sum to {n}")
    return sizes


def split_blocks(A: Tensor, size: int) -> Tensor:
    """Views a matrix of equal blocks as (..., L, L, k, k).

    Example:
        >>> split_blocks(torch.zeros(6, 6), 2).shape
        torch.Size([3, 3, 2, 2])
    """
    count = A.shape[-1] // size
    return A.reshape(*A.shape[:-2], count, size, count, size).transpose(-3, -2)


def block_norms(A: Tensor, sizes: Sequence[int], norm: str) -> Tensor:
    """Computes the differentiable matrix of |A_ij|_{p->p}, not rounded outward.

    Args:
        A: (..., n, n).

    Returns:
        (..., L, L).

    Example:
        >>> block_norms(torch.ones(3, 3), [2, 1], "inf")
        tensor([[2., 1.],
                [2., 1.]])
    """
    order = float(norm)
    if len(set(sizes)) == 1:
        return torch.linalg.matrix_norm(split_blocks(A, sizes[0]), order)
    rows = [row.split(list(sizes), -1) for row in A.split(list(sizes), -2)]
    norms = [torch.stack([torch.linalg.matrix_norm(block, order) for block in row], -1) for row in rows]
    return torch.stack(norms, -2)


def vector_norm(z: Tensor, norm: str, dim: int) -> Tensor:
    """Computes |z|_p; the squares of the 2-norm neither overflow nor vanish.

    Example:
        >>> float(vector_norm(torch.tensor([3e-200, 4e-200], dtype=torch.float64), "2", -1))
        5e-200
    """
    if norm != "2":
        return torch.linalg.vector_norm(z, float(norm), dim)
    top = z.abs().amax(dim, keepdim=True)
    scaled = torch.linalg.vector_norm(z / torch.where(top > 0, top, 1.0), 2.0, dim)
    return top.squeeze(dim) * scaled


def induced_norm(A: Tensor, p: str, q: str) -> NormBound:
    """Bounds |A|_{p->q} from above, rounded outward.

    Exact: 1->q is the largest column q-norm, p->inf the largest row norm dual to p, 2->2 the largest
    singular value. NP-hard elsewhere; then inf->2 <= | |A| 1 |_2, inf->1 <= sum |A_ij|, and
    2->1 is the inf->2 norm of A'.

    Args:
        A: (..., m, n).

    Example:
        >>> value, exact = induced_norm(torch.tensor([[3.0, -4.0]]), "2", "inf")
        >>> round(float(value), 6), exact
        (5.0, True)
    """
    matrix, terms = double(A).abs(), A.shape[-1] + A.shape[-2]
    if p == "1":
        return NormBound(upward(vector_norm(matrix, q, -2).amax(-1), terms), True)
    if q == "inf":
        dual = {"2": "2", "inf": "1"}[p]
        return NormBound(upward(vector_norm(matrix, dual, -1).amax(-1), terms), True)
    if p == q == "2":
        return NormBound(spectral_norm(A), True)
    if p == "inf" and q == "1":
        return NormBound(upward(matrix.sum((-2, -1)), A.shape[-1] * A.shape[-2]), False)
    sums = matrix.sum(-1) if p == "inf" else matrix.sum(-2)
    return NormBound(upward(vector_norm(sums, "2", -1), terms), False)


def spectral_norm(A: Tensor) -> Tensor:
    """Bounds |A|_2 from above in floating point, without trusting the singular values.

    A = U S V' + E gives |A|_2 <= |U| |V| max(S) + |E|_F with |U|^2 <= 1 + |U'U - I|_F, each residual with
    its own rounding added; sqrt(|A|_1 |A|_inf) if that is smaller.

    Args:
        A: (..., m, n).

    Example:
        >>> value = float(spectral_norm(torch.diag(torch.tensor([3.0, -4.0]))))
        >>> 4 <= value < 4.000001
        True
    """
    matrix = double(A)
    simple = _largest_sum(matrix, -1).sqrt() * _largest_sum(matrix, -2).sqrt() * (1 + 4 * EPS)
    if not bool(matrix.isfinite().all()):
        return simple
    try:
        U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return simple
    stretch = ((1 + _orthogonality(U)) * (1 + _orthogonality(Vh.mT))).sqrt()
    verified = stretch * s.amax(-1) + _residual(matrix, U * s.unsqueeze(-2), Vh)
    return torch.minimum(simple, verified * (1 + 16 * EPS))


def symmetric_eigenvalue(A: Tensor) -> float:
    """Bounds lambda_max((A + A') / 2) from above in floating point, by the same kind of residuals; else NaN.

    With S = Q L Q' + E, Ostrowski's theorem gives lambda_max(S) <= max(L) + |Q'Q - I| |max(L)| + |E|_F.

    Example:
        >>> value = symmetric_eigenvalue(torch.tensor([[0.5, 7.0], [-7.0, -1.0]]))
        >>> 0.5 <= value < 0.500001
        True
    """
    matrix = double(A)
    symmetric = (matrix + matrix.mT) / 2
    if not bool(symmetric.isfinite().all()):
        return math.nan
    try:
        values, Q = torch.linalg.eigh(symmetric)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return math.nan
    halving = EPS * _frobenius(symmetric)
    error = values[-1].abs() * _orthogonality(Q) + _residual(symmetric, Q * values, Q.mT) + halving
    return float(values[-1] + (error + EPS * values[-1].abs()) * (1 + 16 * EPS))


def _largest_sum(matrix: Tensor, dim: int) -> Tensor:
    return upward(matrix.abs().sum(dim).amax(-1), matrix.shape[dim])


def _frobenius(matrix: Tensor) -> Tensor:
    return upward(vector_norm(matrix.flatten(-2), "2", -1), matrix.shape[-1] * matrix.shape[-2])


def _residual(matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Bounds |matrix - left @ right|_F by the computed residual and the rounding of computing it."""
    terms = left.shape[-1] + 3
    rounding = terms * EPS * (_frobenius(left) * _frobenius(right) + _frobenius(matrix))
    return _frobenius(matrix - left @ right) + rounding


def _orthogonality(Q: Tensor) -> Tensor:
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    return _residual(identity, Q.mT, Q)
