"""The interactive figures of the report (plotly), with a legend of buttons and the numbers as a table."""

import json
import math
import re
from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import Any

from wellposed.errors import require
from wellposed.pages.markup import Html, element
from wellposed_lab.config import JUDGED_SCALES
from wellposed_lab.engine.experiment import Figure
from wellposed_lab.engine.statistics import number
from wellposed_lab.engine.store import Record
from wellposed_lab.report.figures import (
    CROWD,
    PALETTE,
    Curve,
    Style,
    curves,
    far_below,
    figure_scale,
    is_line,
    styles,
)

MARKERS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star")
POINTS = 120  # of one curve at most
AXIS = 38  # characters in a line of an axis label, as many as a telephone shows
GROUPS = {"ours": "Ours", "baseline": "Baselines", "control": "Controls"}
CLOSED = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "showlegend": False}


def library() -> Html:
    """Returns plotly.js as a script, so that the page needs no network."""
    code = require("plotly.offline", extra="plots").get_plotlyjs()
    return Html(
        '<script id="library">' + re.sub(r"</(script)", r"<\\/\1", code, flags=re.IGNORECASE) + "</script>"
    )


def figure_html(figure: Figure, records: Sequence[Record], key: str) -> Html | None:
    """Writes a figure: legend, one panel a task, caption and numbers; None where no record has it.

    Args:
        figure: one of a suite's.
        records: of that suite.
        key: unique on the page.
    """
    drawn = curves(figure, records)
    if not drawn:
        return None
    chosen, lines = styles(records), is_line(drawn)
    hidden = {name for family in drawn.values() for name in (far_below(family) if "y" in figure.log else ())}
    panels = [_panel(figure, task, family, chosen, hidden, lines) for task, family in drawn.items()]
    return element(
        "figure",
        element("h4", figure.title, id=f"{key}-title"),
        _legend(drawn, chosen, hidden) if lines else None,
        element("div", panels, class_="panels"),
        element("figcaption", _caption(figure, drawn, hidden, lines) + _scale(figure, records)),
        element(
            "details", element("summary", "The numbers of this figure"), _numbers(figure, drawn), class_="folded"
        ),
        class_="plot" if len(panels) == 1 else "plot wide",
        aria_labelledby=f"{key}-title",
    )


def _scale(figure: Figure, records: Sequence[Record]) -> str:
    """Names the scale of a figure where runs are at several, and the larger one that claims are judged by."""
    if len({record.scale for record in records} & set(JUDGED_SCALES)) < 2:
        return ""
    drawn = figure_scale(figure, records)
    known = {record.scale for record in records if record.task in figure.tasks}
    largest = next((scale for scale in JUDGED_SCALES if scale in known), drawn)
    judged = f"which has most models; claims are judged at scale {largest} where both of their sides are there"
    return f" Runs at scale {drawn}." if drawn == largest else f" Runs at scale {drawn}, {judged}."


def _caption(figure: Figure, drawn: dict[str, list[Curve]], hidden: set[str], lines: bool) -> str:
    restated = f"In the style of {figure.paper}. " if figure.paper else ""
    bands = "bands" if max(map(len, drawn.values())) <= CROWD else "band of ours"
    how = f"Line: median of the seeds; {bands}: lowest to highest."
    if figure.over == "time":
        how = "One seed, and the first only: its predictions step by step beside the data."
    if not lines:
        how = "Dot: median of the seeds; whiskers: lowest to highest; controls are hollow."
    absent = "Hidden at first" if lines else "Left out"
    below = f" {absent}, because far below: {', '.join(sorted(hidden))}." if hidden else ""
    return f"{restated}{how}{below}"


def _panel(
    figure: Figure, task: str, family: list[Curve], chosen: dict[str, Style], hidden: set[str], lines: bool
) -> Html:
    graph = require("plotly.graph_objects", extra="plots")
    shown = [curve for curve in family if curve.name not in hidden]
    traces = _lines(graph, figure, family, chosen, hidden) if lines else _dots(graph, shown)
    layout = (_line_layout if lines else _dot_layout)(figure, shown)
    drawing = graph.Figure(traces, {"template": "none", **CLOSED, **layout})
    data = json.dumps(json.loads(drawing.to_json(validate=False)), separators=(",", ":"))
    ends = "; ".join(f"{curve.name} {number(curve.middle[-1])}" for curve in family)
    where = f"Median at {number(family[0].x[-1])}" if isinstance(family[0].x[-1], float) else "Median"
    label = f"{figure.title} on {task}: {figure.metric} over {figure.axis}. {where}: {ends}."
    source = Html(data.replace("<", "\\u003c"))
    return element(
        "div",
        element("p", task, class_="panel-title"),
        element("div", class_="drawing", role="img", aria_label=label, style=f"height:{layout['height']}px"),
        element("script", source, type="application/json"),
        class_="panel",
    )


