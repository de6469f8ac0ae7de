"""Bounds of the states in a loop, accepted only after a check that proves them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.activations import Activation, block_view
from wellposed.conditions.rounding import EPS, upward
from wellposed.errors import IllPosedError
from wellposed.forms.block import Block
from wellposed.forms.cover import LARGEST_DENSE

FLOOR = 1e-250  # makes every component of w positive and pays for underflow
SLACKS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
MAX_SWEEPS, RUNAWAY = 5000, 1e30


@dataclass(frozen=True)
class Loop:
    """The inequality ``d <= T(|A| d + w)`` of blocks that feed one another."""

    A: Block
    activations: tuple[Activation, ...]
    terms: int
    dense: tuple[Tensor, Tensor] | None  # M and s with d <= M d + s w where phi is componentwise

    @classmethod
    def of(cls, cover: Block, exact: Block | None, activations: tuple[Activation, ...], terms: int) -> "Loop":
        """Reads a loop off what covers ``|A|``.

        Args:
            exact: A itself where negative self-loops shall lower the bound.
            terms: the length of the longest sum in a product with the cover.
        """
        dense = None
        if cover.shape[0] <= LARGEST_DENSE and all(phi.componentwise for phi in activations):
            magnitude = cover.to_dense()
            diagonal = magnitude.diagonal() if exact is None else _diagonal(exact, magnitude.device)
            dense = comparison_system(magnitude, diagonal, activations, cover.heights)
        return cls(cover, activations, terms, dense)

    def bound(self, w: Tensor, slack: float = 0.0) -> Tensor:  # (B, n) -> (B, n)
        """Returns v >= d, checked."""
        raised = w + FLOOR
        for inflation in (slack,) if slack else SLACKS:
            candidate = self._candidate(raised, inflation)
            image = self._image(candidate, raised)
            if bool(((candidate > 0) & (image <= candidate) & candidate.isfinite()).all()):
                reached = (w > 0).any(1, keepdim=True)
                return torch.where(reached, candidate, 0.0)  # a contraction that nothing drives stays at zero
        raise IllPosedError(
            f"nothing bounds the gains of a loop of {w.shape[1]} states: the Perron-Frobenius eigenvalue of "
            "gamma |A| must be below one; shrink its weights"
        )

    def _image(self, v: Tensor, w: Tensor) -> Tensor:
        if self.dense is not None:
            M, share = self.dense
            return upward(v @ M.mT + share * w, self.terms + 2) + FLOOR / 4
        return self._spread(upward(self.A.apply(v) + w, self.terms)) + FLOOR / 4

    def _spread(self, z: Tensor) -> Tensor:
        pieces = zip(self.activations, z.split(self.A.heights, dim=1), strict=True)
        return torch.cat([steepest(phi, piece) for phi, piece in pieces], dim=1)

    def _candidate(self, w: Tensor, inflation: float) -> Tensor:
        if self.dense is not None:
            M, share = self.dense
            return _solved(M * (1 + inflation), share * w * (1 + inflation) + FLOOR)
        v = torch.zeros_like(w)
        for _ in range(MAX_SWEEPS):
            image = self._image(v, w) * (1 + inflation) + FLOOR
            if bool((image <= (1 + inflation / 2) * v).all()):
                return image
            if not bool((image < RUNAWAY * w.amax()).all()):
                break
            v = image
        return v


def comparison_system(
    magnitude: Tensor, diagonal: Tensor, activations: tuple[Activation, ...], sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Returns M and s with ``|dx| <= M |dx| + s |dv|`` for x = phi(Ax + v) with componentwise phi.

    dx_i = d (A dx + dv)_i with a difference quotient d in [lo, hi], so
    ``|dx_i| <= max_d |d| / (1 - d A_ii) (sum_{j != i} |A_ij| |dx_j| + |dv_i|)``, attained at lo or hi. Rounded up,
    and infinite where d A_ii >= 1.

    Args:
        magnitude: (n, n), nowhere below ``|A|``.
        diagonal: (n,), that of A up to what `magnitude` exceeds it by.
        sizes: of the blocks of the activations.
    """
    slopes = [torch.tensor(phi.slope, dtype=torch.float64) for phi in activations]
    slope = torch.stack(slopes).repeat_interleave(torch.tensor(sizes), dim=0).to(diagonal.device).mT  # (2, n)
    loop = slope * diagonal
    doubt = slope.abs() * (magnitude.diagonal() - diagonal.abs()).clamp(min=0)
    room = 1 - loop - doubt - 4 * EPS * (1 + loop.abs() + doubt)
    share = torch.where(room > 0, slope.abs() / room, math.inf)
    share = upward(torch.where(slope == 0, 0.0, share).amax(0), 2)
    others = magnitude - magnitude.diagonal().diag()
    return torch.where(others > 0, upward(share[:, None] * others, 2), 0.0), share


def steepest(phi: Activation, z: Tensor) -> Tensor:
    """Bounds the change of every entry of phi(z) by the change of every entry of z, rounded up.

    Example:
        >>> from wellposed.activations import get_activation
        >>> steepest(get_activation("max_pool(2)"), torch.tensor([[1.0, 3.0]], dtype=torch.float64)).round()
        tensor([[3., 3.]], dtype=torch.float64)
    """
    if not z.numel():
        return z
    if phi.componentwise:
        gamma, size = phi.lipschitz(), z
    else:
        norm = "inf" if "inf" in phi.constants else next(iter(phi.constants))
        blocks = block_view(z, phi.block or 0)
        length = torch.linalg.vector_norm(blocks, float(norm), -1, keepdim=True)
        gamma, size = phi.lipschitz(norm), upward(length, blocks.shape[-1]).expand_as(blocks).flatten(-2)
    if math.isinf(gamma) and bool((size > 0).any()):
        raise IllPosedError(f"{phi.name!r} has no Lipschitz constant, so nothing bounds the change of its states")
    return torch.where(size > 0, upward(gamma * size, 1), 0.0)


def _diagonal(block: Block, device: torch.device) -> Tensor:
    """Reads the diagonal of a square block matrix."""
    pieces = [torch.zeros(size, dtype=torch.float64, device=device) for size in block.heights]
    for (i, j), part in block.parts.items():
        if i == j:
            rows, columns, values = part.to(device=device, dtype=torch.float64).coordinates()
            on = rows == columns
            pieces[i] = pieces[i].index_put((rows[on],), values[on])
    return torch.cat(pieces)


def _solved(M: Tensor, load: Tensor) -> Tensor:
    """Solves ``v = M v + load``, by substitution where M is strictly triangular."""
    system = torch.eye(len(M), dtype=M.dtype, device=M.device) - M
    if not bool(M.isfinite().all()):
        return torch.full_like(load, math.nan)
    if not bool(M.tril().any()) or not bool(M.triu().any()):
        return torch.linalg.solve_triangular(system, load.mT, upper=not bool(M.tril().any())).mT
    return torch.linalg.solve_ex(system, load.mT)[0].mT
