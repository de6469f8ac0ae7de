"""Trained networks with their data: what is fitted, pruned, bounded and attacked.

`TrainedNetwork` says what an experiment may ask of one. `Dense` (002 section 5.2) and the residual networks of 003
(`ResidualNetwork`, `FoldedResNet`) are here, because several experiments use them; those of one experiment are
beside it. `train_or_load` caches on disk the networks that take minutes to train, so that processes and later runs
share them.
"""

import abc
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.atomic import atomic_write
from wellposed.convex import RowUnits, States, record_states, shared_layers
from wellposed.convex.shared import Valid
from wellposed.data.cache import cache_folder
from wellposed.data.images import Images, load_images
from wellposed.errors import FileFormatError, InputError, MissingExtraError, unknown_name
from wellposed.models.io.files import write_tensors
from wellposed.training import fit
from wellposed_lab.cache import CACHE, cached
from wellposed_lab.config import identity
from wellposed_lab.networks.batch_norm import fold_batch_norm, layer_names, layer_units, raw_sizes
from wellposed_lab.networks.pruning import Units
from wellposed_lab.networks.resnet import Normalised, ResNet, train_resnet, trained_resnet20

Pair = tuple[Tensor, Tensor]  # inputs and targets
Loss = Callable[[Tensor, Tensor], Tensor]


