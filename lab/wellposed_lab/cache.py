"""One bounded cache for what several runs of a process share: data sets, trained networks, fits."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
SIZE = 64  # results; more than a suite shares


class Cache:
    """Caches the results that were used last, for one suite at a time.

    Args:
        size: how many results are cached.

    Example:
        >>> cache = Cache(size=1)
        >>> cache.get("a", lambda: 1), cache.get("a", lambda: 2)
        (1, 1)
        >>> cache.get("b", lambda: 3), cache.get("a", lambda: 4)
        (3, 4)
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.suite = size, ""
        self._results: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of a key, computed now unless it is cached."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                known: T = self._results[key]
                return known
        result = make()  # without the lock: it may ask for other results
        with self._lock:
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > self.size:
                self._results.popitem(last=False)
        return result

    def serve(self, suite: str) -> None:
        """Clears the cache unless the suite is the same as before."""
        if suite != self.suite:
            self.clear()
        self.suite = suite

    def clear(self) -> None:
        """Clears the cache."""
        with self._lock:
            self._results.clear()

    def __len__(self) -> int:
        return len(self._results)


CACHE = Cache()  # of this process; the runner clears it between suites


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """Caches the results of a function of hashable arguments for the process."""

    @functools.wraps(function)
    def lookup(*args: P.args, **kwargs: P.kwargs) -> T:
        key = (function.__module__, function.__qualname__, args, tuple(sorted(kwargs.items())))
        return CACHE.get(key, lambda: function(*args, **kwargs))

    return lookup
