"""Optimises the free slopes of linear bounds, for every bound its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.robust.crown import CHOICE, Backward
from wellposed.robust.functional import Functionals

RATE, DECAY = 0.25, 0.95


def tightest(backward: Backward, rows: Functionals, steps: int) -> tuple[Tensor, Tensor]:  # (R,), (R,)
    """Bounds functionals from above, with slopes optimised for some steps; also returns the rounding's share."""
    value, slack = backward.upper(rows)
    if not steps or backward.enclosure.query.late:
        return value, slack
    better, _ = backward.upper(rows, optimised(backward, rows, steps))
    return torch.minimum(value, better), slack


@torch.enable_grad()
def optimised(backward: Backward, rows: Functionals, steps: int) -> CHOICE:
    """Finds slopes that make upper bounds smaller, by projected Adam; any slopes give sound bounds.

    Free are the slopes below a convex and above a concave piece; the best ones found are returned for each row.
    """
    rows = _constant(rows)
    base, masks = _start(backward, rows.sample)
    if not base:
        return {}
    moving = {k: [part.clone().requires_grad_() for part in pair] for k, pair in base.items()}
    optimiser = torch.optim.Adam([part for pair in moving.values() for part in pair], RATE)
    best = {k: (pair[0].detach().clone(), pair[1].detach().clone()) for k, pair in moving.items()}
    least = torch.full_like(rows.constant, torch.inf)
    for _ in range(steps):
        choice = {k: _joined(moving[k], base[k], masks[k]) for k in moving}
        value, _ = backward.upper(rows, choice)
        better = (value.detach() < least)[:, None]
        least = torch.minimum(least, value.detach())
        for k, found in choice.items():
            best[k] = _joined([part.detach() for part in found], best[k], (better, better))
        if backward.enclosure.query.late or not _step(optimiser, value, moving, backward):
            break
    return best


def _step(optimiser: torch.optim.Optimizer, value: Tensor, moving: dict, backward: Backward) -> bool:
    if not value.requires_grad:
        return False
    parameters = [part for pair in moving.values() for part in pair]
    found = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    for part, gradient in zip(parameters, found, strict=True):
        part.grad = torch.zeros_like(part) if gradient is None else gradient
    optimiser.step()
    for group in optimiser.param_groups:
        group["lr"] *= DECAY
    with torch.no_grad():
        for k, pair in moving.items():
            low, high = backward.enclosure.activations[k].slope
            for part in pair:
                part.clamp_(low, high)
    return True


def _start(backward: Backward, sample: Tensor) -> tuple[CHOICE, CHOICE]:
    base, masks = {}, {}
    for k, lines in enumerate(backward.lines):
        if lines is not None and backward.enclosure.known(k):
            slopes = backward.slopes(k)
            base[k] = slopes.lower.detach()[sample], slopes.upper.detach()[sample]
            masks[k] = slopes.free_lower[sample], slopes.free_upper[sample]
    return base, masks


def _joined(
    moving: Sequence[Tensor], base: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    lower, upper = (torch.where(m, a, b) for m, a, b in zip(masks, moving, base, strict=True))
    return lower, upper


def _constant(rows: Functionals) -> Functionals:
    states = {k: part.detach() for k, part in rows.states.items()}
    return Functionals(states, rows.inputs.detach(), rows.constant.detach(), rows.size, rows.sample)
