"""Travel times: TauP's own numbers, closed forms, files that are missing or damaged."""

import csv
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from wellposed_lab.experiments.earthquake import travel_times as module
from wellposed_lab.experiments.earthquake.travel_times import (
    VERSION,
    Earth,
    Rays,
    TravelTimes,
    branches,
    build_ak135,
    cached_table,
    chord,
    read_plain_table,
    read_table,
    save_table,
    slowness,
    travel_times,
)

from wellposed.data.cache import MissingDataError, data_folder
from wellposed.errors import FileFormatError, InputError, UnknownNameError

LIMIT = 2e-3  # seconds
ORACLE = Path(__file__).with_name("taup_first_p.csv")  # get_travel_times of obspy 1.5 at random places


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
def cone():
    """Straight rays at 10 km/s; from 5 degrees on a branch that is linear in both directions is there, too."""
    distances, depths = tensor(0, 1, 3, 10), tensor(0, 100, 100, 700)
    turned = (2 * distances + 0.01 * depths[:, None])[None]
    reach = torch.stack([torch.zeros(2, 4), torch.full((2, 4), 180.0)]).double()
    reach[0, 1] = 5.0
    return TravelTimes("cone", "made up", distances, depths, torch.full((4, 4), 0.1).double(), turned, reach)


@pytest.fixture(scope="module")
def ak135():
    pytest.importorskip("obspy.taup")
    return build_ak135()


def naive(model, distance, depth):
    return min(one.time for one in model.get_travel_times(depth, distance, phase_list=module.PHASES))


def oracle():
    with ORACLE.open(encoding="utf-8", newline="") as stream:
        rows = [
            [float(row[name]) for name in ("depth_km", "distance_deg", "seconds")]
            for row in csv.DictReader(stream)
        ]
    return torch.tensor(rows, dtype=torch.float64).T


def test_oracle_is_taup():
    """A few of its numbers, asked again."""
    model = pytest.importorskip("obspy.taup").TauPyModel("ak135")
    for depth, distance, seconds in oracle().T[::40].tolist():
        assert naive(model, distance, depth) == pytest.approx(seconds, abs=1e-3)


def test_whole_table_agrees_with_plain_calls_of_taup(ak135):
    depth, distance, seconds = oracle()
    assert len(depth) >= 500 and int((distance < 1).sum()) > 100
    wrong = (ak135(distance, depth) - seconds).abs()
    assert float(wrong.max()) <= LIMIT
    assert float(wrong.median()) <= 2e-4


def test_every_branch_is_first_somewhere(ak135):
    """A table that forgets one of them is late there."""
    depth, distance, _ = oracle()
    for branch in range(len(ak135.turned)):
        reach = ak135.reach.clone()
        reach[:, 1 + branch] = 1e3
        without = TravelTimes("ak135", "", ak135.distances, ak135.depths, ak135.direct, ak135.turned, reach)
        late = without(distance, depth) - ak135(distance, depth)
        assert float(late.min()) >= 0
        first_in_its_own_layer = (
            branch == 0
        )  # turns beneath a source in the uppermost layer: part of the direct rays
        assert (float(late.max()) > 0.01) != first_in_its_own_layer


def test_layers_in_which_branches_turn():
    pytest.importorskip("obspy.taup")
    earth = Earth()
    assert earth.depths == pytest.approx([0, 20, 35, 134, 214, 410, 660, 2891.5], abs=1)
    assert earth.largest(20.0, below=False) == pytest.approx(math.radians(6351 / 5.8))
    assert earth.largest(20.0, below=True) == pytest.approx(math.radians(6351 / 6.5))
    direct, turned = branches(earth, 100.0, 2)
    assert [rays is None for rays in turned] == [True, True, False, False, False, False, False, False]
    for rays in (direct, *turned[2:]):
        assert bool((np.diff(rays.distance) > 0).all())
        middle = (rays.distance[1:] + rays.distance[:-1]) / 2
        assert bool((np.diff(rays.at(middle)) > 0).all())
        np.testing.assert_allclose(rays.at(rays.distance), rays.time, atol=1e-9)


