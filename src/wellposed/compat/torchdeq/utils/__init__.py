"""What torchdeq has under this name: `add_deq_args`, `mem_gc`, `mixed_init`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.compat.torchdeq.utils.arg_utils import add_deq_args
from wellposed.compat.torchdeq.utils.mem import mem_gc

__all__ = ["add_deq_args", "mem_gc", "mixed_init"]


def mixed_init(z_shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Draws a start: each entry is zero or normally distributed, with equal chances (Anil et al. 2022).

    Example:
        >>> mixed_init((2, 3)).shape
        torch.Size([2, 3])
    """
    start = torch.randn(*z_shape, device=device)
    return start * torch.empty_like(start).bernoulli_(0.5)
