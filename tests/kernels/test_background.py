"""Kernels that are compiled in another process: who answers meanwhile, when engines change, and how it ends."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from wellposed import ImplicitModel, ImplicitRNN
from wellposed.convex import Automatic, Design, Homotopy, row_problem
from wellposed.convex.solvers import path
from wellposed.equilibrium import fixed_point
from wellposed.equilibrium.compiled import CompiledLoop
from wellposed.kernels import compile_family as other
from wellposed.kernels.cpu import background, layer, projection, sequence, solve

TEXT = "not numba: its kernels are being compiled in another process; WELLPOSED_COMPILE=wait waits for them"


class Job:
    """Stands for a process."""

    code: int | None = None

    def poll(self):
        return self.code


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """No kernels are on the disk, and processes are only counted; returns them and the marker's path."""
    jobs, marker = [], tmp_path / "kernels.ready"
    monkeypatch.setenv("WELLPOSED_COMPILE", "background")
    monkeypatch.setattr(background, "_ready", set())
    monkeypatch.setattr(background, "_jobs", {})
    monkeypatch.setattr(background, "marker_of", lambda family: marker)
    monkeypatch.setattr(background, "_start", lambda family: jobs.append(Job()) or jobs[-1])
    return jobs, marker


def test_the_plain_loop_answers_until_kernels_are_there(cold):
    (jobs, marker), u = cold, torch.randn(5, 3)
    model = ImplicitModel(3, 2, 8)
    reference = ImplicitModel(3, 2, 8, executor="reference")
    reference.load_state_dict(model.state_dict())
    assert model.explain(u).splitlines()[0] == "reference: the plain loop" and TEXT in model.explain(u)
    first = model(u)
    assert torch.equal(first, reference(u)) and len(jobs) == 1
    marker.touch()
    assert model.explain(u).startswith("numba: relu")
    second = model(u)
    assert second.grad_fn.name().startswith("_Layer")
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-5)
    marker.unlink()  # once kernels are there, nothing is looked up again
    assert model.explain(u).startswith("numba: relu") and len(jobs) == 1


def test_a_solve_begun_by_the_plain_loop_is_differentiated_by_it(cold):
    (_, marker), model = cold, ImplicitModel(3, 2, 8)
    y = model(torch.randn(5, 3))
    marker.touch()
    y.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_sequences_wait_for_kernels_of_their_own(cold):
    (jobs, marker), s = cold, torch.randn(4, 2, 3)
    rnn = ImplicitRNN(3, 5, 8)
    assert TEXT.replace("numba:", "numba for whole sequences:") in rnn.explain(s)
    first = rnn(s)[0]
    assert len(jobs) == 2  # those of sequences, and those of a single time
    marker.touch()
    assert rnn.explain(s).startswith("numba: whole sequences in one call")
    torch.testing.assert_close(rnn(s)[0], first, rtol=1e-4, atol=1e-5)


def rows_of(columns, rows, free=0, **options):
    generator = torch.Generator().manual_seed(0)
    M, z = (torch.randn(60, count, generator=generator, dtype=torch.float64) for count in (columns, rows))
    return row_problem(Design.of(M), z, kappa=0.5, capped=columns - free, **options)


@pytest.mark.parametrize(("free", "lasso"), [(0, 0.0), (2, 0.0), (0, 3.0)])
def test_the_projected_gradient_answers_until_the_path_is_there(free, lasso, cold, monkeypatch):
    (jobs, marker), problem = cold, rows_of(12, 5, free, lasso=lasso)
    with monkeypatch.context() as unused:
        unused.setattr(path, "follow_all", lambda *_: pytest.fail("it would have to be compiled"))
        first = Automatic().solve(problem)
    assert len(jobs) == 1 and bool((first.gap <= 1e-9 * problem.scale).all())
    marker.touch()
    assert "Projected" not in repr(Automatic().sequence(problem)[0])
    torch.testing.assert_close(Automatic().solve(problem).weights, first.weights, rtol=1e-4, atol=1e-5)


def test_a_large_fit_waits_for_the_path(cold):
    problem = rows_of(60, 40)
    assert "Projected" not in repr(Automatic().sequence(rows_of(2000, 8))[0]) and not cold[0]
    assert "Projected" in repr(Automatic().sequence(problem)[0])


def test_all_that_the_path_calls_is_compiled():
    other.use_kernels("wellposed.convex.solvers.path", torch.float64, 0)
    before = set(path.follow_all.signatures)
    Homotopy().solve(rows_of(12, 5))
    Homotopy().solve(rows_of(12, 5, support=torch.arange(60).reshape(5, 12) % 3 > 0))
    assert set(path.follow_all.signatures) == before


