"""Makes the helper modules of the tests importable, and takes the settings of all tests from them."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "data")]

from settings import _compiled, _lab_commands, _seeded, bare, pytest_collection_modifyitems  # noqa: E402, F401
