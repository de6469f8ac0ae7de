"""ResNet-20 on CIFAR-10 as a network of shared rows, and a small stand-in on digits for tests."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from wellposed.baselines.resnet import ResNet
from wellposed.convex import RowUnits
from wellposed.errors import unknown_name
from wellposed.experiments.folded import folded, layer_names, layer_units, raw_sizes
from wellposed.experiments.resnet import trained_resnet20
from wellposed.experiments.subject import Pair, Subject
from wellposed.tasks.images import load_images

DATA = ("cifar10", "digits")


@dataclass(frozen=True)
class Photographs(Subject):
    """Images and the residual network that was trained on them, its batch normalisation folded in.

    Args:
        data: "cifar10", with the ResNet-20 that comes with the library, or "digits", with a ResNet-8 trained here.
        held_out: how many images of the held-out training batch are scored beside the test images.
        steps: of the training on digits.

    Example:
        >>> Photographs("digits").task
        'digits'
    """

    data: str = "cifar10"
    held_out: int = 2000
    steps: int = 150

    def __post_init__(self) -> None:
        if self.data not in DATA:
            raise unknown_name("set of photographs", self.data, DATA)

    @property
    def task(self) -> str:
        return self.data

    @property
    def learning_rate(self) -> float:
        return 1e-3

    @property
    def convertible(self) -> bool:
        return True

    def trained(self, seed: int) -> nn.Module:
        return _raw(replace(self, held_out=0), seed if self.data == "digits" else 0)[0]

    def layers(self, network: nn.Module) -> list[str]:
        return layer_names(network)

    def units(self, network: nn.Module, kappa: float) -> Mapping[str, RowUnits]:
        return layer_units(network, kappa)

    def sizes(self, seed: int) -> Mapping[str, Tensor]:
        """Returns the weights before batch normalisation is folded in, where they are trained."""
        return _raw(replace(self, held_out=0), seed if self.data == "digits" else 0)[1]

    def training(self) -> Pair:
        return _pair(self.data, "fit", None)

    def tests(self) -> Mapping[str, Pair]:
        held_out = {"held_out_accuracy": _pair(self.data, "holdout", self.held_out)} if self.held_out else {}
        return {"accuracy": _pair(self.data, "test", None), **held_out}


@lru_cache(maxsize=4)
def _pair(data: str, split: str, count: int | None) -> Pair:
    images = load_images(data, split)
    images = images if count is None else images.subset(min(count, len(images)))
    return images.to_float(), images.labels


@lru_cache(maxsize=4)
def _raw(photographs: Photographs, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns the folded network, and the sizes of the weights of the one that was trained."""
    network = trained_resnet20() if photographs.data == "cifar10" else _on_digits(photographs, seed)
    return folded(network), raw_sizes(network)


def _on_digits(photographs: Photographs, seed: int) -> ResNet:
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        network = ResNet(8, in_channels=1)
    photographs.tune(network, seed, photographs.steps)
    return network
