"""Activations that are computed again in the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint

__all__ = ["mem_gc"]


def mem_gc(func: Callable[..., Any], in_args: Sequence[Any] | None = None) -> Any:
    """Calls a function whose activations are not stored but computed again in the backward pass.

    That is `torch.utils.checkpoint.checkpoint`.

    Example:
        >>> import torch
        >>> layer, u = torch.nn.Linear(3, 3), torch.ones(2, 3)
        >>> bool((mem_gc(layer, (u,)) == layer(u)).all())
        True
    """
    return checkpoint(func, *(in_args or ()), use_reentrant=False)
