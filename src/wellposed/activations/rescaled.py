"""Activation maps of states in other units."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from wellposed.activations.activation import Activation
from wellposed.activations.parameter import real
from wellposed.errors import InputError


def rescaled_by(activation: Activation, exponent: float) -> Activation:
    """Returns phi_D(z) = 2^e phi(2^-e z); phi itself if it is homogeneous or e is zero."""
    exponent = real("exponent of rescaled", exponent)
    if activation.homogeneous or exponent == 0:
        return activation
    if abs(exponent) > 1000:
        raise InputError(
            f"exponent of rescaled must lie within +-1000, the range of float64; received {exponent:g}"
        )
    factor = 2.0**exponent
    bind = partial(_rescaled, factor=factor)
    derivative = activation.derivative and partial(bind, phi=activation.derivative, outer=False)
    low, high = activation.image
    return replace(
        activation,
        name=f"rescaled({activation.name!r}, {exponent!r})",
        function=partial(bind, phi=activation.function),
        derivative=derivative,
        rounding=activation.rounding + (0.0 if exponent.is_integer() else 4.0),
        image=(low * factor, high * factor),
    )


def _rescaled(z: Tensor, phi: Callable[[Tensor], Tensor], factor: float, outer: bool = True) -> Tensor:
    value = phi(z / factor)
    return value * factor if outer else value
