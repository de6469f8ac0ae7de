"""The iteration ``nu <- c + A' lam(nu)`` of a loop, for many rows at once; any nu gives a sound bound."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.forms import Operator

Rows = dict[int, Tensor]  # (R, n_k) by block
LATE = 3  # steps after which the iteration is extrapolated


@dataclass(frozen=True)
class Multipliers:
    """What a loop makes of functionals of its states.

    Args:
        start: c, the coefficients of the loop's blocks.
        slopes: lower and upper slopes of every row, by block; blocks without lines are missing.
        links: for every block, the blocks that read it with the transposed operators.
    """

    start: Rows
    slopes: dict[int, tuple[Tensor, Tensor]]
    links: dict[int, list[tuple[int, Operator]]]

    def lam(self, k: int, nu: Tensor) -> Tensor:
        """Returns s(nu) nu, s the upper slope where nu is positive."""
        lower, upper = self.slopes[k]
        return torch.where(nu > 0, upper, lower) * nu

    def image(self, nu: Rows) -> Rows:
        """Returns ``c + A' lam(nu)``."""
        lam = {k: self.lam(k, part) for k, part in nu.items() if k in self.slopes}
        found = {}
        for j, part in self.start.items():
            for i, operator in self.links[j]:
                part = part + operator.apply(lam[i])
            found[j] = part
        return found

    def settled(self, max_steps: int, tolerance: float) -> tuple[Rows, Rows]:
        """Iterates until no row changes by more than a tolerance, and returns nu with its image.

        After a few steps the secant of the last two residuals is taken (Anderson, memory one), unless gradients
        are asked for. A row that has settled is left alone, so that it does not depend on the others.
        """
        nu, size = dict(self.start), tolerance * _size(self.start)
        active, before = torch.ones_like(size, dtype=torch.bool), None
        following = self.image(nu)
        for step in range(max_steps):
            residual = {k: (following[k] - nu[k]).detach() for k in nu}
            active = active & (_size(residual) > size)
            if not bool(active.any()):
                break
            proposal = following
            if before is not None and step >= LATE and not any(part.requires_grad for part in following.values()):
                proposal = _extrapolated(following, residual, *before)
            before = following, residual
            nu = {k: torch.where(active[:, None], proposal[k], nu[k]) for k in nu}
            following = self.image(nu)
        return nu, following


def _extrapolated(following: Rows, residual: Rows, last: Rows, before: Rows) -> Rows:
    """Goes along the last step to where the residual would be least, in rows whose residual has not grown."""
    share = torch.where(_size(residual) > _size(before), 0.0, _secant(residual, before))[:, None]
    return {k: part - share * (part - last[k]) for k, part in following.items()}


def _secant(residual: Rows, before: Rows) -> Tensor:  # (R,)
    """Returns the share of the last step that makes the residual least, none where that is no better."""
    change = {k: residual[k] - before[k] for k in residual}
    along = torch.stack([(residual[k] * change[k]).sum(1) for k in residual]).sum(0)
    length = torch.stack([part.square().sum(1) for part in change.values()]).sum(0)
    share = along / length
    return torch.where(share.isfinite(), share.clamp(-20.0, 0.9), 0.0)


def _size(rows: Rows) -> Tensor:  # (R,)
    """Returns the largest absolute value of every row."""
    return torch.stack([part.detach().abs().amax(1) for part in rows.values()]).amax(0)
