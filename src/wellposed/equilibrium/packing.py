"""A state that is a tensor of any shape, or a tuple of them, seen as one ``(B, n)`` tensor."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InputError, MapError

State = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Packing:
    """Remembers the shapes of a state so that it can be flattened and restored.

    Example:
        >>> packing = Packing.of((torch.zeros(5, 2, 3), torch.zeros(5)))
        >>> packing.pack((torch.zeros(5, 2, 3), torch.ones(5))).shape
        torch.Size([5, 7])
    """

    shapes: tuple[tuple[int, ...], ...]  # without the batch dimension
    single: bool
    batch: int
    dtype: torch.dtype

    @classmethod
    def of(cls, state: State) -> "Packing":
        """Reads shapes off a state and checks that it can be packed."""
        single = isinstance(state, Tensor)
        parts: tuple[Tensor, ...] = (state,) if isinstance(state, Tensor) else tuple(state)
        if not parts or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
            raise InputError(f"a state is a tensor or a tuple of tensors; received {kinds}")
        for part in parts:
            if part.dim() == 0 or not part.is_floating_point():
                raise InputError(
                    f"a state is batch-first and floating point; received shape {tuple(part.shape)}, {part.dtype}"
                )
            if part.shape[0] != parts[0].shape[0] or part.dtype != parts[0].dtype:
                raise InputError(
                    "all parts of a state share batch size and dtype; received "
                    + ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
                )
        return cls(tuple(tuple(p.shape[1:]) for p in parts), single, parts[0].shape[0], parts[0].dtype)

    def pack(self, state: State) -> Tensor:  # (B, n)
        """Flattens a state."""
        parts = (state,) if isinstance(state, Tensor) else state
        flat = [part.reshape(part.shape[0], math.prod(part.shape[1:])) for part in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)

    def unpack(self, x: Tensor) -> State:
        """Restores the shapes of a packed state."""
        if self.single:
            return x.reshape(x.shape[0], *self.shapes[0])
        pieces = x.split([math.prod(shape) for shape in self.shapes], dim=1)
        return tuple(p.reshape(x.shape[0], *shape) for p, shape in zip(pieces, self.shapes, strict=True))

    def cast(self, state: State) -> State:
        """Converts a state to the dtype that is packed."""
        if isinstance(state, Tensor):
            return state.to(self.dtype)
        return tuple(part.to(self.dtype) if isinstance(part, Tensor) else part for part in state)

    def pack_result(self, result: State, batch: int | None = None) -> Tensor:
        """Flattens what a map returned, after checking that it has the form of the state."""
        parts = (result,) if isinstance(result, Tensor) else result
        rows = self.batch if batch is None else batch
        expected = [(rows, *shape) for shape in self.shapes]
        if not isinstance(parts, tuple | list) or not all(isinstance(part, Tensor) for part in parts):
            raise MapError(f"f must return a tensor or a tuple of tensors; received {type(result).__name__}")
        if self.single != isinstance(result, Tensor) or [tuple(p.shape) for p in parts] != expected:
            raise MapError(
                f"f must return the shape of its state, {expected}; received {[tuple(p.shape) for p in parts]}"
            )
        if any(part.dtype != self.dtype for part in parts):
            raise MapError(
                f"f must return the dtype of its state, {self.dtype}; received {[p.dtype for p in parts]}; "
                "cast inside f or start from an x0 of that dtype"
            )
        return self.pack(tuple(parts))
