"""The node diagram of a form, as a still picture (matplotlib) or as an interactive one (plotly).

A `Diagram` of `Node` and `Arrow` objects is drawn by `still` or `interactive`. `block_diagram` makes every block
of states a node, `state_diagram` every single state of a small form (003 Figure 5.14); `graph` chooses between
them.
"""

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from wellposed.errors import require
from wellposed.forms.draw.layering import Layering, columns_of, layered
from wellposed.forms.draw.page import SAVED_AS, is_page, save_figure, write_page
from wellposed.forms.draw.summary import COLOURS, MEANING, BlockEdge, BlockGraph, Role
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators.entries import entries

INK, QUIET = "#1c2530", "#55606e"
FILL: dict[str, str] = {"state": "#faf5ea", "input": "#e8effc", "output": "#e3f3ee"}
RIM: dict[str, str] = {"state": "#a8905c", "input": "#1f5fd0", "output": "#00795a"}
LABELS = 40  # arrows up to which each is labelled
FAINT = 0.45
INCH = 95  # pixels of a page, at least


@dataclass(frozen=True)
class Node:
    """A box, or a disc where it has no second line; places grow to the right and downwards, in inches."""

    x: float
    y: float
    width: float
    height: float
    kind: Literal["state", "input", "output"]
    title: str
    below: str = ""
    hover: str = ""
    loop: bool = False

    @property
    def rim(self) -> str:
        """The colour of its outline."""
        return COLOURS["feedback"] if self.loop else RIM[self.kind]


@dataclass(frozen=True)
class Arrow:
    """A curve from one node to another."""

    points: np.ndarray  # (k, 2)
    role: Role
    label: str = ""
    hover: str = ""
    width: float = 1.3
    faint: bool = False


