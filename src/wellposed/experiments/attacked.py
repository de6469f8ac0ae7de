"""Networks that are attacked, with the images on which that is done and a copy that imitates them."""

import abc
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.baselines.resnet import ResNet
from wellposed.experiments.dense import Dense
from wellposed.experiments.resnet import trained_resnet20
from wellposed.robust import sensitivity
from wellposed.robust.attacks import train_surrogate
from wellposed.tasks.images import Images, load_images
from wellposed.training import fit

Split = Literal["test", "holdout"]
CHANNELS = (32, 64, 64)  # of a surrogate's convolutions


class Attacked(abc.ABC):
    """A trained classifier of images in [0, 1]; concrete ones are frozen dataclasses."""

    @property
    @abc.abstractmethod
    def data(self) -> str:
        """The name of its images."""

    @abc.abstractmethod
    def network(self, seed: int) -> nn.Module:
        """Returns the trained network in evaluation mode; it is shared."""

    @abc.abstractmethod
    def inputs(self, images: Images) -> Tensor:
        """Writes images as the network takes them."""

    def pair(self, split: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and classes of a split, all of it or some that are drawn."""
        whole = images(self.data, split)
        some = whole if count >= len(whole) else whole.subset(count, seed)
        return self.inputs(some), some.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names."""
        return images(self.data, "test").classes

    def sensitivity(self, seed: int) -> Tensor:  # (q, p)
        """Returns the sensitivity matrix of the network."""
        return _sensitivity(self, self.own(seed))

    def surrogate(self, seed: int, split: Split, count: int, epochs: int) -> nn.Module:
        """Returns a network that learnt the answers of this one on images of the other split, and no labels."""
        return _surrogate(self, seed, "holdout" if split == "test" else "test", count, epochs)

    def own(self, seed: int) -> int:
        """Returns the seed, or zero for all where only one network has been trained."""
        return seed


@dataclass(frozen=True)
class AttackedDense(Attacked):
    """An MLP on flat images, one for every seed."""

    dense: Dense

    @property
    def data(self) -> str:
        return self.dense.data

    def network(self, seed: int) -> nn.Module:
        return self.dense.trained(seed).eval()

    def inputs(self, images: Images) -> Tensor:
        return images.flat()


@dataclass(frozen=True)
class AttackedResNet(Attacked):
    """A residual network on images: ResNet-20 as it comes with the library, or a small one that is trained here.

    Args:
        images: name of the set.
        depth: of the network.
        epochs: of training on the set's part "fit"; None takes the network that comes with the library.
    """

    images: str = "cifar10"
    depth: int = 20
    epochs: int | None = None

    @property
    def data(self) -> str:
        return self.images

    def network(self, seed: int) -> nn.Module:
        return _trained() if self.epochs is None else _residual(self, seed)

    def inputs(self, images: Images) -> Tensor:
        return images.to_float()

    def own(self, seed: int) -> int:
        return 0 if self.epochs is None else seed


@lru_cache(maxsize=4)
def images(data: str, split: str) -> Images:
    """Loads images once."""
    return load_images(data, split)


@lru_cache(maxsize=1)
def _trained() -> nn.Module:
    return trained_resnet20().requires_grad_(False)


@lru_cache(maxsize=4)
def _residual(victim: AttackedResNet, seed: int) -> nn.Module:
    found = images(victim.data, "fit")
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        network = ResNet(victim.depth, len(found.classes), in_channels=found.pixels.shape[1])
    fit(network, (found.to_float(), found.labels), cross_entropy, epochs=victim.epochs or 1, batch_size=128,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2), seed=seed, progress=False)  # fmt: skip
    return network.eval().requires_grad_(False)


@lru_cache(maxsize=8)
def _sensitivity(victim: Attacked, seed: int) -> Tensor:
    one = victim.inputs(images(victim.data, "test").subset(1))
    return sensitivity(victim.network(seed), tuple(one.shape[1:]))


@lru_cache(maxsize=4)
def _surrogate(victim: Attacked, seed: int, split: str, count: int, epochs: int) -> nn.Module:
    u, _ = victim.pair(split, count, seed)
    network = None if u.dim() == 2 else imitator(tuple(u.shape[1:]), len(victim.classes), seed)
    return train_surrogate(victim.network(seed), u, network=network, rounds=2, epochs=epochs, step=0.03, seed=seed)


def imitator(shape: tuple[int, ...], classes: int, seed: int) -> nn.Sequential:
    """Builds a small convolutional network for images.

    Example:
        >>> imitator((3, 32, 32), 10, 0)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    before, height, width = shape
    layers: list[nn.Module] = []
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        for channels in CHANNELS:
            layers += [nn.Conv2d(before, channels, 3, 2, padding=1), nn.ReLU()]
            before, height, width = channels, -(-height // 2), -(-width // 2)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * height * width, classes))
