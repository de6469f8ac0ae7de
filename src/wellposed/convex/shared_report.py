"""What a fit of shared rows has achieved, layer by layer."""

import math
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerFit:
    """One layer.

    Args:
        name: in the network.
        own: weights of the given layer that are not zero.
        shifts: its units against those of its inputs, as powers of two.
        gap, relative_gap: duality gap of every row; the relative one refers to ``|z|^2 / 2`` about the mean.
        norm: what the cap counts in every row, in the units of the fit, rounded up.
        nonzeros: weights of every row that are not zero.
        misfit: ``|Mw + b - z| / |z - mean of z|`` of the layer.
    """

    name: str
    own: int
    shifts: tuple[float, ...]
    gap: Tensor
    relative_gap: Tensor
    norm: Tensor
    nonzeros: Tensor
    misfit: float


@dataclass(frozen=True, eq=False)
class SharedReport:
    """All layers.

    Args:
        layers: in the order in which the network calls them.
        kappa, bound: of the cap.
    """

    layers: tuple[LayerFit, ...]
    kappa: float
    bound: str

    @property
    def sparsity(self) -> float:
        """One minus the weights that are not zero over those of the given network that are not."""
        kept = sum(int(layer.nonzeros.sum()) for layer in self.layers)
        return 1.0 - kept / max(1, sum(layer.own for layer in self.layers))

    @property
    def relative_gap(self) -> Tensor:  # (rows,)
        """Of all rows, in the order of the layers."""
        return torch.cat([layer.relative_gap for layer in self.layers])

    @property
    def norm(self) -> Tensor:  # (rows,)
        """Of all rows, in the order of the layers."""
        return torch.cat([layer.norm for layer in self.layers])

    @property
    def certified(self) -> bool:
        """Whether every row satisfies a cap below one, which makes the implicit form contract in these units."""
        return self.kappa < 1 and bool((self.norm <= self.kappa).all())

    def facts(self) -> dict[str, Any]:
        """Returns the report as plain numbers and texts, for a JSON file."""
        layers = [
            {
                "layer": layer.name,
                "rows": len(layer.gap),
                "own_weights": layer.own,
                "nonzeros": int(layer.nonzeros.sum()),
                "shifts": list(layer.shifts),
                "largest_norm": float(layer.norm.max()),
                "largest_relative_gap": float(layer.relative_gap.max()),
                "misfit": layer.misfit,
            }
            for layer in self.layers
        ]
        cap = self.kappa if math.isfinite(self.kappa) else None
        return {"kappa": cap, "bound": self.bound, "sparsity": self.sparsity, "certified": self.certified,
                "layers": layers}  # fmt: skip

    def table(self) -> Table:
        """Lays the report out, one line a layer."""
        cap = f"rows within {self.kappa:g}" if math.isfinite(self.kappa) else "no cap"
        table = Table(title=f"{cap}; {100 * self.sparsity:.1f} % of the weights gone", box=box.SIMPLE)
        for name in ("layer", "rows", "units", "largest |w|_1", "largest gap", "non-zeros", "misfit"):
            table.add_column(name, justify="left" if name == "layer" else "right")
        for layer in self.layers:
            table.add_row(
                layer.name,
                str(len(layer.gap)),
                " ".join(f"2^{shift:g}" for shift in layer.shifts),
                f"{float(layer.norm.max()):.4g}",
                f"{float(layer.relative_gap.max()):.1e}",
                f"{int(layer.nonzeros.sum())} of {layer.own}",
                f"{layer.misfit:.2e}",
            )
        return table

    def __str__(self) -> str:
        page = StringIO()
        Console(file=page, width=110).print(self.table())
        return page.getvalue().rstrip()
