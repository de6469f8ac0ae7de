"""Row problems with every kind of degeneracy, small enough for an interior-point solver."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.convex import Design, RowProblem, row_problem

KINDS = ("plain", "duplicates", "zeros", "few samples", "tied", "scales", "dead target", "masked", "bias")


@dataclass(frozen=True)
class Case:
    """Data of some rows."""

    M: Tensor  # (m, d)
    z: Tensor  # (m, r)
    support: Tensor | None

    def problem(self, kappa: float, capped: int | None = None, **options: float) -> RowProblem:
        width = self.M.shape[1]
        count = width if capped is None else capped
        return row_problem(Design.of(self.M), self.z, kappa=kappa, capped=count, support=self.support, **options)


def case(kind: str, seed: int, m: int = 24, d: int = 12, rows: int = 6) -> Case:
    """Draws data of one kind."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    M, support = normal(m, d), None
    if kind == "duplicates":
        M[:, 3], M[:, 4], M[:, -1] = M[:, 1], -M[:, 2], M[:, -2]
    if kind == "zeros":
        M[:, ::3] = 0.0
    if kind == "few samples":
        M = M[: d // 2]
    if kind == "tied":
        M = (M[:8] > 0).double()
    if kind == "scales":
        M = M * torch.logspace(-2, 1, d, dtype=torch.float64)
    if kind == "bias":
        M = torch.cat([M[:, :-1].relu(), torch.ones(m, 1, dtype=torch.float64)], dim=1)
    z = M @ normal(d, rows) * 0.3 + normal(len(M), rows)
    if kind == "tied":
        z = z.sign()
    if kind == "dead target":
        z[:, 0], z[:, 1] = 0.0, 1e-4 * z[:, 1]
        M = torch.cat([M[:, 1:], M[:, :1].relu()], dim=1)
    if kind == "masked":
        support = torch.rand(rows, d, generator=generator) < 0.7
        support[0], support[1, : d // 2] = False, False
    return Case(M, z, support)
