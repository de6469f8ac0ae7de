"""Compiled functions that numba keeps on the disk where it finds a place for them."""

from collections.abc import Callable
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
