"""Tests in forked processes: several at a time, in silence, with a limit of time for every test."""

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from mutant_changes import PARTS, Functions, Mutant, watch
from silent import be_silent

BETWEEN = 90.0  # seconds for what is not a test: imports, and what is taken down
MEMORY = 12 << 30  # bytes that a test may take
QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", "--tb=no", "--show-capture=no"]


def file_of(test: str) -> str:
    """Returns the file that a test is in."""
    return test.split("::")[0]


class Notes:
    """A plugin that keeps durations, failures and which mutants' places a test executes, and ends long tests."""

    def __init__(
        self,
        limits: dict[str, float] | None = None,  # by file: whoever comes first makes what its tests share
        longest: float = 0.0,
        diary: Path | None = None,
        reached: set[str] | None = None,
    ) -> None:
        self.limits, self.longest, self.diary = limits or {}, longest, diary
        self.reached = set() if reached is None else reached
        self.seconds: dict[str, float] = {}
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.found: list[str] = []
        self.reached_by: dict[str, list[str]] = defaultdict(list)

    def pytest_collection_finish(self, session: Any) -> None:
        self.found = [item.nodeid for item in session.items]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        self.reached.clear()
        if self.diary is not None:
            self.diary.write_text(item.nodeid)
        limit = self.longest or 10 + 10 * self.limits[file_of(item.nodeid)]
        signal.setitimer(signal.ITIMER_REAL, limit)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            signal.setitimer(signal.ITIMER_REAL, BETWEEN)
            for key in self.reached:
                self.reached_by[key].append(report.nodeid)
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def too_long(number: int, frame: Any) -> None:
    """Fails a test."""
    raise TimeoutError


def in_child(work: Callable[[Path], Any], index: int, scratch: Path) -> int:
    """Forks a process that does some work without a word and leaves what it returns as a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        be_silent()
        signal.setitimer(signal.ITIMER_REAL, BETWEEN)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
        folder = scratch / f"{index}.tests"
        (scratch / f"{index}.json").write_text(json.dumps(work(folder)))
        shutil.rmtree(folder, ignore_errors=True)
        code = 0
    finally:
        os._exit(code)


def in_parallel(
    works: Iterable[tuple[Any, Callable[[Path], Any]]], jobs: int, done: Callable[[Any, Any], None], until: float
) -> None:
    """Does works in forked processes, a few at a time; `done` gets what they return, or code and last test."""
    running: dict[int, tuple[int, Any]] = {}
    todo = iter(enumerate(works))
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        while True:
            while len(running) < jobs and time.time() < until and (work := next(todo, None)) is not None:
                running[in_child(work[1][1], work[0], Path(folder))] = (work[0], work[1][0])
            if not running:
                return
            pid, status = os.wait()
            if pid in running:
                index, name = running.pop(pid)
                path, diary = Path(folder) / f"{index}.json", Path(folder) / f"{index}.diary"
                code = os.waitstatus_to_exitcode(status)
                last = diary.read_text() if diary.exists() else ""
                done(name, json.loads(path.read_text()) if code == 0 else (code, last))


def warm_up() -> None:
    """Imports what the tests need, once for all processes."""
    names = ("torch", "scipy.linalg", "scipy.sparse", "sklearn", "numba", "matplotlib.pyplot", "cvxpy", "highspy")
    for name in (*names, "wellposed", *(f"wellposed.{part}" for part in PARTS)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    hypothesis = importlib.import_module("hypothesis")
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a failure needs no shrinking here
    hypothesis.settings.register_profile("mutants", derandomize=True, deadline=None, database=None, phases=phases)
    importlib.import_module("torch").set_num_threads(1)


def collect(files: Iterable[str]) -> list[str]:
    """Imports files of tests, once for all processes; returns the names of their tests."""
    warm_up()
    notes = Notes()
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        pytest.main([*QUIET, "--collect-only", *sorted(set(files))], [notes])
    return notes.found


def unchanged(
    tests: list[str], longest: float, mutants: list[Mutant], functions: Functions
) -> Callable[[Path], dict[str, Any]]:
    """Returns the work of running tests without a mutant: durations, who passes, who executes which place."""

    def work(place: Path) -> dict[str, Any]:
        notes = Notes(longest=longest, reached=watch(mutants, functions))
        signal.signal(signal.SIGALRM, too_long)
        pytest.main([*QUIET, f"--basetemp={place}", *tests], [notes])
        good = notes.passed - notes.failed
        return {
            "seconds": {test: round(notes.seconds[test], 3) for test in good},
            "reached": {key: [test for test in tests if test in good] for key, tests in notes.reached_by.items()},
        }

    return work
