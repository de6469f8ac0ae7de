"""What moves over the network when work is divided between two processes, counted at the network interface.

The processes run in a network namespace of their own, where nothing else speaks, so that the bytes of its loopback
interface are theirs alone (Linux, as root; `unshare -rn` before the command gives the same without).

Run: python -m benchmarks.package.scale_out [--quick | --table]
"""

import argparse
import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from benchmarks.harness import load, make_parser, markdown, save
from wellposed import ImplicitModel, fit
from wellposed.convex import Design, RowFit, fit_states, record_states
from wellposed.errors import require
from wellposed.workers import Workers

INPUTS, OUTPUTS = 16, 4
CASES = [(64, 32), (128, 32), (256, 32), (512, 32), (256, 256)]  # states, batch of both processes
ROWS = [(64, 128), (128, 128), (256, 128), (512, 128), (256, 512)]  # columns, rows
NEW_NETWORK, GET_FLAGS, SET_FLAGS, UP = 0x40000000, 0x8913, 0x8914, 1


def enter_own_network() -> None:
    """Leaves the network of the machine for one that has a loopback interface and nothing else."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) != 0:
        raise SystemExit("cannot make a network namespace; run as root or after: unshare -rn")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14s", b"lo", 0, b"")
        flags = struct.unpack("16sh14s", fcntl.ioctl(handle, GET_FLAGS, request))[1]
        fcntl.ioctl(handle, SET_FLAGS, struct.pack("16sh14s", b"lo", flags | UP, b""))


def sent() -> int:
    """Returns the bytes that the loopback interface has sent so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("there is no loopback interface")


def trained(kind: str, states: int, batch: int, steps: int) -> tuple[int, float]:
    """Trains for some steps; returns bytes of all processes and seconds."""
    torch.manual_seed(0)
    model = ImplicitModel(INPUTS, OUTPUTS, states, kappa=0.9)
    model = fully_shard(model) if kind == "fsdp" else model
    u = torch.randn(batch * steps, INPUTS)
    data = u, u[:, :OUTPUTS].tanh()
    distributed.barrier()
    before, began = sent(), time.perf_counter()
    fit(model, data, mse_loss, epochs=1, batch_size=batch, progress=False)
    distributed.barrier()
    return sent() - before, time.perf_counter() - began


def training_rows(kind: str, cases: int) -> list[dict[str, Any]]:
    """Measures steps of training in a process of torchrun: long runs less short ones."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rows = []
    for states, batch in CASES[:cases]:
        trained(kind, states, batch, 2)
        short, long = trained(kind, states, batch, 4), trained(kind, states, batch, 24)
        parameters = states * (states + INPUTS + OUTPUTS) + INPUTS * OUTPUTS
        step = {"bytes": (long[0] - short[0]) / 20, "seconds": (long[1] - short[1]) / 20}
        rows.append({"kind": kind, "states": states, "batch": batch, "parameters": parameters, **step})
    distributed.destroy_process_group()
    return rows


def by_torchrun(kind: str, cases: int) -> list[dict[str, Any]]:
    """Starts two processes and returns what the first one has measured."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "29511"]
        worker = ["-m", __spec__.name, "--worker", kind, "--cases", str(cases), "--out", f"{folder}/rows.json"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *addresses, *worker]
        subprocess.run(command, env=environment, check=True)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
        return rows


