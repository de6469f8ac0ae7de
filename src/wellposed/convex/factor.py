"""Cholesky factors of Gram matrices whose columns differ widely in scale, or depend on each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InputError

GROWTH = 10.0


@dataclass(frozen=True, eq=False)
class Factor:
    """``D^-1 K D^-1 + level I = L L'`` with D the roots of the diagonal of K.

    Scaling to a unit diagonal makes the rank decision independent of the units of a column. The level is zero
    where rounding allows.

    Example:
        >>> Factor.of(torch.tensor([[4.0, 0.0], [0.0, 1e-12]], dtype=torch.float64)).solve(torch.ones(1, 2))
        tensor([[2.5000e-01, 1.0000e+12]], dtype=torch.float64)
    """

    lower: Tensor  # (p, p)
    scale: Tensor  # (p,), one over D; zero for zero columns
    level: float

    @classmethod
    def of(cls, gram: Tensor, level: float = 0.0) -> "Factor":
        """Factorises a positive semi-definite matrix, adding to `level` where it has to."""
        diagonal = gram.diagonal().clamp(min=0)
        scale = torch.where(diagonal > 0, diagonal.rsqrt(), 0.0)
        unit = (scale[:, None] * gram).mul_(scale)
        while True:
            unit.diagonal().fill_(1.0 + level)
            lower, info = torch.linalg.cholesky_ex(unit)
            if int(info) == 0:
                return cls(lower, scale, level)
            level = max(GROWTH * level, len(unit) * torch.finfo(unit.dtype).eps)
            if level > 1:
                raise InputError("the Gram matrix is not positive semi-definite; check the states for NaN")

    def solve(self, rows: Tensor) -> Tensor:  # (r, p)
        """Solves K x = y for every row y."""
        if rows.shape[1] == 0:
            return rows
        scaled = (rows.to(self.lower) * self.scale).mT
        return torch.cholesky_solve(scaled, self.lower).mT * self.scale

    def half(self, rows: Tensor) -> Tensor:  # (r, p)
        """Returns L^-1 D^-1 y of every row y, so that products of halves are products by K^-1."""
        scaled = (rows.to(self.lower) * self.scale).mT
        return torch.linalg.solve_triangular(self.lower, scaled, upper=False).mT
