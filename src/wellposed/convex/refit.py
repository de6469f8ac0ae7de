"""The output y = Cx + Du + c, fitted on the states that a model computes itself."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.convex.design import WIDE, Design
from wellposed.convex.matching import Matching
from wellposed.convex.objective import Objective
from wellposed.convex.rows import RowFit
from wellposed.convex.states import States
from wellposed.errors import InputError
from wellposed.forms.operators.plain import Zero

TINY = 1e-10


@dataclass(frozen=True, eq=False)
class Output:
    """C, D and c; D is None without a feedthrough, c without an output bias."""

    C: Tensor
    D: Tensor | None
    bias: Tensor | None


def reads_input(states: States) -> bool:
    """Says whether the network's output reads its input directly."""
    return states.form is not None and not isinstance(states.form.D, Zero)


def own_output(states: States, factors: Tensor) -> Output:
    """Takes C, D and c from the network's form, in the units of the fit."""
    form = states.form
    if form is None:
        raise InputError("refit_output=False keeps the network's own output, which is not known; use True")
    C = form.C.to_dense().cpu().to(WIDE) / factors
    D = form.D.to_dense().cpu().to(WIDE) if reads_input(states) else None
    return Output(C, D, None if form.output_bias is None else form.output_bias.cpu().to(WIDE))


def fitted_output(
    states: States,
    X: Tensor,  # (m, n), of the model
    *,
    feedthrough: bool,
    bias: bool,
    sparse: Objective | None = None,
) -> Output:
    """Fits C, D and c to the outputs of the network by least squares with a ridge of 1e-10, or with a lasso.

    C reads the states that the network's output reads, or all of them where that is not known.

    Args:
        states: for U, Y and the form.
        X: the model's own states.
        feedthrough, bias: whether there are D and c.
        sparse: a lasso or another objective for the rows of (C, D).
    """
    columns = _read_states(states, X.shape[1])
    used = torch.cat([columns, torch.arange(states.U.shape[1] if feedthrough else 0) + X.shape[1]])
    design, targets = Design.of(X, states.U, home=X.device).restricted(used), Design.of(states.Y, home=X.device)
    scale = float(design.squares().mean())
    fit = RowFit(kappa=math.inf, ridge=0.0 if sparse else TINY * scale)
    matching = Matching(fit=fit, objective=sparse or Objective(), bias=bias, debias=sparse is not None)
    found = matching.unbounded(design, targets, len(columns))
    C = torch.zeros(targets.shape[1], X.shape[1], dtype=WIDE, device=X.device)
    C[:, columns] = found.weights[:, : len(columns)]
    return Output(C, found.weights[:, len(columns) :] if feedthrough else None, found.bias if bias else None)


def _read_states(states: States, n: int) -> Tensor:
    if states.form is None:
        return torch.arange(n)
    C = states.form.blocks[2]
    used = {j for _, j in C.parts}
    chosen = torch.cat([torch.full((size,), k in used) for k, size in enumerate(C.widths)])
    return torch.nonzero(chosen)[:, 0] if bool(chosen.any()) else torch.arange(n)
