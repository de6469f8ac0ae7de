"""Linear systems and non-negative quadratic programs, whose difficulty is the condition number."""

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed_lab.tasks.task import Pair, Point, Task


@dataclass(frozen=True)
class _Definite(Task):
    """A task about a random symmetric positive definite matrix M of norm 1.

    A sample is one matrix ``(n, n + 1)``: M and, in the last column, the vector b. The eigenvalues are
    ``1/condition`` and 1 with the others between, uniform in their logarithm, in a random basis.
    """

    features: int = 10
    samples: int = 4096
    test_samples: int = 256
    condition: float = 5.0
    tolerance: float = 0.1
    points: tuple[Point, ...] = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)

    def __post_init__(self) -> None:
        if self.features < 2 or not self.condition >= 1:
            raise InputError(
                f"two features and a condition of 1 are the least; received {self.features} and {self.condition}"
            )

    def train(self, seed: int) -> Pair:
        return self._draw(self.samples, None, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(self.test_samples, None, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        condition = self.require_point(at)
        if not condition >= 1:
            raise InputError(f"a condition number is at least 1; received {at}")
        return self._draw(self.test_samples, condition, self.generator(seed, "test", condition))

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the share of samples that are right and the mean relative error ``|y - y*|_2 / |y*|_2``."""
        guess, truth = prediction.double(), target.double()
        error = torch.linalg.vector_norm(guess - truth, dim=1) / torch.linalg.vector_norm(truth, dim=1)
        error = error.nan_to_num(torch.inf)
        return {
            "test_accuracy": float((error <= self.tolerance).double().mean()),
            "test_error": float(error.mean()),
        }

    def _draw(self, samples: int, condition: float | None, generator: torch.Generator) -> Pair:
        """Draws samples of one condition number; of None, of those up to that of the training."""
        shares = torch.rand(samples, self.features, generator=generator, dtype=torch.float64)
        shares[:, 0], shares[:, 1] = 0.0, 1.0
        largest = torch.full((samples, 1), math.log(condition or self.condition), dtype=torch.float64)
        if condition is None:
            largest *= torch.rand(samples, 1, generator=generator, dtype=torch.float64)
        square = torch.randn(samples, self.features, self.features, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(square).Q
        matrix = (basis * torch.exp(-largest * shares)[:, None, :]) @ basis.mT
        latent = torch.randn(samples, self.features, generator=generator, dtype=torch.float64)
        vector, target = self._posed(matrix, latent)
        return torch.cat([matrix, vector[:, :, None]], 2).float(), target.float()

    @abc.abstractmethod
    def _posed(self, matrix: Tensor, latent: Tensor) -> Pair:  # (B, n, n), (B, n)
        """Returns b and the answer, made from random numbers."""


@dataclass(frozen=True)
class LinearSystem(_Definite):
    """Solves ``M y = b``: the inverse of a matrix, applied to a vector.

    The map from (M, b) to y is linear in b and not in M. A polynomial of degree k in M, the same for all M, has a
    worst relative error of at least about ``2 ((s - 1)/(s + 1))^k``, s the root of the condition number
    (Chebyshev), so that k layers which are linear in their state must fail as the condition grows.

    Args:
        features: size of M.
        samples, test_samples: how many.
        condition: the largest condition number in training; their logarithms are uniform.
        tolerance: relative error up to which an answer counts as right.
        points: condition numbers of the tests.

    Example:
        >>> u, y = LinearSystem(samples=3).train(seed=0)
        >>> u.shape, bool(torch.allclose((u[:, :, :-1] @ y[:, :, None])[..., 0], u[:, :, -1], atol=1e-5))
        (torch.Size([3, 10, 11]), True)
    """

    name: ClassVar[str] = "linear-system"

    def _posed(self, matrix: Tensor, latent: Tensor) -> Pair:
        return (matrix @ latent[:, :, None])[..., 0], latent


@dataclass(frozen=True)
class QuadraticProgram(_Definite):
    """Minimises ``y'My/2 - b'y`` over ``y >= 0``.

    The answer is a fixed point, ``y = max(0, y - s (My - b))`` for any s > 0, and piecewise linear in b even
    where M stays the same: one piece for every set of positive entries. Samples are made from their answer: with
    random normal z, ``y = max(0, z)`` and ``b = My - max(0, -z)`` satisfy the optimality conditions.

    Args:
        features, samples, test_samples, condition, tolerance, points: as in `LinearSystem`.

    Example:
        >>> u, y = QuadraticProgram(samples=3).train(seed=0)
        >>> slack = (u[:, :, :-1] @ y[:, :, None])[..., 0] - u[:, :, -1]
        >>> bool((y >= 0).all()), bool((slack > -1e-5).all()), bool((slack * y < 1e-5).all())
        (True, True, True)
    """

    name: ClassVar[str] = "quadratic-program"

    def _posed(self, matrix: Tensor, latent: Tensor) -> Pair:
        target = latent.clamp_min(0)
        return (matrix @ target[:, :, None])[..., 0] - (-latent).clamp_min(0), target
