"""How far outputs and states of a form can move: proven bounds, entry by entry, from |A|, |B|, |C| and |D|.

A change du of the input changes the states by at most the smallest solution of ``d = T(|A| d + |B| |du|)``, where
T multiplies by the Lipschitz constant of phi and spreads over its blocks. Iterating from zero rises from below
and bounds nothing when it is cut short; here a candidate v is accepted only if ``T(|A| v + w) <= v`` holds with
outward rounding for some w > |B| |du| that is positive in every component, which proves the bound and that the
loop contracts.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellposed.conditions.rounding import double, upward
from wellposed.errors import InputError
from wellposed.forms.block import Block
from wellposed.forms.blocks import Blocks
from wellposed.forms.cover import cover_block, sum_length
from wellposed.forms.evaluation import Plan, Stage
from wellposed.forms.form import ImplicitForm
from wellposed.forms.loop_bound import FLOOR, Loop, steepest
from wellposed.forms.operator import Operator, tensors


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
    spread, p = Spread.of(form, self_loops=self_loops), form.sizes[1]
    units = torch.eye(p, dtype=torch.float64, device=spread.device).split(columns)
    return torch.cat([spread.outputs(spread.states(unit), unit) for unit in units]).mT


@dataclass(frozen=True)
class Spread:
    """The absolute values of a form's operators, rounded up, in float64."""

    plan: Plan
    A: Block
    B: Block
    C: Block
    D: Block
    self_loops: bool

    @classmethod
    def of(cls, form: ImplicitForm, *, formed: bool = True, self_loops: bool = False) -> "Spread":
        """Reads a form; without `formed` a product counts as the product of absolute values."""
        require_finite_entries(form)
        f = Blocks.of(form)
        home = torch.empty(0, dtype=form.dtype, device=form.device)
        A, B, C, D = (cover_block(part, double(home).device, formed) for part in (f.A, f.B, f.C, f.D))
        return cls(form.plan, A, B, C, D, self_loops)

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
        found = {}
        for blocks in (stage.blocks for stage in self.plan.stages if stage.system is not None):
            exact = self.plan.A.chosen(blocks, blocks) if self.self_loops else None
            activations = tuple(self.plan.activations[k] for k in blocks)
            found[blocks] = Loop.of(self.A.chosen(blocks, blocks), exact, activations, self.terms)
        return found

    def states(self, u: Tensor, slack: float = 0.0) -> list[Tensor]:  # (B, p) -> (B, n_k) of every block
        """Bounds the change of every state by changes of at most u >= 0.

        With `slack` every bound is larger than what leads to it by that factor, and positive.
        """
        entering = upward(self.B.apply(u), self.terms).split(self.A.heights, dim=1)
        found: dict[int, Tensor] = {}
        for stage in self.plan.stages:
            for k, bound in self._stage(stage, found, list(entering), slack).items():
                found[k] = bound
        return [found[k] for k in range(len(found))]

    def _stage(
        self, stage: Stage, found: dict[int, Tensor], entering: list[Tensor], slack: float
    ) -> dict[int, Tensor]:
        drive = {k: self._driven(k, found, entering[k], stage.blocks) for k in stage.blocks}
        if slack:
            drive = {k: _raised(w, slack) for k, w in drive.items()}
        if stage.system is None:
            return {k: steepest(self.plan.activations[k], w) * (1 + slack) for k, w in drive.items()}
        w = torch.cat([drive[k] for k in stage.blocks], dim=1)
        sizes = [self.A.heights[k] for k in stage.blocks]
        bound = self.loops[stage.blocks].bound(w, slack)
        return dict(zip(stage.blocks, bound.split(sizes, dim=1), strict=True))

    def _driven(self, k: int, found: dict[int, Tensor], entering: Tensor, inside: tuple[int, ...]) -> Tensor:
        total = entering
        for j, part in self.rows[k].items():
            if j not in inside:
                total = total + part.apply(found[j])
        return upward(total, self.terms)

    def outputs(self, states: list[Tensor], u: Tensor) -> Tensor:  # (B, q)
        """Bounds the change of every output by those of states and inputs."""
        return upward(self.C.apply(torch.cat(states, dim=1)) + self.D.apply(u), self.terms + 1)


def _raised(w: Tensor, slack: float) -> Tensor:
    return (w + slack * w.amax(1, keepdim=True) + FLOOR) * (1 + slack) if w.numel() else w