def _lines(
    graph: Any, figure: Figure, family: list[Curve], chosen: dict[str, Style], hidden: set[str]
) -> list[Any]:
    """Draws bands below lines and ours above the others."""
    log = "y" in figure.log
    bands = [curve for curve in family if len(family) <= CROWD or curve.role == "ours"]
    order = sorted(family, key=lambda curve: curve.role == "ours")
    traces = [_band(graph, curve, chosen[curve.name], curve.name not in hidden, log) for curve in bands]
    return traces + [
        _line(graph, figure, curve, chosen[curve.name], curve.name not in hidden, log) for curve in order
    ]


def _band(graph: Any, curve: Curve, style: Style, visible: bool, log: bool) -> Any:
    rows = [row for row in zip(curve.x, curve.low, curve.high, strict=True) if _drawable(row[2], log)]
    rows = [(x, low if _drawable(low, log) else high, high) for x, low, high in _thinned(rows)]
    edge = [(x, high) for x, _, high in rows] + [(x, low) for x, low, _ in reversed(rows)]
    return graph.Scatter(
        x=[x for x, _ in edge],
        y=[_short(y) for _, y in edge],
        mode="lines",
        line={"width": 0},
        fill="toself",
        hoverinfo="skip",
        visible=visible,
        meta={"model": curve.name, "colour": style.colour, "band": True},
    )


def _line(graph: Any, figure: Figure, curve: Curve, style: Style, visible: bool, log: bool) -> Any:
    rows = _thinned(list(zip(curve.x, curve.middle, curve.low, curve.high, strict=True)))
    markers = figure.over == "points"
    seeds = f"{curve.seeds} seed{'' if curve.seeds == 1 else 's'}"
    position = "epoch %{x}" if figure.over == "epoch" else "at %{x}"
    return graph.Scatter(
        x=[row[0] for row in rows],
        y=[_short(row[1]) if _drawable(row[1], log) else None for row in rows],
        customdata=[f"{number(row[1])} ({number(row[2])} to {number(row[3])}, {seeds})" for row in rows],
        hovertemplate=f"<b>{escape(curve.name)}</b><br>{position}: %{{customdata}}<extra></extra>",
        mode="lines+markers" if markers else "lines",
        line={"width": style.width, "dash": style.dash},
        marker={"symbol": MARKERS[style.marker], "size": 8 if curve.role == "ours" else 6},
        visible=visible,
        meta={"model": curve.name, "colour": style.colour},
    )


def _dots(graph: Any, family: list[Curve]) -> list[Any]:
    """Draws every model as a dot with whiskers, the lowest on top."""
    traces = []
    for curve in sorted(family, key=lambda one: -one.middle[0]):
        low, middle, high, name = curve.low[0], curve.middle[0], curve.high[0], escape(curve.name)
        symbol = "circle-open" if curve.role == "control" else "circle"
        trace = graph.Scatter(
            x=[_short(middle)],
            y=[name],
            error_x={"array": [_short(high - middle)], "arrayminus": [_short(middle - low)], "symmetric": False},
            hovertemplate=f"<b>{name}</b>: {number(middle)} ({number(low)} to {number(high)})<extra></extra>",
            mode="markers",
            marker={"symbol": symbol, "size": 9},
            meta={"model": curve.name, "colour": 0 if curve.role == "ours" else len(PALETTE) - 1},
        )
        traces.append(trace)
    return traces


