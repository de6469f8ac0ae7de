"""Compiles kernels in another process while the plain loop answers.

Compiling a model's kernels takes some twenty seconds, once: numba keeps the result on the disk. Until it is there,
`compiling` has the engine of numba step back, so that the first answers come from the plain loop, and a process
that does nothing else fills numba's cache. A solve is never interrupted: later ones take the kernels. Answers of
the two agree to the tolerance, not to the last digit; who needs the same digits from the first call on sets
``WELLPOSED_COMPILE=wait``, asks for ``executor="numba"`` or calls ``torch.use_deterministic_algorithms(True)``,
and waits. So does everything where no process can be started or numba has no folder for its cache.

A marker file beside the compiled code says that a family of kernels is there. The process holds a lock on it, so
that of many processes that need the same kernels one compiles them, and it ends with the process that started it.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch

from wellposed.kernels.cpu.cache import source_key

MODEL, SEQUENCE = "model", "sequence"  # families of kernels
BUSY = 75  # exit code: another process is compiling these kernels
PAUSE = 5.0  # seconds until the next look after that
CHILD = "from wellposed.kernels.cpu.background import compile_family; compile_family({!r}, {!r}, {!r})"

Family = tuple[str, str, int]  # name, dtype, memory of Anderson's method
_ready: set[Family] = set()
_jobs: dict[Family, tuple[int, "subprocess.Popen[bytes] | None", float]] = {}  # process, job, when to look again
_lock = threading.Lock()


def compiling(name: str, dtype: torch.dtype, memories: Iterable[int]) -> str:
    """Says that kernels are being compiled in another process; empty once they can be used.

    Args:
        name: `MODEL` or `SEQUENCE`.
        dtype: of the states.
        memories: of the solvers, forward and backward.
    """
    families = {(name, str(dtype).removeprefix("torch."), memory) for memory in memories}
    if families <= _ready:
        return ""
    with _lock:
        waiting = [family for family in sorted(families - _ready) if not _can_be_used(family)]
    if not waiting:
        return ""
    return "its kernels are being compiled in another process; WELLPOSED_COMPILE=wait waits for them"


def is_compiling() -> bool:
    """Tells whether some kernels were not there when last looked for, so that engines may change."""
    return not _ready >= _jobs.keys()


def _can_be_used(family: Family) -> bool:
    """Looks whether kernels are on the disk, and has them compiled if not."""
    if _waits() or (marker := _marker(family)) is None or marker.exists() or not _keep_compiling(family):
        _ready.add(family)
        return True
    return False


def _waits() -> bool:
    asked = os.environ.get("WELLPOSED_COMPILE", "background")
    return asked == "wait" or torch.are_deterministic_algorithms_enabled()


@functools.cache
def _marker(family: Family) -> Path | None:
    """Returns the file that says that kernels are compiled; None where numba keeps nothing on the disk."""
    cache: Any = import_module("wellposed.kernels.cpu.solve").solve._cache
    registry: Any = import_module("numba.core.registry")
    if cache.cache_path is None:
        return None
    try:
        cache._impl.locator.ensure_cache_path()
    except OSError:
        return None
    folder, machine = Path(cache.cache_path), registry.cpu_target.target_context.codegen().magic_tuple()
    known = repr((family, source_key(), import_module("numba").__version__, machine))
    return folder / f"wellposed-{hashlib.sha256(known.encode()).hexdigest()[:16]}.ready"


def _keep_compiling(family: Family) -> bool:
    """Starts a process unless one is running; tells whether it is worth waiting for."""
    owner, job, later = _jobs.get(family, (0, None, 0.0))
    if owner == os.getpid() and job is not None:
        code = job.poll()
        if code not in (None, BUSY):
            return False  # it has failed: compile here, where errors are seen
        later = later if code is None else time.monotonic() + PAUSE
        _jobs[family] = owner, None if code == BUSY else job, later
        return True
    if owner == os.getpid() and time.monotonic() < later:
        return True
    try:
        job = _start(family)
    except OSError:
        return False
    _jobs[family] = os.getpid(), job, 0.0
    return True


def _start(family: Family) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "WELLPOSED_COMPILE": "wait",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if not sys.executable:
        raise OSError("no interpreter is known")
    quiet, command = subprocess.DEVNULL, [sys.executable, "-c", CHILD.format(*family)]
    job = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    atexit.register(_end, job, os.getpid())
    return job


def _end(job: "subprocess.Popen[bytes]", owner: int) -> None:
    if owner == os.getpid() and job.poll() is None:
        job.terminate()
        job.wait()


# In the other process.


def compile_family(name: str, dtype: str, memory: int) -> None:
    """Compiles a family of kernels into numba's cache and leaves its marker."""
    threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(10)
    marker = _marker((name, dtype, memory))
    if marker is None:
        raise SystemExit(1)
    with _held(marker.with_suffix(".lock")) as alone:
        if not alone:
            raise SystemExit(BUSY)
        if not marker.exists():
            _use_kernels(name, getattr(torch, dtype), memory)
            marker.touch()


def _end_with_parent(stream: IO[bytes]) -> None:
    """Ends this process when its parent has gone and can no longer hold its end of the pipe."""
    stream.read()
    os._exit(1)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Locks a file; tells whether nobody else has."""
    with path.open("w") as file:
        try:
            lock: Any = import_module("fcntl")
            lock.flock(file, lock.LOCK_EX | lock.LOCK_NB)
        except ImportError:
            pass  # no such locks: kernels may be compiled twice
        except OSError:
            yield False
            return
        yield True


def _use_kernels(name: str, dtype: torch.dtype, memory: int) -> None:
    """Solves small equations for which all kernels of a family are compiled."""
    from wellposed import Anderson, Implicit, ImplicitModel, ImplicitRNN

    solver = Anderson(memory=memory)
    options: dict[str, Any] = {"solver": solver, "gradient": Implicit(solver=solver), "executor": "numba"}
    if name == SEQUENCE:
        rnn = ImplicitRNN(2, 2, 3, **options).to(dtype)
        rnn(torch.randn(3, 2, 2, dtype=dtype))[0].sum().backward()
        return
    model = ImplicitModel(2, 2, 3, **options).to(dtype)
    u = torch.randn(5, 2, dtype=dtype, requires_grad=True)
    model(u).sum().backward()
    states: Any = model.equilibrium(u).value
    states.sum().backward()
