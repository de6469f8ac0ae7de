"""One cell as an equilibrium, as a network of tied or untied layers, and networks without a cell.

The state of a cell (`RelaxationCell`, `PathCell`) belongs to the nodes of a graph or the rows of a matrix, of any
size. `Equilibrium`, `Tied` and `Untied` are the models made of one; `Flat` has no cell.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.equilibrium.maps import State
from wellposed.equilibrium.solvers import Anderson, Picard, Solver
from wellposed.equilibrium.stopping import Absolute, Relative
from wellposed.errors import InputError, unknown_name
from wellposed.models.cells import Cell, require_positive, shape_of
from wellposed.models.deq import DEQ
from wellposed_lab.config import Choice
from wellposed_lab.networks.mlp import MLP
from wellposed_lab.networks.simple import LinearRegression

UNIT = 0.2  # the h of PathCell: keeps what is learnt near one


class NodeCell(Cell, abc.ABC):
    """A cell on samples ``(n, n + 1)``: a matrix that joins n nodes, and one number for each of them.

    The state is ``(n, channels)``. The same weights serve every n.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        require_positive(channels=channels)
        self.channels = channels

    def state_shape(self, u: State) -> tuple[int, ...]:
        return (self.split(u)[0].shape[1], self.channels)

    @staticmethod
    def split(u: State) -> tuple[Tensor, Tensor]:  # (B, n, n), (B, n, 1)
        """Returns the matrix and the numbers of the nodes."""
        if not isinstance(u, Tensor) or u.dim() != 3 or u.shape[2] != u.shape[1] + 1:
            raise InputError(f"u must have the shape (batch, n, n + 1); received {shape_of(u)}")
        return u[:, :, :-1], u[:, :, -1:]

    @abc.abstractmethod
    def step(self, x: Tensor, injection: Any) -> Tensor:  # (B, n, c) twice
        """Takes one step from the state `x`."""

    @abc.abstractmethod
    def readout(self, x: Tensor) -> Tensor:  # (B, n, c) -> (B, n)
        """Computes one number for every node from its state."""

    @abc.abstractmethod
    def certificate(self) -> str:
        """Says why there is exactly one equilibrium, or that this is not known."""


class RelaxationCell(NodeCell):
    """Computes ``x <- phi(x - x R - M x S + b v')`` with the rows of x as the nodes of M.

    R = rr' and S = ss' are positive semidefinite and scaled so that ``|R| + |S|`` has norm at most one. Then for
    every positive definite M of norm at most one the map without phi is symmetric with eigenvalues in [0, 1), and
    phi does not expand: there is exactly one equilibrium, and steps from anywhere converge to it. The rate,
    ``1 - lambda_min(R + S lambda_min(M))``, depends on the condition of M. Without the cap R and S are any
    matrices.

    Args:
        channels: of the state.
        linear: whether phi is the identity; else it is the ReLU.
        capped: whether R and S are as above.

    Example:
        >>> cell = RelaxationCell(4)
        >>> cell(torch.zeros(2, 3, 4), torch.ones(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, channels: int, *, linear: bool = False, capped: bool = True) -> None:
        super().__init__(channels)
        self.linear, self.capped = linear, capped
        self.leak = nn.Parameter(0.1 * torch.randn(channels, channels))
        self.gain = nn.Parameter(torch.eye(channels) + 0.1 * torch.randn(channels, channels))
        self.input = nn.Parameter(torch.randn(channels) / channels**0.5)
        self.output = nn.Parameter(torch.randn(channels) / channels**0.5)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Returns R and S."""
        if not self.capped:
            return self.leak, self.gain
        leak, gain = self.leak @ self.leak.mT, self.gain @ self.gain.mT
        bound = (leak.abs() + gain.abs()).sum(1).amax().clamp_min(1.0)
        return leak / bound, gain / bound

    def inject(self, u: State) -> State:
        matrix, vector = self.split(u)
        return matrix, vector * self.input

    def step(self, x: Tensor, injection: tuple[Tensor, Tensor]) -> Tensor:
        leak, gain = self.matrices()
        matrix, given = injection
        moved = x - x @ leak - matrix @ (x @ gain) + given
        return moved if self.linear else F.relu(moved)

    def readout(self, x: Tensor) -> Tensor:
        return x @ self.output

    @torch.no_grad()
    def rate(self, condition: float) -> float:
        """Returns the contraction factor for matrices of norm one with that condition number."""
        leak, gain = (matrix.double() for matrix in self.matrices())
        return 1 - float(torch.linalg.eigvalsh(leak + gain / condition)[0])

    def certificate(self) -> str:
        if not self.capped:
            return "none: R and S are any matrices"
        rates = ", ".join(f"{self.rate(condition):.4f} at {condition:g}" for condition in (5.0, 100.0))
        return f"one equilibrium for every positive definite M with |M| <= 1; contraction by condition: {rates}"


