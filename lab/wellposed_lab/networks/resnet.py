"""Residual networks for small images (He et al. 2016, section 4.2).

`ResNet` is the architecture. `train_resnet` trains it, and `trained_resnet20` loads the result: ResNet-20 on
CIFAR-10 (003 sections 3.4 and 4.4).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from wellposed.atomic import atomic_write
from wellposed.data.images import Images
from wellposed.errors import FileFormatError, InputError
from wellposed.training import fit
from wellposed_lab.networks.recurrent import require_choice

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


WEIGHTS = Path(__file__).parent / "weights" / "resnet20-cifar10.safetensors"
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the channels of the training images
MARGIN = 4  # pixels by which training images are shifted at most
WARMUP = 5  # epochs in which the learning rate rises


class Normalised(nn.Module):
    """Normalises images in [0, 1] to mean zero and variance one and evaluates a network on them."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        for name, values in (("mean", MEAN), ("deviation", DEVIATION)):
            self.register_buffer(name, torch.tensor(values).reshape(1, 3, 1, 1), persistent=False)

    def forward(self, u: Tensor) -> Tensor:  # (B, 3, H, W) -> (B, classes)
        """Computes the logits."""
        y: Tensor = self.network((u - self.mean) / self.deviation)
        return y


@dataclass(frozen=True)
class Augmented:
    """Batches of images, each shifted by up to four pixels and flipped at random; every epoch in another order.

    Args:
        images: the training images.
        batch_size: how many at a time; an incomplete last batch is dropped.
        generator: of order, shifts and flips; batches are on its device.
    """

    images: Images
    batch_size: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.generator.device
        pixels, labels = (t.to(device) for t in (self.images.pixels, self.images.labels))
        for rows in torch.randperm(len(labels), generator=self.generator, device=device).split(self.batch_size):
            if len(rows) == self.batch_size or len(labels) < self.batch_size:
                yield augment(pixels[rows].float() / 255, self.generator), labels[rows]


def augment(u: Tensor, generator: torch.Generator) -> Tensor:  # (B, C, H, W)
    """Shifts each image by up to four pixels in both directions, padding with black, and flips half of them.

    Example:
        >>> augment(torch.ones(2, 3, 8, 8), torch.Generator()).shape
        torch.Size([2, 3, 8, 8])
    """
    batch, _, height, width = u.shape

    def draw(high: int) -> Tensor:
        return torch.randint(high, (batch, 1), generator=generator, device=u.device)

    rows = draw(2 * MARGIN + 1) + torch.arange(height, device=u.device)  # (B, H)
    columns = draw(2 * MARGIN + 1) + torch.arange(width, device=u.device)
    columns = torch.where(draw(2) == 1, columns.flip(1), columns)
    sample = torch.arange(batch, device=u.device)[:, None, None]
    wide = pad(u, (MARGIN,) * 4).permute(0, 2, 3, 1)
    return wide[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def train_resnet(
    images: Images,
    *,
    depth: int = 20,
    epochs: int = 120,
    batch_size: int = 256,
    learning_rate: float = 0.2,
    seed: int = 0,
    device: str = "cpu",
    progress: bool = True,
) -> Normalised:
    """Trains a residual network by SGD with momentum .9, weight decay 5e-4 and a cosine schedule with warm-up.

    On a GPU the forward pass is in bfloat16.
    """
    torch.manual_seed(seed)
    model = Normalised(ResNet(depth, len(images.classes))).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    generator = torch.Generator(device).manual_seed(seed)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, learning_rate, momentum=0.9, weight_decay=5e-4, nesterov=True)

    def rate(epoch: int) -> float:
        return min((epoch + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * epoch / epochs))

    fit(model, Augmented(images, batch_size, generator), cross_entropy, epochs=epochs, optimizer=sgd,
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate), device=device,
        autocast=torch.bfloat16 if device != "cpu" else None, progress=progress)  # fmt: skip
    return model.eval()


def save_weights(model: Normalised, path: Path) -> None:
    """Writes the weights; filters and their scales in half precision, which halves the file."""
    tensors = {
        name: (value.half() if value.is_floating_point() and "running" not in name else value).contiguous().cpu()
        for name, value in model.network.state_dict().items()
    }
    with atomic_write(path) as temporary:
        save_file(tensors, temporary)


def trained_resnet20(path: Path = WEIGHTS) -> Normalised:
    """Returns the trained network, for images in [0, 1]; it has seen data_batch_1 to data_batch_4 only.

    Example:
        >>> with torch.no_grad():
        ...     trained_resnet20()(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    network = ResNet(20)
    try:
        network.load_state_dict(load_file(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise FileFormatError(f"{str(path)!r} does not hold the weights of a ResNet-20: {error}") from error
    return Normalised(network.float()).eval()


def accuracy(model: nn.Module, images: Images) -> float:
    """Returns the share of images that are classified correctly."""
    device = next(model.parameters()).device
    with torch.no_grad():
        batches = zip(images.pixels.split(500), images.labels.split(500), strict=True)
        right = sum(int((model(u.to(device) / 255).argmax(1).cpu() == y).sum()) for u, y in batches)
    return right / len(images)
