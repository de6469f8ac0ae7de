"""The options of an evaluation, and what happens when it leaves the range of its numbers."""

import warnings
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.fixed_point import make_method
from wellposed.equilibrium.method import check_policy
from wellposed.errors import ConvergenceError, ConvergenceWarning, InputError, unknown_name

OPTIONS = ("solver", "stop", "max_steps", "gradient", "on_failure", "generator", "x0")


def check_options(options: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raises where an option is unknown or does not fit, also if there is no loop that it could reach.

    Args:
        options: those of `fixed_point` and the start x0.
        shape: the numbers of samples and states.

    Example:
        >>> check_options({"slover": "picard"}, (1, 1), torch.float32)
        Traceback (most recent call last):
            ...
        wellposed.errors.UnknownNameError: unknown option 'slover'; ...
    """
    for name in options:
        if name not in OPTIONS:
            raise unknown_name("option", name, OPTIONS)
    start = options.get("x0")
    if start is not None and (tuple(start.shape) != shape or start.dtype != dtype):
        raise InputError(
            f"x0 must have the shape {shape} and be {dtype}; received {tuple(start.shape)}, {start.dtype}"
        )
    solver, stop, max_steps = (options.get(name) for name in ("solver", "stop", "max_steps"))
    make_method(solver, stop, max_steps, options.get("on_failure", "warn"))


def report_overflow(values: Tensor, on_failure: str) -> None:
    """Warns or raises if some samples hold NaN or infinity.

    Example:
        >>> report_overflow(torch.full((2, 1), torch.inf), "raise")
        Traceback (most recent call last):
            ...
        wellposed.errors.ConvergenceError: 2 of 2 samples left the range of torch.float32; ...
    """
    check_policy(on_failure)
    lost = ~values.isfinite().all(1)
    if on_failure == "ignore" or not bool(lost.any()):
        return
    message = (
        f"{int(lost.sum())} of {len(lost)} samples left the range of {values.dtype}; "
        "rescale the form, shrink its inputs or convert both to float64"
    )
    if on_failure == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=4)
