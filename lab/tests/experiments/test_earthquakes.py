"""Earthquake tasks: geometry against closed forms, scales, bands, splits that do and do not overlap."""

import pytest
import torch
from wellposed_lab.experiments.earthquake.geometry import Subnet, azimuth, distance, errors
from wellposed_lab.experiments.earthquake.picks import ISC_PICKS, isc_picks, read_picks, residuals, subnets
from wellposed_lab.experiments.earthquake.task import (
    DepthAndTime,
    Earthquakes,
    EpicentreSplit,
    RandomSplit,
    RestrictedLatitude,
    StationNetwork,
    bands,
)
from wellposed_lab.experiments.earthquake.travel_times import travel_times

from wellposed.data.cache import ChecksumError, MissingDataError
from wellposed.errors import FileFormatError, InputError

EARTH = "homogeneous"
SMALL = {"samples": 400, "test_samples": 100, "earth": EARTH}
HEADER = "event,sta,ev_lat,ev_lon,ev_depth_km,sta_lat,sta_lon,tt_s"


def located(y):
    """Longitude, latitude, depth of targets in their units."""
    return 180 * (y[:, 0].double() + 1), 90 * y[:, 1].double(), 345 * (y[:, 2].double() + 1)


def stations(u, count=5):
    u = u.double().unflatten(1, (count, 6))
    return 180 * (u[..., 0] + 1), 90 * u[..., 1], u


@pytest.mark.parametrize("at", [None, 1.0, 9.0])
def test_features_describe_the_source(at):
    """Distances, back-azimuths and times follow from the places that are given away by the features."""
    task = Earthquakes(**SMALL)
    u, y = task.test(0, at)
    longitude, latitude, depth = located(y)
    station_longitude, station_latitude, parts = stations(u)
    away = distance(latitude[:, None], longitude[:, None], station_latitude, station_longitude)
    assert float(away.min()) > 0.99 and float(away.max()) < 30.01
    back = azimuth(station_latitude, station_longitude, latitude[:, None], longitude[:, None]).deg2rad()
    inner = station_latitude.abs() < 89  # at the poles float32 leaves no direction
    torch.testing.assert_close(parts[..., 3][inner], back.sin()[inner], rtol=0, atol=2e-3)
    torch.testing.assert_close(parts[..., 4][inner], back.cos()[inner], rtol=0, atol=2e-3)
    assert bool((parts[..., 2] == 0).all())
    seconds = travel_times(EARTH)(away.clamp(1, 30), depth.clamp(0, 690)[:, None])
    relative = (seconds - seconds[:, :1]) / task.longest
    torch.testing.assert_close(parts[..., 5], relative, rtol=0, atol=1e-4)
    torch.testing.assert_close(y[:, 3].double(), 2 * seconds[:, 0] / task.longest - 1, rtol=0, atol=1e-4)


def test_relative_times_and_targets_lie_between_minus_one_and_one():
    u, y = Earthquakes(**SMALL).train(0)
    assert u.dtype == y.dtype == torch.float32
    assert float(stations(u)[2][..., 3:].abs().max()) <= 1
    assert float(y.abs().max()) <= 1


def test_training_region_and_bands():
    task = Earthquakes(**SMALL)
    longitude, latitude, depth = located(task.train(0)[1])
    assert float(longitude.min()) > 89.9 and float(longitude.max()) < 270.1
    assert float(latitude.abs().max()) < 75.1 and float(depth.max()) < 690.1
    for k in range(1, 10):
        longitude = located(task.test(0, float(k))[1])[0]
        west, east = bands(k)
        inside = [(longitude > low - 1e-3) & (longitude < high + 1e-3) for low, high in (west, east)]
        assert bool((inside[0] | inside[1]).all())
        assert 20 < int(inside[0].sum()) < 80


def test_bands_border_the_training_region_and_each_other():
    """(90 - 10k, 100 - 10k) and (-100 + 10k, -90 + 10k), the second 360 degrees further."""
    assert bands(1) == ((80, 90), (270, 280))
    for k in range(1, 9):
        assert bands(k + 1)[0][1] == bands(k)[0][0] and bands(k + 1)[1][0] == bands(k)[1][1]
    with pytest.raises(InputError, match="between 1 and 9"):
        bands(10)


