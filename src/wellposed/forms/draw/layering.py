"""Places for the nodes of a diagram: layers from top to bottom, with few crossings (Sugiyama et al. 1981)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import pairwise

SWEEPS = 12
Spot = tuple[int, int]  # a node in its own layer, or its line where it passes another layer


@dataclass
class Layering:
    """Nodes in layers, and lines that skip layers as spots of their own, one line for all readers of a node."""

    layer: dict[int, int]
    rows: list[list[Spot]]
    below: dict[Spot, list[Spot]]
    above: dict[Spot, list[Spot]]
    x: dict[Spot, float] = field(default_factory=dict)

    def spot(self, node: int) -> tuple[float, int]:
        """Returns x and layer of a node."""
        return self.x[node, self.layer[node]], self.layer[node]

    def route(self, start: int, end: int) -> list[tuple[float, int]]:
        """Returns x and layer of every spot on the way between two nodes."""
        spots = [(start, number) for number in range(self.layer[start], self.layer[end])]
        return [(self.x[spot], spot[1]) for spot in (*spots, (end, self.layer[end]))]


def layered(
    widths: Sequence[float], edges: Sequence[tuple[int, int]], pinned: Sequence[int] = (), gap: float = 0.3
) -> Layering:
    """Places nodes below all that they read from, each layer in the order with the fewest crossings found.

    Args:
        widths: of the nodes.
        edges: from a node to one that reads it, without cycles.
        pinned: nodes that stay in the first layer; others move down to their readers.
        gap: between neighbours.

    Example:
        >>> placed = layered([1.0] * 3, [(0, 1), (1, 2), (0, 2)])
        >>> placed.layer, len(placed.route(0, 2))
        ({0: 0, 1: 1, 2: 2}, 3)
    """
    layering = _with_lines(_layers(len(widths), edges, pinned), edges)
    _reorder(layering)
    _space_out(layering, widths, gap)
    return layering


def _layers(count: int, edges: Sequence[tuple[int, int]], pinned: Sequence[int]) -> dict[int, int]:
    """Gives every node the length of the longest way to it."""
    reads: dict[int, list[int]] = {k: [] for k in range(count)}
    readers: dict[int, list[int]] = {k: [] for k in range(count)}
    for start, end in edges:
        reads[end].append(start)
        readers[start].append(end)
    order = list(TopologicalSorter(reads).static_order())
    layer: dict[int, int] = {}
    for node in order:
        layer[node] = 1 + max((layer[k] for k in reads[node]), default=-1)
    for node in reversed(order):
        if not reads[node] and readers[node] and node not in pinned:
            layer[node] = min(layer[k] for k in readers[node]) - 1
    return dict(sorted(layer.items()))


def _with_lines(layer: dict[int, int], edges: Sequence[tuple[int, int]]) -> Layering:
    rows: list[list[Spot]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for node, number in layer.items():
        rows[number].append((node, number))
    below: dict[Spot, list[Spot]] = defaultdict(list)
    above: dict[Spot, list[Spot]] = defaultdict(list)
    for start, end in edges:
        last = (start, layer[start])
        for number in range(layer[start] + 1, layer[end] + 1):
            spot = (end, number) if number == layer[end] else (start, number)
            if spot not in rows[number]:
                rows[number].append(spot)
            if spot not in below[last]:
                below[last].append(spot)
                above[spot].append(last)
            last = spot
    return Layering(layer, rows, below, above)


def _reorder(layering: Layering) -> None:
    """Sorts each layer by the mean position of its neighbours, down and up again, and keeps the best."""
    best, fewest = [list(row) for row in layering.rows], _crossings(layering)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        numbers = range(1, len(layering.rows)) if down else range(len(layering.rows) - 2, -1, -1)
        for number in numbers:
            other = layering.rows[number - 1 if down else number + 1]
            rank = {spot: index for index, spot in enumerate(other)}
            near = layering.above if down else layering.below
            own = {spot: float(index) for index, spot in enumerate(layering.rows[number])}
            mean = {spot: _mean([rank[k] for k in near[spot]], own[spot]) for spot in own}
            layering.rows[number].sort(key=mean.__getitem__)
        if (count := _crossings(layering)) < fewest:
            best, fewest = [list(row) for row in layering.rows], count
    layering.rows = best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(layering: Layering) -> int:
    total = 0
    for upper, lower in pairwise(layering.rows):
        rank = {spot: index for index, spot in enumerate(lower)}
        ends = [sorted(rank[spot] for spot in layering.below[start]) for start in upper]
        seen: list[int] = []
        for group in ends:
            total += sum(1 for end in group for other in seen if other > end)
            seen += group
    return total


def _space_out(layering: Layering, widths: Sequence[float], gap: float) -> None:
    """Moves every spot towards its neighbours as far as the others in its layer allow."""
    width = {
        spot: widths[spot[0]] if layering.layer[spot[0]] == spot[1] else 0.2
        for row in layering.rows
        for spot in row
    }
    for row in layering.rows:
        left = 0.0
        for spot in row:
            layering.x[spot] = left + width[spot] / 2
            left += width[spot] + gap
        middle = left / 2
        layering.x.update({spot: layering.x[spot] - middle for spot in row})
    for sweep in range(4 * SWEEPS):
        for row in layering.rows if sweep % 2 else reversed(layering.rows):
            wanted = [
                _mean([layering.x[k] for k in (*layering.above[s], *layering.below[s])], layering.x[s])
                for s in row
            ]
            apart = [(width[a] + width[b]) / 2 + gap for a, b in pairwise(row)]
            layering.x.update(zip(row, _at_least_apart(wanted, apart), strict=True))


def _at_least_apart(wanted: Sequence[float], apart: Sequence[float]) -> list[float]:
    """Returns the nearest places (least squares) that keep the order and the distances: isotonic regression.

    Example:
        >>> _at_least_apart([0.0, 0.0], [1.0])
        [-0.5, 0.5]
    """
    offsets = [0.0]
    for distance in apart:
        offsets.append(offsets[-1] + distance)
    pools: list[tuple[float, int]] = []  # sum and number
    for value, offset in zip(wanted, offsets, strict=True):
        total, count = value - offset, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    levels = [total / count for total, count in pools for _ in range(count)]
    return [level + offset for level, offset in zip(levels, offsets, strict=True)]


def columns_of(passing: Sequence[int], tallest: int) -> list[int]:
    """Returns the column of every layer: a deep diagram is broken where the lines of one node pass.

    Args:
        passing: of how many nodes lines pass between a layer and the next.
        tallest: number of layers that a column may have, about.

    Example:
        >>> columns_of([1, 1, 2, 1, 1], 3)
        [0, 0, 1, 1, 1, 1]
    """
    layers = len(passing) + 1
    wanted = -(-layers // tallest)
    column, columns = 0, [0]
    for count in passing:
        height = len(columns) - columns.index(column)
        column += count == 1 and height >= layers / wanted - 1 and column < wanted - 1
        columns.append(column)
    return columns if max(columns.count(number) for number in columns) <= 1.6 * tallest else [0] * layers
