"""Peak memory of a piece of work in bytes of tensors, the same number at every run.

On a CPU the meter counts storages: those that operations return are added, and taken off when the last
tensor that uses them is gone. Scratch memory inside an operation is not seen. On CUDA the allocator knows.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Meter(TorchDispatchMode):
    """Counts the bytes that operations allocate while it is active, and remembers the most alive at once."""

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


def peak_bytes(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Returns the most bytes of tensors alive at once during `work`, beyond what was there before.

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
    with _Meter() as meter:
        work()
    return meter.peak