def test_rays_follow_cubics_and_go_on_straight():
    at = np.array([-1.0, 0.0, 0.5, 2.0, 3.0])
    rays = Rays(np.array([0.0, 2.0]), np.array([0.0, 8.0]), np.array([0.0, 12.0]))  # t = x^3
    np.testing.assert_allclose(rays.at(at), [0.0, 0.0, 0.125, 8.0, 20.0])


def test_table_of_the_data_folder_agrees(ak135):
    folder = data_folder()
    path = None if folder is None else folder / module.SMALL_TABLE.path
    if path is None or not path.is_file():
        pytest.skip("the data folder has no travel-time table")
    given = read_plain_table(path, "data folder")
    depth, distance = given.depths[[1, 10, 26]][:, None], given.distances[None]
    near = distance <= 150  # beyond it the wave along the core ends, at one distance or the other
    difference = (given(distance, depth) - ak135(distance, depth)) * near
    assert float(difference.abs().max()) <= LIMIT


@pytest.mark.slow
def test_a_computed_table_is_kept_and_read_again(bare, monkeypatch):
    pytest.importorskip("obspy.taup")
    module._ak135.cache_clear()
    first = travel_times("ak135")
    module._ak135.cache_clear()
    monkeypatch.setitem(sys.modules, "obspy.taup", None)
    again = travel_times("ak135")
    module._ak135.cache_clear()
    assert (
        torch.equal(first.turned, again.turned)
        and str(first) == str(again) == f"ak135: TauP of obspy, table {VERSION}"
    )


def test_homogeneous_sphere():
    times = travel_times("homogeneous")
    for distance, depth in ((0.0, 90.0), (30.0, 0.0), (90.0, 350.0), (180.0, 700.0)):
        r = 6371 - depth
        chord = math.sqrt(6371**2 + r**2 - 2 * 6371 * r * math.cos(math.radians(distance)))
        assert float(times(tensor(distance), tensor(depth))) == pytest.approx(chord / 9, abs=1e-9)


def test_direct_rays_are_exact_and_later_branches_are_the_earliest(cone):
    generator = torch.Generator().manual_seed(0)
    distance = 10 * torch.rand(200, generator=generator, dtype=torch.float64)
    depth = 700 * torch.rand(200, generator=generator, dtype=torch.float64)
    straight = chord(distance, depth) / 10
    expected = torch.where(distance < 5, straight, torch.minimum(straight, 2 * distance + 0.01 * depth))
    torch.testing.assert_close(cone(distance, depth), expected)
    assert bool((expected < straight).any())
    assert cone(distance[:5, None], depth[None, :3]).shape == (5, 3)
    assert cone.longest(3.0) == pytest.approx(float(chord(tensor(3.0), tensor(700.0))) / 10)


def test_depths_between_layers_belong_to_both(cone):
    """A jump between two rows of the same depth is no slope of the cells beside it."""
    direct = cone.direct.clone()
    direct[2:] *= 2
    jump = TravelTimes("jump", "made up", cone.distances, cone.depths, direct)
    above, below = (float(jump(tensor(0.0), tensor(depth))) for depth in (99.0, 101.0))
    assert above == pytest.approx(9.9) and below == pytest.approx(20.2)
    assert math.isfinite(float(jump(tensor(0.0), tensor(100.0))))


def test_slowness_at_the_source():
    distances, depths = tensor(0, 1, 2), tensor(0, 10)
    found = slowness(chord(distances, depths[:, None]) / 4, distances, depths)
    torch.testing.assert_close(found, torch.full((2, 3), 0.25, dtype=torch.float64))


@pytest.mark.parametrize(
    ("distance", "depth", "name"), [(11.0, 5.0, "distance"), (5.0, 701.0, "depth"), (-1.0, 5.0, "distance")]
)
def test_outside_the_table(cone, distance, depth, name):
    with pytest.raises(InputError, match=f"{name} must lie between 0 and"):
        cone(tensor(distance), tensor(depth))


