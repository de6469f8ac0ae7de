"""States in files: the same model as from memory, and memory that does not grow with the samples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from wellposed.activations import Activation
from wellposed.convex import Design, fit_states, open_states, record_states, save_states
from wellposed.convex.problem import some_columns
from wellposed.convex.states import scratch
from wellposed.errors import FileFormatError, InputError

ROOT = Path(__file__).parents[2]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(50, 6, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_sparsity": 0.5},
        {"support": "full", "rescale": False},
        {"targets": torch.arange(150) % 3},
        {"solver": "projected", "objective": "lasso", "strength": 0.05, "bound": "row", "support": "full"},
        {"solver": "refined"},
    ],
    ids=["plain", "sequential", "full", "scored", "projected", "refined"],
)
def test_files_give_the_model_of_memory(options, tmp_path):
    memory = record_states(network(), batches())
    save_states(memory, tmp_path)
    mapped = open_states(tmp_path)
    assert isinstance(mapped.X.numpy(), np.ndarray) and mapped.X.dtype == memory.X.dtype
    (one, first), (two, second) = (
        fit_states(states, kappa=0.9, limit=limit, **options) for states, limit in ((memory, 1 << 30), (mapped, 0))
    )
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    for key, value in first.facts().items():
        if isinstance(value, float):
            assert second.facts()[key] == pytest.approx(value, rel=1e-4, abs=1e-9), key


def test_states_without_a_form_are_opened_too(tmp_path):
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, u: torch.Tensor) -> torch.Tensor:
            return self.layer(u).relu() if bool(u.sum() < 1e9) else u

    states = record_states(Branching(), batches())
    assert states.form is None
    save_states(states, tmp_path)
    again = open_states(tmp_path)
    assert again.form is None and again.blocks == states.blocks and again.input_shape == states.input_shape
    one, two = (fit_states(part, kappa=0.9, limit=limit)[0] for part, limit in ((states, 1 << 30), (again, 0)))
    torch.testing.assert_close(one.A, two.A)
    torch.testing.assert_close(one.B, two.B)


def test_the_form_comes_back(tmp_path):
    states = record_states(network(), batches())
    save_states(states, tmp_path)
    u = batches()[0]
    assert torch.equal(open_states(tmp_path).form(u), states.form(u))


def test_a_design_applies_units_and_means_while_it_reads():
    X, U = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    factors = torch.tensor([2.0, 0.5, 1.0, 4.0, 1.0, 3.0], dtype=torch.float64)
    plain = torch.cat([X, U], 1) * factors
    design = Design.of(X.float(), U, samples=7, factors=factors).restricted(torch.tensor([1, 3, 5])).centred()
    wanted = (plain - plain.mean(0))[:, [1, 3, 5]]
    found = torch.cat([piece for _, piece in design.pieces()])
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.allclose(design.squares(), wanted.square().sum(0), atol=1e-5)
    narrow = design.restricted(torch.tensor([0, 2]))
    assert torch.allclose(narrow.read(slice(3, 5)), wanted[3:5, [0, 2]], atol=1e-6)
    for which in (torch.tensor([2, 0]), torch.tensor([True, False, True, False]), slice(1, 3)):
        some = some_columns(Design.of(X, samples=7, factors=factors[:4]).centred(), which)
        centred = plain[:, :4] - plain[:, :4].mean(0)
        assert torch.allclose(torch.cat([piece for _, piece in some.pieces()]), centred[:, which], atol=1e-12)
    targets = Design.of(U, samples=5).centred()
    assert torch.allclose(design.moments(targets).cross, (U - U.mean(0)).mT @ wanted, atol=1e-5)


def test_scratch_goes_to_a_file_that_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert scratch(3, 4, 96).shape == (3, 4) and not list(tmp_path.iterdir())
    part = scratch(3, 4, 95)
    part[:] = 7.0
    assert [path.stat().st_size for path in tmp_path.rglob("*.bin")] == [96]
    del part
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_folder_of_states_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="no states"):
        open_states(tmp_path)
    save_states(record_states(network(), batches()), tmp_path)
    index = json.loads((tmp_path / "states.json").read_text())
    assert len(index["files"]) == 5 and len(index.pop("sha256")) == 64
    (tmp_path / "states.json").write_text(json.dumps({**index, "blocks": [1]}))
    with pytest.raises(FileFormatError, match="blocks"):
        open_states(tmp_path)
    own = Activation("mine", torch.relu, (0.0, 1.0), {"inf": 1.0})
    states = record_states(network(), batches())
    with pytest.raises(InputError, match="register"):
        save_states(type(states)(states.U, states.Z, states.X, states.Y, (20,), (own,)), tmp_path)


def test_damaged_and_half_written_states_are_refused(tmp_path, monkeypatch):
    states = record_states(network(), batches())
    save_states(states, tmp_path)
    for name in ("X.npy", "form.safetensors"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(FileFormatError, match=f"{name} is damaged"):
            open_states(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "X.npy").write_bytes((tmp_path / "X.npy").read_bytes()[:-1] + b"\x01")
    assert open_states(tmp_path, verify=False).X.shape == states.X.shape

    def stop(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("wellposed.convex.states.write_tensors", stop)  # U, Z, X and Y of the new ones are there
    with pytest.raises(OSError, match="disk is full"):
        save_states(states, tmp_path)
    with pytest.raises(FileFormatError, match="no states"):
        open_states(tmp_path)


MEASURED = """
import resource, sys, threading, time
import torch
from torch import nn
from wellposed.convex import fit_states, open_states, record_states, save_states

def memory(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

torch.set_num_threads(1)
batches, mode, limit = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 4))
generator = torch.Generator().manual_seed(1)
def loader(count):
    for _ in range(count):
        yield torch.randn(2000, 40, generator=generator)
options = {"kappa": 0.9, "limit": 0} | ({"target_sparsity": 0.5} if mode == "sparse" else {})
fit_states(record_states(network, loader(1), limit=0), **options)  # everything is compiled and warm
states = record_states(network, loader(batches), limit=0)
before, peak, running = memory("RssAnon"), [0], True
def watch():
    while running:
        peak[0] = max(peak[0], memory("RssAnon") - before)
        time.sleep(0.002)
if limit:
    used = memory("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
thread = threading.Thread(target=watch, daemon=True)
thread.start()
model, report = fit_states(states, **options)
running = False
thread.join()
print(peak[0], report.output_error)
"""


def measured(count: int, mode: str, limit: int = 0) -> tuple[int, float]:
    """The largest anonymous memory of a fit beyond that before it, in bytes, and the error of its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed goes back at once
    command = [sys.executable, "-c", MEASURED, str(count), mode, str(limit)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    peak, error = done.stdout.split()
    return int(peak), float(error)


MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("mode", ["plain", "sparse"])
def test_memory_does_not_grow_with_the_samples(mode):
    few, many = measured(8, mode), measured(64, mode)
    grown = 56 * 2000 * (40 + 100 + 100) * 4  # bytes of the recording alone, in single precision
    assert grown > 100 * MIB
    assert many[0] - few[0] < 6 * MIB, (few[0] / MIB, many[0] / MIB)
    if mode == "plain":
        assert many[1] < 1e-3


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on data is one of Linux")
def test_states_larger_than_the_memory_that_is_allowed():
    recording = 40 * 2000 * (40 + 100 + 100) * 4
    allowed = 32 * MIB
    assert recording > 2 * allowed
    assert measured(40, "plain", allowed)[1] < 1e-3
