"""Predictors that learn nothing or next to nothing: what a model of a series has to beat."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mean(nn.Module):
    """Predicts the mean of the training targets, whatever it sees.

    Example:
        >>> model = Mean(1).fit(torch.zeros(2, 10), torch.tensor([[1.0], [3.0]]))
        >>> model(torch.ones(1, 10)).tolist()
        [[2.0]]
    """

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(out_features))

    @torch.no_grad()
    def fit(self, u: Tensor, y: Tensor) -> Self:  # (m, p), (m, q)
        """Takes the mean of the targets."""
        self.mean.copy_(y.double().mean(0))
        return self

    def forward(self, u: Tensor) -> Tensor:  # (B, p) -> (B, q)
        """Repeats the mean."""
        return self.mean.expand(len(u), -1)


class Persistence(nn.Module):
    """Predicts that the next value of a series is its last one.

    Example:
        >>> Persistence()(torch.tensor([[1.0, 5.0]])).tolist()
        [[5.0]]
    """

    def fit(self, u: Tensor, y: Tensor) -> Self:
        """Has nothing to learn."""
        return self

    def forward(self, u: Tensor) -> Tensor:  # (B, T) -> (B, 1)
        """Repeats the last value."""
        return u[:, -1:]


class CopyLastLabel(nn.Module):
    """Answers the rolling argmax with the label of the step before, shown to transformers (001 section 3.1).

    It is wrong only where the last of T elements is the largest, so it is right with probability 1 - 1/T.

    Example:
        >>> CopyLastLabel()(torch.tensor([[0.2, 0.9, 0.4], [0.2, 0.3, 0.4]])).tolist()
        [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    """

    def fit(self, u: Tensor, y: Tensor) -> Self:
        """Has nothing to learn."""
        return self

    def forward(self, u: Tensor) -> Tensor:  # (B, T) -> (B, T)
        """Marks the largest element before the last."""
        return F.one_hot(u[:, :-1].argmax(1), u.shape[1]).to(u)
