"""Models of the algorithmic tasks of 004 (E.4): equilibria whose steps grow with the input, and their rivals."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from wellposed.equilibrium import Phantom, Picard, Relative, Steps, Unrolled
from wellposed.equilibrium.maps import State
from wellposed.equilibrium.solution import Solution
from wellposed.errors import InputError
from wellposed.models import DEQ, DenseCell, Noise, PlainConvCell, RecallCell
from wellposed.models.cells import Cell
from wellposed.models.noise import NoiseDraws

Kind = Literal["deq", "ffw", "recurrent"]
Form = Literal["plain", "recall", "dense"]
TOLERANCE = 1e-3  # of a solve without noise, relative


@dataclass(frozen=True)
class Growth:
    """How many steps are allowed for an input of some size: ``slope size + offset``.

    Example:
        >>> Growth(1.3, 8).steps(512), Growth(0.0, 36).steps(512)
        (673, 36)
    """

    slope: float
    offset: int

    def steps(self, size: int) -> int:
        """Returns the number of steps."""
        return int(self.slope * size) + self.offset


@dataclass(frozen=True)
class Design:
    """One model of one task.

    A "deq" is the equilibrium of a cell that sees the input at every step. An "ffw" is one pass of the same cell
    over the projected input, or with several `layers` as many cells with weights of their own that all see the
    input. A "recurrent" network repeats one cell, which saw the input at the start only.

    Args:
        kind: "deq", "ffw" or "recurrent".
        form: of the cell: "plain" (one convolution), "recall" (a residual block) or "dense" (three layers).
        inputs, channels, outputs: of the cell and of the readout.
        growth: of the steps of a test.
        trained: steps of a training solve.
        truncated: if given, training takes a random number of steps up to `trained`, and so many more through
            which it differentiates; half of the batches then begin at random states, not at zero.
        layers: of an "ffw".
        projection: activation of the projected input of a dense cell.

    Example:
        >>> design = Design("deq", "plain", 1, 6, 1, Growth(1.3, 8), trained=36)
        >>> model = design.build(seed=0)
        >>> model(torch.ones(2, 1, 16)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([2, 1, 16]), 139)
    """

    kind: Kind
    form: Form
    inputs: int
    channels: int
    outputs: int
    growth: Growth
    trained: int
    truncated: int | None = None
    layers: int = 1
    projection: str = "identity"

    def __post_init__(self) -> None:
        if self.layers > 1 and self.kind != "ffw":
            raise InputError(f"only an 'ffw' has several layers; received {self.layers} of {self.kind!r}")

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.kind}-{self.layers}" if self.layers > 1 else self.kind

    def build(self, seed: int) -> "Equilibrium | Layers":
        """Makes the model, untrained."""
        with torch.random.fork_rng(()):
            torch.manual_seed(seed)
            if self.kind == "deq":
                return Equilibrium(self)
            return Layers(self)

    def cell(self) -> Cell:
        """Makes a cell."""
        if self.form == "dense":
            return DenseCell(self.inputs, self.channels, projection=self.projection, depth=3)
        if self.form == "recall":
            return RecallCell(self.inputs, self.channels, depth=2, dims=2)
        return PlainConvCell(self.inputs, self.channels)

    def readout(self) -> nn.Module:
        """Makes the layer that reads a state out, position by position."""
        if self.form == "dense":
            return nn.Linear(self.channels, self.outputs)
        kind = nn.Conv2d if self.form == "recall" else nn.Conv1d
        return kind(self.channels, self.outputs, 1)


class Equilibrium(nn.Module):
    """Reads the equilibrium of a cell out; how many steps a solve may take grows with the size of the input.

    Without noise a test stops where the state is at rest. With noise nothing ever is, and all steps are taken.
    """

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design, self.growth = design, design.growth
        gradient = Unrolled() if design.truncated is None else Phantom(design.truncated)
        self.deq = DEQ(design.cell(), solver=Picard(), gradient=gradient, on_failure="ignore",
                       executor="reference")  # fmt: skip  # solves of one kind are too few for graphs
        self.readout = design.readout()
        self._calls = 0  # in training

    @property
    def noise(self) -> Noise | None:
        """What disturbs the states."""
        return self.deq.noise

    @noise.setter
    def noise(self, noise: Noise | None) -> None:
        self.deq.noise = noise

    def forward(self, u: Tensor) -> Tensor:
        """Computes the outputs."""
        x = self._train(u) if self.training else self.equilibrium(u).value
        y: Tensor = self.readout(x)
        return y

    def equilibrium(self, u: Tensor, x0: Tensor | None = None) -> Solution:
        """Solves as in a test, and tells per sample how that went."""
        limit = self.growth.steps(u.shape[-1])
        silent = self.noise is None or self.noise.silent()
        self.deq.max_steps, self.deq.stop = limit, Relative(TOLERANCE) if silent else Steps(limit)
        return self.deq.equilibrium(u, x0)

    def _train(self, u: Tensor) -> Tensor:
        steps, start, design = self.design.trained, None, self.design
        if design.truncated is not None:
            steps = int(torch.randint(1, design.trained + 1, ()))
            zeros = self.deq.start(u)
            start = torch.randn_like(zeros) if self._calls % 2 else zeros  # type: ignore[arg-type]
        self._calls += 1
        return self.taken(u, self.deq.start(u) if start is None else start, steps)

    def taken(self, u: Tensor, x: State, steps: int) -> Tensor:
        """Takes the steps of a training solve as `DEQ` does, without its checks, which wait for a GPU."""
        cell, draws = self.deq.cell, NoiseDraws(self.noise or Noise(), len(u))
        assert isinstance(cell, Cell)
        injection, truncated = cell.inject(u), self.design.truncated

        def step(x: State) -> State:
            draws.begin()
            return cell.step(draws.state(x), injection)

        with torch.set_grad_enabled(torch.is_grad_enabled() and truncated is None):
            for _ in range(steps):
                x = step(x)
        draws.state(x)  # of the residual after the last step
        if truncated is None:  # the gradient of one step more, as `Unrolled` has it
            extra = step(x)
            x = extra + (x - extra).detach()  # type: ignore[operator]
        for _ in range(truncated or 0):
            x = step(x)
        assert isinstance(x, Tensor)
        return x


class Layers(nn.Module):
    """A feed-forward or recurrent network of cells, under the same noise before every step as an equilibrium."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design, self.growth = design, design.growth
        self.cells = nn.ModuleList(design.cell() for _ in range(design.layers))
        self.readout = design.readout()
        self.noise: Noise | None = None

    def forward(self, u: Tensor) -> Tensor:
        """Computes the outputs."""
        disturbance = NoiseDraws(self.noise or Noise(), u.shape[0])
        z, steps = self._plan(u)
        for cell, injection in steps:
            disturbance.begin()
            z = cell.step(disturbance.state(z), injection)
        y: Tensor = self.readout(z)
        return y

    def _plan(self, u: Tensor) -> tuple[State, list[tuple[Cell, State]]]:
        """Returns the start, and for every step its cell with what that sees of the input."""
        cells = [cell for cell in self.cells if isinstance(cell, Cell)]
        seen = [cell.inject(u) for cell in cells]
        nothing = torch.zeros_like(seen[0])  # type: ignore[arg-type]
        if len(cells) > 1:
            return nothing, list(zip(cells, seen, strict=True))
        count = self.design.trained if self.training else self.growth.steps(u.shape[-1])
        return seen[0], [(cells[0], nothing)] * (1 if self.design.kind == "ffw" else count)


def with_fixed_steps(model: Equilibrium) -> Equilibrium:
    """Lets a model take no more steps than in its training, whatever the size of the input."""
    model.growth = dataclasses.replace(model.growth, slope=0.0, offset=model.design.trained)
    return model
