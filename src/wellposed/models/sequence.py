"""Batches of sequences, padded or packed, seen in one layout: time after time, longest sequences first."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from wellposed.errors import InputError

Input = Tensor | PackedSequence


@dataclass(frozen=True)
class Sequences:
    """Sequences in the layout of a `PackedSequence`, and how to give results back as they came."""

    data: Tensor  # (N, p): all elements, time after time
    sizes: list[int]  # sequences that are still running at each time
    kind: str  # "packed", "batch", "padded" (a batch with lengths) or "single"
    batch_first: bool = True
    order: tuple[Tensor | None, Tensor | None] = (None, None)  # of the samples: sorted, and back

    @classmethod
    def of(cls, value: Input, width: int, batch_first: bool, lengths: Tensor | None = None) -> "Sequences":
        """Checks what a user has given and brings it into the layout."""
        if isinstance(value, PackedSequence):
            _require_width(value.data, width, "packed data (N, {})")
            if lengths is not None:
                raise InputError("a PackedSequence knows its lengths; leave out lengths")
            return cls._packed(value, "packed", batch_first)
        layout = "(B, T, {}) or (T, {})" if batch_first else "(T, B, {}) or (T, {})"
        if not isinstance(value, Tensor) or value.dim() not in (2, 3):
            received = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"input must have the shape {layout.format(width, width)}; received {received}")
        _require_width(value, width, layout)
        if value.dim() == 2:
            return cls._single(value, lengths)
        timewise = value.transpose(0, 1) if batch_first else value
        _require_elements(timewise)
        if lengths is not None:
            checked = _check_lengths(lengths, timewise.shape[1], timewise.shape[0])
            packed = pack_padded_sequence(timewise, checked, enforce_sorted=False)
            return cls._packed(packed, "padded", batch_first)
        return cls(timewise.flatten(0, 1), [timewise.shape[1]] * timewise.shape[0], "batch", batch_first)

    @classmethod
    def _single(cls, value: Tensor, lengths: Tensor | None) -> "Sequences":
        if lengths is not None:
            raise InputError(
                "lengths go with a batch of sequences; received one sequence without a batch dimension"
            )
        _require_elements(value[:, None])
        return cls(value, [1] * value.shape[0], "single")

    @classmethod
    def _packed(cls, packed: PackedSequence, kind: str, batch_first: bool) -> "Sequences":
        order = (packed.sorted_indices, packed.unsorted_indices)
        return cls(packed.data, packed.batch_sizes.tolist(), kind, batch_first, order)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.sizes[0]

    def sorted(self, state: Tensor) -> Tensor:  # (K, B, h)
        """Brings per-sequence values into the order of the layout."""
        return state if self.order[0] is None else state.index_select(1, self.order[0])

    def restored(self, state: Tensor) -> Tensor:  # (K, B, h)
        """Brings per-sequence values back into the user's order."""
        state = state if self.order[1] is None else state.index_select(1, self.order[1])
        return state[:, 0] if self.kind == "single" else state

    def give_back(self, data: Tensor) -> Input:
        """Returns values per element in the form in which the sequences came."""
        if self.kind == "packed":
            return self._as_packed(data)
        if self.kind == "single":
            return data
        return self.padded(data) if self.batch_first else self.padded(data).transpose(0, 1)

    def padded(self, data: Tensor) -> Tensor:  # (B, T, ...)
        """Returns values per element batch-first, zero beyond the end of a sequence."""
        if self.kind in ("packed", "padded"):
            return pad_packed_sequence(self._as_packed(data), batch_first=True)[0]
        return data.unflatten(0, (len(self.sizes), self.batch)).transpose(0, 1)

    def present(self) -> Tensor:  # (B, T)
        """Marks the elements that belong to a sequence."""
        return self.padded(torch.ones(self.data.shape[0], dtype=torch.bool, device=self.data.device))

    def _as_packed(self, data: Tensor) -> PackedSequence:
        return PackedSequence(data, torch.tensor(self.sizes), *self.order)


def _require_width(value: Tensor, width: int, layout: str) -> None:
    if value.shape[-1] != width:
        shape = layout.format(width, width)
        raise InputError(
            f"input must have the shape {shape} with input_size={width}; received {tuple(value.shape)}"
        )


def _require_elements(timewise: Tensor) -> None:
    if timewise.shape[0] == 0:
        raise InputError(f"sequences must have at least one element; received length 0, {tuple(timewise.shape)}")


def _check_lengths(lengths: Tensor, batch: int, longest: int) -> Tensor:
    lengths = torch.as_tensor(lengths).cpu()
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise InputError(
            f"lengths must be {batch} integers, one a sequence; received {lengths.dtype} {tuple(lengths.shape)}"
        )
    if batch and (int(lengths.min()) < 1 or int(lengths.max()) > longest):
        raise InputError(
            f"lengths must lie between 1 and the padded length {longest}; "
            f"received values from {int(lengths.min())} to {int(lengths.max())}"
        )
    return lengths
