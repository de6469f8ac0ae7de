"""Sequences as layers read them: which dimension is the batch, which is time."""

from collections.abc import Sequence
from dataclasses import dataclass

from wellposed.convert.multiply import picked
from wellposed.convert.signal import Signal, stacked
from wellposed.errors import InputError


@dataclass(frozen=True)
class Layout:
    """How a layer reads its input: N sequences of T steps, batch or time first.

    A sample is a batch of one, so ``(1, T, p)`` with `batch_first` and ``(T, 1, p)`` without are one sequence.
    """

    signal: Signal
    batch_first: bool

    @classmethod
    def of(cls, signal: Signal, batch_first: bool, name: str, alone: bool = False) -> "Layout":
        """Checks the shape; a layer that is the whole network may read ``(T, p)`` with time first."""
        shape = signal.shape
        if len(shape) != 3:
            raise InputError(
                f"{name} reads sequences: as a whole network it takes input_shape (T, features), inside one a "
                f"tensor of three dimensions; received the shape {shape} (a batch of one sample included)"
            )
        if batch_first or shape[1] == 1 or shape[0] > 1:
            return cls(signal, batch_first)
        if alone:
            return cls(signal.reshape((shape[1], 1, shape[2])), False)
        raise InputError(
            f"{name} has batch_first=False and would read the batch of {shape} as time; give it "
            "x.transpose(0, 1), or build it with batch_first=True"
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """N and T."""
        first, second, _ = self.signal.shape
        return (first, second) if self.batch_first else (second, first)

    def steps(self) -> list[Signal]:  # T of (N, p)
        """Cuts the input in time steps."""
        count, times = self.sizes[0], self.signal.places().unbind(1 if self.batch_first else 0)
        return [picked([self.signal], time.reshape(-1)).reshape((count, time.shape[1])) for time in times]

    def joined(self, outputs: Sequence[Sequence[Signal]]) -> Signal:  # D of T of (N, h)
        """Lays the outputs of all directions out as the input was."""
        count, length = self.sizes
        flat = stacked([direction[t] for t in range(length) for direction in outputs])
        order = flat.places().reshape(length, len(outputs), count, -1)
        order = order.permute(2, 0, 1, 3) if self.batch_first else order.permute(0, 2, 1, 3)
        return flat.select(order.flatten(2))

    def rows(self) -> Signal:  # (N, T, p)
        """Returns the input with the batch first."""
        places = self.signal.places()
        return self.signal.select(places if self.batch_first else places.transpose(0, 1))

    def restored(self, signal: Signal) -> Signal:  # (N, T, p)
        """Gives outputs with the batch first the layout of the input."""
        return signal if self.batch_first else signal.select(signal.places().transpose(0, 1))
