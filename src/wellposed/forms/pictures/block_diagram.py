"""The diagram of a form with its blocks as nodes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

import numpy as np

from wellposed.forms.links import Link, Wiring
from wellposed.forms.pictures.diagram import Arrow, Diagram, Node
from wellposed.forms.pictures.layering import Layering, columns_of, layered

LAYER, HEIGHT, GUTTER = 0.82, 0.42, 0.7  # inches from layer to layer, of a node and between columns
TALLEST = 8  # layers of a column, about
BESIDE = 0.09  # between lines side by side
Kind = Literal["state", "input", "output"]
Stop = tuple[float, float, int]  # x, y and column


@dataclass(frozen=True)
class _Text:
    kind: Kind
    title: str
    below: str
    hover: str

    @property
    def width(self) -> float:
        return max(0.9, 0.078 * len(self.title) + 0.2, 0.066 * len(self.below) + 0.2)


def block_diagram(wiring: Wiring, title: str) -> Diagram:
    """Makes every block of states one node, below all that it reads, between input and output."""
    texts = _texts(wiring)
    links = [(*_ends(wiring, link), link) for link in wiring.links]
    forward = [(start, end) for start, end, link in links if link.feedback != "all" and start != end]
    inputs = len(wiring.sizes[1])
    placed = layered([text.width for text in texts], forward, pinned=range(inputs))
    sheet = _Sheet.of(placed, texts, [(start, end) for start, end, _ in links])
    loops = {k for start, end, link in links if link.feedback != "none" for k in (start, end)}
    nodes = tuple(
        Node(
            *sheet.place(*placed.spot(k)),
            text.width,
            HEIGHT,
            text.kind,
            text.title,
            text.below,
            text.hover,
            k in loops,
        )
        for k, text in enumerate(texts)
    )
    return Diagram(nodes, tuple(_arrows(wiring, links, nodes, placed, sheet)), title)


def _ends(wiring: Wiring, link: Link) -> tuple[int, int]:
    """Returns the numbers of the nodes that a link joins: inputs come first, then states, then outputs."""
    states, inputs, _ = (len(sizes) for sizes in wiring.sizes)
    start = link.column + (inputs if link.name in "AC" else 0)
    return start, inputs + link.row + (states if link.name in "CD" else 0)


def _texts(wiring: Wiring) -> list[_Text]:
    (states, inputs, outputs), form = wiring.sizes, wiring.form
    names, sources, results = wiring.labels
    shape = " x ".join(map(str, form.input_shape)) if len(inputs) == 1 else ""
    found = []
    for name, size in zip(sources, inputs, strict=True):
        found.append(_Text("input", name, shape or f"{size:,}", f"<b>input {name}</b><br>{size:,} numbers"))
    for name, size, phi in zip(names, states, form.activations, strict=True):
        below = f"{phi.name if len(phi.name) <= 24 else phi.name[:22] + '...'} of {size:,}"
        hover = f"<b>{escape(name)}</b><br>{escape(phi.name)} of {size:,} states"
        found.append(_Text("state", name if len(name) <= 30 else f"...{name[-27:]}", below, hover))
    for name, size in zip(results, outputs, strict=True):
        found.append(_Text("output", name, f"{size:,}", f"<b>output {name}</b><br>{size:,} numbers"))
    return found


@dataclass(frozen=True)
class _Sheet:
    """Where layers are on the sheet, one column or several."""

    column: list[int]
    shift: list[float]  # of every column
    edge: list[float]  # right end of every column
    height: float

    @classmethod
    def of(cls, placed: Layering, texts: Sequence[_Text], pairs: Sequence[tuple[int, int]]) -> "_Sheet":
        """Breaks the layers into columns and puts those side by side."""
        column = columns_of([_passing(placed, pairs, k) for k in range(len(placed.rows) - 1)], TALLEST)
        shift: list[float] = []
        edge: list[float] = []
        for number in range(max(column) + 1):
            spots = [spot for k, row in enumerate(placed.rows) if column[k] == number for spot in row]
            half = {spot: texts[spot[0]].width / 2 if placed.layer[spot[0]] == spot[1] else 0.1 for spot in spots}
            left = min(placed.x[spot] - half[spot] for spot in spots)
            shift.append((edge[-1] + GUTTER if edge else 0.0) - left)
            edge.append(max(placed.x[spot] + half[spot] for spot in spots) + shift[-1])
        return cls(column, shift, edge, LAYER * (max(column.count(k) for k in column) - 1))

    def place(self, x: float, layer: int) -> tuple[float, float]:
        """Returns where a spot of a layer is."""
        number = self.column[layer]
        return x + self.shift[number], LAYER * (layer - self.column.index(number))


def _passing(placed: Layering, pairs: Sequence[tuple[int, int]], layer: int) -> int:
    """Counts the nodes with lines from a layer or above to below it, and every line back as many."""
    depth = placed.layer
    down = {start for start, end in pairs if depth[start] <= layer < depth[end]}
    return len(down) + len(pairs) * any(depth[end] <= layer < depth[start] for start, end in pairs)


def _arrows(
    wiring: Wiring, links: Sequence[tuple[int, int, Link]], nodes: Sequence[Node], placed: Layering, sheet: _Sheet
) -> list[Arrow]:
    arriving: dict[int, list[tuple[float, int, Link]]] = defaultdict(list)
    arrows = []
    for start, end, link in links:
        if start == end or link.feedback == "all":
            loops = {i for i, j, _ in links if i == j}
            arrows.append(_block_arrow(wiring, link, _back(nodes, start, end, loops)))
        else:
            arriving[end].append((placed.route(start, end)[-2][0], start, link))
    for end, found in arriving.items():
        found.sort(key=lambda entry: entry[0])
        for number, (_, start, link) in enumerate(found):
            port = (number - (len(found) - 1) / 2) * min(0.16, 0.6 * nodes[end].width / len(found))
            arrows.append(
                _block_arrow(wiring, link, _down(nodes[start], nodes[end], placed.route(start, end), port, sheet))
            )
    return arrows


def _block_arrow(wiring: Wiring, link: Link, points: np.ndarray) -> Arrow:
    first, *rest = map(escape, wiring.about(link))
    role = "feedback" if link.feedback != "none" else link.role
    return Arrow(points, role, link.kind, "<br>".join([f"<b>{first}</b>", *rest]))


def _down(start: Node, end: Node, way: Sequence[tuple[float, int]], port: float, sheet: _Sheet) -> np.ndarray:
    """Leads from the bottom of a node to the top of another, straight down through every layer between."""
    stops = [(start.x, start.y + HEIGHT / 2, sheet.column[way[0][1]])]
    for x, layer in way[1:-1]:
        across, down = sheet.place(x, layer)
        stops += [(across, down + side * HEIGHT / 2, sheet.column[layer]) for side in (-1, 1)]
    stops.append((end.x + port, end.y - HEIGHT / 2, sheet.column[way[-1][1]]))
    pieces = [
        _bend(a[:2], b[:2]) if a[2] == b[2] else _over(a, b, sheet, 0.0 if b is stops[-1] else BESIDE)
        for a, b in pairwise(stops)
    ]
    return np.concatenate([pieces[0], *(piece[1:] for piece in pieces[1:])])


def _bend(a: tuple[float, float], b: tuple[float, float], count: int = 14) -> np.ndarray:
    """Leaves and arrives vertically."""
    t = np.linspace(0, 1, 2 if abs(a[0] - b[0]) < 1e-9 else count)
    ease = t * t * (3 - 2 * t)
    return np.stack([a[0] + (b[0] - a[0]) * ease, a[1] + (b[1] - a[1]) * t], axis=1)


def _over(a: Stop, b: Stop, sheet: _Sheet, inside: float) -> np.ndarray:
    """Leads from the foot of a column through the gutter to the head of the next, on round corners.

    Lines of one node lie side by side, those that go on to further layers by `inside` nearer to the first column.
    """
    between = sheet.edge[a[2]] + GUTTER / 2 - inside
    foot, head = a[1] + 0.3 - inside, -HEIGHT / 2 - 0.3 - inside
    corners = [a[:2], (a[0], foot), (between, foot), (between, head), (b[0], head), b[:2]]
    points = [np.array(corners[0])[None]]
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        points.append(_rounded(np.array(before), np.array(corner), np.array(after)))
    return np.concatenate([*points, np.array(corners[-1])[None]])


def _rounded(before: np.ndarray, corner: np.ndarray, after: np.ndarray, radius: float = 0.16) -> np.ndarray:
    """Replaces a corner by a curve."""
    lengths = [max(float(np.linalg.norm(end - corner)), 1e-9) for end in (before, after)]
    start, end = (
        corner + (place - corner) * min(radius / length, 0.5)
        for place, length in zip((before, after), lengths, strict=True)
    )
    t = np.linspace(0, 1, 8)[:, None]
    curve: np.ndarray = (1 - t) ** 2 * start + 2 * (1 - t) * t * corner + t**2 * end
    return curve


def _back(nodes: Sequence[Node], start: int, end: int, loops: set[int]) -> np.ndarray:
    """Leads from the right of a node around everything on the way to the right of another, or of itself."""
    a, b = nodes[start], nodes[end]
    if start == end:
        side, out = a.x + a.width / 2, a.x + a.width / 2 + 0.5
        corners = [(side, a.y + 0.11), (out, a.y + 0.3), (out, a.y - 0.3), (side, a.y - 0.11)]
    else:
        low, high = min(a.y, b.y) - 0.1, max(a.y, b.y) + 0.1
        near = [k for k, node in enumerate(nodes) if low <= node.y <= high]
        edge = max(nodes[k].x + nodes[k].width / 2 + (0.7 if k in loops else 0.0) for k in near)
        out = edge + 0.35 + 0.15 * (high - low)
        corners = [(a.x + a.width / 2, a.y), (out, a.y), (out, b.y), (b.x + b.width / 2, b.y)]
    t = np.linspace(0, 1, 28)[:, None]
    weights = ((1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3)
    return np.sum([weight * np.array(corner) for weight, corner in zip(weights, corners, strict=True)], axis=0)
