"""Distances and directions on a sphere, and what a few stations record of an earthquake.

`distance`, `azimuth` and `destination` are all in degrees. `Subnet` turns sources and the stations that record
them into numbers for a network.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed_lab.tasks.task import Pair


def distance(latitude: Tensor, longitude: Tensor, other_latitude: Tensor, other_longitude: Tensor) -> Tensor:
    """Computes the angle between two points as seen from the centre, by the haversine.

    Example:
        >>> float(distance(*torch.tensor([0.0, 0.0, 0.0, 90.0], dtype=torch.float64)))
        90.0
    """
    here, there = latitude.deg2rad(), other_latitude.deg2rad()
    turn = (other_longitude - longitude).deg2rad()
    half = ((there - here) / 2).sin().square() + here.cos() * there.cos() * (turn / 2).sin().square()
    return (2 * torch.asin(half.clamp(0.0, 1.0).sqrt())).rad2deg()


def azimuth(latitude: Tensor, longitude: Tensor, other_latitude: Tensor, other_longitude: Tensor) -> Tensor:
    """Computes in which direction another point lies, clockwise from north, between 0 and 360.

    From a station to a source this is the back-azimuth.

    Example:
        >>> float(azimuth(*torch.tensor([0.0, 0.0, 0.0, 90.0], dtype=torch.float64)))
        90.0
    """
    here, there = latitude.deg2rad(), other_latitude.deg2rad()
    turn = (other_longitude - longitude).deg2rad()
    east = turn.sin() * there.cos()
    north = here.cos() * there.sin() - here.sin() * there.cos() * turn.cos()
    return torch.atan2(east, north).rad2deg() % 360


def destination(latitude: Tensor, longitude: Tensor, away: Tensor, bearing: Tensor) -> tuple[Tensor, Tensor]:
    """Computes latitude and longitude of the point at a distance in a direction.

    The longitude goes on from the given one and is not wrapped.

    Example:
        >>> there = destination(*torch.tensor([0.0, 350.0, 20.0, 90.0], dtype=torch.float64))
        >>> [round(float(angle), 9) for angle in there]
        [0.0, 370.0]
    """
    here, angle, way = latitude.deg2rad(), away.deg2rad(), bearing.deg2rad()
    sine = (here.sin() * angle.cos() + here.cos() * angle.sin() * way.cos()).clamp(-1.0, 1.0)
    turn = torch.atan2(way.sin() * angle.sin() * here.cos(), angle.cos() - here.sin() * sine)
    return torch.asin(sine).rad2deg(), longitude + turn.rad2deg()


TARGETS = ("longitude", "latitude", "depth", "time")
UNITS = {"longitude": 180.0, "latitude": 90.0, "depth": 345.0}  # degrees, degrees, km for one unit of a target
FEATURES = 6  # a station: longitude, latitude, elevation, sine and cosine of the back-azimuth, relative time


@dataclass(frozen=True, eq=False)
class Subnet:
    """Sources with the stations that record them; the first of a row is the anchor.

    Args:
        longitude, latitude: of the sources in degrees, ``(N,)``; longitudes grow eastwards from Greenwich, 0 to
            360.
        depth: of the sources in km, ``(N,)``.
        station_longitude, station_latitude: in degrees, ``(N, S)``, longitudes counted on from those of the
            sources.
        seconds: travel times of the first P wave, ``(N, S)``.
        elevation: of the stations in km, ``(N, S)``; None: all on the surface.

    Example:
        >>> source = torch.full((1,), 100.0)
        >>> near = torch.full((1, 5), 101.0)
        >>> u, y = Subnet(source, 0 * source, source, near, 0 * near, near).pair(longest=400.0)
        >>> u.shape, y.shape
        (torch.Size([1, 30]), torch.Size([1, 4]))
    """

    longitude: Tensor
    latitude: Tensor
    depth: Tensor
    station_longitude: Tensor
    station_latitude: Tensor
    seconds: Tensor
    elevation: Tensor | None = None

    def pair(self, longest: float, targets: tuple[str, ...] = TARGETS) -> Pair:
        """Scales everything linearly to about [-1, 1]: inputs (N, 6 S) and targets (N, q), in float32.

        001 and 002 list five features a station and count six; sine and cosine of the back-azimuth make six, and
        spare the jump at north. Longitudes are measured from the date line: from Greenwich, -180 to 180, the test
        bands would lie between the two halves of the training region.

        Args:
            longest: travel time in seconds that becomes one, for the relative times and the target.
            targets: which of `TARGETS`, in that order.
        """
        back = azimuth(
            self.station_latitude, self.station_longitude, self.latitude[:, None], self.longitude[:, None]
        ).deg2rad()
        elevation = torch.zeros_like(back) if self.elevation is None else self.elevation / 10.0
        features = (
            self.station_longitude / 180.0 - 1,
            self.station_latitude / 90.0,
            elevation,
            back.sin(),
            back.cos(),
            (self.seconds - self.seconds[:, :1]) / longest,
        )
        inputs = torch.stack(features, dim=-1).flatten(1)
        return inputs.float(), self._targets(longest, targets).float()

    def _targets(self, longest: float, names: tuple[str, ...]) -> Tensor:
        known = {
            "longitude": self.longitude / 180.0 - 1,
            "latitude": self.latitude / 90.0,
            "depth": self.depth / 345.0 - 1,
            "time": 2 * self.seconds[:, 0] / longest - 1,
        }
        if not names or any(name not in known for name in names):
            raise InputError(f"targets must be some of {', '.join(known)}; received {names!r}")
        return torch.stack([known[name] for name in names], dim=-1)


def errors(
    prediction: Tensor, target: Tensor, longest: float, names: tuple[str, ...] = TARGETS
) -> dict[str, float]:
    """Computes mean absolute errors in degrees, km and seconds, in float64.

    Example:
        >>> errors(torch.zeros(2, 4), torch.full((2, 4), 0.5), longest=400.0)["longitude_error"]
        90.0
    """
    units = UNITS | {"time": longest / 2}
    means = (prediction.double() - target.double()).abs().mean(0).tolist()
    return {f"{name}_error": units[name] * mean for name, mean in zip(names, means, strict=True)}
