"""Trains a DEQ transformer and a multiscale DEQ on handwritten digits, on a CPU in two or three minutes.

    python examples/digits.py            # about 300 steps each
    python examples/digits.py --quick    # a short run, to see that it works

Prints how the loss fell, how well unseen digits are told apart and how hard the equilibria were to find, and draws
the losses if matplotlib is installed. Needs scikit-learn for the data: pip install 'wellposed[sklearn]'.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from wellposed import Relative, fit
from wellposed.equilibrium import watch
from wellposed.errors import MissingExtraError, require
from wellposed.models.cells import TransformerCell
from wellposed.models.deq import DEQ
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.norms import jacobian_penalty

BATCH = 64
STOP = Relative(1e-3, norm="2")
Split = tuple[Tensor, Tensor]


class PatchTransformer(nn.Module):
    """Reads an 8 x 8 digit as a sequence of sixteen 2 x 2 patches and classifies the mean of their equilibria."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(4, width), nn.Parameter(torch.randn(16, width))
        cell = TransformerCell(width, heads, 2 * width, dropout=0.1)
        self.deq = DEQ(cell, stop=STOP, max_steps=100, on_failure="ignore")  # the table counts failures
        self.classifier = nn.Linear(width, 10)
        self.penalty: Tensor | float = 0.0

    def forward(self, images: Tensor) -> Tensor:  # (B, 1, 8, 8) -> (B, 10)
        u = self.embed(unfold(images, 2, stride=2).mT) + self.position  # (B, 16, width)
        x = self.deq(u)
        self.penalty = 0.3 * jacobian_penalty(self.deq.cell, x, u).mean() if self.training else 0.0
        return self.classifier(x.mean(1))


def multiscale() -> MultiscaleDEQ:
    """Builds a small multiscale DEQ with three resolutions: 8 x 8, 4 x 4 and 2 x 2."""
    channels = (16, 32, 32)
    return MultiscaleDEQ(
        1,
        10,
        channels=channels,
        head_channels=channels,
        final_channels=64,
        groups=4,
        stop=STOP,
        on_failure="ignore",
    )


def digits() -> tuple[Split, Split]:
    """Loads 1797 digits, centred and scaled; the last fifth is for the test."""
    data = require("sklearn.datasets", extra="sklearn").load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None]
    labels = torch.tensor(data.target)[order]
    cut = 4 * len(labels) // 5
    images = (images - images[:cut].mean()) / images[:cut].std()
    return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])


@dataclass(frozen=True)
class Quality:
    """How a model does on some data."""

    loss: float
    accuracy: float
    steps: float
    not_converged: float

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, data: Split) -> "Quality":
        """Evaluates a model."""
        model.eval()
        with watch() as log:
            logits = torch.cat([model(images) for images in data[0].split(256)])
        accuracy = (logits.argmax(1) == data[1]).float().mean()
        return cls(float(cross_entropy(logits, data[1])), float(accuracy), log.mean_steps, log.failed_share)


@dataclass(frozen=True)
class Result:
    """A trained model in numbers."""

    name: str
    parameters: int
    before: Quality
    after: Quality
    curve: list[float]  # cross-entropy of every training step


def train(name: str, model: nn.Module, train_data: Split, test_data: Split, steps: int) -> Result:
    """Trains a model for about `steps` steps and tests it before and after."""
    before, curve = Quality.of(model, test_data), []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        entropy = cross_entropy(logits, labels)
        curve.append(float(entropy.detach()))
        return entropy + getattr(model, "penalty", 0.0)

    fit(
        model,
        train_data,
        loss,
        epochs=max(1, round(steps / math.ceil(len(train_data[1]) / BATCH))),
        batch_size=BATCH,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        schedule="cosine",
        clip=1.0,
        progress=name,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    return Result(name, count, before, Quality.of(model, test_data), curve)


def table(results: list[Result]) -> Table:
    """Arranges the results."""
    shown = Table(
        title="Handwritten digits", caption="loss, accuracy, solver steps and failures on 360 test digits"
    )
    for heading in ("model", "weights", "loss before", "after", "accuracy", "steps", "failed"):
        shown.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for r in results:
        losses = f"{r.before.loss:.3f}", f"{r.after.loss:.3f}"
        solves = f"{r.after.steps:.1f}", f"{r.after.not_converged:.1%}"
        shown.add_row(r.name, f"{r.parameters:,}", *losses, f"{r.after.accuracy:.1%}", *solves)
    return shown


def draw(results: list[Result], path: Path, window: int = 10) -> None:
    """Draws the training losses, every step faintly and their running mean."""
    pyplot = require("matplotlib.pyplot", extra="plots")
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for colour, r in zip(("#1f77b4", "#d95f02"), results, strict=True):
        means = torch.tensor(r.curve).unfold(0, min(window, len(r.curve)), 1).mean(1)
        axes.plot(range(1, len(r.curve) + 1), r.curve, color=colour, alpha=0.25, linewidth=0.8)
        start = len(r.curve) - len(means) + 1
        axes.plot(range(start, len(r.curve) + 1), means, color=colour, label=f"{r.name} ({r.after.accuracy:.1%})")
    axes.set(xlabel="training step", ylabel="cross-entropy", yscale="log", title="Handwritten digits")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="running mean (test accuracy)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Trains both models and shows the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model (default 300)")
    parser.add_argument("--quick", action="store_true", help="only 40 steps of each model")
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="picture of the losses (digits.png)")
    options = parser.parse_args()
    steps = 40 if options.quick else options.steps
    try:
        train_data, test_data = digits()
    except MissingExtraError as error:
        raise SystemExit(str(error)) from None
    torch.manual_seed(0)
    models = {"DEQ transformer": PatchTransformer(), "multiscale DEQ": multiscale()}
    results = [train(name, model, train_data, test_data, steps) for name, model in models.items()]
    console = Console()
    console.print(table(results))
    try:
        draw(results, options.out)
        console.print(f"losses drawn in {options.out}", soft_wrap=True)
    except MissingExtraError as error:
        console.print(f"no picture: {error}", soft_wrap=True)


if __name__ == "__main__":
    main()
