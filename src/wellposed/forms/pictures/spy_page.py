"""The interactive picture of a block matrix (plotly)."""

from html import escape
from typing import Any

from wellposed.errors import require
from wellposed.forms.entries import entries
from wellposed.forms.links import Wiring
from wellposed.forms.pictures.page import png_address
from wellposed.forms.pictures.raster import Axis, Raster

SINGLE = 100  # rows and columns up to which every entry shows its value
ROOM = 30  # pixels of the picture between two names
Cells = tuple[list[list[int | None]], list[list[str]]]


def interactive(wiring: Wiring, picture: Raster) -> Any:
    """Lays the picture below cells that say what they are: blocks, or entries where those are few."""
    graph = require("plotly.graph_objects", extra="plots")
    height, width, _ = picture.pixels.shape
    states, inputs, outputs = wiring.labels
    source = {"source": png_address(picture.pixels), "sizing": "stretch", "sizex": width, "sizey": height}
    small = max(sum(wiring.sizes[0]) + sum(sizes) for sizes in wiring.sizes[1:]) <= SINGLE
    x, y = (_edges(axis, sizes, small) for axis, sizes in _sides(wiring, picture))
    z, text = (_single_entries if small else _whole_blocks)(wiring, picture, x, y)
    clear = [[0, "rgba(0,0,0,0)"], [1, "rgba(0,0,0,0)"]]
    look = {"colorscale": clear, "showscale": False, "hoverongaps": False}
    hover = graph.Heatmap(x=x, y=y, z=z, text=text, hovertemplate="%{text}<extra></extra>", **look)
    return graph.Figure(
        hover,
        {
            "template": "none",
            "images": [{**source, "xref": "x", "yref": "y", "x": 0, "y": 0, "layer": "below"}],
            "shapes": _plotly_lines(picture),
            "xaxis": _plotly_axis(picture.columns, (*states, *inputs)) | {"side": "top", "tickangle": -90},
            "yaxis": _plotly_axis(picture.rows, (*states, *outputs))
            | {"autorange": "reversed", "scaleanchor": "x"},
            "margin": {"l": 20, "r": 20, "t": 10, "b": 16},
            "hoverlabel": {"bgcolor": "#fff", "font": {"size": 13}, "align": "left"},
            "dragmode": "zoom",
        },
    )


def _sides(wiring: Wiring, picture: Raster) -> list[tuple[Axis, tuple[int, ...]]]:
    states, inputs, outputs = wiring.sizes
    return [(picture.columns, (*states, *inputs)), (picture.rows, (*states, *outputs))]


def _edges(axis: Axis, sizes: tuple[int, ...], small: bool) -> list[float]:
    """Returns where cells begin and end; the gap after the states is a cell that stays empty."""
    found: set[float] = set()
    for (start, end), size in zip(axis.edges, sizes, strict=True):
        parts = max(1, size) if small else 1
        found |= {start + (end - start) * k / parts for k in range(parts + 1)}
    return sorted(found)


def _plotly_axis(axis: Axis, labels: tuple[str, ...]) -> dict[str, Any]:
    places, names = axis.ticks(labels, ROOM)
    plain = {"showgrid": False, "zeroline": False, "automargin": True, "ticks": "", "constrain": "domain"}
    shown = [escape(name) for name in names]
    return {**plain, "tickvals": places, "ticktext": shown, "tickfont": {"size": 10}, "range": [0, axis.length]}


def _plotly_lines(picture: Raster) -> list[dict[str, Any]]:
    lines = []
    for left, right, top, bottom in picture.frames:
        lines += [_line(x, x, top, bottom, "#d3d9e1") for x in picture.columns.lines(left, right)]
        lines += [_line(left, right, y, y, "#d3d9e1") for y in picture.rows.lines(top, bottom)]
        lines += [_line(x, x, top, bottom, "#1c2530") for x in (left, right)]
        lines += [_line(left, right, y, y, "#1c2530") for y in (top, bottom)]
    return lines


def _line(x0: float, x1: float, y0: float, y1: float, colour: str) -> dict[str, Any]:
    return {"type": "line", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "line": {"color": colour, "width": 0.8}}


def _empty(x: list[float], y: list[float]) -> Cells:
    rows, columns = len(y) - 1, len(x) - 1
    return [[None] * columns for _ in range(rows)], [[""] * columns for _ in range(rows)]


def _whole_blocks(wiring: Wiring, picture: Raster, x: list[float], y: list[float]) -> Cells:
    z, text = _empty(x, y)
    for link in wiring.links:
        left, _, top, _ = picture.box(link)
        i, j = y.index(top), x.index(left)
        first, *rest = map(escape, wiring.about(link))
        z[i][j], text[i][j] = 1, "<br>".join([f"<b>{first}</b>", *rest])
    return z, text


def _single_entries(wiring: Wiring, picture: Raster, x: list[float], y: list[float]) -> Cells:
    z, text = _empty(x, y)
    for link in wiring.links:
        left, _, top, _ = picture.box(link)
        down, across = y.index(top), x.index(left)
        about = "<br>".join(map(escape, wiring.about(link)))
        for piece in entries(link.operator):
            for i, j, value in zip(*(part.tolist() for part in piece), strict=True):
                z[down + i][across + j] = 1
                text[down + i][across + j] = f"<b>{value:.4g}</b> in row {i} and column {j} of<br>{about}"
    return z, text
