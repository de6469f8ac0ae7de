"""Mutation testing: small faults are put into the library one at a time, and the tests that pass there must fail.

Every mutant is one change inside one function of the pure-Python parts of equilibrium/, convex/ and robust/:
another comparison, operator, constant or branch, or a statement left out. The code of the function is replaced in
a forked process, so that all who have imported it see the fault; the tests that execute its line then run,
shortest first. A mutant is killed if one of them fails or takes ten times as long as without it (and ten seconds).
Which mutants are drawn depends on the seed alone, not on the number of jobs. Files compiled by numba are a sample
of their own (--jit), run as Python with the compiler off, by those tests that are tiny enough for it.

Run: python tests/campaigns/mutants.py map      runs the tests once and notes who executes which line
     python tests/campaigns/mutants.py check    runs them again without coverage; those that fail are left out,
                                                so that no mutant is killed by a test that fails anyway
     python tests/campaigns/mutants.py run --count 500 --seed 0 --jobs 2
                                                prints survivors, writes tests/campaigns/results/mutants.json
     python tests/campaigns/mutants.py report   writes that file anew from the verdicts so far
"""

import argparse
import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pytest
from mutant_changes import ROOT, SOURCE, Functions, Mutant, changes, drawn, living
from mutant_processes import QUIET, Notes, again, collect, covered, in_parallel

OTHERS = ("checker", "contracts", "forms", "models")  # tests of what is built on the parts
FOLDER = ROOT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.json")  # survivors that do the same, each with the reason
LONGEST = 40.0  # seconds of tests for a mutant, measured without it
TINY = 5.0  # seconds a test may take with the compiler off
PIECE = 15.0  # seconds of tests that a check runs in one process
SURVIVED, MISSED, IMPOSSIBLE, BROKEN = "survived", "not executed by a test", "not possible", "broken"
DEAD = ("killed", "timeout", "crashed")


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
        if isinstance(result, tuple):
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


def state_of_files() -> str:
    """Returns a checksum of all that is tested and of all tests."""
    paths = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


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
    found = {"seconds": seconds, "failed": known["failed"] + left, "lines": lines, "files": state_of_files()}
    options.map.write_text(json.dumps(found))
    print(f"{len(tests)} tests, {sum(seconds.values()):.0f} s, left out {len(left)}:", *left, sep="\n  ")


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
        notes, start = Notes(limits=known["seconds"], diary=place.with_suffix(".diary")), time.monotonic()
        ended = int(pytest.main(["-x", *QUIET, f"--basetemp={place}", *tests], [notes]))
        verdict = SURVIVED if ended == 0 else "killed" if ended in (1, 2) else BROKEN
        by = next(iter(notes.failed), None)
        return {"verdict": verdict, "by": by, "seconds": round(time.monotonic() - start, 2), "tests": len(tests)}

    return work


def run(options: argparse.Namespace) -> None:
    """Judges the first mutants and notes every verdict at once."""
    known = json.loads(options.map.read_text())
    if known.get("files") != state_of_files():
        sys.exit("files have changed since the tests were checked: run check first (and map, if lines have moved)")
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

    doubtful: list[tuple[Mutant, dict[str, Any]]] = []

    def done(mutant: Mutant, result: Any) -> None:
        if isinstance(result, tuple):
            verdict = "timeout" if result[0] == -signal.SIGALRM else "crashed"
            doubtful.append((mutant, {"verdict": verdict, "by": result[1]}))
            return
        note(options.verdicts, mutant, result)
        if result["verdict"] not in DEAD:
            print(f"line {mutant.line} of {mutant.key}: {result['verdict']}", flush=True)

    def confirmed(pair: tuple[Mutant, dict[str, Any]], result: Any) -> None:
        fair = isinstance(result, dict) and pair[1]["by"] in result["passed"]
        note(options.verdicts, pair[0], pair[1] if fair else {"verdict": BROKEN, "by": pair[1]["by"]})

    gc.collect()
    gc.freeze()  # the processes share these pages
    until = time.time() + options.minutes * 60
    in_parallel(works, options.jobs, done, until)
    # What hangs or dies in the same test without the mutant says nothing about it.
    in_parallel([(pair, again([pair[1]["by"]], 120.0)) for pair in doubtful], options.jobs, confirmed, until)
    gc.unfreeze()
    report(options)


def note(path: Path, mutant: Mutant, result: dict[str, Any]) -> None:
    """Appends a verdict."""
    with path.open("a") as file:
        file.write(json.dumps({"mutant": mutant.key, "digest": mutant.digest} | result) + "\n")


def verdicts(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Reads all verdicts; of several about a mutant the strongest counts: dead, survived, not executed."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        result = json.loads(line)
        before = found.setdefault((result["mutant"], result["digest"]), result)
        if strength(result["verdict"]) > strength(before["verdict"]):
            found[result["mutant"], result["digest"]] = result
    return found


def strength(verdict: str) -> int:
    """Ranks verdicts."""
    return 3 if verdict in DEAD else 2 if verdict == SURVIVED else 1


def sampled(options: argparse.Namespace) -> tuple[list[Mutant], Functions]:
    """Returns the first mutants that can be put into a process, and the functions of this one."""
    everything = drawn(options.seed, options.jit)
    functions = living(everything)
    if options.only:
        wanted = {known["mutant"] for known in json.loads(options.only.read_text())}
        return [mutant for mutant in everything if mutant.key in wanted and changes(mutant, functions)], functions
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
    only = options.only and options.only.resolve().relative_to(ROOT)
    which = f"--only {only}" if only else f"--count {options.count}"
    command = f"python tests/campaigns/mutants.py run {which} --seed {options.seed}"
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
    parser.add_argument("--only", type=Path, help="judge those that a file lists, such as sample.json")
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
    options.out = (options.out or Path(__file__).parent / "results" / f"{kind}mutants.json").resolve()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HYPOTHESIS_PROFILE": "mutants"}
    if options.jit:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "tests")]
    {"map": draw_map, "check": check, "run": run, "report": report}[options.what](options)


if __name__ == "__main__":
    main()
