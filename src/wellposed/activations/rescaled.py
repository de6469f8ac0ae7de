"""Activation maps of states in other units."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from wellposed.activations.activation import Activation


def rescaled_by(activation: Activation, exponent: float) -> Activation:
    """Returns phi_D(z) = 2^e phi(2^-e z); phi itself if it is homogeneous or e is zero."""
    if activation.homogeneous or exponent == 0:
        return activation
    factor = 2.0**exponent
    bind = partial(_rescaled, factor=factor)
    derivative = activation.derivative and partial(bind, phi=activation.derivative, outer=False)
    low, high = activation.image
    return replace(
        activation,
        name=f"rescaled({activation.name!r}, {exponent!r})",
        function=partial(bind, phi=activation.function),
        derivative=derivative,
        projection=activation.projection,
        image=(low * factor, high * factor),
    )


def _rescaled(z: Tensor, phi: Callable[[Tensor], Tensor], factor: float, outer: bool = True) -> Tensor:
    value = phi(z / factor)
    return value * factor if outer else value
