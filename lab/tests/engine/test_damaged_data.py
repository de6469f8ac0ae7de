"""Suites on real data without it, or with files that are damaged: the message says what to do."""

import gzip
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from wellposed_lab.cache import CACHE
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.run import Context
from wellposed_lab.experiments.earthquake import travel_times
from wellposed_lab.experiments.earthquake.picks import ISC_PICKS
from wellposed_lab.experiments.earthquake.travel_times import SMALL_TABLE, VERSION
from wellposed_lab.experiments.volatility.market import FUTURES

from wellposed.cli import cli, main
from wellposed.data.cache import ChecksumError
from wellposed.errors import FileFormatError

CIFAR, NEWS = "cifar10/cifar-10-binary.tar.gz", "20newsgroups/20news-bydate.tar.gz"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty data folder; no cache, no connection, no obspy, and nothing remembered from other tests."""
    data = tmp_path / "data"
    data.mkdir()
    for name, place in (("DATA", data), ("CACHE", tmp_path / "cache"), ("OFFLINE", "1")):
        monkeypatch.setenv(f"WELLPOSED_{name}", str(place))
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "sklearn"))
    for name in ("obspy", "obspy.taup"):
        monkeypatch.setitem(sys.modules, name, None)
    CACHE.clear()
    return data


def first_run(suite):
    """Carries out the first run of a suite at its default scale, which has to read data."""
    run = get_suite(suite).runs("default", 1)[0]
    return run.execute([run], Context())


@pytest.mark.parametrize(
    ("suite", "words"),
    [
        (
            "earthquake",
            ("make lab", SMALL_TABLE.path, f"travel-times/ak135-v{VERSION}.npz"),
        ),
        ("eliminate-earthquake", ("make lab", SMALL_TABLE.path)),
        ("sparsify-cifar", ("Three ways", CIFAR, "WELLPOSED_OFFLINE")),
        ("sparsify-newsgroups", ("Three ways", NEWS, "fetch_20newsgroups")),
    ],
)
def test_missing_data_are_told_by_the_command(folder, tmp_path, suite, words):
    """Even a quiet command says why all of its runs have failed."""
    found = CliRunner().invoke(cli, ["run", suite, "--seeds", "1", "--quiet", "--out", str(tmp_path / "out")])
    assert found.exit_code == 1 and "some runs failed" in found.output
    assert all(word in found.output for word in ("MissingDataError", *words))
    assert found.output.count("MissingDataError") == 1


def test_without_bars_the_market_is_made_up(folder):
    assert {run.labels[0] for run in get_suite("volatility").runs("default", 1)} == {"volatility-generated"}


@pytest.mark.parametrize(
    ("suite", "file"),
    [
        ("earthquake", SMALL_TABLE.path),
        ("earthquake", ISC_PICKS.path),
        ("eliminate-earthquake", SMALL_TABLE.path),
        ("sparsify-cifar", CIFAR),
        ("sparsify-newsgroups", NEWS),
        ("volatility", FUTURES.path),
    ],
)
def test_damaged_files_are_named_before_any_training(folder, suite, file):
    place = folder / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(gzip.compress(b"another file")[:-4])
    with pytest.raises(
        ChecksumError, match=r"is damaged or another version.*delete it and put the right file there"
    ):
        first_run(suite)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PK\x03\x04 cut off", "is no travel-time table"), (None, "must be a travel-time table of version")],
)
def test_a_damaged_table_in_the_cache(folder, tmp_path, content, message):
    place = travel_times.cached_table()
    place.parent.mkdir(parents=True)
    if content is None:
        parts = dict.fromkeys(("distances", "depths", "direct", "turned", "reach"), np.zeros(2))
        np.savez(place, version=VERSION - 1, **parts)
    else:
        place.write_bytes(content)
    with pytest.raises(FileFormatError, match=rf"{message}.*delete it"):
        first_run("earthquake")


def test_the_command_stops_at_a_damaged_file(folder, tmp_path, monkeypatch, capsys):
    place = folder / NEWS
    place.parent.mkdir(parents=True)
    place.write_bytes(b"no archive")
    words = ["wellposed", "run", "sparsify-newsgroups", "--quiet", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr().err
    assert stop.value.code == 1 and told.startswith("Error: ") and "delete it" in told and told.count("\n") == 1
