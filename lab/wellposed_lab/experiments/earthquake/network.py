"""A network on 45 stations whose states are matched, with inputs that go station by station (002 section 5.2)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from wellposed.convex import States
from wellposed_lab.cache import cached
from wellposed_lab.experiments.earthquake.task import StationNetwork
from wellposed_lab.networks.trained import Pair, TrainedNetwork, mlp


@dataclass(frozen=True)
class StationDense(TrainedNetwork):
    """An MLP with biases and ReLU of EikoNet's widths, trained by Adam on an earthquake task.

    002 matches the states of a network that it does not describe; 4,750 features are 270 inputs and 4,480 hidden
    units, ten times the 448 of EikoNet. ReLU takes the place of ELU, because a form with ReLU can change its
    units.

    Args:
        task: stations and sources.
        hidden: widths of its hidden layers.
        epochs, learning_rate, batch_size: of its training.
        inputs_only: whether hidden units stay, so that only stations can go.

    Example:
        >>> StationDense(StationNetwork()).shape
        (270, 32, 128, 128, 128, 32, 4)
    """

    task: StationNetwork
    hidden: tuple[int, ...] = (32, 128, 128, 128, 32)
    epochs: int = 20
    learning_rate: float = 1e-3
    batch_size: int = 100
    inputs_only: bool = False
    metric: ClassVar[str] = "test_mse"
    change_metric: ClassVar[str] = "test_mse_increase"
    schedule: ClassVar[Literal["cosine"] | None] = "cosine"

    @property
    def data(self) -> str:
        return self.task.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Widths of all layers."""
        return (6 * self.task.stations, *self.hidden, len(self.task.targets))

    @property
    def weights_config(self) -> Self:
        return replace(self, inputs_only=False)

    def training(self, seed: int = 0) -> Pair:
        return _data(self.task, "train", seed)

    def tests(self, seed: int = 0) -> Mapping[str, Pair]:
        return {self.metric: _data(self.task, "test", seed)}

    def make(self, seed: int) -> nn.Module:
        network = mlp(self.shape, seed)
        self.train(network, seed, self.epochs)
        return network

    def loss(self, y: Tensor, target: Tensor) -> Tensor:
        return mse_loss(y, target)

    def graded(self, y: Tensor, target: Tensor) -> float:
        """Returns the test error."""
        return self.task.score(y, target)["test_mse"]

    def change(self, score: float, network: float, whole: float) -> float:
        """Returns by how much the error has grown since all features were there."""
        return score - whole

    def groups(self, states: States) -> Tensor:  # (n + p,)
        """Returns which columns go together: the six inputs of a station, and every hidden unit alone or never."""
        n, inputs = states.X.shape[1], self.task.groups()
        hidden = torch.full((n,), -1) if self.inputs_only else torch.arange(n) + self.task.stations
        return torch.cat([hidden, inputs])


@cached
def _data(task: StationNetwork, split: str, seed: int) -> Pair:
    return task.train(seed) if split == "train" else task.test(seed)