@dataclass(frozen=True)
class Diagram:
    """Nodes, arrows and a heading."""

    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]
    title: str

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Left, right, top and bottom, with a margin."""
        x = [value for node in self.nodes for value in (node.x - node.width / 2, node.x + node.width / 2)]
        y = [value for node in self.nodes for value in (node.y - node.height / 2, node.y + node.height / 2)]
        x += [float(value) for arrow in self.arrows for value in arrow.points[:, 0]]
        y += [float(value) for arrow in self.arrows for value in arrow.points[:, 1]]
        return min(x) - 0.2, max(x) + 0.2, min(y) - 0.15, max(y) + 0.15

    @property
    def roles(self) -> tuple[Role, ...]:
        """The colours that occur."""
        return tuple(role for role in COLOURS if any(arrow.role == role for arrow in self.arrows))

    @property
    def tall(self) -> int:
        """How many pixels a page gives it at least."""
        _, _, top, bottom = self.frame
        return round(INCH * (bottom - top))

    @property
    def labelled(self) -> bool:
        """Whether arrows are few enough for labels."""
        return len(self.arrows) <= LABELS


def still(diagram: Diagram) -> Any:
    """Draws with matplotlib."""
    canvas, patches, paths = (
        require(f"matplotlib.{name}", extra="plots") for name in ("figure", "patches", "path")
    )
    left, right, top, bottom = diagram.frame
    size = max(right - left, 3.6), bottom - top + 0.75
    figure = canvas.Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    axes.set_axis_off()
    for arrow in diagram.arrows:
        look = {"color": COLOURS[arrow.role], "linewidth": arrow.width, "arrowstyle": "-|>", "mutation_scale": 8}
        look["alpha"] = FAINT if arrow.faint else 1.0
        axes.add_patch(patches.FancyArrowPatch(path=paths.Path(arrow.points), shrinkA=0, shrinkB=0, **look))
        if diagram.labelled and arrow.label:
            way = np.concatenate([[0.0], np.linalg.norm(np.diff(arrow.points, axis=0), axis=1).cumsum()])
            x, y = (np.interp(way[-1] / 2, way, arrow.points[:, axis]) for axis in (0, 1))  # the curve's middle
            back = {"boxstyle": "round,pad=0.12", "color": "white", "alpha": 0.85}
            axes.text(x, y, arrow.label, fontsize=5.5, color=QUIET, ha="center", va="center", bbox=back)
    for node in diagram.nodes:
        _draw_node(axes, patches, node)
    handles = [patches.Patch(color=COLOURS[role], label=MEANING[role]) for role in diagram.roles]
    columns = max(1, min(len(handles), int(size[0] / 1.35)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
    figure.suptitle(diagram.title, fontsize=9, color=INK)
    return figure


def _draw_node(axes: Any, patches: Any, node: Node) -> None:
    look = {"facecolor": FILL[node.kind], "edgecolor": node.rim, "linewidth": 1.1, "zorder": 3}
    if not node.below:
        axes.add_patch(patches.Ellipse((node.x, node.y), node.width, node.height, **look))
        axes.text(node.x, node.y, node.title, fontsize=7, color=INK, ha="center", va="center", zorder=4)
        return
    corner = node.x - node.width / 2 + 0.06, node.y - node.height / 2 + 0.06
    box = patches.FancyBboxPatch(corner, node.width - 0.12, node.height - 0.12, "round,pad=0.06", **look)
    axes.add_patch(box)
    text = {"ha": "center", "va": "center", "zorder": 4}
    axes.text(node.x, node.y - 0.085, node.title, fontsize=7.5, color=INK, weight="bold", **text)
    axes.text(node.x, node.y + 0.095, node.below, fontsize=6.5, color=QUIET, **text)


def interactive(diagram: Diagram) -> Any:
    """Draws with plotly."""
    graph = require("plotly.graph_objects", extra="plots")
    left, right, top, bottom = diagram.frame
    traces = [_plotly_arrow(graph, arrow) for arrow in diagram.arrows]
    traces.append(_plotly_nodes(graph, diagram))
    plain = {"visible": False, "constrain": "domain"}
    return graph.Figure(
        traces,
        {
            "template": "none",
            "shapes": [_plotly_shape(node) for node in diagram.nodes],
            "xaxis": {**plain, "range": [left, right]},
            "yaxis": {**plain, "range": [bottom, top], "scaleanchor": "x"},
            "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
            "showlegend": False,
            "hovermode": "closest",
            "hoverlabel": {"bgcolor": "#fff", "font": {"size": 13, "color": INK}, "align": "left"},
            "dragmode": "pan",
        },
    )


def _plotly_arrow(graph: Any, arrow: Arrow) -> Any:
    sizes = [0.0] * (len(arrow.points) - 1) + [5.0 + 2 * arrow.width]
    colour = COLOURS[arrow.role]
    return graph.Scatter(
        x=arrow.points[:, 0].round(3).tolist(),
        y=arrow.points[:, 1].round(3).tolist(),
        mode="lines+markers",
        line={"color": colour, "width": 1.2 * arrow.width},
        opacity=FAINT if arrow.faint else 1,
        marker={
            "symbol": "arrow",
            "angleref": "previous",
            "size": sizes,
            "opacity": 1,
            "color": colour,
            "line": {"width": 0},
        },
        text=arrow.hover,
        hovertemplate="%{text}<extra></extra>",
    )


def _plotly_nodes(graph: Any, diagram: Diagram) -> Any:
    lines = [(f"<b>{escape(n.title)}</b>", f"<br>{escape(n.below)}" if n.below else "") for n in diagram.nodes]
    return graph.Scatter(
        x=[node.x for node in diagram.nodes],
        y=[node.y for node in diagram.nodes],
        mode="markers+text",
        marker={"size": 26, "opacity": 0},
        text=["".join(texts) for texts in lines],
        textfont={"size": 11, "color": INK},
        customdata=[node.hover or escape(node.title) for node in diagram.nodes],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _plotly_shape(node: Node) -> dict[str, Any]:
    x0, x1 = node.x - node.width / 2, node.x + node.width / 2
    y0, y1 = node.y - node.height / 2, node.y + node.height / 2
    look = {"fillcolor": FILL[node.kind], "line": {"color": node.rim, "width": 1.4}, "layer": "below"}
    kind = "rect" if node.below else "circle"
    return {"type": kind, "x0": x0, "x1": x1, "y0": y0, "y1": y1, **look}


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


def block_diagram(block_graph: BlockGraph, title: str) -> Diagram:
    """Makes every block of states one node, below all that it reads, between input and output."""
    texts = _texts(block_graph)
    edges = [(*_ends(block_graph, edge), edge) for edge in block_graph.edges]
    forward = [(start, end) for start, end, edge in edges if edge.feedback != "all" and start != end]
    inputs = len(block_graph.sizes[1])
    placed = layered([text.width for text in texts], forward, pinned=range(inputs))
    sheet = _Sheet.of(placed, texts, [(start, end) for start, end, _ in edges])
    loops = {k for start, end, edge in edges if edge.feedback != "none" for k in (start, end)}
    nodes = tuple(
        Node(
            *sheet.position(*placed.spot(k)),
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
    return Diagram(nodes, tuple(_arrows(block_graph, edges, nodes, placed, sheet)), title)


def _ends(block_graph: BlockGraph, edge: BlockEdge) -> tuple[int, int]:
    """Returns the numbers of the nodes that an edge joins: inputs come first, then states, then outputs."""
    states, inputs, _ = (len(sizes) for sizes in block_graph.sizes)
    start = edge.column + (inputs if edge.name in "AC" else 0)
    return start, inputs + edge.row + (states if edge.name in "CD" else 0)


def _texts(block_graph: BlockGraph) -> list[_Text]:
    (states, inputs, outputs), form = block_graph.sizes, block_graph.form
    names, sources, results = block_graph.labels
    shape = " x ".join(map(str, form.input_shape)) if len(inputs) == 1 else ""
    texts = []
    for name, size in zip(sources, inputs, strict=True):
        texts.append(_Text("input", name, shape or f"{size:,}", f"<b>input {name}</b><br>{size:,} numbers"))
    for name, size, phi in zip(names, states, form.activations, strict=True):
        below = f"{phi.name if len(phi.name) <= 24 else phi.name[:22] + '...'} of {size:,}"
        hover = f"<b>{escape(name)}</b><br>{escape(phi.name)} of {size:,} states"
        texts.append(_Text("state", name if len(name) <= 30 else f"...{name[-27:]}", below, hover))
    for name, size in zip(results, outputs, strict=True):
        texts.append(_Text("output", name, f"{size:,}", f"<b>output {name}</b><br>{size:,} numbers"))
    return texts


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

    def position(self, x: float, layer: int) -> tuple[float, float]:
        """Returns where a spot of a layer is."""
        number = self.column[layer]
        return x + self.shift[number], LAYER * (layer - self.column.index(number))


def _passing(placed: Layering, pairs: Sequence[tuple[int, int]], layer: int) -> int:
    """Counts the nodes with lines from a layer or above to below it, and every line back as many."""
    depth = placed.layer
    down = {start for start, end in pairs if depth[start] <= layer < depth[end]}
    return len(down) + len(pairs) * any(depth[end] <= layer < depth[start] for start, end in pairs)


def _arrows(
    block_graph: BlockGraph,
    edges: Sequence[tuple[int, int, BlockEdge]],
    nodes: Sequence[Node],
    placed: Layering,
    sheet: _Sheet,
) -> list[Arrow]:
    arriving: dict[int, list[tuple[float, int, BlockEdge]]] = defaultdict(list)
    arrows = []
    for start, end, edge in edges:
        if start == end or edge.feedback == "all":
            loops = {i for i, j, _ in edges if i == j}
            arrows.append(_block_arrow(block_graph, edge, _back(nodes, start, end, loops)))
        else:
            arriving[end].append((placed.route(start, end)[-2][0], start, edge))
    for end, incoming in arriving.items():
        incoming.sort(key=lambda entry: entry[0])
        for number, (_, start, edge) in enumerate(incoming):
            port = (number - (len(incoming) - 1) / 2) * min(0.16, 0.6 * nodes[end].width / len(incoming))
            arrows.append(
                _block_arrow(
                    block_graph, edge, _down(nodes[start], nodes[end], placed.route(start, end), port, sheet)
                )
            )
    return arrows


def _block_arrow(block_graph: BlockGraph, edge: BlockEdge, points: np.ndarray) -> Arrow:
    first, *rest = map(escape, block_graph.about(edge))
    role = "feedback" if edge.feedback != "none" else edge.role
    return Arrow(points, role, edge.kind, "<br>".join([f"<b>{first}</b>", *rest]))


def _down(start: Node, end: Node, way: Sequence[tuple[float, int]], port: float, sheet: _Sheet) -> np.ndarray:
    """Returns a line from the bottom of a node to the top of another, straight down through the layers between."""
    stops = [(start.x, start.y + HEIGHT / 2, sheet.column[way[0][1]])]
    for x, layer in way[1:-1]:
        across, down = sheet.position(x, layer)
        stops += [(across, down + side * HEIGHT / 2, sheet.column[layer]) for side in (-1, 1)]
    stops.append((end.x + port, end.y - HEIGHT / 2, sheet.column[way[-1][1]]))
    pieces = [
        _bend(a[:2], b[:2]) if a[2] == b[2] else _over(a, b, sheet, 0.0 if b is stops[-1] else BESIDE)
        for a, b in pairwise(stops)
    ]
    return np.concatenate([pieces[0], *(piece[1:] for piece in pieces[1:])])


def _bend(a: tuple[float, float], b: tuple[float, float]) -> np.ndarray:
    """Returns a curve that leaves and arrives vertically."""
    t = np.linspace(0, 1, 2 if abs(a[0] - b[0]) < 1e-9 else 14)
    ease = t * t * (3 - 2 * t)
    return np.stack([a[0] + (b[0] - a[0]) * ease, a[1] + (b[1] - a[1]) * t], axis=1)


def _over(a: Stop, b: Stop, sheet: _Sheet, inside: float) -> np.ndarray:
    """Returns a line from the foot of a column through the gutter to the head of the next, on round corners.

    Lines of one node lie side by side, those that go on to further layers by `inside` nearer to the first column.
    """
    between = sheet.edge[a[2]] + GUTTER / 2 - inside
    foot, head = a[1] + 0.3 - inside, -HEIGHT / 2 - 0.3 - inside
    corners = [a[:2], (a[0], foot), (between, foot), (between, head), (b[0], head), b[:2]]
    points = [np.array(corners[0])[None]]
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        points.append(_rounded(np.array(before), np.array(corner), np.array(after)))
    return np.concatenate([*points, np.array(corners[-1])[None]])


def _rounded(before: np.ndarray, corner: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Replaces a corner by a curve."""
    lengths = [max(float(np.linalg.norm(end - corner)), 1e-9) for end in (before, after)]
    start, end = (
        corner + (neighbour - corner) * min(0.16 / length, 0.5)
        for neighbour, length in zip((before, after), lengths, strict=True)
    )
    t = np.linspace(0, 1, 8)[:, None]
    curve: np.ndarray = (1 - t) ** 2 * start + 2 * (1 - t) * t * corner + t**2 * end
    return curve


