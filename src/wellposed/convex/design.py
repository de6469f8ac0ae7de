"""The columns of a row problem: recorded states and inputs, read in pieces and never stacked in full."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
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

    Reading takes ``8 samples d`` bytes at a time, wherever the parts lie (memory, a mapped file, a GPU). Units and
    means are applied while reading, so that nothing is ever copied in full.

    Args:
        parts: matrices with the same samples, side by side.
        picks: which columns of each part are used; None is all of them.
        samples: how many samples are read at once.
        factors: by which used columns are multiplied, ``(d,)``; None is one.
        means: which are then subtracted, ``(d,)``; None is zero.
        home: where pieces are read to; None is where the parts are.

    Example:
        >>> M = Design.of(torch.eye(2), torch.ones(2, 1))
        >>> M.moments(torch.tensor([[1.0], [2.0]])).cross
        tensor([[1., 2., 3.]], dtype=torch.float64)
    """

    parts: tuple[Tensor, ...]
    picks: tuple[Tensor | None, ...]
    samples: int = 4096
    factors: Tensor | None = None
    means: Tensor | None = None
    home: torch.device | None = None

    @classmethod
    def of(
        cls, *parts: Tensor, samples: int = 4096, factors: Tensor | None = None, home: torch.device | None = None
    ) -> "Design":
        """Puts matrices side by side."""
        heights = {part.shape[0] for part in parts}
        if not parts or len(heights) > 1 or any(part.dim() != 2 for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise InputError(f"a design needs matrices with one row a sample; received {shapes or 'nothing'}")
        if any(part.is_complex() for part in parts):
            raise InputError("rows are fitted to real numbers; received complex ones; give both parts as columns")
        return cls(parts, (None,) * len(parts), samples, factors, None, home)

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
        """Where pieces are."""
        return self.parts[0].device if self.home is None else self.home

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
        factors, means = (
            None if part is None else part[columns.to(part.device)] for part in (self.factors, self.means)
        )
        return replace(self, picks=tuple(picks), factors=factors, means=means)

    def centred(self) -> "Design":
        """Subtracts the mean of every column.

        Example:
            >>> Design.of(torch.tensor([[1.0], [3.0]])).centred().read(slice(0, 2))
            tensor([[-1.],
                    [ 1.]], dtype=torch.float64)
        """
        total = torch.zeros(self.shape[1], dtype=WIDE, device=self.device)
        for _, M in self.pieces():
            total += M.sum(0)
        mean = total / self.shape[0]
        return replace(self, means=mean if self.means is None else self.means + mean)

    def squares(self) -> Tensor:  # (d,)
        """Adds up the squares of every column."""
        total = torch.zeros(self.shape[1], dtype=WIDE, device=self.device)
        for _, M in self.pieces():
            total += M.square().sum(0)
        return total

    def read(self, rows: slice) -> Tensor:
        """Returns some samples as a double precision matrix."""
        pairs = zip(self.parts, self.picks, strict=True)
        chosen = [part[rows] if pick is None else part[rows].index_select(1, pick) for part, pick in pairs]
        M = torch.cat([part.to(self.device, WIDE) for part in chosen], dim=1)
        M = M if self.factors is None else M * self.factors.to(M)
        return M if self.means is None else M - self.means.to(M)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields consecutive samples as double precision matrices."""
        count = self.shape[0]
        for start in range(0, count, self.samples):
            rows = slice(start, min(start + self.samples, count))
            yield rows, self.read(rows)

    def moments(self, targets: "Targets") -> Moments:  # (m, r)
        """Computes M'M, z'M and |z|^2 in one pass."""
        width, count = self.shape[1], targets.shape[1]
        gram = torch.zeros(width, width, dtype=WIDE, device=self.device)
        cross, power = torch.zeros(count, width).to(gram), torch.zeros(count).to(gram)
        for rows, M in self.pieces():
            z = _read(targets, rows, M)
            gram.addmm_(M.mT, M)
            cross.addmm_(z.mT, M)
            power += z.square().sum(0)
        return Moments((gram + gram.mT) / 2, cross, power)

    def gradient(self, weights: Tensor, targets: "Targets") -> Tensor:  # (r, d)
        """Computes M'(Mw - z) of every row by way of the residuals, which loses no digits to cancellation."""
        total = torch.zeros_like(weights)
        for rows, M in self.pieces():
            total.addmm_((M @ weights.mT - _read(targets, rows, M)).mT, M)
        return total

    def residual(self, weights: Tensor, targets: "Targets") -> Tensor:  # (r,)
        """Computes |Mw - z|^2 of every row."""
        total = weights.new_zeros(len(weights))
        for rows, M in self.pieces():
            total += (M @ weights.mT - _read(targets, rows, M)).square().sum(0)
        return total


Targets = Tensor | Design  # (m, r)


def _read(targets: Targets, rows: slice, like: Tensor) -> Tensor:
    return targets.read(rows).to(like) if isinstance(targets, Design) else targets[rows].to(like)


def some_columns(targets: Targets, columns: Tensor | slice) -> Targets:
    """Keeps some columns of targets (numbers, a mask or a slice), in any order where they are one matrix.

    Example:
        >>> some_columns(torch.tensor([[1.0, 2.0]]), slice(1, 2))
        tensor([[2.]])
    """
    if isinstance(targets, Tensor):
        return targets[:, columns]
    which = columns.cpu() if isinstance(columns, Tensor) else columns
    return targets.restricted(torch.arange(targets.shape[1])[which])
