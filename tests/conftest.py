"""Shared set-up: few threads, the commands of the lab, and the helper modules of this folder importable."""

import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from distributions import declared_commands, write_distribution
from pairwise import mark_uncovered

# A shell starts what runs in its background deaf to Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
def _lab_commands(tmp_path_factory):
    """Has the command line find the commands that pyproject.toml declares, also where nothing is installed."""
    folder = write_distribution(tmp_path_factory.mktemp("installed"), "wellposed-lab", declared_commands())
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))
