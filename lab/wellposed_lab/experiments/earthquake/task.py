"""Where was the earthquake? Sources in ak135, recorded by five stations (001 section 2.2, 002 section 4)."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import InputError
from wellposed_lab.experiments.earthquake.geometry import FEATURES, TARGETS, Subnet, destination, distance, errors
from wellposed_lab.experiments.earthquake.travel_times import travel_times
from wellposed_lab.tasks.task import Pair, Point, Task

Range = tuple[float, float]
PACIFIC: Range = (90.0, 270.0)  # 90 E to 90 W across the date line, eastwards from Greenwich
LATITUDES: Range = (-75.0, 75.0)
DEPTHS: Range = (0.0, 690.0)  # km
NEAREST, FARTHEST = 1.0, 30.0  # stations, in degrees from the source
TRAINED = 0.8  # of a mesh: 720,576 of 900,720 samples in 001 Table 3


def bands(k: float) -> tuple[Range, Range]:
    """Returns the two test bands of an extrapolation factor, (90 - 10k, 100 - 10k) and its mirror image.

    Example:
        >>> bands(1), bands(9)
        (((80.0, 90.0), (270.0, 280.0)), ((0.0, 10.0), (350.0, 360.0)))
    """
    if not 1 <= k <= 9:
        raise InputError(f"k must lie between 1 and 9; received {k:g}")
    return (90.0 - 10 * k, 100.0 - 10 * k), (260.0 + 10 * k, 270.0 + 10 * k)


@dataclass(frozen=True)
class Located(Task):
    """What all earthquake tasks share: an earth, stations around a source, and errors in units.

    Args:
        earth: one of `travel_times`.
        stations: how many record a source.
    """

    earth: str = "ak135"
    stations: int = 5
    targets: ClassVar[tuple[str, ...]] = TARGETS

    @property
    def longest(self) -> float:
        """The travel time that is scaled to one, in seconds."""
        return _longest(self.earth, FARTHEST)

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the squared error of the scaled targets, and the absolute error of each in its unit."""
        loss = float(F.mse_loss(prediction.double(), target.double()))
        return {"test_mse": loss, **errors(prediction, target, self.longest, self.targets)}

    def recorded(
        self, longitude: Tensor, latitude: Tensor, depth: Tensor, near: Tensor, bearing: Tensor
    ) -> Subnet:
        """Puts stations at distances and azimuths (N, S) around sources (N,) and records the P waves."""
        seconds = travel_times(self.earth)(near, depth[:, None])
        stations = destination(latitude[:, None], longitude[:, None], near, bearing)
        return Subnet(longitude, latitude, depth, stations[1], stations[0], seconds)


