"""Operator splitting for monotone systems, where plain iteration contracts too slowly to be of use."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.map import Map


@dataclass(frozen=True)
class SplittingMap(Map):
    """The Peaceman-Rachford map of ``x = P(Ax + v)`` for a projection P on an interval.

    With ``V = ((1 + a) I - a A)^-1`` iterates ``z <- z + 2 (V (2x - z + a v) - x)``, ``x = P(z)``
    (Winston and Kolter 2020, section 3.2). Its fixed points give the equilibria ``x = P(z)``, and it
    contracts for every ``a > 0`` if the symmetric part of A is below the identity.
    """

    resolvent: Tensor  # V, (n, n) or (M, n, n)
    offset: Tensor  # a v, (B, n) or (M, B, n)
    activation: Activation
    bound: Callable[[Tensor, Tensor], Tensor] | None = None
    context: Tensor | None = None
    block = 16
    bulk = 1 << 14

    @classmethod
    def of(
        cls,
        A: Tensor,
        v: Tensor,
        activation: Activation,
        step: float,
        bound: Callable[[Tensor, Tensor], Tensor] | None = None,
        context: Tensor | None = None,
    ) -> "SplittingMap":
        """Builds the map for a step a; see `AffineMap` for bound and context."""
        identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        wide = torch.promote_types(A.dtype, torch.float32)  # no half precision has an inverse
        resolvent = torch.linalg.inv(((1 + step) * identity - step * A).to(wide)).to(A.dtype)
        return cls(resolvent, step * v, activation, bound, context)

    def __call__(self, x: Tensor) -> Tensor:
        z, state = x.view(self.offset.shape), self.activation.function(x).view(self.offset.shape)
        image = (2 * state - z + self.offset) @ self.resolvent.mT
        return torch.add(z, image - state, alpha=2).view(x.shape)

    def rows(self, keep: Tensor) -> "SplittingMap | None":
        if self.offset.dim() != 2:
            return None
        context = None if self.context is None else self.context[keep]
        return replace(self, offset=self.offset[keep], context=context)

    def error_bound(self, x: Tensor, fx: Tensor) -> Tensor | None:
        if self.bound is None or self.context is None:
            return None
        return self.bound(self.activation.function(x), self.context)
