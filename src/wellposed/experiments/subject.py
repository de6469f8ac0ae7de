"""A trained network with its data, as suites of shared rows see it."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.convex import RowUnits
from wellposed.convex.gather import Valid
from wellposed.training import fit

Pair = tuple[Tensor, Tensor]  # inputs and classes


@dataclass(frozen=True)
class Subject(abc.ABC):
    """What is made sparse."""

    @property
    @abc.abstractmethod
    def task(self) -> str:
        """Its name in records."""

    @property
    @abc.abstractmethod
    def learning_rate(self) -> float:
        """Of further training, by Adam."""

    @property
    def valid(self) -> Valid | None:
        """Marks the positions that count."""
        return None

    @property
    def convertible(self) -> bool:
        """Whether networks of this kind have an implicit form."""
        return False

    @abc.abstractmethod
    def trained(self, seed: int) -> nn.Module:
        """Returns the trained network in evaluation mode; it is shared, so copy it before changing it."""

    @abc.abstractmethod
    def layers(self, network: nn.Module) -> list[str]:
        """Names the layers to be made sparse."""

    def units(self, network: nn.Module, kappa: float) -> Mapping[str, RowUnits] | None:
        """Returns units in which rows within kappa make the network contract; None where no cap does."""
        return None

    def sizes(self, seed: int) -> Mapping[str, Tensor]:
        """Returns what pruning by magnitude compares, where it is not the weights themselves, by layer."""
        return {}

    @abc.abstractmethod
    def training(self) -> Pair:
        """Returns everything that the network was trained on."""

    @abc.abstractmethod
    def tests(self) -> Mapping[str, Pair]:
        """Returns the data on which it is scored, by the metric."""

    def batches(self, seed: int, count: int) -> list[Tensor]:
        """Draws inputs of the training data."""
        u = self.training()[0]
        return list(u[_drawn(len(u), count, seed)].split(64))

    def tune(self, network: nn.Module, seed: int, steps: int, batch_size: int = 64) -> None:
        """Trains a network further for some steps, in place."""
        u, labels = self.training()
        rows = _drawn(len(u), steps * batch_size, seed)

        def adam(parameters: object) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, self.learning_rate)  # type: ignore[arg-type]

        epochs = max(1, -(-steps * batch_size // len(rows)))
        fit(network, (u[rows], labels[rows]), cross_entropy, epochs=epochs, optimizer=adam,
            batch_size=batch_size, seed=seed, progress=False)  # fmt: skip
        network.eval()

    def scores(self, network: nn.Module) -> dict[str, float]:
        """Returns the share of right answers on every test set."""
        found = {}
        with torch.no_grad():
            for metric, (u, labels) in self.tests().items():
                guesses = torch.cat([network(part).argmax(1) for part in u.split(250)])
                found[metric] = float((guesses == labels).double().mean())
        return found


def _drawn(total: int, count: int, seed: int) -> Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]
