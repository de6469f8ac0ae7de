"""The pictures of docs/concepts/robustness-bounds.md and docs/guides/attack.md, of the models in the package.

Run: python -m benchmarks.figures.robustness [--out FOLDER]
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import docs_folder
from wellposed.data import load_images
from wellposed.errors import require
from wellposed.models import ImplicitModel, load_reference
from wellposed.robust import Box, certified, output_bounds
from wellposed.robust.attacks import pgd
from wellposed.robust.draw import gallery

MODELS = {"digits": "trained as usual", "digits-robust": "trained by bounds"}
METHODS = {"norm": "#4b5563", "box": "#a86a00", "interval": "#c2410c", "crown": "#1f5fd0", "optimised": "#00795a"}
RADII = (0.003, 0.01, 0.03, 0.1)
SAMPLES = 100


def models() -> dict[str, ImplicitModel]:
    """Loads the two classifiers."""
    references = {name: load_reference(name) for name in MODELS}
    return {name: model for name, model in references.items() if isinstance(model, ImplicitModel)}


def reached(model: ImplicitModel, u: torch.Tensor, radius: float) -> float:
    """Measures how far attacks on each output apart move it, from lowest to highest, on average."""
    steps, widths = 20, []
    for output in range(10):
        ends = []
        for sign in (-1.0, 1.0):
            attacked = u.clone()
            for _ in range(steps):
                attacked.requires_grad_()
                (slope,) = torch.autograd.grad(model(attacked)[:, output].sum(), attacked)
                attacked = (attacked + sign * 3 * radius / steps * slope.sign()).detach()
                attacked = torch.clamp(attacked, u - radius, u + radius).clamp(0, 1)
            ends.append(model(attacked)[:, output].detach())
        widths.append(ends[1] - ends[0])
    return float(torch.stack(widths).mean())


def draw_widths(pyplot: Any, path: Path) -> None:
    """Draws the widths of all methods over the radius."""
    u = load_images("digits", "test").flat()[:20]
    figure, axes = pyplot.subplots(1, 2, figsize=(7.5, 3.4), sharey=True, layout="constrained")
    for axis, (name, model) in zip(axes, models().items(), strict=True):
        for method, colour in METHODS.items():
            with torch.no_grad():
                widths = [float(output_bounds(model, Box.around(u, r), method).width.mean()) for r in RADII]
            axis.loglog(RADII, widths, color=colour, marker="o", markersize=4, label=method)
            print(name, method, [f"{width:.3g}" for width in widths])
        attacks = [reached(model, u, radius) for radius in RADII]
        axis.loglog(RADII, attacks, "kx", label="attacked: at least")
        print(name, "attacked", [f"{width:.3g}" for width in attacks])
        axis.set(title=f"{name}: {MODELS[name]}", xlabel="largest change of a pixel")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean width of an output's bounds")
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def draw_classes(pyplot: Any, path: Path) -> None:
    """Draws certified and attacked accuracy over the radius."""
    test, radii = load_images("digits", "test"), (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1)
    u, labels = test.flat()[:SAMPLES], test.labels[:SAMPLES]
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for colour, (name, model) in zip(("#c2410c", "#1f5fd0"), models().items(), strict=True):
        proven = [float(certified(model, Box.around(u, r), labels).double().mean()) for r in radii]
        broken = [pgd(model, u, labels, r, steps=40, restarts=2).accuracy for r in radii]
        print(name, proven, broken)
        axes.fill_between(radii, proven, broken, color=colour, alpha=0.15)
        axes.plot(radii, proven, color=colour, marker="o", markersize=4, label=f"{name}: certified")
        axes.plot(radii, broken, color=colour, marker="x", linestyle="--", label=f"{name}: attacked")
    axes.set(xlabel="largest change of a pixel", ylabel=f"accuracy on {SAMPLES} unseen digits", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def draw_gallery(path: Path) -> None:
    """Draws attacked digits."""
    test, model = load_images("digits", "test"), models()["digits"]
    u, labels = test.flat()[:100], test.labels[:100]
    gallery(model, u, pgd(model, u, labels, 0.1, steps=20), labels, path)


def main() -> None:
    """Draws all."""
    folder = docs_folder(__doc__, __file__)
    torch.set_num_threads(1)
    pyplot = require("matplotlib.pyplot", extra="plots")
    draw_widths(pyplot, folder / "concepts" / "robustness-widths.png")
    draw_classes(pyplot, folder / "concepts" / "robustness-digits.png")
    draw_gallery(folder / "guides" / "attack-gallery.png")


if __name__ == "__main__":
    main()
