"""What Gap-Safe screening saves, and what its certificates are worth.

The MLP of `benchmarks.convex.rows` (FashionMNIST where WELLPOSED_DATA has it, else digits) is recorded on 1 000
images, and its rows are solved with and without screening, on one processor, by the projected gradient, which
drops a column from a batch of rows once no row of it can need it.

Run: python -m benchmarks.convex.screening [--quick]
"""

import os
from dataclasses import replace
from typing import Any

from benchmarks.convex.rows import KAPPAS, SAMPLES, recorded
from benchmarks.harness import cpu_seconds, make_parser, one_thread, save
from wellposed.convex import Design, Projected, RowProblem, RowSolver, Schur, States, certified_zeros, row_problem
from wellposed.convex import objective as value

TOL, LIMIT, LOOKS = 1e-6, 20_000, (10, 40, 160)


def compared(method: str, problem: RowProblem, screened: RowSolver, plain: RowSolver) -> dict[str, Any]:
    """Times both ways and compares their solutions."""
    spent, reduced = cpu_seconds(lambda: screened.solve(problem))
    other, whole = cpu_seconds(lambda: plain.solve(problem))
    apart = (value(problem, reduced.weights) - value(problem, whole.weights)).abs() / problem.scale
    return {
        "method": method,
        "rows": problem.rows,
        "seconds_screened": round(spent, 3),
        "seconds_unscreened": round(other, 3),
        "time_saved": round(1 - spent / other, 3),
        "largest_relative_gap": float(max(part.relative_gap.max() for part in (reduced, whole))),
        "largest_relative_difference_of_objectives": float(apart.max()),
    }


def removed(problem: RowProblem) -> list[dict[str, Any]]:
    """Counts what is certified after some steps, and how much of it the exact path uses."""
    exact = Schur().solve(problem).weights
    used = exact.abs() * problem.gram.diagonal().sqrt() > 1e-9 * problem.power.sqrt()[:, None]
    rows = []
    for steps in LOOKS:
        early = Projected(max_steps=steps, period=steps, screen=False, polish=False).solve(problem).weights
        zeros = certified_zeros(problem, early)
        counts = zeros.sum(1).double()
        rows.append({"steps": steps, "columns": problem.columns, "median_removed": float(counts.median()),
                      "least_removed": int(counts.min()), "wrong": int((zeros & used).sum())})  # fmt: skip
    return rows


def measure(states: States, kappa: float) -> dict[str, Any]:
    """Measures the problem whose cap counts the whole row."""
    design = Design.of(states.X, states.U)
    problem = row_problem(design, states.Z, kappa=kappa, capped=design.shape[1])
    gradient = Projected(tol=TOL, max_steps=LIMIT)
    solves = [compared("projected gradient", problem, gradient, replace(gradient, screen=False))]
    size = {"kappa": kappa, "rows": problem.rows, "columns": problem.columns}
    return {**size, "removed": removed(problem), "solves": solves}


def main() -> None:
    """Measures, prints and writes the result."""
    options = make_parser(__doc__, __file__, quick="one cap, 200 images").parse_args()
    one_thread()
    samples, kappas = (200, KAPPAS[:1]) if options.quick else (SAMPLES, KAPPAS)
    (states, name), load = recorded(samples), round(os.getloadavg()[0], 2)
    results = []
    for kappa in kappas:
        results.append(measure(states, kappa))
        print(results[-1], flush=True)
        save(options, data=name, samples=samples, tol=TOL, load_before=load, results=results)


if __name__ == "__main__":
    main()
