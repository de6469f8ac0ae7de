"""Mutation testing: small faults are put into the library one at a time, and the tests that pass there must fail.

Every mutant is one change inside one function of the pure-Python parts of equilibrium/, convex/ and robust/:
another comparison, operator, constant or branch, or a statement left out. The code of the function is replaced in
a forked process, so that all who have imported it see the fault; the tests that execute its line then run,
shortest first. A mutant is killed if one of them fails or takes ten times as long as without it (and ten seconds).
Which mutants are drawn depends on the seed alone, not on the number of jobs. Files compiled by numba are a sample
of their own (--jit), run as Python with the compiler off, by those tests that are tiny enough for it.

Run: python tests/campaigns/mutants.py map      runs the tests once and notes who executes which line
     python tests/campaigns/mutants.py check    runs them again without coverage; those that fail are left out
     python tests/campaigns/mutants.py run --count 500 --seed 0 --jobs 2
                                                prints survivors, writes results/campaigns/mutants.json
     python tests/campaigns/mutants.py report   writes that file anew from the verdicts so far
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pytest
from mutations import PARTS, ROOT, SOURCE, Functions, Mutant, changes, drawn, living

OTHERS = ("checker", "contracts", "forms", "models")  # tests of what is built on the parts
FOLDER = ROOT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.json")  # survivors that do the same, each with the reason
LONGEST = 40.0  # seconds of tests for a mutant, measured without it
TINY = 5.0  # seconds a test may take with the compiler off
PIECE = 15.0  # seconds of tests that a check runs in one process
BETWEEN = 90.0  # seconds for what is not a test: imports, and what is taken down
MEMORY = 12 << 30
QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", "--tb=no", "--show-capture=no"]
SURVIVED, MISSED, IMPOSSIBLE, BROKEN = "survived", "not executed by a test", "not possible", "broken"
DEAD = ("killed", "timeout", "crashed")


class Notes:
    """A plugin that keeps durations and failures, tells coverage which test runs, and ends long tests."""

    def __init__(self, limits: dict[str, float] | None = None, coverage: Any = None, longest: float = 0.0) -> None:
        self.limits, self.coverage, self.longest = limits or {}, coverage, longest
        self.seconds: dict[str, float] = {}
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.found: list[str] = []

    def pytest_collection_finish(self, session: Any) -> None:
        self.found = [item.nodeid for item in session.items]

    def pytest_runtest_setup(self, item: Any) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
        limit = self.longest or 10 + 10 * self.limits.get(item.nodeid, 10.0)
        signal.setitimer(signal.ITIMER_REAL, limit)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            signal.setitimer(signal.ITIMER_REAL, BETWEEN)
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
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        signal.setitimer(signal.ITIMER_REAL, BETWEEN)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        place = scratch / f"{index}.tests"
        (scratch / f"{index}.json").write_text(json.dumps(work(place)))
        shutil.rmtree(place, ignore_errors=True)
        code = 0
    finally:
        os._exit(code)


def in_parallel(
    works: Iterable[tuple[Any, Callable[[Path], Any]]], jobs: int, done: Callable[[Any, Any], None], until: float
) -> None:
    """Does works in forked processes, a few at a time; `done` gets what they return, or the signal's number."""
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
                path = Path(folder) / f"{index}.json"
                code = os.waitstatus_to_exitcode(status)
                done(name, json.loads(path.read_text()) if code == 0 else code)


def covered(tests: list[str], longest: float) -> Callable[[Path], Any]:
    """Returns the work of running tests under coverage: durations, failures, and who executes what."""

    def work(place: Path) -> Any:
        coverage = importlib.import_module("coverage")
        watch = coverage.Coverage(source=[str(SOURCE / part) for part in PARTS], data_file=None)
        watch.start()
        notes = Notes(coverage=watch, longest=longest)
        signal.signal(signal.SIGALRM, too_long)
        pytest.main([*QUIET, f"--basetemp={place}", *tests], [notes])
        watch.stop()
        data, lines, good = watch.get_data(), {}, notes.passed - notes.failed
        for path in data.measured_files():
            found = data.contexts_by_lineno(path).items()
            lines[str(Path(path).relative_to(ROOT))] = {line: sorted(good & {*tests}) for line, tests in found}
        return {"seconds": notes.seconds, "failed": sorted(notes.failed), "lines": lines}

    return work


