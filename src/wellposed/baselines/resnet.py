"""Residual networks for small images (He et al. 2016, section 4.2)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.baselines.sequence import require_choice
from wellposed.errors import InputError

Shortcut = Literal["A", "B"]
SHORTCUTS: tuple[Shortcut, ...] = ("A", "B")


class ResNet(nn.Module):
    """Stacks three stages of residual blocks with 16, 32 and 64 channels, then averages over the image.

    Depth 6n + 2 has n blocks in every stage; 20 is the network of 003 (sections 3 and 4). Every activation
    is a module of its own that leaves its input alone, so that recorded states are right.

    Args:
        depth: 20, 32, 44, 56, 110, ...
        classes: number of logits.
        in_channels: of the images.
        shortcut: where the shape changes, "A" pads the identity with zero channels, as the authors do on
            CIFAR-10 (269,722 parameters at depth 20), "B" projects (272,474).

    Example:
        >>> import torch
        >>> model = ResNet(20)
        >>> model(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([2, 10]), 269722)
    """

    def __init__(
        self, depth: int = 20, classes: int = 10, *, in_channels: int = 3, shortcut: Shortcut = "A"
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(f"depth must be 6n + 2 with n >= 1; received {depth}; take 20, 32, 44 or 56")
        require_choice("shortcut", shortcut, SHORTCUTS)
        self.stem = nn.Sequential(_convolution(in_channels, 16), nn.BatchNorm2d(16), nn.ReLU())
        blocks, before = [], 16
        for channels in (16, 32, 64):
            for _ in range((depth - 2) // 6):
                blocks.append(BasicBlock(before, channels, shortcut))
                before = channels
        self.blocks = nn.Sequential(*blocks)
        self.readout = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, u: Tensor) -> Tensor:  # (B, C, H, W) -> (B, classes)
        """Computes the logits."""
        y: Tensor = self.readout(self.blocks(self.stem(u)).mean((-2, -1)))
        return y


class BasicBlock(nn.Module):
    """Adds two convolutions to a shortcut; halves the image where the number of channels grows."""

    def __init__(self, before: int, channels: int, shortcut: Shortcut) -> None:
        super().__init__()
        stride = 1 if before == channels else 2
        self.first = nn.Sequential(_convolution(before, channels, stride), nn.BatchNorm2d(channels), nn.ReLU())
        self.second = nn.Sequential(_convolution(channels, channels), nn.BatchNorm2d(channels))
        self.shortcut: nn.Module = nn.Identity()
        if before != channels:
            self.shortcut = (
                _PaddedIdentity(channels - before)
                if shortcut == "A"
                else nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
            )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:  # (B, before, H, W) -> (B, channels, H', W')
        """Computes the block's output."""
        y: Tensor = self.activation(self.second(self.first(x)) + self.shortcut(x))
        return y


class _PaddedIdentity(nn.Module):
    """Takes every other pixel and adds channels of zeros, half before and half after."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        front = self.channels // 2
        return F.pad(x[..., ::2, ::2], (0, 0, 0, 0, front, self.channels - front))


def _convolution(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
