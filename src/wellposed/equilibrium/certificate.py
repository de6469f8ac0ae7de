"""What a proof of well-posedness hands on: its value, its weights and its error constant."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
