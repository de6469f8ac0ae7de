"""The soak of `soak` finds what leaks and passes what does not; a few rows of `large_rows` keep their word."""

import os
import tempfile
import threading

import pytest
import soak
import torch
from large_rows import measure
from soak_pieces import PIECES

LIGHT = (
    "training, model, inf",
    "training, model, interpreted",
    "solve, anderson",
    "fit, lasso",
    "bound, crown",
    "files",
)
KEPT = []


def leak_memory(folder):
    KEPT.append(torch.ones(1 << 24))  # 64 MiB: larger than what malloc may serve from memory it has kept


def leak_descriptor(folder):
    KEPT.append(os.open(os.devnull, os.O_RDONLY))


def leak_file(folder):
    os.close(tempfile.mkstemp()[0])


def leak_thread(folder):
    stop = threading.Event()
    KEPT.append(stop)
    threading.Thread(target=stop.wait, daemon=True).start()


@pytest.fixture(autouse=True)
def clean():
    yield
    for kept in KEPT:
        kept.set() if isinstance(kept, threading.Event) else os.close(kept) if isinstance(kept, int) else None
    KEPT.clear()


def test_leaks_are_found():
    leaks = {leak.__name__: leak for leak in (leak_memory, leak_descriptor, leak_file, leak_thread)}
    found = soak.soak(0.0, leaks, warm_up=1)["judged"]
    leaking = {name for name, one in found.items() if not one["flat"]}
    assert {"resident_mib", "malloc_mib", "tensors", "descriptors", "temporary_files", "threads"} <= leaking
    assert found["children"]["flat"]


def test_work_is_flat():
    found = soak.soak(0.0, {name: PIECES[name] for name in LIGHT}, warm_up=2)
    judged = found["judged"]
    assert all(
        judged[name]["flat"] for name in ("tensors", "descriptors", "threads", "children", "temporary_files")
    )
    assert found["rounds"] == 5 and found["pieces"] == 5 * len(LIGHT)


def test_the_slope_is_robust():
    assert soak.slope([1.0, 2.0, 3.0, 400.0, 5.0, 6.0]) == pytest.approx(1.0)
    assert soak.slope([3.0]) == 0.0 and soak.slope([2.0, 2.0, 2.0]) == 0.0


@pytest.mark.slow  # those of LIGHT have run above
def test_every_piece_works(tmp_path):
    for name, piece in PIECES.items():
        (tmp_path / name).mkdir(parents=True)
        piece(tmp_path / name)


def test_large_rows_at_a_small_size():
    found = measure(60, 60, 80, 1, 0)
    assert found["largest_relative_gap"] < 1e-9 and found["largest_norm_of_a_row"] <= found["kappa"]
    assert found["memory_stated_gib"] > 0 and found["sparsity"] > 0.3


def test_a_step_is_no_slope_and_is_seen():
    rounds = [{**dict.fromkeys(soak.TOLERANCES, 1.0), "descriptors": 5.0 + (k > 30)} for k in range(40)]
    found = soak.judged(rounds, 100)["descriptors"]
    assert (found["growth_in_a_session"], found["step"], found["flat"]) == (0.0, 1.0, False)
    assert soak.judged(rounds, 100)["threads"]["flat"]
