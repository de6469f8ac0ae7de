"""One cell as an equilibrium, as a network of tied layers and of untied ones, and networks that know no cell."""

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from wellposed.baselines.linear import LinearRegression
from wellposed.baselines.mlp import MLP
from wellposed.equilibrium.anderson import Anderson
from wellposed.equilibrium.picard import Picard
from wellposed.equilibrium.solver import Solver
from wellposed.equilibrium.stopping import Absolute, Relative
from wellposed.errors import unknown_name
from wellposed.experiments.config import Choice
from wellposed.experiments.node_cells import NodeCell, PathCell, RelaxationCell
from wellposed.models.deq import DEQ


class NodeModel(nn.Module, abc.ABC):
    """Maps samples ``(B, n, n + 1)`` to one number a node, ``(B, n)``."""

    @property
    def cell(self) -> NodeCell | None:
        """The cell whose equilibrium the model can be run to; None if it has none."""
        return None

    @property
    def depth(self) -> int | None:
        """Steps or layers that it was made for; None if it runs until it rests."""
        return None

    def fits(self, u: Tensor) -> bool:
        """Whether the model can take samples of that size."""
        return True

    def at_rest(self) -> DEQ | None:
        """Returns what runs the cell until nothing moves, in float64; None without a cell."""
        if self.cell is None:
            return None
        # States of far nodes are many decades below that of the source: only rounding may end such a solve.
        stop = Absolute(0.0) if isinstance(self.cell, PathCell) else Relative(1e-8)
        return DEQ(self.cell, solver=_solver(self.cell), stop=stop, max_steps=1000, on_failure="ignore")

    @torch.no_grad()
    def answers(self, u: Tensor, steps: Sequence[int]) -> dict[int, Tensor]:
        """Computes the answers after some numbers of steps from zero; of a model without a cell after its own."""
        if self.cell is None:
            return {} if self.depth is None else {self.depth: self(u)}
        x, given = _start(self.cell, u), self.cell.inject(u)
        found = {}
        for index in range(1, max(steps) + 1):
            x = self.cell.step(x, given)
            if index in steps:
                found[index] = self.cell.readout(x)
        return found


class Equilibrium(NodeModel):
    """Reads the answer from the equilibrium of the cell and is trained by the implicit function theorem."""

    def __init__(self, cell: NodeCell, max_steps: int = 100) -> None:
        super().__init__()
        self.deq = DEQ(cell, solver=_solver(cell), stop=Relative(1e-4), max_steps=max_steps, on_failure="ignore")

    @property
    def cell(self) -> NodeCell:
        cell: NodeCell = self.deq.cell  # type: ignore[assignment]
        return cell

    def forward(self, u: Tensor) -> Tensor:
        return self.cell.readout(self.deq(u))


class Tied(NodeModel):
    """Takes a fixed number of steps of one cell and is trained through all of them."""

    def __init__(self, cell: NodeCell, depth: int) -> None:
        super().__init__()
        self.step, self._depth = cell, depth

    @property
    def cell(self) -> NodeCell:
        return self.step

    @property
    def depth(self) -> int:
        return self._depth

    def forward(self, u: Tensor) -> Tensor:
        return _through([self.cell] * self.depth, u)


class Untied(NodeModel):
    """Has a cell of its own for every step: a feed-forward network with the input at every layer."""

    def __init__(self, make: Callable[[], NodeCell], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(depth))

    @property
    def depth(self) -> int:
        return len(self.layers)

    def forward(self, u: Tensor) -> Tensor:
        return _through([layer for layer in self.layers if isinstance(layer, NodeCell)], u)


class Flat(NodeModel):
    """Sees a sample as one vector, and so knows one size only."""

    def __init__(self, network: nn.Module, nodes: int) -> None:
        super().__init__()
        self.network, self.nodes = network, nodes

    def fits(self, u: Tensor) -> bool:
        return u.shape[1] == self.nodes

    def forward(self, u: Tensor) -> Tensor:
        y: Tensor = self.network(u.flatten(1))
        return y


def _through(cells: list[NodeCell], u: Tensor) -> Tensor:
    """Steps through the cells from zero and reads the answer with the last one."""
    x, given = _start(cells[0], u), cells[0].inject(u)
    for before, cell in zip([cells[0], *cells], cells, strict=False):
        given = given if cell is before else cell.inject(u)
        x = cell.step(x, given)
    return cells[-1].readout(x)


def _start(cell: NodeCell, u: Tensor) -> Tensor:
    return torch.zeros(len(u), *cell.state_shape(u), dtype=u.dtype, device=u.device)


def _solver(cell: NodeCell) -> Solver:
    """Chooses plain steps for maxima, which reach their fixed point in finitely many of them."""
    return Picard() if isinstance(cell, PathCell) else Anderson()


def cell_for(task: str, choice: Choice) -> NodeCell:
    """Makes the cell that fits a task."""
    options = dict(choice.options)
    channels, capped = options.get("channels", 8), choice.name != "equilibrium-uncapped"
    linear = choice.name == "equilibrium-linear"
    if task == "shortest-path":
        return PathCell(channels, kappa=0.99 if capped else None, average=linear)
    if task in ("linear-system", "quadratic-program"):
        return RelaxationCell(channels, linear=linear or task == "linear-system", capped=capped)
    raise unknown_name("task", task, ("shortest-path", "linear-system", "quadratic-program"))


def build(task: str, nodes: int, choice: Choice) -> NodeModel:
    """Builds a model by name.

    Args:
        task: its name.
        nodes: of the training samples, for models that know one size only.
        choice: name and options ``channels``, ``depth`` and ``width``.

    Example:
        >>> build("linear-system", 5, Choice.of("tied", depth=3)).depth
        3
    """
    options = dict(choice.options)
    depth, width, size = options.get("depth", 8), options.get("width", 128), nodes * (nodes + 1)
    if choice.name.startswith("equilibrium"):
        return Equilibrium(cell_for(task, choice))
    if choice.name.startswith("tied"):
        return Tied(cell_for(task, choice), depth)
    if choice.name == "untied":
        return Untied(lambda: cell_for(task, choice), depth)
    if choice.name == "mlp":
        return Flat(MLP([size, width, width, nodes]), nodes)
    if choice.name == "linear":
        return Flat(LinearRegression(size, nodes), nodes)
    raise unknown_name("model", choice.name, NAMES)


NAMES = (
    "equilibrium",
    "equilibrium-uncapped",
    "equilibrium-linear",
    "tied",
    "tied-deep",
    "untied",
    "mlp",
    "linear",
)
