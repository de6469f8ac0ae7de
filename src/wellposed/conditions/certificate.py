"""What a proof of well-posedness provides: its value, its weights, and error bounds of computed states.

`Certificate` is the proof itself, with its error constant. From the residual of a computed state of ``x = phi(Ax +
v)`` and a `Comparison` system, `ErrorBounder` derives a proven distance from the equilibrium, sound in floating
point; `AffineBound` and `LowRankBound` do so for one matrix and any number of states.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.activations import Activation, block_view
from wellposed.conditions.norms import induced_norm, split_blocks
from wellposed.conditions.rounding import EPS, ROOM, double, map_rounding, reciprocal_gap, upward, vector_norm
from wellposed.equilibrium.maps import max_norm


@dataclass(frozen=True)
class Certificate:
    """States that x = phi(Ax + v) has exactly one solution for every v, if `value < bound`.

    Args:
        condition: the name of the condition that was checked.
        value: rounded outward; a contraction factor where the condition is one.
        bound: what the value must stay below.
        margin: bound - value, rounded down.
        weights: v > 0 of the norm ``max_i |x_i| / v_i``, largest entry 1; per block for `block`; else None.
        norm: the norm of the contraction, "1", "2" or "inf".
        gain: g in ``|x - x*| <= g |x - f(x)|`` in that (weighted) norm; infinite where none is known.
        note: what the reader should know about the number.

    Example:
        >>> print(Certificate.of("inf", 0.95, gain=20.0))
        inf: 0.95 < 1 holds (margin 0.05)
        >>> Certificate.of("inf", 1.25).holds
        False
    """

    condition: str
    value: float
    bound: float
    margin: float
    weights: Tensor | None = None
    norm: str = "inf"
    gain: float = math.inf
    note: str = ""

    @classmethod
    def of(
        cls,
        condition: str,
        value: float,
        *,
        weights: Tensor | None = None,
        norm: str = "inf",
        gain: float = math.inf,
        note: str = "",
    ) -> "Certificate":
        """Builds the certificate of `value < 1`."""
        margin = math.nextafter(1.0 - value, -math.inf)
        return cls(condition, value, 1.0, margin, weights, norm, gain if value < 1 else math.inf, note)

    @property
    def holds(self) -> bool:
        """Whether the condition is proven; False for NaN."""
        return self.value < self.bound

    def __str__(self) -> str:
        verdict = (
            f"< {self.bound:g} holds (margin {self.margin:.3g})" if self.holds else f">= {self.bound:g} fails"
        )
        note = f" [{self.note}]" if self.note else ""
        return f"{self.condition}: {self.value:.6g} {verdict}{note}"


@dataclass(frozen=True)
class Equivalent:
    """A system with the same equilibria on which a damped iteration converges.

    x <- (1 - damping) x + damping phi(A x + scale v), with v = Bu + b of the original system.
    """

    A: Tensor  # (n, n)
    scale: Tensor  # () or (n,)
    damping: float

    @classmethod
    def unchanged(cls, A: Tensor, damping: float = 1.0) -> "Equivalent":
        """Keeps the system as it is.

        Example:
            >>> Equivalent.unchanged(torch.zeros(2, 2)).scale
            tensor(1.)
        """
        return cls(A, torch.ones((), dtype=A.dtype, device=A.device), damping)


LARGEST_INVERSE = 512  # states up to which a comparison system is always inverted
SLACK = 1e-8  # by which a system is inflated, so that its solution passes the check in spite of rounding


class Comparison(NamedTuple):
    """A non-negative system that bounds the error: |e| <= matrix |e| + gain * |x - f(x)|, by blocks."""

    matrix: Tensor  # (L, L)
    gain: Tensor  # (L,)


def comparison(A: Tensor, activation: Activation, norm: str) -> Comparison:
    """Builds the comparison system of x = phi(Ax + v).

    Componentwise: e_i = d_i (Ae)_i + r_i with a difference quotient d_i in [lo, hi] of phi, so that
    |e_i| <= max_d (|d| sum_{j != i} |A_ij| |e_j| + |r_i|) / (1 - d A_ii), attained at d = lo, 0 or hi.
    Blockwise: the norms of the blocks obey eta(e) <= N(A, gamma) eta(e) + eta(r)
    (003, proof of Theorem 1). Entries are rounded up and infinite where d A_ii >= 1.

    Example:
        >>> relu = Activation("relu", torch.relu)
        >>> comparison(torch.tensor([[-3.0, 1.0], [0.0, 0.5]]), relu, "inf").matrix
        tensor([[0.0000, 0.2500],
                [0.0000, 0.0000]], dtype=torch.float64)
    """
    if not activation.componentwise:
        blocks = split_blocks(A, activation.block or A.shape[-1])
        matrix = upward(activation.lipschitz(norm) * induced_norm(blocks, norm, norm).value, 2)
        return Comparison(matrix, torch.ones_like(matrix[0]))
    matrix = double(A)
    diagonal, others = matrix.diagonal(), (matrix - matrix.diagonal().diag()).abs()
    slopes = matrix.new_tensor([[activation.slope[0]], [0.0], [activation.slope[1]]])
    loop = slopes * diagonal  # (3, n)
    room = 1 - loop - 4 * EPS * (1 + loop.abs())
    inverse = torch.where(room > 0, 1 / room, math.inf) * (1 + 4 * EPS)
    share = upward((slopes.abs() * inverse).amax(0), 2)
    scaled = torch.where(others == 0, 0.0, upward(share.unsqueeze(-1) * others, 2))
    return Comparison(scaled, inverse.amax(0))


class _Supersolution:
    """|e| <= v max_i (r_i / (v - M v)_i) for one v > 0 with M v < v."""

    def __init__(self, system: Comparison, weights: Tensor | None) -> None:
        matrix, self.gain = system
        v = torch.ones_like(self.gain) if weights is None else weights.to(self.gain)
        drop = v - upward(matrix @ v, len(v) + 2)
        self.drop, self.top = drop - EPS * v, float(v.amax())

    @property
    def proven(self) -> bool:
        return bool((self.drop > 0).all())

    def __call__(self, error: Tensor) -> Tensor:
        return upward(self.top * (error * self.gain / self.drop).amax(-1), 4)


class _Refinement:
    """Solves e = M e + r slightly inflated, and returns the solutions that verify."""

    def __init__(self, system: Comparison) -> None:
        self.system = system
        M = system.matrix
        self.inflated = torch.eye(len(M), dtype=M.dtype, device=M.device) - (1 + SLACK) * M
        self.upper = _strict(M)
        self.inverse = None if self.upper is not None else torch.linalg.inv_ex(self.inflated)[0]
        # Pays for underflow; a triangular system may amplify it by many orders of magnitude.
        self.floor = 1e-250 if self.upper is None else 1e-304

    def __call__(self, error: Tensor) -> Tensor:
        matrix, gain = self.system
        load = upward(error * gain, 2) + self.floor
        inflated = load * (1 + SLACK) + self.floor
        if self.inverse is not None:
            candidate = inflated @ self.inverse.mT
        else:
            candidate = torch.linalg.solve_triangular(self.inflated, inflated.mT, upper=bool(self.upper)).mT
        image = upward(candidate @ matrix.mT + load, matrix.shape[-1] + 2) + self.floor / 2
        # Where rho(M) > 1 the candidate has negative entries, and M e + r <= e would prove nothing.
        accepted = ((candidate > 0) & (image <= candidate)).all(-1)
        return torch.where(accepted, candidate.amax(-1), math.inf)


def _strict(M: Tensor) -> bool | None:
    """Returns whether M is strictly upper (True) or strictly lower triangular (False)."""
    if not bool(M.tril().any()):
        return True
    return None if bool(M.triu().any()) else False


class ErrorBounder:
    """Bounds |x - x*|_inf for any number of computed states of one certified system.

    The norm bound is gain * |r|, with gain = 1 / (1 - c) for a contraction, r = |x - f(x)| + rounding and
    the weights v of the certificate, or v max_i (r_i / (v - M v)_i) if smaller. For at most 512 states or a
    triangular system it is refined componentwise: a candidate e = (I - M)^-1 r is accepted for a sample only
    if e > 0 and M e + r <= e hold with outward rounding and r > 0, which proves |x - x*| <= e. Build it once
    per matrix; a call is two matrix products.

    Example:
        >>> relu = Activation("relu", torch.relu)
        >>> A = torch.tensor([[0.0, 0.5], [0.0, 0.0]])
        >>> bounder = ErrorBounder(Certificate.of("inf", 0.5, gain=2.0), A, relu)
        >>> bound = bounder(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2))
        >>> 1 <= float(bound) < 1.000001
        True
    """

    def __init__(self, certificate: Certificate, A: Tensor, activation: Activation) -> None:
        self.certificate = certificate
        self.by_block = not activation.componentwise and certificate.condition != "spectral"
        self.block = activation.block or 0
        self.bounds: list[Callable[[Tensor], Tensor]] = [self._by_norm]
        if certificate.holds and (activation.componentwise or self.by_block):
            self._add_componentwise(comparison(A, activation, certificate.norm))

    def __call__(self, residual: Tensor, rounding: Tensor) -> Tensor:
        """Bounds the distance of every sample.

        Args:
            residual: (B, n), |x - f(x)| with f evaluated in floating point.
            rounding: (B, n), a bound on |computed f(x) - exact f(x)|, see `map_rounding`.

        Returns:
            (B,) in float64; infinite where nothing is proven.
        """
        eps = torch.finfo(residual.dtype).eps
        error = upward(double(residual).abs() * (1 + 2 * eps) + double(rounding), 4)
        if not self.certificate.holds:
            return torch.full_like(error[..., 0], math.inf)
        error = self._reduced(error)  # (B, L)
        distances = torch.stack([bound(error) for bound in self.bounds])
        return distances.nan_to_num(nan=math.inf, posinf=math.inf).amin(0)

    def _add_componentwise(self, system: Comparison) -> None:
        if not bool(system.matrix.isfinite().all() and system.gain.isfinite().all()):
            return
        simple = _Supersolution(system, self.certificate.weights)
        if simple.proven:
            self.bounds.append(simple)
        if len(system.gain) <= LARGEST_INVERSE or _strict(system.matrix) is not None:
            self.bounds.append(_Refinement(system))

    def _reduced(self, error: Tensor) -> Tensor:
        if not self.by_block:
            return error
        blocks = block_view(error, self.block)
        return upward(vector_norm(blocks, self.certificate.norm, -1), blocks.shape[-1])

    def _by_norm(self, error: Tensor) -> Tensor:
        certificate = self.certificate
        if certificate.weights is not None:
            error = error / certificate.weights.to(error)
        overall = "2" if certificate.norm == "2" and not self.by_block else "inf"
        return upward(certificate.gain * vector_norm(error, overall, -1), error.shape[-1])


class AffineBound:
    """Bounds ``|x - x*|_inf`` from x, v and the size of the terms of v; built once for a matrix."""

    def __init__(self, certificate: Certificate, A: Tensor, activation: Activation, terms: int) -> None:
        self.A, self.activation, self.terms = A, activation, terms
        self.bounder = ErrorBounder(certificate, A, activation)

    @torch.no_grad()
    def __call__(self, x: Tensor, context: Tensor) -> Tensor:  # (B, n), (B, 2 n) -> (B,)
        v, magnitude = context.chunk(2, dim=1)
        residual = x - self.activation.function(torch.addmm(v, x, self.A.mT))
        rounding = map_rounding(self.A, x, magnitude, self.activation, self.terms)
        return self.bounder(residual, rounding)


class LowRankBound:
    """The same for ``A = L R'`` by the norm of A alone, which is never formed."""

    def __init__(
        self, certificate: Certificate, left: Tensor, right: Tensor, activation: Activation, terms: int
    ) -> None:
        self.certificate, self.left, self.right = certificate, left, right
        self.activation, self.terms = activation, terms + left.shape[1]

    @torch.no_grad()
    def __call__(self, x: Tensor, context: Tensor) -> Tensor:  # (B, n), (B, 2 n) -> (B,)
        v, magnitude = context.chunk(2, dim=1)
        residual = x - self.activation.function(v + (x @ self.right) @ self.left.mT)
        inner = upward(double(x).abs() @ double(self.right).abs(), x.shape[1])
        rounding = map_rounding(self.left, inner.to(x.dtype) * (1 + 1e-2), magnitude, self.activation, self.terms)
        error = upward(double(residual).abs() * (1 + torch.finfo(x.dtype).eps) + rounding, 4)
        return self.certificate.gain * max_norm(error)


def low_rank_certificate(left: Tensor, right: Tensor, activation: Activation) -> Certificate:
    """Checks ``gamma |L R'|_inf < 1`` a few rows at a time."""
    blocks = double(left).split(256)
    sums = [(block @ double(right).mT).abs().sum(1).max() for block in blocks]
    magnitude = double(left).abs() @ double(right).abs().sum(0)  # bounds the terms of every row sum
    terms = left.shape[0] + left.shape[1]
    slack = (upward(magnitude, terms) * (2 * terms * 2.0**-52)).max()
    value = float(upward((torch.stack(sums).max() + slack + ROOM) * activation.lipschitz(), terms))
    return Certificate.of("inf", value, gain=reciprocal_gap(value))
