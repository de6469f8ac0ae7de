"""Componentwise activation maps with parameters."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.activations.activation import Activation
from wellposed.activations.parameter import real
from wellposed.errors import InputError


def leaky_relu(slope: float = 0.01) -> Activation:
    """Builds z -> max(z, 0) + slope min(z, 0), the PReLU of a fixed slope.

    Example:
        >>> leaky_relu(0.5)(torch.tensor([-1.0, 2.0]))
        tensor([-0.5000,  2.0000])
    """
    slope = real("slope of leaky_relu", slope)
    bounds = (min(slope, 1.0), max(slope, 1.0))
    function, derivative = partial(F.leaky_relu, negative_slope=slope), partial(step, left=slope, right=1.0)
    image = (-math.inf if slope > 0 else 0.0, math.inf)
    name = f"leaky_relu({slope!r})"
    return Activation(name, function, bounds, derivative, homogeneous=True, rounding=2.0, image=image)


def elu(alpha: float = 1.0) -> Activation:
    """Builds z -> z above zero and alpha (e^z - 1) below.

    Example:
        >>> elu(2.0).lipschitz()
        2.0
    """
    alpha = real("alpha of elu", alpha, 0.0)
    function, derivative = partial(F.elu, alpha=alpha), partial(elu_slope, alpha=alpha)
    return Activation(
        f"elu({alpha!r})", function, (0.0, max(1.0, alpha)), derivative, image=(-alpha, math.inf), rounding=8.0
    )


def hardtanh(low: float = -1.0, high: float = 1.0) -> Activation:
    """Builds the projection on an interval.

    Example:
        >>> hardtanh(0.0, 3.0)(torch.tensor([-1.0, 2.0, 5.0]))
        tensor([0., 2., 3.])
    """
    low, high = real("low of hardtanh", low), real("high of hardtanh", high)
    if not low < high:
        raise InputError(f"hardtanh needs low < high; received {low} and {high}")
    function, derivative = partial(torch.clamp, min=low, max=high), partial(window, low=low, high=high)
    return Activation(
        f"hardtanh({low!r}, {high!r})",
        function,
        (0.0, 1.0),
        derivative,
        projection=True,
        rounding=0.0,
        image=(low, high),
    )


def softplus(beta: float = 1.0) -> Activation:
    """Builds z -> log(1 + e^(beta z)) / beta.

    Example:
        >>> softplus(2.0)(torch.zeros(1))
        tensor([0.3466])
    """
    beta = real("beta of softplus", beta, 0.0, above=True)
    function, derivative = partial(_softplus, beta=beta), partial(_softplus_slope, beta=beta)
    return Activation(f"softplus({beta!r})", function, (0.0, 1.0), derivative, image=(0.0, math.inf))


def softshrink(margin: float = 0.5) -> Activation:
    """Builds the soft threshold z -> sign(z) max(|z| - margin, 0).

    Example:
        >>> softshrink(1.0)(torch.tensor([0.5, -3.0]))
        tensor([ 0., -2.])
    """
    margin = real("margin of softshrink", margin, 0.0)
    function, derivative = partial(F.softshrink, lambd=margin), partial(_softshrink_slope, margin=margin)
    return Activation(f"softshrink({margin!r})", function, (0.0, 1.0), derivative, rounding=2.0)


def step(z: Tensor, left: float, right: float) -> Tensor:
    """Returns `right` where z is positive and `left` elsewhere."""
    return torch.full_like(z, left).masked_fill(z > 0, right)


def window(z: Tensor, low: float, high: float, height: float = 1.0) -> Tensor:
    """Returns `height` strictly between two bounds and zero elsewhere."""
    return torch.zeros_like(z).masked_fill((z > low) & (z < high), height)


def elu_slope(z: Tensor, scale: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Returns the derivative of scale * (z if z > 0 else alpha (e^z - 1))."""
    return torch.where(z > 0, scale, scale * alpha * torch.exp(z.clamp(max=0)))


def _softplus(z: Tensor, beta: float) -> Tensor:
    # F.softplus jumps by 2e-9 at its threshold of 20, which float64 sees.
    return torch.logaddexp(beta * z, torch.zeros_like(z)) / beta


def _softplus_slope(z: Tensor, beta: float) -> Tensor:
    return torch.sigmoid(beta * z)


def _softshrink_slope(z: Tensor, margin: float) -> Tensor:
    return 1 - window(z, -margin, margin)
