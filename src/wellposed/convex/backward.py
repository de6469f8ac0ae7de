"""Backward elimination: features go one after the other, each time those whose loss raises the misfit least."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from wellposed.convex.columns import Columns
from wellposed.convex.design import WIDE, Design
from wellposed.convex.feature_groups import FeatureGroups
from wellposed.convex.problem import common_support
from wellposed.convex.support import block_starts

RIDGE = 1e-3  # relative to the mean square norm of a column
AT_ONCE = 0.01  # of the features that are left, in one round


@dataclass(eq=False)
class Readers:
    """Rows that read the same columns, fitted by least squares without a cap.

    Args:
        rows, columns: their places in (A, B).
        inverse: P = (G + ridge)^-1, ``(d, d)``.
        weights: W, a row each, ``(r, d)``.
        price: what a unit of misfit in each row costs, ``(r,)``.
        left: which columns are left, ``(d,)``.

    Example:
        >>> eye, rows = torch.eye(2, dtype=WIDE), torch.tensor([0])
        >>> readers = Readers.of(eye, torch.tensor([[3.0], [1.0]], dtype=WIDE), rows, torch.arange(2), eye[0, :1])
        >>> readers.rises().round(decimals=1)
        tensor([9., 1.], dtype=torch.float64)
    """

    rows: Tensor
    columns: Tensor
    inverse: Tensor
    weights: Tensor
    price: Tensor
    left: Tensor

    @classmethod
    def of(cls, M: Tensor, Z: Tensor, rows: Tensor, columns: Tensor, price: Tensor) -> "Readers":
        """Fits rows of Z on columns of M, one row a sample in both."""
        gram, cross, _ = Design.of(M).restricted(columns).moments(Z[:, rows])
        scale = RIDGE * float(gram.diagonal().mean()) or 1.0
        damped = gram + scale * torch.eye(len(columns), dtype=WIDE)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        left = torch.ones(len(columns), dtype=torch.bool)
        return cls(rows, columns, inverse, cross @ inverse, price, left)

    def rises(self) -> Tensor:  # (d,)
        """Computes what it costs if a column goes and the others adapt: sum_i price_i W_ij^2 / P_jj."""
        return self.price @ self.weights.square() / self.inverse.diagonal()

    def rise(self, features: Tensor) -> float:
        """Computes what it costs if several columns go at once: sum_i price_i w_iF P_FF^-1 w_iF'."""
        gone = torch.nonzero(torch.isin(self.columns, features) & self.left)[:, 0]
        weights = self.weights[:, gone]
        solved = torch.linalg.solve(self.inverse[gone][:, gone], weights.mT)  # (f, r)
        return float(self.price @ (weights * solved.mT).sum(1))

    def without(self, features: Tensor) -> None:
        """Takes columns out: P <- P - P_F P_FF^-1 P_F', and W likewise."""
        gone = torch.nonzero(torch.isin(self.columns, features) & self.left)[:, 0]
        if len(gone) == 0:
            return
        across = self.inverse[:, gone]
        solved = torch.linalg.solve(across[gone], across.mT)  # (f, d)
        self.weights = self.weights - self.weights[:, gone] @ solved
        self.inverse = self.inverse - across @ solved
        self.left[gone] = False
        self.inverse[gone, gone] = 1.0  # so that nothing is divided by zero


def removal_order(
    work: Columns, sizes: Sequence[int], least: int, groups: FeatureGroups | None = None
) -> list[int]:
    """Orders features by backward elimination until `least` of them are left; the first goes first.

    A feature costs what the misfit of all rows that read it rises by when it goes and the rows adapt, relative to
    |Z|^2 of their layers; the cap is left aside. A state that goes takes its row along unless something else reads
    it, and what only that row has read then costs nothing. In a round one feature goes, or one in a hundred; of
    groups those go first that cost least for each of their features.

    Args:
        work: the rows.
        sizes: of the blocks of states.
        least: how many of the features that can go are left at the end, at most.
        groups: features that go together; None: each alone.
    """
    kept, price = work.features.clone(), _prices(work, sizes)
    groups = FeatureGroups.of(None, kept) if groups is None else groups
    M = torch.cat([work.X, work.U], dim=1)
    supports = [(rows, columns) for rows, columns in common_support(work.mask) if len(columns)]
    readers = [Readers.of(M, work.Z, rows, columns, price[rows]) for rows, columns in supports]
    order: list[int] = []
    while (left := int((kept & ~groups.fixed).sum())) > least:
        gone = _cheapest(readers, kept, groups, min(left - least, max(1, int(AT_ONCE * left))))
        order += gone.tolist()
        kept[gone] = False
        alive = work.rows(kept)
        for reader in readers:
            reader.without(gone)
            reader.price = reader.price * alive[reader.rows]
    return order


def _cheapest(readers: Sequence[Readers], kept: Tensor, groups: FeatureGroups, count: int) -> Tensor:
    """Returns the features that go next: `count` of them, or of larger groups as many as reach that number."""
    if groups.single:
        return _summed(readers, kept & ~groups.fixed).topk(count, largest=False).indices
    left = [own for own in groups.members if bool(kept[own[0]])]
    alone = _summed(readers, kept)
    costs = [float(alone[own[0]]) if len(own) == 1 else _together(readers, own) / len(own) for own in left]
    gone: list[int] = []
    for cost in sorted(range(len(left)), key=costs.__getitem__):
        gone += left[cost].tolist()
        if len(gone) >= count:
            break
    return torch.tensor(gone, dtype=torch.long)


def _together(readers: Sequence[Readers], features: Tensor) -> float:
    return sum(reader.rise(features) for reader in readers)


def _prices(work: Columns, sizes: Sequence[int]) -> Tensor:  # (n,)
    """Returns 1 / |Z|^2 of the layer of every row."""
    power = torch.zeros(work.Z.shape[1], dtype=WIDE)
    for low, high in pairwise(block_starts(tuple(sizes))):
        power[low:high] = work.Z[:, low:high].square().sum()
    return torch.where(power > 0, 1 / power.clamp(min=1e-300), 0.0) * work.rows(work.features)


def _summed(readers: Sequence[Readers], kept: Tensor) -> Tensor:  # (n + p,)
    """Adds the rises of all rows up; features that are gone are infinitely dear."""
    total = torch.where(kept, 0.0, torch.inf).to(WIDE)
    for group in readers:
        total[group.columns[group.left]] += group.rises()[group.left]
    return total
