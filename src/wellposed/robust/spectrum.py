"""Largest eigenvalues and singular values from above, proven by a Cholesky factorisation, for large matrices."""

import torch
from torch import Tensor

from wellposed.equilibrium.rounding import EPS, upward

LANCZOS_STEPS, TRIES = 48, 16
RANGE = (1e-140, 1e140)  # of norms whose squares are numbers


@torch.no_grad()
def largest_eigenvalue(symmetric: Tensor) -> float:  # (n, n), float64
    """Bounds the largest eigenvalue of a symmetric matrix from above.

    A value t is guessed by Lanczos' method and proven by the factorisation of ``t I - S - c I``: if that runs to
    its end in floating point, ``t I - S`` has no negative eigenvalue for c >= (n + 1) u trace / (1 - 2 (n + 1) u)
    (Rump, Verification of positive definiteness, BIT 46, 2006). It takes n^3 / 3 operations. Where squares would
    overflow or vanish, and where nothing is proven, it is the largest row sum.

    Example:
        >>> S = torch.diag(torch.tensor([1.0, -5.0, 3.0], dtype=torch.float64))
        >>> 3 <= largest_eigenvalue(S) < 3.0001
        True
    """
    rows = upward(symmetric.abs().sum(1), len(symmetric)).amax()
    if not RANGE[0] < float(rows) < RANGE[1]:
        return float(rows)
    guess, doubt = _lanczos(symmetric)
    doubt = max(doubt, 1e-9 * float(rows))
    for power in range(TRIES):
        value = guess + doubt * 4.0**power
        if value >= float(rows):
            break
        if _not_above(symmetric, value):
            return value
    return float(rows)


def _not_above(symmetric: Tensor, value: float) -> bool:
    """Proves that no eigenvalue is larger than a value."""
    n = len(symmetric)
    diagonal = value - symmetric.diagonal()
    if not bool((diagonal > 0).all()):
        return False
    size = float(abs(value) + symmetric.diagonal().abs().amax())
    margin = 4 * (n + 4) * EPS * float(diagonal.sum()) + 4 * EPS * size + 1e-290
    shifted = -symmetric + torch.diag(diagonal + symmetric.diagonal() - margin)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0


def _lanczos(symmetric: Tensor) -> tuple[float, float]:
    """Guesses the largest eigenvalue, and says how far off that may be."""
    n = len(symmetric)
    start = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(symmetric.device)
    basis = [start / torch.linalg.vector_norm(start)]
    projected = torch.zeros(LANCZOS_STEPS, LANCZOS_STEPS, dtype=torch.float64, device=symmetric.device)
    length, least = torch.zeros(()), 1e-12 * symmetric.abs().amax()
    for step in range(min(LANCZOS_STEPS, n)):
        rest = symmetric @ basis[-1]
        known = torch.stack(basis)
        coefficients = known @ rest
        rest = rest - coefficients @ known
        rest = rest - (known @ rest) @ known
        projected[: step + 1, step] = coefficients
        length, used = torch.linalg.vector_norm(rest), step + 1
        if bool(length <= least):
            break  # the vectors span a space that the matrix leaves alone
        basis.append(rest / length)
    small = projected[:used, :used]
    values, vectors = torch.linalg.eigh(torch.triu(small) + torch.triu(small, 1).mT)
    return float(values[-1]), float((length * vectors[-1, -1]).abs())


@torch.no_grad()
def largest_singular_value(matrix: Tensor) -> float:  # (m, n)
    """Bounds the largest singular value from above, by the eigenvalues of the smaller product with itself.

    Example:
        >>> 4 <= largest_singular_value(torch.diag(torch.tensor([3.0, -4.0]))) < 4.0001
        True
    """
    wide = matrix.to(torch.float64)
    wide = wide if len(wide) <= wide.shape[1] else wide.mT
    product = wide @ wide.mT
    rounding = 2 * (wide.shape[1] + 2) * EPS * wide.square().sum()  # of the product, in the 2-norm
    value = torch.as_tensor(largest_eigenvalue((product + product.mT) / 2), dtype=torch.float64)
    return float(upward((value.clamp(min=0) + upward(rounding, wide.numel() + 4)).sqrt(), 4))
