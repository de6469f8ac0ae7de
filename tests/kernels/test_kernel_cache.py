"""Compiled code on the disk that an older version or an accident left behind."""

import importlib.util
import pickle

import numba
import pytest

SOURCE = """
from wellposed.kernels.cpu.cache import njit_cached

@njit_cached()
def double(x):
    return 2 * x
"""
MOVED = pickle.dumps(numba.__version__, protocol=-1) + b"cwellposed.kernels.cpu.solve\nNoSuchClass\n."


def load(path):
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ending", "damage"),
    [("nbi", lambda data: MOVED), ("nbi", lambda data: data[:-9]), ("nbi", lambda data: b""),
     ("nbc", lambda data: data[: len(data) // 2])],
    ids=["moved class", "cut index", "empty index", "cut code"],
)  # fmt: skip
def test_what_cannot_be_read_is_compiled_anew(tmp_path, ending, damage):
    path = tmp_path / "kernels.py"
    path.write_text(SOURCE)
    assert load(path).double(2.0) == 4.0
    (file,) = (tmp_path / "__pycache__").glob(f"*.{ending}")
    file.write_bytes(damage(file.read_bytes()))
    assert load(path).double(2.0) == 4.0
    again = load(path)
    assert again.double(2.0) == 4.0 and again.double.stats.cache_hits, "what was compiled anew is on the disk"
