"""The rolling functions over sequences (000 section 3, 001 section 2.1 and Table 3) and the spiky series."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.tasks.spiky import Spiky
from wellposed.tasks.task import Pair, Point, Task

__all__ = ["RollingArgmax", "RollingAverage", "Spiky"]


@dataclass(frozen=True)
class RollingAverage(Task):
    """Averages a sequence up to every step: trained on ``N(3, 1)^10``, tested on ``N(3 + k, 1)^10``.

    ``y_j = (u_1 + ... + u_j) / j`` for all j is trained; what counts is the last step (001 section 2.1), and
    ``test_mse`` is its error. The point None, like 0, is the training distribution.

    Example:
        >>> u, y = RollingAverage(samples=3).train(seed=0)
        >>> u.shape, y.shape, bool(torch.isclose(y[0, -1], u[0].mean()))
        (torch.Size([3, 10]), torch.Size([3, 10]), True)
    """

    length: int = 10
    samples: int = 10_000
    test_samples: int = 3_000
    points: tuple[Point, ...] = (None, 0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0)
    name: ClassVar[str] = "rolling-average"

    def train(self, seed: int) -> Pair:
        return self._draw(self.samples, 0.0, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(self.test_samples, 0.0, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        shift = 0.0 if at is None else self.require_point(at)
        return self._draw(self.test_samples, shift, self.generator(seed, "test", shift))

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the error of the last step and of all, and the mean of the last predictions."""
        prediction, target = prediction.double(), target.double()
        return {
            "test_mse": float(F.mse_loss(prediction[:, -1], target[:, -1])),
            "test_sequence_mse": float(F.mse_loss(prediction, target)),
            "mean_prediction": float(prediction[:, -1].mean()),
        }

    def _draw(self, samples: int, shift: float, generator: torch.Generator) -> Pair:
        u = 3.0 + shift + torch.randn(samples, self.length, generator=generator, dtype=torch.float64)
        y = u.cumsum(1) / torch.arange(1, self.length + 1)
        return u.float(), y.float()


@dataclass(frozen=True)
class RollingArgmax(Task):
    """Says where the largest element of a sequence is: trained on ``U(0, 1)^10``, tested on ``U(0, k)^10``.

    The target is the label of the last step, one-hot. Only it is judged, and training on the labels of all
    steps makes recurrent models worse at it. The point None, like 1, is the training distribution.

    Example:
        >>> u, y = RollingArgmax(samples=3).train(seed=0)
        >>> bool(torch.equal(u.argmax(1), y.argmax(1))), y.sum(1)
        (True, tensor([1., 1., 1.]))
    """

    length: int = 10
    samples: int = 10_000
    test_samples: int = 3_000
    points: tuple[Point, ...] = (None, 1.0, 10.0, 1e2, 1e3, 1e4, 1e5)
    name: ClassVar[str] = "rolling-argmax"

    def train(self, seed: int) -> Pair:
        return self._draw(self.samples, 1.0, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(self.test_samples, 1.0, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        scale = 1.0 if at is None else self.require_point(at)
        return self._draw(self.test_samples, scale, self.generator(seed, "test", scale))

    @staticmethod
    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        """Computes the cross-entropy of logits (B, T) and one-hot labels."""
        return F.cross_entropy(prediction, target)

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the share of right answers."""
        return {"accuracy": float((prediction.argmax(-1) == target.argmax(-1)).double().mean())}

    def _draw(self, samples: int, scale: float, generator: torch.Generator) -> Pair:
        u = scale * torch.rand(samples, self.length, generator=generator)
        return u, F.one_hot(u.argmax(1), self.length).float()
