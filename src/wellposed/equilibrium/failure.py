"""What happens when samples do not reach an equilibrium."""

import sys
import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.solution import Status, failed
from wellposed.errors import ConvergenceError, ConvergenceWarning, unknown_name

OnFailure = Literal["warn", "raise", "ignore"]


def check_policy(on_failure: str) -> None:
    """Raises unless `on_failure` is one of the three policies."""
    if on_failure not in get_args(OnFailure):
        raise unknown_name("on_failure", on_failure, get_args(OnFailure))


class Once:
    """Lets the solves of one sequence report their first failure only."""

    done = False


def report(
    found: Iterates, on_failure: OnFailure, *, solve: str, max_steps: int, once: Once | None = None
) -> None:
    """Warns or raises once for a whole solve.

    Args:
        found: the samples and how they ended.
        on_failure: the policy.
        solve: what was solved, for the message.
        max_steps: the limit the solve ran under.
        once: shared by solves of which only the first to fail reports.
    """
    if on_failure == "ignore" or (once is not None and once.done):
        return
    if found.worst < Status.MAX_STEPS or not bool((found.status >= Status.MAX_STEPS).any()):
        return
    if once is not None:
        once.done = True
    status, wrong = found.status, failed(found.status)
    worst = found.last_residual[wrong].nan_to_num(torch.inf).max()
    message = (
        f"{solve}: {int(wrong.sum())} of {status.numel()} samples did not reach an equilibrium "
        f"({_kinds(status)}); worst residual {float(worst):.1e}. "
        f"Raise max_steps (now {max_steps}) or loosen stop; Solution.status tells which samples"
    )
    if on_failure == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """Counts the frames up to the first one outside the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("wellposed.", "torch.")):
        frame, level = frame.f_back, level + 1
    return level


def _kinds(status: Tensor) -> str:
    counts = torch.bincount(status.flatten().long(), minlength=len(Status))
    return "; ".join(f"{int(counts[s])}: {s.text}" for s in Status if s.failed and counts[s])
