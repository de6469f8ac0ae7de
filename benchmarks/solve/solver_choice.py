"""Picard, Anderson and Newton at equal true error.

A full run also draws the plot of docs/concepts/choosing-a-solver.md.

Run: python -m benchmarks.solve.solver_choice [--quick | --plot]
"""

import itertools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import DOCS, best_call, load, make_parser, one_thread, save
from benchmarks.problems import FAMILIES, state_matrix, trained_matrices
from wellposed import Relative
from wellposed.activations import get_activation
from wellposed.equilibrium import Implicit
from wellposed.equilibrium.affine import REFERENCE, AffineSpec, Engine
from wellposed.equilibrium.maps import max_norm
from wellposed.equilibrium.method import SolveOptions
from wellposed.equilibrium.solvers import Anderson, Picard, Solver
from wellposed.errors import require
from wellposed.kernels.cpu.newton import solve_active_set
from wellposed.kernels.engine import NUMBA

SIZES = ((20, 128), (64, 512), (190, 500), (300, 256), (512, 64))
NORMS = (0.5, 0.9, 0.99, 0.999)
OTHERS = ((40, 1024), (128, 64)), (0.95, 0.995)  # further sizes and contractions
ERROR = 1e-4  # relative to the largest state of a sample, in float32
TOLERANCES = (1e-4, 1e-5, 1e-6)
MAX_STEPS = 4000
REFERENCE_SIZES = ((20, 128), (190, 500))  # at which the reference loop is timed too
PLOT = DOCS / "concepts" / "choosing-a-solver.png"
RELU = get_activation("relu")
COLOURS = {"picard": "#7f7f7f", "anderson": "#1f77b4", "newton": "#d62728"}


@dataclass(frozen=True)
class Case:
    """One problem with its solution."""

    family: str
    norm: float
    A: Tensor  # (n, n)
    v: Tensor  # (B, n)
    g: Tensor  # (B, n)
    exact: Tensor  # (B, n) float64

    def error(self, x: Tensor) -> float:
        """Returns the largest error of a sample relative to its largest state."""
        return float((max_norm(x.double() - self.exact) / max_norm(self.exact).clamp_min(1e-3)).max())


def cases(quick: bool) -> list[tuple[str, float, Tensor, Tensor]]:
    """Lists family, norm, A and v of all problems."""
    listed = []
    for sizes, norms in ((SIZES[:1], NORMS[:2]),) if quick else ((SIZES, NORMS), OTHERS):
        for (n, batch), family in itertools.product(sizes, (*FAMILIES, "trained")):
            trained = trained_matrices(n, batch) if family == "trained" else None
            for norm in norms:
                generator = torch.Generator().manual_seed(0)
                if trained is None:
                    A, v = state_matrix(family, n, norm, generator), torch.randn(batch, n, generator=generator)
                else:
                    unit, B, u = trained
                    A, v = norm * unit, u @ B.mT
                listed.append((family, norm, A, v))
    return listed


def make_case(family: str, norm: float, A: Tensor, v: Tensor) -> Case:
    """Adds a gradient and the exact solution, certified by its residual."""
    A64, v64 = A.double(), v.double()
    solution = solve_active_set(A64, v64, RELU, stop=Relative(rtol=1e-13), max_steps=2000)
    bound = solution.residual / (1 - norm) / max_norm(solution.value).clamp_min(1e-3)
    if float(bound.max()) > 0.01 * ERROR:
        raise RuntimeError(f"no exact solution of {family} {norm}: error up to {float(bound.max()):.1e}")
    return Case(
        family, norm, A, v, torch.randn(v.shape, generator=torch.Generator().manual_seed(1)), solution.value
    )


Run = Callable[[bool], Tensor]


def engine_run(case: Case, engine: Engine, solver: Solver, rtol: float) -> Run:
    """Returns a solve by plain or accelerated steps, forward or both ways."""
    stop = Relative(rtol=rtol)
    spec = AffineSpec(RELU, SolveOptions(solver, stop, MAX_STEPS), Implicit(solver=solver, stop=stop))

    def run(backward: bool) -> Tensor:
        x = engine.solve(spec, (case.A,), case.v).value
        if backward:
            engine.adjoint(spec, (case.A.mT,), case.g, z=torch.addmm(case.v, x, case.A.mT))
        return x

    return run


