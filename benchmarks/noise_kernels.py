"""Solves under noise: the compiled loop against the plain one, on one thread, with the same draws and torch's.

Run: python -m benchmarks.noise_kernels          measures, writes results/noise_kernels.json and prints the table
     python -m benchmarks.noise_kernels --table  prints the table from the JSON
"""

import argparse
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import best_times, one_thread
from wellposed import ImplicitModel, MeanRelative, Noise, Noisy, Steps
from wellposed.equilibrium.stopping import Stopping

RESULT = Path(__file__).parent / "results" / "noise_kernels.json"
WAYS: dict[str, tuple[str, bool | None]] = {
    "kernel": ("numba", None),
    "loop": ("reference", None),
    "loop, torch's draws": ("reference", False),
}
RULES: dict[str, Stopping] = {"20 steps": Steps(20), "mean of 10": MeanRelative(0.05, 10)}
INPUTS = 20  # of a model


def make(n: int, stop: Stopping, way: tuple[str, bool | None], device: str = "cpu", seed: int = 0) -> Noisy:
    """Returns a model with noise at 20 dB in the signal, its draws by a seed."""
    torch.manual_seed(0)
    executor, counter = way
    options: dict[str, Any] = {"solver": "picard", "stop": stop, "max_steps": 60, "executor": executor}
    model = ImplicitModel(INPUTS, 5, n, activation="tanh", on_failure="ignore", **options).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    return Noisy(model, Noise(signal=20.0, generator=generator, counter=counter))


@torch.no_grad()
def measure(n: int, batch: int, rule: str) -> dict[str, Any]:
    """Times all ways in turns."""
    u = torch.randn(batch, INPUTS, generator=torch.Generator().manual_seed(1))
    models = {name: make(n, RULES[rule], way) for name, way in WAYS.items()}
    runs: dict[str, Callable[[], object]] = {way: partial(model, u) for way, model in models.items()}
    steps = {way: float(model.equilibrium(u).steps.double().mean()) for way, model in models.items()}
    milliseconds = {way: 1e3 * best for way, best in best_times(runs, rounds=3, budget=0.03).items()}
    return {"states": n, "batch": batch, "rule": rule, "steps": steps, "milliseconds": milliseconds}


def table(rows: list[dict[str, Any]]) -> str:
    """Writes the results as Markdown."""
    lines = ["| states | batch | rule | kernel ms | loop ms | with torch's draws ms | kernel against the latter |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        times = row["milliseconds"]
        cells = [f"{times[way]:.2f}" for way in WAYS] + [f"{times[list(WAYS)[2]] / times['kernel']:.1f}x"]
        lines.append("| " + " | ".join([str(row["states"]), str(row["batch"]), row["rule"], *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures or prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    if parser.parse_args().table:
        print(table(json.loads(RESULT.read_text())["rows"]))
        return
    one_thread()
    sizes: list[tuple[int, int]] = [(20, 256), (100, 256), (300, 256)]
    rows = [measure(n, batch, rule) for rule in RULES for n, batch in sizes]
    record = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": rows}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
