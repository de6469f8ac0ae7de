"""What can be said of the GPU kernels without a GPU: their arithmetic, and when they are taken."""

import collections
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from wellposed import ImplicitModel
from wellposed.activations import get_activation, leaky_relu
from wellposed.equilibrium import Anderson, Relative
from wellposed.equilibrium.affine import AffineSpec
from wellposed.equilibrium.method import SolveOptions
from wellposed.errors import InputError, MissingExtraError
from wellposed.kernels.engine import NUMBA, TRITON
from wellposed.kernels.gpu.engine import device_why_not

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("marked", "kernels", "sequences"),
    [("gpu and not slow", 25, 15), pytest.param("gpu", 50, 15, marks=pytest.mark.slow)],
)
def test_kernels_in_the_interpreter(marked, kernels, sequences, tmp_path):
    # Triton looks at the variable when it is imported, and other tests may have done that.
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, "-p", "no:cacheprovider", "-W", "ignore"]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # Products are numpy's there. Its fast ones, on AMD for one, round a row differently among other rows.
    variables["OPENBLAS_CORETYPE"] = "Prescott"
    files = ("test_gpu_kernels", "test_gpu_sequence_kernels")
    run = subprocess.run(
        [*command, f"--junitxml={tmp_path / 'run.xml'}", *(str(HERE / f"{name}.py") for name in files)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    passed = collections.Counter(
        case.get("classname").rpartition(".")[2]
        for case in ElementTree.parse(tmp_path / "run.xml").iter("testcase")
        if case.find("skipped") is None
    )
    assert passed["test_gpu_kernels"] >= kernels and passed["test_gpu_sequence_kernels"] >= sequences


def test_triton_is_not_for_the_cpu():
    pytest.importorskip("triton")
    model, u = ImplicitModel(3, 2, 6, executor="triton"), torch.zeros(4, 3)
    told = "not triton: device cpu has no kernel of triton"
    assert model.explain(u) == f'none: executor="triton" was asked for\n{told}'
    with pytest.raises(InputError, match="device cpu has no kernel of triton"):
        model(u)


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install triton"):
        ImplicitModel(3, 2, 6, executor="triton")
    device_why_not.cache_clear()
    try:
        assert device_why_not(torch.device("cuda")) == "triton is not installed; pip install triton"
    finally:
        device_why_not.cache_clear()


def test_the_package_can_be_imported_without_triton():
    code = "import sys; sys.modules['triton'] = None; import wellposed.models.implicit"
    subprocess.run([sys.executable, "-c", code], check=True)


class Elsewhere:
    """A matrix that claims to lie on a GPU."""

    def __init__(self, n, dtype=torch.float32):
        self.shape, self.dtype, self.device = (n, n), dtype, torch.device("cuda", 0)

    def dim(self):
        return 2

    def element_size(self):
        return self.dtype.itemsize


def spec(activation="relu", solver=None):
    options = SolveOptions(solver or Anderson(), Relative(), 100)
    return AffineSpec(get_activation(activation), options)


@pytest.mark.parametrize(
    ("A", "options", "reason"),
    [
        (Elsewhere(16385), {}, "more than 16384 states have no kernel on the GPU"),
        (Elsewhere(1025, torch.float16), {}, "more than 1024 states have no kernel on the GPU"),
        (Elsewhere(3, torch.complex64), {}, "complex64 has no kernel"),
        (
            Elsewhere(3),
            {"activation": leaky_relu(-0.5)},
            "leaky_relu with a negative slope has no kernel on the GPU",
        ),
        (
            Elsewhere(3),
            {"solver": Anderson(memory=7)},
            "Anderson with a memory beyond 6 has no kernel on the GPU",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_reasons_of_the_gpu(A, options, reason):
    assert TRITON.why_not(spec(**options), (A,)) == reason


def test_deep_memories_are_for_the_cpu():
    assert NUMBA.why_not(spec(solver=Anderson(memory=7)), (torch.zeros(3, 3),)) == ""
