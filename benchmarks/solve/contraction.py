"""Steps, time and true error of every solver over the contraction, for four families of matrices.

All solvers stop at the same residual, a millionth of the largest state, in float32 on one thread. A full run also
draws the plot of docs/concepts/choosing-a-solver.md.

Run: python -m benchmarks.solve.contraction [--quick | --plot]
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import DOCS, best_call, load, make_parser, one_thread, save
from benchmarks.kernels.layer import FAMILIES, MAX_STEPS, MODELS, ours, step
from benchmarks.problems import SolvedProblem, solved_problem
from benchmarks.rivals.libraries import installed
from wellposed import Absolute
from wellposed.activations import get_activation
from wellposed.errors import require
from wellposed.kernels.cpu.newton import solve_active_set

NORMS = (0.5, 0.7, 0.9, 0.95, 0.99, 0.995, 0.999)
STATES, BATCH = 64, 128
PLOT = DOCS / "concepts" / "solver-sweep.png"
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


def own_run(case: SolvedProblem, tolerance: float, solver: str | None) -> Run:
    """Returns our model with a solver."""
    model = ours(case, tolerance, solver=solver)
    return Run(lambda: model(case.u), lambda: step(model, case), lambda: model.equilibrium(case.u).steps)


def newton_run(case: SolvedProblem, tolerance: float) -> Run:
    """Returns Newton's method from the seventeenth step on."""
    v, gradient, stop = case.u @ case.B.mT, case.g @ case.C, Absolute(tolerance)

    def solve() -> Any:
        return solve_active_set(case.A, v, get_activation("relu"), stop=stop)

    def both() -> None:
        solution = solve()
        y = solution.adjoint(gradient, stop).value
        _ = y.mT @ solution.value, y.mT @ case.u

    return Run(lambda: solve().value @ case.C.mT, both, lambda: solve().steps)


def torchidl_run(case: SolvedProblem, tolerance: float) -> Run:
    """Returns torchidl's plain iteration; its activation is counted."""
    model: Any = MODELS["torchidl"](case, tolerance)
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


def torchdeq_run(case: SolvedProblem, tolerance: float) -> Run:
    """Returns torchdeq's Anderson acceleration."""
    model: Any = MODELS["torchdeq"](case, tolerance)
    return Run(lambda: model(case.u), lambda: step(model, case), lambda: model.solve(case.u)[1]["nstep"])


def runs(case: SolvedProblem, tolerance: float, names: list[str]) -> dict[str, Run]:
    """Returns all solvers that are installed."""
    by_solver = {name: own_run(case, tolerance, name) for name in ("picard", "anderson")}
    by_solver = {"automatic": own_run(case, tolerance, None), **by_solver, "newton": newton_run(case, tolerance)}
    if "torchidl" in names:
        by_solver["torchidl"] = torchidl_run(case, tolerance)
    if "torchdeq" in names:
        by_solver["torchdeq"] = torchdeq_run(case, tolerance)
    return by_solver


def measure(case: SolvedProblem, names: list[str]) -> dict[str, Any]:
    """Measures all solvers on one problem."""
    v = case.u @ case.B.mT
    size = float(solve_active_set(case.A, v, get_activation("relu")).value.abs().max())
    row: dict[str, Any] = {"family": case.family, "norm": case.norm, "n": STATES, "batch": BATCH, "solvers": {}}
    for name, run in runs(case, 1e-6 * size, names).items():
        with torch.no_grad():
            error, steps = case.error(run.output()), run.steps().double()
        counts = {"steps_mean": float(steps.mean()), "steps_max": float(steps.max())}
        row["solvers"][name] = {**counts, "error": error, "ms": 1e3 * best_call(run.step, 0.15)}
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
    worse = []
    for row in rows:
        for key in ("steps_mean", "steps_max"):
            ratio = row["solvers"]["automatic"][key] / row["solvers"]["picard"][key]
            if ratio > limit:
                worse.append(f"{row['family']} {row['norm']}: {key} {ratio:.2f} times those of Picard")
    return worse


def main() -> None:
    """Measures, writes the result and draws."""
    parser = make_parser(__doc__, __file__, quick="two contractions", plot="draw the plot")
    options = parser.parse_args()
    if options.plot:
        draw(load(options)["rows"])
        return
    one_thread()
    warnings.simplefilter("ignore")
    names, rows = installed(MODELS), []
    for family in FAMILIES:
        for norm in NORMS[1:3] if options.quick else NORMS:
            rows.append(measure(solved_problem(family, norm, STATES, BATCH), names))
            cells = (
                f"{k} {s['steps_max']:.0f}/{s['ms']:.2f}/{s['error']:.0e}" for k, s in rows[-1]["solvers"].items()
            )
            print(f"{family:9}{norm:6}  " + "  ".join(cells), flush=True)
    exceeded = above(rows)
    print("\n".join(exceeded) or "never above 1.2 times the steps of Picard")
    save(options, max_steps=MAX_STEPS, above=exceeded, rows=rows)
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
