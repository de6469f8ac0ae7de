"""A network on 45 stations whose states are matched, with inputs that go station by station (002 section 5.2)."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from wellposed.convex import States, record_states
from wellposed.tasks.earthquakes import StationNetwork
from wellposed.training import fit


@dataclass(frozen=True)
class StationDense:
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

    @property
    def data(self) -> str:
        """The name of the task."""
        return self.task.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Widths of all layers."""
        return (6 * self.task.stations, *self.hidden, len(self.task.targets))

    def trained(self, seed: int) -> nn.Sequential:
        """Returns the trained network; it is shared, so copy it before changing it."""
        return _trained(self.task, self.hidden, self.epochs, self.learning_rate, self.batch_size, seed)

    def states(self, seed: int, samples: int) -> States:
        """Records its states on some training samples."""
        u = _data(self.task, "train", seed)[0]
        rows = torch.randperm(len(u), generator=torch.Generator().manual_seed(seed))[:samples]
        return record_states(self.trained(seed), u[rows].split(1000))

    def groups(self, states: States) -> Tensor:  # (n + p,)
        """Returns which columns go together: the six inputs of a station, and every hidden unit alone or never."""
        n, inputs = states.X.shape[1], self.task.groups()
        hidden = torch.full((n,), -1) if self.inputs_only else torch.arange(n) + self.task.stations
        return torch.cat([hidden, inputs])

    def train(self, model: nn.Module, seed: int, epochs: int) -> None:
        """Trains a model on all training samples, in place."""
        _train(model, _data(self.task, "train", seed), seed, epochs, self.learning_rate, self.batch_size)

    def score(self, model: nn.Module, seed: int) -> float:
        """Returns the test error."""
        u, y = _data(self.task, "test", seed)
        with torch.no_grad():
            found = torch.cat([model(part) for part in u.split(2000)])
        return self.task.score(found, y)["test_mse"]

    def change(self, score: float, network: float, whole: float) -> float:
        """Returns by how much the error has grown since all features were there."""
        return score - whole


@lru_cache(maxsize=8)
def _data(task: StationNetwork, split: str, seed: int) -> tuple[Tensor, Tensor]:
    return task.train(seed) if split == "train" else task.test(seed)


def _train(model: nn.Module, data: tuple[Tensor, Tensor], seed: int, epochs: int, rate: float, batch: int) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, rate)

    fit(model, data, mse_loss, epochs=epochs, optimizer=adam, schedule="cosine", batch_size=batch, seed=seed,
        progress=False)  # fmt: skip


@lru_cache(maxsize=8)
def _trained(
    task: StationNetwork, hidden: tuple[int, ...], epochs: int, rate: float, batch: int, seed: int
) -> nn.Sequential:
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for one, other in pairwise((6 * task.stations, *hidden, len(task.targets))):
            layers += [nn.Linear(one, other), nn.ReLU()]
        network = nn.Sequential(*layers[:-1])
    _train(network, _data(task, "train", seed), seed, epochs, rate, batch)
    return network
