"""Curves over seeds, and their drawing as files for papers and slides (matplotlib)."""

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wellposed.errors import InputError, require
from wellposed.forms.draw.page import save_figure
from wellposed_lab.config import SCALES
from wellposed_lab.engine.experiment import Figure
from wellposed_lab.engine.store import Record, settings, trained_alike

PALETTE = ("#1f5fd0", "#c2410c", "#00795a", "#b0508a", "#a86a00", "#2b7fb8", "#4b5563")  # the first is ours
DATA = "data"  # the data themselves, where they are drawn beside predictions
CROWD = 8  # models in one panel, above which only ours has a band
Dash = Literal["solid", "dash", "dot", "dashdot", "longdashdot"]
LOOKS: dict[str, tuple[tuple[Dash, ...], float]] = {  # dashes and width of the lines by role
    "ours": (("solid", "dash"), 2.6),
    "baseline": (("solid", "dash", "longdashdot"), 1.6),
    "control": (("dot", "dashdot"), 1.3),
}


@dataclass(frozen=True)
class Curve:
    """One model on one task: the median over its seeds, from the lowest to the highest."""

    model: str
    size: str | None
    role: str
    x: tuple[float | str, ...]
    middle: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int

    @property
    def name(self) -> str:
        """As tables write it."""
        return label(self.model, self.size)


@dataclass(frozen=True)
class Style:
    """How a model is drawn, told apart by colour, dashes and marker together."""

    colour: int  # of the palette
    dash: Dash
    marker: int
    width: float


def label(model: str, size: str | None) -> str:
    """Names a model with the paper of its size.

    Example:
        >>> label("mlp", "001")
        'mlp (001)'
    """
    return f"{model} ({size})" if size else model


def best_scale(records: Iterable[Record]) -> str | None:
    """Returns the scale at which most models were run on most tasks, of several the largest; tiny only alone.

    Example:
        >>> best_scale([]) is None
        True
    """
    kinds: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for record in records:
        kinds[record.scale].add((record.task, record.model))
    known = [scale for scale in SCALES if scale in kinds]
    return max(known, key=lambda scale: (scale != SCALES[0], len(kinds[scale]), known.index(scale)), default=None)


def figure_scale(figure: Figure, records: Sequence[Record]) -> str | None:
    """Returns the scale that a figure shows: the `best_scale` of its tasks, controls left aside."""
    own = [r for r in records if r.kind == "run" and r.error is None and r.task in figure.tasks]
    own = [r for r in own if _column(figure, r) and (not figure.models or r.model in figure.models)]
    return best_scale([r for r in own if r.role != "control"] or own)


def curves(figure: Figure, records: Sequence[Record]) -> dict[str, list[Curve]]:
    """Summarises the records of a suite for a figure, by task: ours first, then baselines and controls.

    Records of searches, of failed runs and of other scales than `figure_scale` are left out; of several settings
    of one model those with most seeds are taken, then the latest.
    """
    scale = figure_scale(figure, records)
    usable = [r for r in records if r.kind == "run" and r.error is None and r.scale == scale]
    if figure.models:
        usable = [record for record in usable if record.model in figure.models]
    if figure.alike:
        usable = trained_alike(usable, figure.alike)
    by_task = {}
    for task in figure.tasks:
        models = defaultdict(list)
        for record in usable:
            if record.task == task and _column(figure, record):
                models[record.model, record.size].append(record)
        drawn = [_curve(figure, _one_setting(figure, group)) for group in models.values()]
        by_task[task] = sorted((one for one in drawn if one.x), key=lambda one: list(LOOKS).index(one.role))
    return {task: drawn for task, drawn in by_task.items() if drawn}