def test_seeds_and_splits_are_their_own():
    task = Earthquakes(**SMALL)
    parts = [task.train(0)[1], task.train(1)[1], task.validation(0)[1], task.test(0, None)[1]]
    rows = [set(map(tuple, part.tolist())) for part in parts]
    assert len(set.union(*rows)) == sum(map(len, rows))
    torch.testing.assert_close(task.train(0)[0], task.train(0)[0], rtol=0, atol=0)


def test_restricted_latitudes_are_tested_outside():
    task = RestrictedLatitude(**SMALL)
    assert float(located(task.train(0)[1])[1].abs().max()) < 45.01
    assert float(located(task.test(0, None)[1])[1].abs().max()) < 45.01
    outside = located(task.test(0, 9.0)[1])[1]
    assert float(outside.abs().min()) > 44.99 and bool((outside < 0).any()) and bool((outside > 0).any())


def test_second_pass_has_depth_and_time():
    task, both = DepthAndTime(**SMALL), Earthquakes(**SMALL)
    y = task.train(0)[1]
    assert y.shape == (400, 2)
    assert set(task.score(y, y)) == {"test_mse", "depth_error", "time_error"}
    assert task.name != both.name


@pytest.mark.parametrize("kind", [RandomSplit, EpicentreSplit])
def test_meshes_are_split_completely(kind):
    task = kind(side=5, depths=8, earth=EARTH)
    rows = torch.cat(list(task.rows_by_split(0).values()))
    assert torch.equal(rows.sort().values, torch.arange(200)) and task.samples == 200
    assert len(task.train(0)[0]) == 160