@pytest.mark.parametrize("why", ["wait", "deterministic", "by name"])
def test_who_wants_the_same_digits_waits(why, cold, monkeypatch):
    if why == "wait":
        monkeypatch.setenv("WELLPOSED_COMPILE", "wait")
    if why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    model = ImplicitModel(3, 2, 8, executor="numba" if why == "by name" else "auto")
    assert model.explain(torch.zeros(5, 3)).startswith("numba: relu") and not cold[0]


def test_compiles_here_where_no_process_can_be_started(cold, monkeypatch):
    def forbidden(family):
        raise PermissionError("no new processes")

    monkeypatch.setattr(background, "_start", forbidden)
    assert ImplicitModel(3, 2, 8).explain(torch.zeros(5, 3)).startswith("numba: relu")


def test_compiles_here_without_a_folder_for_compiled_code(cold, monkeypatch):
    monkeypatch.setattr(background, "marker_of", lambda family: None)
    assert ImplicitModel(3, 2, 8).explain(torch.zeros(5, 3)).startswith("numba: relu") and not cold[0]


def test_compiles_here_after_the_other_process_has_failed(cold):
    (jobs, _), model, u = cold, ImplicitModel(3, 2, 8), torch.zeros(5, 3)
    assert TEXT in model.explain(u)
    jobs[0].code = 1
    assert model.explain(u).startswith("numba: relu") and len(jobs) == 1


def test_looks_again_later_while_somebody_else_compiles(cold, monkeypatch):
    (jobs, marker), model, u = cold, ImplicitModel(3, 2, 8), torch.zeros(5, 3)
    assert TEXT in model.explain(u)
    jobs[0].code = background.BUSY
    assert TEXT in model.explain(u) and TEXT in model.explain(u) and len(jobs) == 1
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert TEXT in model.explain(u) and len(jobs) == 2
    marker.touch()
    assert model.explain(u).startswith("numba: relu")


def test_one_process_compiles_and_leaves_the_marker(monkeypatch, tmp_path):
    done, marker = [], tmp_path / "kernels.ready"
    monkeypatch.setattr(other, "marker_of", lambda family: marker)
    monkeypatch.setattr(other, "end_with_parent", lambda stream: None)
    monkeypatch.setattr(other, "use_kernels", lambda *family: done.append(family))
    monkeypatch.setattr(os, "nice", lambda increment: 0, raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with other.held(marker.parent) as alone:
        assert alone
        with pytest.raises(SystemExit) as ended:
            other.compile_family("model", "float32", 5)
    assert ended.value.code == background.BUSY and not done and not marker.exists()
    other.compile_family("model", "float32", 5)
    other.compile_family("model", "float32", 5)
    assert done == [("model", torch.float32, 5)] and marker.exists()


def _signatures():
    dispatchers = [
        solve.solve,
        solve.pack,
        solve.prepare_adjoint,
        layer.layer,
        layer.accepts,
        layer.largest_row_sum,
        projection.project,
        sequence.forward,
    ]
    dispatchers += [projection.project_backward, sequence.backward]
    return {dispatcher.py_func.__qualname__: set(dispatcher.signatures) for dispatcher in dispatchers}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_that_models_call_is_compiled(dtype):
    """After the work of the other process, a model and a network compile nothing more."""
    for name in (background.MODEL, background.SEQUENCE):
        other.use_kernels(name, dtype, 5)
    before = _signatures()
    model, rnn = (
        ImplicitModel(4, 2, 8, executor="numba").to(dtype),
        ImplicitRNN(3, 5, 8, executor="numba").to(dtype),
    )
    u, s = torch.randn(7, 4, dtype=dtype, requires_grad=True), torch.randn(6, 2, 3, dtype=dtype)
    model(u).sum().backward()
    model.equilibrium(u).value.sum().backward()
    rnn(s)[0].sum().backward()
    with torch.no_grad():
        model(u)
        rnn(s)
    wide = ImplicitModel(4, 2, 8, solver="picard", condition="spectral", executor="numba").to(dtype)
    wide(u).sum().backward()
    f = lambda x, u: torch.relu(x / 3 + u)  # noqa: E731
    fixed_point(f, torch.zeros_like(u), u, loop=CompiledLoop("none")).value.sum().backward()
    assert _signatures() == before


PARENT = """
import sys, time, torch
from wellposed import ImplicitModel
from wellposed.kernels import compile_family as other
from wellposed.kernels.cpu import background, layer, projection, sequence, solve
ImplicitModel(3, 2, 8)(torch.zeros(5, 3))
(_, job, _), = background._jobs.values()
print(job.pid, flush=True)
if sys.argv[1] == "killed":
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("end", ["finished", "killed"])
def test_no_process_outlives_the_one_that_started_it(end, tmp_path):
    environment = os.environ | {"WELLPOSED_COMPILE": "background", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with subprocess.Popen([sys.executable, "-c", PARENT, end], env=environment, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        if end == "killed":
            parent.send_signal(signal.SIGKILL)
    status = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 60
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().split()[2] == "Z"
