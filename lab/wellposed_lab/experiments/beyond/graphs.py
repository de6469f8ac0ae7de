"""Shortest paths on graphs, whose difficulty is the number of edges from the source to the farthest node."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed_lab.tasks.task import Pair, Point, Task


@dataclass(frozen=True)
class ShortestPath(Task):
    """Distances of all nodes from a source, on graphs that reach farther than those of the training.

    A graph has layers: every node is joined to a node of the layer before it and to `extra` random ones of its
    own and the neighbouring layers, so that the farthest node is as many edges away as there are layers. The
    lengths of the edges are uniform, hence the shortest path need not have the fewest edges. The source is drawn
    among the nodes.

    A sample is one matrix ``(n, n + 1)``: the lengths of the edges, 0 where there is none, and in the last column
    a mark at the source. The target is the n distances.

    Args:
        nodes: in training, and in a test unless more are needed.
        samples, test_samples: graphs.
        layers: in training, from the fewest to the most.
        lengths: of an edge, from the shortest to the longest.
        extra: further edges drawn for every node.
        tolerance: relative error up to which a distance counts as right.
        points: layers of the test graphs; they have 3/2 times as many nodes, or those of the training.

    Example:
        >>> u, y = ShortestPath(samples=4).train(seed=0)
        >>> u.shape, y.shape, float(y.min())
        (torch.Size([4, 16, 17]), torch.Size([4, 16]), 0.0)
    """

    nodes: int = 16
    samples: int = 512
    test_samples: int = 64
    layers: tuple[int, int] = (2, 6)
    lengths: tuple[float, float] = (0.2, 1.8)
    extra: int = 1
    tolerance: float = 0.05
    points: tuple[Point, ...] = (3.0, 6.0, 10.0, 20.0, 40.0, 80.0)
    name: ClassVar[str] = "shortest-path"

    def __post_init__(self) -> None:
        if not 1 <= self.layers[0] <= self.layers[1] < self.nodes:
            raise InputError(f"1 <= layers < nodes is needed; received {self.layers} and {self.nodes} nodes")
        if not 0 < self.lengths[0] <= self.lengths[1]:
            raise InputError(f"lengths must be positive, the shortest first; received {self.lengths}")

    def train(self, seed: int) -> Pair:
        return self._draw(self.samples, self.nodes, self.layers, self.generator(seed, "train"))

    def validation(self, seed: int) -> Pair:
        return self._draw(self.test_samples, self.nodes, self.layers, self.generator(seed, "validation"))

    def test(self, seed: int, at: Point) -> Pair:
        layers = int(self.require_point(at))
        if layers < 1:
            raise InputError(f"a graph has at least one layer; received {at}")
        nodes = max(self.nodes, 3 * layers // 2)
        return self._draw(self.test_samples, nodes, (layers, layers), self.generator(seed, "test", layers))

    def score(self, prediction: Tensor, target: Tensor) -> dict[str, float]:
        """Computes the share of right distances and the mean relative error, over all nodes but the source."""
        away = target > 0
        truth, guess = target[away].double(), prediction[away].double()
        error = ((guess - truth).abs() / truth).nan_to_num(torch.inf)
        return {
            "test_accuracy": float((error <= self.tolerance).double().mean()),
            "test_error": float(error.mean()),
        }

    def _draw(self, samples: int, nodes: int, layers: tuple[int, int], generator: torch.Generator) -> Pair:
        graphs = [self._graph(nodes, layers, generator) for _ in range(samples)]
        lengths = torch.stack([graph for graph, _ in graphs])
        sources = torch.tensor([source for _, source in graphs])
        marks = torch.nn.functional.one_hot(sources, nodes).float()
        return torch.cat([lengths, marks[:, :, None]], 2), distances(lengths, sources)

    def _graph(self, nodes: int, layers: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, int]:
        """Draws the lengths of one graph and its source."""
        count = int(torch.randint(layers[0], layers[1] + 1, (), generator=generator))
        spare = torch.randint(1, count + 1, (nodes - 1 - count,), generator=generator)
        layer = torch.cat([torch.arange(count + 1), spare])  # of every node; node 0 is the source
        ahead = layer[:, None] - layer[None, :]
        joined = _pick(ahead == 1, generator)
        for _ in range(self.extra):
            joined |= _pick((ahead.abs() <= 1).fill_diagonal_(False), generator)
        low, high = self.lengths
        drawn = (low + (high - low) * torch.rand(nodes, nodes, generator=generator)).triu(1)
        lengths = torch.where(joined | joined.mT, drawn + drawn.mT, 0.0)
        order = torch.randperm(nodes, generator=generator)
        return lengths[order][:, order], int((order == 0).nonzero())


def _pick(allowed: Tensor, generator: torch.Generator) -> Tensor:  # (n, n) bool
    """Marks one allowed entry of every row that has any."""
    chances = torch.where(allowed, torch.rand(allowed.shape, generator=generator), -1.0)
    best, column = chances.max(1)
    return torch.zeros_like(allowed).scatter_(1, column[:, None], (best >= 0)[:, None])


def distances(lengths: Tensor, sources: Tensor) -> Tensor:  # (B, n, n), (B,) -> (B, n)
    """Computes the distances from the sources by relaxing all edges until nothing changes (Bellman and Ford).

    Args:
        lengths: of the edges, 0 where there is none; entry (i, j) leads from j to i.
        sources: one node a graph. What it does not reach is infinitely far.

    Example:
        >>> chain = torch.tensor([[[0.0, 2.0, 0.0], [2.0, 0.0, 3.0], [0.0, 3.0, 0.0]]])
        >>> distances(chain, torch.tensor([0]))
        tensor([[0., 2., 5.]])
    """
    edges = torch.where(lengths > 0, lengths, torch.inf)
    far = torch.full(lengths.shape[:2], torch.inf, dtype=lengths.dtype).scatter_(1, sources[:, None], 0.0)
    while True:
        nearer = torch.minimum(far, (edges + far[:, None, :]).amin(2))
        if torch.equal(nearer, far):
            return far
        far = nearer
