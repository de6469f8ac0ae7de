"""Prefix sums of bits modulo two, learnt on short strings and tested on long ones (004 section E.4)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import InputError
from wellposed.tasks.easy_to_hard import load_prefix_sums
from wellposed.tasks.task import Pair, Point, Task

LENGTHS = (16, 18, 20, 24, 32, 64, 72, 128, 256, 512)  # 004 section E.4
Source = Literal["generated", "published"]


@dataclass(frozen=True)
class PrefixSums(Task):
    """Tells for every bit of a string whether the bits up to it have an odd sum.

    A bit of the input is -1 or 1, a target 0 or 1; what is predicted are logits. Every answer depends on all bits
    to its left, so that a network which looks at a few neighbours must take as many steps as the string is long.

    Args:
        length: of the training strings.
        samples, test_samples: how many; of the published strings the first ones, those of the tests after those of
            the training.
        points: lengths of the tests.
        source: "published" takes the strings of the easy-to-hard data set, where they are on this machine.

    Example:
        >>> u, y = PrefixSums(length=5, samples=3).train(seed=0)
        >>> u.shape, bool(torch.equal(y, (u > 0).cumsum(-1) % 2))
        (torch.Size([3, 1, 5]), True)
    """

    length: int = 32
    samples: int = 10_000
    test_samples: int = 1_000
    points: tuple[Point, ...] = LENGTHS
    source: Source = "generated"
    name: ClassVar[str] = "prefix-sums"

    def __post_init__(self) -> None:
        if self.length < 1 or self.source not in ("generated", "published"):
            raise InputError(
                "a string has at least one bit, and is 'generated' or 'published'; received "
                f"{self.length} and {self.source!r}"
            )

    def train(self, seed: int) -> Pair:
        return self._draw(self.length, self.samples, seed, "train")

    def validation(self, seed: int) -> Pair:
        return self._draw(self.length, self.test_samples, seed, "validation")

    def test(self, seed: int, at: Point) -> Pair:
        return self._draw(int(self.require_point(at)), self.test_samples, seed, "test")

    @staticmethod
    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(prediction, target)

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the share of bits that are right, and of strings that are right in all bits."""
        return decided(prediction, target)

    def _draw(self, length: int, samples: int, seed: int, split: str) -> Pair:
        if self.source == "published":
            bits, targets = load_prefix_sums(length)
            first = 0 if split == "train" or length != self.length else self.samples
            bits, targets = bits[first : first + samples], targets[first : first + samples]
        else:
            generator = self.generator(seed, split, length)
            bits = torch.randint(2, (samples, length), generator=generator).float()
            targets = bits.cumsum(1) % 2
        return (2 * bits - 1)[:, None], targets[:, None]


def decided(logits: Tensor, target: Tensor) -> dict[str, float]:  # (N, ...) twice
    """Returns the share of yes-or-no answers that are right, and of samples of which all are.

    Example:
        >>> decided(torch.tensor([[1.0, -1.0], [2.0, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        {'accuracy': 0.75, 'solved': 0.5}
    """
    right = ((logits > 0) == (target > 0.5)).flatten(1)
    return {"accuracy": float(right.double().mean()), "solved": float(right.all(1).double().mean())}