def _one_setting(figure: Figure, records: list[Record]) -> list[Record]:
    """Returns the records of one setting, and of others that are at other points of the axis."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[settings(record)].append(record)
    first = sorted(groups.values(), key=lambda group: (len(group), max(record.started for record in group)))
    taken: list[Record] = []
    known: set[float | str | None] = set()
    for group in reversed(first):
        own = {at for record in group for at in _column(figure, record)}
        if not own & known:
            taken, known = [*taken, *group], known | own
    return taken


def _column(figure: Figure, record: Record) -> dict[float | str | None, float]:
    """Returns the values of one seed by their point on the axis."""
    if figure.over != "points":
        return {float(epoch): value for epoch, value in enumerate(record.series.get(figure.metric, ()), start=1)}
    drawn = [entry for entry in record.values if entry.metric == figure.metric]
    return {entry.at: entry.value for entry in drawn if not figure.only or entry.at in figure.only}


def _curve(figure: Figure, records: list[Record]) -> Curve:
    columns = [_column(figure, record) for record in records]
    points = _axis_points(figure, columns)
    summary = [_summary([column[at] for column in columns if at in column]) for at in points]
    low, middle, high = zip(*summary, strict=True) if summary else ((), (), ())
    first = records[0]
    labels = tuple(first.task if at is None else at for at in points)
    return Curve(first.model, first.size, first.role, labels, middle, low, high, len(records))


def _axis_points(figure: Figure, columns: list[dict[float | str | None, float]]) -> list[float | str | None]:
    """Returns the points of the axis: its numbers, where there are none its names, or its only point."""
    every = {at for column in columns for at in column}
    numbers = sorted(float(at) for at in every if isinstance(at, int | float))
    if numbers:
        return [at for at in numbers if at > 0 or "x" not in figure.log]
    names = sorted(at for at in every if isinstance(at, str))
    return [*names] if names else [None]


def _summary(values: list[float]) -> tuple[float, float, float]:
    known = [value for value in values if not math.isnan(value)]
    return (min(known), statistics.median(known), max(known)) if known else (math.nan,) * 3


def is_line(drawn: dict[str, list[Curve]]) -> bool:
    """Whether numbers run along the axis; else each model is a dot with whiskers."""
    return any(isinstance(at, float) for curves in drawn.values() for curve in curves for at in curve.x)


def styles(records: Iterable[Record]) -> dict[str, Style]:
    """Chooses how each model is drawn, the same in all figures of a suite.

    Our models are thick and blue, baselines have full or dashed lines in other colours, controls thin dotted ones.
    If more than two are ours, these take all colours and the full lines, and baselines are dashed.
    """
    roles = {label(record.model, record.size): record.role for record in records}
    chosen: dict[str, Style] = {}
    many = sum(role == "ours" for role in roles.values()) > len(LOOKS["ours"][0])
    for role, (dashes, width) in LOOKS.items():
        colours = range(len(PALETTE) if many else 1) if role == "ours" else range(1, len(PALETTE))
        for index, name in enumerate(name for name, known in roles.items() if known == role):
            dash = dashes[(index // len(colours) + (many and role == "baseline")) % len(dashes)]
            chosen[name] = Style(colours[index % len(colours)], dash, len(chosen) % len(_MARKERS), width)
    if DATA in chosen:
        chosen[DATA] = Style(len(PALETTE) - 1, "solid", 0, 2.2)
    return chosen


def far_below(family: Sequence[Curve]) -> list[str]:
    """Names the controls that would stretch a logarithmic axis to rounding level: exact fits, for example.

    They lie everywhere by a factor of 1000 and more below all other models.
    """
    lowest: dict[float | str, float] = {}
    for curve in family:
        for at, value in zip(curve.x, curve.low, strict=True):
            if curve.role != "control" and value > 0:
                lowest[at] = min(value, lowest.get(at, math.inf))
    return [curve.name for curve in family if curve.role == "control" and _is_below(curve, lowest)]


def _is_below(curve: Curve, lowest: dict[float | str, float]) -> bool:
    shared = [(at, value) for at, value in zip(curve.x, curve.high, strict=True) if at in lowest]
    return bool(shared) and all(1000 * value < lowest[at] for at, value in shared)


def draw(figure: Figure, records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draws a figure as PNG, PDF or SVG, by the ending of its path; 6 inches wide.

    Args:
        figure: one of a suite's.
        records: of that suite; of several scales the largest is drawn.
        path: where to.
    """
    drawn = curves(figure, records)
    if not drawn:
        tasks = ", ".join(figure.tasks)
        raise InputError(f"no record has {figure.metric!r} on {tasks}; run the suite and pass its records")
    canvas, chosen, lines = require("matplotlib.figure", extra="plots"), styles(records), is_line(drawn)
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    spare = rows * columns > len(drawn)
    models = {curve.name for curves in drawn.values() for curve in curves}
    legend = 0.17 * -(-len(models) // 3) if lines and not spare else 0.0
    panel = 2.5 if lines else 0.16 * max(map(len, drawn.values())) + 0.8
    page = canvas.Figure(figsize=(6, panel * rows + legend + 0.5), layout="constrained")
    axes = page.subplots(rows, columns, squeeze=False).flatten()
    for axis, (task, family) in zip(axes, drawn.items(), strict=False):
        _draw_panel(axis, figure, task, family, chosen, lines)
    if spare:
        axes[-1].set_axis_off()
    if lines:
        _legend(axes[-1] if spare else page, axes[: len(drawn)], drawn, list(chosen))
    page.suptitle(f"{figure.title} (as {figure.paper})" if figure.paper else figure.title, fontsize=10)
    save_figure(page, path, dpi=200)


def _draw_panel(
    panel: Any, figure: Figure, task: str, family: list[Curve], chosen: dict[str, Style], lines: bool
) -> None:
    hidden = far_below(family) if "y" in figure.log else []
    shown = [curve for curve in family if curve.name not in hidden]
    (_draw_lines if lines else _draw_dots)(panel, figure, shown, chosen)
    panel.set_title(task, fontsize=9)
    below = f"\nfar below: {', '.join(hidden)}" if hidden else ""
    panel.set_xlabel((figure.axis if lines else figure.label) + below, fontsize=8)
    if lines:
        panel.set_ylabel(figure.label, fontsize=8)
    panel.tick_params(which="both", labelsize=7.5)
    panel.grid(True, color="#e3e6ea", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_lines(panel: Any, figure: Figure, family: list[Curve], chosen: dict[str, Style]) -> None:
    for curve in reversed(family):
        style, x = chosen[curve.name], list(curve.x)
        colour = PALETTE[style.colour]
        above = 4 if curve.role == "ours" else 2
        low, middle, high = (_visible(edge, curve, figure) for edge in (curve.low, curve.middle, curve.high))
        if len(family) <= CROWD or curve.role == "ours":
            panel.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0, zorder=above - 1)
        panel.plot(
            x,
            middle,
            color=colour,
            linestyle=_LINES[style.dash],
            linewidth=0.75 * style.width,
            marker=_MARKERS[style.marker] if figure.over == "points" else None,
            markersize=3.2,
            label=curve.name,
            zorder=above,
        )
    panel.set_xscale("log" if "x" in figure.log else "linear")
    panel.set_yscale("log" if "y" in figure.log else "linear")


def _draw_dots(panel: Any, figure: Figure, family: list[Curve], chosen: dict[str, Style]) -> None:
    ranked = sorted(family, key=lambda curve: curve.middle[0], reverse=True)
    for index, curve in enumerate(ranked):
        colour = PALETTE[chosen[curve.name].colour if curve.role == "ours" else -1]
        filled = "white" if curve.role == "control" else colour
        panel.plot([curve.low[0], curve.high[0]], [index, index], color=colour, linewidth=1.2)
        panel.plot([curve.middle[0]], [index], "o", color=colour, markersize=4, markerfacecolor=filled)
    panel.set_yticks(range(len(ranked)), [curve.name for curve in ranked])
    panel.set_xscale("log" if "y" in figure.log else "linear")


def _legend(holder: Any, axes: Sequence[Any], drawn: dict[str, list[Curve]], names: Sequence[str]) -> None:
    handles: dict[str, Any] = {}
    for panel in axes:
        handles |= {name: handle for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    order, inside = [name for name in names if name in handles], hasattr(holder, "get_xlim")
    seeds = sorted({curve.seeds for curves in drawn.values() for curve in curves})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    bands = "bands" if max(map(len, drawn.values())) <= CROWD else "band of ours"
    holder.legend(
        [handles[name] for name in order],
        order,
        title=f"median of {count} seeds; {bands}: lowest to highest",
        loc="center" if inside else "outside lower center",
        ncols=1 if inside else 3,
        fontsize=7,
        title_fontsize=7,
        handlelength=3,  # a period of the longest dashes
        columnspacing=1,
        frameon=False,
    )


def _visible(values: Sequence[float], curve: Curve, figure: Figure) -> list[float]:
    """Leaves gaps where a logarithmic axis is undefined, and lets a band end at its line there."""
    if "y" not in figure.log:
        return list(values)
    pairs = zip(values, curve.middle, strict=True)
    return [value if value > 0 else (middle if middle > 0 else math.nan) for value, middle in pairs]


_LINES: dict[Dash, Any] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.3)),
    "dashdot": (0, (5, 1.5, 1, 1.5)),
    "longdashdot": (0, (9, 2, 2, 2)),
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
