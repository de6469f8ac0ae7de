"""Tasks that are learnt on small inputs and tested on larger ones (004 section E.4).

`load_prefix_sums` and `load_mazes` read the files of the easy-to-hard data sets (Schwarzschild et al. 2021) where
they are on this machine. `PrefixSums` are sums of bits modulo two, learnt on short strings and tested on long
ones. `Mazes` are images of spanning trees with a start and an end, and the path between them. `MatrixAddition` is
the sum of two matrices, learnt at one scale and tested at others.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.data.cache import MissingDataError, data_folder
from wellposed.errors import FileFormatError, InputError
from wellposed.models.io.archives import read_torch
from wellposed.models.io.arrays import read_arrays
from wellposed_lab.tasks.task import Pair, Point, Task

PREFIX_SUMS = "prefix_sums_data"
SPLITS = ("train", "test")


def load_prefix_sums(length: int, folder: str | os.PathLike[str] | None = None) -> Pair:
    """Reads bit strings and their prefix sums modulo two, ``(N, length)`` each, of zeros and ones.

    Args:
        length: of the strings; published are 16 to 64, 72, 128, 256 and 512.
        folder: which holds ``prefix_sums_data/len_32/32_data.pth`` and so on; $WELLPOSED_DATA if None.

    Raises:
        MissingDataError: a file is not there.
        FileFormatError: a file holds something else.
    """
    place = _folder(folder) / PREFIX_SUMS / f"len_{length}"
    bits, targets = (_tensor(place / f"{length}_{part}.pth") for part in ("data", "targets"))
    for name, part in (("data", bits), ("targets", targets)):
        if part.dim() != 2 or part.shape != bits.shape or part.shape[1] != length:
            raise FileFormatError(
                f"{name} of '{place}' must have the shape (N, {length}); received {tuple(part.shape)}"
            )
        _require_bits(part, place)
    return bits.float(), targets.float()


def load_mazes(size: int, split: str = "test", folder: str | os.PathLike[str] | None = None) -> Pair:
    """Reads mazes as images ``(N, 3, side, side)`` and the masks of their paths ``(N, side, side)``.

    Args:
        size: as in the name of the folder, odd; the images then have the side ``2 size + 6``.
        split: "train" (of size 9) or "test".
        folder: which holds ``maze_data_train_9/inputs.npy`` and ``solutions.npy``; $WELLPOSED_DATA if None.

    Raises:
        MissingDataError: a file is not there.
        FileFormatError: a file holds something else.
    """
    if split not in SPLITS:
        raise InputError(f"split must be one of {', '.join(SPLITS)}; received {split!r}")
    place = _folder(folder) / f"maze_data_{split}_{size}"
    images, paths = (_array(place / f"{part}.npy") for part in ("inputs", "solutions"))
    side = 2 * size + 6
    if images.shape[1:] != (3, side, side) or paths.shape != (len(images), side, side):
        raise FileFormatError(
            f"'{place}' must hold inputs (N, 3, {side}, {side}) and solutions (N, {side}, {side}); received "
            f"{tuple(images.shape)} and {tuple(paths.shape)}"
        )
    _require_bits(images, place)
    _require_bits(paths, place)
    return images.float(), paths.float()


def _folder(folder: str | os.PathLike[str] | None) -> Path:
    found = data_folder() if folder is None else Path(folder)
    if found is None:
        raise MissingDataError(
            "no folder was given for the easy-to-hard data; set WELLPOSED_DATA to the one that holds "
            f"{PREFIX_SUMS!r} or 'maze_data_train_9', or use the generated samples, source='generated'"
        )
    return found


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(
            f"'{path}' is not there; unpack the archive of the easy-to-hard data set next to it, or use the "
            "generated samples, source='generated'"
        )
    return path


def _tensor(path: Path) -> Tensor:
    """Reads a file of torch that holds one tensor; the restricted reader builds no other objects."""
    try:
        with open(_existing(path), "rb") as file:
            found = read_torch(file)
    except MissingDataError:
        raise
    except Exception as error:  # a damaged or hostile file can raise whatever it likes
        raise FileFormatError(f"'{path}' is no tensor that torch can read safely: {error}") from error
    if not isinstance(found, Tensor):
        raise FileFormatError(f"'{path}' must hold one tensor; received {type(found).__name__}")
    return found


def _array(path: Path) -> Tensor:
    """Reads a .npy file of numbers; objects, which would need a pickle, are refused."""
    try:
        found = read_arrays(_existing(path)).get("")
    except MissingDataError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise FileFormatError(f"'{path}' is no .npy file of numbers: {error}") from error
    if found is None or found.dtype.kind not in "fiub" or found.ndim < 1:
        raise FileFormatError(f"'{path}' must hold an array of numbers; received {getattr(found, 'dtype', found)}")
    return torch.from_numpy(found.astype(np.float32))


def _require_bits(part: Tensor, place: Path) -> None:
    if part.numel() == 0 or not bool(((part == 0) | (part == 1)).all()):
        raise FileFormatError(f"'{place}' must hold zeros and ones; received something else, or nothing")


LENGTHS = (16, 18, 20, 24, 32, 64, 72, 128, 256, 512)  # 004 section E.4
Source = Literal["generated", "published"]


@dataclass(frozen=True)
class PrefixSums(Task):
    """Tells for every bit of a string whether the bits up to it have an odd sum.

    A bit of the input is -1 or 1, a target 0 or 1; what is predicted are logits. Every answer depends on all bits
    to its left, so that a network which looks at a few neighbours must take as many steps as the string is long.

    Args:
        length: of the training strings.
        samples, test_samples: how many; of the published strings the first ones, those of the tests after those of
            the training.
        points: lengths of the tests.
        source: "published" takes the strings of the easy-to-hard data set, where they are on this machine.

    Example:
        >>> u, y = PrefixSums(length=5, samples=3).train(seed=0)
        >>> u.shape, bool(torch.equal(y, (u > 0).cumsum(-1) % 2))
        (torch.Size([3, 1, 5]), True)
    """

    length: int = 32
    samples: int = 10_000
    test_samples: int = 1_000
    points: tuple[Point, ...] = LENGTHS
    source: Source = "generated"
    name: ClassVar[str] = "prefix-sums"

    def __post_init__(self) -> None:
        if self.length < 1 or self.source not in ("generated", "published"):
            raise InputError(
                "a string has at least one bit, and is 'generated' or 'published'; received "
                f"{self.length} and {self.source!r}"
            )

    def train(self, seed: int) -> Pair:
        return self._draw(self.length, self.samples, seed, "train")

    def validation(self, seed: int) -> Pair:
        return self._draw(self.length, self.test_samples, seed, "validation")

    def test(self, seed: int, at: Point) -> Pair:
        return self._draw(int(self.require_point(at)), self.test_samples, seed, "test")

    @staticmethod
    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(prediction, target)

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the share of bits that are right, and of strings that are right in all bits."""
        return decided(prediction, target)

    def _draw(self, length: int, samples: int, seed: int, split: str) -> Pair:
        if self.source == "published":
            bits, targets = load_prefix_sums(length)
            first = 0 if split == "train" or length != self.length else self.samples
            bits, targets = bits[first : first + samples], targets[first : first + samples]
        else:
            generator = self.generator(seed, split, length)
            bits = torch.randint(2, (samples, length), generator=generator).float()
            targets = bits.cumsum(1) % 2
        return (2 * bits - 1)[:, None], targets[:, None]