def _back(nodes: Sequence[Node], start: int, end: int, loops: set[int]) -> np.ndarray:
    """Returns a line from the right of a node around all on the way to the right of another, or of itself."""
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


SIZE = 0.36  # of a node
Weight = tuple[int, int, float, Role]  # from, to, value, colour


def state_diagram(block_graph: BlockGraph, title: str) -> Diagram:
    """Draws states in layers where none feeds back, else on a circle between inputs and outputs."""
    n, p, q = block_graph.form.sizes
    weights = [weight for edge in block_graph.edges for weight in _weights(edge, n, p)]
    feedback = any(role == "feedback" for *_, role in weights)
    positions = None if feedback else _in_layers(n + p + q, p, weights)
    circle = positions is None
    positions = _around(n, p, q) if positions is None else positions
    nodes = tuple(_node(k, n, p, q, positions[k], weights) for k in range(n + p + q))
    largest: dict[str, float] = {}  # weight of each matrix
    for weight in weights:
        largest[_family(weight)] = max(largest.get(_family(weight), 1e-300), abs(weight[2]))
    arrows = tuple(_state_arrow(nodes, weight, largest[_family(weight)], circle) for weight in weights)
    return Diagram(nodes, arrows, title)


def _weights(edge: BlockEdge, n: int, p: int) -> list[Weight]:
    """Lists entries as arrows between nodes, which are inputs, states and outputs in this order."""
    down = p + (n if edge.name in "CD" else 0)
    across = p if edge.name in "AC" else 0
    weights: list[Weight] = []
    for piece in entries(edge.operator):
        for i, j, value in zip(*(part.tolist() for part in piece), strict=True):
            wrong = (edge.feedback == "lower" and j <= i) or (edge.feedback == "upper" and j >= i)
            weights.append((across + j, down + i, value, "feedback" if wrong else edge.role))
    return weights