def draw_map(options: argparse.Namespace) -> None:
    """Runs tests and examples of all parts that are not in the map yet; notes who executes which line."""
    parts = sorted({mutant.file.split("/")[2] for mutant in drawn(options.seed, options.jit)})
    around = () if options.jit else OTHERS
    files = [path for part in (*parts, *around) for path in sorted((ROOT / "tests" / part).glob("test_*.py"))]
    examples = [path for part in parts for path in sorted((SOURCE / part).rglob("*.py"))]
    files += [path for path in examples if ">>>" in path.read_text()]
    everything = collect(options.tests or (str(path.relative_to(ROOT)) for path in files))
    options.map.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"seconds": {}, "failed": [], "lines": {}}
    if options.map.exists():
        found = json.loads(options.map.read_text())

    def done(tests: list[str], result: Any) -> None:
        if isinstance(result, int):
            print(f"{tests}: ended with {result}", flush=True)
            return
        found["seconds"] |= result["seconds"]
        found["failed"] += result["failed"]
        for path, lines in result["lines"].items():
            for line, names in lines.items():
                found["lines"].setdefault(path, {}).setdefault(line, []).extend(names)
        options.map.write_text(json.dumps(found))

    todo = pieces([test for test in everything if test not in found["seconds"]], {})
    works = [(piece, covered(piece, TINY if options.jit else 600.0)) for piece in todo]
    in_parallel(works, options.jobs, done, time.time() + options.minutes * 60)
    options.map.parent.mkdir(parents=True, exist_ok=True)
    options.map.write_text(json.dumps(found))
    print(
        f"{len(found['seconds'])} of {len(everything)} tests: {options.map}; failed:", *found["failed"], sep="\n  "
    )


def again(tests: list[str], longest: float) -> Callable[[Path], Any]:
    """Returns the work of running tests as they are."""

    def work(place: Path) -> Any:
        notes = Notes(longest=longest)
        signal.signal(signal.SIGALRM, too_long)
        pytest.main([*QUIET, f"--basetemp={place}", *tests], [notes])
        return {"seconds": notes.seconds, "passed": sorted(notes.passed - notes.failed)}

    return work


def mapped(known: dict[str, Any]) -> list[str]:
    """Returns the tests of a map."""
    return sorted({test for lines in known["lines"].values() for tests in lines.values() for test in tests})


def pieces(tests: list[str], seconds: dict[str, float]) -> list[list[str]]:
    """Cuts sorted tests into pieces of one file and of a few seconds; returns the longest first."""
    found: list[tuple[float, list[str]]] = []
    for _, group in groupby(tests, key=lambda test: test.split("::")[0]):
        found.append((0.0, []))
        for test in group:
            taken = seconds.get(test, PIECE / 8)
            if found[-1][0] + taken > PIECE:
                found.append((0.0, []))
            found[-1] = (found[-1][0] + taken, [*found[-1][1], test])
    return [piece for _, piece in sorted(found, reverse=True) if piece]


def check(options: argparse.Namespace) -> None:
    """Runs the tests of the map without a mutant, measures them anew and leaves out those that fail here."""
    known = json.loads(options.map.read_text())
    tests = mapped(known)
    collect(test.split("::")[0] for test in tests)
    seconds: dict[str, float] = {}
    passed: set[str] = set()

    def done(name: Any, result: Any) -> None:
        if isinstance(result, dict):
            seconds.update(result["seconds"])
            passed.update(result["passed"])

    works = [(None, again(piece, TINY if options.jit else 600.0)) for piece in pieces(tests, known["seconds"])]
    in_parallel(works, options.jobs, done, time.time() + options.minutes * 60)
    left = sorted(set(tests) - passed)
    lines = {
        file: {line: [test for test in tests if test in passed] for line, tests in found.items()}
        for file, found in known["lines"].items()
    }
    options.map.write_text(json.dumps({"seconds": seconds, "failed": known["failed"] + left, "lines": lines}))
    print(f"{len(tests)} tests, {sum(seconds.values()):.0f} s, left out {len(left)}:", *left, sep="\n  ")


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


def chosen(mutant: Mutant, known: dict[str, Any]) -> list[str]:
    """Returns the shortest tests that execute a mutant's line, as far as they fit, file by file."""
    lines, seconds = known["lines"].get(mutant.file, {}), known["seconds"]
    near = [test for line in mutant.around for test in lines.get(str(line), [])]
    tests = lines.get(str(mutant.line), []) or near
    kept: dict[str, list[str]] = defaultdict(list)
    total = 0.0
    for test in sorted(set(tests), key=lambda test: (seconds[test], test)):
        total += seconds[test]
        if kept and total > LONGEST:
            break
        kept[test.split("::")[0]].append(test)
    files = sorted(kept.values(), key=lambda tests: sum(seconds[test] for test in tests) / len(tests))
    return [test for tests in files for test in tests]


def judged(mutant: Mutant, tests: list[str], known: dict[str, Any], functions: Functions) -> Callable[[Path], Any]:
    """Returns the work of running tests against a mutant."""

    def work(place: Path) -> Any:
        for function, code in changes(mutant, functions):
            function.__code__ = code
        notes, start = Notes(limits=known["seconds"]), time.monotonic()
        code = int(pytest.main(["-x", *QUIET, f"--basetemp={place}", *tests], [notes]))
        verdict = {0: SURVIVED, 1: "killed", 2: "killed"}.get(code, BROKEN)
        by = next(iter(notes.failed), None)
        return {"verdict": verdict, "by": by, "seconds": round(time.monotonic() - start, 2), "tests": len(tests)}

    return work


