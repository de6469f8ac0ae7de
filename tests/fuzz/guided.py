"""Coverage-guided fuzzing of the readers by atheris: ``python -m tests.fuzz.guided --seconds 60 --only form``.

Every reader runs in a process of its own for a limited time, with a limit on memory, from files that it reads as
a corpus. Inputs that raise an error that is not ours are kept.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

MEMORY = 4096  # MiB
CALL = 20  # seconds


def guided(name: str, seconds: int, seed: int, corpus: Path, keep: Path) -> None:
    """Fuzzes one reader in this process; ends it."""
    import atheris

    with atheris.instrument_imports(include=["wellposed", "safetensors", "tarfile", "csv", "json", "zipfile"]):
        from tests.fuzz.readers import READERS
    reader = next(one for one in READERS if one.name == name)
    seeds = reader.seeds()
    first = next(iter(seeds))
    (corpus / "seed").write_bytes(seeds[first])

    def one(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            reader.read(Path(folder), {**seeds, first: data})

    warnings.simplefilter("ignore")
    limits = [f"-max_total_time={seconds}", f"-seed={seed}", f"-rss_limit_mb={MEMORY}", f"-timeout={CALL}"]
    longest = max(4096, 2 * len(seeds[first]))
    more = [f"-artifact_prefix={keep}/", f"-max_len={longest}", "-print_final_stats=1", str(corpus)]
    atheris.Setup([sys.argv[0], *limits, *more], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="of every reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="readers whose names contain this")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="a folder for inputs that fail")
    parser.add_argument("--jobs", type=int, default=1, help="readers at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        guided(given.one, given.seconds, given.seed, given.corpus, given.keep)
    from tests.fuzz.readers import READERS

    given.keep.mkdir(parents=True, exist_ok=True)
    chosen = [one.name for one in READERS if given.only in one.name]
    with ThreadPoolExecutor(given.jobs) as pool:
        codes = list(pool.map(partial(apart, given), chosen))
    print(
        f"{len(chosen)} readers, {given.seconds} s each, seed {given.seed}: {sum(map(bool, codes))} with failures"
    )
    return int(any(codes))


def apart(given: argparse.Namespace, name: str) -> int:
    """Fuzzes one reader in a process of its own; returns how it ended."""
    with tempfile.TemporaryDirectory() as corpus:
        words = ["--one", name, "--seconds", given.seconds, "--seed", given.seed, "--keep", given.keep]
        command = [sys.executable, "-m", "tests.fuzz.guided", *map(str, words), "--corpus", corpus]
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    stats = dict(line.split(":")[-2:] for line in done.stderr.splitlines() if line.startswith("stat::"))
    runs = stats.get("number_of_executed_units", "?").strip()
    print(f"{name:24s} {runs:>8s} runs, {time.monotonic() - start:4.0f} s, exit {done.returncode}", flush=True)
    if done.returncode:
        print(done.stderr[-3000:])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
