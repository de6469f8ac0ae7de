"""Compares ours with torchidl, torchdeq, jaxopt and optimistix: errors, gradients, steps, time and memory.

A full run replaces the page beside this file, too. Libraries that are not installed are left out, with the reason.

Run: make rivals, or python -m benchmarks.rivals.compare [--quick] [--only NAMES]
"""

import math
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    best_times,
    load,
    make_parser,
    markdown,
    one_thread,
    print_table,
    relative_error,
    save,
    versions,
)
from benchmarks.problems import SIZES, Exact, Problem, exact, problems
from benchmarks.rivals.libraries import (
    TOLERANCE,
    NotRunError,
    Run,
    jaxopt_anderson,
    jaxopt_plain,
    optimistix_plain,
    torchdeq_anderson,
    torchdeq_plain,
    torchidl,
    wellposed_fixed_point,
    wellposed_model,
)

PACKAGES = ("wellposed", "torch", "torchidl", "torchdeq", "jax", "jaxopt", "optimistix")
LIBRARIES: dict[str, Callable[[Problem], Run]] = {
    "wellposed ImplicitModel": wellposed_model,
    "wellposed fixed_point compiled": partial(wellposed_fixed_point, compile=True),
    "wellposed fixed_point": wellposed_fixed_point,
    "torchidl": torchidl,
    "torchdeq anderson": torchdeq_anderson,
    "torchdeq plain": torchdeq_plain,
    "jaxopt plain": jaxopt_plain,
    "jaxopt anderson": jaxopt_anderson,
    "optimistix plain": optimistix_plain,
}
WRONG = 1e-2  # a gradient further off than this is called wrong
CLEARLY = 1.5  # times the error of the best
OURS = tuple(name for name in LIBRARIES if name.startswith("wellposed"))
RIVALS = tuple(name for name in LIBRARIES if name not in OURS)
COLUMNS = (
    "library",
    "value error",
    "gradient error",
    "steps mean / most",
    "forward ms",
    "forward+backward ms",
    "times ours",
    "memory KiB",
    "note",
)
PAGE = Path(__file__).parent / "README.md"
TEMPLATE = Path(__file__).parent / "page.md"


@dataclass
class Row:
    """One library on one problem; None where it was not run."""

    problem: str
    states: int
    batch: int
    library: str
    value_error: float | None = None  # relative to the largest output
    gradient_error: float | None = None  # of A, B and C, the worst, relative to the largest entry
    steps_mean: float | None = None
    steps_max: int | None = None
    forward_ms: float | None = None
    both_ms: float | None = None
    memory_bytes: int | None = None
    compile_s: float | None = None
    note: str = ""


