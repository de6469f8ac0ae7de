"""Compares ours with torchidl, torchdeq, jaxopt and optimistix.

Run: make rivals, or python -m benchmarks.rivals [--quick] in an environment that has them.
"""

import argparse
import platform
import sys
import warnings
from typing import Any

from benchmarks.problems import SIZES, problems
from benchmarks.rivals.libraries import TOLERANCE, versions
from benchmarks.rivals.measure import Row, measure
from benchmarks.rivals.report import PAGE, page, read_json, show, write_json
from benchmarks.timing import one_thread

PACKAGES = ("wellposed", "torch", "torchidl", "torchdeq", "jax", "jaxopt", "optimistix")


def about() -> dict[str, Any]:
    """Describes the machine and the versions."""
    return {
        "command": "make rivals",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, one thread",
        "tolerance": TOLERANCE,
        "versions": versions(PACKAGES),
    }


def measure_all(quick: bool) -> list[Row]:
    """Measures every problem, on one thread."""
    one_thread()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for problem in problems(SIZES[:1] if quick else SIZES):
        print(f"{problem.name}, n = {problem.states}, batch {problem.batch}", file=sys.stderr, flush=True)
        rows += measure(problem, *(2, 0.03) if quick else (5, 0.15))
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measures all problems; a full run also replaces the JSON file and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small problems, short timings, nothing written")
    parser.add_argument("--page", action="store_true", help="write the page from the JSON file, measuring nothing")
    options = parser.parse_args(arguments)
    if not options.page:
        rows = measure_all(options.quick)
        show(rows)
        if options.quick:
            return
        write_json(rows, about())
    PAGE.write_text(page(*read_json()))


if __name__ == "__main__":
    main()
