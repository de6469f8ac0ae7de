"""Measures every library on one problem."""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.problems import Problem
from benchmarks.rivals.compiled import jaxopt_anderson, jaxopt_plain, optimistix_plain
from benchmarks.rivals.libraries import (
    NotRunError,
    Run,
    torchdeq_anderson,
    torchdeq_plain,
    torchidl,
    wellposed_fixed_point,
    wellposed_model,
)
from benchmarks.rivals.oracle import Exact, exact, relative_error
from benchmarks.timing import best_times

LIBRARIES: dict[str, Callable[[Problem], Run]] = {
    "wellposed ImplicitModel": wellposed_model,
    "wellposed fixed_point": wellposed_fixed_point,
    "torchidl": torchidl,
    "torchdeq anderson": torchdeq_anderson,
    "torchdeq plain": torchdeq_plain,
    "jaxopt plain": jaxopt_plain,
    "jaxopt anderson": jaxopt_anderson,
    "optimistix plain": optimistix_plain,
}
WRONG = 1e-2  # a gradient further off than this is called wrong


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

    def as_dict(self) -> dict[str, Any]:
        """Returns the row for a JSON file."""
        return asdict(self)


def _accuracy(row: Row, run: Run, wanted: Exact) -> None:
    row.value_error = relative_error(run.output(), wanted.output)
    found = run.gradients()
    errors = {name: relative_error(found[name], gradient) for name, gradient in wanted.gradients.items()}
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