@dataclass(frozen=True)
class _Drawn(Located):
    """Every sample has an epicentre, a depth and stations of its own, so no split shares an epicentre."""

    samples: int = 50_000
    test_samples: int = 5_000
    points: tuple[Point, ...] = (None, *(float(k) for k in range(1, 10)))
    latitudes: ClassVar[tuple[Range, ...]] = (LATITUDES,)
    tested_latitudes: ClassVar[tuple[Range, ...]] = (LATITUDES,)

    def train(self, seed: int) -> Pair:
        return self._draw(self.samples, (PACIFIC,), self.latitudes, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(self.test_samples, (PACIFIC,), self.latitudes, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        if at is None:
            return self._draw(self.test_samples, (PACIFIC,), self.latitudes, self.generator(seed, "test", at))
        k = self.require_point(at)
        return self._draw(self.test_samples, bands(k), self.tested_latitudes, self.generator(seed, "test", k))

    def _draw(
        self, samples: int, longitudes: tuple[Range, ...], latitudes: tuple[Range, ...], generator: torch.Generator
    ) -> Pair:
        longitude, latitude = (_uniform(samples, ranges, generator) for ranges in (longitudes, latitudes))
        depth = _uniform(samples, (DEPTHS,), generator)
        near = _uniform(samples * self.stations, ((NEAREST, FARTHEST),), generator).view(samples, -1)
        bearing = _uniform(samples * self.stations, ((0.0, 360.0),), generator).view(samples, -1)
        return self.recorded(longitude, latitude, depth, near, bearing).pair(self.longest, self.targets)


@dataclass(frozen=True)
class Earthquakes(_Drawn):
    """Locates an earthquake from five stations: trained on the Pacific, tested on bands beyond (001 section 2.2).

    Trained between 90 E and 90 W across the date line; at k the test is on ``(90 - 10k, 100 - 10k)`` degrees east
    and its mirror image. The point None is the training region. At the size of the papers the inputs take 86 MB,
    so they are held in memory.

    Example:
        >>> u, y = Earthquakes(samples=3, earth="homogeneous").train(seed=0)
        >>> u.shape, y.shape
        (torch.Size([3, 30]), torch.Size([3, 4]))
    """

    name: ClassVar[str] = "earthquake"


@dataclass(frozen=True)
class DepthAndTime(_Drawn):
    """Finds depth and travel time alone, the second of two passes (002 section 4.3); see `Earthquakes`."""

    name: ClassVar[str] = "earthquake-depth-time"
    targets: ClassVar[tuple[str, ...]] = ("depth", "time")


@dataclass(frozen=True)
class RestrictedLatitude(_Drawn):
    """Trains up to 45 degrees north and south and tests beyond (002 section 4.3); see `Earthquakes`."""

    name: ClassVar[str] = "earthquake-latitude"
    latitudes: ClassVar[tuple[Range, ...]] = ((-45.0, 45.0),)
    tested_latitudes: ClassVar[tuple[Range, ...]] = ((-75.0, -45.0), (45.0, 75.0))


@dataclass(frozen=True)
class _Meshed(Located):
    """Epicentres on a perturbed mesh, each with stations of its own and many depths (002 section 4.2).

    The papers' 900,720 samples are 36 x 36 = 1,296 epicentres at 695 depths, and their 720,576 training samples
    are 80 % of them: 1036.8 epicentres, so that split cannot have kept epicentres together.

    Args:
        side: epicentres along longitude and latitude.
        depths: of each epicentre.
    """

    side: int = 36
    depths: int = 48
    points: tuple[Point, ...] = (None,)
    split: ClassVar[Literal["random", "epicentre"]]
    stations_of: ClassVar[Literal["epicentre", "sample"]] = "epicentre"

    @property
    def samples(self) -> int:
        """All samples of the mesh."""
        return self.side**2 * self.depths

    def train(self, seed: int) -> Pair:
        return self._samples(seed, "train")

    def validation(self, seed: int) -> Pair:
        return self._samples(seed, "validation")

    def test(self, seed: int, at: Point = None) -> Pair:
        if at is not None:
            raise InputError(f"task {self.name!r} is tested on its own region, at=None; received {at!r}")
        return self._samples(seed, "test")

    def rows_by_split(self, seed: int) -> dict[str, Tensor]:
        """Returns which samples belong to training, validation and test; sample j has epicentre j // depths."""
        generator = self.generator(seed, "split")
        if self.split == "random":
            order = torch.randperm(self.samples, generator=generator)
            return _cut(order)
        epicentres = _cut(torch.randperm(self.side**2, generator=generator))
        depths = torch.arange(self.depths)
        return {name: (own[:, None] * self.depths + depths).flatten() for name, own in epicentres.items()}

    def mesh(self, seed: int) -> Pair:
        """Returns all samples, epicentre after epicentre."""
        generator, cells = self.generator(seed, "mesh"), self.side**2
        shift = torch.rand(2, cells, generator=generator, dtype=torch.float64)
        index = torch.arange(cells)
        longitude = _within(PACIFIC, (index % self.side + shift[0]) / self.side)
        latitude = _within(LATITUDES, (index // self.side + shift[1]) / self.side)
        return self._recorded(longitude, latitude, generator)

    def _recorded(self, longitude: Tensor, latitude: Tensor, generator: torch.Generator) -> Pair:
        """Returns the samples of epicentres at all depths, with stations of the epicentre or of the sample."""
        depth = torch.linspace(*DEPTHS, self.depths, dtype=torch.float64).repeat(len(longitude))
        groups = len(longitude) if self.stations_of == "epicentre" else len(depth)
        near = _uniform(groups * self.stations, ((NEAREST, FARTHEST),), generator).view(groups, -1)
        bearing = _uniform(groups * self.stations, ((0.0, 360.0),), generator).view(groups, -1)
        columns = (longitude, latitude, near, bearing)
        each = [column.repeat_interleave(len(depth) // len(column), 0) for column in columns]
        return self.recorded(each[0], each[1], depth, each[2], each[3]).pair(self.longest, self.targets)

    def _samples(self, seed: int, split: str) -> Pair:
        (u, y), rows = _meshed(self, seed), self.rows_by_split(seed)[split]
        return u[rows], y[rows]


@dataclass(frozen=True)
class RandomSplit(_Meshed):
    """Draws training and test samples from the same epicentres: each of them is known from training.

    One depth further the same stations record the same epicentre, so a network that has memorised the training
    samples does well here. By its counts this is the split of 002; it does not measure what was learnt.

    Example:
        >>> rows = RandomSplit(side=3, depths=10, earth="homogeneous").rows_by_split(seed=0)
        >>> [len(part) for part in rows.values()]
        [72, 9, 9]
    """

    name: ClassVar[str] = "earthquake-random-split"
    split: ClassVar[Literal["random", "epicentre"]] = "random"


@dataclass(frozen=True)
class MeshBands(RandomSplit):
    """Trains on the mesh of 002 and tests on bands beyond it, with 20,016 samples each at the published size.

    Those are 80 % of 36 epicentres at 695 depths, one for every latitude of the mesh, on alternating sides.

    Example:
        >>> task = MeshBands(side=6, depths=10, earth="homogeneous")
        >>> [len(task.test(0, at)[0]) for at in (None, 9.0)]
        [36, 48]
    """

    points: tuple[Point, ...] = (None, *(float(k) for k in range(1, 10)))
    name: ClassVar[str] = "earthquake-mesh"

    def test(self, seed: int, at: Point = None) -> Pair:
        if at is None:
            return super().test(seed)
        k = self.require_point(at)
        generator = self.generator(seed, "test", k)
        shift = torch.rand(2, self.side, generator=generator, dtype=torch.float64)
        row = torch.arange(self.side)
        low = torch.tensor([ends[0] for ends in bands(k)], dtype=torch.float64)[row % 2]
        latitude = _within(LATITUDES, (row + shift[1]) / self.side)
        u, y = self._recorded(low + 10 * shift[0], latitude, generator)
        chosen = torch.randperm(len(u), generator=generator)[: round(TRAINED * len(u))]
        return u[chosen], y[chosen]


@dataclass(frozen=True)
class MeshStations(MeshBands):
    """Draws stations for every sample of the mesh, where `MeshBands` keeps them for all depths of an epicentre.

    The papers place stations "in random orientations from the source" and leave open which of the two is meant.

    Example:
        >>> tasks = [kind(side=2, depths=2, earth="homogeneous") for kind in (MeshBands, MeshStations)]
        >>> [len(task.mesh(0)[0][:2, 0].unique()) for task in tasks]  # longitude of a station at two depths
        [1, 2]
    """

    name: ClassVar[str] = "earthquake-mesh-stations"
    stations_of: ClassVar[Literal["epicentre", "sample"]] = "sample"


@dataclass(frozen=True)
class EpicentreSplit(_Meshed):
    """Tests on epicentres that training has not seen, on the same mesh as `RandomSplit`."""

    name: ClassVar[str] = "earthquake-epicentre-split"
    split: ClassVar[Literal["random", "epicentre"]] = "epicentre"


@dataclass(frozen=True)
class StationNetwork(Located):
    """Locates earthquakes from 45 fixed stations (002 section 5.2).

    Trained on 7 epicentres at 695 depths, 4,865 samples, and tested on other epicentres. Station 0 is the anchor.
    With one depth only it is drawn at random for every epicentre.

    Example:
        >>> task = StationNetwork(earth="homogeneous")
        >>> task.train(seed=0)[0].shape, task.groups()[[0, 5, 6, 269]].tolist()
        (torch.Size([4865, 270]), [0, 0, 1, 44])
    """

    stations: int = 45
    epicentres: int = 7
    depths: int = 695
    test_samples: int = 5_000
    points: tuple[Point, ...] = (None,)
    name: ClassVar[str] = "earthquake-stations"

    @property
    def longest(self) -> float:
        """The longest travel time through the earth, in seconds."""
        return _longest(self.earth, 180.0)

    def groups(self) -> Tensor:  # (6 S,)
        """Returns the station of each input."""
        return torch.arange(self.stations).repeat_interleave(FEATURES)

    def station_coordinates(self, seed: int) -> tuple[Tensor, Tensor]:
        """Returns longitudes and latitudes of the stations."""
        generator = self.generator(seed, "stations")
        return _uniform(self.stations, (PACIFIC,), generator), _uniform(self.stations, (LATITUDES,), generator)

    def train(self, seed: int) -> Pair:
        generator = self.generator(seed, "train")
        longitude, latitude = (_uniform(self.epicentres, (ends,), generator) for ends in (PACIFIC, LATITUDES))
        depth = torch.linspace(*DEPTHS, self.depths, dtype=torch.float64).repeat(self.epicentres)
        if self.depths == 1:
            depth = _uniform(self.epicentres, (DEPTHS,), generator)
        each = [axis.repeat_interleave(self.depths) for axis in (longitude, latitude)]
        return self._recorded(seed, each[0], each[1], depth)

    def validation(self, seed: int) -> Pair:
        return self._elsewhere(seed, "validation")

    def test(self, seed: int, at: Point = None) -> Pair:
        if at is not None:
            raise InputError(f"task {self.name!r} is tested on its own region, at=None; received {at!r}")
        return self._elsewhere(seed, "test")

    def _elsewhere(self, seed: int, split: str) -> Pair:
        generator = self.generator(seed, split)
        drawn = [_uniform(self.test_samples, (ends,), generator) for ends in (PACIFIC, LATITUDES, DEPTHS)]
        return self._recorded(seed, *drawn)

    def _recorded(self, seed: int, longitude: Tensor, latitude: Tensor, depth: Tensor) -> Pair:
        stations = [axis.expand(len(depth), -1) for axis in self.station_coordinates(seed)]
        away = distance(latitude[:, None], longitude[:, None], stations[1], stations[0])
        seconds = travel_times(self.earth)(away, depth[:, None])
        subnet = Subnet(longitude, latitude, depth, stations[0], stations[1], seconds)
        return subnet.pair(self.longest, self.targets)


@functools.lru_cache(maxsize=1)
def _meshed(task: _Meshed, seed: int) -> Pair:
    """Caches the latest mesh, from which training, validation and test samples are taken."""
    return task.mesh(seed)


@functools.lru_cache(maxsize=8)
def _longest(earth: str, farthest: float) -> float:
    return travel_times(earth).longest(farthest)


def _uniform(count: int, ranges: tuple[Range, ...], generator: torch.Generator) -> Tensor:  # (count,) float64
    """Draws numbers from ranges of equal width, each with the same probability."""
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    if len(ranges) == 1:
        return _within(ranges[0], share)
    which = torch.randint(len(ranges), (count,), generator=generator)
    low, high = (torch.tensor(ends, dtype=torch.float64)[which] for ends in zip(*ranges, strict=True))
    return low + (high - low) * share


def _within(ends: Range, share: Tensor) -> Tensor:
    return ends[0] + (ends[1] - ends[0]) * share


def _cut(order: Tensor) -> dict[str, Tensor]:
    """Cuts a permutation into 80 % for training and two halves of the rest."""
    first = round(TRAINED * len(order))
    second = (first + len(order)) // 2
    return {"train": order[:first], "validation": order[first:second], "test": order[second:]}
