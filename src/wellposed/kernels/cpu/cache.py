"""The cache of compiled functions that numba keeps on the disk.

`keeping` compiles with a cache where numba finds a place for one; `stamp` tells numba when that cache is out of
date.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wellposed.errors import require


def keeping(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns ``numba.njit`` with a cache on the disk; without one where no folder can be written to.

    numba keeps code beside its source or in the home folder, and refuses to compile if it may write to neither,
    as in a container with an installation that belongs to somebody else.
    """
    numba = require("numba", extra="fast")

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return numba.njit(**options)(function)

    return compiled


def stamp(*names: str) -> int:
    """Returns a number that changes with the files of the kernels.

    numba looks for changes only in the file of the function that it has cached, not in those of what it calls.

    Example:
        >>> stamp("spec") == stamp("spec"), stamp("spec") == stamp("cpu/solve")
        (True, False)
    """
    files = [Path(__file__).parents[1] / f"{name}.py" for name in names]
    texts = (f"{file.name} {file.stat().st_mtime_ns} {file.stat().st_size}" for file in files)
    return zlib.crc32("\n".join(texts).encode()) + 1
