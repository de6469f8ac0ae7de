"""The picture of docs/concepts/gradients.md: how far shortcuts are off, and what each gradient costs.

A model x = relu(Ax + Bu + b) of 64 states is trained a little at several caps of |A|, so that its matrices are
those of training and not random ones. Then one gradient of its loss by all parameters is computed in every way, in
double precision at a tolerance of 1e-6, and compared with that at 1e-14.

Run: python -m benchmarks.figures.gradients [--out FOLDER]
"""

import torch
from torch import Tensor

from benchmarks.harness import cpu_seconds, docs_folder
from wellposed import Implicit, ImplicitModel, Phantom, Relative, Unrolled, fit
from wellposed.data import load_images
from wellposed.equilibrium import Gradient
from wellposed.errors import require

CAPS = (0.3, 0.5, 0.7, 0.9, 0.97, 0.99)
WAYS: dict[str, Gradient] = {
    "Phantom(1), Jacobian-free": Phantom(1),
    "Phantom(5)": Phantom(5),
    "Phantom(20)": Phantom(20),
    "Unrolled": Unrolled(),
    "Implicit": Implicit(),
}
COLOURS = ("#c2410c", "#a86a00", "#b0508a", "#00795a", "#1f5fd0")


def trained(kappa: float) -> tuple[ImplicitModel, Tensor, Tensor]:
    """Trains a classifier of digits; slowly converging ones use all of their cap."""
    torch.manual_seed(0)
    images = load_images("digits", "train")
    model = ImplicitModel(64, 10, 64, kappa=kappa, bias=True, solver="picard", max_steps=2000)
    fit(model, (images.flat(), images.labels), torch.nn.functional.cross_entropy, epochs=15, progress=False)
    model.executor = "reference"
    return model.double(), images.flat().double()[:256], images.labels[:256]


def gradient(model: ImplicitModel, u: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Returns one gradient by all parameters and its CPU seconds."""
    model.zero_grad()
    spent, _ = cpu_seconds(lambda: torch.nn.functional.cross_entropy(model(u), labels).backward())
    return torch.cat([part.grad.flatten() for part in model.parameters() if part.grad is not None]), spent


def main() -> None:
    """Measures and draws."""
    folder = docs_folder(__doc__, __file__)
    torch.set_num_threads(1)
    pyplot = require("matplotlib.pyplot", extra="plots")
    errors: dict[str, list[float]] = {name: [] for name in WAYS}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for kappa in CAPS:
        model, u, labels = trained(kappa)
        model.stop, model.gradient = Relative(1e-14), Implicit()
        exact, _ = gradient(model, u, labels)
        model.stop = Relative(1e-6)
        for name, way in WAYS.items():
            model.gradient = way
            runs = [gradient(model, u, labels) for _ in range(5)]
            errors[name].append(float((runs[0][0] - exact).norm() / exact.norm()))
            times[name].append(1000 * min(spent for _, spent in runs))
        print(kappa, {name: f"{errors[name][-1]:.1e} {times[name][-1]:.1f} ms" for name in WAYS})
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    for colour, name in zip(COLOURS, WAYS, strict=True):
        axes[0].semilogy(CAPS, errors[name], color=colour, marker="o", markersize=4, label=name)
        axes[1].semilogy(CAPS, times[name], color=colour, marker="o", markersize=4)
    axes[0].set(xlabel="cap kappa of a trained model", ylabel="relative error of the gradient")
    axes[1].set(xlabel="cap kappa of a trained model", ylabel="forward and backward, ms")
    axes[0].legend(frameon=False, fontsize=8)
    for panel in axes:
        panel.grid(alpha=0.3)
    figure.savefig(folder / "concepts" / "choosing-a-gradient.png", dpi=150)


if __name__ == "__main__":
    main()
