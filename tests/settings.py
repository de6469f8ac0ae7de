"""What the tests of the library and of the lab share: seeds, Ctrl-C, hypothesis, covering parameters, commands."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from distributions import declared_commands, write_distribution
from pairwise import mark_uncovered
from warm_up import compile_share

# A shell starts what runs in its background deaf to Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Kernels are compiled where they are needed: results must not depend on when another process has finished.
os.environ.setdefault("WELLPOSED_COMPILE", "wait")

# The same few examples at every run; HYPOTHESIS_PROFILE=explore draws many new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_uncovered(items)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Before many tests, compiles kernels in one of the processes of pytest-xdist each: all would ask for them."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and len(request.session.items) > 1000:
        compile_share(int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


@pytest.fixture(scope="session", autouse=True)
def _lab_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Has the command line find the commands that the lab declares, also where nothing is installed."""
    folder = write_distribution(tmp_path_factory.mktemp("installed"), "wellposed-lab", declared_commands())
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any data: returns the empty folder $WELLPOSED_DATA; beside it are those of the caches."""
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("WELLPOSED_DATA", str(data))
    monkeypatch.setenv("WELLPOSED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WELLPOSED_OFFLINE", "1")
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "sklearn"))
    return data
