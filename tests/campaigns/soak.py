"""A soak: trainings, solves, fits, bounds, attacks and reports without end in one process, whose use must be flat.

A session of twelve hours is counted by its pieces of work, not by their size: somebody who starts one every ten
seconds, without a pause, comes to 4320. A round does every piece of `soak_pieces` once; they are small, so that a
session fits in minutes, for a leak is one of calls and seldom one of sizes. What a piece returns is thrown away.

After every round are recorded: resident memory, bytes that malloc has handed out, objects that Python tracks,
tensors, open file descriptors, threads, child processes, temporary files. After the warm-up (caches, compilers)
each must be flat. Two numbers stay within its tolerance: the Theil-Sen slope, times the rounds that were judged,
or those of a session if these are more; and the step from the median of the first quarter to that of the last.

Run: python tests/campaigns/soak.py --minutes 15     writes tests/campaigns/results/soak.json
"""

import argparse
import ctypes
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from soak_pieces import PIECES

RESULT = Path(__file__).parent / "results" / "soak.json"
SESSION = 12 * 3600 // 10  # pieces of work in twelve hours
WARM_UP = 8  # rounds
MIB = 1 << 20
TOLERANCES = {
    "resident_mib": 32.0,
    "malloc_mib": 8.0,
    "python_objects": 2000.0,
    "tensors": 0.0,
    "descriptors": 0.0,
    "threads": 0.0,
    "children": 0.0,
    "temporary_files": 0.0,
}


class _Malloc(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def handed_out() -> float:
    """Returns what malloc has given away and not got back, in MiB; 0 where the C library does not say."""
    try:
        asked = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0.0
    asked.restype = _Malloc
    info = asked()
    return float(info.uordblks + info.hblkhd) / MIB


def children() -> int:
    """Counts the child processes of all threads."""
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


def snapshot(scratch: Path) -> dict[str, float]:
    """Measures what could leak."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tracked = gc.get_objects()
    return {
        "resident_mib": pages * resource.getpagesize() / MIB,
        "malloc_mib": handed_out(),
        "python_objects": len(tracked),
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in tracked),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": children(),
        "temporary_files": sum(1 for _ in scratch.rglob("*")),
    }


def slope(values: list[float]) -> float:
    """Returns the Theil-Sen slope: the median of the slopes of all pairs, which a few jumps do not move."""
    pairs = combinations(enumerate(values), 2)
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in pairs) if len(values) > 1 else 0.0


def judged(rounds: list[dict[str, float]], whole: int) -> dict[str, dict[str, Any]]:
    """Judges every quantity: by how much it would grow in `whole` rounds, and whether that is flat."""
    verdicts = {}
    for name, allowed in TOLERANCES.items():
        values = [one[name] for one in rounds]
        growth = slope(values) * max(whole, len(values))
        quarter = max(1, len(values) // 4)
        step = statistics.median(values[-quarter:]) - statistics.median(values[:quarter])
        verdicts[name] = {
            "first": round(values[0], 2),
            "last": round(values[-1], 2),
            "growth_in_a_session": round(growth, 3),
            "step": round(step, 3),
            "tolerance": allowed,
            "flat": growth <= allowed and step <= allowed,
        }
    return verdicts


def soak(seconds: float, pieces: dict[str, Callable[[Path], object]], warm_up: int = WARM_UP) -> dict[str, Any]:
    """Does rounds of work until time is up; judges those after the warm-up."""
    began, rounds, times = time.monotonic(), [], dict.fromkeys(pieces, 0.0)
    with tempfile.TemporaryDirectory() as scratch:
        before, tempfile.tempdir = tempfile.tempdir, scratch
        try:
            while len(rounds) < warm_up + 3 or time.monotonic() - began < seconds:
                for name, piece in pieces.items():
                    start = time.perf_counter()
                    with tempfile.TemporaryDirectory() as folder:
                        piece(Path(folder))
                    times[name] += time.perf_counter() - start
                rounds.append(snapshot(Path(scratch)))
        finally:
            tempfile.tempdir = before
    return {
        "pieces_a_round": len(pieces),
        "rounds": len(rounds),
        "pieces": len(rounds) * len(pieces),
        "pieces_of_a_session": SESSION,
        "warm_up_rounds": warm_up,
        "minutes": round((time.monotonic() - began) / 60, 2),
        "judged": judged(rounds[warm_up:], -(-SESSION // len(pieces))),
        "seconds_of_pieces": {name: round(spent, 2) for name, spent in times.items()},
        "every_round": {name: [round(one[name], 2) for one in rounds] for name in TOLERANCES},
    }


def main() -> None:
    """Soaks and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    warnings.simplefilter("ignore")
    result = soak(60 * options.minutes, PIECES)
    command = f"python tests/campaigns/soak.py --minutes {options.minutes:g} --seed {options.seed}"
    threads = sorted(thread.name for thread in threading.enumerate())
    facts = {"command": command, "seed": options.seed, **result, "python_threads_at_the_end": threads}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps({name: value for name, value in facts.items() if name != "every_round"}, indent=1))
    sys.exit(not all(one["flat"] for one in result["judged"].values()))


if __name__ == "__main__":
    main()
