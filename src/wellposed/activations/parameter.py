"""Checks of the parameters of activation maps."""

import math
from typing import Any, SupportsFloat, SupportsIndex

from wellposed.errors import InputError


def real(what: str, value: SupportsFloat, least: float = -math.inf, *, above: bool = False) -> float:
    """Returns a parameter as a finite float of at least (or strictly above) a bound.

    Example:
        >>> real("alpha of elu", -1, 0.0)
        Traceback (most recent call last):
            ...
        wellposed.errors.InputError: alpha of elu must be a finite number >= 0; received -1
    """
    found = _converted(float, value)
    if found is None or not math.isfinite(found) or found < least or (above and found == least):
        bound = "" if least == -math.inf else f" {'>' if above else '>='} {least:g}"
        raise InputError(f"{what} must be a finite number{bound}; received {value!r}")
    return float(found)


def whole(what: str, value: SupportsIndex) -> int:
    """Returns a parameter as a whole number of at least one.

    Example:
        >>> whole("size of max_pool", 2.5)
        Traceback (most recent call last):
            ...
        wellposed.errors.InputError: size of max_pool must be a whole number, at least one; received 2.5
    """
    found = _converted(lambda number: number.__index__(), value)
    if found is None or isinstance(value, bool) or found < 1:
        raise InputError(f"{what} must be a whole number, at least one; received {value!r}")
    return int(found)


def _converted(kind: Any, value: Any) -> Any:
    try:
        return None if isinstance(value, str) else kind(value)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
