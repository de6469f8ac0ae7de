"""Rescales the states so that |A|_inf shrinks and the outputs stay the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.activations.catalogue import in_other_units
from wellposed.conditions.conditions import square
from wellposed.conditions.norms import block_sizes, depth, perron_weights, power_of_two_scaling
from wellposed.conditions.rounding import above_underflow, double, upward
from wellposed.errors import IllPosedError, InputError

COMFORTABLE_SPREAD = 60.0


@dataclass(frozen=True)
class Rescaling:
    """A diagonal scaling D = diag(2^log2) with |D A D^-1|_inf <= norm.

    Args:
        log2: (n,) float64; integers if `power_of_two`.
        power_of_two: whether scaling by D is exact in floating point, so that outputs are bit-identical.
        norm: verified with outward rounding.
    """

    log2: Tensor
    power_of_two: bool
    norm: float

    def factors(self, sign: int = 1) -> Tensor:
        """Returns the entries of D, or of D^-1 for sign -1, as float64.

        Example:
            >>> Rescaling(torch.tensor([0.0, -3.0]), True, 0.5).factors()
            tensor([1.0000, 0.1250], dtype=torch.float64)
        """
        powers = [2.0 ** (sign * float(value)) for value in self.log2]
        return torch.tensor(powers, dtype=torch.float64, device=self.log2.device)


class Rescaled(NamedTuple):
    """The matrices and the activation of the rescaled system; `exact` if scaling back gives every bit."""

    A: Tensor
    B: Tensor
    C: Tensor
    bias: Tensor | None
    activation: Activation
    exact: bool


def rescaling(A: Tensor, kappa: float, *, blocks: int | Sequence[int] | None = None) -> Rescaling:
    """Finds D with |D A D^-1|_inf < kappa whenever rho(|A|) < kappa.

    Powers of two first: the greatest integers e <= 0 with sum_j |A_ij| 2^(e_i - e_j) < kappa, which exist
    for every acyclic A (every feed-forward net) and every kappa > 0. If a cycle leaves too little room for
    them, D = diag(1 / v) with v = (I - |A|/kappa)^-1 1; then `power_of_two` is False.

    Args:
        A: (n, n), for a map with Lipschitz constant 1 (multiply A by gamma otherwise).
        blocks: sizes on which D must be constant, those of a map that is not componentwise.

    Example:
        >>> scaling = rescaling(torch.tensor([[0.0, 6.0], [0.0, 0.0]]), 0.9)
        >>> scaling.log2, scaling.power_of_two, scaling.norm < 0.9
        (tensor([-3.,  0.], dtype=torch.float64), True, True)
    """
    M = square(A).abs()
    if not 0 < kappa < math.inf or not bool(M.isfinite().all()):
        raise InputError(f"rescaling needs finite entries and kappa > 0, got kappa={kappa}")
    groups = None
    if blocks is not None:
        sizes = torch.tensor(block_sizes(len(M), blocks))
        groups = torch.arange(len(sizes)).repeat_interleave(sizes).to(M.device)
    exponent = power_of_two_scaling(M, kappa, groups)
    if exponent is not None:
        result = _verified(A, exponent - _centre(exponent).round(), True)
        if result.norm < kappa:
            return result
    if depth(M, groups) is not None:
        raise IllPosedError(
            f"A is acyclic, but the scales that bring |A|_inf below {kappa:g} spread over more than 2^900; "
            "split the network or normalise its layers"
        )
    weights, value = perron_weights(_grouped(M, groups) / kappa)
    exponent = -torch.log2(weights if groups is None else weights[groups])
    if value < 1:
        result = _verified(A, exponent - _centre(exponent), False)
        if result.norm < kappa:
            return result
    raise IllPosedError(
        f"no diagonal scaling was found with |D A D^-1|_inf < {kappa:g}: rho(|A|) is bounded by "
        f"{value * kappa:.6g} and a scaling exists only if it is below {kappa:g}; raise kappa or shrink A"
    )


def apply_rescaling(
    A: Tensor,  # (n, n)
    B: Tensor,  # (n, p)
    C: Tensor,  # (q, n)
    bias: Tensor | None,  # (n,)
    scale: Rescaling,
    activation: Activation,
) -> Rescaled:
    """Rescales x <- Dx, A <- D A D^-1, B <- DB, C <- C D^-1, phi <- phi_D with phi_D(z) = D phi(D^-1 z).

    The outputs stay the same; phi_D is phi where phi is positively homogeneous, and has the same slopes
    everywhere else. With powers of two every bit stays the same unless a number leaves the
    range of the dtype.

    Example:
        >>> from wellposed.activations import get_activation
        >>> A, B, C = torch.tensor([[0.0, 6.0], [0.0, 0.0]]), torch.eye(2), torch.ones(1, 2)
        >>> result = apply_rescaling(A, B, C, None, rescaling(A, 0.9), get_activation("relu"))
        >>> result.A, result.exact
        (tensor([[0.0000, 0.7500],
                 [0.0000, 0.0000]]), True)
    """
    factor, inverse = scale.factors(), scale.factors(-1)
    width = 1 if activation.componentwise else (activation.block or len(A))
    if bool((factor.reshape(-1, width) != factor.reshape(-1, width)[:, :1]).any()):
        raise InputError(f"{activation.name!r} acts on blocks of {width}; call rescaling with blocks={width}")
    column, row = factor.unsqueeze(-1), inverse.unsqueeze(0)
    pairs = [(A, column * row), (B, column), (C, row)] + ([] if bias is None else [(bias, factor)])
    scaled = [_times(matrix, by) for matrix, by in pairs]
    if not all(bool(matrix.isfinite().all()) for matrix in scaled):
        raise InputError(f"the rescaled weights leave the range of {A.dtype}; convert the model to float64 first")
    exact = [torch.equal(double(new) / by, double(old)) for new, (old, by) in zip(scaled, pairs, strict=True)]
    phi = activation
    if not activation.homogeneous:
        phi = in_other_units(activation, f"{activation.name}_rescaled", factor, exact=scale.power_of_two)
    new_bias = None if bias is None else scaled[3]
    return Rescaled(scaled[0], scaled[1], scaled[2], new_bias, phi, all(exact) and scale.power_of_two)


def _times(matrix: Tensor, factor: Tensor) -> Tensor:
    return (matrix.to(torch.float64) * factor).to(matrix.dtype)


def _grouped(M: Tensor, groups: Tensor | None) -> Tensor:
    """Returns max_{i in I} sum_{j in J} M_ij, rounded outward."""
    if groups is None:
        return M
    count = int(groups[-1]) + 1
    sums = upward(M.new_zeros(len(M), count).index_add(1, groups, M), len(M))
    index = groups.unsqueeze(-1).expand_as(sums)
    return M.new_zeros(count, count).scatter_reduce(0, index, sums, "amax")


def _centre(exponent: Tensor) -> Tensor:
    spread = exponent.amax() - exponent.amin()
    middle = (exponent.amax() + exponent.amin()) / 2
    return torch.where(spread > COMFORTABLE_SPREAD, middle, 0.0)


def _verified(A: Tensor, exponent: Tensor, power_of_two: bool) -> Rescaling:
    result = Rescaling(exponent, power_of_two, math.inf)
    factor = result.factors().unsqueeze(-1) * result.factors(-1).unsqueeze(0)
    # Both D A D^-1 and what is left of it in the type of A.
    matrices = double(A).abs() * factor, double(_times(A.detach(), factor)).abs()
    norm = max(float(above_underflow(upward(matrix.sum(-1), len(A) + 2)).amax()) for matrix in matrices)
    return replace(result, norm=norm)
