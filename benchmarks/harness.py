"""What all benchmarks share: timing, memory, the command line, tables and results.

The result of `benchmarks/a/b.py` is `benchmarks/results/a/b.json`: the command, the machine, and the numbers.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

os.environ.setdefault("WELLPOSED_COMPILE", "wait")  # benchmarks measure kernels, not the plain loop before them
DOCS = Path(__file__).parents[1] / "docs"
Run = Callable[[], object]


def one_thread() -> None:
    """Confines the process to one processor and every library in it to one thread; before JAX is imported."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def need_cuda() -> None:
    """Ends the program where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none here")


# CPU time. Runs that are compared take turns, so that all see the same machine.


def cpu_seconds(work: Callable[[], Any], rounds: int = 1) -> tuple[float, Any]:
    """Returns the best CPU time of some calls and the last result."""
    best, result = float("inf"), None
    for _ in range(rounds):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


def best_call(run: Run, budget: float = 0.1, most: int = 1000) -> float:
    """Returns the best CPU time of a call, of those that fit into `budget` seconds; the first does not count."""
    run()
    best, spent = float("inf"), 0.0
    for _ in range(most):
        last, _ = cpu_seconds(run)
        best, spent = min(best, last), spent + last
        if spent > budget:
            break
    return best


def _mean_seconds(run: Run, budget: float) -> float:
    start, count = time.process_time(), 0
    while time.process_time() - start < budget or count == 0:
        run()
        count += 1
    return (time.process_time() - start) / count


def round_times(
    runs: Mapping[str, Run], rounds: int = 5, budget: float = 0.15, slow: float = float("inf")
) -> dict[str, list[float]]:
    """Returns the mean CPU time of a call in every round, measured in turns.

    Args:
        runs: what is compared; each is called once before.
        rounds: of each run; those above `slow` seconds a call get two.
        budget: seconds of calls in a round.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name, run in runs.items():
            if turn < 2 or min(times[name]) <= slow:
                times[name].append(_mean_seconds(run, budget))
    return times


def best_times(
    runs: Mapping[str, Run], rounds: int = 5, budget: float = 0.15, slow: float = float("inf")
) -> dict[str, float]:
    """Returns the best of `round_times` for every run."""
    return {name: min(times) for name, times in round_times(runs, rounds, budget, slow).items()}


def device_times(
    runs: Mapping[str, Run], budget: float = 0.1, least: int = 3, most: int = 10_000, warm_up: int = 1
) -> dict[str, float]:
    """Returns the median seconds of a call that ends with a wait for the CUDA device, measured in turns.

    Launches and waits inside a call count. A run is called until its times add up to `budget` seconds, at least
    `least` and at most `most` times.
    """
    for run in runs.values():
        for _ in range(warm_up):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}

    def open_runs() -> list[str]:
        return [name for name, own in times.items() if len(own) < least or (sum(own) < budget and len(own) < most)]

    while names := open_runs():
        for name in names:
            torch.cuda.synchronize()
            start = time.perf_counter()
            runs[name]()
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) for name, own in times.items()}


# Memory: bytes of tensors, the same number at every run.


class _AllocationMeter(TorchDispatchMode):
    """Counts the bytes of storages that operations return until their last tensor is gone, and the most at once.

    Scratch memory inside an operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.sizes: dict[int, int] = {}  # by storage; zero for those that were there before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._watch(value, counted=False)
        result = function(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._watch(value, counted=True)
        return result

    def _watch(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes() if counted else 0
        self.alive += self.sizes[key]
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.alive -= self.sizes.pop(key)


def peak_bytes(work: Run, device: torch.device | str = "cpu") -> int:
    """Returns the most bytes of tensors alive at once during `work`, beyond what was there before.

    On CUDA the allocator counts them.

    Example:
        >>> import torch
        >>> peak_bytes(lambda: torch.ones(1000) + torch.ones(1000))  # two terms and the sum, four bytes each
        12000
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _AllocationMeter() as meter:
        work()
    return meter.peak


def relative_error(value: Tensor, wanted: Tensor) -> float:
    """Returns the largest error relative to the largest entry."""
    return float((value.double() - wanted).abs().max() / wanted.abs().max())


# The command line and the result.


def _described(doc: str | None, path: Path) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{path.parent.name}.{path.stem}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def make_parser(doc: str | None, file: str, *, quick: str = "", **stored: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that benchmarks share.

    Args:
        doc: docstring of the module.
        file: its `__file__`, from which follows where its result lies.
        quick: what --quick measures; without it there is no such option.
        stored: an option and what it makes of a stored result, like ``table="print the table"``.
    """
    path = Path(file).resolve()
    result = path.parents[1] / "results" / path.parent.name / f"{path.stem}.json"
    parser = _described(doc, path)
    parser.set_defaults(quick=False, result=result)
    shown = f"benchmarks/results/{path.parent.name}/{path.stem}.json"
    parser.add_argument("--out", "--output", type=Path, help=f"where the numbers are written (default: {shown})")
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}; writes nothing without --out")
    for name, does in stored.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"{does} from the numbers of an earlier run")
    return parser


def docs_folder(doc: str | None, file: str) -> Path:
    """Reads the command line of a module that draws figures: returns docs/, or what --out names in its place."""
    parser = _described(doc, Path(file))
    parser.add_argument("--out", type=Path, default=DOCS, help="folder to write to instead of docs/")
    folder: Path = parser.parse_args().out
    for name in ("concepts", "guides"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of packages that are installed."""
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    return {name: installed[name] for name in packages if name in installed}


def machine() -> dict[str, Any]:
    """Describes the machine: processor, threads, Python, torch and the CUDA device."""
    about = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    about |= {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        about |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return about


def save(options: argparse.Namespace, **numbers: Any) -> None:
    """Writes the command, the machine and the numbers; a quick run only where --out is given."""
    path = options.out or (None if options.quick else options.result)
    if path is None:
        return
    command = shlex.join(["python", "-m", str(sys.modules["__main__"].__spec__.name), *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, "machine": machine(), **numbers}, indent=1) + "\n")


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Reads a stored result: that of --out, else the committed one."""
    result: dict[str, Any] = json.loads((options.out or options.result).read_text())
    return result


# Tables.


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    safe = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(header), ["---"] * len(header), *safe])


def print_table(
    title: str,
    header: Sequence[str],
    lines: Iterable[Sequence[object]],
    width: int = 150,
    left: Sequence[str] = (),
) -> None:
    """Prints a table; columns are right-aligned but for those named in `left`."""
    table = Table(title=title, title_justify="left")
    for column in header:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(str, line))
    Console(width=width).print(table)
