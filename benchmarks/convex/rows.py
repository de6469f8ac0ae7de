"""State matching row by row: the exact path against CVXPY with Clarabel and Algorithm 1 of 003 with scikit-learn.

An MLP (784-64-32-16-10 on FashionMNIST where WELLPOSED_DATA has it, else 64-64-32-16-10 on digits) is trained for
a few epochs, its states are recorded on 1 000 images, and all of its 112 rows are fitted on one processor.

Run: python -m benchmarks.convex.rows
"""

import json
import platform
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import Lasso
from torch import Tensor, nn

from benchmarks.timing import one_thread
from wellposed.convex import (
    Design,
    Modelled,
    RowProblem,
    RowSolver,
    Schur,
    States,
    capped_norm,
    duality_gap,
    record_states,
    row_problem,
)
from wellposed.tasks.cache import MissingDataError
from wellposed.tasks.images import Images, load_images

RESULT = Path(__file__).parents[1] / "results" / "convex" / "rows.json"
SAMPLES, ORACLE_ROWS, KAPPAS = 1000, 12, (0.3, 0.99)


def images(split: str) -> tuple[Images, str]:
    """Loads FashionMNIST, or digits where it is missing."""
    try:
        return load_images("fashion-mnist", split), "fashion-mnist"
    except MissingDataError:
        return load_images("digits", split), "digits"


def trained(data: Images, epochs: int = 3) -> nn.Sequential:
    """Trains the MLP of 002 section 5.2."""
    torch.manual_seed(0)
    u, y = data.flat(), data.labels
    sizes = [u.shape[1], 64, 32, 16, 10]
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)]
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.ReLU(), layers[3])
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(epochs if len(u) > 10_000 else 20 * epochs):
        for rows in torch.randperm(len(u)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(u[rows]), y[rows]).backward()
            optimiser.step()
    return network


def seconds(work: Callable[[], object], rounds: int = 1) -> tuple[float, object]:
    """Returns the best processor time and the last result."""
    best, result = float("inf"), None
    for _ in range(rounds):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


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
            spent, weights = seconds(lambda chosen=solver: ours(chosen), rounds=5)
            note(method, spent, problem, weights, problem.rows)
    chosen = torch.linspace(0, problem.rows - 1, ORACLE_ROWS).long()
    part = problem.chosen(chosen)
    spent, found = seconds(lambda: Modelled().solve(part).weights)
    note("CVXPY + Clarabel", spent, part, found, ORACLE_ROWS)
    if bound == "row":
        M = np.asfortranarray(torch.cat([states.X, states.U], 1).double().numpy())
        spent, found = seconds(lambda: algorithm_one(problem, M))
        note("Algorithm 1, scikit-learn, eps 0.01", spent, problem, found, problem.rows)
    for row in rows:
        row["ratio"] = row["seconds"] / rows[0]["seconds"]
    return rows


def show(rows: list[dict[str, object]], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for column in ("bound", "kappa", "method", "seconds", "ratio", "relative gap", "excess"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = [f"{row[key]:.3g}" for key in ("seconds", "ratio", "gap", "excess")]
        table.add_row(str(row["bound"]), str(row["kappa"]), str(row["method"]), *numbers)
    Console(width=120).print(table)


def main() -> None:
    """Measures, prints and writes the JSON file."""
    one_thread()
    warnings.simplefilter("ignore")
    train, name = images("train")
    network = trained(train)
    states = record_states(network, [train.flat()[:SAMPLES]])
    Schur().solve(row_problem(Design.of(states.X[:, :4], states.U[:, :4]), states.Z[:, :2], kappa=0.3, capped=4))
    rows = [row for bound in ("row", "state") for kappa in KAPPAS for row in measure(states, kappa, bound)]
    n, p = states.X.shape[1], states.U.shape[1]
    size = f"{name}, {n} rows, {n + p} columns, {states.samples} samples"
    show(rows, size)
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cpu": platform.machine()}
    command = "python -m benchmarks.convex.rows"
    RESULT.write_text(
        json.dumps({"command": command, "problem": size, "machine": machine, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
