"""Soundness: a million points against every kind of bound, a million comparisons at the ends of the number range,
matrices made to deceive certificates, gaps against a conic solver. A violation is a bug of the library, never of
the case.

Run: python -m tests.campaigns.soundness --points 1000000 --jobs 2   writes tests/campaigns/results/soundness.json

Cases have numbers, and a number and the seed decide a case, whatever the number of processes. Parts that are not
run (`--only bounds`), and other seeds, keep what the file says of them. `--minutes` ends a part early.
"""

import argparse
import itertools
import json
import multiprocessing
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from tests.campaigns import soundness_bounds, soundness_conditions, soundness_gaps, soundness_range
from tests.campaigns.soundness_bounds import Tally

RESULT = Path(__file__).parent / "results" / "soundness.json"
CHUNK = {"conditions": 10, "gaps": 2}  # numbers of one task
KEPT = 50  # violations that are written down
Enough = Callable[[], bool]


def prepare() -> None:
    """Sets a process up: one thread, and no warnings of solves that were meant to be cut short."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def trial_task(part: str, seed: int, number: int) -> Tally:
    """One trial, in float32 and float64 by turns."""
    module = {"bounds": soundness_bounds, "range": soundness_range}[part]
    return module.trial(seed, number // 2, (torch.float32, torch.float64)[number % 2])


def numbers_task(part: str, seed: int, first: int, count: int) -> tuple[int, Counter, list[dict[str, Any]]]:
    """Some matrices, or some problems; returns how many, what was checked, and what is wrong."""
    module = {"conditions": soundness_conditions, "gaps": soundness_gaps}[part]
    counts: Counter = Counter()
    wrong: list[dict[str, Any]] = []
    for number in range(first, first + count):
        new, bad = module.examine(seed, number)
        counts.update(new)
        wrong += bad
    return count, counts, wrong


class Here(Executor):
    """Carries tasks out at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*arguments, **options))
        return future


def workers(jobs: int) -> Executor:
    """Starts processes; none if there are to be none."""
    if jobs == 0:
        return Here()
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare)


def carried_out(pool: Executor, tasks: Iterator[tuple[Any, ...]], jobs: int, enough: Enough) -> Iterator[Any]:
    """Yields results of tasks as they finish, until there are enough."""
    waiting: set[Future] = set()
    while True:
        while len(waiting) < max(1, 2 * jobs) and not enough():
            try:
                waiting.add(pool.submit(*next(tasks)))
            except StopIteration:
                break
        if not waiting:
            return
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


def run_trials(part: str, pool: Executor, options: argparse.Namespace, save: Callable[[dict], None]) -> None:
    """Tries points until there are as many, or as many comparisons, as asked for."""
    whole, began = Tally(), time.monotonic()

    def enough() -> bool:
        many = (
            whole.points.total() >= options.points if part == "bounds" else whole.kinds.total() >= options.compared
        )
        return many or time.monotonic() - began > 60 * options.minutes

    tasks = ((trial_task, part, options.seed, number) for number in itertools.count())
    for trials, tally in enumerate(carried_out(pool, tasks, options.jobs, enough), 1):
        whole.merge(tally)
        if trials % 20 == 0:
            save(summary(whole.kinds, whole.wrong, began) | about_points(whole, trials))
    save(summary(whole.kinds, whole.wrong, began) | about_points(whole, trials))


def about_points(whole: Tally, trials: int) -> dict[str, Any]:
    """What the points were, and how near to the ends of bounds the nearest ones came (1 is an end)."""
    reached = {kind: round(share, 6) for kind, share in sorted(whole.reached.items())}
    return {"trials": trials, "points": whole.points.total(), "points by source": dict(whole.points),
            "points by model": dict(sorted(whole.models.items())), "reached": reached}  # fmt: skip


def run_numbers(
    part: str, total: int, pool: Executor, options: argparse.Namespace, save: Callable[[dict], None]
) -> None:
    """Examines matrices or problems of the first so many numbers."""
    counts: Counter = Counter()
    examined = 0
    wrong: list[dict[str, Any]] = []
    began, size = time.monotonic(), CHUNK[part]
    tasks = (
        (numbers_task, part, options.seed, first, min(size, total - first)) for first in range(0, total, size)
    )
    for done, new, bad in carried_out(
        pool, tasks, options.jobs, lambda: time.monotonic() - began > 60 * options.minutes
    ):
        counts.update(new)
        wrong += bad
        examined += done
        save(summary(counts, wrong, began) | {"examined": examined})


def summary(kinds: Counter, wrong: list[dict[str, Any]], began: float) -> dict[str, Any]:
    """Cases and violations of every kind."""
    bad = Counter(note["kind"] for note in wrong)
    table = {kind: {"cases": kinds[kind], "violations": bad[kind]} for kind in sorted({*kinds, *bad})}
    return {"cases": kinds.total(), "violations": len(wrong), "seconds": round(time.monotonic() - began),
            "kinds": table, "first violations": wrong[:KEPT]}  # fmt: skip


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000, help="against every kind of bound")
    parser.add_argument("--compared", type=int, default=1_000_000, help="at the ends of the number range")
    parser.add_argument("--matrices", type=int, default=10_000)
    parser.add_argument("--problems", type=int, default=600, help="convex ones, of four rows each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600.0, help="after which a part ends")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0 for this one alone")
    parser.add_argument("--only", choices=("bounds", "range", "conditions", "gaps"))
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts and writes the table after every piece of work."""
    options = options_of(arguments)
    print(f"seed {options.seed}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(options.out.read_text()) if options.out.exists() else {}
    asked = {name: value for name, value in vars(options).items() if name not in ("out", "only")}
    environment = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}

    def name(check: str) -> str:
        return f"{check}, seed {options.seed}"

    def saver(check: str) -> Callable[[dict], None]:
        def save(result: dict[str, Any]) -> None:
            report[name(check)] = {"asked": asked, **environment, **result}
            options.out.write_text(json.dumps(report, indent=1, default=str) + "\n")

        return save

    with workers(options.jobs) as pool:
        if options.only in (None, "conditions"):
            run_numbers("conditions", options.matrices, pool, options, saver("conditions"))
        if options.only in (None, "gaps"):
            run_numbers("gaps", options.problems, pool, options, saver("gaps"))
        for check in ("bounds", "range"):
            if options.only in (None, check):
                run_trials(check, pool, options, saver(check))
    checks = ("bounds", "range", "conditions", "gaps") if options.only is None else (options.only,)
    for check in checks:
        result = report[name(check)]
        print(
            f"{check}: {result['cases']} cases, {result['violations']} violations, {result['seconds']} s",
            flush=True,
        )
        for note in result["first violations"]:
            print(f"  {note}", flush=True)
    return int(any(report[name(check)]["violations"] for check in checks))


if __name__ == "__main__":
    sys.exit(main())
