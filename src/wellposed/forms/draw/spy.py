"""The block matrix of a form as a picture.

`raster` paints the pattern of [[A, B], [C, D]]: how much each pixel holds, block by block. `spy` shows it as a
still picture (matplotlib) or as an interactive one (plotly).
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from wellposed.errors import require, unknown_name
from wellposed.forms.draw.page import SAVED_AS, is_page, save_figure, write_page
from wellposed.forms.draw.summary import COLOURS, MEANING, BlockEdge, BlockGraph, Role
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators.entries import entries
from wellposed.pages.images import png_address

Scale = Literal["auto", "linear", "sqrt", "log"]
SMALLEST = 0.014  # share of the picture that a block has at least
FAINTEST = 0.3  # strength of the colour where a spot has the smallest of entries
SPARSE = 0.05  # share of filled spots up to which they are drawn wider
SCALES = {"linear": float, "sqrt": math.sqrt, "log": lambda size: math.log2(1 + size)}


@dataclass(frozen=True)
class Axis:
    """One side of the picture: blocks of states, and after a gap those of inputs or outputs."""

    edges: tuple[tuple[int, int], ...]  # first and last pixel of every block
    states: int  # how many of the blocks are states

    @property
    def length(self) -> int:
        """How many pixels it has."""
        return self.edges[-1][1]

    @property
    def sections(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last pixel of the states, and of the rest."""
        cut = self.states
        return (self.edges[0][0], self.edges[cut - 1][1]), (self.edges[cut][0], self.edges[-1][1])

    def lines(self, low: int, high: int) -> list[int]:
        """Returns where blocks meet strictly between two pixels."""
        return sorted({edge for pair in self.edges for edge in pair if low < edge < high})

    def ticks(self, labels: Sequence[str], room: float) -> tuple[list[float], list[str]]:
        """Places the names of blocks, leaving out those that would be closer than `room` to the one before."""
        places: list[float] = []
        names: list[str] = []
        for (start, end), label in zip(self.edges, labels, strict=True):
            middle = (start + end) / 2
            if not places or middle - places[-1] >= room:
                places.append(middle)
                names.append(label if len(label) <= 28 else f"...{label[-25:]}")
        return places, names


@dataclass(frozen=True)
class Raster:
    """A picture of [[A, B], [C, D]] and where its blocks are."""

    pixels: np.ndarray  # (height, width, 3) of bytes
    rows: Axis
    columns: Axis
    roles: tuple[Role, ...]  # those that occur

    def box(self, edge: BlockEdge) -> tuple[int, int, int, int]:
        """Returns left, right, top and bottom of a block."""
        row = edge.row + (self.rows.states if edge.name in "CD" else 0)
        column = edge.column + (self.columns.states if edge.name in "BD" else 0)
        return *self.columns.edges[column], *self.rows.edges[row]

    @property
    def frames(self) -> list[tuple[int, int, int, int]]:
        """Left, right, top and bottom of A, B, C and D."""
        return [(*across, *down) for down in self.rows.sections for across in self.columns.sections]


def raster(block_graph: BlockGraph, pixels: int, scale: Scale) -> Raster:
    """Draws every non-zero block where it stands in the matrix.

    Args:
        block_graph: of the form.
        pixels: on the side of A.
        scale: how the size of a block grows with its number of states.
    """
    states, inputs, outputs = block_graph.sizes
    if scale == "auto":
        smallest = min(size for size in (*states, *inputs, *outputs, 1 << 62) if size)
        scale = "linear" if smallest >= 2 * SMALLEST * sum(states) else "sqrt"
    rows, columns = (_block_axis(states, others, pixels, scale) for others in (outputs, inputs))
    canvas = np.ones((rows.length, columns.length, 3), dtype=np.float32)
    picture = Raster(canvas, rows, columns, ())
    seen: set[Role] = set()
    for edge in block_graph.edges:
        left, right, top, bottom = picture.box(edge)
        forward, feedback = density(edge, bottom - top, right - left)
        ahead: Role = "weights" if edge.role == "feedback" else edge.role
        for sums, role in ((forward, ahead), (feedback, "feedback")):
            if sums.any():
                seen.add(role)
                # More of the colour where entries are many or large.
                share = FAINTEST + (1 - FAINTEST) * np.sqrt(sums / sums.max())
                strength = np.where(sums > 0, share, 0.0)[..., None].astype(np.float32)
                colour = np.array([int(COLOURS[role][k : k + 2], 16) / 255 for k in (1, 3, 5)], dtype=np.float32)
                canvas[top:bottom, left:right] += strength * (colour - canvas[top:bottom, left:right])
    roles = tuple(role for role in COLOURS if role in seen)
    return Raster((255 * canvas).round().astype(np.uint8), rows, columns, roles)


