"""Runs of the earthquake suite: models that are also tested on real picks, and the data themselves."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from wellposed.data.cache import MissingDataError
from wellposed.errors import MissingExtraError, require
from wellposed.training import History
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.store import Result, Series, Value
from wellposed_lab.engine.training import TrainingRun, predict
from wellposed_lab.experiments.earthquake.geometry import Subnet, distance
from wellposed_lab.experiments.earthquake.picks import Picks, isc_picks, residuals, subnets
from wellposed_lab.experiments.earthquake.task import Earthquakes, Located, MeshBands
from wellposed_lab.experiments.earthquake.travel_times import DEEPEST, PHASES, TravelTimes, travel_times
from wellposed_lab.tasks.task import Pair

SCORED = 20_000  # training samples at most that are scored after training
SHOWN = 120  # epicentres of a map at every point of the axis
PICKED = "isc-picks"  # point of the axis at which models see real picks
TIMES = "travel times"  # what records say of them
ASKED = 100  # plain calls of TauP with which a table is compared


@dataclass(frozen=True, kw_only=True)
class LocationRun(TrainingRun):
    """Trains a model on an earthquake task, and tests it on real picks where the data folder has them."""

    @property
    def batch_seeds(self) -> bool:
        return False  # one seed at a time has compiled kernels

    def data(self, seed: int) -> tuple[Pair, Pair]:
        if isinstance(self.task, Earthquakes) and self.task.earth == "ak135":
            _picks()  # so that a damaged file is noticed before training, not after it
        return super().data(seed)

    def measure(
        self, model: nn.Module, pair: tuple[Pair, Pair], seed: int, history: History | None, member: int | None
    ) -> Result:
        (u, y), validation = pair
        result = super().measure(model, ((u[:SCORED], y[:SCORED]), validation), seed, history, member)
        if isinstance(self.task, Located):
            result.facts[TIMES] = str(travel_times(self.task.earth))
        if not isinstance(self.task, Earthquakes) or self.fold is not None:
            return result
        series = result.series | (_map(self.task, model, seed) if seed == 0 else {})
        return dataclasses.replace(result, values=(*result.values, *self._picked(model, seed)), series=series)

    def _picked(self, model: nn.Module, seed: int) -> list[Value]:
        """Scores a model on real picks; nothing where there are none."""
        real = _real(self.task, seed) if isinstance(self.task, Earthquakes) else None
        if real is None:
            return []
        u, y = real.pair(self.task.longest)  # type: ignore[attr-defined]
        scores = self.task.score(predict(model, u), y)
        return [Value(name, value, PICKED) for name, value in scores.items()]


@dataclass(frozen=True, kw_only=True)
class EarthquakeData(Run):
    """Counts the samples of the mesh, and compares the travel times with plain calls of TauP and with real picks.

    Args:
        task: whose earth is compared.
        mesh: on which models are trained; None where none is, and there is nothing to count.
    """

    task: Earthquakes
    mesh: MeshBands | None = None

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return self.task.name, "data", None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run._result() for run in runs]

    def _result(self) -> Result:
        times = travel_times(self.task.earth)
        values = [Value(name, float(count)) for name, count in self._counted().items()]
        facts: dict[str, Any] = {TIMES: str(times)}
        values += [Value(name, value) for name, value in (self._checked(times) | self._compared(times)).items()]
        real = _real(self.task, self.seed)
        return Result(tuple(values), _stations(self.task, real), facts)

    def _counted(self) -> dict[str, int]:
        """Counts what models are given, at the band of k = 9 for the tests."""
        if self.mesh is None:
            return {}
        (train, _), (validation, _), (inside, _) = (
            split(self.seed) for split in (self.mesh.train, self.mesh.validation, self.mesh.test)
        )
        return {
            "features": train.shape[1],
            "samples": len(train) + len(validation) + len(inside),
            "train_samples": len(train),
            "test_samples": len(self.mesh.test(self.seed, self.mesh.points[-1])[0]),
        }

    def _checked(self, times: TravelTimes) -> dict[str, float]:
        """Compares times at random points with plain calls of TauP, in seconds; nothing without obspy."""
        if times.name != "ak135":
            return {}
        try:
            model = require("obspy.taup", extra="lab").TauPyModel(times.name)
        except MissingExtraError:
            return {}
        share = torch.rand(2, ASKED, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        depths, distances = DEEPEST * share[0], 180 * share[1] ** 2  # every second one nearer than 45 degrees
        pairs = zip(depths.tolist(), distances.tolist(), strict=True)
        asked = [min(one.time for one in model.get_travel_times(z, away, PHASES)) for z, away in pairs]
        interpolated = times(distances, depths)
        return {"table_difference": float((interpolated - torch.tensor(asked, dtype=torch.float64)).abs().max())}

    def _compared(self, times: TravelTimes) -> dict[str, float]:
        picks = _picks() if times.name == "ak135" else None
        if picks is None:
            return {}
        late = residuals(picks, times)
        late = late[~late.isnan()]
        middle = late.median()
        return {
            "picks": float(len(late)),
            "pick_residual": float(middle),
            "pick_spread": float((late - middle).abs().median()),
            "picks_within_5_s": float((late.abs() <= 5).double().mean()),
        }


def _picks() -> Picks | None:
    try:
        return isc_picks()
    except MissingDataError:
        return None


def _real(task: Earthquakes, seed: int) -> Subnet | None:
    """Makes samples of real picks; None unless the earth is ak135."""
    picks = _picks() if task.earth == "ak135" else None
    if picks is None:
        return None
    return subnets(picks, travel_times(task.earth), task.stations, task.generator(seed, "picks"))


def _map(task: Earthquakes, model: nn.Module, seed: int) -> Series:
    """Returns epicentres of all test sets and how far off, in degrees, they are located."""
    columns: Series = {"map_longitude": [], "map_latitude": [], "map_error": []}
    for at in task.points:
        u, y = (part[:SHOWN] for part in task.test(seed, at))
        (longitude, latitude), predicted = _epicentres(y), _epicentres(predict(model, u))
        away = distance(latitude, longitude, predicted[1].clamp(-90, 90), predicted[0])
        for name, column in zip(columns, (longitude, latitude, away), strict=True):
            columns[name] += _short(column)
    return columns


def _stations(task: Earthquakes, real: Subnet | None) -> Series:
    """Returns some stations of training, and the epicentres of the real events."""
    u = task.train(0)[0][:60].unflatten(1, (task.stations, -1)).double()
    series = {"station_longitude": _short(180 * (u[..., 0] + 1)), "station_latitude": _short(90 * u[..., 1])}
    if real is not None:
        series |= {"event_longitude": _short(real.longitude), "event_latitude": _short(real.latitude)}
    return series


def _epicentres(y: Tensor) -> tuple[Tensor, Tensor]:
    return 180 * (y[:, 0].double() + 1), 90 * y[:, 1].double()


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.flatten().tolist()]
