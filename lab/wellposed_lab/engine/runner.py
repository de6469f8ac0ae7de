"""Plans, skips what is finished, runs and records.

`environment` says where a run was executed. An `Order` is what a user asked for, `planned` its runs, and
`run_suite` does those that are not finished yet.
"""

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from wellposed.atomic import atomic_write
from wellposed.errors import FileFormatError, InputError, WellposedError
from wellposed.workers import CLUSTERS, Workers, one_thread
from wellposed_lab.cache import CACHE
from wellposed_lab.config import SCALES, Scale
from wellposed_lab.engine.experiment import Suite
from wellposed_lab.engine.run import Context, Group, Run, device_kind, grouped
from wellposed_lab.engine.search import chosen, search_runs
from wellposed_lab.engine.store import Record, Result, Store

PACKAGES = ("torch", "numpy", "numba")


def environment(device: str) -> dict[str, Any]:
    """Returns versions, commit, device and threads."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "wellposed": sys.modules["wellposed"].__version__,
        **{package: _version(package) for package in PACKAGES},
        "commit": commit(),
        "device": _device(device),
        "threads": torch.get_num_threads(),
    }


def now() -> str:
    """Returns the time in UTC to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{os.cpu_count()} CPU cores"


@functools.cache
def commit() -> str | None:
    """Returns the commit of a checkout, with + if files have changed since; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


PLANS, CHECKPOINTS = "plans", "checkpoints"


@dataclass(frozen=True)
class Order:
    """What a user asked for; saved in the results folder so that it can be resumed.

    Args:
        suite: its name.
        scale: "tiny", "default" or "paper".
        seeds: how many; None for what the suite says.
        search: whether to search settings by cross-validation first.
        device: of the tensors.
        only: the tasks or models wanted, as shell patterns; ``"task/model"`` asks for both. All if empty.
    """

    suite: str
    scale: Scale = "default"
    seeds: int | None = None
    search: bool = False
    device: str = "cpu"
    only: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that gives the same order."""
        words = ["wellposed", "run", self.suite]
        words += [] if self.scale == "default" else ["--scale", self.scale]
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        words += ["--search"] if self.search else []
        words += [word for pattern in self.only for word in ("--only", shlex.quote(pattern))]
        return " ".join(words + ([] if self.device == "cpu" else ["--device", self.device]))

    def runs(self, suite: Suite) -> list[Run]:
        """Returns the runs of a suite that are wanted, or says which tasks and models there are."""
        runs = suite.runs(self.scale, self.seeds)
        unmatched = [pattern for pattern in self.only if not any(_matches(run, pattern) for run in runs)]
        if unmatched:
            tasks, models = (sorted({str(run.labels[k]) for run in runs}) for k in (0, 1))
            raise InputError(
                f"no run of suite {self.suite!r} at scale {self.scale!r} is of a task or model {unmatched[0]!r}; "
                f"its tasks are {', '.join(map(repr, tasks))}, its models {', '.join(map(repr, models))}"
            )
        return [run for run in runs if not self.only or any(_matches(run, pattern) for pattern in self.only)]

    def save(self, out: Path) -> None:
        """Writes the order to the results folder."""
        suffix = f"-{_checksum({'only': self.only})}" if self.only else ""
        path = out / PLANS / f"{self.suite}-{self.scale}{suffix}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            fields = {**asdict(self), "sha256": _checksum(asdict(self))}
            temporary.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _matches(run: Run, pattern: str) -> bool:
    task, model, _ = run.labels
    return any(fnmatchcase(name, pattern) for name in (task, model, f"{task}/{model}"))


def orders(out: Path) -> list[Order]:
    """Reads the orders of a results folder."""
    read = []
    for path in sorted((out / PLANS).glob("*.json")):
        try:
            fields = dict(json.loads(path.read_text(encoding="utf-8")))
            checksum = fields.pop("sha256", None)  # older ones, and those written by hand, have none
            if checksum not in (None, _checksum(fields)):
                raise ValueError("its checksum does not match")
            order = Order(**fields | {"only": tuple(fields.get("only", ()))})
            _check_order(order)
            read.append(order)
        except (TypeError, ValueError, RecursionError) as error:
            raise FileFormatError(f"{path} is not an order of ours ({error}); delete it") from error
    return read


