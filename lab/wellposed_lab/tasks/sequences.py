"""Tasks on sequences: the spiky series and the rolling functions.

`Spiky` is the series with sudden spiky regions (000 and 001 appendix A.3). `RollingAverage` and `RollingArgmax`
are functions of all elements so far (000 section 3, 001 section 2.1 and Table 3).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import InputError
from wellposed_lab.tasks.task import Pair, Point, Task

FREQUENCIES = (2.0, 23.0, 78.0, 100.0)
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Series:
    """One series, scaled, and which of its points lie in a spiky region."""

    values: Tensor  # (N,)
    spiky: Tensor  # (N,), whether


@dataclass(frozen=True)
class Spiky(Task):
    """Predicts the next value of a calm series with sudden spiky regions from a window of the last ones.

    Calm values are ``sin(x)`` with noise of the standard deviation `noise`, spiky ones
    ``5 (sin 2x + sin 23x + sin 78x + sin 100x)`` in regions of `region` points at random positions; 20 of them are
    in the 7,000 points of training and as large a share in the test (001 appendix A.3). The papers leave open
    the spacing of x, the scaling and the window: here .01, the range of the training series to [0, 1], and 10
    values to the next one. Every split is a series of its own, on an x of its own.

    Args:
        window: how many values the model sees.
        samples, test_samples: points of the series; the first `window` are inputs only.
        regions: spiky ones in the training series.
        noise: of calm values; 0 is the series of 000 and 002.

    Example:
        >>> u, y = Spiky(samples=700, regions=2).train(seed=0)
        >>> u.shape, y.shape, bool(torch.equal(u[1:, -1], y[:-1, 0]))
        (torch.Size([690, 10]), torch.Size([690, 1]), True)
    """

    window: int = 10
    samples: int = 7_000
    test_samples: int = 3_000
    regions: int = 20
    region: int = 100
    spacing: float = 0.01
    noise: float = 0.25
    points: tuple[Point, ...] = (None,)
    name: ClassVar[str] = "spiky"

    def train(self, seed: int) -> Pair:
        return self._windows(self.series(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._windows(self.series(seed, "validation"))

    def test(self, seed: int, at: Point = None) -> Pair:
        if at is not None:
            raise InputError(f"task {self.name!r} has one test distribution, at=None; received {at!r}")
        return self._windows(self.series(seed, "test"))

    def details(self, prediction: Tensor, target: Tensor, seed: int, at: Point) -> dict[str, float]:
        """Computes the error within spiky regions and outside, and that of the peaks.

        A peak deviates from the middle of the series more than its neighbours and at least half as much as the
        largest one of its region. ``spike_magnitude_error`` is the mean absolute error at the peaks,
        ``spike_location_error`` the mean number of points from a peak to the nearest one of the prediction, the
        length of the region where that has none.
        """
        spiky = self.series(seed, "test").spiky[self.window :]
        prediction, target = prediction[:, 0].double(), target[:, 0].double()
        middle = float(target[~spiky].median())
        heights, distances = [], []
        for start, stop in spans(spiky):
            guess, true = (series[start:stop] - middle for series in (prediction, target))
            limit = 0.5 * float(true.abs().max())
            positions, guesses = peaks(true.abs(), limit), peaks(guess.abs(), limit)
            heights.append((guess - true)[positions].abs())
            distances.append(_distances(positions, guesses, stop - start))
        return {
            "spike_mse": float(F.mse_loss(prediction[spiky], target[spiky])),
            "calm_mse": float(F.mse_loss(prediction[~spiky], target[~spiky])),
            "spike_magnitude_error": float(torch.cat(heights).mean()),
            "spike_location_error": float(torch.cat(distances).mean()),
        }

    def excerpt(self, seed: int, length: int = 160) -> slice:
        """Returns which test samples a picture shows: a spiky region and what is around it."""
        spiky = self.series(seed, "test").spiky[self.window :]
        lead = (length - self.region) // 2
        starts = [start for start, _ in spans(spiky) if lead <= start and start - lead + length <= len(spiky)]
        begin = starts[0] - lead if starts else 0
        return slice(begin, begin + length)

    def series(self, seed: int, split: str) -> Series:
        """Returns the scaled series of a split."""
        values, spiky = self._raw(seed, split)
        training = self._raw(seed, "train")[0]
        low, high = training.min(), training.max()
        return Series(((values - low) / (high - low)).float(), spiky)

    def _raw(self, seed: int, split: str) -> tuple[Tensor, Tensor]:
        generator = self.generator(seed, split)
        count = self._count(split)
        begin = sum(self._count(known) for known in SPLITS[: SPLITS.index(split)])
        x = self.spacing * torch.arange(begin, begin + count, dtype=torch.float64)
        calm = x.sin() + self.noise * torch.randn(count, generator=generator, dtype=torch.float64)
        wild = 5 * sum((torch.sin(frequency * x) for frequency in FREQUENCIES), torch.zeros_like(x))
        spiky = self._draw_regions(count, generator)
        return torch.where(spiky, wild, calm), spiky

    def _count(self, split: str) -> int:
        return self.samples if split == "train" else self.test_samples

    def _draw_regions(self, count: int, generator: torch.Generator) -> Tensor:  # (count,)
        """Draws regions that do not overlap, after the first window, every arrangement with equal probability."""
        regions = max(1, round(self.regions * count / self.samples))
        free = count - self.window - regions * self.region
        if free < regions:
            raise InputError(
                f"{regions} regions of {self.region} points do not fit into {count}; ask for fewer or shorter ones"
            )
        gaps = torch.randperm(free + 1, generator=generator)[:regions].sort().values
        spiky = torch.zeros(count, dtype=torch.bool)
        for index, gap in enumerate(gaps.tolist()):
            start = self.window + gap + index * self.region
            spiky[start : start + self.region] = True
        return spiky

    def _windows(self, series: Series) -> Pair:
        windows = series.values.unfold(0, self.window + 1, 1)
        return windows[:, :-1].clone(), windows[:, -1:].clone()


def spans(marks: Tensor) -> list[tuple[int, int]]:  # (N,) of bool
    """Returns the first index of every run of true values, and the index after its last.

    Example:
        >>> spans(torch.tensor([True, False, True, True]))
        [(0, 1), (2, 4)]
    """
    steps = F.pad(marks.int(), (1, 1)).diff()
    starts, stops = ((steps == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return list(zip(starts, stops, strict=True))


def peaks(values: Tensor, limit: float) -> Tensor:  # (N,) -> (K,)
    """Returns where values are at least `limit` and above their neighbours.

    Example:
        >>> peaks(torch.tensor([0.0, 3.0, 1.0, 2.0, 1.0]), 2.5)
        tensor([1])
    """
    around = F.pad(values, (1, 1), value=-torch.inf)
    return ((values > around[:-2]) & (values >= around[2:]) & (values >= limit)).nonzero().flatten()


def _distances(positions: Tensor, guesses: Tensor, largest: int) -> Tensor:  # (K,), (L,) -> (K,)
    if len(guesses) == 0:
        return torch.full((len(positions),), float(largest))
    return (positions[:, None] - guesses).abs().amin(1).double()


@dataclass(frozen=True)
class RollingAverage(Task):
    """Averages a sequence up to every step: trained on ``N(3, 1)^10``, tested on ``N(3 + k, 1)^10``.

    ``y_j = (u_1 + ... + u_j) / j`` for all j is trained; what counts is the last step (001 section 2.1), and
    ``test_mse`` is its error. The point None, like 0, is the training distribution.

    Example:
        >>> u, y = RollingAverage(samples=3).train(seed=0)
        >>> u.shape, y.shape, bool(torch.isclose(y[0, -1], u[0].mean()))
        (torch.Size([3, 10]), torch.Size([3, 10]), True)
    """

    length: int = 10
    samples: int = 10_000
    test_samples: int = 3_000
    points: tuple[Point, ...] = (None, 0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0)
    name: ClassVar[str] = "rolling-average"

    def train(self, seed: int) -> Pair:
        return self._draw(self.samples, 0.0, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(self.test_samples, 0.0, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        shift = 0.0 if at is None else self.require_point(at)
        return self._draw(self.test_samples, shift, self.generator(seed, "test", shift))

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the error of the last step and of all, and the mean of the last predictions."""
        prediction, target = prediction.double(), target.double()
        return {
            "test_mse": float(F.mse_loss(prediction[:, -1], target[:, -1])),
            "test_sequence_mse": float(F.mse_loss(prediction, target)),
            "mean_prediction": float(prediction[:, -1].mean()),
        }

    def _draw(self, samples: int, shift: float, generator: torch.Generator) -> Pair:
        u = 3.0 + shift + torch.randn(samples, self.length, generator=generator, dtype=torch.float64)
        y = u.cumsum(1) / torch.arange(1, self.length + 1)
        return u.float(), y.float()


