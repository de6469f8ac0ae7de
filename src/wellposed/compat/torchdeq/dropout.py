"""Dropout whose masks stay until `reset_dropout`.

The mask of a layer is drawn at its first call after a reset and kept for all steps of a solve. Layers for
sequences (1d), images (2d) and volumes (3d) drop whole features, or whole positions (`VariationalDropToken1d`).
With ``token_first`` features are the last dimension, otherwise the second.
"""

from torch import Tensor, nn

from wellposed.errors import InputError
from wellposed.models import norms

__all__ = [
    "VariationalDropToken1d",
    "VariationalDropToken2d",
    "VariationalDropToken3d",
    "VariationalDropout",
    "VariationalDropout1d",
    "VariationalDropout2d",
    "VariationalDropout3d",
    "reset_dropout",
]


class VariationalDropout(norms.VariationalDropout):
    """Zeroes entries with one mask from one reset to the next.

    Args:
        dropout: the share of entries that become zero.

    Example:
        >>> import torch
        >>> layer, u = VariationalDropout(0.5), torch.ones(20, 16)
        >>> bool((layer(u) == layer(u)).all())
        True
    """

    def __init__(self, dropout: float = 0.5, *, shared: tuple[int, ...] = ()) -> None:
        super().__init__(dropout, shared)
        self._masks = {}

    @property
    def dropout(self) -> float:
        """The share of entries that become zero."""
        return self.p

    def forward(self, x: Tensor) -> Tensor:
        mask = (self._masks or {}).get(x.shape[1:])
        if self.training and self._rows is None and mask is not None and mask.shape[0] != x.shape[0]:
            raise InputError(
                f"the mask was drawn for {mask.shape[0]} samples and is applied to {x.shape[0]}; call "
                "reset_deq(model) before every batch"
            )
        return super().forward(x)


class _Shared(VariationalDropout):
    dims: int  # of a sample, without its features
    tokens = False  # whether positions are dropped, and not features

    def __init__(self, dropout: float = 0.5, token_first: bool = True) -> None:
        positions = tuple(range(1, self.dims + 1) if token_first else range(2, self.dims + 2))
        features = (self.dims + 1,) if token_first else (1,)
        super().__init__(dropout, shared=features if self.tokens else positions)
        self.token_first = token_first

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != self.dims + 2:
            raise InputError(f"{type(self).__name__} takes {self.dims + 2} dimensions; received {tuple(x.shape)}")
        return super().forward(x)


class VariationalDropout1d(_Shared):
    """Drops whole features of sequences, (B, L, D), or (B, D, L) unless `token_first`."""

    dims = 1


class VariationalDropout2d(_Shared):
    """Drops whole features of images, (B, H, W, D), or (B, D, H, W) unless `token_first`."""

    dims = 2


class VariationalDropout3d(_Shared):
    """Drops whole features of volumes, (B, T, H, W, D), or (B, D, T, H, W) unless `token_first`."""

    dims = 3


class VariationalDropToken1d(VariationalDropout1d):
    """Drops whole positions of sequences."""

    tokens = True


class VariationalDropToken2d(VariationalDropout2d):
    """Drops whole positions of images."""

    tokens = True


class VariationalDropToken3d(VariationalDropout3d):
    """Drops whole positions of volumes."""

    tokens = True


def reset_dropout(model: nn.Module) -> None:
    """Lets every layer of this file, and every `wellposed.models.VariationalDropout`, draw a new mask."""
    for layer in model.modules():
        if isinstance(layer, norms.VariationalDropout):
            layer._masks, layer._rows = {}, None
