"""The same answer from a cluster as from here, also when a worker dies in the middle."""

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from wellposed_lab.engine.experiment import Suite
from wellposed_lab.engine.run import Context, Run, grouped
from wellposed_lab.engine.runner import Order, _execute_in_worker, run_suite
from wellposed_lab.engine.store import Result, Store, Value

from wellposed.convex import RowFit, fit_states, record_states
from wellposed.convex.problem import RowProblem
from wellposed.convex.solvers.base import RowSolution, RowSolver
from wellposed.convex.solvers.homotopy import Schur
from wellposed.errors import InputError, UnknownNameError, WorkerLostError
from wellposed.workers import Workers, cluster


@dataclass(frozen=True)
class Noted(RowSolver):
    """Notes which process solved which rows; the first one to get beyond `limit` chunks dies if `deadly`."""

    folder: Path
    limit: int = 1000
    deadly: bool = field(default=False, repr=False)  # no part of what the rows depend on
    pause: float = 0.0

    def why_not(self, problem: RowProblem) -> str | None:
        return None

    def solve(self, problem: RowProblem) -> RowSolution:
        time.sleep(self.pause)
        note(self.folder, float(problem.power[0]), self.limit, self.deadly)
        return Schur().solve(problem)


def note(folder: Path, key: object, limit: int, deadly: bool) -> None:
    folder.mkdir(exist_ok=True)
    if deadly and len(list(folder.iterdir())) >= limit and not (folder / "death").exists():
        (folder / "death").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"{key}-{os.getpid()}-{time.time_ns()}").touch()


def notes(folder: Path) -> list[tuple[str, int]]:
    """What was done, by which process."""
    return [(p.name.split("-")[0], int(p.name.split("-")[1])) for p in folder.iterdir() if p.name != "death"]


@dataclass(frozen=True, kw_only=True)
class NotedRun(Run):
    folder: str = ""
    deadly: bool = False
    not_identity = ("role", "folder", "deadly")

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return "draw", "a number", None

    def execute(self, runs: Sequence["NotedRun"], context: Context) -> list[Result]:
        time.sleep(0.05)
        note(Path(self.folder), self.seed, 4, self.deadly)
        draw = float(torch.rand((), generator=torch.Generator().manual_seed(self.seed)))
        return [Result((Value("draw", draw),))]


def suite(folder: Path, deadly: bool = False) -> Suite:
    runs = [
        NotedRun(suite="noted", seed=k, scale="tiny", folder=str(folder), deadly=deadly, role="ours")
        for k in range(12)
    ]
    return Suite("noted", "", "", (), lambda scale: runs[:1], {"tiny": 12, "default": 12, "paper": 12})


def numbers(out: Path) -> dict[str, object]:
    return {
        record.id: dataclasses.replace(record, config={}, environment={}, started="", seconds=0.0).to_json()
        for record in Store(out).records()
    }


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(80, 24, generator=generator, dtype=torch.float64)
    z = M @ torch.randn(24, 60, generator=generator, dtype=torch.float64)
    return M[:, :16], M[:, 16:], z


def test_dask_needs_a_client():
    pytest.importorskip("distributed", reason="dask is not installed: pip install distributed")
    with pytest.raises(InputError, match="needs a client"):
        list(Workers(2, "dask").run(print, [(1,), (2,)]))


@pytest.mark.slow
def test_a_lost_process_is_named_and_the_rest_is_done_by_a_second_call(tmp_path):
    pytest.importorskip("joblib")
    lost_worker_then_rerun(tmp_path, "loky")


def lost_worker_then_rerun(tmp_path: Path, backend: str) -> None:
    """Kills a worker; the second call does what is missing and no more."""
    options = {"kappa": 0.5, "chunk": 4, "folder": tmp_path / "rows", "jobs": 2, "backend": backend}
    first, second = Noted(tmp_path / "notes", 5, deadly=True), Noted(tmp_path / "notes", 5)
    assert repr(first) == repr(second)
    with pytest.raises(WorkerLostError, match="run it again"):
        RowFit(**options, solver=first).solve(*rows())
    kept = {path.name for path in (tmp_path / "rows").iterdir()}
    assert 0 < len(kept) < 15
    done = len(notes(tmp_path / "notes"))
    found = RowFit(**options, solver=second).solve(*rows())
    assert len(notes(tmp_path / "notes")) - done == 15 - len(kept)
    assert torch.allclose(found.weights, RowFit(kappa=0.5).solve(*rows()).weights, atol=1e-12)


@pytest.fixture(scope="module")
def dask_client():
    distributed = pytest.importorskip("distributed", reason="dask is not installed: pip install distributed")
    pytest.importorskip("joblib")
    local = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
    )
    with local, distributed.Client(local) as client:
        yield client


