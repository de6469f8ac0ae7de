"""The equilibrium at the center of a set, with a bound of how well it satisfies its equation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.conditions.rounding import EPS, upward
from wellposed.errors import IllPosedError
from wellposed.forms import ImplicitForm
from wellposed.forms.gains import Spread, steepest
from wellposed.robust.query import Query


@dataclass(frozen=True)
class Center:
    """A computed equilibrium and its residual, in float64.

    Args:
        form: the form in float64.
        spread: the absolute values of its operators.
        u: (B, p), the center.
        radius: (B, p), how far every input may be from it.
        states: (B, n_k) of every block.
        residual: (B, n_k), bounds of ``|x - phi(Ax + Bu + b)|``, rounding included.
    """

    form: ImplicitForm
    spread: Spread
    u: Tensor
    radius: Tensor
    states: list[Tensor]
    residual: list[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, query: Query) -> "Center":
        """Solves for the center of the set."""
        form = query.form.to(torch.float64)
        exact = query.set.to(torch.float64)
        u, radius = exact.center.detach(), upward(exact.deviation().detach(), 4)
        x = form.equilibrium(u, on_failure="ignore").value
        assert isinstance(x, Tensor)
        if not bool(x.isfinite().all()):
            raise IllPosedError(
                "the equilibrium at the center of the set is not finite; check the inputs and form.certificate()"
            )
        spread = Spread.of(form, formed=False)
        states = list(x.split(form.partition, dim=1))
        return cls(form, Spread.of(form), u, radius, states, _residual(form, spread, x, u))

    @property
    def whole(self) -> Tensor:  # (B, n)
        """The states of all blocks side by side."""
        return torch.cat(self.states, dim=1)


def _residual(form: ImplicitForm, spread: Spread, x: Tensor, u: Tensor) -> list[Tensor]:
    A, B, _ = form.blocks
    bias = torch.zeros_like(x[0]) if form.bias is None else form.bias
    z = A.apply(x) + B.apply(u) + bias
    size = spread.A.apply(x.abs()) + spread.B.apply(u.abs()) + bias.abs()
    error = upward(size, spread.terms) * (2 * (spread.terms + 4) * EPS)
    pieces = zip(form.activations, *(t.split(form.partition, dim=1) for t in (x, z, size, error)), strict=True)
    return [_one_residual(*piece) for piece in pieces]


def _one_residual(phi: Activation, x: Tensor, z: Tensor, size: Tensor, error: Tensor) -> Tensor:
    through = steepest(phi, error)
    width = 0 if phi.componentwise else (phi.block or z.shape[1])
    own = (phi.rounding + width) * EPS * (phi.function(torch.zeros_like(z)).abs() + steepest(phi, size))
    return upward((x - phi.function(z)).abs() + EPS * x.abs() + through + own, 4)
