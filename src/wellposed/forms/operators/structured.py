"""Selections and convolutions as matrices.

A `Selection` slices, permutes, repeats and pads: a matrix with one entry a row. `Accumulation` is its transpose.
`Convolution` has one, two or three dimensions.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import InputError
from wellposed.forms.operators.base import Operator, Product
from wellposed.forms.operators.plain import Dense, Diagonal, Identity, Zero


@dataclass(frozen=True, eq=False, repr=False)
class Selection(Operator):
    """The matrix whose row i has a one in the column ``index[i]``, and no entry where that is -1.

    The transpose of a selection adds up what it would have picked.

    Example:
        >>> Selection(torch.tensor([2, -1, 0, 0]), 3) @ torch.tensor([[5.0, 6.0, 7.0]])
        tensor([[7., 0., 5., 5.]])
    """

    index: Tensor  # (rows,)
    columns: int
    kind: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.index.dim() != 1 or self.index.is_floating_point():
            raise InputError(
                f"a selection has one index a row, whole numbers; received {self.index.dtype} of shape "
                f"{tuple(self.index.shape)}"
            )
        object.__setattr__(self, "index", self.index.long())
        if len(self.index) and not -1 <= int(self.index.min()) <= int(self.index.max()) < self.columns:
            raise InputError(
                f"a selection from {self.columns} columns has indices from -1 to {self.columns - 1}; received "
                f"{int(self.index.min())} to {int(self.index.max())}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.index), self.columns

    @property
    def like(self) -> Tensor:
        return torch.empty(0, dtype=self.kind, device=self.index.device)

    @cached_property
    def _holes(self) -> bool:
        return bool((self.index < 0).any())

    @cached_property
    def _start(self) -> int | None:
        """Where the selection begins if it is a slice."""
        if self._holes or not len(self.index):
            return None
        start = int(self.index[0])
        run = torch.arange(start, start + len(self.index), device=self.device)
        return start if torch.equal(self.index, run) else None

    def apply(self, x: Tensor) -> Tensor:
        if self._start is not None:
            return x.narrow(1, self._start, len(self.index))
        if not self._holes:
            return x.index_select(1, self.index)
        rows, columns = self._pairs
        return x.new_zeros(len(x), len(self.index)).index_copy(1, rows, x.index_select(1, columns))

    def apply_add(self, start: Tensor, x: Tensor) -> Tensor:
        if not self._holes:
            return start + self.apply(x)
        rows, columns = self._pairs
        return start.index_add(1, rows, x.index_select(1, columns))

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        """The rows that hold an entry, and where."""
        rows = (self.index >= 0).nonzero()[:, 0]
        return rows, self.index[rows]

    @property
    def T(self) -> "Accumulation":
        return Accumulation(self)

    def abs(self) -> "Selection":
        return self

    def scaled(self, factor: float) -> Operator:
        values = torch.full((len(self.index),), factor, dtype=self.kind, device=self.device)
        return Product((Diagonal(values), self))

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = self._pairs
        return rows, columns, torch.ones(len(rows), dtype=self.kind, device=self.device)

    def nonnegative(self) -> bool:
        return True

    @cached_property
    def _distinct(self) -> bool:
        chosen = self.index[self.index >= 0]
        return len(chosen.unique()) == len(chosen)

    def one_entry_per(self) -> tuple[bool, bool]:
        return True, self._distinct

    @property
    def picks(self) -> bool:
        return True

    def try_matmul(self, right: Operator) -> Operator | None:
        if isinstance(right, Selection):
            return self._then(right.index, right.columns)
        if isinstance(right, Accumulation) and right.selection._distinct:
            return self._then(right.selection._inverse(), right.shape[1])
        if isinstance(right, Diagonal) and len(self.index) <= self.columns:
            return Product((Diagonal(self.apply(right.values[None])[0]), self))
        if isinstance(right, Dense) and len(self.index) <= right.shape[0]:
            return Dense(self.apply(right.matrix.mT).mT)
        return None

    def _then(self, index: Tensor, columns: int) -> Operator:
        """Selects from what a selection with that index has picked."""
        index_after = index[self.index.clamp(min=0)] if len(index) else self.index
        index_after = torch.where(self.index < 0, -1, index_after)
        if not bool((index_after >= 0).any()):
            return Zero((len(index_after), columns), self.kind, self.device)
        picked = Selection(index_after, columns, self.kind)
        whole = picked._start == 0 and len(index_after) == columns
        return Identity(columns, self.kind, self.device) if whole else picked

    def _inverse(self) -> Tensor:
        """Returns the row that picks each column, -1 where none does."""
        rows = (self.index >= 0).nonzero()[:, 0]
        return self.index.new_full((self.columns,), -1).index_put((self.index[rows],), rows)

    def try_rmatmul(self, left: Operator) -> Operator | None:
        if isinstance(left, Dense) and self.columns <= len(self.index):
            return Dense(self.T.apply(left.matrix))
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Accumulation(Operator):
    """The transpose of a selection: adds entry i to position ``index[i]``.

    Example:
        >>> Accumulation(Selection(torch.tensor([2, 0, 0]), 3)) @ torch.tensor([[5.0, 6.0, 7.0]])
        tensor([[13.,  0.,  5.]])
    """

    selection: Selection

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.selection.shape
        return columns, rows

    @property
    def like(self) -> Any:
        return self.selection

    def apply(self, x: Tensor) -> Tensor:
        rows = (self.selection.index >= 0).nonzero()[:, 0]
        empty = x.new_zeros(x.shape[0], self.selection.columns)
        return empty.index_add(1, self.selection.index[rows], x[:, rows])

    @property
    def T(self) -> Selection:
        return self.selection

    def abs(self) -> "Accumulation":
        return self

    def scaled(self, factor: float) -> Operator:
        values = torch.full((self.shape[0],), factor, dtype=self.dtype, device=self.device)
        return Product((Diagonal(values), self))

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns, values = self.selection.coordinates()
        return columns, rows, values

    def nonnegative(self) -> bool:
        return True

    def one_entry_per(self) -> tuple[bool, bool]:
        rows, columns = self.selection.one_entry_per()
        return columns, rows

    @property
    def picks(self) -> bool:
        return True

    def try_matmul(self, right: Operator) -> Operator | None:
        if not isinstance(right, Accumulation):
            return None
        product = right.selection.try_matmul(self.selection)
        return None if product is None else product.T

    def try_rmatmul(self, left: Operator) -> Operator | None:
        if isinstance(left, Dense) and self.shape[1] <= left.shape[1]:
            return Dense(self.selection.apply(left.matrix))
        return None


_FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_BACKWARD = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True, eq=False, repr=False)
class Convolution(Operator):
    """The matrix of a convolution over images ``(C, *size)``, laid out row by row (003, section 2.5).

    Args:
        weight: ``(out channels, in channels / groups, *kernel)``.
        input_shape: ``(C, *size)`` with one, two or three dimensions after the channels.
        stride, padding, dilation: one number per dimension; zeros are padded on both sides.
        groups: as in `torch.nn.Conv2d`.
        transposed: whether this is the transposed matrix.

    Example:
        >>> kernel = torch.tensor([[[1.0, 2.0]]])
        >>> Convolution(kernel, (1, 3), (1,), (0,), (1,)).to_dense()
        tensor([[1., 2., 0.],
                [0., 1., 2.]])
    """

    weight: Tensor
    input_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.dimensions not in _FORWARD or self.weight.dim() != self.dimensions + 2:
            raise InputError(
                f"a convolution has a weight (out, in, *kernel) and an input (channels, *size) of one to three "
                f"dimensions; received {tuple(self.weight.shape)} and {self.input_shape}"
            )
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            given = getattr(self, name)
            if len(given) != self.dimensions or min(given) < least:
                kind = "positive number" if least else "number that is not negative"
                raise InputError(
                    f"{name} has one {kind} for each of {self.dimensions} dimensions; received {given}"
                )
        if self.groups < 1 or self.weight.shape[0] % self.groups:
            raise InputError(f"{self.weight.shape[0]} output channels do not split in {self.groups} groups")
        if self.weight.shape[1] * self.groups != self.input_shape[0]:
            raise InputError(
                f"a weight {tuple(self.weight.shape)} in {self.groups} groups takes "
                f"{self.weight.shape[1] * self.groups} channels; received {self.input_shape[0]}"
            )
        if min(self.output_shape) < 1:
            raise InputError(f"an input of shape {self.input_shape} is smaller than the kernel")

    @property
    def dimensions(self) -> int:
        """How many dimensions an image has besides its channels."""
        return len(self.input_shape) - 1

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the image that the (not transposed) convolution returns."""
        sizes = zip(
            self.input_shape[1:], self.weight.shape[2:], self.stride, self.padding, self.dilation, strict=True
        )
        return self.weight.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = math.prod(self.output_shape), math.prod(self.input_shape)
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def like(self) -> Any:
        return self.weight

    def apply(self, x: Tensor) -> Tensor:
        if not self.transposed:
            image = x.reshape(x.shape[0], *self.input_shape)
            result = _FORWARD[self.dimensions](
                image, self.weight, None, self.stride, self.padding, self.dilation, self.groups
            )
            return result.flatten(1)
        image = x.reshape(x.shape[0], *self.output_shape)
        sizes = zip(
            self.input_shape[1:], self.weight.shape[2:], self.stride, self.padding, self.dilation, strict=True
        )
        unread = [(n + 2 * p - d * (k - 1) - 1) % s for n, k, s, p, d in sizes]  # rows and columns at the far end
        result = _BACKWARD[self.dimensions](
            image, self.weight, None, self.stride, self.padding, unread, self.groups, self.dilation
        )
        return result.flatten(1)

    @property
    def T(self) -> "Convolution":
        return replace(self, transposed=not self.transposed)

    def abs(self) -> "Convolution":
        return replace(self, weight=self.weight.abs())

    def scaled(self, factor: float) -> "Convolution":
        return replace(self, weight=self.weight * factor)

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        channels, positions = self._windows()  # (groups, in/groups), (windows, kernel), -1 in the padding
        out = self.weight.shape[0]
        windows, kernel = positions.shape
        within = math.prod(self.input_shape[1:])
        per_group = out // self.groups
        # every output channel and window reads every input channel of its group at every position of the kernel
        columns = channels.repeat_interleave(per_group, 0)[:, None, :, None] * within + positions[None, :, None, :]
        rows = torch.arange(out * windows, device=self.device).view(out, windows, 1, 1).expand_as(columns)
        values = self.weight.reshape(out, 1, -1, kernel).expand(columns.shape)
        inside = (positions >= 0)[None, :, None, :].expand_as(columns)
        triple = rows[inside], columns[inside], values[inside]
        return (triple[1], triple[0], triple[2]) if self.transposed else triple

    def _windows(self) -> tuple[Tensor, Tensor]:
        """Returns the channels of each group and the flat places that each window reads."""
        size = self.input_shape[1:]
        places = torch.arange(math.prod(size), device=self.device).view(size)
        pad = [width for p in reversed(self.padding) for width in (p, p)]
        places = F.pad(places, pad, value=-1)
        for k, (extent, s, d) in enumerate(zip(self.weight.shape[2:], self.stride, self.dilation, strict=True)):
            places = places.unfold(k, d * (extent - 1) + 1, s)[..., ::d]
        windows = math.prod(self.output_shape[1:])
        channels = torch.arange(self.input_shape[0], device=self.device).view(self.groups, -1)
        return channels, places.reshape(windows, -1)

    def nonzeros(self) -> int:
        used = replace(self, weight=(self.weight != 0).to(torch.float64), transposed=False)
        return int(used.row_sums().sum())

    def band(self) -> tuple[int, int] | None:
        channels, positions = self._windows()
        windows, kernel = positions.shape
        shift = positions - torch.arange(windows, device=self.device)[:, None]  # of one channel to another
        far = math.prod(self.shape)
        low = shift.masked_fill(positions < 0, far).amin(0)  # (kernel,)
        high = shift.masked_fill(positions < 0, -far).amax(0)
        out = torch.arange(self.weight.shape[0], device=self.device) * windows
        into = channels.repeat_interleave(len(out) // self.groups, 0) * math.prod(self.input_shape[1:])
        offset = (into - out[:, None])[:, :, None].expand(*into.shape, kernel)
        used = (self.weight != 0).reshape(*into.shape, kernel) & (low <= high)
        if not bool(used.any()):
            return None
        band = int((offset + low)[used].min()), int((offset + high)[used].max())
        return (-band[1], -band[0]) if self.transposed else band

    def nonnegative(self) -> bool:
        return bool((self.weight >= 0).all())

    def try_rmatmul(self, left: Operator) -> Operator | None:
        """Takes a factor per output channel into the weight, as batch normalisation has it."""
        if not isinstance(left, Diagonal) or self.transposed:
            return None
        factors = left.values.reshape(self.weight.shape[0], -1)
        if not torch.equal(factors, factors[:, :1].expand_as(factors)):
            return None
        return replace(self, weight=self.weight * factors[:, 0].view(-1, *(1,) * (self.weight.dim() - 1)))
