"""What is wrong with recorded states, and what a reader of a fit should know about them."""

import math
from typing import Literal

import torch
from torch import Tensor

from wellposed.convex.matching import Matching
from wellposed.convex.states import States
from wellposed.errors import InputError

PIECE = 4096  # samples that are looked at together


def checked(
    states: States,
    kappa: float,
    rescale: bool | Literal["undo"],
    refit_output: bool | Literal["sparse"],
    target_sparsity: float | None,
) -> float:
    """Raises on input that cannot be fitted; returns the largest Lipschitz constant of the activations."""
    if not (isinstance(kappa, int | float) and 0 < kappa < 1):
        raise InputError(
            f"kappa must lie strictly between 0 and 1 (x = phi(x + b) may have no solution); received {kappa!r}"
        )
    if rescale not in (True, False, "undo"):
        raise InputError(f"rescale is True, False or 'undo'; received {rescale!r}")
    if refit_output not in (True, False, "sparse"):
        raise InputError(f"refit_output is True, False or 'sparse'; received {refit_output!r}")
    if target_sparsity is not None and not 0 <= target_sparsity < 1:
        raise InputError(f"target_sparsity is a fraction from 0 to below 1; received {target_sparsity!r}")
    check_data(states)
    return lipschitz_constant(states)


def check_data(states: States) -> None:
    """Raises if there is nothing to fit or if some of it is not a number."""
    if states.samples == 0 or states.X.shape[1] == 0:
        raise InputError(f"there are no states to fit: X is {tuple(states.X.shape)}; record some samples first")
    for name in ("U", "Z", "X", "Y"):
        part = getattr(states, name)
        if not part.is_floating_point():
            raise InputError(f"{name} is {part.dtype}; states must be floating-point numbers")
        bad = torch.nonzero(~torch.cat([piece.isfinite().all(1) for piece in part.split(PIECE)]))[:, 0]
        if len(bad):
            raise InputError(
                f"{name} has NaN or infinity in {len(bad)} of {states.samples} samples, the first is sample "
                f"{int(bad[0])}; drop them with states.subset(...) or repair the network"
            )
    same = all(bool((part[:1] == piece).all()) for part in (states.X, states.Z) for piece in part.split(PIECE))
    if states.samples > 1 and same:
        raise InputError(
            f"all {states.samples} samples have the same states, so no weight can be told from a bias; record "
            "samples that differ"
        )


def lipschitz_constant(states: States) -> float:
    """Returns the largest Lipschitz constant of the activations, or raises if there is none."""
    largest = 0.0
    for phi in states.activations:
        constant = phi.constants.get("inf", math.inf)
        if not math.isfinite(constant):
            raise InputError(
                f"the activation {phi.name!r} has no Lipschitz constant in the inf-norm, so no cap makes the "
                "model well-posed; use another activation"
            )
        largest = max(largest, constant)
    return largest


def findings(states: States, mask: Tensor, matching: Matching) -> tuple[str, ...]:
    """Says what a reader should know: dead units, few samples, how layers were fitted."""
    notes = []
    dead = int(torch.stack([(piece == 0).all(0) for piece in states.X.split(PIECE)]).all(0).sum())
    if dead:
        notes.append(f"{dead} states are zero on all samples; their columns cannot be used")
    width = int(mask.sum(1).max()) + int(matching.bias)
    if states.samples < width:
        notes.append(
            f"{states.samples} samples for rows of up to {width} entries: many rows fit exactly, and the smallest "
            "was taken"
        )
    if matching.sequential:
        notes.append(
            "gaps and residuals refer to the states that the fitted layers give, not to the recorded ones"
        )
    if matching.debias and matching.objective.sparse:
        notes.append("gaps refer to the entries that the objective has chosen, fitted without it")
    if matching.objective.name == "group":
        notes.append("the gap of the joint problem is shared out over its rows")
    return tuple(notes)