def _in_layers(count: int, p: int, weights: Sequence[Weight]) -> list[tuple[float, float]] | None:
    """Places the nodes of a feed-forward form; None where it would be as deep as it has states."""
    placed = layered([SIZE] * count, [(start, end) for start, end, *_ in weights], pinned=range(p), gap=0.22)
    depth = max(placed.layer.values(), default=0)
    if depth > 8:
        return None
    return [(placed.x[k, placed.layer[k]], 1.15 * placed.layer[k]) for k in range(count)]


def _around(n: int, p: int, q: int) -> list[tuple[float, float]]:
    """Places states on a circle, the first layer (the last state) at its left, with inputs and outputs beside."""
    radius = max(0.9, 0.62 * n / (2 * math.pi) + 0.35)
    turns = [math.pi + 2 * math.pi * (n - 1 - k) / max(1, n) for k in range(n)]
    states = [(radius * math.cos(turn), radius * math.sin(turn)) for turn in turns]
    return [*_column(p, -radius - 1.2), *states, *_column(q, radius + 1.2)]


def _column(count: int, x: float) -> list[tuple[float, float]]:
    return [(x, 0.5 * (k - (count - 1) / 2)) for k in range(count)]


def _node(k: int, n: int, p: int, q: int, position: tuple[float, float], weights: Sequence[Weight]) -> Node:
    kind: Literal["state", "input", "output"] = "input" if k < p else "state" if k < p + n else "output"
    number, count = {"input": (k, p), "state": (k - p, n), "output": (k - p - n, q)}[kind]
    name = {"input": "u", "state": "x", "output": "y"}[kind] + (f"{number}" if count > 1 else "")
    loop = any(role == "feedback" and k in (start, end) for start, end, _, role in weights)
    read = sum(end == k for _, end, *_ in weights)
    hover = f"<b>{kind} {name}</b><br>reads {read}, read by {sum(start == k for start, *_ in weights)}"
    return Node(*position, SIZE, SIZE, kind, name, "", hover, loop)


