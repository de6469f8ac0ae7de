"""What floating point may have lost in a sum, in the precision in which it was computed."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from wellposed.equilibrium.rounding import operand_roundoff, unit_roundoff


@contextlib.contextmanager
def plain_sums(like: Tensor) -> Iterator[None]:
    """Has convolutions on a GPU add up products one by one in the block, which is what `allowance` is about.

    The library that computes them there rounds float32 to TF32 unasked, and has transforms whose error is another.

    Example:
        >>> with plain_sums(torch.zeros(1)):
        ...     pass
    """
    enabled = torch.backends.cudnn.enabled
    if like.device.type == "cuda" and like.dtype != torch.float64:
        torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled


def allowance(magnitude: Tensor, terms: int) -> Tensor:
    """Bounds the error of computed sums of `terms` products whose absolute values add up to `magnitude`.

    gamma_k = k u / (1 - k u) times the magnitude, in any order of summation (Higham, Accuracy and Stability of
    Numerical Algorithms, eq. 3.5), and a little more because the magnitude is computed too. Not differentiated.

    Example:
        >>> float(allowance(torch.ones(1), 10)) > 10 * 2**-24
        True
    """
    size, unit = magnitude.detach(), (terms + 8) * unit_roundoff(magnitude.dtype)
    if unit >= 0.25:
        return torch.full_like(size, math.inf)
    gamma = unit / (1 - 2 * unit) + operand_roundoff(size)
    return size * (gamma * (1 + 2 * gamma)) + terms * torch.finfo(magnitude.dtype).tiny


def outward(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Converts float64 numbers and returns them with what the conversion may have lost.

    Example:
        >>> value, lost = outward(torch.tensor([1 / 3], dtype=torch.float64), torch.float32)
        >>> float(abs(value.double() - 1 / 3)) <= float(lost)
        True
    """
    unit, tiny = 2 * unit_roundoff(dtype), torch.finfo(dtype).tiny
    converted = value.to(dtype)
    return converted, converted.abs() * unit + tiny
