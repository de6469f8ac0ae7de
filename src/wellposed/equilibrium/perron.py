"""Weights that prove rho(M) < 1 for a non-negative matrix, without eigenvalues."""

import math

import torch
from torch import Tensor

from wellposed.equilibrium.rounding import reciprocal_gap, upward

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
    constant max(v)/min(v)/(1 - value) is kept; without any, kappa closer to one, powers of two from a greedy
    search and a few power steps, whose value is a true bound of rho(M) again.

    Args:
        M: (n, n), non-negative, float64.

    Returns:
        The weights (n,), largest entry 1, and the value, rounded outward; below one iff proven.

    Example:
        >>> weights, value = perron_weights(torch.tensor([[0.0, 4.0], [0.125, 0.0]], dtype=torch.float64))
        >>> value < 0.95
        True
    """
    scored = [_scored(M, v) for v in _solutions(M, KAPPAS)]
    if not any(value < 1 for value, _ in scored):
        scored = [_scored(M, v) for v in (*_solutions(M, NEARLY_ONE), _from_powers(M), _power_steps(M))]
    value, weights = min(scored, key=lambda pair: _error_constant(*pair))
    return weights, value


def _scored(M: Tensor, v: Tensor) -> tuple[float, Tensor]:
    return collatz_wielandt(M, v), v


def _solutions(M: Tensor, kappas: tuple[float, ...]) -> list[Tensor]:
    """Any positive v gives a true bound, so a solve with kappa below rho(M) does no harm."""
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return [_normalised(_solve(identity - M / kappa)) for kappa in kappas]


def power_of_two_scaling(M: Tensor, kappa: float, groups: Tensor | None = None) -> Tensor | None:
    """Finds the largest integers e <= 0 with sum_j M_ij 2^(e_i - e_j) < kappa for every i.

    e <- min(0, largest integer below log2(kappa / sum_j M_ij 2^-e_j)) is monotone and every feasible e
    stays below its iterates, so from e = 0 it ends at the greatest feasible point if there is one
    (Knaster-Tarski); on an acyclic M after as many sweeps as there are layers.

    Args:
        M: (n, n), non-negative, float64.
        groups: (n,) block number of every state; e is constant on a block.

    Returns:
        (n,) float64, or None if no powers of two were found.

    Example:
        >>> power_of_two_scaling(torch.tensor([[0.0, 6.0], [0.0, 0.0]], dtype=torch.float64), 0.9)
        tensor([-3.,  0.], dtype=torch.float64)
    """
    exponent = torch.zeros(M.shape[-1], dtype=M.dtype, device=M.device)
    for _ in range(_sweeps(M, groups)):
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


def _sweeps(M: Tensor, groups: Tensor | None) -> int:
    layers = depth(M, groups)
    return 300 if layers is None else layers + 1


def _reduce(values: Tensor, groups: Tensor, how: str) -> Tensor:
    return torch.zeros_like(values).scatter_reduce(0, groups, values, how, include_self=False)[groups]


def _solve(matrix: Tensor) -> Tensor:
    ones = torch.ones(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_ex(matrix, ones)[0]


def _normalised(v: Tensor) -> Tensor:
    return v.abs() / v.abs().amax()


def _from_powers(M: Tensor) -> Tensor:
    exponent = power_of_two_scaling(M, 0.9)
    return torch.zeros_like(M[0]) if exponent is None else _normalised(torch.exp2(-exponent))


def _power_steps(M: Tensor) -> Tensor:
    v = torch.ones(M.shape[-1], dtype=M.dtype, device=M.device)
    for _ in range(50):
        v = _normalised(v + M @ v)
    return v


def _error_constant(value: float, weights: Tensor) -> tuple[float, float]:
    if not value < 1:
        return math.inf, value
    return float(1 / weights.amin()) * reciprocal_gap(value), value
