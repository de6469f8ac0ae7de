"""The pictures and the table of docs/guides/certify-deq.md: DEQs with a certificate, on a branch, and refused.

Run: python -m benchmarks.figures.certify_deq [--out FOLDER]
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import docs_folder
from wellposed.convert import to_implicit
from wellposed.data import load_images
from wellposed.errors import IllPosedError, require
from wellposed.forms import ImplicitForm
from wellposed.models import DEQ, ImplicitModel, spectral_norm
from wellposed.models.cells import (
    ConvCell,
    DenseCell,
    MultiscaleCell,
    PlainConvCell,
    RecallCell,
    TransformerCell,
)
from wellposed.robust import Box, certified, output_bounds
from wellposed.robust.attacks import pgd
from wellposed.training import fit

BLUE, ORANGE, GREY = "#1f5fd0", "#c2410c", "#4b5563"
TRIED = tuple(10.0 ** (-k / 2) for k in range(12))  # radii, the largest first


class Pooled(nn.Module):
    """A cell with max-pooling, whose Jacobians on a box the library does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.input = nn.Linear(8, 16), nn.Linear(4, 16)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        """Keeps the larger one of each pair."""
        pairs = self.state(x) + self.input(u)
        return nn.functional.max_pool1d(pairs[:, None], 2)[:, 0]


