"""Mazes: images of spanning trees with a start and an end, and the path between them (004 section E.4)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import InputError
from wellposed.tasks.easy_to_hard import load_mazes
from wellposed.tasks.prefix_sums import Source, decided
from wellposed.tasks.task import Pair, Point, Task

SIZES = (9, 13, 17, 21, 25, 27, 29, 31, 33, 35, 37, 59)  # 004 section E.4
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # rows and columns to the neighbours of a cell
START, END = (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)  # green and red


@dataclass(frozen=True)
class Mazes(Task):
    """Marks the path from the start of a maze to its end, pixel by pixel.

    A maze of size s is a grid of ``c = (s + 1) / 2`` cells a side, joined by a random spanning tree (depth-first
    from the start, as in the published set), in an image of ``2 c + 1`` squares a side: corridors white, walls
    black, the start green and the end red. With ``pixels=2`` every square is two pixels wide and a border of one
    is added, which makes the published ``2 s + 6``. Targets are 0 or 1, predictions logits, of one channel.

    Args:
        size: of the training mazes, odd.
        samples, test_samples: how many.
        pixels: width of a square.
        points: sizes of the tests.
        source: "published" takes the mazes of the easy-to-hard data set, where they are on this machine.

    Example:
        >>> u, y = Mazes(samples=4).train(seed=0)
        >>> u.shape, y.shape, bool((u.amax(1, keepdim=True) >= y).all())
        (torch.Size([4, 3, 24, 24]), torch.Size([4, 1, 24, 24]), True)
    """

    size: int = 9
    samples: int = 50_000
    test_samples: int = 1_000
    pixels: int = 2
    points: tuple[Point, ...] = SIZES
    source: Source = "generated"
    name: ClassVar[str] = "mazes"

    def __post_init__(self) -> None:
        _cells(self.size)
        if self.pixels < 1 or self.source not in ("generated", "published"):
            raise InputError(
                "a square is at least one pixel wide, and a maze 'generated' or 'published'; received "
                f"{self.pixels} and {self.source!r}"
            )
        if self.source == "published" and self.pixels != 2:
            raise InputError(f"the published mazes have squares of 2 pixels; received pixels={self.pixels}")

    def train(self, seed: int) -> Pair:
        return self._draw(self.size, self.samples, seed, "train")

    def validation(self, seed: int) -> Pair:
        return self._draw(self.size, self.test_samples, seed, "validation")

    def test(self, seed: int, at: Point) -> Pair:
        return self._draw(int(self.require_point(at)), self.test_samples, seed, "test")

    @staticmethod
    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(prediction, target)

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the share of pixels that are right, and of mazes that are right everywhere.

        ``without_path`` is the accuracy of the answer that there is no path at all.
        """
        return decided(prediction, target) | {"without_path": 1 - float(target.double().mean())}

    def _draw(self, size: int, samples: int, seed: int, split: str) -> Pair:
        if self.source == "published":
            return self._published(size, samples, split)
        u, y = draw_mazes(samples, size, self.generator(seed, split, size))
        return tuple(_enlarged(part, self.pixels) for part in (u, y[:, None]))  # type: ignore[return-value]

    def _published(self, size: int, samples: int, split: str) -> Pair:
        """Takes published mazes; those of the validation come after those of the training."""
        u, y = load_mazes(size, "test" if split == "test" else "train")
        first = self.samples if split == "validation" else 0
        return u[first : first + samples], y[first : first + samples, None]


def draw_mazes(samples: int, size: int, generator: torch.Generator) -> Pair:
    """Draws mazes with one pixel a square: images ``(N, 3, side, side)`` and paths ``(N, side, side)``.

    All mazes grow at once, each by one step of a depth-first search that begins at its start: to a random
    neighbour that was not visited yet, else back to the cell from which this one was reached.
    """
    count = _cells(size)
    rows, cells = torch.arange(samples), count**2
    start = torch.randint(cells, (samples,), generator=generator)
    end = (start + 1 + torch.randint(cells - 1, (samples,), generator=generator)) % cells
    parent = torch.full((samples, cells), -1)
    parent[rows, start] = start
    here = start
    for _ in range(2 * cells - 2):  # every cell but the start is entered once and left once
        following, found = _unvisited(here, parent, count, generator)
        parent[rows[found], following[found]] = here[found]
        here = torch.where(found, following, parent[rows, here])
    open_ = torch.zeros(samples, 2 * count + 1, 2 * count + 1)
    for cell in range(cells):
        _carve(open_, torch.full_like(start, cell), parent[:, cell], count)
    u = open_[:, None].repeat(1, 3, 1, 1)
    for place, colour in ((start, START), (end, END)):
        u[rows, :, 2 * (place // count) + 1, 2 * (place % count) + 1] = torch.tensor(colour)
    return u, _path(end, parent, count)


def _cells(size: int) -> int:
    if size < 3 or size % 2 == 0:
        raise InputError(f"the size of a maze is odd and at least 3; received {size}")
    return (size + 1) // 2


def _unvisited(here: Tensor, parent: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Chooses a random neighbour without parent for every maze, and tells where there is one."""
    place = torch.stack([here // count, here % count], 1)[:, None] + torch.tensor(STEPS)  # (N, 4, 2)
    inside = ((place >= 0) & (place < count)).all(2)
    neighbours = (place[..., 0] * count + place[..., 1]).clamp(0, count**2 - 1)
    free = inside & (parent.gather(1, neighbours) < 0)
    lots = torch.rand(free.shape, generator=generator).masked_fill(~free, -1)
    return neighbours.gather(1, lots.argmax(1, keepdim=True))[:, 0], free.any(1)


def _carve(image: Tensor, cell: Tensor, parent: Tensor, count: int) -> None:
    """Opens a cell, its parent and the square between them, in every maze."""
    rows = torch.arange(len(image))
    (y, x), (above, left) = ((part // count, part % count) for part in (cell, parent))
    image[rows, 2 * y + 1, 2 * x + 1] = 1
    image[rows, y + above + 1, x + left + 1] = 1
    image[rows, 2 * above + 1, 2 * left + 1] = 1


def _path(end: Tensor, parent: Tensor, count: int) -> Tensor:  # (N, side, side)
    """Goes from the end to the start, from parent to parent."""
    image = torch.zeros(len(end), 2 * count + 1, 2 * count + 1)
    rows, here = torch.arange(len(end)), end
    while True:
        following = parent[rows, here]
        _carve(image, here, following, count)
        if bool((following == here).all()):
            return image
        here = following


def _enlarged(image: Tensor, pixels: int) -> Tensor:  # (N, C, side, side)
    """Makes squares of several pixels, and adds a border of one less."""
    wide = image.repeat_interleave(pixels, -1).repeat_interleave(pixels, -2)
    return F.pad(wide, (pixels - 1,) * 4)
