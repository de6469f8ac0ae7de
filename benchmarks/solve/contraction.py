"""Steps, time and true error of every solver over the contraction, for four families of matrices.

All solvers stop at the same residual, a millionth of the largest state, in float32 on one thread.

Run: python -m benchmarks.solve.contraction          measures, writes results/solve/contraction.json and the plot of the docs
     python -m benchmarks.solve.contraction --plot   draws the plot from the JSON
"""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.layer import step
from benchmarks.kernels_problems import FAMILIES, LIBRARIES, MAX_STEPS, Case, available, make_case, ours
from benchmarks.timing import one_thread
from wellposed import Absolute
from wellposed.activations import get_activation
from wellposed.errors import require
from wellposed.kernels.active_set import solve_active_set

NORMS = (0.5, 0.7, 0.9, 0.95, 0.99, 0.995, 0.999)
STATES, BATCH = 64, 128
RESULT = Path(__file__).parents[1] / "results" / "solve" / "contraction.json"
PLOT = Path(__file__).parents[2] / "docs" / "concepts" / "solver-sweep.png"
STYLES = {
    "automatic": ("black", "o-"),
    "picard": ("#7f7f7f", ".-"),
    "anderson": ("#1f77b4", ".-"),
    "newton": ("#d62728", ".-"),
    "torchidl": ("#2ca02c", "x--"),
    "torchdeq": ("#9467bd", "x--"),
}


@dataclass(frozen=True)
class Run:
    """One solver on one problem: outputs, a training step, and evaluations of the map per sample."""

    output: Callable[[], Tensor]
    step: Callable[[], object]
    steps: Callable[[], Tensor]


def own_run(case: Case, tolerance: float, solver: str | None) -> Run:
    """Returns our model with a solver."""
    model = ours(case, tolerance, solver=solver)
    return Run(lambda: model(case.u), lambda: step(model, case), lambda: model.equilibrium(case.u).steps)


def newton_run(case: Case, tolerance: float) -> Run:
    """Returns Newton's method from the seventeenth step on."""
    v, gradient, stop = case.u @ case.B.mT, case.g @ case.C, Absolute(tolerance)

    def solve() -> Any:
        return solve_active_set(case.A, v, get_activation("relu"), stop=stop)

    def both() -> None:
        found = solve()
        y = found.adjoint(gradient, stop).value
        _ = y.mT @ found.value, y.mT @ case.u

    return Run(lambda: solve().value @ case.C.mT, both, lambda: solve().steps)


def torchidl_run(case: Case, tolerance: float) -> Run:
    """Returns torchidl's plain iteration; its activation is counted."""
    model: Any = LIBRARIES["torchidl"](case, tolerance)
    kind = type(model.f)

    def steps() -> Tensor:
        count, plain = [0], kind.phi

        def counting(z: Tensor) -> Tensor:
            count[0] += 1
            result: Tensor = plain(z)
            return result

        kind.phi = staticmethod(counting)
        with torch.no_grad():
            model(case.u)
        del kind.phi
        return torch.tensor(count)

    return Run(lambda: model(case.u), lambda: step(model, case), steps)


def torchdeq_run(case: Case, tolerance: float) -> Run:
    """Returns torchdeq's Anderson acceleration."""
    model: Any = LIBRARIES["torchdeq"](case, tolerance)
    return Run(lambda: model(case.u), lambda: step(model, case), lambda: model.solve(case.u)[1]["nstep"])


def runs(case: Case, tolerance: float, names: list[str]) -> dict[str, Run]:
    """Returns all solvers that are installed."""
    found = {name: own_run(case, tolerance, name) for name in ("picard", "anderson")}
    found = {"automatic": own_run(case, tolerance, None), **found, "newton": newton_run(case, tolerance)}
    if "torchidl" in names:
        found["torchidl"] = torchidl_run(case, tolerance)
    if "torchdeq" in names:
        found["torchdeq"] = torchdeq_run(case, tolerance)
    return found


