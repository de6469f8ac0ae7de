"""The cell of the multiscale DEQ: a residual block for every resolution, and their fusion."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.equilibrium.maps import State
from wellposed.errors import InputError
from wellposed.models.cell_parts import (
    Cell,
    convolution,
    group_norm,
    require_grid,
    require_groups,
    require_positive,
)
from wellposed.models.cells import ResidualBlock

MAX_SCALES = 4


class MultiscaleCell(Cell):
    """Steps the states of all resolutions and mixes them (Bai et al. 2020).

    With ``b_j`` the residual block of resolution j, of which only the finest gets the input,
    ``x_i <- N(K relu(sum_j s_ij(b_j(x_j))))``: ``s_ij`` are strided convolutions where j is finer than i, a
    1x1 convolution and upsampling where it is coarser, and the identity for j = i. Sizes are halved rounding
    up. The gains of the norms start so that feedback is weak: at initialisation the map contracts.

    Args:
        channels: of the states, from fine to coarse; the first is also that of the input.
        kernel_size, groups, dropout: as in `ConvCell`.

    Example:
        >>> import torch
        >>> from wellposed.models.deq import DEQ
        >>> [tuple(x.shape) for x in DEQ(MultiscaleCell((8, 16)))(torch.randn(2, 8, 7, 7))]
        [(2, 8, 7, 7), (2, 16, 4, 4)]
    """

    def __init__(
        self, channels: Sequence[int], *, kernel_size: int = 3, groups: int = 8, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.channels, self.groups = require_scales("channels", channels), groups
        self.blocks = nn.ModuleList(
            ResidualBlock(count, kernel_size, groups, 2, dropout, gain=0.25 if scale else 1.0)
            for scale, count in enumerate(self.channels)
        )
        self.fusions = nn.ModuleList(
            _Fusion(self.channels, scale, kernel_size, groups) for scale in range(len(self.channels))
        )

    def state_shape(self, u: State) -> tuple[tuple[int, ...], ...]:
        height, width = require_grid(u, self.channels[0], 2).shape[2:]
        least = 2 ** (len(self.channels) - 1)
        if min(height, width) < least:
            raise InputError(
                f"{len(self.channels)} scales need at least {least} x {least} pixels; received "
                f"{height} x {width}; use fewer scales or larger images"
            )
        shapes = tuple((c, _shrink(height, i), _shrink(width, i)) for i, c in enumerate(self.channels))
        for shape in shapes:
            require_groups(self.groups, shape)
        return shapes

    def inject(self, u: State) -> Tensor:
        return require_grid(u, self.channels[0], 2)

    def step(self, x: tuple[Tensor, ...], injection: Tensor) -> tuple[Tensor, ...]:
        if len(x) != len(self.blocks):
            raise InputError(f"the state has one tensor for each of {len(self.blocks)} scales; received {len(x)}")
        injections = [injection] + [None] * (len(self.blocks) - 1)
        parts = [block(part, i) for block, part, i in zip(self.blocks, x, injections, strict=True)]
        return tuple(fusion(parts) for fusion in self.fusions)


class _Fusion(nn.Module):
    """Brings the states of all resolutions to one of them and adds them up."""

    def __init__(self, channels: tuple[int, ...], target: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.target = target
        self.down = nn.ModuleList(_down(channels, j, target, kernel_size, groups) for j in range(target))
        self.up = nn.ModuleList(
            nn.Sequential(
                convolution(2, coarser, channels[target], 1, bias=False),
                group_norm(groups, channels[target], gain=0.1),
            )
            for coarser in channels[target + 1 :]
        )
        self.nonlinearity = nn.ReLU()
        self.mix = convolution(2, channels[target], channels[target], 1, bias=False)
        self.norm = group_norm(groups, channels[target], gain=0.25)

    def forward(self, parts: list[Tensor]) -> Tensor:
        """Returns the next state of the target resolution."""
        own = parts[self.target]
        total = own
        for path, part in zip(self.down, parts[: self.target], strict=True):
            total = total + path(part)
        for path, part in zip(self.up, parts[self.target + 1 :], strict=True):
            total = total + F.interpolate(path(part), size=own.shape[2:], mode="nearest")
        return self.norm(self.mix(self.nonlinearity(total)))


def _down(channels: tuple[int, ...], source: int, target: int, kernel_size: int, groups: int) -> nn.Module:
    """Halves a resolution once or more; all but the last convolution keep the channels of the source."""
    layers: list[nn.Module] = []
    for scale in range(source + 1, target + 1):
        count = channels[target] if scale == target else channels[source]
        layers.append(convolution(2, channels[source], count, kernel_size, bias=False, stride=2))
        layers.append(group_norm(groups, count))
        if scale < target:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def require_scales(name: str, channels: Sequence[int]) -> tuple[int, ...]:
    """Raises unless there are one to four positive channel counts."""
    counts = tuple(channels)
    if not 1 <= len(counts) <= MAX_SCALES:
        raise InputError(f"{name} has one entry for each of 1 to {MAX_SCALES} scales; received {counts}")
    for count in counts:
        require_positive(**{name: count})
    return counts


def _shrink(size: int, scale: int) -> int:
    """Halves a size `scale` times, rounding up as the strided convolutions do."""
    return math.ceil(size / 2**scale)