def _accuracy(row: Row, run: Run, wanted: Exact) -> None:
    row.value_error = relative_error(run.output(), wanted.output)
    gradients = run.gradients()
    errors = {name: relative_error(gradients[name], gradient) for name, gradient in wanted.gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    row.gradient_error = errors[worst]
    notes = [run.complaint()]
    if errors[worst] > WRONG:
        notes.append(f"gradient of {worst} off by {errors[worst]:.0%}")
    row.note = "; ".join(filter(None, notes))


def _counts(row: Row, run: Run) -> None:
    steps = run.steps()
    row.steps_mean, row.steps_max = float(steps.double().mean()), int(steps.max())
    row.memory_bytes, row.compile_s = run.memory(), run.compile_seconds


def measure(problem: Problem, rounds: int = 5, budget: float = 0.15) -> list[Row]:
    """Returns a row per library; what cannot run says why."""
    rows: list[Row] = []
    runs: dict[str, Run] = {}
    wanted = exact(problem)
    for name, prepare in LIBRARIES.items():
        row = Row(problem.name, problem.states, problem.batch, name)
        rows.append(row)
        try:
            runs[name] = run = prepare(problem)
        except NotRunError as reason:
            row.note = f"not run: {reason}"
            continue
        _accuracy(row, run, wanted)
        _counts(row, run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forward = best_times({name: run.forward for name, run in runs.items()}, rounds, budget)
        both = best_times({name: run.step for name, run in runs.items()}, rounds, budget)
    for row in rows:
        if row.library in runs:
            row.forward_ms, row.both_ms = 1e3 * forward[row.library], 1e3 * both[row.library]
    return rows


def by_problem(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Groups rows of one problem, which stand together."""
    groups = groupby(rows, key=lambda row: (row.problem, row.states, row.batch))
    return [(f"{name}, n = {n}, batch {batch}", list(group)) for (name, n, batch), group in groups]


def our_time(group: list[Row]) -> float:
    """Returns the time of our model, or of the faster `fixed_point` where the model does not apply."""
    times = {row.library: row.both_ms for row in group if row.library in OURS and row.both_ms is not None}
    return times.get(OURS[0], min(times.values()))


def cells(row: Row, group: list[Row]) -> list[str]:
    """Formats one row; a library that was not run has its reason only."""
    if row.both_ms is None or row.forward_ms is None or row.memory_bytes is None:
        return [row.library, *["-"] * (len(COLUMNS) - 2), row.note]
    return [
        row.library,
        f"{row.value_error:.0e}",
        f"{row.gradient_error:.0e}",
        f"{row.steps_mean:.0f} / {row.steps_max}",
        f"{row.forward_ms:.2f}",
        f"{row.both_ms:.2f}",
        f"{row.both_ms / our_time(group):.2f}",
        f"{row.memory_bytes / 1024:.0f}",
        row.note,
    ]


def show(rows: list[Row]) -> None:
    """Prints one table a problem."""
    for title, group in by_problem(rows):
        print_table(title, COLUMNS, (cells(row, group) for row in group), width=170, left=("library", "note"))


def _ratios(rows: list[Row], library: str) -> list[float]:
    """Returns the times of a library relative to ours, on the problems that it runs."""
    return [
        row.both_ms / our_time(group)
        for _, group in by_problem(rows)
        for row in group
        if row.library == library and row.both_ms is not None
    ]


def summary(rows: list[Row]) -> list[list[str]]:
    """Compares the libraries over all problems: times, the worst errors and wrong gradients."""
    lines = []
    for library in LIBRARIES:
        ran = [row for row in rows if row.library == library and row.both_ms is not None]
        ratios = _ratios(rows, library)
        if not ran:
            continue
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        faster = sum(ratio < 1 for ratio in ratios)
        lines.append(
            [
                library,
                f"{mean:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.1f}",
                "-" if library in OURS else f"{faster} of {len(ratios)}",
                f"{max(row.value_error or 0 for row in ran):.0e}",
                f"{max(row.gradient_error or 0 for row in ran):.0e}",
                str(sum("gradient of" in row.note for row in ran)),
            ]
        )
    return lines


def losses(rows: list[Row]) -> list[str]:
    """Says on which problems who is faster than us, and by how much."""
    lines = []
    for title, group in by_problem(rows):
        ahead = {
            row.library: our_time(group) / row.both_ms
            for row in group
            if row.library in RIVALS and row.both_ms is not None and row.both_ms < our_time(group)
        }
        if ahead:
            names = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in sorted(ahead.items(), key=lambda i: -i[1]))
            lines.append(f"- {title}: {names}")
    return lines


def inaccuracies(rows: list[Row]) -> list[str]:
    """Says where the best rival is clearly more accurate than we are."""
    lines = []
    for title, group in by_problem(rows):
        for kind in ("value", "gradient"):
            errors = {row.library: error for row in group if (error := getattr(row, f"{kind}_error"))}
            mine = next(errors[name] for name in OURS if name in errors)
            best = min((name for name in errors if name in RIVALS), key=lambda name: errors[name])
            if mine > CLEARLY * errors[best]:
                lines.append(f"- {title}, {kind}: ours {mine:.1e}, {best} {errors[best]:.1e}")
    return lines


def page(rows: list[Row], about: dict[str, Any]) -> str:
    """Writes the page."""
    compiling = [row.compile_s for row in rows if row.compile_s]
    sentence = "Measured with " + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    tables = "\n\n".join(
        f"### {title}\n\n" + markdown(list(COLUMNS), [cells(row, group) for row in group])
        for title, group in by_problem(rows)
    )
    header = ["library", "times ours, geometric mean", "range", "faster than ours"]
    header += ["worst value error", "worst gradient error", "wrong gradients"]
    return TEMPLATE.read_text().format(
        about=f"{sentence}; Python {about['python']}, {about['machine']}. {about.get('note', '')}".rstrip(),
        compile=sum(compiling) / max(len(compiling), 1),
        summary=markdown(header, summary(rows)),
        losses="\n".join(losses(rows)) or "Nowhere.",
        inaccuracies="\n".join(inaccuracies(rows)) or "Nowhere.",
        tables=tables,
    )


def measure_all(quick: bool, only: str = "") -> list[Row]:
    """Measures every problem whose name contains one of the words of `only`, on one thread."""
    one_thread()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for problem in problems(SIZES[:1] if quick else SIZES):
        if not any(word in problem.name for word in only.split(",")):
            continue
        print(f"{problem.name}, n = {problem.states}, batch {problem.batch}", file=sys.stderr, flush=True)
        rows += measure(problem, *(2, 0.03) if quick else (5, 0.15))
    return rows


def main() -> None:
    """Measures all problems; a full run also replaces the JSON file and the page."""
    parser = make_parser(
        __doc__, __file__, quick="small problems and short timings", page="write the page, measuring nothing,"
    )
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="measure problems whose names contain one of NAMES (a,b,c)"
    )
    options = parser.parse_args()
    if not options.page:
        rows = measure_all(options.quick, options.only)
        show(rows)
        if options.only and not options.out:  # part of the problems is no result
            return
        about = {"python": platform.python_version(), "machine": f"{platform.machine()}, one thread"}
        about |= {"tolerance": TOLERANCE, "versions": versions(*PACKAGES)}
        save(options, **about, rows=[asdict(row) for row in rows])
        if options.quick or options.out:
            return
    about = load(options)
    PAGE.write_text(page([Row(**row) for row in about.pop("rows")], about))


if __name__ == "__main__":
    main()
