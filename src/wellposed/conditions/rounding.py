"""Outward rounding: bounds on what floating point may have lost, added back.

`upward` and `reciprocal_gap` are for bounds computed in float64, `map_rounding` for one evaluation of phi(Ax + Bu
+ b), and `rounding_slack` for sums in the precision in which they were computed.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from wellposed.activations import Activation, block_view

EPS, TINY = 2.0**-52, 2.0**-1022  # of float64; no product that underflows is off by more than TINY


def double(tensor: Tensor) -> Tensor:
    """Copies to float64 without gradient, exactly; on the CPU where the device has no float64.

    Example:
        >>> double(torch.ones(2)).dtype
        torch.float64
    """
    device = torch.device("cpu") if tensor.device.type == "mps" else tensor.device
    return tensor.detach().to(device=device, dtype=torch.float64)


def upward(value: Tensor, terms: int) -> Tensor:
    """Bounds from above the exact value of a float64 sum of `terms` non-negative products.

    Any order of summation errs by a relative (terms + 1) u at most (Higham, Accuracy and Stability of
    Numerical Algorithms, eq. 3.5); the factor 1 + (terms + 4) 2u covers that and the rounding of a few more
    products.

    Example:
        >>> bool(upward(torch.tensor(1.0, dtype=torch.float64), 3) > 1)
        True
    """
    return value * (1 + (terms + 4) * EPS)


ROOM = 1e-290  # more than underflow takes from a norm; smaller ones are not distinguished


def above_underflow(bound: Tensor) -> Tensor:
    """Raises bounds other than zero by what underflow may have taken from them.

    Example:
        >>> above_underflow(torch.tensor([0.0, 5e-324, 0.5], dtype=torch.float64)).tolist()
        [0.0, 1e-290, 0.5]
    """
    return torch.where(bound == 0, bound, bound + ROOM)


def reciprocal_gap(value: float) -> float:
    """Bounds 1 / (1 - value) from above; infinite if value >= 1.

    Example:
        >>> 2 < reciprocal_gap(0.5) < 2.0000001, reciprocal_gap(1.0)
        (True, inf)
    """
    gap = math.nextafter(1.0 - value, -math.inf)
    return (1.0 / gap) * (1 + 2 * EPS) if gap > 0 else math.inf


def power_of_two(size: Tensor) -> Tensor:
    """Returns powers of two by which tensors of that largest absolute value are divided before they are squared.

    Dividing by them is exact but for what underflows, and the squares of the quotients neither overflow nor vanish
    beside the largest one.

    Example:
        >>> power_of_two(torch.tensor([0.0, 3.0, 1e-45])).log2()
        tensor([   0.,    2., -120.])
    """
    limit = -6 - round(math.log2(torch.finfo(size.dtype).tiny))  # the reciprocals are numbers, too
    exponent = torch.frexp(size.detach()).exponent.clamp(-limit, limit)
    return torch.ldexp(torch.ones_like(size), exponent)


def vector_norm(z: Tensor, norm: str, dim: int) -> Tensor:
    """Computes |z|_p; the squares of the 2-norm neither overflow nor vanish.

    Example:
        >>> float(vector_norm(torch.tensor([3e-200, 4e-200], dtype=torch.float64), "2", -1))
        5e-200
    """
    if norm != "2" or not z.shape[dim]:
        return torch.linalg.vector_norm(z, float(norm), dim)
    scale = power_of_two(z.detach().abs().amax(dim, keepdim=True))
    return scale.squeeze(dim) * torch.linalg.vector_norm(z / scale, 2.0, dim)


def euclidean_norm(z: Tensor, dim: int = -1) -> Tensor:
    """Bounds |z|_2 from above in the type of z; differentiable.

    Example:
        >>> bool(euclidean_norm(torch.tensor([3e-30, 4e-30])) >= 5e-30)
        True
    """
    norm = vector_norm(z, "2", dim)
    eps, tiny = torch.finfo(z.dtype).eps, torch.finfo(z.dtype).tiny
    return torch.where(norm == 0, norm, norm * (1 + (z.shape[dim] + 8) * eps) + eps * tiny)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Returns u, half the distance from 1 to the next number of the dtype.

    Example:
        >>> unit_roundoff(torch.float32) == 2.0**-24
        True
    """
    return torch.finfo(dtype).eps / 2


def operand_roundoff(x: Tensor) -> float:
    """Bounds the rounding of a matrix product's operands: not zero where float32 means TF32 or bfloat16.

    Example:
        >>> operand_roundoff(torch.zeros(1, dtype=torch.float64))
        0.0
    """
    if x.dtype != torch.float32:
        return 0.0
    backend = torch.backends.cuda if x.device.type == "cuda" else torch.backends.mkldnn
    return {"tf32": 3 * 2.0**-11, "bf16": 3 * 2.0**-8}.get(backend.matmul.fp32_precision, 0.0)


