"""The columns of a row problem: recorded states and inputs, read in pieces and never stacked in full."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.errors import InputError

WIDE = torch.float64


class Moments(NamedTuple):
    """What least squares needs to know of the data."""

    gram: Tensor  # (d, d), M'M
    cross: Tensor  # (r, d), a row z'M for every target z
    power: Tensor  # (r,), |z|^2


@dataclass(frozen=True, eq=False)
class Design:
    """The matrix ``M = (X, U)`` of 003 section 3.3 with one row a sample, in double precision piece by piece.

    Reading takes ``8 samples d`` bytes at a time, wherever the parts lie (memory, a mapped file, a GPU).

    Args:
        parts: matrices with the same samples, side by side.
        picks: which columns of each part are used; None is all of them.
        samples: how many samples are read at once.

    Example:
        >>> M = Design.of(torch.eye(2), torch.ones(2, 1))
        >>> M.moments(torch.tensor([[1.0], [2.0]])).cross
        tensor([[1., 2., 3.]], dtype=torch.float64)
    """

    parts: tuple[Tensor, ...]
    picks: tuple[Tensor | None, ...]
    samples: int = 4096

    @classmethod
    def of(cls, *parts: Tensor, samples: int = 4096) -> "Design":
        """Puts matrices side by side."""
        heights = {part.shape[0] for part in parts}
        if not parts or len(heights) > 1 or any(part.dim() != 2 for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise InputError(f"a design needs matrices with one row a sample; received {shapes or 'nothing'}")
        return cls(parts, (None,) * len(parts), samples)

    @property
    def widths(self) -> tuple[int, ...]:
        """How many columns of each part are used."""
        pairs = zip(self.parts, self.picks, strict=True)
        return tuple(part.shape[1] if pick is None else len(pick) for part, pick in pairs)

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and columns."""
        return self.parts[0].shape[0], sum(self.widths)

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.parts[0].device

    def restricted(self, columns: Tensor) -> "Design":
        """Keeps some columns, which must be in ascending order.

        Example:
            >>> Design.of(torch.eye(3), torch.ones(3, 2)).restricted(torch.tensor([1, 2, 4])).widths
            (2, 1)
        """
        picks: list[Tensor | None] = []
        start = 0
        for part, pick, width in zip(self.parts, self.picks, self.widths, strict=True):
            inside = columns[(columns >= start) & (columns < start + width)].to(part.device) - start
            picks.append(inside if pick is None else pick[inside])
            start += width
        return Design(self.parts, tuple(picks), self.samples)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields consecutive samples as double precision matrices."""
        count = self.shape[0]
        for start in range(0, count, self.samples):
            rows = slice(start, min(start + self.samples, count))
            pairs = zip(self.parts, self.picks, strict=True)
            chosen = [part[rows] if pick is None else part[rows].index_select(1, pick) for part, pick in pairs]
            yield rows, torch.cat([part.to(WIDE) for part in chosen], dim=1)

    def moments(self, targets: Tensor) -> Moments:  # (m, r)
        """Computes M'M, z'M and |z|^2 in one pass."""
        width, count = self.shape[1], targets.shape[1]
        gram = torch.zeros(width, width, dtype=WIDE, device=self.device)
        cross, power = torch.zeros(count, width).to(gram), torch.zeros(count).to(gram)
        for rows, M in self.pieces():
            z = targets[rows].to(M)
            gram.addmm_(M.mT, M)
            cross.addmm_(z.mT, M)
            power += z.square().sum(0)
        return Moments((gram + gram.mT) / 2, cross, power)

    def gradient(self, weights: Tensor, targets: Tensor) -> Tensor:  # (r, d)
        """Computes M'(Mw - z) of every row by way of the residuals, which loses no digits to cancellation."""
        total = torch.zeros_like(weights)
        for rows, M in self.pieces():
            total.addmm_((M @ weights.mT - targets[rows].to(M)).mT, M)
        return total

    def residual(self, weights: Tensor, targets: Tensor) -> Tensor:  # (r,)
        """Computes |Mw - z|^2 of every row."""
        total = weights.new_zeros(len(weights))
        for rows, M in self.pieces():
            total += (M @ weights.mT - targets[rows].to(M)).square().sum(0)
        return total
