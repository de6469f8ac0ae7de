"""Multiscale equilibrium models and convolutional networks on CIFAR-10 under noise (004 section 4.1.2).

`photographs` returns CIFAR-10 as far as it is here: whole, or those thousands of images whose sprites are present.
`CifarNoiseRun` trains a multiscale equilibrium model or its convolutional twin and tests it under noise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.data import cifar, files
from wellposed.data.cache import DataFile, MissingDataError, fetch
from wellposed.data.images import CLASSES, Images, load_images
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
from wellposed.equilibrium.solvers import Solver
from wellposed.models import MultiscaleDEQ, Noise, Noisy, jacobian_penalty
from wellposed.models.noise import NoiseDraws, disturbed_signals
from wellposed.training import History, fit
from wellposed_lab.cache import cached
from wellposed_lab.config import JUDGED_SCALES, Scale, identity
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Context, Role, Run
from wellposed_lab.engine.store import Record, Result, Value
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.resnet import DEVIATION, MEAN
from wellposed_lab.networks.twins import ConvNet
from wellposed_lab.report.findings import median_of

NAME = "cifar10"
FIRST = {"fit": 0, "holdout": 40}  # sprite of a split


@cached
def photographs(split: str) -> Images:
    """Returns the images of "fit" or "holdout" that are here; `source` says which.

    Without a single one of "holdout" the test images stand in for it.

    Raises:
        MissingDataError: none is here; the message says how to get them.
    """
    *whole, sprites = files.CIFAR10[split]
    if any(_here(list(variant.files)) is not None for variant in whole):
        return load_images(NAME, split)
    labels, *tiles = sprites.files
    found = {number: paths for number, tile in enumerate(tiles) if (paths := _here([labels, tile])) is not None}
    if len(found) == len(tiles):
        return load_images(NAME, split)
    if not found:
        return load_images(NAME, "test" if split == "holdout" else split)
    parts = [
        cifar.read_sprites(paths[0], "train", 1000 * (FIRST[split] + number), paths[1:])
        for number, paths in found.items()
    ]
    pixels, numbers = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    source = f"{NAME} {split}: {len(found)} of {len(tiles)} sprites"
    return Images(pixels, numbers, CLASSES[NAME], source)


def _here(wanted: list[DataFile]) -> list[Path] | None:
    """Returns where some files lie; None if one is missing."""
    try:
        return fetch(NAME, [wanted], "", download=False)[1]
    except MissingDataError:
        return None


def shrunk(images: Images, side: int) -> Images:
    """Averages images down to a side that divides theirs.

    Example:
        >>> images = Images(torch.full((1, 3, 4, 4), 7, dtype=torch.uint8), torch.tensor([0]), ("a",), "mine")
        >>> shrunk(images, 2).pixels.shape
        torch.Size([1, 3, 2, 2])
    """
    factor = images.pixels.shape[-1] // side
    if factor <= 1:
        return images
    pixels = torch.nn.functional.avg_pool2d(images.pixels.float(), factor).round().to(torch.uint8)
    return replace(images, pixels=pixels, source=f"{images.source}, averaged to {side} x {side}")


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
    def batch_seeds(self) -> bool:
        return True

    @property
    def family(self) -> str:
        """The same for runs that test the same trained model."""
        network = (self.data, self.model, self.depth, self.narrow, self.side)
        trained = (self.images, self.epochs, self.batch_size, self.learning_rate, self.pretraining, self.jacobian)
        return identity((self.suite, self.scale, self.seed, network, trained))

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
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
    with disturbed_signals(points, NoiseDraws(noise, batch)):  # type: ignore[arg-type]
        yield


def standardised(images: Images) -> Tensor:  # (N, C, H, W)
    """Returns pixels of about mean zero and variance one."""
    u = images.to_float()
    if u.shape[1] != len(MEAN):
        return (u - 0.3) / 0.35
    return (u - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


DATA = "cifar10"
POINTS = (20.0, 10.0, 5.0, 0.0)  # signal-to-noise ratios in decibels
Settings = dict[str, object]
SETTINGS: dict[Scale, Settings] = {
    "tiny": {
        "narrow": 8,
        "side": 8,
        "images": 96,
        "epochs": 2,
        "batch_size": 32,
        "samples": 50,
        "points": (10.0,),
    },
    "default": {"side": 16, "images": 1_500, "epochs": 4, "batch_size": 50, "samples": 400, "points": (10.0,)},
    "paper": {"images": 40_000, "epochs": 12, "batch_size": 256, "samples": 10_000, "points": POINTS},
}


def plan(scale: Scale) -> list[CifarNoiseRun]:
    """Returns both networks, the equilibrium model with both solvers in the test; tiny runs are on digits."""

    def run(role: Role, model: Kind, depth: int, solver: str | None = None) -> CifarNoiseRun:
        return CifarNoiseRun(suite="noise-cifar", seed=0, scale=scale, role=role, model=model, depth=depth,
                             data="digits" if scale == "tiny" else DATA, solver=solver, **SETTINGS[scale])  # type: ignore[arg-type]  # fmt: skip

    deepest = 2 if scale == "tiny" else 4
    tested = [run("control", "mdeq", deepest, solver) for solver in SOLVERS]
    return [run("ours", "mdeq", deepest), *tested, run("baseline", "ffw", deepest)]


def findings(records: Sequence[Record]) -> list[str]:
    """Says how the models were trained beside what is published, and what noise does to each."""
    judged = [r for r in records if r.task == DATA and r.error is None]
    scales = {scale: [r for r in judged if r.scale == scale] for scale in JUDGED_SCALES}
    return [*(text for found in scales.values() for text in _told(found)), *_leads(scales)]


def _leads(scales: dict[str, list[Record]]) -> list[str]:
    """Says whether the lead of the equilibrium model outlasts a longer training."""
    told = []
    for scale, records in scales.items():
        ours, rival = (median_of(records, DATA, model, "accuracy", 10.0) for model in ("mdeq-4", "ffw-conv-4"))
        if ours is not None and rival is not None:
            told.append(f"{100 * (ours - rival):+.1f} at scale {scale}")
    if len(told) < 2:
        return []
    return [
        f"Lead of mdeq-4 over ffw-conv-4 at 10 dB in points: {' and '.join(told[::-1])}, which trains for longer."
    ]


def _told(judged: Sequence[Record]) -> list[str]:
    """Says this of the records of one scale."""
    sentences, settings = [], ("side", "epochs", "batch_size")
    seeds = {1: "one seed"}.get(count := len({r.seed for r in judged}), f"{count} seeds")
    seen = {(r.facts.get("images", 0), r.facts.get("tested", 0), *map(r.config.get, settings)) for r in judged}
    for images, tested, side, epochs, batch in sorted(seen):
        sentences.append(
            f"Trained on {images} images of {side} x {side} pixels, {epochs} epochs in batches of {batch}, and "
            f"tested on {f'{tested} images' if tested else 'images'} held out, {seeds}; published are 50000 "
            "images of 32 x 32, 100 epochs in batches of 24."
        )
    for model in ("mdeq-4", "mdeq-4-stochastic-unrolling", "ffw-conv-4"):
        found = {at: median_of(judged, DATA, model, "accuracy", at) for at in (None, *POINTS)}
        told = ", ".join(
            f"{'without noise' if at is None else f'at {at:g} dB'} {100 * value:.1f} %"
            for at, value in found.items()
            if value is not None
        )
        if told:
            sentences.append(f"Accuracy of {model}: {told}.")
    return sentences


SUITE = Suite(
    name="noise-cifar",
    title="Noise on CIFAR-10",
    claim="Under noise a multiscale equilibrium model is more accurate than a deep convolutional network, and any "
    "solver will do.",
    papers=("004 section 4.1.2", "004 Figures 1 (e) and 6", "004 Tables 3 and 4"),
    plan=plan,
    seeds={"tiny": 1, "default": 3, "paper": 3},
    figures=(
        Figure("Accuracy under noise", (DATA, "digits"), "accuracy", "signal-to-noise ratio in decibels",
               paper="004 Figures 1 (e) and 6", log=""),
        Figure("Steps of the solvers", (DATA, "digits"), "steps", "signal-to-noise ratio in decibels", log=""),
    ),
    findings=findings,
    thresholds=tuple(
        Threshold(f"The model {model} is at least 25 % accurate without noise, far above chance.",
                  Measure("accuracy", model, DATA), "at least", 0.25)
        for model in ("mdeq-4", "ffw-conv-4")
    ),
    floors=(Floor("accuracy", "at least", 0.5),),  # a linear classifier reaches 40 %
    differs="The networks see 40,000 images, or as many as are in the data folder, 12 times in batches of 256; "
    "published are 100 epochs in batches of 24.",
)  # fmt: skip
