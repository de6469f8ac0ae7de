"""Sums of two matrices, learnt at one scale and tested at others (004 section E.4)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.tasks.task import Pair, Point, Task

SCALES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 50.0, 100.0, 500.0)  # 004 names the ends only


@dataclass(frozen=True)
class MatrixAddition(Task):
    """Adds two matrices whose entries are uniform in ``(-scale, scale)``, given as one vector (Du et al. 2022).

    Args:
        side: of the matrices; 004 has 20 x 20, that is, 800 inputs and 400 outputs.
        samples, test_samples: how many; 004 has 60,000 points in all.
        points: scales of the tests; that of the training is 1.

    Example:
        >>> u, y = MatrixAddition(side=2, samples=3).train(seed=0)
        >>> u.shape, bool(torch.equal(y, u[:, :4] + u[:, 4:]))
        (torch.Size([3, 8]), True)
    """

    side: int = 20
    samples: int = 50_000
    test_samples: int = 1_000
    points: tuple[Point, ...] = SCALES
    name: ClassVar[str] = "matrix-addition"

    def __post_init__(self) -> None:
        if self.side < 1:
            raise InputError(f"a matrix has at least one row; received {self.side}")

    def train(self, seed: int) -> Pair:
        return self._draw(1.0, self.samples, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(1.0, self.test_samples, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        scale = self.require_point(at)
        if not scale > 0:
            raise InputError(f"a scale is positive; received {at}")
        return self._draw(scale, self.test_samples, self.generator(seed, "test", scale))

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the mean squared error, and that relative to the mean square of the sums."""
        error, power = (part.double().square().mean() for part in (prediction.double() - target, target))
        return {"test_mse": float(error), "relative_mse": float(error / power)}

    def _draw(self, scale: float, samples: int, generator: torch.Generator) -> Pair:
        u = scale * (2 * torch.rand(samples, 2 * self.side**2, generator=generator) - 1)
        first, second = u.chunk(2, 1)
        return u, first + second