class PathCell(NodeCell):
    """Passes the largest discounted state on: ``x_ik <- max(s_i v_k, max_jl g_k(w_ij) V_kl x_jl)``.

    w_ij is the length of the edge from node j to node i, k and l are channels, and s marks the source. The
    discounts ``g_k(w) = kappa exp(-h max(0, a_k w + b_k))`` and ``V_kl = exp(-h max(0, m_kl))`` and v are learnt.
    As V <= 1 and maxima do not expand, the map contracts by kappa in the maximum norm on every graph. Where
    g(w) = exp(-h w) the equilibrium is exp(-h d) with the distance d: Bellman's equation with a discount. The
    readout is therefore an affine function of a logarithm.

    Args:
        channels: of the state.
        kappa: contraction factor; None leaves V and g without bounds.
        average: whether means and a sum replace the maxima, which makes the map linear in the state.

    Example:
        >>> cell = PathCell(4)
        >>> cell(torch.zeros(2, 3, 4), torch.ones(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, channels: int, *, kappa: float | None = 0.99, average: bool = False) -> None:
        super().__init__(channels)
        self.kappa, self.average = kappa, average
        self.slope = nn.Parameter(0.5 + torch.rand(channels))
        self.offset = nn.Parameter(torch.rand(channels) - 0.5)
        self.mixing = nn.Parameter(torch.rand(channels, channels))
        self.input = nn.Parameter(0.5 + torch.rand(channels))
        self.output = nn.Parameter(torch.rand(channels) / channels)
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0]))

    def inject(self, u: State) -> State:
        """Returns the numbers of the neighbours, the discounts of the edges to them, and the marks."""
        lengths, marks = self.split(u)
        degree = int((lengths > 0).sum(2).amax())
        near, index = lengths.topk(max(degree, 1), dim=2)  # (B, n, k)
        there = near[..., None] > 0
        discounts = (self.kappa or 1.0) * self._decay(self.slope * near[..., None] + self.offset) * there
        if self.average:
            discounts = discounts / there.sum(2, keepdim=True).clamp_min(1)
        return index, discounts, marks * self.input.abs()

    def step(self, x: Tensor, injection: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        index, discounts, given = injection
        mixing = self._decay(self.mixing)
        if self.average:
            sent = x @ (mixing / mixing.sum(1, keepdim=True)).mT
        else:
            sent = (mixing * x[:, :, None, :]).amax(3)
        rows, nodes, near = index.shape
        flat = index.reshape(rows, nodes * near, 1).expand(-1, -1, self.channels)
        messages = discounts * sent.gather(1, flat).reshape(rows, nodes, near, self.channels)
        return messages.sum(2) + given if self.average else torch.maximum(messages.amax(2), given)

    def _decay(self, raw: Tensor) -> Tensor:
        return torch.exp(-UNIT * (raw if self.kappa is None else F.relu(raw)))

    def readout(self, x: Tensor) -> Tensor:
        value = (x @ self.output.abs()).clamp_min(1e-30)
        return self.scale[1] - self.scale[0] / UNIT * value.log()

    def certificate(self) -> str:
        if self.kappa is None:
            return "none: neither V nor the discounts are bounded"
        return f"one equilibrium on every graph: contraction by {self.kappa:g} in the maximum norm"


class NodeModel(nn.Module, abc.ABC):
    """Maps samples ``(B, n, n + 1)`` to one number a node, ``(B, n)``."""

    @property
    def cell(self) -> NodeCell | None:
        """The cell whose equilibrium the model can be run to; None if it has none."""
        return None

    @property
    def depth(self) -> int | None:
        """Steps or layers that it was made for; None if it runs until it converges."""
        return None

    def fits(self, u: Tensor) -> bool:
        """Whether the model can take samples of that size."""
        return True

    def as_deq(self) -> DEQ | None:
        """Returns a DEQ that runs the cell to convergence in float64; None without a cell."""
        if self.cell is None:
            return None
        # States of far nodes are many decades below that of the source, so such a solve may end only at rounding.
        stop = Absolute(0.0) if isinstance(self.cell, PathCell) else Relative(1e-8)
        return DEQ(self.cell, solver=_solver(self.cell), stop=stop, max_steps=1000, on_failure="ignore")

    @torch.no_grad()
    def answers(self, u: Tensor, steps: Sequence[int]) -> dict[int, Tensor]:
        """Computes the answers after given numbers of steps from zero; without a cell, after the model's own."""
        if self.cell is None:
            return {} if self.depth is None else {self.depth: self(u)}
        x, given = _start(self.cell, u), self.cell.inject(u)
        readouts = {}
        for index in range(1, max(steps) + 1):
            x = self.cell.step(x, given)
            if index in steps:
                readouts[index] = self.cell.readout(x)
        return readouts


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
    """Takes a sample as one vector, and therefore has one size only."""

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
    """Chooses Picard for maxima, which reach their fixed point in finitely many steps."""
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
        nodes: of the training samples, for models that have one size only.
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
