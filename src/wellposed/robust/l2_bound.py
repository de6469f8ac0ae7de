"""Bounds in the Euclidean norm, from the monotone or the spectral certificate of every loop."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.conditions.conditions import Monotone
from wellposed.conditions.norms import largest_eigenvalue, largest_singular_value, spectral_norm
from wellposed.conditions.rounding import EPS, reciprocal_gap, upward
from wellposed.forms import Block, Operator
from wellposed.forms.evaluation import Stage
from wellposed.forms.operators.entries import LARGEST_DENSE, cover, sum_length
from wellposed.robust.center import Center
from wellposed.robust.interval import Interval
from wellposed.robust.query import MethodError, Query
from wellposed.robust.result import Bounds, of_states, shaped

LARGEST_SVD = 2**24  # entries up to which the largest singular value is computed
SMALL = 64  # rows or columns up to which that is by all singular values, the most accurate way


@torch.no_grad()
def l2_bounds(query: Query) -> Bounds:
    """Bounds states by ``|x - x0|_2 <= |B (u - u0)|_2 / m``, and functionals c by ``|c|_2`` times that.

    m = 1 - lambda_max((A + A') / 2) for projections such as ReLU, or (1 - gamma |A|_2) / gamma; block by block
    where there is no loop.
    """
    center = query.once("center", Center.of)
    distances = Distances.of(query, center)
    if not bool(distances.radius.isfinite().all()):
        raise MethodError(
            "a loop has neither a monotone nor a spectral certificate; use 'box', 'interval' or 'crown'"
        )
    if query.combination is None:
        return of_states(query, distances.states(query.form.dtype), "l2")
    rows = query.combination.double().flatten(0, 1)
    C, D = center.form.C, center.form.D
    coefficients, direct = C.T.apply(rows), D.T.apply(rows)
    sizes = center.spread.C.T.apply(rows.abs()), center.spread.D.T.apply(rows.abs())
    unit = 4 * (center.spread.terms + len(center.whole[0])) * torch.finfo(torch.float64).eps
    pieces = coefficients.split(center.form.partition, dim=1)
    lengths = torch.stack([torch.linalg.vector_norm(piece, dim=1) for piece in pieces], dim=1)  # (R, L)
    reach = (lengths * distances.radius[query.sample]).sum(1)
    offset = 0.0 if center.form.output_bias is None else rows @ center.form.output_bias
    base = (coefficients * center.whole[query.sample]).sum(1) + offset
    exact = query.set.to(torch.float64)
    upper = base + reach + exact.support_rows(direct, query.sample)
    lower = base - reach - exact.support_rows(-direct, query.sample)
    magnitude = exact.box().interval.magnitude[query.sample]
    states = center.whole.abs()[query.sample] + torch.cat(distances.spread(), dim=1)[query.sample]
    slack = unit * ((sizes[0] * states).sum(1) + (sizes[1] * magnitude).sum(1) + upper.abs() + lower.abs())
    slack = upward(slack + 2 * unit * (offset.abs() if isinstance(offset, Tensor) else 0.0), 4)
    found = Interval.around((lower + upper) / 2, upward((upper - lower) / 2 + 2 * slack, 4), query.form.dtype)
    return shaped(query, found.lower, found.upper, "l2", slack.to(query.form.dtype))


@dataclass(frozen=True)
class Distances:
    """How far the states of every block are from the computed center, in the Euclidean norm."""

    center: Center
    radius: Tensor  # (B, L)

    @classmethod
    def of(cls, query: Query, center: Center) -> "Distances":
        """Goes through the blocks in the order in which they are computed."""
        exact = query.set.to(torch.float64)
        found: dict[int, Tensor] = {}
        norm = upward(exact.deviation_norm(), exact.center.shape[1])
        for stage in query.form.plan.stages:
            entering = torch.stack([_entering(center, k, norm, found, stage.blocks) for k in stage.blocks])
            change = upward(torch.linalg.vector_norm(entering, dim=0), len(entering) + 2)
            own = torch.cat([center.residual[k] for k in stage.blocks], dim=1)
            own = upward(torch.linalg.vector_norm(own, dim=1), own.shape[1])
            gain, error = _gains(center, stage)
            for k in stage.blocks:
                found[k] = upward(gain * change + error * own, 4)
        return cls(center, torch.stack([found[k] for k in range(len(found))], dim=1))

    def spread(self) -> list[Tensor]:
        """Repeats the distance of a block for each of its states."""
        pairs = zip(self.center.states, self.radius.unbind(1), strict=True)
        return [radius[:, None].expand_as(x) for x, radius in pairs]

    def states(self, dtype: torch.dtype) -> list[Interval]:
        """Encloses every state, in the ball and in what its activation can return."""
        found = []
        for phi, x, radius in zip(self.center.form.activations, self.center.states, self.spread(), strict=True):
            found.append(Interval.around(x, radius, dtype).cut(*phi.image))
        return found


def _entering(center: Center, k: int, norm: Tensor, found: dict[int, Tensor], inside: tuple[int, ...]) -> Tensor:
    """Bounds the Euclidean norm of what inputs and earlier blocks change in the pre-activations of block k."""
    A, B, _ = center.form.blocks
    by_entries = torch.linalg.vector_norm(_input_row(center, k).apply(center.radius), dim=1)
    total = torch.minimum(operator_norm(_row(B, k)) * norm, upward(by_entries, center.spread.terms))
    for j, part in A.rows()[k].items():
        if j not in inside:
            total = total + operator_norm(part) * found[j]
    return upward(total, len(found) + 4)


def _row(B: Block, k: int) -> Operator:
    return B.chosen([k], range(len(B.widths)))


def _input_row(center: Center, k: int) -> Operator:
    return _row(center.spread.B, k)


def _gains(center: Center, stage: Stage) -> tuple[float, float]:
    """Returns what multiplies a change of the pre-activations, and a residual of the states."""
    phis = [center.form.activations[k] for k in stage.blocks]
    if any("2" not in phi.constants for phi in phis):
        raise MethodError("the l2 bound needs Lipschitz constants in the 2-norm; use 'box' or 'interval'")
    gamma = max(phi.lipschitz("2") for phi in phis)
    if math.isinf(gamma):
        raise MethodError(f"{phis[0].name!r} has no Lipschitz constant, so the l2 bound does not apply")
    if stage.system is None:
        return gamma, 1.0
    A, _, _ = center.form.blocks
    loop = A.chosen(stage.blocks, stage.blocks)
    if loop.shape[0] > LARGEST_DENSE:
        raise MethodError(
            f"the l2 bound forms loops of up to {LARGEST_DENSE} states; this one has {loop.shape[0]}"
        )
    gain, error = _monotone(loop, phis)
    return (gain, error) if math.isfinite(gain) else _spectral(loop, gamma)  # which is never smaller


def _spectral(loop: Operator, gamma: float) -> tuple[float, float]:
    gap = reciprocal_gap(gamma * operator_norm(loop) * (1 + 1e-15))
    return gamma * gap, gap


def _monotone(loop: Operator, phis: list) -> tuple[float, float]:
    if any(Monotone().obstacle(phi) for phi in phis):
        return math.inf, math.inf
    A = loop.to_dense()
    if len(A) <= SMALL:
        proof = Monotone().certify(A, phis[0])
        return (reciprocal_gap(proof.value), proof.gain) if proof.holds else (math.inf, math.inf)
    doubt = EPS * float(upward(torch.linalg.vector_norm(A), A.numel()))
    gap = reciprocal_gap((largest_eigenvalue((A + A.mT) / 2) + doubt) * (1 + 2 * EPS))
    identity = torch.eye(len(A), dtype=A.dtype, device=A.device)
    return gap, (1 + largest_singular_value(identity - A) + 2 * EPS) * gap * (1 + 4 * EPS)


def operator_norm(operator: Operator) -> float:
    """Bounds the largest singular value, by ``sqrt(|A|_1 |A|_inf)`` where that matrix is too large.

    Example:
        >>> from wellposed.forms import Dense
        >>> 4 <= operator_norm(Dense(torch.diag(torch.tensor([3.0, -4.0])))) < 4.000001
        True
    """
    if not min(operator.shape):
        return 0.0
    exact = operator.to(torch.float64)
    if min(operator.shape) <= SMALL and math.prod(operator.shape) <= LARGEST_SVD:
        return float(spectral_norm(exact.to_dense()))
    if math.prod(operator.shape) <= LARGEST_SVD:
        return largest_singular_value(exact.to_dense())
    size, terms = cover(exact), sum_length(exact) + sum_length(exact.T)
    product = size.row_sums().max() * size.T.row_sums().max()
    return float(upward(product.sqrt(), terms))
