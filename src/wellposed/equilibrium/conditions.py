"""The conditions by name, and the search for one that proves well-posedness."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation
from wellposed.equilibrium.certificate import Certificate
from wellposed.equilibrium.condition import Condition
from wellposed.equilibrium.contraction import BlockNorm, InfNorm, SpectralNorm, WeightedNorm
from wellposed.equilibrium.one_sided import Monotone, Mu, Triangular
from wellposed.errors import IllPosedError, unknown_name

_ALL = (InfNorm(), WeightedNorm(), Triangular(), BlockNorm(), Mu(), SpectralNorm(), Monotone())
CONDITIONS: Mapping[str, Condition] = MappingProxyType({condition.name: condition for condition in _ALL})


def get_condition(condition: str | Condition) -> Condition:
    """Returns the condition of that name; a `Condition` passes through.

    Example:
        >>> get_condition("mu").name
        'mu'
    """
    if isinstance(condition, Condition):
        return condition
    if condition not in CONDITIONS:
        raise unknown_name("condition", condition, CONDITIONS)
    return CONDITIONS[condition]


def certify(
    A: Tensor,  # (n, n)
    activation: str | Activation,
    condition: str | Condition | None = None,
) -> Certificate:
    """Proves that x = phi(Ax + v) has exactly one solution for every v, or raises.

    Tries every condition that applies, cheapest first, and returns the first that holds
    (003, Theorem 1 and Remarks 2-3).

    Args:
        condition: check only this one.

    Example:
        >>> print(certify(torch.tensor([[0.0, 5.0], [0.0, 0.0]]), "relu", "triangular"))
        triangular: 0 < 1 holds (margin 1) [upper triangular]
        >>> certify(torch.tensor([[1.5]]), "tanh")
        Traceback (most recent call last):
            ...
        wellposed.errors.IllPosedError: nothing proves that x = phi(Ax + v) has one solution for phi = tanh...
    """
    phi = get_activation(activation)
    if condition is not None:
        candidates = [get_condition(condition)]
    else:
        candidates = [candidate for candidate in _ALL if not candidate.obstacle(phi)]
    failed = []
    for candidate in candidates:
        certificate = candidate.certify(A, phi)
        if certificate.holds:
            return certificate
        failed.append(certificate)
    raise IllPosedError(_explanation(A, phi, failed))


class Certified(Protocol):
    """Anything that can prove its own well-posedness: a model, a form."""

    def certificate(self) -> Certificate:
        """Returns the proof."""


def certificate(model: Certified) -> Certificate:
    """Proves that every input of a model or form has exactly one equilibrium.

    Example:
        >>> from wellposed.models import ImplicitModel
        >>> certificate(ImplicitModel(3, 1, 4)).holds
        True
    """
    return model.certificate()


def _explanation(A: Tensor, activation: Activation, failed: list[Certificate]) -> str:
    lines = [f"nothing proves that x = phi(Ax + v) has one solution for phi = {activation.name}, n = {len(A)}:"]
    lines += [f"  {certificate}" for certificate in failed]
    if not bool(torch.isfinite(A).all()):
        return "\n".join([*lines, "A holds NaN or infinite entries; find where they come from"])
    remedy = "lower kappa, rescale the states (rescaling), or project A (Condition.parametrise)"
    return "\n".join([*lines, f"{remedy}; other conditions: {', '.join(CONDITIONS)}"])
