"""Feeds changed files to every reader: ``python -m tests.fuzz.mutate --cases 1000 --seed 0``.

Every error must be of our own kind, no call may take longer than a few seconds, and the address space may not grow
by more than a stated amount. The same seed gives the same files.
"""

import argparse
import collections
import hashlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from tests.fuzz.readers import READERS, Reader

SECONDS, GROWTH = 10, 2 << 30


def limit_memory(growth: int) -> None:
    """Lets allocations fail beyond what the process has now and a little more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + growth, resource.RLIM_INFINITY))


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def fuzz(reader: Reader, cases: int, seed: int, keep: Path | None) -> tuple[collections.Counter, list[str]]:
    """Returns how often every kind of error came, and what was not ours."""
    draw = random.Random(f"{seed} {reader.name}")
    seeds = reader.seeds()
    first = next(iter(seeds))
    counts, failures = collections.Counter(), {}
    with tempfile.TemporaryDirectory() as folder:
        assert reader.read(Path(folder), seeds) == "", f"{reader.name} does not read its own file"
    for _ in range(cases):
        data = draw.choice(reader.mutations)(seeds[first], draw)
        with tempfile.TemporaryDirectory() as folder:
            signal.alarm(SECONDS)
            try:
                counts[reader.read(Path(folder), {**seeds, first: data}) or "read"] += 1
            except Exception as error:
                signal.alarm(0)
                counts["NOT OURS"] += 1
                frame = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:120]}"
                failures.setdefault(what.partition(": ")[0], what)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{reader.name}-{hashlib.sha1(data).hexdigest()[:8]}").write_bytes(data)
            finally:
                signal.alarm(0)
    return counts, list(failures.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of every reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="readers whose names contain this")
    parser.add_argument("--keep", type=Path, help="a folder for files that fail")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, too_long)
    limit_memory(GROWTH)
    start, results = time.monotonic(), {}
    for reader in (one for one in READERS if given.only in one.name):
        counts, failures = fuzz(reader, given.cases, given.seed, given.keep)
        results[reader.name] = {"cases": given.cases, "outcomes": dict(counts), "failures": failures}
        if not given.json:
            print(f"{reader.name:24s} {dict(counts)}", *failures, sep="\n    " if failures else "", flush=True)
    bad = sum(len(one["failures"]) for one in results.values())
    if given.json:
        print(json.dumps(results))
    print(f"{len(results)} readers, {given.cases} files each, seed {given.seed}: {bad} kinds of failures, "
          f"{time.monotonic() - start:.0f} s", file=sys.stderr)  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
