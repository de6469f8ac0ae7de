"""Mutation testing: small faults are put into the library one at a time, and the tests that pass there must fail.

Every mutant is one change inside one function of the pure-Python parts of equilibrium/, conditions/, convex/ and
robust/: another comparison, operator, constant or branch, or a statement left out. The code of the function is
replaced in a forked process, so that all who have imported it see the fault. First the tests run without a fault;
those that fail are left out, and of the others it is noted which mutants' places they execute. Then every mutant
meets the shortest of its tests, and if it survives, all tests of their files. It is killed if one fails or takes
ten times as long as the longest of its file without it (and ten seconds). The seed alone says which are drawn.
Files compiled by numba are a sample of their own (--jit), run as Python with the compiler off, by tests that are
tiny enough.

Run: python tests/campaigns/mutants.py run --count 500 --seed 0
                                                prints survivors, writes tests/campaigns/results/mutants.json
     python tests/campaigns/mutants.py run --only tests/campaigns/sample.json
                                                judges those of a list and compares with the verdicts there
     python tests/campaigns/mutants.py report   writes that file anew from the verdicts so far
"""

import argparse
import gc
import hashlib
import importlib
import json
import math
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
from mutant_processes import QUIET, Notes, collect, file_of, in_parallel, unchanged

OTHERS = ("checker", "contracts", "forms", "models")  # tests of what is built on the parts
FOLDER = ROOT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.json")  # survivors that do the same, each with the reason
PASSES = (10.0, 120.0)  # seconds of tests for a mutant, and for one that survived these
TINY = 5.0  # seconds a test may take with the compiler off
PIECE = 12  # tests that run in one process before there are mutants
SURVIVED, MISSED, BROKEN = "survived", "not executed by a test", "broken"
DEAD = ("killed", "timeout", "crashed")


def baseline(options: argparse.Namespace, sample: list[Mutant], functions: Functions) -> dict[str, Any]:
    """Runs tests and examples without a mutant; returns seconds and places executed of those that pass."""
    packages = sorted({mutant.file.split("/")[2] for mutant in sample})
    around = () if options.jit else OTHERS
    files = [
        path for package in (*packages, *around) for path in sorted((ROOT / "tests" / package).glob("test_*.py"))
    ]
    examples = [path for package in packages for path in sorted((SOURCE / package).rglob("*.py"))]
    files += [path for path in examples if ">>>" in path.read_text()]
    tests = collect(options.tests or (str(path.relative_to(ROOT)) for path in files))
    paths = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    state = hashlib.sha256(b"".join(path.read_bytes() for path in paths))
    state.update(json.dumps([tests, [mutant.key for mutant in sample]]).encode())
    known: dict[str, Any] = {"state": state.hexdigest(), "seconds": {}, "reached": defaultdict(list)}
    if options.map.exists() and (before := json.loads(options.map.read_text()))["state"] == known["state"]:
        return before

    def done(_: Any, result: Any) -> None:
        if isinstance(result, dict):
            known["seconds"] |= result["seconds"]
            for key, names in result["reached"].items():
                known["reached"][key] += names

    compile_share = importlib.import_module("warm_up").compile_share
    in_parallel([(None, lambda _, k=k: compile_share(k, 6)) for k in range(6)], options.jobs, done, math.inf)
    longest = TINY if options.jit else 60.0
    works = [(None, unchanged(piece, longest, sample, functions)) for piece in pieces(tests)]
    in_parallel(works, options.jobs, done, math.inf)
    options.map.parent.mkdir(parents=True, exist_ok=True)
    options.map.write_text(json.dumps(known))
    left = sorted(set(tests) - set(known["seconds"]))
    print(f"{len(tests)} tests, {sum(known['seconds'].values()):.0f} s; left out {len(left)}:", *left, sep="\n  ")
    return known


def pieces(tests: list[str]) -> list[list[str]]:
    """Cuts tests into pieces of one file each."""
    return [
        some[k : k + PIECE]
        for some in (list(group) for _, group in groupby(tests, key=file_of))
        for k in range(0, len(some), PIECE)
    ]


def chosen(mutant: Mutant, known: dict[str, Any], longest: float) -> list[str]:
    """Returns the shortest tests that execute a mutant's place, then the others of their files, file by file."""
    seconds, near = known["seconds"], known["reached"].get(mutant.key, [])
    files = {file_of(test) for test in near} if longest > PASSES[0] else set()
    others = [test for test in seconds if file_of(test) in files]
    by_file: dict[str, list[str]] = defaultdict(list)
    total = 0.0
    for test in dict.fromkeys(sorted(near, key=seconds.get) + sorted(others, key=seconds.get)):
        total += seconds[test]
        if by_file and total > longest:
            break
        by_file[file_of(test)].append(test)
    by_time = sorted(by_file.values(), key=lambda tests: sum(seconds[test] for test in tests) / len(tests))
    return [test for tests in by_time for test in tests]


