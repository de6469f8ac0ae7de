"""Classifiers of one convolutional cell, at rest or applied once, and the defences of 004 (section E.3)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from wellposed.equilibrium import (
    Gradient,
    Implicit,
    Polished,
    RandomThreshold,
    Relative,
    Steps,
    Stopping,
    Unrolled,
)
from wellposed.equilibrium.maps import State
from wellposed.models import DEQ, Noise, weight_norm
from wellposed.models.cells import Cell, convolution, require_grid
from wellposed.models.noise import NoiseDraws

THRESHOLD = 8  # steps of the solver in training, M in 004
EXACT = Implicit(stop=Relative(1e-3), max_steps=20)
Kind = Literal["deq", "ffw"]
Place = Literal["", "input", "state"]
TrainedBy = Literal["pgd", "trades", "clean"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a classifier.

    004 prints 32 channels and one cell; the kernels, the pooling and the activations are choices of this library.

    Args:
        channels: of the state.
        kernel, stride: of the input's convolution; the state's has a kernel of 3.
        grid: features are averaged over grid x grid patches.
        solver: of the DEQ, by name.
    """

    channels: int = 32
    kernel: int = 3
    stride: int = 1
    grid: int = 7
    solver: str = "picard"


@dataclass(frozen=True)
class Defended:
    """A model with its defence, which is the same in training and test.

    Args:
        kind: "deq" or "ffw".
        place: of the noise, which is drawn anew whenever it is added; "" for none.
        decibels: of the noise.
        random: whether the solver stops after 1 to 8 steps drawn at random.
        trained_by: attacks, TRADES, or inputs without attacks.

    Example:
        >>> Defended("deq", "input").name, Defended("deq", random=True, trained_by="trades").name
        ('deq-conv-input-0db', 'deq-conv-random-threshold-trades')
    """

    kind: Kind
    place: Place = ""
    decibels: float = 0.0
    random: bool = False
    trained_by: TrainedBy = "pgd"
    record_fields: ClassVar[Mapping[str, str]] = {"trained_by": "teaching"}

    @property
    def name(self) -> str:
        """As the report names it."""
        noise = f"-{self.place}-{self.decibels:g}db" if self.place else ""
        endings = ("-random-threshold" if self.random else "") + {"pgd": ""}.get(
            self.trained_by, f"-{self.trained_by}"
        )
        return f"{self.kind}-conv{noise}{endings}"

    @property
    def steady(self) -> bool:
        """Whether the same input gets the same answer every time."""
        return not self.place and not self.random

    @property
    def twin(self) -> "Defended":
        """The FFW of which 004 says that it is the best defended, trained alike."""
        return Defended("ffw", "state", trained_by=self.trained_by)

    def noise(self, generator: torch.Generator) -> Noise:
        """Returns the noise with a generator of its own."""
        state, given = (self.decibels if self.place == place else None for place in ("state", "input"))
        return Noise(state=state, input=given, generator=generator)

    def build(self, shape: Shape, channels: int, classes: int, seed: int) -> "Classifier":
        """Makes the model, untrained."""
        with torch.random.fork_rng(()):
            torch.manual_seed(seed)
            return Classifier(self, shape, channels, classes)


class ImageCell(Cell):
    """Computes ``tanh(K * x + b + relu(V * u + c))`` with convolutions, of which V may skip pixels."""

    def __init__(self, in_channels: int, shape: Shape) -> None:
        super().__init__()
        self.in_channels, self.channels, self.stride = in_channels, shape.channels, shape.stride
        self.input = convolution(2, in_channels, shape.channels, shape.kernel, stride=shape.stride)
        self.state = convolution(2, shape.channels, shape.channels, 3)
        self.projection, self.activation = nn.ReLU(), nn.Tanh()

    def state_shape(self, u: State) -> tuple[int, ...]:
        height, width = require_grid(u, self.in_channels, 2).shape[2:]
        return self.channels, -(-height // self.stride), -(-width // self.stride)

    def inject(self, u: State) -> Tensor:
        injection: Tensor = self.projection(self.input(require_grid(u, self.in_channels, 2)))
        return injection

    def step(self, x: Tensor, injection: Tensor) -> Tensor:
        y: Tensor = self.activation(self.state(x) + injection)
        return y


class Classifier(nn.Module):
    """Reads out the state of a cell: at rest, as 004 solves for it, or applied once to the projected image.

    The DEQ takes 8 steps of its solver and then 9 of damping 0.5 (004 appendix C), also in the test, and has
    its gradient from those alone; `gradients` are the others that an attacker may use.
    """

    def __init__(self, defended: Defended, shape: Shape, channels: int, classes: int) -> None:
        super().__init__()
        self.defended, cell = defended, weight_norm(ImageCell(channels, shape))
        self.cell = cell if defended.kind == "ffw" else None
        self.deq = None
        if defended.kind == "deq":
            self.deq = DEQ(
                cell, solver=shape.solver, gradient=Polished(), on_failure="ignore", executor="reference"
            )
        features = shape.channels * shape.grid**2
        self.readout = nn.Sequential(nn.AdaptiveAvgPool2d(shape.grid), nn.Flatten(), nn.Linear(features, classes))
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        """Begins the draws of noise and thresholds anew."""
        device = next(self.parameters()).device
        self.noise = self.defended.noise(torch.Generator(device).manual_seed(seed))
        if self.deq is not None:
            self.deq.noise, self.deq.stop = self.noise, self._rule(seed)

    def _rule(self, seed: int) -> Stopping:
        if self.defended.random:
            return RandomThreshold(1, THRESHOLD, Relative(1e-3, norm="2"), torch.Generator().manual_seed(seed))
        return Steps(THRESHOLD)

    def forward(self, u: Tensor) -> Tensor:  # (B, C, H, W) -> (B, classes)
        """Computes the logits."""
        y: Tensor = self.readout(self._applied(u) if self.deq is None else self.deq(u))
        return y

    def _applied(self, u: Tensor) -> Tensor:
        assert isinstance(self.cell, ImageCell)
        disturbance = NoiseDraws(self.noise, len(u))
        given = disturbance.input(u)
        x = disturbance.state(self.cell.inject(given))
        assert isinstance(x, Tensor)
        return self.cell.step(x, x.new_zeros(()))

    @property
    def gradients(self) -> dict[str, Gradient | None]:
        """By name, how attacks may differentiate the model; None for its own way."""
        if self.deq is None:
            return {"construction": None}
        own = self.deq.gradient
        assert isinstance(own, Polished)
        return {
            "construction": None,
            "implicit": replace(own, solved=EXACT),
            "steps": replace(own, solved=Unrolled()),
        }
