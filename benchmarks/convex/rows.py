"""State matching row by row: the exact path against CVXPY with Clarabel and Algorithm 1 of 003 with scikit-learn.

An MLP (784-64-32-16-10 on FashionMNIST where WELLPOSED_DATA has it, else 64-64-32-16-10 on digits) is trained for
a few epochs, its states are recorded on 1 000 images, and all of its 112 rows are fitted on one processor.

Run: python -m benchmarks.convex.rows [--quick]
"""

import warnings

import numpy as np
import torch
from sklearn.linear_model import Lasso
from torch import Tensor

from benchmarks.harness import cpu_seconds, make_parser, one_thread, print_table, save
from benchmarks.problems import images, trained_mlp
from wellposed.convex import (
    Cvxpy,
    Design,
    RowProblem,
    RowSolver,
    Schur,
    States,
    capped_norm,
    duality_gap,
    record_states,
    row_problem,
)

SAMPLES, ORACLE_ROWS, KAPPAS = 1000, 12, (0.3, 0.99)


def recorded(samples: int = SAMPLES) -> tuple[States, str]:
    """Trains the MLP without biases; returns its states on some images, and the name of the data."""
    train, name = images("train")
    return record_states(trained_mlp(train, bias=False), [train.flat()[:samples]]), name


def algorithm_one(problem: RowProblem, M: np.ndarray, eps: float = 0.01) -> Tensor:
    """Runs Algorithm 1 as printed, each LASSO by scikit-learn on the shared Gram matrix, warm."""
    gram, count, weights = np.ascontiguousarray(problem.gram.numpy()), len(M), np.zeros(problem.cross.shape)
    assert problem.targets is not None
    for i, z in enumerate(problem.targets.double().numpy().T):
        low, high = 0.0, float(np.linalg.norm(problem.cross[i].numpy()))
        solver = Lasso(fit_intercept=False, precompute=gram, warm_start=True)
        while high - low >= eps:
            level = (high + low) / 2
            weights[i] = solver.set_params(alpha=level / count).fit(M, z).coef_
            if np.abs(weights[i]).sum() >= problem.kappa:
                low = level
            else:
                high = level
    return torch.from_numpy(weights)


def quality(problem: RowProblem, weights: Tensor) -> dict[str, float]:
    """Returns the worst gap and the worst excess over the cap, relative."""
    shrunk = weights.clone()
    norm = capped_norm(problem, weights)
    shrunk[:, : problem.capped] *= (problem.kappa / norm.clamp(min=problem.kappa))[:, None]
    gap = duality_gap(problem, shrunk, exact=True) / problem.scale
    return {"gap": float(gap.max()), "excess": float((norm - problem.kappa).clamp(min=0).max() / problem.kappa)}


def measure(states: States, kappa: float, bound: str) -> list[dict[str, object]]:
    """Times all methods on one problem."""
    n, width = states.X.shape[1], states.X.shape[1] + states.U.shape[1]
    capped = n if bound == "state" else width

    def build() -> RowProblem:
        return row_problem(Design.of(states.X, states.U), states.Z, kappa=kappa, capped=capped)

    def ours(solver: RowSolver) -> Tensor:
        return solver.solve(build()).weights

    problem, rows = build(), []

    def note(method: str, spent: float, part: RowProblem, weights: Tensor, timed: int) -> None:
        scaled = spent * problem.rows / timed
        rows.append({"bound": bound, "kappa": kappa, "method": method, "seconds": scaled, "rows_timed": timed}
                    | quality(part, weights))  # fmt: skip

    ways = {"path": Schur(), "path, refined": Schur(refine=1), "path, 1e-9 proven from the data": Schur(tol=1e-9)}
    for method, solver in ways.items():
        if bound == "state" or method == "path":
            spent, weights = cpu_seconds(lambda chosen=solver: ours(chosen), rounds=5)
            note(method, spent, problem, weights, problem.rows)
    chosen = torch.linspace(0, problem.rows - 1, ORACLE_ROWS).long()
    part = problem.chosen(chosen)
    spent, weights = cpu_seconds(lambda: Cvxpy().solve(part).weights)
    note("CVXPY + Clarabel", spent, part, weights, ORACLE_ROWS)
    if bound == "row":
        M = np.asfortranarray(torch.cat([states.X, states.U], 1).double().numpy())
        spent, weights = cpu_seconds(lambda: algorithm_one(problem, M))
        note("Algorithm 1, scikit-learn, eps 0.01", spent, problem, weights, problem.rows)
    for row in rows:
        row["ratio"] = row["seconds"] / rows[0]["seconds"]
    return rows


def show(rows: list[dict[str, object]], title: str) -> None:
    """Prints the table."""
    header = ("bound", "kappa", "method", "seconds", "ratio", "relative gap", "excess")
    lines = [
        [row["bound"], row["kappa"], row["method"]]
        + [f"{row[key]:.3g}" for key in ("seconds", "ratio", "gap", "excess")]
        for row in rows
    ]
    print_table(title, header, lines, width=120)


def main() -> None:
    """Measures, prints and writes the result."""
    options = make_parser(__doc__, __file__, quick="one cap of the rows of A, 200 images").parse_args()
    one_thread()
    warnings.simplefilter("ignore")
    states, name = recorded(200 if options.quick else SAMPLES)
    Schur().solve(row_problem(Design.of(states.X[:, :4], states.U[:, :4]), states.Z[:, :2], kappa=0.3, capped=4))
    bounds, kappas = (("state",), KAPPAS[:1]) if options.quick else (("row", "state"), KAPPAS)
    rows = [row for bound in bounds for kappa in kappas for row in measure(states, kappa, bound)]
    n, p = states.X.shape[1], states.U.shape[1]
    size = f"{name}, {n} rows, {n + p} columns, {states.samples} samples"
    show(rows, size)
    save(options, problem=size, rows=rows)


if __name__ == "__main__":
    main()