class Gated(nn.Module):
    """A cell that multiplies parts of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(4, 6)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        """One step."""
        step: Tensor = self.gru(u, x)
        return step


def contracting() -> nn.Module:
    """A dense cell whose weights have a spectral norm below one."""
    cell = DenseCell(4, 16)
    spectral_norm(cell.layers[0], 0.9)
    return DEQ(cell)


def monotone() -> nn.Module:
    """A loop that turns far, of which only the monotone condition proves something."""
    model = ImplicitModel(4, 3, 16, condition="monotone")
    with torch.no_grad():
        model.state.raw.copy_(torch.randn(16, 16))
    return model


CELLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "`ImplicitModel`, condition `monotone`": (monotone, (4,)),
    "`DenseCell`, `spectral_norm` 0.9": (contracting, (4,)),
    "`DenseCell`": (lambda: DEQ(DenseCell(4, 16)), (4,)),
    "`DenseCell`, three layers": (lambda: DEQ(DenseCell(4, 16, depth=3)), (4,)),
    "`PlainConvCell`": (lambda: DEQ(PlainConvCell(1, 4, dims=2)), (1, 6, 6)),
    "`RecallCell`": (lambda: DEQ(RecallCell(2, 4)), (2, 8)),
    "`ConvCell`, group norm": (lambda: DEQ(ConvCell(1, 4, groups=2)), (1, 6, 6)),
    "`TransformerCell`": (lambda: DEQ(TransformerCell(4, 2, 6)), (3, 4)),
    "`MultiscaleCell`": (lambda: DEQ(MultiscaleCell((2, 4), groups=2)), (2, 4, 4)),
    "`nn.GRUCell`": (lambda: DEQ(Gated(), state_shape=(6,)), (4,)),
    "max-pooling in the loop": (lambda: DEQ(Pooled(), state_shape=(8,)), (4,)),
}


def row(name: str) -> str:
    """Converts one cell, asks for a certificate and then for a branch, and writes what was proven."""
    make, shape = CELLS[name]
    torch.manual_seed(0)
    form = to_implicit(make().double().eval(), shape)
    u = torch.rand(1, *shape, dtype=torch.float64)
    try:
        condition = form.order.loops[0].certificate.condition
        proof, branch = f"proven by {condition}", "every radius"
    except IllPosedError as error:
        proof, branch = f"not proven: {reason(str(error))}", largest_branch(form, u)
    print(name, form.sizes[0], proof, branch, flush=True)
    return f"| {name} | {form.sizes[0]} | {proof} | {branch} |"


def reason(text: str) -> str:
    """Shortens why there is no certificate."""
    through = re.search(r"goes through (.+?), a map of blocks with (.+?);", text)
    if through is not None:
        return f"{through[1]} has {through[2]}"
    values = dict(re.findall(r"^  (\w+): (\S+) >= 1 fails", text, re.MULTILINE))
    return ", ".join(f"{key} {float(values[key]):.3g}" for key in ("inf", "weighted", "spectral") if key in values)


def largest_branch(form: ImplicitForm, u: Tensor) -> str:
    """Finds the largest of some radii at which one branch is proven."""
    for radius in TRIED:
        try:
            bounds = output_bounds(form, Box.around(u, radius, None, None))
        except IllPosedError as error:
            return "refused: " + str(error).rpartition("no branch of equilibria: ")[2]
        assert bounds.branch is not None
        if bool(bounds.branch.proven.all()):
            return f"one branch, to {radius:.1g}"
    return "not proven"


def write_table(path: Path) -> None:
    """Writes a line for every cell."""
    head = ["| cell | states | for all inputs | around one input |", "|---|---:|---|---|"]
    path.write_text("\n".join([*head, *(row(name) for name in CELLS)]) + "\n")


def draw_branch(pyplot: Any, path: Path) -> None:
    """Draws the equilibria of x = tanh(3x + u) by z = 3x + u, and the boxes that are proven on one branch."""
    one = torch.ones(1, 1, dtype=torch.float64)
    form, center = ImplicitForm(3 * one, one, one, activation="tanh"), 0.3
    z = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    figure, axes = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    axes.plot(z - 3 * z.tanh(), z, color=GREY, linewidth=1.5, label="equilibria z = 3 tanh(z) + u")
    for radius, shade in ((1.5, 0.14), (1.0, 0.2), (0.5, 0.3)):
        branch = output_bounds(form, Box.around(center * one, radius, None, None)).branch
        assert branch is not None and bool(branch.proven.all())
        low, high = (float(end) for end in branch.preactivations)
        label = "proven boxes: radius 0.5, 1 and 1.5" if radius == 1.0 else None
        corner = (center - radius, low)
        axes.add_patch(
            pyplot.Rectangle(corner, 2 * radius, high - low, color=BLUE, alpha=shade, lw=0, label=label)
        )
        print("radius", radius, low, high)
    refused = output_bounds(form, Box.around(center * one, 1.61, None, None)).branch
    assert refused is not None and not bool(refused.proven.any())
    fold = torch.tensor(2 / 3).sqrt().atanh()
    axes.plot(fold - 3 * fold.tanh(), fold, "o", color=ORANGE)
    axes.annotate("the branch ends:\nradius 1.61 is refused", (-1.303, 1.146), (-2.9, -1.2), color=ORANGE,
                  arrowprops={"arrowstyle": "-", "color": ORANGE}, fontsize=9)  # fmt: skip
    axes.plot(
        center, float(3 * refused.states + center), "o", color=BLUE, label="what the solver finds at u = 0.3"
    )
    axes.set(xlabel="input u", ylabel="pre-activation z", xlim=(-3, 3), ylim=(-5.5, 6.5))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=150)


def classifier(bound: float) -> nn.Module:
    """Trains a DEQ on digits, the spectral norm of its state matrix bounded."""
    torch.manual_seed(0)
    train, cell = load_images("digits", "train"), DenseCell(64, 24)
    spectral_norm(cell.layers[0], bound)
    network = nn.Sequential(DEQ(cell), nn.Linear(24, 10))
    fit(network, (train.flat(), train.labels), nn.functional.cross_entropy, epochs=8, batch_size=64,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 5e-3), progress=False)  # fmt: skip
    return network.eval()


def draw_digits(pyplot: Any, path: Path) -> None:
    """Draws certified and attacked accuracy of a DEQ with a certificate and of one without."""
    test, radii = load_images("digits", "test"), (0.0, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05)
    u, labels = test.flat()[:60], test.labels[:60]
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for colour, (bound, name) in zip((BLUE, ORANGE), ((0.9, "well-posed"), (1.2, "no certificate")), strict=True):
        network = classifier(bound)
        proven = [float(certified(network, Box.around(u, r), labels).double().mean()) for r in radii]
        left = [pgd(network, u, labels, r, steps=20).accuracy for r in radii]
        print(name, proven, left, flush=True)
        axes.fill_between(radii, proven, left, color=colour, alpha=0.15)
        axes.plot(radii, proven, color=colour, marker="o", markersize=4, label=f"{name}: certified")
        axes.plot(radii, left, color=colour, marker="x", linestyle="--", label=f"{name}: attacked")
    axes.set(xlabel="largest change of a pixel", ylabel="accuracy on 60 unseen digits", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Writes all."""
    folder = docs_folder(__doc__, __file__) / "guides"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pyplot = require("matplotlib.pyplot", extra="plots")
    draw_branch(pyplot, folder / "certify-deq-branch.png")
    draw_digits(pyplot, folder / "certify-deq-digits.png")
    write_table(folder / "certify-deq-cells.inc")


if __name__ == "__main__":
    main()
