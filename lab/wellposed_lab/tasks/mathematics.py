"""The mathematical extrapolation tasks on arrays (000 section 3, 001 Table 3).

`Arithmetic` has known coefficients: sums and differences of two ranges of the input (001 section 2.1). `Identity`,
`Addition` and `Subtraction` shift the test distribution; that of `HardAddition` and `HardSubtraction` does not
meet the training one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed_lab.tasks.task import Pair, Point, Task


@dataclass(frozen=True)
class Arithmetic:
    """The task ``y = (u_i + ... + u_j) + sign (u_k + ... + u_l)``.

    The ranges belong to the data set and are the same for all of its samples: drawn anew for every sample,
    nothing could be learnt. The target is linear, so `coefficients` is the exact answer.

    Args:
        features: the length of u.
        first: i < j, counted from 0, both included.
        second: k < l.
        sign: 1 for addition, -1 for subtraction.

    Example:
        >>> task = Arithmetic(5, first=(0, 2), second=(2, 3), sign=-1)
        >>> task.coefficients
        tensor([ 1.,  1.,  0., -1.,  0.])
        >>> u, y = task.sample(4, scale=10.0)
        >>> u.shape, y.shape
        (torch.Size([4, 5]), torch.Size([4, 1]))
    """

    features: int
    first: tuple[int, int]
    second: tuple[int, int]
    sign: int = 1

    def __post_init__(self) -> None:
        for low, high in (self.first, self.second):
            if not 0 <= low < high < self.features:
                raise InputError(f"a range needs 0 <= i < j < {self.features}; received {(low, high)}")
        if self.sign not in (1, -1):
            raise InputError(f"sign must be 1 (addition) or -1 (subtraction); received {self.sign}")

    @property
    def coefficients(self) -> Tensor:  # (p,)
        """The weights c of ``y = c'u``."""
        index = torch.arange(self.features)
        first, second = ((low <= index) & (index <= high) for low, high in (self.first, self.second))
        return first.float() + self.sign * second.float()

    def target(self, u: Tensor) -> Tensor:  # (..., p) -> (..., 1)
        """Computes the exact answer in the dtype of `u`."""
        return u @ self.coefficients.to(u)[:, None]

    def sample(
        self, samples: int, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draws inputs from ``U(-scale, scale)`` and their targets.

        Training uses scale 1; the paper's shift k tests on ``U(-k/2, k/2)``, that is, scale k/2.
        """
        u = scale * (2 * torch.rand(samples, self.features, generator=generator) - 1)
        return u, self.target(u)


def addition(features: int = 50, seed: int = 0) -> Arithmetic:
    """Draws the ranges of an addition task.

    Example:
        >>> addition(seed=3) == addition(seed=3)
        True
    """
    return _draw(features, seed, 1)


def subtraction(features: int = 50, seed: int = 0) -> Arithmetic:
    """Draws the ranges of a subtraction task."""
    return _draw(features, seed, -1)


def _draw(features: int, seed: int, sign: int) -> Arithmetic:
    if features < 2:
        raise InputError(f"features must be at least 2 for i < j; received {features}")
    generator = torch.Generator().manual_seed(seed)
    first, second = (sorted(torch.randperm(features, generator=generator)[:2].tolist()) for _ in range(2))
    return Arithmetic(features, (first[0], first[1]), (second[0], second[1]), sign)


@dataclass(frozen=True)
class Identity(Task):
    """Returns the input: trained on ``U(-5, 5)^10``, tested on ``U(-k, k)^10`` (001 Table 3).

    Without a k the test is on ``U(-10, 10)``, the example of 000.

    Example:
        >>> u, y = Identity(samples=3).train(seed=0)
        >>> u.shape, bool(torch.equal(u, y))
        (torch.Size([3, 10]), True)
    """

    features: int = 10
    samples: int = 10_000
    test_samples: int = 3_000
    points: tuple[Point, ...] = (5.0, 10.0, 15.0, 30.0, 45.0, 80.0, 205.0)
    name: ClassVar[str] = "identity"

    def train(self, seed: int) -> Pair:
        return self._draw(self.samples, 5.0, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(self.test_samples, 5.0, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        k = 10.0 if at is None else self.require_point(at)
        return self._draw(self.test_samples, k, self.generator(seed, "test", k))

    def _draw(self, samples: int, scale: float, generator: torch.Generator) -> Pair:
        u = scale * (2 * torch.rand(samples, self.features, generator=generator) - 1)
        return u, u.clone()


@dataclass(frozen=True)
class _Operation(Task):
    """An arithmetic operation whose ranges i..j and k..l the seed draws once a data set."""

    features: int = 50
    samples: int = 10_000
    test_samples: int = 3_000
    points: tuple[Point, ...] = (2.0, 10.0, 50.0, 100.0, 1e3, 1e5)

    def operation(self, seed: int) -> Arithmetic:
        """Returns the task with its coefficients."""
        draw = {"addition": addition, "subtraction": subtraction}[self.name.removeprefix("hard-")]
        return draw(self.features, seed)

    def train(self, seed: int) -> Pair:
        return self.operation(seed).sample(self.samples, 1.0, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self.operation(seed).sample(self.test_samples, 1.0, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        k = self.require_point(at)
        return self.operation(seed).sample(self.test_samples, k / 2, self.generator(seed, "test", k))


@dataclass(frozen=True)
class Addition(_Operation):
    """Adds two ranges of the input: trained on ``U(-1, 1)^50``, tested on ``U(-k/2, k/2)^50`` (001 section 2.1).

    Example:
        >>> u, y = Addition(samples=4).train(seed=1)
        >>> u.shape, y.shape
        (torch.Size([4, 50]), torch.Size([4, 1]))
    """

    name: ClassVar[str] = "addition"


@dataclass(frozen=True)
class Subtraction(_Operation):
    """Subtracts two ranges of the input; see `Addition`."""

    name: ClassVar[str] = "subtraction"


@dataclass(frozen=True)
class _Translated(_Operation):
    """The harder shift of 000 Table 2: trained on ``U(1, 2)^100``, tested on ``U(2, 5)^100``."""

    features: int = 100
    points: tuple[Point, ...] = (None,)

    def train(self, seed: int) -> Pair:
        return self._within(seed, self.samples, 1.0, 2.0, "train")

    def validation(self, seed: int) -> Pair:
        return self._within(seed, self.test_samples, 1.0, 2.0, "validation")

    def test(self, seed: int, at: Point = None) -> Pair:
        if at is not None:
            raise InputError(f"task {self.name!r} has one test distribution, at=None; received {at!r}")
        return self._within(seed, self.test_samples, 2.0, 5.0, "test")

    def _within(self, seed: int, samples: int, low: float, high: float, split: str) -> Pair:
        u: Tensor = torch.rand(samples, self.features, generator=self.generator(seed, split))
        u = low + (high - low) * u
        return u, self.operation(seed).target(u)


@dataclass(frozen=True)
class HardAddition(_Translated):
    """Adds two ranges; the test distribution ``U(2, 5)`` does not meet the training one, ``U(1, 2)``."""

    name: ClassVar[str] = "hard-addition"


@dataclass(frozen=True)
class HardSubtraction(_Translated):
    """Subtracts two ranges; see `HardAddition`."""

    name: ClassVar[str] = "hard-subtraction"