def _family(weight: Weight) -> str:
    return {"input": "B", "output": "C", "through": "D"}.get(weight[3], "A")


def _state_arrow(nodes: Sequence[Node], weight: Weight, largest: float, circle: bool) -> Arrow:
    start, end, value, role = weight
    a, b = nodes[start], nodes[end]
    points = _loop(a, circle) if start == end else _arc(a, b, 0.14 if circle and role != "input" else 0.0)
    hover = f"<b>{value:.4g}</b><br>{b.title} reads {a.title}" + (", feeds back" if role == "feedback" else "")
    width = 0.4 + 1.5 * math.sqrt(min(1.0, abs(value) / largest))
    return Arrow(points, role, "", hover, width, faint=_family(weight) != "A")


def _arc(a: Node, b: Node, bend: float) -> np.ndarray:
    """Returns a curve to the left of its direction, so that an arrow and its opposite lie apart."""
    start, end = np.array([a.x, a.y]), np.array([b.x, b.y])
    along = end - start
    middle = (start + end) / 2 + bend * np.array([along[1], -along[0]])
    t = np.linspace(0, 1, 24 if bend else 2)[:, None]
    curve = (1 - t) ** 2 * start + 2 * (1 - t) * t * middle + t**2 * end
    return _cut(curve, SIZE / 2 + 0.02)


