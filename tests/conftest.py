"""Shared set-up: few threads, and the helper modules of this folder importable."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