def judged(mutant: Mutant, tests: list[str], known: dict[str, Any], functions: Functions) -> Callable[[Path], Any]:
    """Returns the work of running tests against a mutant."""

    def work(place: Path) -> Any:
        for function, code in changes(mutant, functions):
            function.__code__ = code
        limits: dict[str, float] = defaultdict(float)
        for test, seconds in known["seconds"].items():
            limits[file_of(test)] = max(limits[file_of(test)], seconds)
        notes, start = Notes(limits, diary=place.with_suffix(".diary")), time.monotonic()
        ended = int(pytest.main(["-x", *QUIET, f"--basetemp={place}", *tests], [notes]))
        verdict = SURVIVED if ended == 0 else "killed" if ended in (1, 2) else BROKEN
        by = next(iter(notes.failed), None)
        return {"verdict": verdict, "by": by, "seconds": round(time.monotonic() - start, 2), "tests": len(tests)}

    return work


def run(options: argparse.Namespace) -> None:
    """Judges mutants and notes every verdict at once."""
    sample, functions = sampled(options)
    until = time.time() + options.minutes * 60
    options.verdicts.parent.mkdir(parents=True, exist_ok=True)
    known = baseline(options, sample, functions)
    doubtful: list[tuple[Mutant, dict[str, Any]]] = []

    def done(mutant: Mutant, result: Any) -> None:
        if isinstance(result, tuple):
            verdict = "timeout" if result[0] == -signal.SIGALRM else "crashed"
            doubtful.append((mutant, {"verdict": verdict, "by": result[1]}))
        else:
            note(options.verdicts, mutant, result)

    def confirmed(pair: tuple[Mutant, dict[str, Any]], result: Any) -> None:
        fair = isinstance(result, dict) and pair[1]["by"] in result["seconds"]
        note(options.verdicts, pair[0], pair[1] if fair else {"verdict": BROKEN, "by": pair[1]["by"]})

    gc.collect()
    gc.freeze()  # the processes share these pages
    for longest in PASSES:
        old, works = verdicts(options.verdicts), []
        for mutant in sample:
            if old.get((mutant.key, mutant.digest), {}).get("verdict") not in DEAD:
                tests = chosen(mutant, known, longest)
                if tests:
                    works.append((mutant, judged(mutant, tests, known, functions)))
                else:
                    note(options.verdicts, mutant, {"verdict": MISSED})
        doubtful.clear()
        in_parallel(works, options.jobs, done, until)
        # What hangs or dies in the same test without the mutant says nothing about it.
        works = [(pair, unchanged([pair[1]["by"]], 120.0, [], functions)) for pair in doubtful]
        in_parallel(works, options.jobs, confirmed, until)
    gc.unfreeze()
    report(options)


def note(path: Path, mutant: Mutant, result: dict[str, Any]) -> None:
    """Appends a verdict."""
    with path.open("a") as file:
        file.write(json.dumps({"mutant": mutant.key, "digest": mutant.digest} | result) + "\n")


def verdicts(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Reads all verdicts; of several about a mutant the strongest counts: dead, survived, not executed."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        result = json.loads(line)
        before = results.setdefault((result["mutant"], result["digest"]), result)
        if strength(result["verdict"]) > strength(before["verdict"]):
            results[result["mutant"], result["digest"]] = result
    return results


def strength(verdict: str) -> int:
    """Ranks verdicts."""
    return 3 if verdict in DEAD else 2 if verdict == SURVIVED else 1


def sampled(options: argparse.Namespace) -> tuple[list[Mutant], Functions]:
    """Returns the first mutants that can be put into a process, and the functions of this one."""
    everything = drawn(options.seed, options.jit)
    functions = living(everything)
    wanted = json.loads(options.only.read_text()) if options.only else {mutant.key for mutant in everything}
    possible = (mutant for mutant in everything if mutant.key in wanted and changes(mutant, functions))
    return list(islice(possible, options.count)), functions


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
    summary = {
        "command": command + " --jit" * options.jit,
        "of": len(drawn(options.seed, options.jit)),
        "before": Counter(json.loads(only.read_text()).values()) if only else None,
        "tried": tried,
        **dict(sorted(counts.items())),
        "score": round(dead / max(tried, 1), 4),
        "score without equivalents": round(dead / max(tried - counts["equivalent"], 1), 4),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(summary | {"survivors": survivors}, indent=1) + "\n")
    print(summary)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--jit", action="store_true", help="files compiled by numba, with the compiler off")
    parser.add_argument("--only", type=Path, help="judge those that a file lists, such as sample.json")
    parser.add_argument("--minutes", type=float, default=600.0, help="judge no more mutants after")
    parser.add_argument("--tests", nargs="+", help="files of tests to take; all unless told")
    parser.add_argument("--map", type=Path)
    parser.add_argument("--verdicts", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kind = "jit_" * options.jit
    name = f"{kind}mutants" + "_sample" * bool(options.only) + ".json"
    options.map = (options.map or FOLDER / f"{kind}map.json").resolve()
    options.verdicts = (options.verdicts or FOLDER / f"{kind}verdicts.jsonl").resolve()
    options.out = (options.out or Path(__file__).parent / "results" / name).resolve()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HYPOTHESIS_PROFILE": "mutants"}
    if options.jit:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / name) for name in ("tests", "src", "lab")]
    {"run": run, "report": report}[options.what](options)


if __name__ == "__main__":
    main()
