"""What an activation makes of an interval, rounded outward."""

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.conditions.rounding import unit_roundoff
from wellposed.errors import IllPosedError
from wellposed.forms.gains import steepest
from wellposed.robust.interval import Interval
from wellposed.robust.query import MethodError

ORDER_PRESERVING = ("max_pool", "group_sort")  # maps on blocks that increase in every entry


def image(phi: Activation, z: Interval) -> Interval:
    """Encloses phi(z) for all z in an interval.

    The ends where phi increases; else phi at the center and its Lipschitz constant times the radius. Values
    outside of what phi can return are cut off.

    Example:
        >>> from wellposed.activations import get_activation
        >>> image(get_activation("relu"), Interval(torch.tensor([[-1.0]]), torch.tensor([[2.0]])))
        Interval(lower=tensor([[0.]]), upper=tensor([[2.]]))
    """
    found = Interval(phi.function(z.lower), phi.function(z.upper)) if increasing(phi) else _around(phi, z)
    if phi.rounding:
        found = found.widened(_rounding(phi, z))
    low, high = phi.image
    return Interval(found.lower.clamp(min=low), found.upper.clamp(max=high))


def increasing(phi: Activation) -> bool:
    """Tells whether phi increases in every entry of its argument.

    Example:
        >>> from wellposed.activations import get_activation
        >>> increasing(get_activation("tanh")), increasing(get_activation("gelu"))
        (True, False)
    """
    if phi.componentwise:
        return phi.slope[0] >= 0
    return phi.name.partition("(")[0] in ORDER_PRESERVING


def _around(phi: Activation, z: Interval) -> Interval:
    radius = z.radius.detach().double()
    try:
        change = steepest(phi, radius).to(z.lower)
    except IllPosedError as error:
        raise MethodError(
            f"{phi.name!r} has no Lipschitz constant, so nothing bounds its states; give it bounded arguments"
        ) from error
    middle = phi.function(z.center)
    return Interval(middle - change, middle + change).widened(2 * unit_roundoff(change.dtype) * change)


def _rounding(phi: Activation, z: Interval) -> Tensor:
    """Bounds the rounding of phi by ``rounding * u * (|phi(0)| + gamma |z|)``, and more for maps on blocks."""
    unit, size = unit_roundoff(z.lower.dtype), z.magnitude.detach()
    origin = phi.function(torch.zeros_like(size[:1])).abs()
    spread = steepest(phi, size.double()).to(size)
    width = 0 if phi.componentwise else (phi.block or size.shape[-1])
    return (phi.rounding + width + 2) * unit * (origin + spread)
