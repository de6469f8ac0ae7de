"""Features that can only go together: all readings of one station, for example."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InputError


@dataclass(frozen=True, eq=False)
class FeatureGroups:
    """Which columns of (X, U) go together, and which stay whatever happens.

    Args:
        members: the columns of every group.
        fixed: columns that stay, ``(n + p,)``.

    Example:
        >>> groups = FeatureGroups.of(torch.tensor([-1, 0, 0, 1]), torch.ones(4, dtype=torch.bool))
        >>> groups.removable, [own.tolist() for own in groups.members]
        (3, [[1, 2], [3]])
    """

    members: tuple[Tensor, ...]
    fixed: Tensor

    @classmethod
    def of(cls, labels: Tensor | None, features: Tensor) -> "FeatureGroups":
        """Sorts features by their label; -1 stays, and without labels each feature is a group of its own.

        Args:
            labels: whole numbers, ``(n + p,)``.
            features: columns that some row may use, ``(n + p,)``; others are in no group.
        """
        if labels is None:
            return cls(tuple(torch.nonzero(features)), torch.zeros_like(features))
        if labels.shape != features.shape or labels.is_floating_point() or labels.is_complex():
            raise InputError(
                f"groups must be {len(features)} whole numbers, one for every column of (X, U); received "
                f"{tuple(labels.shape)} of {labels.dtype}"
            )
        if labels.numel() and int(labels.min()) < -1:
            raise InputError(f"groups must be numbers from -1, which stays, upwards; received {int(labels.min())}")
        names = labels[features & (labels >= 0)].unique()
        return cls(
            tuple(torch.nonzero(features & (labels == name))[:, 0] for name in names), features & (labels < 0)
        )

    @property
    def removable(self) -> int:
        """How many features can go."""
        return sum(len(own) for own in self.members)

    @property
    def single(self) -> bool:
        """Whether every group is one feature."""
        return all(len(own) == 1 for own in self.members)

    def whole(self, gone: Tensor) -> Tensor:  # (n + p,) bool
        """Keeps of marked features those whose whole group is marked."""
        kept = torch.zeros_like(gone)
        for own in self.members:
            kept[own] = gone[own].all()
        return kept

    def shuffled(self, generator: torch.Generator) -> list[int]:
        """Returns all features that can go, group after group in random order."""
        order = torch.randperm(len(self.members), generator=generator).tolist()
        return [feature for group in order for feature in self.members[group].tolist()]

    def ranked(self, rank: Tensor, kept: Tensor) -> list[int]:
        """Returns the features that are left and can go, group after group, those of the lowest rank first."""
        left = [own for own in self.members if bool(kept[own].all())]
        return [
            feature for own in sorted(left, key=lambda own: float(rank[own].amax())) for feature in own.tolist()
        ]

    def without(self, kept: Tensor, order: Sequence[int], count: int) -> Tensor:  # (n + p,) bool
        """Takes whole groups away in an order, as long as `count` of the features that can go are left.

        Args:
            kept: what is left so far, ``(n + p,)``.
            order: features, members of a group in a row.
            count: how many are left at least.
        """
        chosen, left, place = kept.clone(), int((kept & ~self.fixed).sum()), 0
        sizes = {int(own[0]): own for own in self.members}
        while place < len(order):
            own = sizes[order[place]]
            place += len(own)
            if not bool(chosen[own[0]]):
                continue
            if left - len(own) < count:
                break
            chosen[own] = False
            left -= len(own)
        return chosen