def test_a_table_is_read_from_the_cache_without_obspy(bare, no_obspy, cone):
    save_table(cone, cached_table())
    found = travel_times("ak135")
    for name in ("distances", "depths", "direct", "turned", "reach"):
        torch.testing.assert_close(getattr(found, name), getattr(cone, name).double(), rtol=1e-6, atol=0)
    assert str(found) == f"ak135: TauP of obspy, table {VERSION}"
    assert [path.name for path in cached_table().parent.iterdir()] == [cached_table().name]
    assert cached_table().name == f"ak135-v{VERSION}.npz"


def test_without_obspy_the_data_folder_serves(bare, no_obspy, cone, monkeypatch):
    path = bare / module.SMALL_TABLE.path
    path.parent.mkdir(parents=True)
    seconds = chord(tensor(0, 1, 10), tensor(0, 700)[:, None]) / 8
    np.savez(path, dist_deg=[0.0, 1.0, 10.0], depth_km=[0.0, 700.0], time_s=seconds.numpy())
    monkeypatch.setattr("wellposed.data.cache.verify", lambda path, file: path)
    found = travel_times("ak135")
    assert "data folder" in found.source and not cached_table().exists()
    assert float(found(tensor(0.3), tensor(4.0))) == pytest.approx(float(chord(tensor(0.3), tensor(4.0))) / 8)


def test_without_anything_the_message_says_what_to_do(bare, no_obspy):
    with pytest.raises(MissingDataError, match=r"make lab.*ak135_first_P_table.npz.*WELLPOSED_CACHE"):
        travel_times("ak135")


AXES = {"dist_deg": np.arange(3.0), "depth_km": np.arange(2.0)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"dist_deg": np.arange(3.0)}, "is no travel-time table"),
        (AXES | {"time_s": np.ones((3, 2))}, "do not fit"),
        (AXES | {"dist_deg": -np.arange(3.0), "time_s": np.ones((2, 3))}, "do not grow"),
        (AXES | {"time_s": np.full((2, 3), np.nan)}, "no number"),
        (AXES | {"time_s": np.array([[None, "pickled"]])}, "is no travel-time table"),
    ],
)
def test_malformed_plain_tables(tmp_path, arrays, message):
    np.savez(tmp_path / "table.npz", **arrays)
    with pytest.raises(FileFormatError, match=f"{message}.*delete it"):
        read_plain_table(tmp_path / "table.npz", "test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": np.array(1)}, "must be a travel-time table of version 2; received version 1"),
        ({"version": None}, "is no travel-time table"),
        ({"reach": np.zeros((2, 1, 4))}, "do not fit"),
        ({"turned": np.zeros((1, 4, 3))}, "do not fit"),
        ({"direct": np.full((4, 4), np.inf)}, "no number"),
        ({"depths": np.array([0.0, 10.0, 9.0, 20.0])}, "do not grow"),
    ],
)
def test_malformed_tables(tmp_path, cone, changes, message):
    path = tmp_path / "table.npz"
    save_table(cone, path)
    with np.load(path) as stored:
        arrays = dict(stored) | changes
    np.savez(path, **{name: part for name, part in arrays.items() if part is not None})
    with pytest.raises(FileFormatError, match=f"{message}.*delete it"):
        read_table(path, "test")


def test_tables_that_are_cut_off(tmp_path, cone):
    path = tmp_path / "table.npz"
    save_table(cone, path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:size])
        with pytest.raises(FileFormatError, match=r"is no travel-time table.*delete it"):
            read_table(path, "test")


@pytest.mark.parametrize("axes", [(tensor(0, 181), tensor(0, 10)), (tensor(0, 10), tensor(5, 10))])
def test_axes_of_a_table(axes):
    with pytest.raises(InputError, match="between 0 and 180 degrees and depths begin with 0"):
        build_ak135(*axes)


def test_a_damaged_file_in_the_cache(bare, no_obspy):
    place = cached_table()
    place.parent.mkdir(parents=True)
    place.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(FileFormatError, match="delete it"):
        travel_times("ak135")


def test_unknown_earth():
    with pytest.raises(UnknownNameError, match="did you mean 'ak135'"):
        travel_times("ak315")