def decided(logits: Tensor, target: Tensor) -> dict[str, float]:  # (N, ...) twice
    """Returns the share of yes-or-no answers that are right, and of samples of which all are.

    Example:
        >>> decided(torch.tensor([[1.0, -1.0], [2.0, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        {'accuracy': 0.75, 'solved': 0.5}
    """
    right = ((logits > 0) == (target > 0.5)).flatten(1)
    return {"accuracy": float(right.double().mean()), "solved": float(right.all(1).double().mean())}


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


SCALES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 50.0, 100.0, 500.0)  # 004 names the ends only


@dataclass(frozen=True)
class MatrixAddition(Task):
    """Adds two matrices whose entries are uniform in ``(-scale, scale)``, given as one vector (Du et al. 2022).

    Args:
        side: of the matrices; 004 has 20 x 20, that is, 800 inputs and 400 outputs.
        samples, test_samples: how many; 004 has 60,000 points in all.
        points: scales of the tests; that of the training is 1.

    Example:
        >>> u, y = MatrixAddition(side=2, samples=3).train(seed=0)
        >>> u.shape, bool(torch.equal(y, u[:, :4] + u[:, 4:]))
        (torch.Size([3, 8]), True)
    """

    side: int = 20
    samples: int = 50_000
    test_samples: int = 1_000
    points: tuple[Point, ...] = SCALES
    name: ClassVar[str] = "matrix-addition"

    def __post_init__(self) -> None:
        if self.side < 1:
            raise InputError(f"a matrix has at least one row; received {self.side}")

    def train(self, seed: int) -> Pair:
        return self._draw(1.0, self.samples, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(1.0, self.test_samples, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        scale = self.require_point(at)
        if not scale > 0:
            raise InputError(f"a scale is positive; received {at}")
        return self._draw(scale, self.test_samples, self.generator(seed, "test", scale))

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the mean squared error, and that relative to the mean square of the sums."""
        error, power = (part.double().square().mean() for part in (prediction.double() - target, target))
        return {"test_mse": float(error), "relative_mse": float(error / power)}

    def _draw(self, scale: float, samples: int, generator: torch.Generator) -> Pair:
        u = scale * (2 * torch.rand(samples, 2 * self.side**2, generator=generator) - 1)
        first, second = u.chunk(2, 1)
        return u, first + second
