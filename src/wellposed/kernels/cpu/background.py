"""Compiles kernels in another process while the plain loop answers.

Compiling a model's kernels takes some twenty seconds, once: numba keeps the result on the disk. Until it is there,
`compiling` has the engine of numba step back, so that the first answers come from the plain loop, and a process
that does nothing else fills numba's cache. A solve is never interrupted: later ones take the kernels. Answers of
the two agree to the tolerance, not to the last digit; who needs the same digits from the first call on sets
``WELLPOSED_COMPILE=wait``, asks for ``executor="numba"`` or calls ``torch.use_deterministic_algorithms(True)``,
and waits. So does everything where no process can be started or numba has no folder for its cache.

A marker file beside the compiled code says that a family of kernels is there. The other process is in
`kernels.compile_family`: of many that are to compile the same kernels one does, and each ends with its parent.
"""

import atexit
import functools
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from wellposed.errors import require
from wellposed.kernels.cpu.cache import source_key

MODEL, SEQUENCE = "model", "sequence"  # families of kernels
BUSY = 75  # exit code: another process is compiling these kernels
PAUSE = 5.0  # seconds until the next look after that
CHILD = "from wellposed.kernels.compile_family import compile_family; compile_family({!r}, {!r}, {!r})"

Family = tuple[str, str, int]  # name, dtype, memory of Anderson's method
_ready: set[Family] = set()
_jobs: dict[Family, tuple[int, "subprocess.Popen[bytes] | None", float]] = {}  # process, job, when to look again
_lock = threading.Lock()


def compiling(name: str, dtype: torch.dtype, memories: Iterable[int]) -> str:
    """Says that kernels are being compiled in another process; empty once they can be used.

    Args:
        name: `MODEL`, `SEQUENCE`, or a module that has kernels of its own and a function `use_kernels`.
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
    asked = os.environ.get("WELLPOSED_COMPILE", "background")
    waits = asked == "wait" or torch.are_deterministic_algorithms_enabled()
    if waits or (marker := marker_of(family)) is None or marker.exists() or not _keep_compiling(family):
        _ready.add(family)
        return True
    return False


@functools.cache
def marker_of(family: Family) -> Path | None:
    """Returns the file that says that kernels are compiled; None where numba keeps nothing on the disk."""
    cache: Any = require("wellposed.kernels.cpu.solve", extra="fast").solve._cache
    registry: Any = require("numba.core.registry", extra="fast")
    if cache.cache_path is None:
        return None
    try:
        cache._impl.locator.ensure_cache_path()
    except OSError:
        return None
    folder, machine = Path(cache.cache_path), registry.cpu_target.target_context.codegen().magic_tuple()
    known = repr((family, source_key(), require("numba", extra="fast").__version__, machine))
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
