"""Our compiled kernels against torchidl and torchdeq, forward and backward, at equal true error, one thread each.

Every library gets the loosest tolerance at which its outputs are within a common target of the exact ones; where
it reaches the target at no tolerance it is timed at the one that came nearest, and the table says so.

Run: make kernels (KERNELS_ARGS=--quick), or python -m benchmarks.kernels.layer [--quick]
"""

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.harness import best_times, make_parser, one_thread, save, versions
from benchmarks.problems import SolvedProblem, solved_problem
from benchmarks.rivals.libraries import installed, torchdeq_model, torchidl_model
from wellposed import Absolute, ImplicitModel

FAMILIES = ("positive", "ring", "shift", "trained")
SIZES = ((20, 128), (30, 2048), (64, 512), (300, 256), (512, 128))
TARGETS = {0.9: 1e-5, 0.99: 1e-4}  # relative error of outputs, by contraction
TOLERANCES = tuple(3.0 ** -(k % 2) * 10.0 ** -(k // 2) for k in range(4, 15))  # 1e-2, 3e-3, ..., 1e-7
MAX_STEPS = 20_000


def ours(case: SolvedProblem, tolerance: float, **options: Any) -> ImplicitModel:
    """Returns our model as it comes, but for the tolerance."""
    chosen: dict[str, Any] = {
        "stop": Absolute(tolerance),
        "max_steps": MAX_STEPS,
        "on_failure": "ignore",
    } | options
    return ImplicitModel.from_matrices(case.A, case.B, case.C, **chosen)


def torchidl(case: SolvedProblem, tolerance: float) -> nn.Module:
    """Returns torchidl's model; its settings are attributes of a class, so every model gets a class of its own."""
    base = import_module("torchidl.implicit_function").ImplicitFunctionInf
    model: Any = torchidl_model(case.A, case.B, case.C, function=type("Own", (base,), {}))
    model.f.set_parameters(tol=tolerance, grad_tol=tolerance, mitr=MAX_STEPS, grad_mitr=MAX_STEPS)
    return model


MODELS: dict[str, Callable[[SolvedProblem, float], nn.Module]] = {
    "wellposed": ours,
    "torchidl": torchidl,
    "torchdeq": lambda case, tolerance: torchdeq_model(case.A, case.B, case.C, tolerance),
}


def choose_tolerance(
    case: SolvedProblem, make: Callable[[SolvedProblem, float], nn.Module], target: float
) -> tuple[float, float]:
    """Returns the loosest tolerance with a small enough error and that error, else the best there is."""
    errors: dict[int, float] = {}

    def error(index: int) -> float:
        if index not in errors:
            with torch.no_grad():
                errors[index] = case.error(make(case, TOLERANCES[index])(case.u))
        return errors[index]

    low, high = 0, len(TOLERANCES) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if error(middle) <= target else (middle + 1, high)
    best = low if error(low) <= target else min(errors, key=lambda index: errors[index])
    return TOLERANCES[best], errors[best]


def step(model: nn.Module, case: SolvedProblem) -> None:
    """Computes outputs and the gradients of all parameters."""
    for parameter in model.parameters():
        parameter.grad = None
    model(case.u).backward(case.g)


def measure(case: SolvedProblem, names: list[str]) -> dict[str, Any]:
    """Measures all libraries on one problem."""
    target, (n, batch) = TARGETS[case.norm], case.size
    chosen = {name: choose_tolerance(case, MODELS[name], target) for name in names}
    models = {name: MODELS[name](case, tolerance) for name, (tolerance, _) in chosen.items()}
    steps = {name: partial(step, model, case) for name, model in models.items()}
    seconds = best_times(steps, budget=0.04, slow=0.3)
    row: dict[str, Any] = {"family": case.family, "norm": case.norm, "n": n, "batch": batch, "target": target}
    row["libraries"] = {
        name: {"tolerance": chosen[name][0], "error": chosen[name][1], "ms": 1e3 * seconds[name]} for name in names
    }
    row["ours"] = models["wellposed"].explain(case.u)  # type: ignore[operator]
    return row


def line(row: dict[str, Any]) -> str:
    """Writes a row of the table; times at which the target was not reached are in brackets."""
    cells = []
    for name in MODELS:
        timing = row["libraries"].get(name)
        text = "" if timing is None else f"{timing['ms']:.2f}"
        cells.append(
            text if timing is None or timing["error"] <= row["target"] else f"({text}; {timing['error']:.0e})"
        )
    mine = row["libraries"]["wellposed"]["ms"]
    for name in ("torchidl", "torchdeq"):
        timing = row["libraries"].get(name)
        cells.append("" if timing is None else f"{timing['ms'] / mine:.1f}x")
    return f"| {row['family']} {row['norm']} | {row['n']}, {row['batch']} | {' | '.join(cells)} |"


HEADER = """| problem | n, batch | wellposed, ms | torchidl, ms | torchdeq, ms | vs torchidl | vs torchdeq |
|---|---|---|---|---|---|---|"""


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the least ratios of every group of problems."""
    ratios = [
        (row, row["libraries"][name]["ms"] / row["libraries"]["wellposed"]["ms"], name)
        for row in rows
        for name in ("torchidl", "torchdeq")
        if name in row["libraries"]
    ]
    small, all_sizes, positive = range(65), range(1000), ("positive",)
    groups: dict[str, tuple[str, tuple[str, ...], range]] = {
        "torchidl, positive, n <= 32": ("torchidl", positive, range(33)),
        "torchidl, positive, n = 64": ("torchidl", positive, range(64, 65)),
        "torchidl, positive, n = 300": ("torchidl", positive, range(300, 301)),
        "torchidl, all": ("torchidl", FAMILIES, all_sizes),
        "torchdeq, positive, n <= 64": ("torchdeq", positive, small),
        "torchdeq, all, n <= 64": ("torchdeq", FAMILIES, small),
    }
    by_group = {
        group: [r for row, r, k in ratios if k == name and row["family"] in families and row["n"] in sizes]
        for group, (name, families, sizes) in groups.items()
    }
    return {name: {"least": min(values), "most": max(values)} for name, values in by_group.items() if values}


def main() -> None:
    """Runs all problems, prints the table and writes the result."""
    options = make_parser(__doc__, __file__, quick="two sizes at contraction 0.9").parse_args()
    one_thread()
    warnings.simplefilter("ignore")
    names, rows, start = installed(MODELS), [], time.perf_counter()
    print(HEADER, flush=True)
    for norm in (0.9,) if options.quick else TARGETS:
        for family in FAMILIES:
            for n, batch in SIZES[:3:2] if options.quick else SIZES:
                rows.append(measure(solved_problem(family, norm, n, batch), names))
                print(line(rows[-1]), flush=True)
    ratios, seconds = summary(rows), time.perf_counter() - start
    print(json.dumps(ratios, indent=1))
    save(options, versions=versions(*MODELS), seconds=seconds, summary=ratios, rows=rows)


if __name__ == "__main__":
    main()
