"""Boxes and arrows, drawn as a still picture (matplotlib) or as an interactive one (plotly)."""

from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np

from wellposed.errors import require
from wellposed.forms.links import COLOURS, MEANING, Role

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
            x, y = _label_place(arrow)
            back = {"boxstyle": "round,pad=0.12", "color": "white", "alpha": 0.85}
            axes.text(x, y, arrow.label, fontsize=5.5, color=QUIET, ha="center", va="center", bbox=back)
    for node in diagram.nodes:
        _draw_node(axes, patches, node)
    handles = [patches.Patch(color=COLOURS[role], label=MEANING[role]) for role in diagram.roles]
    columns = max(1, min(len(handles), int(size[0] / 1.35)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
    figure.suptitle(diagram.title, fontsize=9, color=INK)
    return figure


def _label_place(arrow: Arrow) -> tuple[float, float]:
    """Returns the middle of the curve."""
    steps = np.linalg.norm(np.diff(arrow.points, axis=0), axis=1)
    way = np.concatenate([[0.0], steps.cumsum()])
    x, y = (float(np.interp(way[-1] / 2, way, arrow.points[:, axis])) for axis in (0, 1))
    return x, y


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
        text=["".join(parts) for parts in lines],
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
