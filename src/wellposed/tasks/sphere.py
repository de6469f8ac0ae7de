"""Distances and directions on a sphere, all in degrees."""

import torch
from torch import Tensor


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
        >>> [round(float(part), 9) for part in there]
        [0.0, 370.0]
    """
    here, angle, way = latitude.deg2rad(), away.deg2rad(), bearing.deg2rad()
    sine = (here.sin() * angle.cos() + here.cos() * angle.sin() * way.cos()).clamp(-1.0, 1.0)
    turn = torch.atan2(way.sin() * angle.sin() * here.cos(), angle.cos() - here.sin() * sine)
    return torch.asin(sine).rad2deg(), longitude + turn.rad2deg()