class TrainedNetwork(abc.ABC):
    """A network, the data it was trained on, and how it is trained and scored.

    Concrete classes are frozen dataclasses: their name and fields enter the ids of records, and equal ones share a
    network in the cache.
    """

    metric: ClassVar[str] = "accuracy"  # of `score`
    change_metric: ClassVar[str] = "accuracy_drop"  # of `change`
    schedule: ClassVar[Literal["cosine"] | None] = None  # of the learning rate in `train`
    test_batch_size: ClassVar[int] = 2000
    shared_rows: ClassVar[bool] = False  # whether many positions share a row, as in convolutions and transformers
    convertible: ClassVar[bool] = True  # whether it has an implicit form

    @property
    @abc.abstractmethod
    def data(self) -> str:
        """The name of its data in records."""

    @property
    @abc.abstractmethod
    def learning_rate(self) -> float:
        """Of its training, by Adam."""

    @property
    @abc.abstractmethod
    def batch_size(self) -> int:
        """Of its training."""

    @property
    def weights_config(self) -> Self:
        """The same configuration with defaults for everything that does not change the weights."""
        return self

    @abc.abstractmethod
    def training(self, seed: int = 0) -> Pair:
        """Returns everything that the network was trained on."""

    @abc.abstractmethod
    def tests(self, seed: int = 0) -> Mapping[str, Pair]:
        """Returns the data on which it is scored, by the metric; the first is that of `score`."""

    @abc.abstractmethod
    def make(self, seed: int) -> nn.Module:
        """Builds the network and trains it."""

    def own(self, seed: int) -> int:
        """Returns the seed of the weights: the given one, or zero where only one network has been trained."""
        return seed

    def trained(self, seed: int) -> nn.Module:
        """Returns the trained network in evaluation mode; it is shared, so copy it before changing it."""
        config, own = self.weights_config, self.own(seed)
        return CACHE.get(("trained", config, own), lambda: config.make(own).eval())

    def layers(self, network: nn.Module) -> list[str]:
        """Names the layers to be made sparse."""
        return list(shared_layers(network))

    def units(self, network: nn.Module, kappa: float) -> Mapping[str, RowUnits] | None:
        """Returns units in which rows within kappa make the network contract; None where no cap does."""
        return None

    def sizes(self, seed: int) -> Mapping[str, Tensor]:
        """Returns what pruning by magnitude compares, where it is not the weights themselves, by layer."""
        return {}

    @property
    def valid(self) -> Valid | None:
        """Marks the positions that are not padding; None where all of them count."""
        return None

    def removable(self, network: nn.Module) -> list[Units]:
        """Names the units that rivals remove as a whole, where rows are shared."""
        raise InputError(f"{type(self).__name__} names no units of its {type(network).__name__} that can go")

    def details(self, model: nn.Module, seed: int = 0) -> dict[str, float]:
        """Returns further numbers of a model on the test data."""
        return {}

    def groups(self, states: States) -> Tensor | None:  # (n + p,)
        """Returns the group of every feature; a group is eliminated as a whole, and None lets each go alone."""
        return None

    def draw(self, seed: int, count: int) -> Tensor:
        """Draws inputs of the training data."""
        u = self.training(seed)[0]
        return u[_drawn(len(u), count, seed)]

    def states(self, seed: int, samples: int) -> States:
        """Records the states of the network on some training samples."""
        return record_states(self.trained(seed), self.draw(seed, samples).split(1000))

    def train(
        self, model: nn.Module, seed: int, epochs: int, *, loss: Loss | None = None, optimizer: Any = None
    ) -> None:
        """Trains a model on all training data, in place."""
        fit(model, self.training(seed), loss or self.loss, epochs=epochs, optimizer=optimizer or self._adam,
            schedule=self.schedule, batch_size=self.batch_size, seed=seed, progress=False)  # fmt: skip

    def tune(
        self, model: nn.Module, seed: int, steps: int, *, loss: Loss | None = None, optimizer: Any = None
    ) -> None:
        """Trains a model for some steps on samples that are drawn, in place."""
        u, target = self.training(seed)
        rows = _drawn(len(u), steps * self.batch_size, seed)
        epochs = max(1, -(-steps * self.batch_size // len(rows)))
        fit(model, (u[rows], target[rows]), loss or self.loss, epochs=epochs, optimizer=optimizer or self._adam,
            batch_size=self.batch_size, seed=seed, progress=False)  # fmt: skip
        model.eval()

    def loss(self, y: Tensor, target: Tensor) -> Tensor:
        """Computes what training minimises."""
        return cross_entropy(y, target)

    def score(self, model: nn.Module, seed: int = 0) -> float:
        """Scores a model on the first of the test sets."""
        return self._scored(model, next(iter(self.tests(seed).values())))

    def scores(self, model: nn.Module, seed: int = 0) -> dict[str, float]:
        """Scores a model on every test set."""
        return {metric: self._scored(model, pair) for metric, pair in self.tests(seed).items()}

    def graded(self, y: Tensor, target: Tensor) -> float:
        """Returns the share of right answers."""
        return float((y.argmax(1) == target).double().mean())

    def change(self, score: float, network: float, whole: float) -> float:
        """Compares a score with that of the network and of a fit with all features."""
        return network - score

    @torch.no_grad()
    def _scored(self, model: nn.Module, pair: Pair) -> float:
        u, target = pair
        return self.graded(torch.cat([model(some) for some in u.split(self.test_batch_size)]), target)

    def _adam(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, self.learning_rate)


class ImageNetwork(TrainedNetwork):
    """A classifier of images in [0, 1]."""

    training_split: ClassVar[str] = "train"

    @abc.abstractmethod
    def inputs(self, images: Images) -> Tensor:
        """Converts images to inputs of the network."""

    def images(self, split: str) -> Images:
        """Returns the images of a split."""
        return images(self.data, split)

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names."""
        return self.images("test").classes

    def pair(self, split: str) -> Pair:
        """Returns inputs and classes of a split."""
        given = self.images(split)
        return self.inputs(given), given.labels

    def sample(self, split: str, count: int, seed: int) -> Pair:
        """Returns inputs and classes of a split, all of it or some that are drawn."""
        whole = self.images(split)
        some = whole if count >= len(whole) else whole.subset(count, seed)
        return self.inputs(some), some.labels

    def training(self, seed: int = 0) -> Pair:
        return self.pair(self.training_split)

    def tests(self, seed: int = 0) -> Mapping[str, Pair]:
        return {"accuracy": self.pair("test")}


@dataclass(frozen=True)
class Dense(ImageNetwork):
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

    @property
    def shape(self) -> tuple[int, ...]:
        """Widths of all layers."""
        some = self.images("test")
        return (some.pixels[0].numel(), *self.hidden, len(some.classes))

    def inputs(self, images: Images) -> Tensor:
        return images.flat()

    def make(self, seed: int) -> nn.Module:
        network = mlp(self.shape, seed)
        self.train(network, seed, self.epochs)
        return network


@dataclass(frozen=True)
class ResidualNetwork(ImageNetwork):
    """ResNet-20 as it comes with the lab, or a small residual network that is trained here.

    Args:
        data: name of the images.
        depth: of the network.
        epochs: of training on the set's part "fit"; None takes the network that comes with the lab.
    """

    data: str = "cifar10"
    depth: int = 20
    epochs: int | None = None
    record_type: ClassVar[str] = "AttackedResNet"
    record_fields: ClassVar[Mapping[str, str]] = {"data": "images"}
    training_split: ClassVar[str] = "fit"
    learning_rate: ClassVar[float] = 1e-2
    batch_size: ClassVar[int] = 128

    def inputs(self, images: Images) -> Tensor:
        return images.to_float()

    def own(self, seed: int) -> int:
        return 0 if self.epochs is None else seed

    def make(self, seed: int) -> nn.Module:
        if self.epochs is None:
            return trained_resnet20().requires_grad_(False)
        some = self.images("fit")
        with torch.random.fork_rng(()):
            torch.manual_seed(seed)
            network = ResNet(self.depth, len(some.classes), in_channels=some.pixels.shape[1])
        self.train(network, seed, self.epochs)
        return network.requires_grad_(False)


@dataclass(frozen=True)
class FoldedResNet(ImageNetwork):
    """A residual network with its batch normalisation folded in, so that its rows are shared by positions.

    Args:
        data: "cifar10", with the ResNet-20 that comes with the lab; "cifar100", with one trained here, which takes
            hours without a GPU and is cached; or "digits", with a ResNet-8 trained here.
        held_out: how many images of the held-out training batch are scored beside the test images.
        steps: of the training on digits.

    Example:
        >>> FoldedResNet("digits").own(3), FoldedResNet("cifar10").own(3)
        (3, 0)
    """

    data: str = "cifar10"
    held_out: int = 2000
    steps: int = 150
    record_type: ClassVar[str] = "Photographs"
    training_split: ClassVar[str] = "fit"
    learning_rate: ClassVar[float] = 1e-3
    batch_size: ClassVar[int] = 64
    test_batch_size: ClassVar[int] = 250
    shared_rows: ClassVar[bool] = True
    known: ClassVar[tuple[str, ...]] = ("cifar10", "cifar100", "digits")

    def __post_init__(self) -> None:
        if self.data not in self.known:
            raise unknown_name("set of photographs", self.data, self.known)

    @property
    def weights_config(self) -> Self:
        return replace(self, held_out=0)

    def inputs(self, images: Images) -> Tensor:
        return images.to_float()

    def own(self, seed: int) -> int:
        return seed if self.data == "digits" else 0

    def make(self, seed: int) -> nn.Module:
        return fold_batch_norm(_unfolded(self, seed))

    def layers(self, network: nn.Module) -> list[str]:
        return layer_names(network)

    def units(self, network: nn.Module, kappa: float) -> Mapping[str, RowUnits]:
        return layer_units(network, kappa)

    def sizes(self, seed: int) -> Mapping[str, Tensor]:
        """Returns the weights before batch normalisation is folded in, where they are trained."""
        return raw_sizes(_unfolded(self.weights_config, self.own(seed)))

    def training(self, seed: int = 0) -> Pair:
        return _floats(self.data, self.training_split, None)

    def tests(self, seed: int = 0) -> Mapping[str, Pair]:
        held_out = {"held_out_accuracy": _floats(self.data, "holdout", self.held_out)} if self.held_out else {}
        return {"accuracy": _floats(self.data, "test", None), **held_out}


@cached
def images(data: str, split: str) -> Images:
    """Loads images once."""
    return load_images(data, split)


@cached
def _floats(data: str, split: str, count: int | None) -> Pair:
    given = images(data, split)
    given = given if count is None else given.subset(min(count, len(given)))
    return given.to_float(), given.labels


@cached
def _unfolded(network: FoldedResNet, seed: int) -> nn.Module:
    if network.data == "cifar10":
        return trained_resnet20()
    if network.data == "cifar100":
        model = Normalised(ResNet(20, classes=100))

        def train() -> None:
            seen = images(network.data, network.training_split)
            model.load_state_dict(train_resnet(seen, seed=seed, progress=False).state_dict())

        train_or_load(network.data, network, model, train)
        return model.eval()
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        residual = ResNet(8, in_channels=1)
    network.tune(residual, seed, network.steps)
    return residual


def mlp(shape: tuple[int, ...], seed: int) -> nn.Sequential:
    """Builds an MLP with biases and ReLU, untrained.

    Example:
        >>> mlp((3, 2, 1), seed=0)(torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for one, other in pairwise(shape):
            layers += [nn.Linear(one, other), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def _drawn(total: int, count: int, seed: int) -> Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]


FOLDER, VERSION = "networks", 1  # a change of architecture or training raises the version


def train_or_load(
    name: str, config: Any, network: nn.Module, train: Callable[[], None], folder: Path | None = None
) -> None:
    """Loads the weights of a network from the cache, or trains it and caches them.

    The file is named after the configuration and carries a checksum of its tensors. Several processes that start
    together each train the network, and the last one's file stays; without a cache nothing is written.

    Args:
        name: begins the name of the file.
        config: a frozen dataclass; everything that decides the weights.
        network: with its initial weights; changed in place.
        train: trains it.
        folder: of the cache, if it is not the usual one.

    Raises:
        FileFormatError: the file is damaged, or holds the weights of another network.
    """
    path = _path(name, config, folder)
    if path is not None and path.is_file():
        _load(network, path)
        return
    train()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}
        with atomic_write(path) as temporary:
            write_tensors(temporary, tensors, {"sha256": checksum(tensors)})


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Computes the sha256 of names, shapes and values.

    Example:
        >>> import torch
        >>> checksum({"a": torch.ones(1)}) == checksum({"a": torch.zeros(1)})
        False
    """
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _path(name: str, config: Any, folder: Path | None) -> Path | None:
    try:
        return (folder or cache_folder()) / FOLDER / f"{name}-{identity((VERSION, config))}.safetensors"
    except MissingExtraError:  # no cache
        return None


def _load(network: nn.Module, path: Path) -> None:
    remedy = "delete it, so that the network is trained again"
    try:
        with safe_open(os.fspath(path), "pt") as stored:
            promised = (stored.metadata() or {}).get("sha256")
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        raise FileFormatError(f"{os.fspath(path)!r} holds no weights ({error}); {remedy}") from error
    if checksum(tensors) != promised:
        raise FileFormatError(f"{os.fspath(path)!r} is damaged: its checksum is wrong; {remedy}")
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise FileFormatError(f"{os.fspath(path)!r} holds the weights of another network; {remedy}") from error
