"""Configurations: frozen dataclasses all the way down, and their identity."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from wellposed.errors import InputError

Scale = Literal["tiny", "default", "paper"]
SCALES: tuple[Scale, ...] = ("tiny", "default", "paper")
JUDGED_SCALES = ("paper", "default")  # the first that has the runs, with seeds enough to decide


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Example:
        >>> Training(epochs=60).learning_rate
        0.01
    """

    epochs: int
    batch_size: int = 128
    learning_rate: float = 1e-2
    optimizer: Literal["adam", "sgd"] = "adam"
    schedule: Literal["cosine"] | None = "cosine"
    clip: float | None = None
    patience: int | None = None
    weight_decay: float = 0.0

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns an optimiser of those parameters that are to be trained."""
        kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[self.optimizer]
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        return kind(wanted, lr=self.learning_rate, weight_decay=self.weight_decay)

    def arguments(self) -> dict[str, Any]:
        """Returns the settings as `fit` takes them."""
        names = ("epochs", "schedule", "batch_size", "patience", "clip")
        return {"optimizer": self.make_optimizer, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class Schedule:
    """How much of some images a model sees, for trainings that `fit` and `Training` do not describe, by Adam.

    Args:
        images: how many are drawn of the training images.
        epochs, batch_size, learning_rate: of the training.
    """

    images: int
    epochs: int
    batch_size: int
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Choice:
    """A model by name, with the size of a paper and options of its own.

    Example:
        >>> Choice.of("implicit", size="001", state_features=4)
        Choice(name='implicit', size='001', options=(('state_features', 4),))
    """

    name: str
    size: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, size: str | None = None, **options: Any) -> "Choice":
        """Makes a choice with keyword options."""
        return cls(name, size, tuple(sorted(options.items())))


def describe(config: Any) -> Any:
    """Turns a configuration into JSON; dataclasses carry their class, so that no two kinds look alike.

    A class that was renamed keeps the name under which its records were written in the class variable
    `record_type`, and the old names of its fields in `record_fields`, by the new ones. Subclasses do not inherit
    the former: two classes never share a name.

    Example:
        >>> describe(Choice("mlp"))
        {'type': 'Choice', 'name': 'mlp', 'size': None, 'options': []}
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        kind = type(config)
        old_names: Mapping[str, str] = getattr(kind, "record_fields", {})
        fields = {
            old_names.get(field.name, field.name): describe(getattr(config, field.name))
            for field in dataclasses.fields(config)
        }
        return {"type": vars(kind).get("record_type", kind.__name__), **fields}
    if isinstance(config, tuple | list):
        return [describe(part) for part in config]
    if config is None or isinstance(config, bool | int | float | str):
        return config
    raise InputError(f"a configuration holds numbers, texts, tuples and dataclasses; received {config!r}")


def identity(config: Any) -> str:
    """Returns a short hash that changes with every field.

    Example:
        >>> identity(Choice("mlp")) == identity(Choice("mlp")), identity(Choice("mlp")) == identity(Choice("nac"))
        (True, False)
    """
    return digest(describe(config))


def digest(data: Any) -> str:
    """Returns a short hash of JSON data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