def map_rounding(
    A: Tensor,  # (n, n)
    x: Tensor,  # (B, n)
    v_magnitude: Tensor,  # (B, n)
    activation: Activation,
    terms: int,
) -> Tensor:
    """Bounds |computed f(x) - exact f(x)| for f(x) = phi(Ax + Bu + b) in the dtype of x, componentwise.

    With k = `terms` and gamma_k = k u / (1 - k u) the pre-activation errs by gamma_k (|A||x| + |B||u| + |b|)
    in any order of summation; phi multiplies that by its Lipschitz constant and adds its own roundoff.

    Args:
        v_magnitude: |B||u| + |b|.
        terms: the length of the sum, n + p + 2.

    Returns:
        (B, n) in float64; infinite where k u >= 1.

    Example:
        >>> relu = Activation("relu", torch.relu, rounding=0.0)
        >>> x = torch.ones(1, 2)
        >>> bound = map_rounding(0.5 * torch.eye(2), x, torch.ones(1, 2), relu, terms=5)
        >>> bool((bound > 1.5 * 5 * 2**-24).all() and (bound < 1.51 * 5 * 2**-24).all())
        True
    """
    u, tiny = unit_roundoff(x.dtype), torch.finfo(x.dtype).tiny
    magnitude = double(x).abs() @ double(A).abs().mT + double(v_magnitude)
    magnitude = upward(magnitude, A.shape[-1] + 2)
    if terms * u >= 1:
        return torch.full_like(magnitude, math.inf)
    before = (terms * u / (1 - terms * u) + operand_roundoff(x)) * magnitude + 2 * terms * tiny
    after = _through(activation, before)
    if activation.rounding:
        width = 0 if activation.componentwise else (activation.block or x.shape[-1])
        origin = activation(torch.zeros(x.shape[-1], dtype=torch.float64, device=magnitude.device)).abs()
        after = after + (activation.rounding + width) * u * (origin + _through(activation, magnitude + before))
    return upward(after, 4) + 2 * tiny


def _through(activation: Activation, error: Tensor) -> Tensor:
    """Bounds the change of every entry of phi(z) by the componentwise change of z."""
    if activation.componentwise:
        return activation.lipschitz() * error
    norm = "inf" if "inf" in activation.constants else next(iter(activation.constants))
    blocks = block_view(error, activation.block or 0)
    size = vector_norm(blocks, norm, -1).unsqueeze(-1)
    return activation.lipschitz(norm) * upward(size, blocks.shape[-1]).expand_as(blocks).flatten(-2)


@contextlib.contextmanager
def plain_convolutions(like: Tensor) -> Iterator[None]:
    """Turns cuDNN off for float32 within the block: `rounding_slack` assumes that convolutions are plain sums.

    cuDNN may round float32 to TF32 and use transforms (Winograd, FFT), whose errors are larger.

    Example:
        >>> with plain_convolutions(torch.zeros(1)):
        ...     pass
    """
    enabled = torch.backends.cudnn.enabled
    if like.device.type == "cuda" and like.dtype != torch.float64:
        torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled


def rounding_slack(magnitude: Tensor, terms: int) -> Tensor:
    """Bounds the error of computed sums of `terms` products whose absolute values add up to `magnitude`.

    gamma_k = k u / (1 - k u) times the magnitude, in any order of summation (Higham, Accuracy and Stability of
    Numerical Algorithms, eq. 3.5), and a little more because the magnitude is computed too. Not differentiated.

    Example:
        >>> float(rounding_slack(torch.ones(1), 10)) > 10 * 2**-24
        True
    """
    size, relative = magnitude.detach(), (terms + 8) * unit_roundoff(magnitude.dtype)
    if relative >= 0.25:
        return torch.full_like(size, math.inf)
    gamma = relative / (1 - 2 * relative) + operand_roundoff(size)
    return size * (gamma * (1 + 2 * gamma)) + terms * torch.finfo(magnitude.dtype).tiny


def convert_outward(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Converts float64 numbers and returns them with what the conversion may have lost.

    Example:
        >>> value, lost = convert_outward(torch.tensor([1 / 3], dtype=torch.float64), torch.float32)
        >>> float(abs(value.double() - 1 / 3)) <= float(lost)
        True
    """
    eps, tiny = 2 * unit_roundoff(dtype), torch.finfo(dtype).tiny
    converted = value.to(dtype)
    return converted, converted.abs() * eps + tiny
