"""The network whose states are matched, and the images it is trained on (002 section 5.2)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.convex import States, record_states
from wellposed.tasks.images import Images, load_images
from wellposed.training import fit

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Dense:
    """An MLP with biases and ReLU on flat images, trained by Adam.

    Args:
        data: name of the images.
        hidden: widths of its hidden layers.
        epochs, learning_rate, batch_size: of its training.

    Example:
        >>> Dense("digits").shape
        (64, 64, 32, 16, 10)
    """

    data: str = "fashion-mnist"
    hidden: tuple[int, ...] = (64, 32, 16)
    epochs: int = 3
    learning_rate: float = 1e-3
    batch_size: int = 128
    metric: ClassVar[str] = "accuracy"
    change_metric: ClassVar[str] = "accuracy_drop"

    @property
    def shape(self) -> tuple[int, ...]:
        """Widths of all layers."""
        images = _images(self.data, "test")
        return (images.pixels[0].numel(), *self.hidden, len(images.classes))

    def pair(self, split: str) -> tuple[Tensor, Tensor]:
        """Returns flat images and classes of a split."""
        images = _images(self.data, split)
        return images.flat(), images.labels

    def trained(self, seed: int) -> nn.Sequential:
        """Returns the trained network; it is shared, so copy it before changing it."""
        return _trained(self, seed)

    def states(self, seed: int, samples: int) -> States:
        """Records its states on some training images."""
        u = self.pair("train")[0]
        rows = torch.randperm(len(u), generator=torch.Generator().manual_seed(seed))[:samples]
        return record_states(self.trained(seed), u[rows].split(1000))

    def train(
        self, model: nn.Module, seed: int, epochs: int, *, loss: Loss = cross_entropy, optimizer: Any = None
    ) -> None:
        """Trains a model on all training images, in place."""

        def adam(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, self.learning_rate)

        fit(model, self.pair("train"), loss, epochs=epochs, optimizer=optimizer or adam,
            batch_size=self.batch_size, seed=seed, progress=False)  # fmt: skip

    def accuracy(self, model: nn.Module) -> float:
        """Returns the share of test images that are classified as they should be."""
        u, labels = self.pair("test")
        with torch.no_grad():
            guesses = torch.cat([model(part).argmax(1) for part in u.split(2000)])
        return float((guesses == labels).double().mean())

    def score(self, model: nn.Module, seed: int) -> float:
        """Returns the same; all seeds are tested on the same images."""
        return self.accuracy(model)

    def groups(self, states: States) -> None:
        """Says that every feature can go alone."""

    def change(self, score: float, network: float, whole: float) -> float:
        """Returns by how much the accuracy is below that of the trained network."""
        return network - score


@lru_cache(maxsize=4)
def _images(data: str, split: str) -> Images:
    return load_images(data, split)


@lru_cache(maxsize=8)
def _trained(dense: Dense, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for one, other in pairwise(dense.shape):
            layers += [nn.Linear(one, other), nn.ReLU()]
        network = nn.Sequential(*layers[:-1])
    dense.train(network, seed, dense.epochs)
    return network