def test_only_the_random_split_leaks():
    shared = {}
    for kind in (RandomSplit, EpicentreSplit):
        task = kind(side=5, depths=8, earth=EARTH)
        parts = {name: set((rows // task.depths).tolist()) for name, rows in task.rows_by_split(3).items()}
        shared[kind] = len(parts["test"] & parts["train"]) / len(parts["test"])
        places = {name: set(map(tuple, getattr(task, name)(3)[1][:, :2].tolist())) for name in ("train", "test")}
        assert bool(places["train"] & places["test"]) == (kind is RandomSplit)
    assert shared[EpicentreSplit] == 0 and shared[RandomSplit] > 0.9


def test_an_epicentre_of_a_mesh_keeps_its_stations():
    u, y = RandomSplit(side=3, depths=6, earth=EARTH).mesh(0)
    u, y = u.view(9, 6, 5, 6), y.view(9, 6, 4)
    assert bool((u[:, :1, :, :5] == u[..., :5]).all()) and bool((y[:, :1, :2] == y[..., :2]).all())
    assert bool((y[:, 1:, 2] > y[:, :-1, 2]).all())
    assert len(set(map(tuple, y[:, 0, :2].tolist()))) == 9


def test_published_counts():
    task = RandomSplit(depths=695)
    assert task.samples == 900_720
    assert len(task.rows_by_split(0)["train"]) == 720_576
    assert 720_576 % 695 != 0  # so its training samples are no whole epicentres


def test_station_network_stays_where_it_is():
    task = StationNetwork(earth=EARTH, test_samples=50)
    (u, y), (other, _) = task.train(0), task.test(0)
    assert u.shape == (4865, 270) and len(set(map(tuple, y[:, :2].tolist()))) == 7
    fixed = u.view(-1, 45, 6)[:, :, :3]
    assert bool((fixed == fixed[0]).all()) and bool((other.view(-1, 45, 6)[:, :, :3] == fixed[0]).all())
    longitude, latitude, depth = located(y)
    stations = [axis.expand(4865, -1) for axis in task.station_coordinates(0)]
    away = distance(latitude[:, None], longitude[:, None], stations[1], stations[0])
    seconds = travel_times(EARTH)(away, depth.clamp(0, 690)[:, None])
    torch.testing.assert_close(
        u.view(-1, 45, 6)[..., 5].double(), (seconds - seconds[:, :1]) / task.longest, rtol=0, atol=1e-4
    )
    assert torch.equal(task.groups().bincount(), torch.full((45,), 6))


def test_one_depth_is_drawn_at_random():
    y = StationNetwork(earth=EARTH, epicentres=50, depths=1).train(0)[1]
    assert len(y) == 50 and float(y[:, 2].std()) > 0.3


@pytest.mark.parametrize("task", [RandomSplit(side=2, depths=2, earth=EARTH), StationNetwork(earth=EARTH)])
def test_tasks_with_one_region_have_no_bands(task):
    with pytest.raises(InputError, match="at=None"):
        task.test(0, 9.0)


def test_errors_are_in_degrees_kilometres_and_seconds():
    y = torch.zeros(3, 4)
    moved = y + torch.tensor([1 / 180, 1 / 90, 1 / 345, 2 / 400])
    found = errors(moved, y, longest=400.0)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=1e-5)
    assert list(found) == ["longitude_error", "latitude_error", "depth_error", "time_error"]


def test_unknown_targets():
    one = torch.ones(1)
    subnet = Subnet(one, one, one, one[None], one[None], one[None])
    with pytest.raises(InputError, match="longitude, latitude, depth, time"):
        subnet.pair(100.0, ("magnitude",))


@pytest.fixture
def picks(tmp_path):
    """Two events: the first at 179 E with seven stations across the date line, the second with one pick."""
    times, lines = travel_times(EARTH), [HEADER]
    for j in range(7):
        place = torch.tensor([5.0, -179.0 + j], dtype=torch.float64)
        away = distance(torch.tensor(0.0).double(), torch.tensor(179.0).double(), *place)
        seconds = float(times(away, torch.tensor(50.0))) + (1.5 if j else 60.0)
        lines.append(f"a,S{j},0.0,179.0,50.0,{float(place[0])},{float(place[1])},{seconds}")
    lines += ["a,S3,0.0,179.0,50.0,5.0,-176.0,9999", "b,S0,10.0,20.0,,5.0,-179.0,100"]
    lines += ["b,S1,10.0,20.0,5,11.0,21.0,20"]
    path = tmp_path / "picks.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_picks(path)


def test_picks_are_read_and_compared(picks):
    assert len(picks.event) == 8 and picks.event.unique().tolist() == [0, 1]
    late = residuals(picks, travel_times(EARTH))
    torch.testing.assert_close(late[1:7], torch.full((6,), 1.5, dtype=torch.float64), rtol=0, atol=1e-6)


def test_subnets_of_real_picks(picks):
    """The pick that is a minute late is left out, and so is the event with one station."""
    subnet = subnets(picks, travel_times(EARTH), 5, torch.Generator().manual_seed(0))
    assert subnet.longitude.tolist() == [179.0] and subnet.seconds.shape == (1, 5)
    assert float(subnet.station_longitude.min()) > 181 and float(subnet.station_longitude.max()) < 188
    assert subnets(picks, travel_times(EARTH), 7, torch.Generator().manual_seed(0)) is None


def test_missing_picks_say_how_to_get_them(bare):
    with pytest.raises(MissingDataError, match=r"isc_p_picks.csv.gz.*Three ways"):
        isc_picks()


def test_other_picks_at_the_place_are_refused(bare):
    place = bare / ISC_PICKS.path
    place.parent.mkdir()
    place.write_bytes(b"something else")
    with pytest.raises(ChecksumError, match="delete it"):
        isc_picks()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("event,sta\n1,A\n", "lacks the columns ev_lat"),
        (f"{HEADER}\n1,A,0,0,ten,0,0,5\n", "numbers in ev_depth_km; received 'ten' in line 2"),
        (f"{HEADER}\n1,A,0,0,,0,0,5\n", "no complete pick"),
        ("", "lacks the columns"),
    ],
)
def test_malformed_picks(tmp_path, text, message):
    path = tmp_path / "picks.csv"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message):
        read_picks(path)


def test_damaged_gzip(tmp_path):
    path = tmp_path / "picks.csv.gz"
    path.write_bytes(b"no gzip at all")
    with pytest.raises(FileFormatError, match="damaged"):
        read_picks(path)
