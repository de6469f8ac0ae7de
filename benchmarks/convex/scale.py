"""State matching at scale: 10 000 rows of 4 000 columns, in threads that share one Gram matrix.

The states are those of a random ReLU layer on inputs of low rank, as natural data have, plus a little noise; each
target is the pre-activation of a unit of the next layer, which reads all states and inputs. The rows of A are
capped at kappa ("state"), or all of (A, B) ("row").

Memory is stated by the formula of `RowFit`, for r rows of d columns, s entries of a row that are not zero, j
threads on chunks of k rows and a piece of c samples, and compared with the highest use above that of the data:

    8 (6 d^2 + 3 r d + c d) + j 8 d (8 k + s)  bytes

Run: python -m benchmarks.convex.scale [--quick] [--rows 10000] [--columns 4000] [--jobs 2]
"""

import gc
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import make_parser, save
from wellposed.convex import Design, RowFit, capped_norm, duality_gap, row_problem
from wellposed.convex.problem import Bound

KAPPA, SAMPLES, RANK, CHUNK = 0.99, 6000, 60, 64
BOUNDS: tuple[Bound, ...] = ("state", "row")


def recorded(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws states X, inputs U and pre-activations Z."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs, states = columns // 5, columns - columns // 5
    U = normal(SAMPLES, RANK) @ normal(RANK, inputs) / RANK**0.5 + 0.1 * normal(SAMPLES, inputs)
    X = (U @ normal(inputs, states) / inputs**0.5 + 0.2 * normal(SAMPLES, states)).relu()
    weights = normal(columns, rows) * (torch.rand(columns, rows, generator=generator) < 0.05)
    Z = torch.cat([X, U], dim=1) @ weights / (0.05 * columns) ** 0.5
    return X, U, Z + 0.1 * normal(SAMPLES, rows)


def formula(rows: int, columns: int, jobs: int, entries: float) -> float:
    """Computes the stated memory in GiB."""
    shared = 8 * (6 * columns**2 + 3 * rows * columns + min(SAMPLES, 4096) * columns)
    return (shared + jobs * 8 * columns * (8 * CHUNK + entries)) / 2**30


def peak() -> float:
    """Returns the most memory that the process has used, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def current() -> float:
    """Returns the memory in use now, in GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def heartbeat(done: int, total: int) -> None:
    """Prints a line now and then."""
    if done == total or done % (16 * CHUNK) == 0:
        print(f"  {done} of {total} rows, {time.strftime('%X')}", flush=True)


def measure(data: tuple[Tensor, Tensor, Tensor], bound: Bound, jobs: int) -> dict[str, Any]:
    """Solves all rows once, and proves gaps and caps on 64 of them from the data."""
    X, U, Z = data
    idle, used, start = os.getloadavg()[0], time.process_time(), time.perf_counter()
    fitted = RowFit(kappa=KAPPA, bound=bound, jobs=jobs, chunk=CHUNK, progress=heartbeat).solve(X, U, Z)
    wall, spent = time.perf_counter() - start, time.process_time() - used
    some = torch.linspace(0, Z.shape[1] - 1, 64).long()
    capped = X.shape[1] if bound == "state" else X.shape[1] + U.shape[1]
    problem = row_problem(Design.of(X, U), Z[:, some], kappa=KAPPA, capped=capped)
    gap = duality_gap(problem, fitted.weights[some], exact=True) / problem.scale
    counted = fitted.weights[:, :capped].abs().sum(1)
    return {
        "bound": bound,
        "seconds": round(wall, 1),
        "processor_seconds": round(spent, 1),
        "load_before": round(idle, 2),
        "rows_a_second": round(Z.shape[1] / wall, 1),
        "steps_a_row": round(float(fitted.steps.double().mean()), 1),
        "nonzeros_a_row": round(float((fitted.weights[:, :capped] != 0).sum(1).double().mean()), 1),
        "largest_relative_gap": float(fitted.relative_gap.max()),
        "largest_relative_gap_from_data_of_64_rows": float(gap.max()),
        "largest_excess": float((counted - KAPPA).clamp(min=0).max()),
        "excess_of_64_rows": float((capped_norm(problem, fitted.weights[some]) - KAPPA).clamp(min=0).max()),
    }


def main() -> None:
    """Measures both bounds, prints and writes the result."""
    parser = make_parser(__doc__, __file__, quick="64 rows of 200 columns unless said otherwise")
    parser.add_argument("--rows", type=int, help="default: 10000")
    parser.add_argument("--columns", type=int, help="default: 4000")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--bounds", nargs="+", choices=BOUNDS, default=BOUNDS)
    options = parser.parse_args()
    rows, columns = (64, 200) if options.quick else (10_000, 4_000)
    rows, columns, jobs = options.rows or rows, options.columns or columns, options.jobs
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    RowFit(kappa=0.3, jobs=2, chunk=2).solve(*(part[:50] for part in recorded(4, 10)))  # compiles
    data = recorded(rows, columns)
    gc.collect()
    start, results = current(), []
    size = {"kappa": KAPPA, "rows": rows, "columns": columns, "samples": SAMPLES, "jobs": jobs}
    for bound in options.bounds:
        result = measure(data, bound, jobs)
        stated = formula(rows, columns, jobs, result["nonzeros_a_row"])
        result |= {"memory_stated_gib": round(stated, 2), "memory_used_gib": round(peak() - start, 2)}
        print(result, flush=True)
        results.append(result)
        save(options, **size, cores=os.cpu_count(), results=results)


if __name__ == "__main__":
    main()
