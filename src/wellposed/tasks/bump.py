"""A bump on a line, the regression of 004 (section D.1)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.tasks.task import Pair as Samples
from wellposed.tasks.task import Point, Task


@dataclass(frozen=True)
class BumpRegression(Task):
    """Learns ``y = 2 (exp(-u^2 / (2 width^2)) - 1/2)`` from points u that are uniform in [-1, 1].

    Args:
        samples, test_samples: how many; 004 has 10,000.
        width: of the bump.
        points: the only test is on the same line.

    Example:
        >>> BumpRegression().target(torch.tensor([0.0, 0.25])).tolist()
        [1.0, 0.2130613...]
    """

    samples: int = 10_000
    test_samples: int = 1_000
    width: float = 0.25
    points: tuple[Point, ...] = (None,)
    name: ClassVar[str] = "bump-regression"

    def __post_init__(self) -> None:
        if not self.width > 0:
            raise InputError(f"the width of a bump is positive; received {self.width}")

    def target(self, u: Tensor) -> Tensor:
        """Computes the function itself."""
        return 2 * (torch.exp(-u.square() / (2 * self.width**2)) - 0.5)

    def train(self, seed: int) -> Samples:
        return self._draw(self.samples, self.generator(seed, "train"))

    def validation(self, seed: int) -> Samples:
        return self._draw(self.test_samples, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Samples:
        if at is not None:
            raise InputError(f"task {self.name!r} has one test distribution; received the point {at!r}")
        return self._draw(self.test_samples, self.generator(seed, "test"))

    def _draw(self, samples: int, generator: torch.Generator) -> Samples:
        u = 2 * torch.rand(samples, 1, generator=generator) - 1
        return u, self.target(u)
