"""ResNet-20 on CIFAR-10 (003 sections 3.4 and 4.4): its training, and the weights that came of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from wellposed.baselines.resnet import ResNet
from wellposed.errors import FileFormatError
from wellposed.models.atomic import written_whole
from wellposed.tasks.images import Images
from wellposed.training import fit

WEIGHTS = Path(__file__).parent / "trained" / "resnet20-cifar10.safetensors"
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the channels of the training images
MARGIN = 4  # pixels by which training images are moved
WARM = 5  # epochs in which the learning rate rises


class Normalised(nn.Module):
    """Takes images in [0, 1] and hands them to a network with mean zero and variance one."""

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
    """Batches of images, each moved by up to four pixels and perhaps mirrored; every epoch in another order.

    Args:
        images: the training images.
        batch_size: how many at a time; those left over at the end of an epoch wait for another one.
        generator: of order, places and mirrors, on the device where the images shall lie.
    """

    images: Images
    batch_size: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.generator.device
        pixels, labels = (t.to(device) for t in (self.images.pixels, self.images.labels))
        for rows in torch.randperm(len(labels), generator=self.generator, device=device).split(self.batch_size):
            if len(rows) == self.batch_size or len(labels) < self.batch_size:
                yield moved(pixels[rows].float() / 255, self.generator), labels[rows]


def moved(u: Tensor, generator: torch.Generator) -> Tensor:  # (B, C, H, W)
    """Moves each image by up to four pixels in both directions, filling up with black, and mirrors half of them.

    Example:
        >>> moved(torch.ones(2, 3, 8, 8), torch.Generator()).shape
        torch.Size([2, 3, 8, 8])
    """
    batch, _, height, width = u.shape

    def draw(high: int) -> Tensor:
        return torch.randint(high, (batch, 1), generator=generator, device=u.device)

    rows = draw(2 * MARGIN + 1) + torch.arange(height, device=u.device)  # (B, H)
    columns = draw(2 * MARGIN + 1) + torch.arange(width, device=u.device)
    columns = torch.where(draw(2) == 1, columns.flip(1), columns)
    place = torch.arange(batch, device=u.device)[:, None, None]
    wide = pad(u, (MARGIN,) * 4).permute(0, 2, 3, 1)
    return wide[place, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


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
    """Trains a residual network by SGD with momentum .9, weight decay 5e-4 and a cosine after five warm epochs.

    On a GPU the forward pass is in bfloat16.
    """
    torch.manual_seed(seed)
    model = Normalised(ResNet(depth, len(images.classes))).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    generator = torch.Generator(device).manual_seed(seed)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, learning_rate, momentum=0.9, weight_decay=5e-4, nesterov=True)

    def rate(epoch: int) -> float:
        return min((epoch + 1) / WARM, 0.5 + 0.5 * math.cos(math.pi * epoch / epochs))

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
    with written_whole(path) as part:
        save_file(tensors, part)


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
    """Returns the share of images that are classified as they should be."""
    device = next(model.parameters()).device
    with torch.no_grad():
        parts = zip(images.pixels.split(500), images.labels.split(500), strict=True)
        right = sum(int((model(u.to(device) / 255).argmax(1).cpu() == y).sum()) for u, y in parts)
    return right / len(images)
