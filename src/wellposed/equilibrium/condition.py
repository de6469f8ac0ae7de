"""What every condition of well-posedness offers."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.certificate import Certificate, Equivalent
from wellposed.equilibrium.error_bound import ErrorBounder
from wellposed.equilibrium.rounding import double, upward
from wellposed.errors import InputError


class Condition(ABC):
    """A sufficient condition on A for x = phi(Ax + v) to have exactly one solution for every v."""

    name: ClassVar[str]

    @abstractmethod
    def obstacle(self, activation: Activation) -> str:
        """Says why the condition cannot apply to the activation; empty if it can."""

    @abstractmethod
    def parametrise(
        self,
        raw: Tensor,  # (..., n, n)
        kappa: float | None,
        activation: Activation,
        weights: Tensor | None = None,  # (..., n)
    ) -> Tensor:
        """Maps any matrix to one with value gamma * kappa at most, differentiably, vmappable."""

    @abstractmethod
    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        """Checks A and always returns; raises only if the condition cannot apply."""

    def equivalent(self, A: Tensor, activation: Activation) -> Equivalent:
        """Returns a system with the same equilibria on which the damped iteration converges."""
        return Equivalent.unchanged(A)

    def error_bound(
        self,
        certificate: Certificate,
        A: Tensor,
        activation: Activation,
        residual: Tensor,  # (B, n)
        rounding: Tensor,  # (B, n)
    ) -> Tensor:
        """Bounds |x - x*|_inf per sample; see `ErrorBounder`, which is cheaper for repeated calls."""
        return ErrorBounder(certificate, A, activation)(residual, rounding)

    def lipschitz(self, certificate: Certificate, A: Tensor, B: Tensor, activation: Activation) -> float:
        """Bounds the Lipschitz constant of u -> x from the inf norm to the inf norm.

        x*(u) is a state of the system at u' whose residual is at most gamma |B| |u - u'|, so the error
        bound applies.
        """
        change = upward(double(B).abs().sum(-1), B.shape[-1]) * activation.lipschitz(certificate.norm)
        bound = ErrorBounder(certificate, A, activation)(change.unsqueeze(0), torch.zeros_like(change)[None])
        return float(bound)

    def check_kappa(self, kappa: float | None, activation: Activation) -> float:
        """Returns kappa if it is positive with gamma * kappa < 1, and explains otherwise."""
        self.require(activation)
        gamma = activation.lipschitz(self.gauge(activation))
        if kappa is None or not 0 < kappa * gamma < 1:
            raise InputError(
                f"kappa={kappa} with {activation.name!r} (Lipschitz constant {gamma:g}) gives no unique "
                f"equilibrium under {self.name!r}; choose 0 < kappa < {1 / gamma:g}"
            )
        return kappa

    def gauge(self, activation: Activation) -> str:
        """Names the norm whose Lipschitz constant multiplies kappa."""
        return "inf"

    def require(self, activation: Activation) -> None:
        """Raises if the condition cannot apply to the activation."""
        if reason := self.obstacle(activation):
            raise InputError(f"condition {self.name!r} cannot apply to {activation.name!r}: {reason}")


def square(A: Tensor) -> Tensor:
    """Returns A in float64 after checking that it is one square matrix.

    Example:
        >>> square(torch.eye(2)).dtype
        torch.float64
    """
    if A.ndim != 2 or A.shape[0] != A.shape[1] or not len(A):
        raise InputError(f"expected one square matrix A of at least one state, got {tuple(A.shape)}")
    return double(A)
