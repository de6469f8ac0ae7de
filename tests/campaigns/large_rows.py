"""Sparsification of a layer with 10 000 rows and 10 000 features, within memory that is stated beforehand.

A network of one hidden layer is recorded and fitted from end to end by `fit_states`: every row of (A, B) is capped
at kappa as a whole, P(kappa) of 003 section 3.3, and has a lasso; the output is fitted on the equilibria of the
sparse model. Inputs are of low rank, as natural data are, plus noise; each unit reads a few of them.

Stated for r rows, d features and m samples, in bytes, before anything is measured: what `RowFit` takes with `jobs`
threads on 64 rows each and s entries of a row that are not zero, and the fitted (A, B) of r rows with r + d
columns twice, in double and in single precision:

    8 (6 d^2 + 3 r d + m d) + jobs 8 d (512 + s) + 2 (8 + 4) r (r + d)

The network and its recording are there before and do not count. `getrusage` measures the peak of the process.

Run: python tests/campaigns/large_rows.py     writes tests/campaigns/results/large_rows.json
"""

import argparse
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wellposed.convex import States, fit_states, record_states

RESULT = Path(__file__).parent / "results" / "large_rows.json"
KAPPA, STRENGTH, RANK, READS, OUTPUTS, CHUNK = 0.99, 0.05, 40, 20, 10, 64
GIB = 1 << 30


def layer(rows: int, features: int, samples: int, seed: int) -> States:
    """Records a network whose units read a few features each."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    network = nn.Sequential(nn.Linear(features, rows), nn.ReLU(), nn.Linear(rows, OUTPUTS))
    with torch.no_grad():
        network[0].weight.zero_()
        read = torch.randint(features, (rows, READS), generator=generator)
        network[0].weight.scatter_(1, read, 0.6 * normal(rows, READS) / READS)
        u = normal(samples, RANK) @ normal(RANK, features) / RANK**0.5 + 0.3 * normal(samples, features)
    return record_states(network, u.split(256))


def stated(rows: int, features: int, samples: int, jobs: int, entries: float) -> float:
    """Returns the memory that is stated, in GiB."""
    matrices = 8 * (6 * features**2 + 3 * rows * features + min(samples, 4096) * features)
    workers = jobs * 8 * features * (8 * CHUNK + entries)
    return (matrices + workers + 24 * rows * (rows + features)) / GIB


def peak() -> float:
    """Returns the most memory that the process has used, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def resident() -> float:
    """Returns the memory of the process now, in GiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / GIB


def measure(rows: int, features: int, samples: int, jobs: int, seed: int) -> dict[str, Any]:
    """Fits once; compares memory with what is stated, and gaps and caps with what is promised."""
    small = layer(8, 10, 50, seed)
    fit_states(small, kappa=KAPPA, bound="row", objective="lasso", strength=STRENGTH, jobs=jobs)  # compiles
    states = layer(rows, features, samples, seed)
    gc.collect()
    before, began, used = resident(), time.perf_counter(), time.process_time()

    def heartbeat(done: int, total: int) -> None:
        if done == total or done % 1024 < CHUNK:
            print(
                f"{done} of {total} rows, {time.perf_counter() - began:.0f} s, peak {peak():.2f} GiB", flush=True
            )

    goal: dict[str, Any] = {"objective": "lasso", "strength": STRENGTH}
    model, report = fit_states(states, kappa=KAPPA, bound="row", jobs=jobs, progress=heartbeat, **goal)
    entries = int(report.nonzeros.sum()) / rows
    taken, allowed = peak() - before, stated(rows, features, samples, jobs, entries)
    total = (model.A.detach().abs().sum(1) + model.B.detach().abs().sum(1))[:rows]
    return {
        **{"rows": rows, "features": features, "samples": samples, "jobs": jobs, "kappa": KAPPA, "seed": seed},
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(time.process_time() - used, 1),
        "nonzeros_a_row": round(entries, 1),
        "sparsity": round(report.sparsity, 5),
        "largest_relative_gap": float(report.relative_gap.max()),
        "largest_norm_of_a_row": float(total.max()),
        "output_error": report.output_error,
        "certificate": str(report.certificate),
        "memory_before_gib": round(before, 3),
        "memory_taken_gib": round(taken, 3),
        "memory_stated_gib": round(allowed, 3),
        "within": bool(taken <= allowed),
    }


def main() -> None:
    """Measures and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=2_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // given.jobs))
    sizes = (given.rows, given.features, given.samples, given.jobs, given.seed)
    words = "--rows {} --features {} --samples {} --jobs {} --seed {}".format(*sizes)
    machine = {"torch": torch.__version__, "cores": os.cpu_count()}
    record = {"command": f"python tests/campaigns/large_rows.py {words}", **measure(*sizes), "machine": machine}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    sys.exit(not record["within"] or record["largest_norm_of_a_row"] > KAPPA)


if __name__ == "__main__":
    main()