def _cut(curve: np.ndarray, radius: float) -> np.ndarray:
    """Removes what lies inside the nodes at both ends."""
    fine = np.linspace(0, 1, 200)
    grid = np.linspace(0, 1, len(curve))
    dense = np.stack([np.interp(fine, grid, curve[:, axis]) for axis in (0, 1)], axis=1)
    far = np.minimum(np.linalg.norm(dense - curve[0], axis=1), np.linalg.norm(dense - curve[-1], axis=1)) >= radius
    points = dense[far] if far.sum() > 1 else dense
    return points[np.unique(np.linspace(0, len(points) - 1, 24).round().astype(int))]


def _loop(node: Node, circle: bool) -> np.ndarray:
    """Returns a curve that leaves a node outwards and comes back to it."""
    out = np.array([node.x, node.y]) if circle else np.array([1.0, 0.0])
    out = out / max(float(np.linalg.norm(out)), 1e-9)
    side = np.array([-out[1], out[0]])
    centre = np.array([node.x, node.y])
    corners = [centre + 0.17 * out + 0.08 * side, centre + 0.62 * out + 0.3 * side]
    corners += [centre + 0.62 * out - 0.3 * side, centre + 0.17 * out - 0.08 * side]
    t = np.linspace(0, 1, 20)[:, None]
    weights = [(1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3]
    total: np.ndarray = sum(w * c for w, c in zip(weights, corners, strict=True))  # type: ignore[assignment]
    return total


STATES = 30  # states, inputs and outputs of one block up to which each is a node
PIXELS = 9000  # of a picture's side at most


def graph(
    form: ImplicitForm,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    model_file: str = SAVED_AS,
) -> Any:
    """Draws the blocks of a form as nodes and its operators as arrows (003 Figure 5.14).

    Layers run from the input at the top to the output, every block below what it reads, deep networks in several
    columns; arrows that feed back are red and lead up again. The single states of a form of one small block are
    nodes of their own.

    Args:
        form: any form.
        path: a file ending with .png, .svg or .pdf, or with .html for a page to zoom and hover; None only returns.
        title: the heading.
        model_file: the file of the form, which a page names in its commands.

    Returns:
        The matplotlib figure, or the plotly figure of a page.

    Example:
        >>> import torch
        >>> form = ImplicitForm(torch.ones(3, 3).triu(1), torch.eye(3), torch.ones(1, 3))
        >>> len(graph(form).axes[0].texts)  # three states, three inputs, one output
        7
    """
    page, block_graph = is_page(path), BlockGraph(form)
    n, p, q = form.sizes
    heading = title or f"{n:,} states, {p:,} inputs, {q:,} outputs"
    small = len(form.partition) == 1 and max(n, p, q) <= STATES
    diagram = state_diagram(block_graph, heading) if small else block_diagram(block_graph, heading)
    if page and path is not None:
        figure = interactive(diagram)
        about = "Hover nodes and arrows for details, drag to move, scroll to zoom, double-click to go back."
        keys = {MEANING[role]: COLOURS[role] for role in diagram.roles}
        write_page(figure, path, heading, about, keys, diagram.tall, model_file=model_file)
        return figure
    figure = still(diagram)
    if path is not None:
        save_figure(figure, path, dpi=min(200, PIXELS / max(figure.get_size_inches())))
    return figure
