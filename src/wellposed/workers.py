"""Parallel work through joblib, and the number of threads of torch.

`Workers` do the work in threads, in processes or on a `cluster`, by ``joblib.parallel_config`` and
``joblib.Parallel``. What is added is what those leave out: processes end with the one that started them (those of
loky and multiprocessing outlive a killed parent until their task is done, which for a run may be hours), data that
all tasks share is sent once to a cluster, and a lost worker is one error whatever the backend calls it.
`one_thread` and `threads_for` decide how many threads torch takes for small products.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError
from dataclasses import dataclass
from typing import Any

from wellposed.errors import InputError, WorkerLostError, require, unknown_name

PAUSE = 1.0  # seconds between two checks that the parent is alive
BACKENDS = ("sequential", "threading", "loky", "multiprocessing", "dask", "ray")
CLUSTERS = ("dask", "ray")
SMALL = 2000  # numbers in the widest layer up to which the products of a model are small
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
AT_ONCE = ("ray", "multiprocessing")  # joblib gets nothing from them before everything is done


@dataclass(frozen=True)
class Workers:
    """How tasks run: one after the other, in threads, in processes or on a cluster.

    Dask gives the work of a lost worker to another one. With the others a lost worker ends the call with a
    `WorkerLostError`; what is on the disk need not be done again. Processes on this machine end with the one
    that started them, however that ended.

    Args:
        jobs: how many workers; a cluster of Dask takes all it has, and Ray's does if this is 1.
        backend: joblib's name of their kind.
        extra: what brings joblib, for the error without it.

    Example:
        >>> sorted(Workers(2, "threading").run(lambda common, k: common + k, [(1,), (2,)], common=10))
        [11, 12]
    """

    jobs: int = 1
    backend: str = "threading"
    extra: str = "convex"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise unknown_name("backend", self.backend, BACKENDS)
        if self.jobs == 0:
            raise InputError("jobs must not be zero; give a number of workers, or -1 for all there are")

    @property
    def alone(self) -> bool:
        """Whether tasks run in this process, one after the other."""
        return self.backend not in CLUSTERS and (self.jobs == 1 or self.backend == "sequential")

    @property
    def apart(self) -> bool:
        """Whether workers have memory of their own."""
        return not self.alone and self.backend != "threading"

    def run(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], common: Any = None
    ) -> Iterator[Any]:
        """Yields ``function(common, *task)`` as tasks finish; `common` is sent once to every worker.

        Ray and multiprocessing answer when everything is done, in the order of the tasks.
        """
        if self.alone or not tasks:
            yield from (function(common, *task) for task in tasks)
            return
        joblib = require("joblib", extra=self.extra)
        call, common = self._prepare(function, common)
        count = -1 if self.backend in CLUSTERS and self.jobs == 1 else self.jobs
        try:
            with joblib.parallel_config(self.backend, n_jobs=count, **self._options(common)):
                parallel = joblib.Parallel(return_as="list" if self.backend in AT_ONCE else "generator_unordered")
            yield from parallel(joblib.delayed(call)(common, *task) for task in tasks)
        except self._losses() as error:
            raise WorkerLostError(
                f"a {self.backend} worker was lost ({type(error).__name__}: {error}); run it again: what is "
                "on the disk is not done twice"
            ) from error

    def _options(self, common: Any) -> dict[str, Any]:
        if self.backend != "dask":
            return {}
        try:
            require("distributed").get_client()
        except ValueError as error:
            raise InputError(
                "backend='dask' needs a client of a running cluster: Client('tcp://scheduler:8786') of "
                "dask.distributed, or Client() for workers on this machine"
            ) from error
        # Without a copy on every worker the data would be lost with the one that has it.
        return {} if common is None else {"scatter": [common]}

    def _prepare(self, function: Callable[..., Any], common: Any) -> tuple[Callable[..., Any], Any]:
        """Puts the common data into Ray's store; makes processes end with their parent."""
        if self.backend in ("loky", "multiprocessing"):
            return functools.partial(_call_below_parent, function, os.getpid()), common
        if self.backend != "ray":
            return function, common
        require("ray.util.joblib").register_ray()
        ray = require("ray")
        if not ray.is_initialized():
            ray.init(logging_level="error", log_to_driver=False)
        return functools.partial(_call_on_ray, function), ray.put(common)

    def _losses(self) -> tuple[type[BaseException], ...]:
        if self.backend == "dask":
            dask = require("distributed")
            return dask.scheduler.KilledWorker, CancelledError
        if self.backend == "ray":
            ray = require("ray.exceptions")
            return ray.RayActorError, ray.WorkerCrashedError, ray.NodeDiedError, ray.ObjectLostError
        return (BrokenExecutor,)


def _call_on_ray(function: Callable[..., Any], common: Any, *task: Any) -> Any:
    """Calls a function with common data from Ray's object store."""
    return function(require("ray").get(common), *task)


def _call_below_parent(function: Callable[..., Any], parent: int, common: Any, *task: Any) -> Any:
    """Calls a function in a process that exits when its parent is gone."""
    _watch_parent(parent)
    return function(common, *task)


@functools.cache
def _watch_parent(parent: int) -> None:
    """Starts a thread that watches the parent, once in every process."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PAUSE)
        os._exit(1)

    if os.getppid() == parent:
        threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def cluster(backend: str, address: str | None = None) -> Iterator[None]:
    """Connects to a cluster, or starts one on this machine, during the block; other backends need none.

    Args:
        backend: as in `Workers`.
        address: of Dask's scheduler (``tcp://host:8786``) or of Ray's head (``host:6379`` or ``auto``).

    Example:
        >>> with cluster("threading"):
        ...     list(Workers(2).run(lambda common, k: k, [(1,)]))
        [1]
    """
    if address is not None and backend not in CLUSTERS:
        raise InputError(f"an address goes with the backends {', '.join(CLUSTERS)}; received {backend!r}")
    if backend == "dask":
        own = {} if address is not None else {"threads_per_worker": 1}
        with require("distributed").Client(address, **own):
            yield
    elif backend == "ray":
        ray = require("ray")
        ray.init(address, logging_level="error", log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()
    else:
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keeps tiny matrix products from waiting for other threads, which costs more than it saves."""
    import torch  # only here: commands that start without it import this module

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_for(width: int) -> contextlib.AbstractContextManager[None]:
    """Runs the products of a small model in one thread, unless the user has said how many there are.

    A product of small matrices is over before a second thread has begun, and where that thread has to wait for
    another program's turn, every product waits with it. Up to `SMALL` numbers in the widest layer there is one
    thread; above, and wherever OMP_NUM_THREADS or MKL_NUM_THREADS is set, torch keeps its own number.

    Args:
        width: of the widest layer, states and inputs included.

    Example:
        >>> with threads_for(100):
        ...     pass
    """
    asked = any(os.environ.get(name) for name in THREAD_VARIABLES)
    return contextlib.nullcontext() if asked or width > SMALL else one_thread()
