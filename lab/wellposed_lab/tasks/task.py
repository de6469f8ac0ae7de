"""A task: data that a seed determines, and what counts as success on it."""

import abc
import hashlib
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import InputError

Pair = tuple[Tensor, Tensor]  # inputs (N, ...), targets (N, ...)
Point = float | str | None  # on the axis of a task: a shift, a noise level, the name of a distribution


class Task(abc.ABC):
    """Training, validation and test data with a score; concrete tasks are frozen dataclasses, as records need.

    Every split of every seed has its own random numbers: no two share a sample, and a split does not change
    when another one is drawn or not.

    Attributes:
        name: as in the tables of results.
        points: where the task is tested; the shift away from the training distribution, as a rule.
    """

    name: ClassVar[str]
    points: tuple[Point, ...]

    @abc.abstractmethod
    def train(self, seed: int) -> Pair:
        """Returns the training samples."""

    @abc.abstractmethod
    def validation(self, seed: int) -> Pair:
        """Returns further samples of the training distribution."""

    @abc.abstractmethod
    def test(self, seed: int, at: Point) -> Pair:
        """Returns test samples at a point of the axis."""

    @staticmethod
    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        """Computes the training loss."""
        return F.mse_loss(prediction, target)

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes what is reported, in float64."""
        return {"test_mse": float(F.mse_loss(prediction.double(), target.double()))}

    def details(self, prediction: Tensor, target: Tensor, seed: int, at: Point) -> dict[str, float]:
        """Computes further results of a test that depend on which samples those are."""
        return {}

    def excerpt(self, seed: int) -> slice | None:
        """Returns which consecutive test samples a picture of the series shows; None where there is no series."""
        return None

    def generator(self, seed: int, *split: object) -> torch.Generator:
        """Returns the random numbers of one split of one seed."""
        name = " ".join(map(str, (self.name, seed, *split)))
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        return torch.Generator().manual_seed(number)

    def require_point(self, at: Point) -> float:
        """Returns a point of the axis as a number, or says which ones there are."""
        if isinstance(at, str) or at is None:
            raise InputError(f"task {self.name!r} is tested at numbers such as {self.points}; received {at!r}")
        return float(at)
