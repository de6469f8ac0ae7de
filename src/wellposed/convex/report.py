"""What a fit has achieved: row by row and at the model's own equilibrium, or layer by layer.

`FitReport` is for models fitted to states (`fit_states`), `SharedReport` with its `LayerFit` entries for layers
with shared rows (`fit_shared`).
"""

import math
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from wellposed.conditions.certificate import Certificate
from wellposed.convex.rows import block_starts
from wellposed.convex.states import States
from wellposed.models.implicit import ImplicitModel

PIECE = 4096  # samples that are compared at a time
LAYERS = ("layer", "phi", "rows", "units", "largest |a|_1", "relative gap", "non-zeros", "residual", "own error")
FILTERS = ("layer", "rows", "units", "largest |w|_1", "relative gap", "non-zeros", "misfit")


@dataclass(frozen=True, kw_only=True, eq=False)
class FitReport:
    """Describes a fitted model.

    Args:
        blocks: sizes of the layers, in the order of the states.
        activations: their names.
        kappa: the cap on the rows of A (or of (A, B)) in the units of the fit.
        bound: what it caps.
        objective, strength: what was minimised beside the misfit.
        exponents: the states of block k are in units of 2^-e_k.
        units: where these come from: "form", "data" or "none".
        gap, relative_gap: duality gap of every row; the relative one refers to ``|z|^2 / 2``.
        norm: ``|a|_1`` of every row as returned, rounded up.
        nonzeros: entries of (A, B) that are not zero, in every row.
        allowed: entries of (A, B) that the support allows.
        certificate: of the returned model.
        state_residual: ``|AX + BU + b - Z| / |Z|`` of every block, on the states that the fit saw.
        state_error: ``|x - X| / |X|`` of every block, x the model's own equilibrium.
        output_error: ``|y - Y| / |Y|``, y the model's own output.
        score: "accuracy" or "mean squared error" against targets; None without targets.
        before, after: the score of the network and of the model.
        notes: what a reader should know: dead units, few samples and the like.
        names: of the network's modules that the layers stand for, where they are known.
    """

    blocks: tuple[int, ...]
    activations: tuple[str, ...]
    kappa: float
    bound: str
    objective: str
    strength: float
    exponents: tuple[float, ...]
    units: str
    gap: Tensor
    relative_gap: Tensor
    norm: Tensor
    nonzeros: Tensor
    allowed: int
    certificate: Certificate
    state_residual: Tensor
    state_error: Tensor
    output_error: float
    score: str | None = None
    before: float | None = None
    after: float | None = None
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of the table."""
        return LAYERS

    @property
    def sparsity(self) -> float:
        """The fraction of zeros among the entries of (A, B) that the support allows."""
        return 1.0 - int(self.nonzeros.sum()) / max(1, self.allowed)

    def facts(self) -> dict[str, Any]:
        """Returns the report as plain numbers and texts, for a JSON file."""
        starts = block_starts(self.blocks)
        layers = [
            {
                "activation": self.activations[k],
                "rows": size,
                "exponent": self.exponents[k],
                "largest_norm": float(self.norm[starts[k] : starts[k + 1]].max()),
                "largest_relative_gap": float(self.relative_gap[starts[k] : starts[k + 1]].max()),
                "nonzeros": int(self.nonzeros[starts[k] : starts[k + 1]].sum()),
                "residual": float(self.state_residual[k]),
                "own_error": float(self.state_error[k]),
            }
            for k, size in enumerate(self.blocks)
        ]
        names = ("kappa", "bound", "objective", "strength", "units", "sparsity", "output_error", "score", "before",
                 "after")  # fmt: skip
        plain = {name: getattr(self, name) for name in names}
        holds, text = self.certificate.holds, str(self.certificate)
        return {**plain, "well_posed": holds, "certificate": text, "layers": layers, "notes": list(self.notes)}

    def table(self) -> Table:
        """Lays the report out, one line a layer."""
        which = "rows of A" if self.bound == "state" else "rows of (A, B)"
        goal = "" if self.objective == "none" else f", {self.objective} {self.strength:.3g}"
        title = f"{which} within {self.kappa:g}{goal}; {100 * self.sparsity:.1f} % zeros"
        table = Table(title=title, box=box.SIMPLE, caption=self._caption(), caption_justify="left")
        for name in LAYERS:
            table.add_column(name, justify="left" if name in ("layer", "phi") else "right")
        for row in self.rows():
            table.add_row(*row)
        return table

    def rows(self) -> list[list[str]]:
        """Returns the cells of the table, under the names of `LAYERS`."""
        starts, table = block_starts(self.blocks), []
        for k, size in enumerate(self.blocks):
            rows = slice(starts[k], starts[k + 1])
            table.append(
                [
                    self.names[k] if self.names else str(k),
                    self.activations[k],
                    str(size),
                    f"2^{self.exponents[k]:g}",
                    f"{float(self.norm[rows].max()):.4g}",
                    f"{float(self.relative_gap[rows].max()):.1e}",
                    str(int(self.nonzeros[rows].sum())),
                    f"{float(self.state_residual[k]):.2e}",
                    f"{float(self.state_error[k]):.2e}",
                ]
            )
        return table

    def _caption(self) -> str:
        lines = [f"well-posed: {self.certificate}", f"output at the own equilibrium: {self.output_error:.2e} off"]
        if self.score == "accuracy" and self.before is not None and self.after is not None:
            lines.append(f"accuracy: {100 * self.before:.2f} % before, {100 * self.after:.2f} % after")
        elif self.score is not None:
            lines.append(f"{self.score}: {self.before:.4g} before, {self.after:.4g} after")
        return "\n".join([*lines, *self.notes])

    def __str__(self) -> str:
        page = StringIO()
        Console(file=page, width=110).print(self.table())
        return page.getvalue().rstrip()


def scored(outputs: Tensor, targets: Tensor) -> tuple[str, float]:
    """Returns the accuracy for whole-number targets, else the mean squared error.

    Example:
        >>> scored(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]))
        ('accuracy', 0.5)
    """
    targets = targets.to(outputs.device)
    if not targets.is_floating_point():
        return "accuracy", float((outputs.argmax(1) == targets.flatten()).double().mean())
    return "mean squared error", float((outputs - targets.reshape(outputs.shape)).square().mean())


def relative_errors(
    states: Tensor, wanted: Tensor, sizes: tuple[int, ...], factors: Tensor | None = None
) -> Tensor:  # (L,)
    """Computes |states - wanted| / |wanted| block by block; the plain error where wanted is zero.

    Args:
        states, wanted: ``(m, n)``.
        sizes: of the blocks.
        factors: by which `wanted` is multiplied, ``(n,)``.

    Example:
        >>> relative_errors(torch.tensor([[3.0, 5.0]]), torch.tensor([[2.0, 0.0]]), (1, 1))
        tensor([0.5000, 5.0000], dtype=torch.float64)
    """
    sums = torch.zeros(2, len(sizes), dtype=torch.float64)
    for start in range(0, len(states), PIECE):
        rows = slice(start, start + PIECE)
        one, other = (
            states[rows].cpu().double(),
            wanted[rows].cpu().double() * (1.0 if factors is None else factors),
        )
        for k, part in enumerate((one - other, other)):
            sums[k] += torch.stack([block.square().sum() for block in part.split(list(sizes), dim=1)])
    error, size = sums.sqrt()
    return error / torch.where(size > 0, size, 1.0)


def judged(model: ImplicitModel, states: States, targets: Tensor | None) -> dict[str, Any]:
    """Compares outputs of a model with those of the network, and both with targets, some samples at a time."""
    error = size = torch.zeros((), dtype=torch.float64)
    totals: dict[str, float] = {"before": 0.0, "after": 0.0}
    name = None
    for start in range(0, states.samples, PIECE):
        rows = slice(start, start + PIECE)
        with torch.no_grad():
            y, wanted = model(states.U[rows].to(model.B)).cpu(), states.Y[rows].cpu()
        error, size = error + (y.double() - wanted.double()).square().sum(), size + wanted.double().square().sum()
        if targets is not None:
            for key, part in (("before", wanted), ("after", y)):
                name, value = scored(part, targets[rows])
                totals[key] += value * len(y) / states.samples
    facts = {} if targets is None else {"score": name, **totals}
    return {"output_error": float(error.sqrt() / (size.sqrt() if size > 0 else 1.0)), **facts}


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
        certificate, output_error, score, before, after: as in `FitReport`, where they were computed.
        notes: what a reader should know.
    """

    layers: tuple[LayerFit, ...]
    kappa: float
    bound: str
    certificate: Certificate | None = None
    output_error: float | None = None
    score: str | None = None
    before: float | None = None
    after: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of the table."""
        return FILTERS

    @property
    def nonzeros(self) -> Tensor:  # (rows,)
        """Of all rows, in the order of the layers."""
        return torch.cat([layer.nonzeros for layer in self.layers])

    @property
    def allowed(self) -> int:
        """How many weights of the given layers are not zero."""
        return sum(layer.own for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """One minus the weights that are not zero over those of the given network that are not."""
        return 1.0 - int(self.nonzeros.sum()) / max(1, self.allowed)

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
        facts: dict[str, Any] = {
            "kappa": cap,
            "bound": self.bound,
            "sparsity": self.sparsity,
            "certified": self.certified,
        }
        if self.certificate is not None:
            facts |= {"well_posed": self.certificate.holds, "certificate": str(self.certificate)}
            facts |= {name: getattr(self, name) for name in ("output_error", "score", "before", "after")}
            facts["notes"] = list(self.notes)
        return {**facts, "layers": layers}

    def table(self) -> Table:
        """Lays the report out, one line a layer."""
        cap = f"rows within {self.kappa:g}" if math.isfinite(self.kappa) else "no cap"
        table = Table(title=f"{cap}; {100 * self.sparsity:.1f} % of the weights gone", box=box.SIMPLE)
        for name in FILTERS:
            table.add_column(name, justify="left" if name == "layer" else "right")
        for row in self.rows():
            table.add_row(*row)
        return table

    def rows(self) -> list[list[str]]:
        """Returns the cells of the table."""
        return [
            [
                layer.name,
                str(len(layer.gap)),
                " ".join(f"2^{shift:g}" for shift in layer.shifts),
                f"{float(layer.norm.max()):.4g}",
                f"{float(layer.relative_gap.max()):.1e}",
                f"{int(layer.nonzeros.sum())} of {layer.own}",
                f"{layer.misfit:.2e}",
            ]
            for layer in self.layers
        ]

    def __str__(self) -> str:
        page = StringIO()
        Console(file=page, width=110).print(self.table())
        return page.getvalue().rstrip()