def seconds(run: Callable[[], object]) -> float:
    """Returns the best CPU time of some runs, fewer of slow ones."""
    run()
    best, spent = float("inf"), 0.0
    while spent < 0.15:
        start = time.process_time()
        run()
        last = time.process_time() - start
        best, spent = min(best, last), spent + last
    return best


def measure(case: Case, names: list[str]) -> dict[str, Any]:
    """Measures all solvers on one problem."""
    v = case.u @ case.B.mT
    size = float(solve_active_set(case.A, v, get_activation("relu")).value.abs().max())
    row: dict[str, Any] = {"family": case.family, "norm": case.norm, "n": STATES, "batch": BATCH, "solvers": {}}
    for name, run in runs(case, 1e-6 * size, names).items():
        with torch.no_grad():
            error, steps = case.error(run.output()), run.steps().double()
        counts = {"steps_mean": float(steps.mean()), "steps_max": float(steps.max())}
        row["solvers"][name] = {**counts, "error": error, "ms": 1e3 * seconds(run.step)}
    return row


def draw(rows: list[dict[str, Any]]) -> None:
    """Draws steps, time and error over the contraction, a column per family."""
    plt = require("matplotlib.pyplot", extra="lab")
    quantities = {"steps_max": "steps of the slowest sample", "ms": "ms, both ways", "error": "relative error"}
    figure, axes = plt.subplots(3, len(FAMILIES), figsize=(11, 8), sharex=True, sharey="row")
    for axis_row, (key, label) in zip(axes, quantities.items(), strict=True):
        axis_row[0].set_ylabel(label)
        for axis, family in zip(axis_row, FAMILIES, strict=True):
            chosen = [row for row in rows if row["family"] == family]
            for name, (colour, style) in STYLES.items():
                values = [row["solvers"].get(name, {}).get(key, float("nan")) for row in chosen]
                axis.semilogy(range(len(chosen)), values, style, color=colour, label=name, lw=1, ms=5)
            axis.set_xticks(range(len(chosen)), [str(row["norm"]) for row in chosen], rotation=45)
            axis.grid(alpha=0.3)
    for axis, family in zip(axes[0], FAMILIES, strict=True):
        axis.set_title(family)
    axes[0][0].legend(fontsize=8)
    figure.supxlabel("contraction")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=90)


def above(rows: list[dict[str, Any]], limit: float = 1.2) -> list[str]:
    """Lists where the automatic choice takes more than `limit` times the steps of plain iteration."""
    found = []
    for row in rows:
        for key in ("steps_mean", "steps_max"):
            ratio = row["solvers"]["automatic"][key] / row["solvers"]["picard"][key]
            if ratio > limit:
                found.append(f"{row['family']} {row['norm']}: {key} {ratio:.2f} times those of Picard")
    return found


def main() -> None:
    """Measures or draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="draw the plot from the JSON, measure nothing")
    if parser.parse_args().plot:
        draw(json.loads(RESULT.read_text())["rows"])
        return
    one_thread()
    warnings.simplefilter("ignore")
    names, rows = available(), []
    for family in FAMILIES:
        for norm in NORMS:
            rows.append(measure(make_case(family, norm, STATES, BATCH), names))
            cells = (
                f"{k} {s['steps_max']:.0f}/{s['ms']:.2f}/{s['error']:.0e}" for k, s in rows[-1]["solvers"].items()
            )
            print(f"{family:9}{norm:6}  " + "  ".join(cells), flush=True)
    machine = {"cpu": platform.machine(), "torch": torch.__version__, "max_steps": MAX_STEPS}
    exceeded = above(rows)
    report = {"command": "python -m benchmarks.solve.contraction", "machine": machine, "above": exceeded, "rows": rows}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(exceeded) or "never above 1.2 times the steps of Picard")
    draw(rows)


if __name__ == "__main__":
    main()
