"""Solves under noise on a GPU: the Triton kernel against the plain loop, with the same draws and with torch's.

Models are `ImplicitModel`s with tanh and signal noise of 20 dB, in float32. Ways run in turns in one process, and
times are medians between two waits for the device. With the same draws kernel and loop must find the same states
but for rounding: `gap` is the largest difference, of samples that stop after as many steps (states are below one),
and `same` their share. Where a residual lies within rounding of the tolerance, they may stop a step apart.

Agreement in distribution is that with the loop on torch's own draws, for one input in many samples, by state: the
largest difference of two means in standard errors, the largest ratio of two deviations, and the distances of
Kolmogorov and Smirnov, of which a twentieth should be above 1.36 if the two distributions are the same.

Run: python -m benchmarks.gpu_noise          measures, writes results/gpu_noise.json and prints the table
     python -m benchmarks.gpu_noise --table  prints the table from the JSON
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import noise_kernels
from benchmarks.noise_kernels import INPUTS, RULES
from wellposed import Noisy, Solution

RESULT = Path(__file__).parent / "results" / "gpu_noise.json"
WAYS = {**noise_kernels.WAYS, "kernel": ("triton", None)}
SIZES = (20, 256), (20, 65_536), (100, 256), (100, 4_096), (128, 65_536)
ALIKE = 16_384  # samples of the same input


def make(n: int, rule: str, way: str, seed: int = 0) -> Noisy:
    """Returns a model under noise on the GPU."""
    return noise_kernels.make(n, RULES[rule], WAYS[way], "cuda", seed)


def times(runs: dict[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """Returns the median milliseconds of every run, measured in turns for some seconds each."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in [*runs.values()] * 3:
        run()
    while any(len(taken) < 3 or sum(taken) < budget for taken in found.values()):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            found[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(taken) for name, taken in found.items()}


def _states(solution: Solution) -> Tensor:  # (B, n)
    assert isinstance(solution.value, Tensor)
    return solution.value


@torch.no_grad()
def measure(n: int, batch: int, rule: str, budget: float) -> dict[str, Any]:
    """Times all ways in turns and compares kernel and loop on the same draws."""
    u = torch.randn(batch, INPUTS, generator=torch.Generator().manual_seed(1)).cuda()
    found = {way: make(n, rule, way).equilibrium(u) for way in WAYS}
    same = found["kernel"].steps == found["loop"].steps
    gap = torch.sub(*(_states(found[way])[same] for way in ("kernel", "loop"))).abs().max()
    models = {way: make(n, rule, way) for way in WAYS}
    milliseconds = times({way: partial(model, u) for way, model in models.items()}, budget)
    row = {"states": n, "batch": batch, "rule": rule, "explain": models["kernel"].explain(u)}
    row |= {"steps": {way: float(solution.steps.double().mean()) for way, solution in found.items()}}
    row |= {"same": float(same.double().mean()), "gap": float(gap)}
    return row | {"milliseconds": milliseconds}


@torch.no_grad()
def agreement(n: int, rule: str) -> dict[str, Any]:
    """Compares the distributions of the states of one input, with draws of two kinds."""
    u = torch.randn(1, INPUTS, generator=torch.Generator().manual_seed(2)).expand(ALIKE, -1).contiguous().cuda()
    ways = {"kernel": 1, "loop, torch's draws": 2}
    one, two = (_states(make(n, rule, way, seed).equilibrium(u)).double() for way, seed in ways.items())
    error = ((one.var(0) + two.var(0)) / ALIKE).sqrt()
    ratio = (one.std(0) / two.std(0)).log().abs().max().exp()
    distances = smirnov(one, two)
    record = {"states": n, "samples": ALIKE, "rule": rule}
    record |= {"means": float(((one.mean(0) - two.mean(0)) / error).abs().max()), "deviations": float(ratio)}
    return record | {"smirnov": float(distances.max()), "above": float((distances > 1.36).double().mean())}


def smirnov(one: Tensor, two: Tensor) -> Tensor:  # (n,), from (N, n) twice
    """Returns the largest differences of two distribution functions, times the root of half the samples."""
    both = torch.cat([one, two]).mT.contiguous()
    signs = torch.cat([torch.ones(len(one)), -torch.ones(len(two))]).to(both)
    walks = signs[both.argsort(1)].cumsum(1)
    return walks.abs().amax(1) / len(one) * (len(one) / 2) ** 0.5


def table(record: dict[str, Any]) -> str:
    """Writes the results as Markdown."""
    lines = ["| states | batch | rule | kernel ms | loop ms | with torch's draws ms | kernel against the latter |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in record["rows"]:
        taken = row["milliseconds"]
        cells = [f"{taken[way]:.2f}" for way in WAYS] + [f"{taken[list(WAYS)[2]] / taken['kernel']:.1f}x"]
        lines.append("| " + " | ".join([str(row["states"]), str(row["batch"]), row["rule"], *cells]) + " |")
    for row in record["agreement"]:
        lines.append(
            f"\n{row['states']} states, {row['rule']}, {row['samples']} samples: means differ by at most "
            f"{row['means']:.1f} standard errors, deviations by a factor {row['deviations']:.3f}; distances of "
            f"Kolmogorov and Smirnov at most {row['smirnov']:.2f}, {100 * row['above']:.0f} % above 1.36."
        )
    return "\n".join(lines)


def main() -> None:
    """Measures or prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds a way")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text())))
        return
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    record["agreement"] = [agreement(n, rule) for rule in RULES for n in (20, 100)]
    record["rows"] = [measure(n, batch, rule, options.budget) for rule in RULES for n, batch in SIZES]
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
