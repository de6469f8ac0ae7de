"""Settings of all tests, the library's and the lab's: seeds, Ctrl-C, examples of hypothesis, covering parameters."""

import os
import signal

import hypothesis
import pytest
import torch
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