def newton_run(case: Case, rtol: float) -> Run:
    """Returns a solve by Newton's method, forward or both ways."""

    def run(backward: bool) -> Tensor:
        solution = solve_active_set(case.A, case.v, RELU, stop=Relative(rtol=rtol), max_steps=MAX_STEPS)
        if backward:
            solution.adjoint(case.g, Relative(rtol=rtol))
        return solution.value

    return run


def accurate(case: Case, make: Callable[[float], Run]) -> tuple[Run, float, float]:
    """Returns the cheapest run that is accurate enough, its tolerance and its error."""
    for rtol in TOLERANCES:
        run = make(rtol)
        error = case.error(run(False))
        if error <= ERROR:
            break
    return run, rtol, error


def measure(case: Case) -> dict[str, Any]:
    """Times all solvers on one problem."""
    n, batch = case.A.shape[0], case.v.shape[0]
    makers: dict[str, Callable[[float], Run]] = {
        "picard": lambda rtol: engine_run(case, NUMBA, Picard(), rtol),
        "anderson": lambda rtol: engine_run(case, NUMBA, Anderson(), rtol),
        "newton": lambda rtol: newton_run(case, rtol),
    }
    if (n, batch) in REFERENCE_SIZES and case.norm < 0.999:
        makers["picard, reference"] = lambda rtol: engine_run(case, REFERENCE, Picard(), rtol)
        makers["anderson, reference"] = lambda rtol: engine_run(case, REFERENCE, Anderson(), rtol)
    row: dict[str, Any] = {"family": case.family, "norm": case.norm, "n": n, "batch": batch, "solvers": {}}
    for name, make in makers.items():
        run, rtol, error = accurate(case, make)
        forward, both = (best_call(partial(run, backward), most=40) for backward in (False, True))
        row["solvers"][name] = {"rtol": rtol, "error": error, "forward": forward, "both": both}
    return row


def draw(rows: list[dict[str, Any]]) -> None:
    """Draws time over contraction, a panel per family and size."""
    plt = require("matplotlib.pyplot", extra="plots")
    sizes = ((20, 128), (190, 500), (512, 64))
    families = (*FAMILIES, "trained")
    figure, axes = plt.subplots(len(sizes), len(families), figsize=(11, 6), sharex=True, sharey="row")
    for axis_row, size in zip(axes, sizes, strict=True):
        for axis, family in zip(axis_row, families, strict=True):
            chosen = [r for r in rows if r["family"] == family and (r["n"], r["batch"]) == size]
            for name, colour in COLOURS.items():
                times = [1e3 * r["solvers"][name]["both"] for r in chosen]
                axis.semilogy(range(len(chosen)), times, ".-", color=colour, label=name)
            axis.set_xticks(range(len(chosen)), [str(r["norm"]) for r in chosen])
            if axis is axis_row[0]:
                axis.set_ylabel(f"n={size[0]}, batch {size[1]}\nms")
            if axis in axes[0]:
                axis.set_title(family, fontsize=10)
            axis.grid(alpha=0.3)
    axes[-1][len(families) // 2].set_xlabel("contraction")
    axes[0][1].legend(fontsize=8, loc="upper center")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=90)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarises how often each solver is best, and how long each takes for all problems."""
    wins = [min((r["solvers"][name]["both"], name) for name in COLOURS)[1] for r in rows]
    total = {name: sum(r["solvers"][name]["both"] for r in rows) for name in COLOURS}
    return {
        "wins": {name: wins.count(name) for name in COLOURS},
        "total seconds": total,
    }


def main() -> None:
    """Measures, writes the result and draws."""
    parser = make_parser(__doc__, __file__, quick="the smallest size at two contractions", plot="draw the plot")
    options = parser.parse_args()
    if options.plot:
        draw(load(options)["rows"])
        return
    one_thread()
    warnings.simplefilter("ignore")
    rows = []
    for family, norm, A, v in cases(options.quick):
        row = measure(make_case(family, norm, A, v))
        times = "  ".join(f"{name} {1e3 * t['both']:.2f}" for name, t in row["solvers"].items())
        print(f"{row['n']:4}{row['batch']:5} {family:9}{norm:6}  {times} ms", flush=True)
        rows.append(row)
    groups = {"summary": SIZES, "others": OTHERS[0]}
    chosen = {name: [row for row in rows if (row["n"], row["batch"]) in sizes] for name, sizes in groups.items()}
    summaries = {name: summary(members) for name, members in chosen.items() if members}
    print(json.dumps(summaries, indent=1))
    save(options, error=ERROR, **summaries, rows=rows)
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
