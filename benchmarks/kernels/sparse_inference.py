"""Inference with a sparse A: sparse products against the dense kernel and the plain loop, one thread.

Whole forward passes without derivatives and with equal results, measured in turns; a ratio is the median of those
of all rounds. "dense" is the dense kernel as a model calls it, which projects and packs A every time; "packed" is
the same without these preparations, so that the ratio to it is that of the solves alone. The last column is what
the rule of `kernels.sparse` takes, and how much slower that is than the better of sparse and packed.

Run: python -m benchmarks.kernels.sparse_inference [--quick | --plot]
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import wellposed.kernels.cpu.engine as numba_engine
from benchmarks.harness import DOCS, load, make_parser, one_thread, round_times, save
from wellposed import ImplicitModel
from wellposed.errors import require
from wellposed.kernels.engine import compiled_engine
from wellposed.kernels.layer import run_layer
from wellposed.kernels.sparse import compress, largest_share

SIZES, BATCHES = (128, 512, 1024, 2048), (1, 32, 256)
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
INPUTS, OUTPUTS, NORM = 100, 10, 0.9
PICTURE = DOCS / "guides" / "sparse-inference.png"


def make_matrix(n: int, sparsity: float, layers: int, generator: torch.Generator) -> Tensor:
    """Draws A with row sums of |A| of 0.9; with several layers, every state depends on the layer before."""
    A = torch.randn(n, n, generator=generator) * (torch.rand(n, n, generator=generator) >= sparsity)
    if layers:
        layer = torch.arange(n) * layers // n
        A = A * (layer[:, None] == layer + 1)
    return NORM * A / A.abs().sum(1, keepdim=True).clamp_min(1e-9)


def make_models(n: int, sparsity: float, layers: int, dtype: torch.dtype) -> tuple[ImplicitModel, ImplicitModel]:
    """Returns the same model with kernels and with the plain loop."""
    generator = torch.Generator().manual_seed(n)
    A = make_matrix(n, sparsity, layers, generator)
    B, C = torch.randn(n, INPUTS, generator=generator), torch.randn(OUTPUTS, n, generator=generator)
    matrices = [part.to(dtype) for part in (A, B / INPUTS**0.5, C / n**0.5)]
    fast, plain = (ImplicitModel.from_matrices(*matrices, executor=name) for name in ("auto", "reference"))
    return fast, plain


def make_runs(fast: ImplicitModel, plain: ImplicitModel, u: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Returns the forward passes to compare."""
    spec, A, others = fast.spec(), fast.A.detach(), (fast.B, fast.C, fast.D, fast.bias)
    engine = compiled_engine(spec, (A,))
    if engine is None:
        raise RuntimeError("numba is needed here: pip install 'wellposed[fast]'")
    tiles, rows = numba_engine.pack_matrix(A, numba_engine.kernels()), compress(A, square=True)

    def with_sparse_A() -> Tensor:
        fast._sparse_matrices(u)  # a model looks whether its parameters have changed
        return run_layer(engine, spec, None, u, rows, *others)

    def packed() -> Tensor:
        with mock.patch.object(numba_engine, "pack_matrix", return_value=tiles):
            return run_layer(engine, spec, None, u, A, *others)

    return {
        "sparse": with_sparse_A,
        "packed": packed,
        "dense": lambda: run_layer(engine, spec, None, u, fast.state.factors()[0], *others),
        "loop": lambda: plain(u),
    }


@torch.no_grad()
def measure(n: int, batch: int, sparsity: float, layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """Measures one model on one batch."""
    fast, plain = make_models(n, sparsity, layers, dtype)
    u = torch.randn(batch, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    runs = make_runs(fast, plain, u)
    outputs = {name: run() for name, run in runs.items()}
    size = float(outputs["loop"].abs().max())
    error = max(float((y - outputs["loop"]).abs().max()) / size for y in outputs.values())
    if not error <= (1e-4 if dtype == torch.float32 else 1e-8):
        raise RuntimeError(f"results differ by {error:.1e} at n={n}, batch={batch}, sparsity={sparsity}")
    seconds = round_times(runs, rounds=7, budget=0.01)
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[name], seconds["sparse"], strict=True))
        for name in ("packed", "dense", "loop")
    }
    rows = compress(fast.A, square=True)
    taken = rows.pays(batch)
    return {
        "n": n, "batch": batch, "sparsity": sparsity, "layers": layers, "error": error, "levels": rows.levels,
        "bytes": rows.nbytes, "ms": {name: 1e3 * statistics.median(times) for name, times in seconds.items()},
        "ratio": ratios, "rule": "sparse" if taken else "dense", "regret": regret(taken, ratios["packed"]),
    }  # fmt: skip


