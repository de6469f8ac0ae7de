"""The pattern of a block matrix as a picture: how much each spot holds, block by block."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import torch

from wellposed.forms.entries import entries
from wellposed.forms.links import COLOURS, Link, Role, Wiring

Scale = Literal["auto", "linear", "sqrt", "log"]
SMALLEST = 0.014  # share of the picture that a block has at least
FAINTEST = 0.3  # strength of the colour where a spot has the smallest of entries
SPARSE = 0.05  # share of filled spots up to which they are drawn wider
SCALES = {"linear": float, "sqrt": math.sqrt, "log": lambda size: math.log2(1 + size)}


@dataclass(frozen=True)
class Axis:
    """One side of the picture: blocks of states, and after a gap those of inputs or outputs."""

    edges: tuple[tuple[int, int], ...]  # first and last pixel of every block
    states: int  # how many of the blocks are states

    @property
    def length(self) -> int:
        """How many pixels it has."""
        return self.edges[-1][1]

    @property
    def halves(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last pixel of the states, and of the rest."""
        cut = self.states
        return (self.edges[0][0], self.edges[cut - 1][1]), (self.edges[cut][0], self.edges[-1][1])

    def lines(self, low: int, high: int) -> list[int]:
        """Returns where blocks meet strictly between two pixels."""
        return sorted({edge for pair in self.edges for edge in pair if low < edge < high})

    def ticks(self, labels: Sequence[str], room: float) -> tuple[list[float], list[str]]:
        """Places the names of blocks, leaving out those that would be closer than `room` to the one before."""
        places: list[float] = []
        names: list[str] = []
        for (start, end), label in zip(self.edges, labels, strict=True):
            middle = (start + end) / 2
            if not places or middle - places[-1] >= room:
                places.append(middle)
                names.append(label if len(label) <= 28 else f"...{label[-25:]}")
        return places, names


@dataclass(frozen=True)
class Raster:
    """A picture of [[A, B], [C, D]] and where its blocks are."""

    pixels: np.ndarray  # (height, width, 3) of bytes
    rows: Axis
    columns: Axis
    roles: tuple[Role, ...]  # those that occur

    def box(self, link: Link) -> tuple[int, int, int, int]:
        """Returns left, right, top and bottom of a block."""
        row = link.row + (self.rows.states if link.name in "CD" else 0)
        column = link.column + (self.columns.states if link.name in "BD" else 0)
        return *self.columns.edges[column], *self.rows.edges[row]

    @property
    def frames(self) -> list[tuple[int, int, int, int]]:
        """Left, right, top and bottom of A, B, C and D."""
        return [(*across, *down) for down in self.rows.halves for across in self.columns.halves]


def raster(wiring: Wiring, pixels: int, scale: Scale) -> Raster:
    """Draws every non-zero block at its place.

    Args:
        wiring: of the form.
        pixels: on the side of A.
        scale: how the size of a block grows with its number of states.
    """
    states, inputs, outputs = wiring.sizes
    if scale == "auto":
        smallest = min(size for size in (*states, *inputs, *outputs, 1 << 62) if size)
        scale = "linear" if smallest >= 2 * SMALLEST * sum(states) else "sqrt"
    rows, columns = (_block_axis(states, others, pixels, scale) for others in (outputs, inputs))
    canvas = np.ones((rows.length, columns.length, 3), dtype=np.float32)
    picture = Raster(canvas, rows, columns, ())
    seen: set[Role] = set()
    for link in wiring.links:
        left, right, top, bottom = picture.box(link)
        forward, feedback = density(link, bottom - top, right - left)
        for sums, role in ((forward, _forward_role(link)), (feedback, "feedback")):
            if sums.any():
                seen.add(role)
                _paint(canvas[top:bottom, left:right], sums, role)
    roles = tuple(role for role in COLOURS if role in seen)
    return Raster((255 * canvas).round().astype(np.uint8), rows, columns, roles)


def _forward_role(link: Link) -> Role:
    return "weights" if link.role == "feedback" else link.role


def _block_axis(states: Sequence[int], others: Sequence[int], pixels: int, scale: Scale) -> Axis:
    """Gives every block its share of the pixels; the others are on the scale of the states."""
    weight = SCALES[scale]
    shares = [weight(size) for size in states]
    total = sum(shares) or sum(map(weight, others)) or 1.0
    least = max(4, round(SMALLEST * pixels)) / pixels
    wide = [max(least, share / total) for share in shares]
    factor = min(1.0, 1 / sum(wide))
    rest = [min(0.4, max(least, weight(size) / total)) for size in others]
    widths = [max(2, round(pixels * share * factor)) for share in (*wide, *rest)]
    gap = max(6, pixels // 100)
    ends = list(accumulate(widths))
    moved = [(end - width, end) for end, width in zip(ends, widths, strict=True)]
    count = len(states)
    return Axis((*moved[:count], *((a + gap, b + gap) for a, b in moved[count:])), count)


def density(link: Link, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Adds up absolute values at each of ``(height, width)`` spots, of entries that do not and that do feed back.

    A block with fewer entries than spots has every entry on several of them.
    """
    n, m = link.operator.shape
    down, across = min(n, height), min(m, width)
    sums = torch.zeros(2, down * across, dtype=torch.float64)
    for rows, columns, values in entries(link.operator):
        spot = (rows * down // n) * across + columns * across // m
        spot += _feeds_back(link, columns - rows) * (down * across)
        size = values.abs().nan_to_num(1.0, posinf=1.0).double()
        sums += torch.bincount(spot.cpu(), size.cpu(), minlength=2 * down * across).view(2, -1)
    shares = sums.view(2, down, across).numpy()
    stretch = np.ix_(np.arange(height) * down // height, np.arange(width) * across // width)
    forward, feedback = (_thickened(share) if (down, across) < (n, m) else share for share in shares)
    return forward[stretch], feedback[stretch]


def _thickened(share: np.ndarray) -> np.ndarray:
    """Makes lines and dots two spots wide where most spots are empty."""
    if np.count_nonzero(share) > SPARSE * share.size:
        return share
    wide = np.pad(share, ((1, 0), (1, 0)))
    return np.maximum.reduce([wide[1:, 1:], wide[:-1, 1:], wide[1:, :-1], wide[:-1, :-1]])


def _feeds_back(link: Link, offset: torch.Tensor) -> torch.Tensor:
    if link.feedback in ("none", "all"):
        return torch.full_like(offset, link.feedback == "all", dtype=torch.bool)
    return offset <= 0 if link.feedback == "lower" else offset >= 0


def _paint(place: np.ndarray, sums: np.ndarray, role: Role) -> None:
    """Mixes a colour into a block, more of it where entries are many or large."""
    share = np.sqrt(sums / sums.max())
    strength = np.where(sums > 0, FAINTEST + (1 - FAINTEST) * share, 0.0)[..., None].astype(np.float32)
    colour = np.array([int(COLOURS[role][k : k + 2], 16) / 255 for k in (1, 3, 5)], dtype=np.float32)
    place += strength * (colour - place)
