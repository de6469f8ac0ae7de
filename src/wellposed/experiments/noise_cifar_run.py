"""Runs that train a multiscale equilibrium model or its convolutional twin and test them under noise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.baselines.convnet import ConvNet
from wellposed.baselines.mlp import parameter_count
from wellposed.equilibrium import (
    Broyden,
    MeanRelative,
    Phantom,
    Picard,
    Relative,
    RobbinsMonro,
    Steps,
    Unrolled,
    watch,
)
from wellposed.equilibrium.solver import Solver
from wellposed.experiments.config import identity
from wellposed.experiments.photograph_parts import photographs, shrunk
from wellposed.experiments.record import Result, Value
from wellposed.experiments.resnet import DEVIATION, MEAN
from wellposed.experiments.run import Context, Run
from wellposed.models import MultiscaleDEQ, Noise, Noisy, jacobian_penalty
from wellposed.models.noise import Disturbance, disturbed_signals
from wellposed.tasks.images import Images, load_images
from wellposed.training import History, fit

CHANNELS = (32, 64, 128, 128)  # from fine to coarse, 004 Table 3
STEPS, TIGHT, LOOSE, WINDOW = 40, 1e-4, 0.01, 5  # of the solver in training and test; 004 prints no window
SHALLOW = 5  # unrolled steps of pretraining
SOLVERS: dict[str, Solver] = {"broyden": Broyden(STEPS), "stochastic-unrolling": RobbinsMonro(0.2)}
PARTS = {"cpu": 50, "cuda": 500}  # test images at once; Broyden's memory is forty states
Kind = Literal["mdeq", "ffw"]


@dataclass(frozen=True, kw_only=True)
class CifarNoiseRun(Run):
    """Trains without noise and measures accuracy under signal noise of several strengths.

    Args:
        data: "cifar10", or "digits" for tests.
        model: "mdeq", the multiscale DEQ of 004 Table 3, or "ffw", the convolutional network of 004 Table 4.
        depth: branches of the one, cells of the other.
        solver: of the DEQ in the test, by its name in 004; Broyden, as in Table 3, if None.
        narrow: by which channels are divided.
        side: of the images, which are averaged down to it.
        images, epochs, batch_size, learning_rate: of the training, by Adam with a cosine.
        pretraining: epochs with a few unrolled steps in place of equilibria.
        jacobian: weight of the DEQ's Jacobian penalty.
        points: decibels of the noise in the test.
        samples: test images.
    """

    data: str
    model: Kind
    depth: int
    solver: str | None = None
    narrow: int = 1
    side: int = 32
    images: int = 40_000
    epochs: int = 10
    batch_size: int = 256
    learning_rate: float = 1e-3
    pretraining: int = 1
    jacobian: float = 0.4
    points: tuple[float, ...] = (20.0, 10.0, 5.0, 0.0)
    samples: int = 10_000
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @property
    def labels(self) -> tuple[str, str, str | None]:
        kind = "mdeq" if self.model == "mdeq" else "ffw-conv"
        return self.data, f"{kind}-{self.depth}" + (f"-{self.solver}" if self.solver else ""), None

    @property
    def tester(self) -> tuple[str, tuple[float, ...], int]:
        """What two tests of one model must share to be the same."""
        return self.solver or "broyden", self.points, self.samples

    @property
    def together(self) -> bool:
        return True

    @property
    def family(self) -> str:
        """The same for runs that test the same trained model."""
        network = (self.data, self.model, self.depth, self.narrow, self.side)
        trained = (self.images, self.epochs, self.batch_size, self.learning_rate, self.pretraining, self.jacobian)
        return identity((self.suite, self.scale, self.seed, network, trained))

    def carry_out(self, runs: Sequence[Self], context: Context) -> list[Result]:
        train = self._images("fit")
        train = train.subset(min(self.images, len(train)), self.seed)
        model = self.build(train).to(context.device)
        history = self._fit(model, train, context)
        tested = min(self.samples, len(self._images("holdout")))
        facts: dict[str, Any] = {"images": len(train), "source": train.source, "tested": tested}
        series = {"train_loss": [float(f"{loss:.6g}") for loss in history.train_loss.tolist()]}
        if self.model == "mdeq":
            series["steps"] = [round(steps, 3) for steps in history.steps.tolist()]
        tests = {run.tester: run.tested(model, context.device) for run in runs}
        return [Result(tuple(tests[run.tester]), series, facts) for run in runs]

    def build(self, train: Images) -> nn.Module:
        """Makes the model, untrained."""
        channels, classes = train.pixels.shape[1], len(train.classes)
        with torch.random.fork_rng(()):
            torch.manual_seed(self.seed)
            if self.model == "ffw":
                return ConvNet(channels, classes, channels=128 // self.narrow, cells=self.depth,
                               final_channels=400 // self.narrow)  # fmt: skip
            scales = tuple(count // self.narrow for count in CHANNELS[: self.depth])
            return MultiscaleDEQ(channels, classes, channels=scales, head_channels=scales, max_steps=STEPS,
                                 final_channels=400 // self.narrow, groups=8 if self.narrow == 1 else 2,
                                 on_failure="ignore")  # fmt: skip

    def _images(self, split: str) -> Images:
        found = photographs(split) if self.data == "cifar10" else load_images(self.data, split)
        return shrunk(found, self.side)

    def _fit(self, model: nn.Module, train: Images, context: Context) -> History:
        given: list[Any] = []

        def loss(y: Tensor, target: Tensor) -> Tensor:
            total = cross_entropy(y, target)
            if not given or not model.training:
                return total
            injection, states = given
            return total + self.jacobian * jacobian_penalty(model.deq.cell, states, injection).mean()  # type: ignore

        def on_epoch(history: History) -> None:
            if isinstance(model, MultiscaleDEQ):
                prepare(model, len(history) < self.pretraining)
            if context.progress:
                print(f"{self.labels[1]}, epoch {len(history)}: loss {float(history.train_loss[-1]):.4f}, "
                      f"{float(history.seconds[-1]):.1f} s", flush=True)  # fmt: skip

        if isinstance(model, MultiscaleDEQ):
            prepare(model, self.pretraining > 0)
            if self.jacobian:
                model.deq.register_forward_hook(lambda _, u, x: given.__setitem__(slice(None), [u[0], x]))
        u, labels = (part.to(context.device) for part in (standardised(train), train.labels))
        history = fit(model, (u, labels), loss, epochs=self.epochs, batch_size=self.batch_size, seed=self.seed,
                      optimizer=lambda p: torch.optim.Adam(p, self.learning_rate), schedule="cosine",
                      device=context.device, progress=False, on_epoch=on_epoch)  # fmt: skip
        given.clear()
        model.eval()
        return history

    @torch.no_grad()
    def tested(self, model: nn.Module, device: str) -> list[Value]:
        """Returns the numbers of a trained model, with this run's solver."""
        test = self._images("holdout")
        u, labels = standardised(test)[: self.samples], test.labels[: self.samples]
        if isinstance(model, MultiscaleDEQ):
            model.deq.solver, model.deq.stop = SOLVERS[self.tester[0]], MeanRelative(LOOSE, WINDOW)
        values = [Value("parameters", float(parameter_count(model)))]
        for at in (None, *self.points):
            generator = torch.Generator(device).manual_seed(self.seed)
            right, part = 0, PARTS["cpu" if device == "cpu" else "cuda"]
            with watch() as log:
                for some, target in zip(u.split(part), labels.split(part), strict=True):
                    y = disturbed(model, some.to(device), Noise(signal=at, generator=generator))
                    right += int((y.argmax(1).cpu() == target).sum())
            values.append(Value("accuracy", right / len(u), at))
            if log.forward:
                values.append(Value("steps", log.mean_steps, at))
        return values


