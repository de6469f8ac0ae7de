"""Travel times: TauP's own numbers, closed forms, files that are missing or damaged."""

import math
import sys

import numpy as np
import pytest
import torch

from wellposed.errors import FileFormatError, InputError, UnknownNameError
from wellposed.tasks import travel_times as module
from wellposed.tasks.cache import MissingDataError, data_folder
from wellposed.tasks.travel_times import (
    TravelTimes,
    build_ak135,
    cached_table,
    read_table,
    save_table,
    travel_times,
)

LIMIT = 5e-3  # seconds


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def no_obspy(monkeypatch):
    monkeypatch.setitem(sys.modules, "obspy", None)
    monkeypatch.setitem(sys.modules, "obspy.taup", None)
    module._ak135.cache_clear()
    yield
    module._ak135.cache_clear()


@pytest.fixture
def plane():
    """Times that are linear in both directions."""
    distances, depths = tensor(0, 1, 3, 10), tensor(0, 100, 700)
    return TravelTimes("plane", "made up", distances, depths, 10 * distances + 0.1 * depths[:, None])


def naive(model, distance, depth):
    return min(one.time for one in model.get_travel_times(depth, distance, phase_list=module.PHASES))


@pytest.mark.parametrize("depth", [0.0, 35.0, 150.0, 660.0])
def test_table_agrees_with_plain_calls_of_taup(depth):
    taup = pytest.importorskip("obspy.taup")
    distances = tensor(0.5, 2.0, 8.0, 15.0, 18.3, 22.0, 24.5, 29.9, 65.0, 98.0, 101.0, 130.0, 150.0, 179.0)
    table, model = build_ak135(distances, tensor(depth, depth + 10)), taup.TauPyModel("ak135")
    found = [naive(model, distance, depth) for distance in distances.tolist()]
    torch.testing.assert_close(table.seconds[0], tensor(*found), rtol=0, atol=LIMIT)


@pytest.mark.slow
def test_whole_table_agrees_with_a_sample_of_plain_calls(tmp_path, monkeypatch):
    taup = pytest.importorskip("obspy.taup")
    monkeypatch.setenv("WELLPOSED_CACHE", str(tmp_path))
    table, model = travel_times("ak135"), taup.TauPyModel("ak135")
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        i = int(torch.randint(len(table.depths), (), generator=generator))
        j = int(torch.randint(len(table.distances), (), generator=generator))
        expected = naive(model, float(table.distances[j]), float(table.depths[i]))
        assert abs(float(table.seconds[i, j]) - expected) <= LIMIT
    again = read_table(tmp_path / "travel-times" / f"ak135-v{module.VERSION}.npz", "file")
    torch.testing.assert_close(again.seconds, table.seconds, rtol=0, atol=1e-4)


def test_table_agrees_with_that_of_the_data_folder():
    pytest.importorskip("obspy.taup")
    folder = data_folder()
    path = None if folder is None else folder / module.SMALL_TABLE.path
    if path is None or not path.is_file():
        pytest.skip("the data folder has no travel-time table")
    given = read_table(path, "data folder")
    rows = [0, 10, 26]
    table = build_ak135(given.distances, given.depths[rows])
    torch.testing.assert_close(table.seconds, given.seconds[rows], rtol=0, atol=LIMIT)


def test_homogeneous_sphere():
    times = travel_times("homogeneous")
    for distance, depth in ((0.0, 90.0), (30.0, 0.0), (90.0, 350.0), (180.0, 700.0)):
        r = 6371 - depth
        chord = math.sqrt(6371**2 + r**2 - 2 * 6371 * r * math.cos(math.radians(distance)))
        assert float(times(tensor(distance), tensor(depth))) == pytest.approx(chord / 9, abs=1e-9)


def test_interpolation_is_exact_on_planes(plane):
    generator = torch.Generator().manual_seed(0)
    distance = 10 * torch.rand(50, generator=generator, dtype=torch.float64)
    depth = 700 * torch.rand(50, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(plane(distance, depth), 10 * distance + 0.1 * depth)
    assert plane(distance[:5, None], depth[None, :3]).shape == (5, 3)
    assert plane.longest(3.0) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("distance", "depth", "name"), [(11.0, 5.0, "distance"), (5.0, 701.0, "depth"), (-1.0, 5.0, "distance")]
)
def test_outside_the_table(plane, distance, depth, name):
    with pytest.raises(InputError, match=f"{name} must lie between 0 and"):
        plane(tensor(distance), tensor(depth))


def test_a_table_is_read_from_the_cache_without_obspy(bare, no_obspy, plane):
    save_table(plane, cached_table())
    found = travel_times("ak135")
    torch.testing.assert_close(found.seconds, plane.seconds)
    assert "cache" in found.source
    assert [path.name for path in cached_table().parent.iterdir()] == [cached_table().name]


def test_without_obspy_the_data_folder_serves(bare, no_obspy, plane, monkeypatch):
    path = bare / module.SMALL_TABLE.path
    save_table(plane, path)
    monkeypatch.setattr("wellposed.tasks.cache.verify", lambda path, file: path)
    assert "data folder" in travel_times("ak135").source
    assert not cached_table().exists()


def test_without_anything_the_message_says_what_to_do(bare, no_obspy):
    with pytest.raises(MissingDataError, match=r"wellposed\[seismic\].*ak135_first_P_table.npz.*WELLPOSED_CACHE"):
        travel_times("ak135")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"dist_deg": np.arange(3.0)}, "is no travel-time table"),
        ({"dist_deg": np.arange(3.0), "depth_km": np.arange(2.0), "time_s": np.ones((3, 2))}, "do not fit"),
        ({"dist_deg": -np.arange(3.0), "depth_km": np.arange(2.0), "time_s": np.ones((2, 3))}, "do not grow"),
        ({"dist_deg": np.arange(2.0), "depth_km": np.arange(2.0), "time_s": np.full((2, 2), np.nan)}, "no number"),
    ],
)
def test_malformed_tables(tmp_path, arrays, message):
    np.savez(tmp_path / "table.npz", **arrays)
    with pytest.raises(FileFormatError, match=message):
        read_table(tmp_path / "table.npz", "test")


def test_a_damaged_file_in_the_cache(bare, no_obspy):
    place = cached_table()
    place.parent.mkdir(parents=True)
    place.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(FileFormatError, match="delete it"):
        travel_times("ak135")


def test_unknown_earth():
    with pytest.raises(UnknownNameError, match="did you mean 'ak135'"):
        travel_times("ak315")