def _block_axis(states: Sequence[int], others: Sequence[int], pixels: int, scale: Scale) -> Axis:
    """Gives every block its share of the pixels; the others are on the scale of the states."""
    weight = SCALES[scale]
    shares = [weight(size) for size in states]
    total = sum(shares) or sum(map(weight, others)) or 1.0
    least = max(4, round(SMALLEST * pixels)) / pixels
    wide = [max(least, share / total) for share in shares]
    factor = min(1.0, 1 / sum(wide))
    rest = [min(0.4, max(least, weight(size) / total)) for size in others]
    widths = [max(2, round(pixels * share * factor)) for share in (*wide, *rest)]
    gap = max(6, pixels // 100)
    ends = list(accumulate(widths))
    moved = [(end - width, end) for end, width in zip(ends, widths, strict=True)]
    count = len(states)
    return Axis((*moved[:count], *((a + gap, b + gap) for a, b in moved[count:])), count)


def density(edge: BlockEdge, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Adds up absolute values at each of ``(height, width)`` spots, of entries that do not and that do feed back.

    A block with fewer entries than spots has every entry on several of them.
    """
    n, m = edge.operator.shape
    down, across = min(n, height), min(m, width)
    sums = torch.zeros(2, down * across, dtype=torch.float64)
    for rows, columns, values in entries(edge.operator):
        spot = (rows * down // n) * across + columns * across // m
        spot += _feeds_back(edge, columns - rows) * (down * across)
        size = values.abs().nan_to_num(1.0, posinf=1.0).double()
        sums += torch.bincount(spot.cpu(), size.cpu(), minlength=2 * down * across).view(2, -1)
    shares = sums.view(2, down, across).numpy()
    stretch = np.ix_(np.arange(height) * down // height, np.arange(width) * across // width)
    forward, feedback = (_thickened(share) if (down, across) < (n, m) else share for share in shares)
    return forward[stretch], feedback[stretch]


def _thickened(share: np.ndarray) -> np.ndarray:
    """Makes lines and dots two spots wide where most spots are empty."""
    if np.count_nonzero(share) > SPARSE * share.size:
        return share
    wide = np.pad(share, ((1, 0), (1, 0)))
    return np.maximum.reduce([wide[1:, 1:], wide[:-1, 1:], wide[1:, :-1], wide[:-1, :-1]])


def _feeds_back(edge: BlockEdge, offset: torch.Tensor) -> torch.Tensor:
    if edge.feedback in ("none", "all"):
        return torch.full_like(offset, edge.feedback == "all", dtype=torch.bool)
    return offset <= 0 if edge.feedback == "lower" else offset >= 0


SINGLE = 100  # rows and columns up to which every entry shows its value
ROOM = 30  # pixels of the picture between two names
Cells = tuple[list[list[int | None]], list[list[str]]]


def interactive(block_graph: BlockGraph, picture: Raster) -> Any:
    """Lays the picture below cells that say what they are: blocks, or entries where those are few."""
    graph = require("plotly.graph_objects", extra="plots")
    height, width, _ = picture.pixels.shape
    states, inputs, outputs = block_graph.labels
    source = {"source": png_address(picture.pixels), "sizing": "stretch", "sizex": width, "sizey": height}
    small = max(sum(block_graph.sizes[0]) + sum(sizes) for sizes in block_graph.sizes[1:]) <= SINGLE
    x = _edges(picture.columns, (*block_graph.sizes[0], *block_graph.sizes[1]), small)
    y = _edges(picture.rows, (*block_graph.sizes[0], *block_graph.sizes[2]), small)
    z, text = (_single_entries if small else _whole_blocks)(block_graph, picture, x, y)
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


def _edges(axis: Axis, sizes: tuple[int, ...], small: bool) -> list[float]:
    """Returns where cells begin and end; the gap after the states is a cell that stays empty."""
    edges: set[float] = set()
    for (start, end), size in zip(axis.edges, sizes, strict=True):
        cells = max(1, size) if small else 1
        edges |= {start + (end - start) * k / cells for k in range(cells + 1)}
    return sorted(edges)


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


def _whole_blocks(block_graph: BlockGraph, picture: Raster, x: list[float], y: list[float]) -> Cells:
    z, text = _empty(x, y)
    for edge in block_graph.edges:
        left, _, top, _ = picture.box(edge)
        i, j = y.index(top), x.index(left)
        first, *rest = map(escape, block_graph.about(edge))
        z[i][j], text[i][j] = 1, "<br>".join([f"<b>{first}</b>", *rest])
    return z, text


def _single_entries(block_graph: BlockGraph, picture: Raster, x: list[float], y: list[float]) -> Cells:
    z, text = _empty(x, y)
    for edge in block_graph.edges:
        left, _, top, _ = picture.box(edge)
        down, across = y.index(top), x.index(left)
        about = "<br>".join(map(escape, block_graph.about(edge)))
        for piece in entries(edge.operator):
            for i, j, value in zip(*(part.tolist() for part in piece), strict=True):
                z[down + i][across + j] = 1
                text[down + i][across + j] = f"<b>{value:.4g}</b> in row {i} and column {j} of<br>{about}"
    return z, text


SIDE = 8.2  # inches
GRID, INK = "#d3d9e1", "#1c2530"


def spy(
    form: ImplicitForm,
    path: str | os.PathLike[str] | None = None,
    *,
    scale: Scale = "auto",
    pixels: int = 1600,
    title: str | None = None,
    model_file: str = SAVED_AS,
) -> Any:
    """Draws where [[A, B], [C, D]] has non-zero entries, in the manner of 003 Figures 2.5 and 5.14.

    Blocks of states have lines between them and their names beside them; a spot is darker where its block has
    more or larger entries. Entries of A that feed back, on the diagonal or on the wrong side of it, have their
    own colour.

    Args:
        form: any form, also of hundreds of thousands of states.
        path: a file ending with .png, .svg or .pdf, or with .html for a page to zoom and hover; None only returns.
        scale: how the side of a block grows with its size: "linear" is true to size, "sqrt" and "log" let small
            layers be seen beside large ones, "auto" is linear where all can be seen and else "sqrt".
        pixels: resolution of A.
        title: the heading.
        model_file: the file of the form, which a page names in its commands.

    Returns:
        The matplotlib figure, or the plotly figure of a page.

    Example:
        >>> import torch
        >>> form = ImplicitForm(torch.ones(3, 3).triu(1), torch.eye(3), torch.ones(1, 3))
        >>> [text.get_text() for text in spy(form).axes[0].get_yticklabels()]
        ['x', 'y']
    """
    if scale not in ("auto", *SCALES):
        raise unknown_name("scale", scale, ("auto", *SCALES))
    page, block_graph = is_page(path), BlockGraph(form)
    n, p, q = form.sizes
    shown = title or f"[[A, B], [C, D]] of {n:,} states, {p:,} inputs and {q:,} outputs"
    picture = raster(block_graph, pixels, scale)
    if page and path is not None:
        figure = interactive(block_graph, picture)
        count = sum(edge.operator.nonzeros() for edge in block_graph.edges)
        about = f"{count:,} non-zero entries. Hover for details, drag or scroll to zoom, double-click to go back."
        keys = {MEANING[role]: COLOURS[role] for role in picture.roles}
        write_page(figure, path, shown, about, keys, model_file=model_file)
        return figure
    figure = _still(block_graph, picture, shown)
    if path is not None:
        save_figure(figure, path, dpi=200)
    return figure


def _still(block_graph: BlockGraph, picture: Raster, title: str) -> Any:
    canvas, patches = (require(f"matplotlib.{name}", extra="plots") for name in ("figure", "patches"))
    height, width, _ = picture.pixels.shape
    figure = canvas.Figure(figsize=(SIDE, SIDE * height / width + 0.35), layout="constrained")
    axes = figure.subplots()
    axes.imshow(picture.pixels, extent=(0, width, height, 0), interpolation="antialiased")
    _draw_lines(axes, picture)
    states, inputs, outputs = block_graph.labels
    room = 8 * max(width, height) / (0.78 * SIDE * 72)  # eight points
    axes.set_yticks(*picture.rows.ticks((*states, *outputs), room), fontsize=7)
    axes.set_xticks(*picture.columns.ticks((*states, *inputs), room), fontsize=7, rotation=90)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=3, colors=INK)
    axes.spines[:].set_visible(False)
    handles = [patches.Patch(color=COLOURS[role], label=MEANING[role]) for role in picture.roles]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(1, len(handles)), fontsize=7.5, frameon=False
    )
    figure.suptitle(title, fontsize=10, color=INK)
    return figure


def _draw_lines(axes: Any, picture: Raster) -> None:
    """Draws the lines between blocks and the frames of A, B, C and D."""
    for left, right, top, bottom in picture.frames:
        axes.hlines(picture.rows.lines(top, bottom), left, right, color=GRID, linewidth=0.5)
        axes.vlines(picture.columns.lines(left, right), top, bottom, color=GRID, linewidth=0.5)
        outline = ([left, right, right, left, left], [top, top, bottom, bottom, top])
        axes.plot(*outline, color=INK, linewidth=0.9, clip_on=False)
    height, width, _ = picture.pixels.shape
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
