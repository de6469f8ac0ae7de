"""Our compiled kernels against torchidl and torchdeq, forward and backward, at equal true error, one thread each.

Every library gets the loosest tolerance at which its outputs are within a common target of the exact ones; where
it reaches the target at no tolerance it is timed at the one that came nearest, and the table says so.

Run: make kernels                             all problems, writes results/kernels/layer.json
     make kernels KERNELS_ARGS=--quick        two sizes and no slow problems, writes nothing
"""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.kernels_problems import FAMILIES, LIBRARIES, TOLERANCES, Case, available, make_case
from benchmarks.rivals.libraries import versions
from benchmarks.timing import one_thread
from wellposed.kernels import explain

SIZES = ((20, 128), (30, 2048), (64, 512), (300, 256), (512, 128))
TARGETS = {0.9: 1e-5, 0.99: 1e-4}  # relative error of outputs, by contraction
RESULT = Path(__file__).parents[1] / "results" / "kernels" / "layer.json"
ROUNDS, LEAST = 5, 0.04  # rounds, and seconds of runs in each


def choose_tolerance(case: Case, make: Callable[[Case, float], nn.Module], target: float) -> tuple[float, float]:
    """Returns the loosest tolerance with a small enough error and that error, else the best there is."""
    found: dict[int, float] = {}

    def error(place: int) -> float:
        if place not in found:
            with torch.no_grad():
                found[place] = case.error(make(case, TOLERANCES[place])(case.u))
        return found[place]

    low, high = 0, len(TOLERANCES) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if error(middle) <= target else (middle + 1, high)
    best = low if error(low) <= target else min(found, key=lambda place: found[place])
    return TOLERANCES[best], found[best]


def step(model: nn.Module, case: Case) -> None:
    """Computes outputs and the gradients of all parameters."""
    for parameter in model.parameters():
        parameter.grad = None
    model(case.u).backward(case.g)


def times(models: dict[str, nn.Module], case: Case) -> dict[str, float]:
    """Returns the best CPU seconds of a step of every model, measured in turns; slow ones get fewer rounds."""
    best = dict.fromkeys(models, float("inf"))
    for model in models.values():
        step(model, case)
    for turn in range(ROUNDS):
        for name, model in models.items():
            if turn >= 2 and best[name] > 0.3:
                continue
            start, count = time.process_time(), 0
            while time.process_time() - start < LEAST or count == 0:
                step(model, case)
                count += 1
            best[name] = min(best[name], (time.process_time() - start) / count)
    return best


def measure(case: Case, names: list[str]) -> dict[str, Any]:
    """Measures all libraries on one problem."""
    target, (n, batch) = TARGETS[case.norm], case.size
    chosen = {name: choose_tolerance(case, LIBRARIES[name], target) for name in names}
    models = {name: LIBRARIES[name](case, tolerance) for name, (tolerance, _) in chosen.items()}
    seconds = times(models, case)
    row: dict[str, Any] = {"family": case.family, "norm": case.norm, "n": n, "batch": batch, "target": target}
    row["libraries"] = {
        name: {"tolerance": chosen[name][0], "error": chosen[name][1], "ms": 1e3 * seconds[name]} for name in names
    }
    row["ours"] = explain(models["wellposed"], case.u)
    return row


def line(row: dict[str, Any]) -> str:
    """Writes a row of the table; times at which the target was not reached are in brackets."""
    cells = []
    for name in LIBRARIES:
        found = row["libraries"].get(name)
        text = "" if found is None else f"{found['ms']:.2f}"
        cells.append(
            text if found is None or found["error"] <= row["target"] else f"({text}; {found['error']:.0e})"
        )
    mine = row["libraries"]["wellposed"]["ms"]
    for name in ("torchidl", "torchdeq"):
        found = row["libraries"].get(name)
        cells.append("" if found is None else f"{found['ms'] / mine:.1f}x")
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
    found = {
        group: [r for row, r, k in ratios if k == name and row["family"] in families and row["n"] in sizes]
        for group, (name, families, sizes) in groups.items()
    }
    return {name: {"least": min(values), "most": max(values)} for name, values in found.items() if values}


def main() -> None:
    """Runs all problems, prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes at contraction 0.9")
    parser.add_argument("--output", type=Path, default=RESULT, help="where to write the numbers")
    options = parser.parse_args()
    one_thread()
    warnings.simplefilter("ignore")
    names, rows, start = available(), [], time.perf_counter()
    print(HEADER, flush=True)
    for norm in (0.9,) if options.quick else TARGETS:
        for family in FAMILIES:
            for n, batch in SIZES[:3:2] if options.quick else SIZES:
                rows.append(measure(make_case(family, norm, n, batch), names))
                print(line(rows[-1]), flush=True)
    machine = {"cpu": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    found = {
        "command": "make kernels",
        "machine": machine,
        "versions": versions(tuple(LIBRARIES)),
        "seconds": time.perf_counter() - start,
        "summary": summary(rows),
        "rows": rows,
    }
    print(json.dumps(found["summary"], indent=1))
    if not options.quick:
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