def processes(client) -> set[int]:
    return set(client.run(os.getpid).values())


def await_new_worker(client, before: set[int]) -> None:
    """A killed worker is replaced."""
    deadline = time.monotonic() + 60
    while len(processes(client)) < 2 or processes(client) == before:
        assert time.monotonic() < deadline, "the killed worker was not replaced"
        time.sleep(0.1)


@pytest.mark.slow  # the runs below lose a worker too, and the whole fit has rows
def test_rows_by_dask_with_a_killed_worker(dask_client, tmp_path):
    alone = RowFit(kappa=0.5, chunk=2).solve(*rows())
    before, victims = processes(dask_client), []
    dask_client.run(torch.get_num_threads)  # both have torch before the clock of the test begins

    def kill(done: int, total: int) -> None:
        workers = {worker for _, worker in notes(tmp_path / "notes")}
        if not victims and len(workers) == 2:
            victims.append(min(workers))
            os.kill(victims[0], signal.SIGKILL)

    solver = Noted(tmp_path / "notes", pause=0.05)
    found = RowFit(kappa=0.5, chunk=2, solver=solver, backend="dask", progress=kill).solve(*rows())
    assert len(victims) == 1, "both workers have solved rows, and one of them was killed"
    assert torch.allclose(found.weights, alone.weights, atol=1e-12)
    assert torch.allclose(found.gap, alone.gap, atol=1e-12)
    workers = [worker for _, worker in notes(tmp_path / "notes")]
    assert set(workers) & (before - set(victims)) and os.getpid() not in workers
    await_new_worker(dask_client, before)


def test_runs_by_dask_with_a_killed_worker(dask_client, tmp_path):
    run_suite(suite(tmp_path / "here"), Order("noted", "tiny"), tmp_path / "alone")
    before = processes(dask_client)
    state = run_suite(
        suite(tmp_path / "notes", deadly=True), Order("noted", "tiny"), tmp_path / "out", backend="dask"
    )
    assert (tmp_path / "notes" / "death").exists()
    assert state.finished == 12 and not state.failed
    assert numbers(tmp_path / "out") == numbers(tmp_path / "alone")
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 12
    await_new_worker(dask_client, before)


def test_a_whole_fit_by_dask(dask_client):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Linear(9, 2)).double()
    states = record_states(network, [torch.randn(50, 4, dtype=torch.float64)])
    here, there = (fit_states(states, kappa=0.5, backend=b)[0] for b in ("threading", "dask"))
    assert torch.allclose(here.A, there.A, atol=1e-12) and torch.allclose(here.C, there.C, atol=1e-12)


def test_work_that_comes_again_from_a_lost_worker_is_not_done_twice(tmp_path):
    runs = suite(tmp_path / "notes")
    run_suite(runs, Order("noted", "tiny"), tmp_path / "out")
    group, context, store = grouped(runs.runs("tiny", None))[0], Context(tmp_path / "out"), Store(tmp_path / "out")
    before = store.path.read_bytes()
    assert "finished before" in _execute_in_worker(None, group, context, store, os.getpid())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # Ctrl-C still reaches this process
    assert store.path.read_bytes() == before and len(notes(tmp_path / "notes")) == 12


@pytest.fixture(scope="module")
def ray_cluster():
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
        with cluster("ray"):  # its processes find this file
            yield


@pytest.mark.slow
def test_rows_by_ray_and_only_the_missing_ones_after_a_killed_actor(ray_cluster, tmp_path):
    lost_worker_then_rerun(tmp_path, "ray")


@pytest.mark.slow
def test_runs_by_ray_and_only_the_missing_ones_after_a_killed_actor(ray_cluster, tmp_path):
    run_suite(suite(tmp_path / "here"), Order("noted", "tiny"), tmp_path / "alone")
    order, out, folder = Order("noted", "tiny"), tmp_path / "out", tmp_path / "notes"
    with pytest.raises(WorkerLostError, match="ray"):
        run_suite(suite(folder, deadly=True), order, out, jobs=2, backend="ray")
    kept, done = numbers(out), len(notes(folder))
    assert 0 < len(kept) < 12
    run_suite(suite(folder), order, out, jobs=2, backend="ray")
    assert len(notes(folder)) - done == 12 - len(kept)
    assert numbers(out) == numbers(tmp_path / "alone")


def test_mistakes_are_named():
    with pytest.raises(UnknownNameError, match="did you mean 'dask'"):
        RowFit(backend="dusk")
    with pytest.raises(InputError, match="zero"):
        Workers(0)
    with pytest.raises(InputError, match="address"), cluster("loky", "tcp://nowhere:1"):
        pass
