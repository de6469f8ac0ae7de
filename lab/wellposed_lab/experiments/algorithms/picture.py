"""Mazes with the paths that a model has found, kept in records as digits and drawn from them."""

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import MissingExtraError, require
from wellposed_lab.engine.store import Record
from wellposed_lab.report.figures import best_scale

WALL, OPEN, FOUND, MISSED, WRONG, START, END = range(7)
COLOURS = ("#1f2937", "#ffffff", "#1f5fd0", "#f2b705", "#c2410c", "#00795a", "#b0508a")
NAMES = {
    FOUND: "path, found",
    MISSED: "path, missed",
    WRONG: "marked, not on the path",
    START: "start",
    END: "end",
}
SHOWN = ("deq", "ffw", "deq-noise-0db", "ffw-noise-0db")
KEY = "mazes"  # among the facts of a record


def drawn_maze(u: Tensor, target: Tensor, logits: Tensor, pixels: int) -> list[str]:
    """Writes a maze (3, side, side) with the answer (side, side) as rows of digits, one a square.

    Example:
        >>> u = torch.tensor([[0.0, 0, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).expand(3, 3, 5).clone()
        >>> u[1, 1, 1] = u[0, 1, 3] = 1.0
        >>> u[1:, 1, 3] = 0.0
        >>> path = torch.tensor([[0.0, 0, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
        >>> drawn_maze(u, path, path - 0.5, pixels=1)
        ['00000', '05260', '00000']
    """
    first, last = pixels - 1, u.shape[-1] - pixels + 1
    (u, truth, marked) = (
        part[..., first:last:pixels, first:last:pixels] for part in (u, target > 0.5, logits > 0)
    )
    codes = torch.where(u.amax(0) > 0, OPEN, WALL)
    for where, code in (
        (truth & marked, FOUND),
        (truth & ~marked, MISSED),
        (~truth & marked, WRONG),
        ((u[1] > 0) & (u[0] == 0), START),
        ((u[0] > 0) & (u[1] == 0), END),
    ):
        codes = torch.where(where, code, codes)
    return ["".join(map(str, row)) for row in codes.tolist()]


def draw_answers(records: Sequence[Record]) -> bytes | None:
    """Draws the mazes of the first seed, a row a model, as PNG; None where there are none or no matplotlib."""
    scale = best_scale(records)
    found = {r.model: r.facts[KEY] for r in records if r.scale == scale and r.seed == 0 and r.facts.get(KEY)}
    shown = [model for model in SHOWN if model in found]
    if not shown:
        return None
    try:
        canvas, colours, patches = (
            require(f"matplotlib.{part}", "plots") for part in ("figure", "colors", "patches")
        )
    except MissingExtraError:
        return None
    sizes = list(found[shown[0]])
    page = canvas.Figure(figsize=(2.9 * len(sizes), 3.0 * len(shown) + 0.5), layout="constrained")
    axes = page.subplots(len(shown), len(sizes), squeeze=False)
    for line, model in zip(axes, shown, strict=True):
        for place, size in zip(line, sizes, strict=True):
            _panel(place, found[model].get(size, ["0"]), f"{model}, {size} x {size}", colours)
    page.legend(handles=[patches.Patch(color=COLOURS[code], label=name) for code, name in NAMES.items()],
                loc="outside lower center", ncols=len(NAMES), fontsize=8, frameon=False)  # fmt: skip
    stream = io.BytesIO()
    page.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _panel(place: Any, lines: Sequence[str], title: str, colours: Any) -> None:
    codes = [[int(digit) for digit in line] for line in lines]
    place.imshow(codes, cmap=colours.ListedColormap(COLOURS), vmin=-0.5, vmax=6.5, interpolation="nearest")
    off = sum(digit in (MISSED, WRONG) for line in codes for digit in line)
    place.set_title(f"{title}: " + (f"{off} wrong" if off else "solved"), fontsize=8.5, loc="left")
    place.set_xticks([])
    place.set_yticks([])
