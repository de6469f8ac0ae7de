"""spy: the block matrix of a form as a picture."""

import os
from typing import Any

from wellposed.errors import require, unknown_name
from wellposed.forms.form import ImplicitForm
from wellposed.forms.links import COLOURS, MEANING, Wiring
from wellposed.forms.pictures.page import is_page, write_page
from wellposed.forms.pictures.raster import SCALES, Raster, Scale, raster
from wellposed.forms.pictures.spy_page import interactive

SIDE = 8.2  # inches
GRID, INK = "#d3d9e1", "#1c2530"


def spy(
    form: ImplicitForm,
    path: str | os.PathLike[str] | None = None,
    *,
    scale: Scale = "auto",
    pixels: int = 1600,
    title: str | None = None,
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
    page, wiring = is_page(path), Wiring(form)
    n, p, q = form.sizes
    shown = title or f"[[A, B], [C, D]] of {n:,} states, {p:,} inputs and {q:,} outputs"
    picture = raster(wiring, pixels, scale)
    if page and path is not None:
        figure = interactive(wiring, picture)
        count = sum(link.operator.nonzeros() for link in wiring.links)
        about = f"{count:,} non-zero entries. Hover for details, drag or scroll to zoom, double-click to go back."
        write_page(figure, path, shown, about, {MEANING[role]: COLOURS[role] for role in picture.roles})
        return figure
    figure = _still(wiring, picture, shown)
    if path is not None:
        figure.savefig(path, dpi=200)
    return figure


def _still(wiring: Wiring, picture: Raster, title: str) -> Any:
    canvas, patches = (require(f"matplotlib.{name}", extra="plots") for name in ("figure", "patches"))
    height, width, _ = picture.pixels.shape
    figure = canvas.Figure(figsize=(SIDE, SIDE * height / width + 0.35), layout="constrained")
    axes = figure.subplots()
    axes.imshow(picture.pixels, extent=(0, width, height, 0), interpolation="antialiased")
    _draw_lines(axes, picture)
    states, inputs, outputs = wiring.labels
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
