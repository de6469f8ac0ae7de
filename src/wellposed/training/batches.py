"""Batches from tensors, data sets and loaders, in an order that only the seed decides."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from wellposed.errors import InputError

Data = tuple[Tensor, Tensor] | Dataset | Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Batch:
    """Some samples; `weight` is the share of the joined batch that this process holds."""

    u: Tensor  # (B, ...) or (M, B, ...)
    y: Tensor
    shared: bool  # by all members of an Ensemble
    size: int  # of the joined batch
    weight: float = 1.0
    rows: Tensor | None = None  # (B,) or (M, B) indices into the data; None where samples have none

    def shard(self, rank: int, world: int) -> "Batch":
        """Takes the rows of one process; a process without rows gets one of weight zero.

        Example:
            >>> Batch(torch.arange(5), torch.arange(5), True, 5).shard(1, 2).u
            tensor([1, 3])
        """
        if world == 1:
            return self
        dim = 0 if self.shared else 1
        mine = torch.arange(rank, self.size, world)
        weight = len(mine) / self.size
        mine = mine if len(mine) else torch.zeros(1, dtype=torch.int64)
        u, y = (t.index_select(dim, mine.to(t.device)) for t in (self.u, self.y))
        rows = None if self.rows is None else self.rows[..., mine]
        return Batch(u, y, self.shared, self.size, weight, rows)


class Batches:
    """Iterates over the batches of an epoch; every iteration is the next epoch.

    Args:
        data: ``(inputs, targets)``, a data set of such pairs, or an iterable of batches.
        batch_size: rows; None for all.
        seeds: of the order, one for every member of an Ensemble; one order serves all if they are equal;
            none: the order of the data.
        per_member: whether the tensors have a leading member dimension.
    """

    def __init__(
        self, data: Data, batch_size: int | None, seeds: Sequence[int] = (), per_member: bool = False
    ) -> None:
        if isinstance(data, IterableDataset):
            data = DataLoader(data, batch_size)
        if isinstance(data, TensorDataset) and len(data.tensors) == 2:
            data = data.tensors
        self.data: Any = data
        self.tensors = isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data)
        self.indexed = self.tensors or isinstance(data, Dataset)
        self.per_member = per_member
        seeds = seeds if per_member or len(set(seeds)) > 1 else seeds[:1]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._check()
        self.batch_size = self.length if batch_size is None else batch_size

    @property
    def length(self) -> int:
        """The number of samples."""
        if not self.indexed:
            return 0
        return self.data[0].shape[1 if self.per_member else 0] if self.tensors else len(self.data)

    def _check(self) -> None:
        if self.tensors and (len(self.data) != 2 or _rows(self.data[0], self) != _rows(self.data[1], self)):
            shapes = ", ".join(str(tuple(part.shape)) for part in self.data)
            raise InputError(f"data must be (inputs, targets) with as many rows each; received {shapes}")
        if self.per_member and not self.tensors:
            raise InputError("per_member needs data as a pair of tensors (M, N, ...)")
        if not self.indexed and (isinstance(self.data, tuple) or not isinstance(self.data, Iterable)):
            raise InputError(
                "data must be a pair of tensors (inputs, targets), a Dataset of such pairs or an iterable of "
                f"batches; received {type(self.data).__name__}"
            )
        if self.indexed and self.length == 0:
            raise InputError("data has no samples")

    def __iter__(self) -> Iterator[Batch]:
        if not self.indexed:
            for u, y in self.data:
                yield Batch(u, y, True, u.shape[0])
            return
        order = self._order()
        for rows in order.split(self.batch_size, dim=-1):
            yield self._fetch(rows)

    def _order(self) -> Tensor:  # (N,) or (M, N)
        if not self.generators:
            return torch.arange(self.length)
        orders = [torch.randperm(self.length, generator=generator) for generator in self.generators]
        return torch.stack(orders) if len(orders) > 1 or self.per_member else orders[0]

    def _fetch(self, rows: Tensor) -> Batch:
        size = rows.shape[-1]
        if self.per_member:
            members = torch.arange(self.data[0].shape[0])[:, None] if rows.dim() == 2 else slice(None)
            u, y = (part[members, rows] for part in self.data)
            return Batch(u, y, False, size, rows=rows)
        if self.tensors:
            u, y = (part[rows] for part in self.data)
        elif rows.dim() == 1:
            u, y = default_collate([self.data[row] for row in rows.tolist()])
        else:
            batches = [default_collate([self.data[row] for row in member]) for member in rows.tolist()]
            u, y = (torch.stack(part) for part in zip(*batches, strict=True))
        return Batch(u, y, rows.dim() == 1, size, rows=rows)


def _rows(part: Tensor, batches: Batches) -> tuple[int, ...]:
    return tuple(part.shape[: 2 if batches.per_member else 1])
