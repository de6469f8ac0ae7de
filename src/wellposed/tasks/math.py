"""Arithmetic with known coefficients: sums and differences of two ranges of the input (001 section 2.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InputError


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