def _checksum(fields: dict[str, Any]) -> str:
    """Returns a checksum by which a damaged order is noticed."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _check_order(order: Order) -> None:
    """Raises a ValueError if a file says something that no command line could have said."""
    seeds = order.seeds is None or (type(order.seeds) is int and order.seeds > 0)
    texts = isinstance(order.suite, str) and isinstance(order.device, str) and order.scale in SCALES
    texts = texts and all(isinstance(pattern, str) for pattern in order.only)
    if not (seeds and texts and isinstance(order.search, bool)):
        raise ValueError(f"it says {order}")


@dataclass(frozen=True)
class Progress:
    """How far an order is."""

    order: Order
    planned: int
    finished: int
    failed: int
    begun: int  # groups with a checkpoint

    @property
    def after_interruption(self) -> str:
        """What an interruption leaves, in words."""
        return "finished runs are kept" + (" and the current one up to its last epoch" if self.begun else "")


def planned(suite: Suite, order: Order, store: Store) -> list[Run]:
    """Returns the runs of an order that are known now: after a search, with the settings it chose."""
    runs = order.runs(suite)
    if not order.search:
        return runs
    records = store.finished()
    folds = search_runs(suite, runs)
    if any(run.id not in records for run in folds):
        return [*folds, *runs]
    return [*folds, *(chosen(suite, run, records) for run in runs)]


def progress_of(suite: Suite, order: Order, out: Path) -> Progress:
    """Counts the runs of an order."""
    store = Store(out)
    records = {record.id: record for record in store.records()}
    runs = planned(suite, order, store)
    known = [records[run.id] for run in runs if run.id in records]
    left = [run for run in runs if run.id not in records]
    context = Context(out / CHECKPOINTS)
    files = [context.checkpoint(group.runs) for group in grouped(left)]
    begun = sum(file is not None and file.path.exists() for file in files)
    failed = sum(record.error is not None for record in known)
    return Progress(order, len(runs), len(known) - failed, failed, begun)


def run_suite(
    suite: Suite,
    order: Order,
    out: Path,
    *,
    jobs: int = 1,
    backend: str = "loky",
    tell: Callable[[str], None] = lambda text: None,
    progress: bool = False,
) -> Progress:
    """Runs what is not finished yet and records it; may be called again after any interruption.

    Args:
        suite, order: what to run.
        out: the results folder.
        jobs, backend: workers, and joblib's name for their kind; those of a cluster ("dask", "ray") must see the
            results folder under the same name.
        tell: called with every line of the progress report.
        progress: whether to show bars.
    """
    if jobs < 1:
        raise InputError(f"jobs must be at least 1; received {jobs}")
    require_device(suite, order)
    workers = Workers(jobs, backend, extra="lab")
    order.save(out)
    store, context = Store(out.absolute()), Context(out.absolute() / CHECKPOINTS, order.device)
    context = replace(context, progress=progress and workers.alone)
    if order.scale == "paper" and suite.differs:
        tell(f"{suite.name}: the scale paper is not quite as published: {suite.differs}")
    for kind in ("search", "run") if order.search else ("run",):
        finished = store.finished()
        runs = [run for run in planned(suite, order, store) if run.kind == kind]
        left = grouped([run for run in runs if run.id not in finished])
        tell(
            f"{suite.name}: {len(runs)} {kind} runs, {len(runs) - sum(len(g.runs) for g in left)} finished before"
        )
        _execute_all(left, context, store, workers, tell)
    return progress_of(suite, order, out)


def require_device(suite: Suite, order: Order) -> None:
    """Raises an error if no run of an order can use its device; if some can, the others run on the CPU."""
    devices = tuple(sorted({kind for run in order.runs(suite) for kind in run.devices}))
    if device_kind(order.device) not in devices:
        raise InputError(
            f"no run of suite {suite.name!r} at scale {order.scale!r} can use the device {order.device!r}, only "
            f"{' or '.join(devices)}; use: {replace(order, device='cpu').command}"
        )


def _execute_all(
    groups: Sequence[Group], context: Context, store: Store, workers: Workers, tell: Callable[[str], None]
) -> None:
    total = len(groups)
    if workers.alone or (total < 2 and workers.backend not in CLUSTERS):
        for index, group in enumerate(groups, start=1):
            tell(f"[{index}/{total}] {group.label}")
            tell(_execute(group, context, store))
        return
    tasks = [(group, context, store, os.getpid()) for group in groups]
    for index, done in enumerate(workers.run(_execute_in_worker, tasks), start=1):
        tell(f"[{index}/{total}] {done}")


def _execute_in_worker(common: None, group: Group, context: Context, store: Store, parent: int) -> str:
    """Executes a group in a worker, which leaves Ctrl-C to its parent; a lost worker's group may come again."""
    if os.getpid() != parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    finished = store.finished()
    if all(run.id in finished for run in group.runs):
        return f"{group.label}: finished before its worker was lost"
    return _execute(group, context, store)


def _execute(group: Group, context: Context, store: Store) -> str:
    """Executes a group and records it; one that fails is repeated seed by seed."""
    began, started = time.perf_counter(), now()
    wanted, device = context.device, group.runs[0].device_for(context.device)
    context = replace(context, device=device)
    CACHE.serve(group.runs[0].suite)
    os.environ.setdefault("WELLPOSED_COMPILE", "wait")  # a record must not depend on when kernels are compiled
    try:
        with one_thread():
            results: list[Result | str] = list(group.runs[0].execute(group.runs, context))
    except WellposedError as error:
        if isinstance(error, FileFormatError):
            raise
        results = _one_by_one(group, context) if len(group.runs) > 1 else [f"{type(error).__name__}: {error}"]
    seconds = (time.perf_counter() - began) / len(group.runs)
    where = environment(context.device)
    store.append(
        *(_record(run, result, where, started, seconds) for run, result in zip(group.runs, results, strict=True))
    )
    file = context.checkpoint(group.runs)
    if file is not None:
        file.remove()
    failures = [result for result in results if isinstance(result, str)]
    ending = f"; {len(failures)} failed: {failures[0]}" if failures else ""
    elsewhere = f" on {device}, for it cannot use {wanted}" if device != wanted else ""
    return f"{group.label}: {seconds * len(group.runs):.1f} s{elsewhere}{ending}"


def _one_by_one(group: Group, context: Context) -> list[Result | str]:
    results: list[Result | str] = []
    for run in group.runs:
        try:
            with one_thread():
                results += run.execute((run,), context)
        except WellposedError as error:
            results.append(f"{type(error).__name__}: {error}")
        finally:
            file = context.checkpoint((run,))
            if file is not None:
                file.remove()
    return results


def _record(run: Run, result: Result | str, where: dict, started: str, seconds: float) -> Record:
    task, model, size = run.labels
    failed = isinstance(result, str)
    done = Result(()) if isinstance(result, str) else result
    return Record(
        id=run.id,
        suite=run.suite,
        scale=run.scale,
        task=task,
        model=model,
        size=size,
        seed=run.seed,
        role=run.role,
        kind=run.kind,
        config=run.config,
        values=done.values,
        series=done.series,
        facts=done.facts,
        environment=where,
        started=started,
        seconds=round(seconds, 3),
        error=str(result) if failed else None,
    )
