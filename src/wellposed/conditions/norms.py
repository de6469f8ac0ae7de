"""Norms, eigenvalues and Perron weights of matrices, bounded from above with proof.

Induced norms |A|_{p->q} = max |A xi|_q over |xi|_p <= 1 are exact where tractable and proven bounds elsewhere
(`induced_norm`, `spectral_norm`). `perron_weights` finds weights that prove rho(M) < 1 for a non-negative matrix,
without eigenvalues. For large matrices, `largest_eigenvalue` and `largest_singular_value` are proven by a Cholesky
factorisation.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.conditions.rounding import (
    EPS,
    ROOM,
    TINY,
    above_underflow,
    double,
    power_of_two,
    reciprocal_gap,
    upward,
    vector_norm,
)
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
        return NormBound(above_underflow(upward(vector_norm(matrix, q, -2).amax(-1), terms)), True)
    if q == "inf":
        dual = {"2": "2", "inf": "1"}[p]
        return NormBound(above_underflow(upward(vector_norm(matrix, dual, -1).amax(-1), terms)), True)
    if p == q == "2":
        return NormBound(spectral_norm(A), True)
    if p == "inf" and q == "1":
        return NormBound(above_underflow(upward(matrix.sum((-2, -1)), A.shape[-1] * A.shape[-2])), False)
    sums = matrix.sum(-1) if p == "inf" else matrix.sum(-2)
    return NormBound(above_underflow(upward(vector_norm(sums, "2", -1), terms)), False)


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
    if not matrix.numel():
        return matrix.new_zeros(matrix.shape[:-2])
    simple = _largest_sum(matrix, -1).sqrt() * _largest_sum(matrix, -2).sqrt() * (1 + 4 * EPS)
    simple = above_underflow(simple)
    if not bool(matrix.isfinite().all()):
        return simple
    try:
        U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return simple
    stretch = ((1 + _orthogonality(U)) * (1 + _orthogonality(Vh.mT))).sqrt()
    verified = stretch * s.amax(-1) + _residual(matrix, U * s.unsqueeze(-2), Vh)
    return torch.minimum(simple, verified * (1 + 16 * EPS) + ROOM)


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
    return _frobenius(matrix - left @ right) + rounding + terms * matrix.shape[-1] * matrix.shape[-2] * TINY


def _orthogonality(Q: Tensor) -> Tensor:
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    return _residual(identity, Q.mT, Q)


KAPPAS = (1.0, 0.99, 0.9, 0.75, 0.5)
NEARLY_ONE = tuple(1 - 0.1**digits for digits in range(3, 13))
SMALLEST_WEIGHT = 1e-200


def collatz_wielandt(M: Tensor, v: Tensor) -> float:
    """Bounds rho(M) <= max_i (M v)_i / v_i from above, rounded outward; infinite if v is not positive.

    Collatz-Wielandt. M contracts in the norm max_i |x_i| / v_i by that factor.

    Args:
        M: (n, n), non-negative, float64.
        v: (n,), largest entry 1.

    Example:
        >>> M = torch.tensor([[0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
        >>> 0.5 <= collatz_wielandt(M, torch.tensor([1.0, 0.125], dtype=torch.float64)) < 0.500001
        True
    """
    if not bool(((v >= SMALLEST_WEIGHT) & v.isfinite()).all()):
        return math.inf
    # The last term pays for products that underflow.
    ratio = upward(M @ v, M.shape[-1]) / v + 1e-100 * (M > 0).any(-1)
    return float(upward(ratio.amax(), 2))


def perron_weights(M: Tensor) -> tuple[Tensor, float]:
    """Finds weights v with M v <= value v.

    v = (I - M/kappa)^-1 1 is positive and gives a value below kappa iff rho(M) < kappa
    (003, Theorem 1). Of several kappa, the one with the smallest error
    constant max(v)/min(v)/(1 - value) wins; if no value is below one, kappa closer to one, powers of two from a
    greedy search and a few power steps are tried, whose values bound rho(M) as well.

    Args:
        M: (n, n), non-negative, float64.

    Returns:
        The weights (n,), largest entry 1, and the value, rounded outward; below one iff proven.

    Example:
        >>> weights, value = perron_weights(torch.tensor([[0.0, 4.0], [0.125, 0.0]], dtype=torch.float64))
        >>> value < 0.95
        True
    """
    if not len(M):
        return M.new_ones(0), 0.0
    scored = [(collatz_wielandt(M, v), v) for v in _solutions(M, KAPPAS)]
    if not any(value < 1 for value, _ in scored):
        exponent = power_of_two_scaling(M, 0.9)
        powers = torch.zeros_like(M[0]) if exponent is None else _normalised(torch.exp2(-exponent))
        iterated = torch.ones_like(M[0])
        for _ in range(50):
            iterated = _normalised(iterated + M @ iterated)
        candidates = (*_solutions(M, NEARLY_ONE), powers, iterated)
        scored = [(collatz_wielandt(M, v), v) for v in candidates]
    value, weights = min(scored, key=lambda pair: _error_constant(*pair))
    return weights, value


def _solutions(M: Tensor, kappas: tuple[float, ...]) -> list[Tensor]:
    """Any positive v gives a true bound, so a solve with kappa below rho(M) does no harm."""
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return [_normalised(torch.linalg.solve_ex(identity - M / k, identity.new_ones(len(M)))[0]) for k in kappas]


def power_of_two_scaling(M: Tensor, kappa: float, groups: Tensor | None = None) -> Tensor | None:
    """Finds the largest integers e <= 0 with sum_j M_ij 2^(e_i - e_j) < kappa for every i.

    e <- min(0, largest integer below log2(kappa / sum_j M_ij 2^-e_j)) is monotone and every feasible e
    stays below its iterates, so from e = 0 it ends at the greatest feasible point if there is one
    (Knaster-Tarski); on an acyclic M after as many sweeps as there are layers.

    Args:
        M: (n, n), non-negative, float64.
        groups: (n,) block number of every state; e is constant on a block.

    Returns:
        (n,) float64, or None if no powers of two will do.

    Example:
        >>> power_of_two_scaling(torch.tensor([[0.0, 6.0], [0.0, 0.0]], dtype=torch.float64), 0.9)
        tensor([-3.,  0.], dtype=torch.float64)
    """
    exponent = torch.zeros(M.shape[-1], dtype=M.dtype, device=M.device)
    layers = depth(M, groups)
    for _ in range(300 if layers is None else layers + 1):
        sums = upward(M @ torch.exp2(-exponent), M.shape[-1] + 4)
        mantissa, power = torch.frexp(kappa * (1 - 2.0**-50) / sums)
        largest = power.to(M.dtype) - torch.where(mantissa > 0.5, 1.0, 2.0)
        lowered = torch.where(sums > 0, largest, 0.0).minimum(exponent)
        if groups is not None:
            lowered = _reduce(lowered, groups, "amin")
        if torch.equal(lowered, exponent):
            return exponent
        exponent = lowered
        if not bool(sums.isfinite().all() and exponent.amin() > -900):
            return None
    return None


def depth(M: Tensor, groups: Tensor | None = None) -> int | None:
    """Counts the layers of an acyclic M, the least t with M^t = 0; None if M has a cycle.

    Example:
        >>> depth(torch.ones(3, 3).triu(1)), depth(torch.eye(2))
        (3, None)
    """
    edges, reached = (M > 0).to(torch.float64), torch.ones(M.shape[-1], dtype=torch.float64, device=M.device)
    for count in range(1, M.shape[-1] + 1):
        further = (edges @ reached > 0).to(torch.float64)
        if groups is not None:
            further = _reduce(further, groups, "amax")
        if not bool(further.any()):
            return count
        if torch.equal(further, reached):
            return None
        reached = further
    return None


def _reduce(values: Tensor, groups: Tensor, how: str) -> Tensor:
    return torch.zeros_like(values).scatter_reduce(0, groups, values, how, include_self=False)[groups]


def _normalised(v: Tensor) -> Tensor:
    return v.abs() / v.abs().amax()


def _error_constant(value: float, weights: Tensor) -> tuple[float, float]:
    if not value < 1:
        return math.inf, value
    return float(1 / weights.amin()) * reciprocal_gap(value), value


LANCZOS_STEPS, TRIES = 48, 16  # to estimate an eigenvalue, and to find a bound of it that Cholesky proves
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
        directions = torch.stack(basis)
        coefficients = directions @ rest
        rest = rest - coefficients @ directions
        rest = rest - (directions @ rest) @ directions
        projected[: step + 1, step] = coefficients
        length, used = torch.linalg.vector_norm(rest), step + 1
        if bool(length <= least):
            break  # the vectors span an invariant subspace
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
    if not matrix.numel():
        return 0.0
    wide = matrix.to(torch.float64)
    wide = wide if len(wide) <= wide.shape[1] else wide.mT
    scale = power_of_two(wide.abs().amax())  # or squares would overflow or vanish
    wide = wide / scale
    product = wide @ wide.mT
    rounding = 2 * (wide.shape[1] + 2) * EPS * wide.square().sum()  # of the product, in the 2-norm
    value = torch.as_tensor(largest_eigenvalue((product + product.mT) / 2), dtype=torch.float64)
    return float(
        above_underflow(upward(scale * (value.clamp(min=0) + upward(rounding, wide.numel() + 4)).sqrt(), 8))
    )
