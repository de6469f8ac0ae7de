"""The pairs of 004: an equilibrium model and a feed-forward network with as many weights in the cell."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from wellposed.equilibrium import Picard
from wellposed.models import DEQ, DenseCell, noise_sensitivity
from wellposed.models.noise import sensitivity_norms
from wellposed_lab.networks.twins import FeedForward, HiddenLayer

STEPS = 60  # of plain unrolling, 004 Table 1
LOOSE, TIGHT = 0.05, 1e-3  # tolerances of 004 Table 1, with and without noise
WINDOW = 10  # of the averaged rule; 004 does not print one
WIDTHS = {1: 128, 3: 223, 5: 288, 7: 340, 9: 386, 11: 427, 13: 467}  # layers of the FFW: width of the DEQ
TOTALS = {
    5: 187,
    9: 241,
    13: 291,
}  # widths of DEQs with as many parameters in all as the FFW
LOOKED_AT = 1  # inputs at which eigenvalues of Jacobians are computed
Kind = Literal["deq", "ffw"]


@dataclass(frozen=True)
class Pair:
    """One half of a pair.

    Args:
        kind: "deq" or "ffw".
        layers: hidden layers of the FFW; the DEQ has the width that 004 pairs with them.
        inject, tied, xavier, wide: of the FFW: input in every layer, one weight for all layers, Xavier's start,
            the width of the DEQ.
        total: whether the DEQ is matched in all parameters and not in those of the cell.
        projection: activation of the input projection.

    Example:
        >>> Pair("deq", 13).width, Pair("ffw", 13).width, Pair("deq", 13, total=True).name
        (467, 128, 'deq-291')
    """

    kind: Kind
    layers: int
    inject: bool = False
    tied: bool = False
    xavier: bool = False
    wide: bool = False
    total: bool = False
    projection: str = "relu"

    @property
    def width(self) -> int:
        """Of the state."""
        if self.kind == "ffw" and not self.wide:
            return 128
        return TOTALS[self.layers] if self.total else WIDTHS[self.layers]

    @property
    def name(self) -> str:
        """As 004 and the report name it."""
        if self.kind == "deq":
            return f"deq-{self.width}"
        parts = [word for word in ("inject", "tied", "xavier", "wide") if getattr(self, word)]
        return "-".join([f"ffw-{self.layers}", *parts])

    def build(self, inputs: int, outputs: int, seed: int) -> nn.Module:
        """Makes the model, untrained."""
        with torch.random.fork_rng(()):
            torch.manual_seed(seed)
            if self.kind == "deq":
                return Equilibrium(inputs, outputs, self.width, self.projection)
            model = FeedForward(inputs, outputs, width=self.width, depth=self.layers, inject=self.inject,
                                tied=self.tied, projection=self.projection)  # fmt: skip
            if self.xavier:
                for layer in model.layers:
                    nn.init.xavier_uniform_(layer.linear.weight)  # type: ignore[union-attr,arg-type]
            return model


class Equilibrium(nn.Module):
    """Reads the equilibrium of a dense cell out (004 eq. 57, Table 1)."""

    def __init__(self, inputs: int, outputs: int, width: int, projection: str = "relu") -> None:
        super().__init__()
        cell = DenseCell(inputs, width, projection=projection)
        self.deq = DEQ(cell, solver=Picard(), max_steps=STEPS, on_failure="ignore")
        self.readout = nn.Linear(width, outputs)

    def forward(self, u: Tensor) -> Tensor:  # (B, p) -> (B, q)
        """Computes the outputs."""
        y: Tensor = self.readout(self.deq(u))
        return y


@torch.no_grad()
def sensitivities(model: nn.Module, u: Tensor, seed: int, eta: float = 0.1) -> tuple[float, float]:
    """Returns the mean of ``|dz / dxi_i|`` over noise and samples, and the mean radius of the Jacobian.

    Noise is additive and held fixed, as in 004 section 3.3. The radius is that of the last step's Jacobian for a
    DEQ and of the mean layer for an FFW, at a few of the inputs.
    """
    matrices, injections, start = _unrolled(model, u)
    xi = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed)).to(start)
    J = noise_sensitivity(matrices, injections, xi, eta, start=start)[1]
    few = [part[:LOOKED_AT] for part in injections]
    radii = torch.stack(_radii(matrices, few, start[:LOOKED_AT]))
    return float(sensitivity_norms(J).mean() / eta), float(radii.mean())


@torch.no_grad()
def weight_eigenvalues(model: nn.Module) -> Tensor:  # (matrices, n)
    """Returns the eigenvalues of the weight of a DEQ, or of those of all layers of an FFW (004 Figure 2a)."""
    if isinstance(model, Equilibrium):
        assert isinstance(model.deq.cell, DenseCell)
        (layer,) = model.deq.cell.layers
        assert isinstance(layer, nn.Linear)
        return torch.linalg.eigvals(layer.weight[None])
    assert isinstance(model, FeedForward)
    hidden = [part.linear.weight for part in model.layers if isinstance(part, HiddenLayer)]
    return torch.linalg.eigvals(torch.stack(hidden))


def _radii(matrices: list[Tensor], injections: list[Tensor], z: Tensor) -> list[Tensor]:
    """Returns the mean spectral radius of the Jacobian of each step; of one that is repeated, of the last."""
    found: dict[int, Tensor] = {}
    for W, added in zip(matrices, injections, strict=True):
        z = torch.tanh(z @ W.mT + added)
        found[id(W)] = (1 - z.square())[:, :, None] * W  # the last one stays
    return [torch.linalg.eigvals(J.cpu()).abs().amax(-1).mean() for J in found.values()]


def _unrolled(model: nn.Module, u: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Writes a model as steps ``z <- tanh(W z + injection)`` from a start; biases are part of the injections."""
    if isinstance(model, Equilibrium):
        cell = model.deq.cell
        assert isinstance(cell, DenseCell)
        (layer,) = cell.layers
        assert isinstance(layer, nn.Linear)
        injection = cell.inject(u) + layer.bias
        return [layer.weight] * STEPS, [injection] * STEPS, torch.zeros_like(injection)
    assert isinstance(model, FeedForward)
    x = model.encode(u)
    layers = [part for part in model.layers if isinstance(part, HiddenLayer)]
    injections = [part.linear.bias + (x if part.inject else torch.zeros_like(x)) for part in layers]
    return [part.linear.weight for part in layers], injections, x
