"""Units of the states in which the rows of A fit in the ball."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from wellposed.activations import Activation, rescaled
from wellposed.conditions.rescaling import rescaling
from wellposed.convex.design import WIDE, Design
from wellposed.convex.rows import RowFit, row_groups
from wellposed.convex.states import States
from wellposed.convex.support import block_starts
from wellposed.errors import IllPosedError
from wellposed.forms.evaluation import block_norms


@dataclass(frozen=True)
class Units:
    """One factor 2^e for every block of states: x <- Dx, z <- Dz, phi <- D phi(D^-1 .).

    Args:
        exponents: e, one a block; whole numbers unless the network has loops.
        sizes: of the blocks.
        source: where they come from: "form", "data" or "none".

    Example:
        >>> Units((-1.0, 0.0), (1, 2), "form").factors
        tensor([0.5000, 1.0000, 1.0000], dtype=torch.float64)
    """

    exponents: tuple[float, ...]
    sizes: tuple[int, ...]
    source: str

    @property
    def factors(self) -> Tensor:  # (n,)
        """The diagonal of D."""
        powers = torch.tensor([2.0**e for e in self.exponents], dtype=WIDE)
        return powers.repeat_interleave(torch.tensor(self.sizes))

    def activations(self, given: Sequence[Activation]) -> tuple[Activation, ...]:
        """Returns phi_D of every block, which is phi where it is positively homogeneous."""
        return tuple(rescaled(phi, e) for phi, e in zip(given, self.exponents, strict=True))


def unchanged(states: States) -> Units:
    """Keeps the units of the recording."""
    return Units((0.0,) * len(states.blocks), states.blocks, "none")


def fitting_units(states: States, kappa: float, mask: Tensor) -> Units:
    """Chooses units in which the network's own rows have ``|a|_1 < kappa`` (003 section 2.5).

    From the weights of the network's form where there is one. Else from data: the rows are fitted without a cap on
    what lies before them in the network, and units are chosen for those. Powers of two, so that states, outputs
    and equilibria keep every bit, wherever the network has no loops. If no units exist they stay as they are.

    Args:
        states: with or without a form.
        kappa: the cap.
        mask: the support of the fit, ``(n, n + p)``.
    """
    if states.form is not None:
        norms, source = block_norms(states.form.blocks[0]).cpu(), "form"
    else:
        norms, source = _norms_from_data(states, mask), "data"
    try:
        found = rescaling(norms, kappa)
    except IllPosedError:
        return unchanged(states)
    return Units(tuple(float(value) for value in found.log2), states.blocks, source)


def _norms_from_data(states: States, mask: Tensor) -> Tensor:  # (L, L)
    """Estimates |A_ij|_inf of every pair of layers by least squares on the layers before."""
    n, starts = states.X.shape[1], block_starts(states.blocks)
    before = torch.zeros_like(mask)
    for low, high in pairwise(starts):
        before[low:high, high:] = mask[low:high, high:]
    design, targets = Design.of(states.X, states.U).centred(), Design.of(states.Z).centred()
    squares = design.squares()
    weights = torch.zeros(mask.shape, dtype=WIDE)
    for group in row_groups(before, capped=n):
        if len(group.columns):
            fit = RowFit(kappa=float("inf"), ridge=1e-6 * float(squares[group.columns].mean()))
            problem = fit.problem(design, targets, group, n)
            weights[group.rows[:, None], group.columns] = fit.solve_problem(problem).weights.cpu()
    size = weights[:, :n].abs()
    sums = torch.stack([part.sum(1) for part in size.split(list(states.blocks), dim=1)], dim=1)  # (n, L)
    return torch.stack([part.amax(0) for part in sums.split(list(states.blocks), dim=0)])
