"""How far outputs and states of a form can move: proven bounds, entry by entry, from |A|, |B|, |C| and |D|.

A change du of the input changes the states by at most the smallest solution of ``d = T(|A| d + |B| |du|)``, where
T multiplies by the Lipschitz constant of phi and spreads over its blocks. Iterating from zero rises from below and
bounds nothing when it is cut short; here a candidate v is accepted only if ``T(|A| v + w) <= v`` holds with
outward rounding for some w > |B| |du| that is positive in every component, which proves the bound and that the
loop contracts. `Loop` makes that check for blocks that feed one another. `gains` bounds every output by every
input, with the absolute values of a form's operators (`AbsoluteForm`).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellposed.activations import Activation, block_view
from wellposed.conditions.rounding import EPS, TINY, double, upward, vector_norm
from wellposed.errors import IllPosedError, InputError
from wellposed.forms.compose import BlockForm
from wellposed.forms.evaluation import EvaluationOrder, Stage
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators.base import Operator, Product, Sum, tensors
from wellposed.forms.operators.block import Block
from wellposed.forms.operators.entries import (
    LARGEST_DENSE,
    SMALLEST,
    abs_upper_bound_block,
    least_entry,
    sum_length,
    underflow,
)
from wellposed.forms.operators.plain import LowRank, Repeated

FLOOR = 1e-250  # makes every component of w positive and pays for underflow
COMPOUND = (Product, Sum, LowRank, Repeated)
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
    def of(
        cls, abs_upper_bound: Block, exact: Block | None, activations: tuple[Activation, ...], terms: int
    ) -> "Loop":
        """Builds the inequality of a loop from an upper bound of ``|A|``.

        Args:
            exact: A itself where negative self-loops shall lower the bound.
            terms: the length of the longest sum in a product with the bound.
        """
        dense = None
        if abs_upper_bound.shape[0] <= LARGEST_DENSE and all(phi.componentwise for phi in activations):
            magnitude = abs_upper_bound.to_dense()
            diagonal = magnitude.diagonal() if exact is None else _diagonal(exact, magnitude.device)
            dense = comparison_system(magnitude, diagonal, activations, abs_upper_bound.heights)
        return cls(abs_upper_bound, activations, terms, dense)

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
        z = upward(self.A.apply(v) + w, self.terms)
        pieces = zip(self.activations, z.split(self.A.heights, dim=1), strict=True)
        return torch.cat([lipschitz_image(phi, piece) for phi, piece in pieces], dim=1) + FLOOR / 4

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
    return torch.where(others == 0, 0.0, upward(share[:, None] * others, 2) + TINY), share


def lipschitz_image(phi: Activation, z: Tensor) -> Tensor:
    """Bounds the change of every entry of phi(z) by the change of every entry of z, rounded up.

    Example:
        >>> from wellposed.activations import get_activation
        >>> lipschitz_image(get_activation("max_pool(2)"), torch.tensor([[1.0, 3.0]], dtype=torch.float64)).round()
        tensor([[3., 3.]], dtype=torch.float64)
    """
    if not z.numel():
        return z
    if phi.componentwise:
        gamma, size = phi.lipschitz(), z
    else:
        norm = "inf" if "inf" in phi.constants else next(iter(phi.constants))
        blocks = block_view(z, phi.block or 0)
        length = vector_norm(blocks, norm, -1).unsqueeze(-1)
        gamma, size = phi.lipschitz(norm), upward(length, blocks.shape[-1]).expand_as(blocks).flatten(-2)
    if math.isinf(gamma) and bool((size > 0).any()):
        raise IllPosedError(f"{phi.name!r} has no Lipschitz constant, so nothing bounds the change of its states")
    bound = torch.where(size == 0, 0.0, upward(gamma * size, 1) + TINY)
    return torch.where(bound.isnan(), math.inf, bound)  # what overflowed is bounded by nothing


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


def require_finite_entries(form: ImplicitForm) -> None:
    """Raises if a form holds NaN or infinite entries, of which nothing can be proven.

    Example:
        >>> require_finite_entries(ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1)))
    """
    for name in ("A", "B", "C", "D", "bias", "output_bias"):
        if not all(bool(part.isfinite().all()) for part in tensors(getattr(form, name))):
            raise InputError(
                f"{name} of the form holds NaN or infinite entries, of which nothing can be proven; find out "
                "where they come from"
            )


@torch.no_grad()
def gains(form: ImplicitForm, *, self_loops: bool = True, columns: int = 256) -> Tensor:  # (q, p)
    """Bounds the change of every output by the change of every input, ``|y(u) - y(u')| <= S |u - u'|``.

    ``S = |C| (I - gamma |A|)^-1 gamma |B| + |D|`` for componentwise phi (003, section 4.2), with the rounding of
    its computation; for a feed-forward network that is ``|W_L| ... |W_0|`` times the constants of its activations.
    Loops need the Perron-Frobenius condition.

    Args:
        self_loops: whether a negative A_ii of a componentwise phi, which dampens its state, may lower the bound.
        columns: how many inputs are treated at a time.

    Example:
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.tensor([[-1.0]]), torch.tensor([[3.0]]))
        >>> gains(form).round(decimals=6)
        tensor([[6.]], dtype=torch.float64)
    """
    absolute, p = AbsoluteForm.of(form, self_loops=self_loops), form.sizes[1]
    units = torch.eye(p, dtype=torch.float64, device=absolute.device).split(columns)
    return torch.cat([absolute.outputs(absolute.states(unit), unit) for unit in units]).mT


@dataclass(frozen=True)
class AbsoluteForm:
    """The absolute values of a form's operators, rounded up, in float64."""

    order: EvaluationOrder
    A: Block
    B: Block
    C: Block
    D: Block
    self_loops: bool

    @classmethod
    def of(cls, form: ImplicitForm, *, formed: bool = True, self_loops: bool = False) -> "AbsoluteForm":
        """Reads a form; without `formed` a product counts as the product of absolute values."""
        require_finite_entries(form)
        f = BlockForm.of(form)
        like = torch.empty(0, dtype=form.dtype, device=form.device)
        A, B, C, D = (abs_upper_bound_block(part, double(like).device, formed) for part in (f.A, f.B, f.C, f.D))
        return cls(form.order, A, B, C, D, self_loops)

    @property
    def device(self) -> torch.device:
        """Where the bounds are computed."""
        return self.A.device

    @cached_property
    def rows(self) -> list[dict[int, Operator]]:
        """The blocks of every block row of A."""
        return self.A.rows()

    @cached_property
    def terms(self) -> int:
        """The length of the longest sum."""
        return max(sum_length(part) for part in (self.A, self.B, self.C, self.D)) + 4

    @cached_property
    def loops(self) -> dict[tuple[int, ...], Loop]:
        """The loops by their blocks."""
        loops = {}
        for blocks in (stage.blocks for stage in self.order.stages if stage.loop is not None):
            exact = self.order.A.chosen(blocks, blocks) if self.self_loops else None
            activations = tuple(self.order.activations[k] for k in blocks)
            loops[blocks] = Loop.of(self.A.chosen(blocks, blocks), exact, activations, self.terms)
        return loops

    @cached_property
    def _least(self) -> tuple[float, float]:
        """The least number whose product with any entry does not underflow, and what is lost with smaller entries.

        Smaller numbers are raised to it, so that underflow takes nothing and zeros stay zeros.
        """
        operators = (self.A, self.B, self.C, self.D)
        least = min(least_entry(part) for part in operators) / 1024  # for the constants of activations
        entry = max(least, SMALLEST)
        if entry > SMALLEST:
            return TINY / entry, 0.0
        return TINY / entry, max(underflow(side, 2 * TINY) for part in operators for side in (part, part.T))

    def apply(self, operator: Operator, x: Tensor) -> Tensor:
        """Returns ``M x`` for x >= 0 and one of the operators, short of the exact product by rounding alone."""
        floor, lost = self._least
        return operator.apply(torch.where(x > 0, x.clamp(min=floor), x)) + lost

    def states(self, u: Tensor, slack: float = 0.0) -> list[Tensor]:  # (B, p) -> (B, n_k) of every block
        """Bounds the change of every state by changes of at most u >= 0.

        With `slack` every bound is larger than what leads to it by that factor, and positive.
        """
        entering = upward(self.apply(self.B, u), self.terms).split(self.A.heights, dim=1)
        states: dict[int, Tensor] = {}
        for stage in self.order.stages:
            for k, bound in self._stage(stage, states, list(entering), slack).items():
                states[k] = bound
        return [states[k] for k in range(len(states))]

    def _stage(
        self, stage: Stage, states: dict[int, Tensor], entering: list[Tensor], slack: float
    ) -> dict[int, Tensor]:
        drive = {k: self._driven(k, states, entering[k], stage.blocks) for k in stage.blocks}
        if slack:
            drive = {k: _raised(w, slack) for k, w in drive.items()}
        if stage.loop is None:
            return {k: lipschitz_image(self.order.activations[k], w) * (1 + slack) for k, w in drive.items()}
        w = torch.cat([drive[k] for k in stage.blocks], dim=1)
        sizes = [self.A.heights[k] for k in stage.blocks]
        bound = self.loops[stage.blocks].bound(w, slack)
        return dict(zip(stage.blocks, bound.split(sizes, dim=1), strict=True))

    def _driven(self, k: int, states: dict[int, Tensor], entering: Tensor, inside: tuple[int, ...]) -> Tensor:
        total = entering
        for j, part in self.rows[k].items():
            if j not in inside:
                total = total + self.apply(part, states[j])
        return upward(total, self.terms)

    def outputs(self, states: list[Tensor], u: Tensor) -> Tensor:  # (B, q)
        """Bounds the change of every output by those of states and inputs."""
        return upward(self.apply(self.C, torch.cat(states, dim=1)) + self.apply(self.D, u), self.terms + 1)


def _raised(w: Tensor, slack: float) -> Tensor:
    return (w + slack * w.amax(1, keepdim=True) + FLOOR) * (1 + slack) if w.numel() else w