def _line_layout(figure: Figure, family: list[Curve]) -> dict[str, Any]:
    axis, label = (wrap(text, AXIS) for text in (figure.axis, figure.label))
    along: dict[str, Any] = {"title": {"text": "<br>".join(map(escape, axis))}, "zeroline": False}
    along["type"] = "log" if "x" in figure.log else "linear"
    points = sorted({x for curve in family for x in curve.x if isinstance(x, float)})
    if figure.over == "points" and 1 < len(points) <= 8:
        along |= {"tickvals": points, "ticktext": [number(x) for x in points]}
    up: dict[str, Any] = {"title": {"text": "<br>".join(map(escape, label)), "standoff": 6}, "zeroline": False}
    up |= {"exponentformat": "power", "automargin": True}
    if "y" in figure.log:
        up |= {"type": "log", "dtick": _decades(family)}
    more = 15 * (len(axis) - 1)  # for further lines
    margin = {"l": 40, "r": 10, "t": 8, "b": 52 + more}
    return {"height": 340 + more, "margin": margin, "xaxis": along, "yaxis": up, "hovermode": "closest"}


def _dot_layout(figure: Figure, family: list[Curve]) -> dict[str, Any]:
    along: dict[str, Any] = {"title": {"text": figure.label}, "zeroline": False, "exponentformat": "power"}
    if "y" in figure.log:
        along |= {"type": "log", "dtick": _decades(family)}
    margin = {"l": 8, "r": 10, "t": 8, "b": 46}
    up = {"automargin": True, "zeroline": False}
    return {"height": 70 + 20 * len(family), "margin": margin, "xaxis": along, "yaxis": up, "hovermode": "closest"}


def _decades(family: list[Curve]) -> int | str:
    """Returns how many powers of ten lie between ticks; within two of them ticks are at 1, 2 and 5."""
    ends = [value for curve in family for value in (*curve.low, *curve.high) if 0 < value < math.inf]
    span = math.log10(max(ends)) - math.log10(min(ends)) if ends else 1.0
    return "D2" if span < 2 else 1 + int(span // 7)


def _drawable(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _thinned(rows: list[Any]) -> list[Any]:
    """Keeps first, last and evenly spread rows between."""
    if len(rows) <= POINTS:
        return rows
    return [rows[round(index * (len(rows) - 1) / (POINTS - 1))] for index in range(POINTS)]


def _legend(drawn: dict[str, list[Curve]], chosen: dict[str, Style], hidden: set[str]) -> Html:
    roles = {curve.name: curve.role for family in drawn.values() for curve in family}
    groups = []
    for role, title in GROUPS.items():
        names = [name for name in chosen if roles.get(name) == role]
        if names:
            buttons = [_key(name, chosen[name], name not in hidden) for name in names]
            groups.append(element("div", element("b", title), element("div", buttons), class_="group"))
    return element("div", groups, class_="legend", role="group", aria_label="Models shown")


def _key(name: str, style: Style, shown: bool) -> Html:
    line = f'<line class="k{style.colour} {style.dash}" x2="28" y1="6" y2="6" stroke-width="{style.width}"/>'
    sample = Html(f'<svg width="30" height="12" aria-hidden="true">{line}</svg>')
    return element(
        "button", sample, name, type="button", data_model=name, aria_pressed="true" if shown else "false"
    )


def _numbers(figure: Figure, drawn: dict[str, list[Curve]]) -> Html:
    tables = []
    for task, family in drawn.items():
        points = _columns(family)
        along = "epoch " if figure.over == "epoch" else ""
        titles = [along + (x if isinstance(x, str) else number(x)) for x in points]
        head = element("tr", [element("th", title, scope="col") for title in ("model", *titles)])
        rows = [element("tr", element("th", curve.name, scope="row"), _cells(curve, points)) for curve in family]
        caption = element("caption", f"{figure.metric} on {task}: median, and lowest to highest")
        inner = element("table", caption, element("thead", head), element("tbody", rows), class_="numbers")
        tables.append(
            element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=f"Numbers: {task}")
        )
    return Html("".join(tables))


def _columns(family: list[Curve]) -> list[Any]:
    points = sorted({x for curve in family for x in curve.x}, key=lambda x: (isinstance(x, str), x))
    if len(points) <= 10:
        return points
    return [points[round(share * (len(points) - 1))] for share in (0, 0.1, 0.25, 0.5, 1)]


def _cells(curve: Curve, points: list[Any]) -> list[Html]:
    known = {x: row for x, *row in zip(curve.x, curve.middle, curve.low, curve.high, strict=True)}
    cells = []
    for x in points:
        if x in known:
            middle, low, high = known[x]
            cells.append(element("td", number(middle), element("small", f"{number(low)} to {number(high)}")))
        else:
            cells.append(element("td", "-"))
    return cells
