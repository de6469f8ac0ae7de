"""Seconds until the first answer, in fresh processes: compiled code missing or on the disk, and the plain loop.

Counts from the making of the model, after `import wellposed`: importing numba, compiling or reading kernels, and
the work itself. Wall-clock time, and the CPU time of the process that waits.

    background    nothing is on the disk: the plain loop answers while another process compiles
    waiting       nothing is on the disk, and WELLPOSED_COMPILE=wait
    warm          all kernels are on the disk
    plain loop    executor="reference"

With --device cuda the kernels are Triton's, which the first call compiles itself; making the context of CUDA comes
before the clock starts, and the work ends when the device has done it.

Run: python -m benchmarks.kernels.first_call [--device cuda] [--quick | --table]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import load, make_parser, need_cuda, print_table, save, versions

WAYS = ("background", "waiting", "warm", "plain loop")
CHILD = "from benchmarks.kernels.first_call import answer; answer({!r}, {!r}, {!r})"


def model(executor: str, device: str) -> list[Callable[[], Any]]:
    """Returns the forward and the backward pass of an `ImplicitModel`."""
    from wellposed import ImplicitModel

    layer = ImplicitModel(20, 10, 20, executor=executor).to(device)  # type: ignore[arg-type]
    u, results = torch.randn(128, 20, device=device), list[Any]()
    return [lambda: results.append(layer(u)), lambda: results[0].sum().backward()]


def recurrent(executor: str, device: str) -> list[Callable[[], Any]]:
    """Returns the forward and the backward pass of an `ImplicitRNN`."""
    from wellposed import ImplicitRNN

    network = ImplicitRNN(1, 22, 21, batch_first=True, executor=executor).to(device)
    s, results = torch.randn(100, 10, 1, device=device), list[Any]()
    return [lambda: results.append(network(s)[0]), lambda: results[0].sum().backward()]


def fit(executor: str, device: str) -> list[Callable[[], Any]]:
    """Returns a convex fit."""
    from torch import nn

    from wellposed import fit_states, record_states

    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 5))
    states = record_states(network, [torch.randn(300, 10)])
    return [lambda: fit_states(states, objective="lasso", strength=0.01, device=device)]


WORK = {"ImplicitModel": model, "ImplicitRNN": recurrent, "fit_states": fit}


def answer(name: str, way: str, device: str) -> None:
    """Prints the seconds from the beginning to the end of every part, on the clock and of the processor."""
    import wellposed  # noqa: F401

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.ones(8, 8, device=device).mm(torch.ones(8, 8, device=device))  # the context of CUDA and its products
    clock, processor, ends = time.perf_counter(), time.process_time(), []
    for part in WORK[name]("reference" if way == "plain loop" else "auto", device):
        part()
        if device == "cuda":
            torch.cuda.synchronize()
        ends.append((time.perf_counter() - clock, time.process_time() - processor))
    print(json.dumps(ends))


def run(name: str, way: str, device: str, folder: str) -> list[tuple[float, float]]:
    """Does some work in a process of its own, with the caches of both compilers in a folder."""
    compile_when = "background" if way == "background" else "wait"
    folders = {"NUMBA_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
    environment = os.environ | folders | {"WELLPOSED_COMPILE": compile_when}
    command = [sys.executable, "-c", CHILD.format(name, way, device)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    ends: list[tuple[float, float]] = json.loads(output.splitlines()[-1])
    return ends


def measure(names: list[str], device: str, repeats: int) -> list[dict[str, Any]]:
    """Returns a row per work and way; what needs no compiler is repeated and the least time taken."""
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as filled:
            for way in WAYS:
                if name == "fit_states" and way == "plain loop":
                    continue  # it has no executor
                timings = []
                for _ in range(1 if way == "waiting" else repeats):
                    with tempfile.TemporaryDirectory() as empty:
                        timings.append(run(name, way, device, filled if way in ("waiting", "warm") else empty))
                least = [
                    [min(ends[part][clock] for ends in timings) for clock in (0, 1)]
                    for part in range(len(timings[0]))
                ]
                row = {
                    "work": name,
                    "device": device,
                    "way": way,
                    "forward": least[0],
                    "both": least[-1] if len(least) > 1 else None,
                }
                rows.append(row)
                print(row, flush=True)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    cells = [
        [row["work"], row["device"], row["way"], *(f"{t:.2f}" for t in (*row["forward"], *(row["both"] or ())))]
        for row in rows
    ]
    header = ["work", "device", "way", "forward, s", "CPU, s", "with backward, s", "CPU, s "]
    left = "work", "device", "way"
    print_table("until the first answer", header, ([*line, "", ""][:7] for line in cells), left=left)


def main() -> None:
    """Measures, or prints what was measured."""
    parser = make_parser(__doc__, __file__, quick="ImplicitModel alone", table="print the table")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        need_cuda()
        options.result = options.result.parents[1] / "gpu" / options.result.name
    if options.table:
        rows = load(options)["rows"]
    else:
        names, repeats = (list(WORK)[:1], 1) if options.quick else (list(WORK), 3)
        rows = measure(names, options.device, repeats)
        save(options, versions=versions("wellposed", "torch", "numba", "triton"), rows=rows)
    show(rows)


if __name__ == "__main__":
    main()
