"""What keeps a cell stable: weight norm, spectral norm, the Jacobian penalty, and dropout with fixed masks.

`weight_norm` and `spectral_norm` parametrise the layers of a module, `remove_norms` undoes it, and
`jacobian_penalty` is a term for the loss. The mask of `VariationalDropout` is held fixed over the steps of a
solve.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from wellposed.equilibrium.maps import State
from wellposed.errors import InputError

M = TypeVar("M", bound=nn.Module)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Layer = nn.Linear | Convolution
SQUARINGS = 7


class WeightNorm(nn.Module):
    """Writes a weight as ``g v / |v|``, one length g for every output (Salimans and Kingma 2016).

    That of `torch.nn.utils.parametrizations` has the same parameters, but no derivatives in forward mode, wrong
    second derivatives with respect to v (torch 2.13 on a CPU) and nan for rows that are zero.
    """

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        return direction * (length / _row_norms(direction))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        length = _row_norms(weight)
        if not length.is_meta and bool((length == 0).any()):
            raise InputError(
                f"weight norm needs a direction for every output; {int((length == 0).sum())} of {length.numel()} "
                "rows of the weight are zero; initialise them otherwise"
            )
        return length, weight


def _row_norms(weight: Tensor) -> Tensor:  # (out, 1, ...)
    return torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.dim())), keepdim=True)


class SpectralNorm(nn.Module):
    """Scales a weight by ``min(1, bound / s)`` where s is at least its operator norm; see `spectral_norm`."""

    def __init__(self, layer: Layer, bound: float) -> None:
        super().__init__()
        self.bound, self.groups = bound, getattr(layer, "groups", 1)
        self.factors = _overlaps(layer) if isinstance(layer, Convolution) else (1.0, 1.0)

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            wide = weight if weight.dtype == torch.float64 else weight.float()
            return weight * (self.bound / self.operator_bound(wide).clamp_min(self.bound)).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight

    def operator_bound(self, weight: Tensor) -> Tensor:  # ()
        """Bounds the operator norm of the layer from above."""
        by_group = weight.reshape(self.groups, -1, weight.shape[1], weight[0, 0].numel())  # (G, out, in, taps)
        by_output = self.factors[0] * norm_bound(by_group.flatten(2)).amax()
        if by_group.shape[3] == 1:
            return by_output
        by_input = self.factors[1] * norm_bound(by_group.transpose(1, 2).flatten(2)).amax()
        return torch.minimum(by_output, by_input)

    def extra_repr(self) -> str:
        return f"bound={self.bound}"


def _overlaps(layer: Convolution) -> tuple[float, float]:
    """Returns the factors for the norms of the two matrices that hold a kernel.

    The windows of a convolution cover a pixel at most once for every tap, and with zero padding only for the
    taps that fall on the stride. The matrix with one row for every input channel describes the adjoint of the
    convolution before it is subsampled.
    """
    _require_known_padding(layer)
    exact = layer.padding_mode == "zeros"
    taps = [
        math.ceil(size / stride) if gap == 1 and exact else size
        for size, stride, gap in zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    ]
    return math.sqrt(math.prod(taps)), math.sqrt(math.prod(layer.kernel_size))


def _require_known_padding(layer: Convolution) -> None:
    if layer.padding_mode not in ("zeros", "circular"):
        raise InputError(
            f"the norm of a convolution is known for zero and circular padding; received {layer.padding_mode!r}"
        )
    spans = [gap * (size - 1) for size, gap in zip(layer.kernel_size, layer.dilation, strict=True)]
    wide = not isinstance(layer.padding, str) and any(
        2 * padding > span for padding, span in zip(layer.padding, spans, strict=True)
    )
    if layer.padding_mode == "circular" and wide:
        raise InputError(
            f"circular padding of {layer.padding} repeats pixels within the image; pad by at most half of the "
            f"kernel's span {tuple(spans)}"
        )


def norm_bound(matrix: Tensor) -> Tensor:  # (...,), from (..., m, n)
    """Bounds the largest singular value from above: ``|(M M')^(2^k)|_F ^ (1 / 2^(k + 1))`` with k = `SQUARINGS`.

    The bound exceeds the value by a factor ``r^(1 / 2^(k + 2))`` at most, where r is the rank (1.013 for
    r = 1000 and k = 7), and by an allowance of m + n roundings.

    Example:
        >>> norm_bound(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        tensor(4.0000)
    """
    rows, columns = matrix.shape[-2:]
    unit = matrix.detach().abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    matrix = matrix / unit  # squares of its entries neither overflow nor vanish
    power = matrix @ matrix.mT if rows <= columns else matrix.mT @ matrix
    logarithm, share = matrix.new_zeros(matrix.shape[:-2]), 0.5
    for k in range(SQUARINGS + 1):
        power = power if k == 0 else power @ power
        size = torch.linalg.matrix_norm(power).clamp_min(torch.finfo(matrix.dtype).tiny)
        power, logarithm, share = power / size[..., None, None], logarithm + share * size.log(), share / 2
    return unit[..., 0, 0] * logarithm.exp() * (1 + (rows + columns) * torch.finfo(matrix.dtype).eps)


def weight_norm(module: M) -> M:
    """Puts the weights of all linear and convolutional layers in a module under weight norm, in place.

    Values do not change, and layers that are under weight norm already stay as they are. Optimisers must be
    made afterwards: length and direction are new parameters. Torch copies parametrised modules and saves
    their `state_dict` but does not pickle them; `remove_norms` undoes it.

    Example:
        >>> layer = weight_norm(nn.Linear(3, 2))
        >>> [tuple(p.shape) for p in layer.parametrizations.weight.parameters()]
        [(2, 1), (2, 3)]
    """
    layers = [layer for layer in _layers(module) if not _has(layer, WeightNorm)]
    if any(_has(layer, SpectralNorm) for layer in layers):
        raise InputError("weight norm would undo the bound of spectral norm; apply weight_norm first")
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", WeightNorm())
    return module


def spectral_norm(module: M, bound: float = 1.0) -> M:
    """Keeps the operator norms of all linear and convolutional layers in a module below a bound, in place.

    ``W <- W min(1, bound / s)`` with ``s >= |W|_2`` computed from W alone (`norm_bound`), so the bound holds
    from the first step on, without power iterations that lag behind. For a convolution the norm is that of the
    map between images, in l2, of any size, for zero or circular padding: s is the norm of the kernel as a
    matrix with one row for each output (or input) channel, times ``sqrt(taps)``. That may be too cautious by up
    to this factor, 3 for a 3x3 kernel. Weights below the bound do not change; a second call changes the bound.

    Args:
        module: its `nn.Linear` and `nn.Conv1d` to `nn.Conv3d` are bounded, no other layer.
        bound: positive.

    Example:
        >>> layer = spectral_norm(nn.Linear(20, 20), 0.5)
        >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 0.5)
        True
    """
    if not bound > 0:
        raise InputError(f"bound must be positive; received {bound}")
    layers = _layers(module)
    new = [(layer, SpectralNorm(layer, bound)) for layer in layers if not _has(layer, SpectralNorm)]
    for norm in (norm for layer in layers for norm in _parametrisations(layer)):
        if isinstance(norm, SpectralNorm):
            norm.bound = bound
    for layer, norm in new:
        parametrize.register_parametrization(layer, "weight", norm)
    return module


def remove_norms(module: M) -> M:
    """Turns weights under weight or spectral norm into plain parameters with the same values, in place.

    Example:
        >>> list(remove_norms(weight_norm(nn.Linear(3, 2))).state_dict())
        ['bias', 'weight']
    """
    for layer in module.modules():
        if _has(layer, WeightNorm) or _has(layer, SpectralNorm):
            parametrize.remove_parametrizations(layer, "weight")
    return module


def _layers(module: nn.Module) -> list[Layer]:
    layers = [layer for layer in module.modules() if isinstance(layer, Layer)]
    if not layers:
        raise InputError(f"{type(module).__name__} has no linear or convolutional layer whose weight has a norm")
    return layers


def _parametrisations(layer: nn.Module) -> list[nn.Module]:
    if not parametrize.is_parametrized(layer, "weight"):
        return []
    return list(layer.parametrizations.weight)  # type: ignore[union-attr, arg-type]


def _has(layer: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(norm, kind) for norm in _parametrisations(layer))


def jacobian_penalty(
    function: Callable[..., State],
    x: State,
    *inputs: State,
    draws: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:  # (B,)
    """Estimates ``|J|_F^2 / n`` per sample, with J the Jacobian of ``function(x, *inputs)`` with respect to x.

    Hutchinson's estimate ``|v' J|^2 / n`` with random signs v is unbiased; n counts the entries of the result.
    Added to a loss it keeps equilibria stable and solves short (Bai et al. 2021; 004 section E.1).

    x is treated as a constant: the penalty changes the map at this point and not the point, which avoids
    differentiating the equilibrium. Gradients reach the parameters of the function and `inputs`.

    Args:
        function: a cell, or any layer that treats every sample by itself.
        x: where to look, a batch-first tensor or a tuple of them.
        inputs: further arguments of the function.
        draws: vectors v to average over.
        generator: of the signs.

    Example:
        >>> from wellposed.models.deq import DEQ
        >>> from wellposed.models.cells import DenseCell
        >>> model, u = DEQ(DenseCell(3, 8)), torch.randn(5, 3)
        >>> x = model(u)
        >>> loss = x.square().mean() + 0.4 * jacobian_penalty(model.cell, x, u).mean()

        An explicit network pays for each of its layers:

        >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        >>> y, penalty = torch.randn(5, 4), torch.zeros(5)
        >>> for layer in layers:
        ...     penalty, y = penalty + jacobian_penalty(layer, y), layer(y)
    """
    if draws < 1:
        raise InputError(f"draws must be at least 1; received {draws}")
    single, differentiable = isinstance(x, Tensor), torch.is_grad_enabled()
    points = tuple(tensor.detach().requires_grad_() for tensor in ((x,) if isinstance(x, Tensor) else x))
    # The fast kernels of attention have no second derivative.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        result = function(points[0] if single else points, *inputs)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    size, total = sum(math.prod(y.shape[1:]) for y in outputs), outputs[0].new_zeros(outputs[0].shape[0])
    images = [y for y in outputs if y.requires_grad]
    for _ in range(draws if images else 0):
        signs = [_signs(image, generator) for image in images]
        products = torch.autograd.grad(
            images, points, signs, retain_graph=True, create_graph=differentiable, allow_unused=True
        )
        total = total + sum(p.flatten(1).square().sum(1) for p in products if p is not None)
    return total / (draws * size)


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    return 2 * torch.randint(0, 2, like.shape, generator=generator, device=device).to(like) - 1


class VariationalDropout(nn.Module):
    """Zeroes entries with one mask for all steps of a solve (Gal and Ghahramani 2016; Bai et al. 2019).

    Under ordinary dropout there is no equilibrium: every step would see another map. Here every sample
    draws its mask once a solve and keeps it until the end, whichever companions leave the batch before.
    Calls of one module with the same shape share the mask. Outside of a solve every call draws anew.

    Args:
        p: the share of entries that become zero; the others are scaled by 1 / (1 - p).
        shared: dimensions along which the mask is constant, e.g. ``(-2, -1)`` to drop whole channels of
            images, ``(1,)`` to treat all positions of a sequence alike.

    Example:
        >>> VariationalDropout(0.5, shared=(-2, -1))(torch.ones(2, 3, 4, 4)).shape
        torch.Size([2, 3, 4, 4])
    """

    def __init__(self, p: float = 0.5, shared: Sequence[int] = ()) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise InputError(f"p must lie in [0, 1); received {p}")
        self.p, self.shared = p, tuple(shared)
        self._masks: dict[torch.Size, Tensor] | None = None  # of the current solve, for all its samples
        self._rows: Tensor | None = None  # active samples

    def forward(self, x: Tensor) -> Tensor:  # (B, ...)
        """Applies the mask of the current solve."""
        if not self.training or self.p == 0:
            return x
        if self._masks is None:
            return x * self._draw(x)
        mask = self._masks.get(x.shape[1:])
        if mask is None:
            mask = self._masks[x.shape[1:]] = self._draw(x)
        if self._rows is not None and mask.shape[0] != self._rows.shape[0]:
            mask = mask[self._rows]
        return x * mask

    def _draw(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        for dim in self.shared:
            if dim % x.dim() == 0:
                raise InputError("the batch dimension cannot share a mask: samples would depend on each other")
            shape[dim] = 1
        keep = torch.rand(shape, device=x.device) >= self.p
        return keep.to(x.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, shared={self.shared}"


def select_rows(layers: Iterable[VariationalDropout], rows: Tensor | None) -> None:
    """Selects the samples of the next evaluation in held masks."""
    for layer in layers:
        layer._rows = rows


@contextlib.contextmanager
def hold_masks(layers: Sequence[VariationalDropout]) -> Iterator[None]:
    """Keeps the masks drawn inside the block until it ends."""
    for layer in layers:
        layer._masks, layer._rows = {}, None
    try:
        yield
    finally:
        for layer in layers:
            layer._masks = layer._rows = None
