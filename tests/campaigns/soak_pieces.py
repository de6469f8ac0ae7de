"""The pieces of work of `soak`: every family of models, every solver, fits, bounds, attacks, files and reports."""

import contextlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from wellposed_lab.networks.mlp import MLP
from works import experiment, page, silent, sparsify, train

import wellposed as wp
from wellposed.checker import check
from wellposed.convex import open_states, record_states, save_states
from wellposed.estimators import ImplicitRegressor, ImplicitSequenceRegressor
from wellposed.models import DenseCell, PlainConvCell
from wellposed.robust import Box, CertifiedLoss, lipschitz, output_bounds
from wellposed.robust.attacks import fgsm, jsma, lp_attack, noise_attack, pgd, ranked_attack

Piece = Callable[[Path], object]
BATCH = 32
SOLVERS = ("picard", "anderson", "broyden", "newton")
METHODS = ("norm", "box", "interval", "l2", "crown", "optimised", "lp", "triangle")


def trained(make: Callable[[], nn.Module], shape: tuple[int, ...], folder: Path, **options: Any) -> None:
    """Trains a model for two epochs, with a checkpoint."""
    model, u = make(), torch.randn(BATCH, *shape)
    with torch.no_grad():
        output = model(u)
    target = torch.zeros_like(output[0] if isinstance(output, tuple) else output)
    loss = lambda y, z: nn.functional.mse_loss(y[0] if isinstance(y, tuple) else y, z)  # noqa: E731
    wp.fit(
        model,
        (u, target),
        loss,
        epochs=2,
        batch_size=16,
        progress=False,
        checkpoint=folder / "c.ckpt",
        **options,
    )


def certified(folder: Path) -> None:
    """Trains with proven bounds."""
    model = wp.ImplicitModel(4, 3, 8)
    u, classes = torch.rand(BATCH, 4), torch.arange(BATCH) % 3
    wp.fit(model, (u, classes), CertifiedLoss(model, 0.05), epochs=2, batch_size=16, progress=False)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{
        f"model, {condition}": (partial(wp.ImplicitModel, 4, 2, 8, condition=condition), (4,))
        for condition in ("inf", "weighted", "spectral", "mu", "monotone", "triangular")
    },
    "model, interpreted": (partial(wp.ImplicitModel, 4, 2, 8, executor="reference"), (4,)),
    "model, low rank": (partial(wp.ImplicitModel, 4, 2, 8, rank=2), (4,)),
    "recurrent": (partial(wp.ImplicitRNN, 4, 2, 6, out_features=2, num_layers=2, batch_first=True), (5, 4)),
    "equilibrium, dense": (lambda: wp.DEQ(DenseCell(4, 6)), (4,)),
    "equilibrium, convolution": (lambda: wp.DEQ(PlainConvCell(2, 3, dims=2), on_failure="ignore"), (2, 6, 6)),
    "noisy": (lambda: wp.models.Noisy(wp.ImplicitModel(4, 2, 8, stop=wp.Steps(9)), wp.Noise(signal=20.0)), (4,)),
    "multilayer perceptron": (lambda: MLP((4, 8, 2)), (4,)),
}


def ensemble(folder: Path) -> None:
    """Trains several seeds as one program."""
    together = wp.models.Ensemble.of(lambda: wp.ImplicitModel(4, 2, 6), seeds=[1, 2, 3])
    together(torch.randn(8, 4)).square().mean().backward()


def solved(solver: str, executor: str, folder: Path) -> None:
    """Solves and differentiates."""
    model = wp.ImplicitModel(4, 2, 12, solver=solver, executor=executor, on_failure="ignore")
    model(torch.randn(BATCH, 4)).sum().backward()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def fitted(folder: Path, jobs: int = 1, **options: Any) -> None:
    """Records a network in mapped files, and fits a model to it."""
    states = record_states(network(), torch.randn(64, 4).split(16), limit=0)
    save_states(states, folder / "states")
    wp.fit_states(open_states(folder / "states"), kappa=0.9, limit=0, jobs=jobs, folder=folder / "rows", **options)


def eliminated(folder: Path) -> None:
    """Screens and orders features."""
    wp.eliminate_features(record_states(network(), [torch.randn(60, 4)]), kappa=0.5)


def bounded(method: str, folder: Path) -> None:
    """Proves bounds of a model."""
    output_bounds(wp.ImplicitModel(4, 3, 8), Box.around(torch.rand(3, 4), 0.05), method)


def attacked(attack: Callable[..., Any], folder: Path, *more: Any) -> None:
    """Attacks a model."""
    u = torch.rand(6, 4)
    model = wp.ImplicitModel(4, 3, 8)
    attack(model, u, model(u).argmax(1), *more)


def files(folder: Path) -> None:
    """Writes, reads and verifies a model; shares it; converts a network."""
    model = wp.ImplicitModel(4, 3, 8, condition="weighted").double()
    wp.save(model, folder / "m.safetensors", certificate=True)
    check(folder / "m.safetensors")
    wp.load(folder / "m.safetensors")
    wp.models.save_pretrained(model, folder / "shared")
    wp.models.from_pretrained(folder / "shared")
    wp.save(
        wp.series(wp.to_implicit(network(), (4,)), wp.to_implicit(nn.Linear(3, 2), (3,))), folder / "f.safetensors"
    )
    wp.load(folder / "f.safetensors")


def estimated(folder: Path) -> None:
    """Fits, saves and loads estimators."""
    X = np.random.default_rng(0).normal(size=(40, 3))
    ImplicitRegressor(4, max_epochs=2).fit(X, X[:, 0]).save(folder / "e.safetensors")
    ImplicitRegressor.load(folder / "e.safetensors").predict(X)
    ImplicitSequenceRegressor(4, max_epochs=2).fit(X.reshape(10, 4, 3), X[:10, 0])


def quiet(work: Callable[[Path, Callable[[str], None]], str], folder: Path) -> None:
    """Does work of the fault campaign without a word."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        work(folder, silent)


PIECES: dict[str, Piece] = {
    **{f"training, {name}": partial(trained, make, shape) for name, (make, shape) in FAMILIES.items()},
    "training, ensemble": ensemble,
    "training, certified": certified,
    **{f"solve, {solver}": partial(solved, solver, "auto") for solver in SOLVERS},
    "solve, interpreted": partial(solved, "anderson", "reference"),
    "fit": fitted,
    "fit, lasso": partial(fitted, objective="lasso", strength=0.05),
    "fit, two threads": partial(fitted, jobs=2, target_sparsity=0.5),
    "elimination": eliminated,
    **{f"bound, {method}": partial(bounded, method) for method in METHODS},
    "Lipschitz constant": lambda folder: lipschitz(wp.ImplicitModel(4, 3, 8)),
    "attack, fgsm": lambda folder: attacked(fgsm, folder, 0.1),
    "attack, pgd": lambda folder: attacked(pgd, folder, 0.1),
    "attack, jsma": lambda folder: attacked(jsma, folder, 2),
    "attack, ranked": lambda folder: attacked(ranked_attack, folder, 0.5, 2),
    "attack, lp": lambda folder: attacked(lp_attack, folder, 0.1),
    "attack, noise": lambda folder: attacked(noise_attack, folder, "speckle", 0.1),
    "files": files,
    "estimators": estimated,
    "training, resumed": partial(quiet, train),
    "rows, kept": partial(quiet, sparsify),
    "experiment": partial(quiet, experiment),
    "report": partial(quiet, page),
}  # fmt: skip