def quiet(work: Callable[[], object], idle: float) -> tuple[float, float]:
    """Returns bytes and seconds of some work, without what an idle cluster says in that time."""
    before, began = sent(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return max(0.0, sent() - before - idle * seconds), seconds


def nothing(common: None, k: int) -> int:
    """Is a run that costs nothing."""
    return k


def dask_rows(cases: int) -> list[dict[str, Any]]:
    """Measures convex rows and empty runs on a Dask cluster of two processes."""
    dask, measured = require("distributed", extra="dask"), []
    local = dask.LocalCluster(2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0)
    with local, dask.Client(local):
        fitted(64, 128, "dask")
        before, began = sent(), time.perf_counter()
        time.sleep(5)
        idle = (sent() - before) / (time.perf_counter() - began)
        for columns, rows in ROWS[:cases]:
            moved, seconds = quiet(lambda: fitted(columns, rows, "dask"), idle)  # noqa: B023
            measured.append({"kind": "rows", "columns": columns, "rows": rows, "bytes": moved, "seconds": seconds})
        tasks = [(k,) for k in range(200)]
        moved, seconds = quiet(lambda: list(Workers(1, "dask").run(nothing, tasks)), idle)
        measured.append({"kind": "runs", "runs": len(tasks), "bytes": moved, "seconds": seconds})
        measured.append({"kind": "idle", "bytes_per_second": idle})
    return measured


def fitted(columns: int, rows: int, backend: str) -> None:
    """Fits some rows."""
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(2 * columns, columns, generator=generator, dtype=torch.float64)
    z = M @ torch.randn(columns, rows, generator=generator, dtype=torch.float64)
    RowFit(kappa=0.5, chunk=16, backend=backend).solve(M[:, : columns // 2], M[:, columns // 2 :], z)


def passes() -> list[dict[str, Any]]:
    """Counts how often a fit reads the recording."""
    network = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3))
    states, measured = record_states(network, [torch.randn(2000, 20) for _ in range(5)]), []
    size = sum(part.numel() * part.element_size() for part in (states.U, states.Z, states.X, states.Y))
    plain, count = Design.read, [0]

    def counted(self: Design, rows: slice) -> torch.Tensor:
        count[0] += sum(part[rows].numel() * part.element_size() for part in self.parts)
        return plain(self, rows)

    Design.read = counted  # type: ignore[method-assign]
    for name, options in {"dense": {}, "target_sparsity=0.9": {"target_sparsity": 0.9}}.items():
        count[0] = 0
        fit_states(states, kappa=0.9, **options)
        measured.append({"kind": "passes", "fit": name, "read": count[0], "recording": size})
    Design.read = plain  # type: ignore[method-assign]
    return measured


def show(rows: list[dict[str, Any]]) -> str:
    """Writes the tables, each number beside what is expected of it."""
    steps = []
    for row in (row for row in rows if row["kind"] in ("ddp", "fsdp")):
        one = row["bytes"] / 2
        steps.append([row["kind"], row["states"], row["batch"], f"{one:,.0f}", f"{one / row['parameters']:.2f}"])
    fits = []
    for row in (row for row in rows if row["kind"] == "rows"):
        d, r = row["columns"], row["rows"]
        fits.append([d, r, f"{row['bytes']:,.0f}", f"{row['bytes'] / (8 * d * (3 * d + 4 * r)):.2f}"])
    header = ("training", "states", "batch", "bytes a process sends in a step", "per P")
    lines = [markdown(header, steps), "", markdown(("d", "r", "bytes of a fit", "of 8 (3 d^2 + 4 r d)"), fits)]
    (runs,), (idle,) = ([row for row in rows if row["kind"] == kind] for kind in ("runs", "idle"))
    share, rest = runs["bytes"] / runs["runs"], idle["bytes_per_second"]
    pace = runs["runs"] / runs["seconds"]
    lines += ["", f"a run: {share:,.0f} bytes, {pace:,.0f} a second; idle: {rest:,.0f} bytes a second"]
    for row in (row for row in rows if row["kind"] == "passes"):
        lines.append(f"{row['fit']}: the recording is read {row['read'] / row['recording']:.1f} times")
    return "\n".join(lines)


def main() -> None:
    """Measures, or prints what was measured."""
    parser = make_parser(__doc__, __file__, quick="the two smallest cases of each kind", table="print the tables")
    parser.add_argument("--worker", choices=("ddp", "fsdp"), help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        rows = training_rows(options.worker, options.cases)
        if os.environ["RANK"] == "0":
            options.out.write_text(json.dumps(rows))
        return
    if options.table:
        print(show(load(options)["rows"]))
        return
    enter_own_network()
    torch.set_num_threads(1)
    cases = 2 if options.quick else len(CASES)
    rows = [*passes(), *by_torchrun("ddp", cases), *by_torchrun("fsdp", cases), *dask_rows(cases)]
    save(options, rows=rows)
    print(show(rows))


if __name__ == "__main__":
    main()
