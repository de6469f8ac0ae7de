"""Dropout whose mask is held fixed over the steps of a solve."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from wellposed.errors import InputError


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
        self._masks: dict[torch.Size, Tensor] | None = None  # of the solve at hand, for all its samples
        self._rows: Tensor | None = None  # samples at work

    def forward(self, x: Tensor) -> Tensor:  # (B, ...)
        """Applies the mask of the solve at hand."""
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
    """Tells held masks which samples the next evaluation is about."""
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
