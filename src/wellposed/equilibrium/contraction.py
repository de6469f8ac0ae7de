"""Conditions under which the map itself contracts: |.|_inf, weighted, |.|_2 and blockwise norms."""

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.certificate import Certificate
from wellposed.equilibrium.condition import Condition, square
from wellposed.equilibrium.error_bound import comparison
from wellposed.equilibrium.induced_norm import block_sizes, spectral_norm
from wellposed.equilibrium.perron import perron_weights
from wellposed.equilibrium.projection import clip_singular_values, project_block_rows, project_rows
from wellposed.equilibrium.rounding import reciprocal_gap, upward


def _missing(activation: Activation, norm: str) -> str:
    return "" if norm in activation.constants else f"it declares no Lipschitz constant in the norm {norm!r}"


class InfNorm(Condition):
    """gamma |A|_inf < 1 (003, Remark 2).

    Example:
        >>> from wellposed.activations import get_activation
        >>> print(InfNorm().certify(torch.tensor([[0.5, -0.25], [0.0, 0.5]]), get_activation("relu")))
        inf: 0.75 < 1 holds (margin 0.25)
    """

    name = "inf"

    def obstacle(self, activation: Activation) -> str:
        return _missing(activation, "inf")

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        return project_rows(raw, self.check_kappa(kappa, activation))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        sums = upward(square(A).abs().sum(-1), len(A) + 1)
        value = float(sums.amax() * activation.lipschitz("inf"))
        return Certificate.of(self.name, value, gain=reciprocal_gap(value))


class WeightedNorm(Condition):
    """rho(gamma |A|) < 1, proven by weights v with gamma |A| v < v (003, Theorem 1).

    Parametrised by A = diag(e^omega) P diag(e^-omega) with |P|_inf <= kappa, P the row-wise projection of
    the raw matrix in that scale: a contraction in max_i |x_i| e^-omega_i, and rows that fit stay as they are.

    Example:
        >>> from wellposed.activations import get_activation
        >>> A = torch.tensor([[0.0, 4.0], [0.125, 0.0]])
        >>> WeightedNorm().certify(A, get_activation("relu")).holds
        True
    """

    name = "weighted"

    def obstacle(self, activation: Activation) -> str:
        return "" if activation.componentwise else "it acts on blocks; use 'block'"

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        radius = self.check_kappa(kappa, activation)
        if weights is None:
            return project_rows(raw, radius)
        inner = (-weights).exp().unsqueeze(-1) * raw * weights.exp().unsqueeze(-2)
        fits = inner.abs().sum(-1, keepdim=True) <= radius
        inner = project_rows(inner, radius * (1 - 8 * torch.finfo(raw.dtype).eps))
        return torch.where(fits, raw, weights.exp().unsqueeze(-1) * inner * (-weights).exp().unsqueeze(-2))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        matrix = upward(square(A).abs() * activation.lipschitz("inf"), 1)
        weights, value = perron_weights(matrix)
        return Certificate.of(self.name, value, weights=weights, gain=reciprocal_gap(value))


class SpectralNorm(Condition):
    """gamma |A|_2 < 1, with a singular value that is bounded and not only computed.

    Example:
        >>> from wellposed.activations import get_activation
        >>> A = 0.9 * torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> print(SpectralNorm().certify(A, get_activation("tanh")))
        spectral: 0.9 < 1 holds (margin 0.1)
    """

    name = "spectral"

    def obstacle(self, activation: Activation) -> str:
        return _missing(activation, "2")

    def gauge(self, activation: Activation) -> str:
        return "2"

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        return clip_singular_values(raw, self.check_kappa(kappa, activation))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        value = float(upward(spectral_norm(square(A)) * activation.lipschitz("2"), 1))
        return Certificate.of(self.name, value, norm="2", gain=reciprocal_gap(value))

    def lipschitz(self, certificate: Certificate, A: Tensor, B: Tensor, activation: Activation) -> float:
        """Bounds the Lipschitz constant of u -> x from the 2-norm to the 2-norm: gamma |B|_2 / (1 - c)."""
        return float(upward(spectral_norm(B) * activation.lipschitz("2") * certificate.gain, 3))


class BlockNorm(Condition):
    """rho(N(A, gamma)) < 1 for a map on blocks (003, eq. 2.6 and Theorem 1).

    N_ij = gamma_p |A_ij|_{p->p}, tried for every norm p in which phi has a constant. The three norms 1->1,
    2->2 and inf->inf are exact.

    Example:
        >>> from wellposed.activations import max_pool
        >>> print(BlockNorm().certify(0.125 * torch.ones(4, 4), max_pool(2)))
        block: 0.5 < 1 holds (margin 0.5) [l1 norm on blocks of 2, induced norms exact]
    """

    name = "block"

    def obstacle(self, activation: Activation) -> str:
        return "it acts componentwise; use 'inf' or 'weighted'" if activation.componentwise else ""

    def gauge(self, activation: Activation) -> str:
        return "inf" if "inf" in activation.constants else min(activation.constants)

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        radius, norm = self.check_kappa(kappa, activation), self.gauge(activation)
        sizes = block_sizes(raw.shape[-1], activation.block or 0)
        if norm == "inf" and len(sizes) == 1:
            return project_rows(raw, radius)
        return project_block_rows(raw, sizes, radius, norm)

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        matrix = square(A)
        size = block_sizes(len(A), activation.block or 0)[0]
        found = {
            norm: perron_weights(comparison(matrix, activation, norm).matrix) for norm in activation.constants
        }
        norm = min(found, key=lambda name: found[name][1])
        weights, value = found[norm]
        note = f"l{norm} norm on blocks of {size}, induced norms exact"
        gain = reciprocal_gap(value)
        return Certificate.of(self.name, value, weights=weights, norm=norm, gain=gain, note=note)