def prepare(model: MultiscaleDEQ, shallow: bool) -> None:
    """Sets how equilibria are found in training: by a few steps, or by Broyden to 1e-4 with phantom gradients."""
    deq = model.deq
    if shallow:
        deq.solver, deq.stop, deq.gradient = Picard(), Steps(SHALLOW), Unrolled()
    else:
        deq.solver, deq.stop, deq.gradient = SOLVERS["broyden"], Relative(TIGHT, norm="2"), Phantom(SHALLOW, 0.5)


def disturbed(model: nn.Module, u: Tensor, noise: Noise) -> Tensor:
    """Evaluates a model with noise before the nonlinearities of its cells, and nowhere else."""
    if isinstance(model, MultiscaleDEQ):
        y: Tensor = Noisy(model, noise)(u)
        return y
    assert isinstance(model, ConvNet)
    with _disturbed_cells(model, noise, len(u)):
        y = model(u)
    return y


@contextmanager
def _disturbed_cells(model: ConvNet, noise: Noise, batch: int) -> Iterator[None]:
    points = [layer.activation for layer in model.layers]
    with disturbed_signals(points, Disturbance(noise, batch)):  # type: ignore[arg-type]
        yield


def standardised(images: Images) -> Tensor:  # (N, C, H, W)
    """Returns pixels of about mean zero and variance one."""
    u = images.to_float()
    if u.shape[1] != len(MEAN):
        return (u - 0.3) / 0.35
    return (u - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
