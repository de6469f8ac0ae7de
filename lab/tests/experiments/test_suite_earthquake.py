"""The earthquake suites at tiny scale: all runs finish, every claim has its numbers, controls and map are made."""

import dataclasses
import sys

import pytest
import torch
from wellposed_lab.engine.claims import load_claims
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.judge import verdicts
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.store import Record, Store, Value
from wellposed_lab.experiments.earthquake.eliminate import StationDense
from wellposed_lab.experiments.earthquake.map import draw_map
from wellposed_lab.experiments.earthquake.run import PICKED, TIMES, EarthquakeData
from wellposed_lab.experiments.earthquake.suite import with_differences
from wellposed_lab.experiments.earthquake.task import Earthquakes, MeshBands, StationNetwork
from wellposed_lab.report.page import page

SUITES = ("earthquake", "eliminate-earthquake")
TINY = StationDense(
    StationNetwork(earth="homogeneous", stations=5, epicentres=3, depths=20, test_samples=40), (8, 8), epochs=2
)

TINY_TASK = Earthquakes(samples=60, earth="homogeneous")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """All runs of both suites, without data folder, cache or obspy."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("quake")
    patch.setenv("WELLPOSED_DATA", str(folder / "none"))
    patch.setenv("WELLPOSED_CACHE", str(folder / "cache"))
    patch.setitem(sys.modules, "obspy", None)
    for name in SUITES:
        progress = run_suite(get_suite(name), Order(name, "tiny"), folder)
        assert progress.failed == 0 and progress.finished == progress.planned
    patch.undo()
    return list(Store(folder).records())


def as_default(records):
    """The same numbers as if they were judged."""
    return [dataclasses.replace(record, scale="default", seed=k) for record in records for k in (0, 1, 2)]


def test_tiny_runs_have_finite_numbers(records):
    assert {record.suite for record in records} == set(SUITES)
    values = [value for record in records for value in record.values]
    assert len(values) > 500 and all(torch.tensor(value.value).isfinite() for value in values)
    assert "ak135" not in str([record.facts for record in records])


@pytest.mark.parametrize("name", SUITES)
def test_every_claim_can_be_judged(records, name):
    """Each number that a claim asks for is recorded by one of the runs."""
    claims = [claim for claim in load_claims() if claim.suite == name and claim.rule.measures]
    known = {(r.task, r.model, v.metric, v.at) for r in with_differences(records) for v in r.values}
    measures = [measure for claim in claims for measure in claim.rule.measures]
    missing = [m for m in measures if (m.task, m.model, m.metric, m.at) not in known]
    assert len(claims) >= 6 and not missing


def test_counts_are_those_of_the_data(records):
    """The tiny mesh has 4 x 4 epicentres at 10 depths; the published counts are those of the published one."""
    counted = next(r for r in records if r.suite == "earthquake" and r.model == "data")
    found = [counted.value(name) for name in ("features", "samples", "train_samples", "test_samples")]
    assert found == [30, 160, 128, 32]
    claims = [claim for claim in load_claims() if claim.suite == "earthquake" and claim.unit == "samples"]
    judged = verdicts(as_default(records), claims)
    assert len(judged) == 3 and "reproduced" not in {verdict.verdict for verdict in judged}
    mesh = MeshBands(depths=695, earth="homogeneous")
    whole = EarthquakeData(suite="earthquake", seed=0, scale="paper", task=TINY_TASK, mesh=mesh)
    record = dataclasses.replace(counted, scale="paper", values=whole.execute([whole], None)[0].values)
    assert {verdict.verdict for verdict in verdicts([record], claims)} == {"reproduced"}


def test_differences_have_the_right_sign():
    def record(model, metric, value, **other):
        return Record(
            id=model, suite="earthquake", scale="default", task="earthquake", model=model, size=None, role="ours",
            kind="run", config={}, values=(Value(metric, value, 9.0),), series={}, facts={}, environment={},
            started="", seconds=0.0, **{"seed": 0, **other},
        )  # fmt: skip

    def added(metric, name, **other):
        pair = [record("implicit", metric, 5.0, **other), record("eikonet", metric, 18.0)]
        return with_differences(pair)[0].value(name, 9.0)

    assert added("longitude_error", "longitude_gain") == 13.0
    assert added("depth_error", "depth_excess") == -13.0
    assert added("longitude_error", "longitude_gain", seed=1) is None
    assert added("longitude_error", "longitude_gain", error="failed") is None
    assert with_differences([record("eikonet", "test_mse", 1.0)])[0].value("test_mse_gain", 9.0) is None


def test_controls_are_said(records):
    own = [[record for record in records if record.suite == name] for name in SUITES]
    quake, stations = (" ".join(get_suite(n).findings(part)) for n, part in zip(SUITES, own, strict=True))
    for text in (
        "Error of the longitude",
        "split at random",
        "Two passes",
        "Latitude at k = 9",
        "no whole number of epicentres",
    ):
        assert text in quake
    for text in ("Predicting the mean", "at random", "Certified", "only stations go"):
        assert text in stations
    assert get_suite("earthquake").findings([]) and get_suite("eliminate-earthquake").findings([])


def test_orders_of_removal_are_compared_at_one_scale(records):
    own = [record for record in records if record.suite == "eliminate-earthquake"]
    fit = next(record for record in own if record.model == "state-driven")
    values = tuple(Value("test_mse_increase", 7.0, at) for at in (0.3, 0.9))
    large = dataclasses.replace(fit, id="large", scale="paper", values=values)
    plain, joined = (get_suite("eliminate-earthquake").findings(some) for some in (own, [*own, large]))
    (added,) = (sentence for sentence in joined if sentence not in plain)
    assert "4,750 features" in added and "+7 to +7 with 30 % gone" in added and "1 seed." in added


def test_different_travel_times_are_told(records):
    """Records say which times they were made with; those of one scale must agree."""
    own = [record for record in records if record.suite == "earthquake"]
    assert {record.facts[TIMES] for record in own} == {"homogeneous: straight rays at 9 km/s"}
    assert "different travel times" not in " ".join(get_suite("earthquake").findings(own))
    other = dataclasses.replace(own[0], facts={TIMES: "ak135: another table"})
    text = " ".join(get_suite("earthquake").findings([*own[1:], other]))
    assert "scale tiny were made with different travel times (ak135: another table; homogeneous" in text
    earlier = dataclasses.replace(other, scale="default", facts={})
    assert "different travel times" not in " ".join(get_suite("earthquake").findings([*own[1:], earlier]))


def test_what_the_skip_closes_is_computed(records):
    """From 18 degrees to 8 of the way from 18 to 5, and A = 0 is half a degree worse."""
    found = {"eikonet": 18.0, "eikonet-skip": 8.0, "implicit": 5.0, "implicit-no-feedback": 5.5, "linear": 6.0}
    own = [
        dataclasses.replace(
            record, values=(*_without_errors(record), Value("longitude_error", found[record.model], 9))
        )
        for record in records
        if record.task == "earthquake" and record.model in found
    ]
    text = " ".join(get_suite("earthquake").findings(own))
    assert "closes 77 to 77 % of the distance" in text and "changes the median error by +0.50 degrees" in text


def _without_errors(record):
    return (value for value in record.values if value.metric != "longitude_error")


def test_the_map_is_a_picture_of_the_page(records):
    pytest.importorskip("matplotlib")
    own = [record for record in records if record.suite == "earthquake"]
    picture = draw_map(own)
    assert picture is not None and picture.startswith(b"\x89PNG")
    assert draw_map([record for record in own if record.model == "data"]) is None and draw_map([]) is None
    text = page(own, {"earthquake": get_suite("earthquake")})
    assert text.count('class="picture"') == 1 and "Training and test regions" in text


def test_without_matplotlib_there_is_no_map(records, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw_map([record for record in records if record.suite == "earthquake"]) is None


def test_real_picks_are_compared_where_they_are(monkeypatch):
    """In the homogeneous earth there is nothing to compare; ak135 asks for the picks."""
    run = EarthquakeData(suite="earthquake", seed=0, scale="tiny", task=TINY_TASK)
    assert run.execute([run], None)[0].values == ()
    assert PICKED == "isc-picks"


def test_stations_go_whole():
    states = TINY.states(0, 50)
    groups = TINY.groups(states)
    assert groups.tolist() == [*range(5, 21), *(station for station in range(5) for _ in range(6))]
    fixed = dataclasses.replace(TINY, inputs_only=True).groups(states)
    assert fixed[:16].tolist() == [-1] * 16 and torch.equal(fixed[16:], groups[16:])
    assert TINY.change(0.3, 0.1, 0.2) == pytest.approx(0.1)


def test_what_removal_costs_is_measured_in_degrees(records):
    """Against the fit with all features, at every share."""
    own = next(record for record in records if record.model == "state-driven")
    for name in ("longitude_error", "latitude_error"):
        whole = own.value(name, 0.0)
        assert whole > 0 and own.value(f"{name}_increase", 0.0) == 0.0
        for at in (0.3, 0.9):
            assert own.value(f"{name}_increase", at) == pytest.approx(own.value(name, at) - whole)
    target = TINY.tests()["test_mse"][1]
    assert TINY.details(_Right(target)) == {"longitude_error": 0.0, "latitude_error": 0.0}


class _Right(torch.nn.Module):
    """Knows the answers to all test samples."""

    def __init__(self, target):
        super().__init__()
        self.target = target

    def forward(self, u):
        return self.target[: len(u)]
