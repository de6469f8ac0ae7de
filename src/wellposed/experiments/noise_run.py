"""Runs that train one half of a pair of 004, perhaps under noise, and test it under noise of many strengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.equilibrium import watch
from wellposed.experiments.noise_models import Pair, penalty, sensitivities, under_noise
from wellposed.experiments.record import Result, Value
from wellposed.experiments.run import Context, Run
from wellposed.tasks.images import Images, load_images
from wellposed.training import fit

PROBED = 8  # images whose sensitivity is measured
PART = 500  # images that are evaluated at once


@dataclass(frozen=True, kw_only=True)
class NoiseRun(Run):
    """Trains a classifier and measures its accuracy under signal noise.

    ``accuracy`` without a point is without noise, at a point it is under noise of so many decibels;
    ``accuracy_gain`` is that of a DEQ over the FFW of its size, trained alike. Models trained without noise also
    get ``sensitivity``, and a DEQ ``sensitivity_ratio`` over that FFW, and ``jacobian_radius``.

    Args:
        data: name of the images.
        pair: the model.
        noise: decibels of the noise in training; None for none.
        jacobian: weight of the Jacobian penalty.
        images, epochs, batch_size, learning_rate: of the training, by Adam.
        points: decibels of the noise in the test.
        samples: test images.
        passes: whose mean logits decide, the control for the averaging that an equilibrium does by itself.
    """

    data: str
    pair: Pair
    noise: float | None = None
    jacobian: float = 0.0
    images: int = 12_000
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 1e-3
    points: tuple[float, ...] = (20.0, 10.0, 0.0)
    samples: int = 2_500
    passes: int = 1

    @property
    def labels(self) -> tuple[str, str, str | None]:
        trained = "" if self.noise is None else f"-noise-{self.noise:g}db"
        extra = ("-jacobian" if self.jacobian else "") + (f"-mean-{self.passes}" if self.passes > 1 else "")
        return self.data, f"{self.pair.name}{trained}{extra}", None

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [Result(tuple(run.measured(context.device))) for run in runs]

    def measured(self, device: str) -> list[Value]:
        """Trains and returns all numbers of this run."""
        model, twin = self.trained(self.pair, device), None
        if self.pair.kind == "deq" and not self.pair.total:
            twin = self.trained(Pair("ffw", self.pair.layers, projection=self.pair.projection), device)
        values = [Value("accuracy", self.accuracy(model, None)[0]), *self._size(model)]
        for at in self.points:
            found, steps = self.accuracy(model, at)
            values.append(Value("accuracy", found, at))
            if steps is not None:
                values.append(Value("steps", steps, at))
            if twin is not None:
                values.append(Value("accuracy_gain", found - self.accuracy(twin, at)[0], at))
        return values + (self._sensitivity(model, twin) if self.noise is None and self.passes == 1 else [])

    def trained(self, pair: Pair, device: str) -> nn.Module:
        """Returns a model trained as this run says; trained once for all runs of a process."""
        settings = self.data, self.noise, self.jacobian, self.images, self.epochs, self.batch_size
        return _trained(pair, *settings, self.learning_rate, self.seed, device)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, decibels: float | None) -> tuple[float, float | None]:
        """Returns the share of test images that are classified rightly, and the mean steps of a DEQ."""
        noisy = under_noise(model, decibels, self.seed, training=False)
        device = next(model.parameters()).device
        u, labels = pair_of(self.data, "test")
        right = 0
        with watch() as log:
            for part, target in zip(
                u[: self.samples].split(PART), labels[: self.samples].split(PART), strict=True
            ):
                logits = torch.stack([noisy(part.to(device)).softmax(1) for _ in range(self.passes)]).mean(0)
                right += int((logits.argmax(1).cpu() == target).sum())
        steps = [count.double().mean() for _, count in log.forward]
        return right / min(self.samples, len(u)), float(torch.stack(steps).mean()) if steps else None

    def _size(self, model: nn.Module) -> list[Value]:
        return [Value("parameters", float(sum(p.numel() for p in model.parameters())))]

    def _sensitivity(self, model: nn.Module, twin: nn.Module | None) -> list[Value]:
        device = next(model.parameters()).device
        u = pair_of(self.data, "test")[0][:PROBED].to(device)
        own, radius = sensitivities(model, u, self.seed)
        values = [Value("sensitivity", own), Value("jacobian_radius", radius)]
        if twin is not None:
            values.append(Value("sensitivity_ratio", own / sensitivities(twin, u, self.seed)[0]))
        return values


def pair_of(data: str, split: str) -> tuple[Tensor, Tensor]:
    """Returns flat images and classes of a split."""
    images = _images(data, split)
    return images.flat(), images.labels


@lru_cache(maxsize=4)
def _images(data: str, split: str) -> Images:
    return load_images(data, split)


@lru_cache(maxsize=8)
def _trained(
    pair: Pair, data: str, noise: float | None, weight: float, images: int, epochs: int, batch: int, rate: float,
    seed: int, device: str,
) -> nn.Module:  # fmt: skip
    u, labels = pair_of(data, "train")
    rows = torch.randperm(len(u), generator=torch.Generator().manual_seed(seed))[:images]
    model = pair.build(u.shape[1], len(_images(data, "train").classes), seed).to(device)
    noisy = under_noise(model, noise, seed, training=True)
    given: list[Tensor] = []
    noisy.register_forward_pre_hook(lambda _, arguments: given.__setitem__(slice(None), [arguments[0]]))

    def loss(y: Tensor, target: Tensor) -> Tensor:
        fit_ = cross_entropy(y, target)
        return fit_ + weight * penalty(model, given[0]) if weight else fit_

    fit(noisy, (u[rows], labels[rows]), loss, epochs=epochs, batch_size=batch, seed=seed, device=device,
        optimizer=lambda parameters: torch.optim.Adam(parameters, rate), progress=False)  # fmt: skip
    return model.eval()
