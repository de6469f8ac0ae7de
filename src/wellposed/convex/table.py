"""Matrices of many samples, in memory or, above a limit, in a mapped file."""

import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InputError

GIBIBYTE = 1 << 30


class Tables:
    """Some matrices of the same samples, filled batch by batch.

    Args:
        limit: bytes that may lie in memory, all matrices together; beyond it everything goes to files.
        folder: where files go; None is a temporary folder that lives as long as the matrices.

    Example:
        >>> tables = Tables(limit=1 << 20)
        >>> tables.append(U=torch.ones(2, 3)); tables.append(U=torch.zeros(1, 3))
        >>> tables.finished()["U"].shape
        torch.Size([3, 3])
    """

    def __init__(self, limit: int, folder: str | Path | None = None) -> None:
        self.limit, self.bytes = limit, 0
        self.folder = None if folder is None else Path(folder)
        self.own = False
        self.spilled = False
        self.pieces: dict[str, list[Tensor]] = {}
        self.widths: dict[str, tuple[int, torch.dtype]] = {}
        self.samples = 0

    def append(self, **parts: Tensor) -> None:  # (B, width) each
        """Adds a batch to every matrix."""
        for name, part in parts.items():
            kind = (part.shape[1], part.dtype)
            if self.widths.setdefault(name, kind) != kind:
                raise InputError(
                    f"{name} had {self.widths[name]} columns and type in the first batch and {kind} now; "
                    "a network whose states depend on the batch cannot be recorded"
                )
            self.pieces.setdefault(name, []).append(part.detach().cpu())
            self.bytes += part.numel() * part.element_size()
        self.samples += len(next(iter(parts.values())))
        if self.spilled or self.bytes > self.limit:
            self._spill()

    def _spill(self) -> None:
        """Moves what is in memory to the files."""
        if self.folder is None:
            self.folder, self.own = Path(tempfile.mkdtemp(prefix="wellposed-states-")), True
        mode = "ab" if self.spilled else "wb"
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, pieces in self.pieces.items():
            with open(self.folder / f"{name}.bin", mode) as file:
                for piece in pieces:
                    file.write(piece.contiguous().numpy().data)
            pieces.clear()
        self.spilled = True

    def finished(self) -> dict[str, Tensor]:
        """Returns the matrices; those in files are mapped, not read."""
        if not self.spilled:
            return {name: torch.cat(pieces) for name, pieces in self.pieces.items()}
        assert self.folder is not None
        return {name: self._mapped(self.folder / f"{name}.bin", *kind) for name, kind in self.widths.items()}

    def _mapped(self, place: Path, width: int, dtype: torch.dtype) -> Tensor:
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        return _tensor(np.memmap(place, kind, "r+", shape=(self.samples, width)), place if self.own else None)


def scratch(samples: int, width: int, limit: int) -> Tensor:  # (samples, width)
    """Makes room for numbers in double precision, in a temporary file if they take more than `limit` bytes.

    Example:
        >>> scratch(2, 3, limit=8).shape
        torch.Size([2, 3])
    """
    if 8 * samples * width <= limit:
        return torch.empty(samples, width, dtype=torch.float64)
    place = Path(tempfile.mkdtemp(prefix="wellposed-scratch-")) / "scratch.bin"
    return _tensor(np.memmap(place, np.float64, "w+", shape=(samples, width)), place)


def _tensor(array: np.memmap, owned: Path | None) -> Tensor:
    """Wraps a mapped array, which stays alive with the tensor; an owned file goes with it."""
    if owned is not None:
        weakref.finalize(array, _remove, owned)
    return torch.from_numpy(array)


def _remove(place: Path) -> None:
    """Removes a file, and its folder with the last one."""
    place.unlink(missing_ok=True)
    with suppress(OSError):
        place.parent.rmdir()