@dataclass(frozen=True)
class RollingArgmax(Task):
    """Says where the largest element of a sequence is: trained on ``U(0, 1)^10``, tested on ``U(0, k)^10``.

    The target is the label of the last step, one-hot. Only it is judged, and training on the labels of all
    steps makes recurrent models worse at it. The point None, like 1, is the training distribution.

    Example:
        >>> u, y = RollingArgmax(samples=3).train(seed=0)
        >>> bool(torch.equal(u.argmax(1), y.argmax(1))), y.sum(1)
        (True, tensor([1., 1., 1.]))
    """

    length: int = 10
    samples: int = 10_000
    test_samples: int = 3_000
    points: tuple[Point, ...] = (None, 1.0, 10.0, 1e2, 1e3, 1e4, 1e5)
    name: ClassVar[str] = "rolling-argmax"

    def train(self, seed: int) -> Pair:
        return self._draw(self.samples, 1.0, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(self.test_samples, 1.0, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        scale = 1.0 if at is None else self.require_point(at)
        return self._draw(self.test_samples, scale, self.generator(seed, "test", scale))

    @staticmethod
    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        """Computes the cross-entropy of logits (B, T) and one-hot labels."""
        return F.cross_entropy(prediction, target)

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the share of right answers."""
        return {"accuracy": float((prediction.argmax(-1) == target.argmax(-1)).double().mean())}

    def _draw(self, samples: int, scale: float, generator: torch.Generator) -> Pair:
        u = scale * torch.rand(samples, self.length, generator=generator)
        return u, F.one_hot(u.argmax(1), self.length).float()
