"""The cache of compiled functions that numba keeps on disk.

`njit_cached` compiles with a cache where numba finds a folder for one; `source_key` tells numba when that cache is
out of date.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wellposed.equilibrium import loop
from wellposed.equilibrium.solution import Status
from wellposed.errors import require


def njit_cached(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns ``numba.njit`` with a cache on the disk; without one where no folder can be written to.

    numba keeps code beside its source or in the home folder, and refuses to compile if it may write to neither,
    as in a container with an installation that belongs to somebody else.
    """
    numba = require("numba", extra="fast")

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return _reading_what_it_can(numba.njit(cache=True, **options)(function))
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return numba.njit(**options)(function)

    return compiled


def _reading_what_it_can(dispatcher: Any) -> Any:
    """Has a compiled function take files of its cache that cannot be read for missing ones.

    An installation that was upgraded may have an index that names classes which have moved since, and numba
    unpickles it before it looks whether it is out of date. A damaged file is no better.
    """
    file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)  # numba's, if it runs the compiler
    if file is not None:
        file._load_index = _otherwise(file._load_index, dict)
        file._load_data = _otherwise(file._load_data, lambda: None)
    return dispatcher


def _otherwise(read: Callable[..., Any], nothing: Callable[[], Any]) -> Callable[..., Any]:
    def attempt(*arguments: Any) -> Any:
        try:
            return read(*arguments)
        except Exception:  # whatever unpickling leads to
            return nothing()

    return attempt


def source_key() -> int:
    """Returns a number that changes with all that is compiled in: the files of the kernels and shared constants.

    numba checks only the file of the cached function for changes, not those of what it calls, and compiles
    constants of other modules in.
    """
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parent / "spec.py"]
    texts = [f"{file.name} {file.stat().st_mtime_ns} {file.stat().st_size}" for file in files]
    constants = loop.PERIOD, loop.PATIENCE, [(status.name, int(status)) for status in Status]
    return zlib.crc32("\n".join([*texts, repr(constants)]).encode()) + 1
