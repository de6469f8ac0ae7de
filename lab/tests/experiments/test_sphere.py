"""Distances and directions on a sphere against closed forms and another formula."""

import pytest
import torch
from wellposed_lab.experiments.earthquake.geometry import azimuth, destination, distance


def points(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    latitude = 160 * torch.rand(count, generator=generator, dtype=torch.float64) - 80
    return latitude, 360 * torch.rand(count, generator=generator, dtype=torch.float64)


def vectors(latitude, longitude):
    a, b = latitude.deg2rad(), longitude.deg2rad()
    return torch.stack([a.cos() * b.cos(), a.cos() * b.sin(), a.sin()], -1)


def test_distance_is_the_angle_between_vectors():
    one, other = points(500), points(500, seed=1)
    cosine = (vectors(*one) * vectors(*other)).sum(-1)
    torch.testing.assert_close(distance(*one, *other), torch.acos(cosine).rad2deg(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("places", "expected"),
    [((0, 0, 90, 0), 90), ((0, 10, 0, 190), 180), ((30, 40, 30, 40), 0), ((60, 0, 60, 180), 60)],
)
def test_known_distances(places, expected):
    found = distance(*torch.tensor(places, dtype=torch.float64))
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_small_distances_keep_their_digits():
    """The arc cosine would give zero here."""
    here = torch.tensor(10.0, dtype=torch.float64)
    assert float(distance(here, here, here + 1e-9, here)) == pytest.approx(1e-9, rel=1e-4)


@pytest.mark.parametrize(
    ("places", "expected"),
    [((0, 0, 0, 90), 90), ((0, 0, 90, 0), 0), ((0, 0, -10, 0), 180), ((0, 0, 0, -90), 270), ((0, 350, 0, 10), 90)],
)
def test_known_azimuths(places, expected):
    assert float(azimuth(*torch.tensor(places, dtype=torch.float64))) == pytest.approx(expected, abs=1e-9)


def test_azimuth_by_the_law_of_sines():
    """sin(azimuth) sin(distance) = cos(other latitude) sin(turn)."""
    one, other = points(500), points(500, seed=1)
    left = azimuth(*one, *other).deg2rad().sin() * distance(*one, *other).deg2rad().sin()
    right = other[0].deg2rad().cos() * (other[1] - one[1]).deg2rad().sin()
    torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


def test_destination_lies_where_it_should():
    latitude, longitude = points(500)
    generator = torch.Generator().manual_seed(3)
    away = 1 + 89 * torch.rand(500, generator=generator, dtype=torch.float64)
    bearing = 360 * torch.rand(500, generator=generator, dtype=torch.float64)
    there = destination(latitude, longitude, away, bearing)
    torch.testing.assert_close(distance(latitude, longitude, *there), away, rtol=0, atol=1e-6)
    torch.testing.assert_close(azimuth(latitude, longitude, *there), bearing, rtol=0, atol=1e-5)
    assert bool(((there[1] - longitude).abs() <= 180).all())


def test_azimuths_of_obspy():
    """On an ellipsoid azimuths differ by some tenths of a degree."""
    geodetics = pytest.importorskip("obspy.geodetics")
    one, other = points(40), points(40, seed=1)
    found = azimuth(*other, *one)
    for j in range(40):
        _, _, back = geodetics.gps2dist_azimuth(*(float(part[j]) for part in (*one, *other)))
        assert abs((float(found[j]) - back + 180) % 360 - 180) < 0.5
