"""What layers with shared rows read and give while a network runs, at some positions of some samples."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.convex.shared_layer import SharedLayer, given_by_rows, positions, read_by_rows
from wellposed.errors import InputError

Valid = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class RowData:
    """Samples of the rows of one layer.

    Args:
        parts: what they read, one part an input, ``(m, d_i)``.
        targets: what they give, ``(m, r)``.
    """

    parts: tuple[Tensor, ...]
    targets: Tensor


class _EnoughError(Exception):
    """Nothing after this layer is of interest."""


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Chooses positions at random, the same ones in every network that is run over the same batches.

    Args:
        samples: positions of a layer, over all batches together.
        seed: of the choice.
        valid: marks the positions ``(B, P)`` of a batch that count, e.g. those that are not padding.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
        >>> found = Gathering(samples=10).run(network, {"0": network[0]}, [torch.zeros(4, 1, 5, 5)])
        >>> found["0"].parts[0].shape, found["0"].targets.shape
        (torch.Size([10, 9]), torch.Size([10, 2]))
    """

    samples: int = 16384
    seed: int = 0
    valid: Valid | None = None

    def run(
        self, network: nn.Module, layers: Mapping[str, SharedLayer], batches: Sequence[Tensor]
    ) -> dict[str, RowData]:
        """Runs a network until the last of some layers has been called; they come in the order of their calls."""
        pieces: dict[str, list[RowData]] = {}
        quota = -(-self.samples // max(1, len(batches)))
        with ExitStack() as stack, torch.no_grad():
            log = _Log(pieces, len(layers))
            for number, (name, layer) in enumerate(layers.items()):
                hook = self._hook(log, name, _place_of(name, number), quota)
                stack.callback(layer.register_forward_hook(hook).remove)
            for index, u in enumerate(batches):
                log.begin(index, None if self.valid is None else self.valid(u))
                try:
                    network(u)
                except _EnoughError:
                    continue
        missing = [name for name in layers if name not in pieces]
        if missing:
            raise InputError(f"the network never calls {', '.join(missing)}; leave it out of the layers to fit")
        return {name: _joined(found) for name, found in pieces.items()}

    def _hook(self, log: "_Log", name: str, place: int, quota: int) -> Callable[..., None]:
        def hook(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + place) * 1009 + log.batch)
            places = _sampled_positions(positions(layer, output), log.valid, generator, quota)
            log.add(name, RowData(read_by_rows(layer, inputs, places), given_by_rows(layer, output, places)))

        return hook


class _Log:
    """Keeps what hooks see, and ends a run when every layer has been seen."""

    def __init__(self, pieces: dict[str, list[RowData]], layers: int) -> None:
        self.pieces, self.layers, self.batch = pieces, layers, 0
        self.valid: Tensor | None = None
        self.seen: set[str] = set()

    def begin(self, batch: int, valid: Tensor | None) -> None:
        self.batch, self.valid, self.seen = batch, valid, set()

    def add(self, name: str, found: RowData) -> None:
        if name in self.seen:
            raise InputError(f"{name} is called twice in one pass; give every call a layer of its own")
        self.pieces.setdefault(name, []).append(found)
        self.seen.add(name)
        if len(self.seen) == self.layers:
            raise _EnoughError


def _place_of(name: str, number: int) -> int:
    """A number that tells layers apart by name, so that a layer alone has the positions it has among others."""
    return sum(ord(letter) * 31**k for k, letter in enumerate(name)) % 1_000_003 if name else number


def _sampled_positions(
    size: tuple[int, int], valid: Tensor | None, generator: torch.Generator, quota: int
) -> Tensor:
    count = size[0] * size[1]
    if valid is None:
        return torch.randperm(count, generator=generator)[:quota]
    if valid.numel() != count:
        raise InputError(f"valid must mark {size[0]} x {size[1]} positions; received {tuple(valid.shape)}")
    places = torch.nonzero(valid.flatten())[:, 0]
    return places[torch.randperm(len(places), generator=generator)[:quota]]


def _joined(pieces: list[RowData]) -> RowData:
    parts = zip(*(piece.parts for piece in pieces), strict=True)
    return RowData(tuple(torch.cat(part) for part in parts), torch.cat([piece.targets for piece in pieces]))