def run(options: argparse.Namespace) -> None:
    """Judges the first mutants and notes every verdict at once."""
    known = json.loads(options.map.read_text())
    there = set(collect({test.split("::")[0] for test in mapped(known)}))
    known["lines"] = {
        file: {line: [test for test in tests if test in there] for line, tests in lines.items()}
        for file, lines in known["lines"].items()
    }
    sample, functions = sampled(options)
    first, last = (int(part) if part else None for part in options.slice.split(":"))
    old = verdicts(options.verdicts)
    options.verdicts.parent.mkdir(parents=True, exist_ok=True)
    works = []
    for mutant in sample[first:last]:
        before = old.get((mutant.key, mutant.digest), {}).get("verdict")
        if before in DEAD or (before is not None and not options.again):
            continue
        tests = chosen(mutant, known)
        if tests:
            works.append((mutant, judged(mutant, tests, known, functions)))
        else:
            note(options.verdicts, mutant, {"verdict": MISSED})

    def done(mutant: Mutant, result: Any) -> None:
        if isinstance(result, int):
            result = {"verdict": "timeout" if result == -signal.SIGALRM else "crashed"}
        note(options.verdicts, mutant, result)
        if result["verdict"] not in DEAD:
            print(f"line {mutant.line} of {mutant.key}: {result['verdict']}", flush=True)

    gc.collect()
    gc.freeze()  # the processes share these pages
    in_parallel(works, options.jobs, done, time.time() + options.minutes * 60)
    gc.unfreeze()
    report(options)


def note(path: Path, mutant: Mutant, result: dict[str, Any]) -> None:
    """Appends a verdict."""
    with path.open("a") as file:
        file.write(json.dumps({"mutant": mutant.key, "digest": mutant.digest} | result) + "\n")


def verdicts(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Reads all verdicts; the last one about a mutant counts, unless it had been killed before."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        result = json.loads(line)
        name = (result["mutant"], result["digest"])
        if found.get(name, {}).get("verdict") not in DEAD:
            found[name] = result
    return found


def sampled(options: argparse.Namespace) -> tuple[list[Mutant], Functions]:
    """Returns the first mutants that can be put into a process, and the functions of this one."""
    everything = drawn(options.seed, options.jit)
    functions = living(everything)
    return list(islice((mutant for mutant in everything if changes(mutant, functions)), options.count)), functions


def report(options: argparse.Namespace) -> None:
    """Writes counts, scores and survivors of the sample, with the reasons why some are no faults."""
    sample, _ = sampled(options)
    known, reasons = verdicts(options.verdicts), json.loads(EQUIVALENT.read_text())
    counts, survivors = Counter[str](), []
    for mutant in sample:
        verdict = known.get((mutant.key, mutant.digest), {}).get("verdict")
        if verdict is None:
            continue
        if verdict not in DEAD:
            verdict, why = ("equivalent", reasons[mutant.key]) if mutant.key in reasons else (verdict, None)
            survivors.append({"mutant": mutant.key, "line": mutant.line, "verdict": verdict, "why": why})
        counts[verdict] += 1
    tried, dead = counts.total(), sum(counts[kind] for kind in DEAD)
    command = f"python tests/campaigns/mutants.py run --count {options.count} --seed {options.seed}"
    found = {
        "command": command + " --jit" * options.jit,
        "of": len(drawn(options.seed, options.jit)),
        "tried": tried,
        **dict(sorted(counts.items())),
        "score": round(dead / max(tried, 1), 4),
        "score without equivalents": round(dead / max(tried - counts["equivalent"], 1), 4),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found | {"survivors": survivors}, indent=1) + "\n")
    print(found)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["map", "check", "run", "report"])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--jit", action="store_true", help="files compiled by numba, with the compiler off")
    parser.add_argument("--slice", default=":", help="judge these of the sample only, as 0:250")
    parser.add_argument("--again", action="store_true", help="judge survivors again")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no more work after")
    parser.add_argument("--tests", nargs="+", help="files that a map is drawn of; all unless told")
    parser.add_argument("--map", type=Path)
    parser.add_argument("--verdicts", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kind = "jit_" * options.jit
    options.map = (options.map or FOLDER / f"{kind}map.json").resolve()
    options.verdicts = (options.verdicts or FOLDER / f"{kind}verdicts.jsonl").resolve()
    options.out = (options.out or ROOT / "results" / "campaigns" / f"{kind}mutants.json").resolve()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HYPOTHESIS_PROFILE": "mutants"}
    if options.jit:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "tests")]
    {"map": draw_map, "check": check, "run": run, "report": report}[options.what](options)


if __name__ == "__main__":
    main()