def regret(taken: bool, ratio: float) -> float:
    """Returns how many times slower the chosen product is than the better one, less one."""
    return max(1 / ratio if taken else ratio, 1.0) - 1


def break_even(rows: list[dict[str, Any]]) -> float | None:
    """Returns the sparsity at which the sparse product overtakes the dense one; logarithms are interpolated."""
    points = sorted((row["sparsity"], math.log(row["ratio"]["packed"])) for row in rows)
    for (left, low), (right, high) in pairwise(points):
        if low < 0 <= high:
            return left + (right - left) * low / (low - high)
    return None if points[-1][1] < 0 else points[0][0]


def line(row: dict[str, Any]) -> str:
    """Writes a row of the table."""
    times = " | ".join(f"{row['ms'][name]:.3f}" for name in ("sparse", "packed", "dense", "loop"))
    ratios = " | ".join(f"{row['ratio'][name]:.2f}x" for name in ("packed", "dense", "loop"))
    kind = f"{row['layers']} layers" if row["layers"] else "cycles"
    case = f"{row['n']}, {row['batch']} | {kind} | {row['sparsity']:.0%}"
    return f"| {case} | {times} | {ratios} | {row['rule']}, {row['regret']:.0%} |"


HEADER = """| n, batch | A | sparsity | sparse ms | packed | dense | loop | vs packed | vs dense | vs loop | rule |
|---|---|---|---|---|---|---|---|---|---|---|"""


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the least ratios at 90 % sparsity and more, n >= 512, and where sparse products begin to pay."""
    results: dict[str, Any] = {}
    for batch in sorted({row["batch"] for row in rows}):
        wanted = [row for row in rows if row["batch"] == batch and row["n"] >= 512]
        large = [row for row in wanted if row["sparsity"] >= 0.9]
        least = {
            name: min((row["ratio"][name] for row in large), default=math.nan) for name in ("packed", "dense")
        }
        results[f"batch {batch}"] = {"least ratio at 90 %, n >= 512": least}
        for n in sorted({row["n"] for row in rows}):
            curve = [row for row in rows if (row["n"], row["batch"], row["layers"]) == (n, batch, 0)]
            if curve:
                results[f"batch {batch}"][f"break-even sparsity, n = {n}"] = break_even(curve)
    results["largest regret"] = max(row["regret"] for row in rows)
    return results


def plot(rows: list[dict[str, Any]]) -> None:
    """Draws the ratios against the sparsity, a panel for every batch."""
    pyplot = require("matplotlib.pyplot", extra="plots")
    rows = [row for row in rows if not row["layers"]]
    batches = sorted({row["batch"] for row in rows})
    figure, axes = pyplot.subplots(1, len(batches), figsize=(4 * len(batches), 3.6), sharey=True, squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        for n in sorted({row["n"] for row in rows}):
            curve = sorted(
                (row["sparsity"], row["ratio"]["packed"]) for row in rows if (row["n"], row["batch"]) == (n, batch)
            )
            axis.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=f"n = {n}")
        limits = sorted({1 - largest_share(n, batch) for n in (min(SIZES), max(SIZES))})
        axis.axhline(1, color="black", linewidth=0.8)
        for limit in limits:
            axis.axvline(limit, color="black", linestyle=":", linewidth=1)
        rule = " or ".join(f"{limit:.0%}" for limit in limits)
        axis.set(title=f"batch {batch} (sparse from {rule})", xlabel="sparsity of A", yscale="log")
        axis.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left")
    axes[0][0].set_ylabel("time of dense / time of sparse")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Runs all cases, prints the table and writes the result; or draws it."""
    parser = make_parser(__doc__, __file__, quick="two sizes and three sparsities", plot="draw the curves")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()
    if options.plot:
        plot(load(options)["rows"])
        return
    one_thread()
    dtype, rows, start = getattr(torch, options.dtype), [], time.perf_counter()
    cases = [(n, batch, s, 0) for n in SIZES for batch in BATCHES for s in SPARSITIES]
    cases += [(n, batch, 0.8, layers) for n in (512, 1024) for batch in BATCHES for layers in (2, 4)]
    if options.quick:
        cases = [case for case in cases if case[0] <= 512 and case[2] in (0.7, 0.8, 0.9)]
    print(HEADER, flush=True)
    for case in cases:
        rows.append(measure(*case, dtype))
        print(line(rows[-1]), flush=True)
    ratios = summary(rows)
    print(json.dumps(ratios, indent=1))
    save(options, dtype=options.dtype, seconds=time.perf_counter() - start, summary=ratios, rows=rows)


if __name__ == "__main__":
    main()
