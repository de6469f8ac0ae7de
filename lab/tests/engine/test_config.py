"""Settings become the arguments of a training, and configurations keep their identity when they are renamed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from wellposed_lab.config import Training, describe, identity


@dataclass(frozen=True)
class Old:
    width: int = 3


@dataclass(frozen=True)
class New:
    size: int = 3
    record_type: ClassVar[str] = "Old"
    record_fields: ClassVar[Mapping[str, str]] = {"size": "width"}


@dataclass(frozen=True)
class Newer(New):
    depth: int = 1


def test_a_renamed_class_keeps_its_identity():
    assert describe((New(5),)) == [{"type": "Old", "width": 5}]
    assert identity(New(5)) == identity(Old(5)) != identity(New(6))


def test_a_subclass_has_a_name_of_its_own():
    assert describe(Newer()) == {"type": "Newer", "width": 3, "depth": 1}


def test_training_as_arguments():
    free, fixed = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    settings = Training(epochs=3, learning_rate=0.2, optimizer="sgd", weight_decay=0.1, clip=5.0)
    given = settings.arguments()
    (group,) = given.pop("optimizer")([free, fixed]).param_groups
    assert group["params"] == [free] and (group["lr"], group["weight_decay"]) == (0.2, 0.1)
    assert given == {"epochs": 3, "schedule": "cosine", "batch_size": 128, "patience": None, "clip": 5.0}
