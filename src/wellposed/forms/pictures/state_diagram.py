"""The diagram of a small form with its single states as nodes (003 Figure 5.14)."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from wellposed.forms.entries import entries
from wellposed.forms.links import Link, Role, Wiring
from wellposed.forms.pictures.diagram import Arrow, Diagram, Node
from wellposed.forms.pictures.layering import layered

SIZE = 0.36  # of a node
Weight = tuple[int, int, float, Role]  # from, to, value, colour


def state_diagram(wiring: Wiring, title: str) -> Diagram:
    """Draws states in layers where none feeds back, else on a circle between inputs and outputs."""
    n, p, q = wiring.form.sizes
    weights = [weight for link in wiring.links for weight in _weights(link, n, p)]
    feedback = any(role == "feedback" for *_, role in weights)
    places = None if feedback else _in_layers(n + p + q, p, weights)
    circle = places is None
    places = _around(n, p, q) if places is None else places
    nodes = tuple(_node(k, n, p, q, places[k], weights) for k in range(n + p + q))
    largest = _largest(weights)
    arrows = tuple(_state_arrow(nodes, weight, largest[_family(weight)], circle) for weight in weights)
    return Diagram(nodes, arrows, title)


def _weights(link: Link, n: int, p: int) -> list[Weight]:
    """Lists entries as arrows between nodes, which are inputs, states and outputs in this order."""
    down = p + (n if link.name in "CD" else 0)
    across = p if link.name in "AC" else 0
    found: list[Weight] = []
    for piece in entries(link.operator):
        for i, j, value in zip(*(part.tolist() for part in piece), strict=True):
            wrong = (link.feedback == "lower" and j <= i) or (link.feedback == "upper" and j >= i)
            found.append((across + j, down + i, value, "feedback" if wrong else link.role))
    return found


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


def _node(k: int, n: int, p: int, q: int, place: tuple[float, float], weights: Sequence[Weight]) -> Node:
    kind: Literal["state", "input", "output"] = "input" if k < p else "state" if k < p + n else "output"
    number, count = {"input": (k, p), "state": (k - p, n), "output": (k - p - n, q)}[kind]
    name = {"input": "u", "state": "x", "output": "y"}[kind] + (f"{number}" if count > 1 else "")
    loop = any(role == "feedback" and k in (start, end) for start, end, _, role in weights)
    read = sum(end == k for _, end, *_ in weights)
    hover = f"<b>{kind} {name}</b><br>reads {read}, read by {sum(start == k for start, *_ in weights)}"
    return Node(*place, SIZE, SIZE, kind, name, "", hover, loop)


def _family(weight: Weight) -> str:
    return {"input": "B", "output": "C", "through": "D"}.get(weight[3], "A")


def _largest(weights: Sequence[Weight]) -> dict[str, float]:
    """Returns the largest weight of each matrix."""
    found: dict[str, float] = {}
    for weight in weights:
        found[_family(weight)] = max(found.get(_family(weight), 1e-300), abs(weight[2]))
    return found


def _state_arrow(nodes: Sequence[Node], weight: Weight, largest: float, circle: bool) -> Arrow:
    start, end, value, role = weight
    a, b = nodes[start], nodes[end]
    points = _loop(a, circle) if start == end else _arc(a, b, 0.14 if circle and role != "input" else 0.0)
    hover = f"<b>{value:.4g}</b><br>{b.title} reads {a.title}" + (", feeds back" if role == "feedback" else "")
    width = 0.4 + 1.5 * math.sqrt(min(1.0, abs(value) / largest))
    return Arrow(points, role, "", hover, width, faint=_family(weight) != "A")


def _arc(a: Node, b: Node, bend: float) -> np.ndarray:
    """Curves to the left of its direction, so that an arrow and its opposite lie apart."""
    start, end = np.array([a.x, a.y]), np.array([b.x, b.y])
    along = end - start
    middle = (start + end) / 2 + bend * np.array([along[1], -along[0]])
    t = np.linspace(0, 1, 24 if bend else 2)[:, None]
    curve = (1 - t) ** 2 * start + 2 * (1 - t) * t * middle + t**2 * end
    return _cut(curve, SIZE / 2 + 0.02)


def _cut(curve: np.ndarray, radius: float) -> np.ndarray:
    """Takes off what lies inside the nodes at both ends."""
    fine = np.linspace(0, 1, 200)
    grid = np.linspace(0, 1, len(curve))
    dense = np.stack([np.interp(fine, grid, curve[:, axis]) for axis in (0, 1)], axis=1)
    far = np.minimum(np.linalg.norm(dense - curve[0], axis=1), np.linalg.norm(dense - curve[-1], axis=1)) >= radius
    kept = dense[far] if far.sum() > 1 else dense
    return kept[np.unique(np.linspace(0, len(kept) - 1, 24).round().astype(int))]


def _loop(node: Node, circle: bool) -> np.ndarray:
    """Leaves a node outwards and comes back to it."""
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
