"""Error bounds of computed states of ``x = phi(Ax + v)``, sound in floating point."""

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.certificate import Certificate
from wellposed.equilibrium.error_bound import ErrorBounder
from wellposed.equilibrium.map import max_norm
from wellposed.equilibrium.rounding import double, map_rounding, reciprocal_gap, upward


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


def low_rank_certificate(left: Tensor, right: Tensor, activation: Activation, rows: int = 256) -> Certificate:
    """Checks ``gamma |L R'|_inf < 1`` a few rows at a time."""
    parts = double(left).split(rows)
    sums = [(part @ double(right).mT).abs().sum(1).max() for part in parts]
    spread = double(left).abs() @ double(right).abs().sum(0)  # bounds the terms of every row sum
    terms = left.shape[0] + left.shape[1]
    slack = (upward(spread, terms) * (2 * terms * 2.0**-52)).max()
    value = float(upward((torch.stack(sums).max() + slack) * activation.lipschitz(), terms))
    return Certificate.of("inf", value, gain=reciprocal_gap(value))
