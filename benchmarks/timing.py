"""Timing that is fair to all: in turns, the best of each, CPU time of this one-thread process."""

import os
import time
from collections.abc import Callable

import torch


def one_thread() -> None:
    """Confines the process to one processor and every library in it to one thread; before JAX is imported."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def _seconds(run: Callable[[], object], budget: float) -> float:
    start, count = time.process_time(), 0
    while time.process_time() - start < budget or count == 0:
        run()
        count += 1
    return (time.process_time() - start) / count


def best_times(runs: dict[str, Callable[[], object]], rounds: int = 5, budget: float = 0.15) -> dict[str, float]:
    """Returns the best mean time of every run in seconds, measured in turns."""
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            best[name] = min(best[name], _seconds(run, budget))
    return best
