"""The tables of docs/install.md: what runs where neither Triton nor numba is, and in which types."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

BARE = """
import sys, warnings
sys.modules["triton"] = sys.modules["numba"] = None  # an import of one of them fails
import torch
import wellposed as wp
from wellposed.models import DenseCell

warnings.simplefilter("error", wp.errors.ConvergenceWarning)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
u = torch.rand(16, 3)
make = {
    "ImplicitModel": (lambda: wp.ImplicitModel(3, 2, 8), u, torch.bfloat16),
    "ImplicitRNN": (lambda: wp.ImplicitRNN(3, 4, state_features=8), u.reshape(4, 4, 3), torch.float32),
    "DEQ": (lambda: wp.DEQ(DenseCell(3, 8)), u, torch.float32),
    "form": (lambda: wp.to_implicit(network, (3,)), u, torch.bfloat16),
}


def first(y):
    return y[0] if isinstance(y, tuple) else y


for name, (build, given, cast) in make.items():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        y = first(build().to(dtype)(given.to(dtype)))
        assert y.dtype == dtype and y.isfinite().all(), (name, dtype)
        if name != "form":
            y.float().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = first(build()(given))
    assert y.dtype == cast and y.isfinite().all(), (name, y.dtype)

assert "not numba: numba is not installed" in wp.ImplicitModel(3, 2, 8).explain(u)
model = wp.ImplicitModel(3, 2, 8)
wp.fit(model, (u, u[:, :2]), torch.nn.functional.mse_loss, epochs=2, progress=False)
assert model.certificate().holds and not model.equilibrium(u).failed.any()
fitted, report = wp.fit_states(wp.record_states(network, u.split(8)), target_sparsity=0.5)
assert report.certificate.holds and float(report.relative_gap.max()) < 1e-6
box = wp.Box.around(u[:2].double(), 0.01)
assert (wp.robust.output_bounds(wp.to_implicit(network, (3,)).to(torch.float64), box).width > 0).all()
print("all of it")
"""


def test_the_library_works_without_triton_and_numba(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", BARE],
                          cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.stdout == "all of it\n", done.stdout + done.stderr
