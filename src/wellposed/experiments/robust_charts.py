"""Charts of certified accuracy and of bounds, as SVG text for the style sheet of the page around them."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from wellposed.experiments.svg import Scale

WIDTH, LEFT, RIGHT, TOP = 460, 92, 446, 30
COLOURS = 4  # of the style sheet


def accuracy_chart(epsilons: Sequence[float], lines: Mapping[str, Sequence[float]], title: str) -> str:
    """Draws shares of samples against the radius, with a dot at every radius.

    Example:
        >>> "<circle" in accuracy_chart([0.0, 0.1], {"certified": [0.9, 0.5]}, "accuracy")
        True
    """
    bottom = 236
    x = Scale(min(epsilons), max(epsilons), LEFT - 36, RIGHT - 8)
    y = Scale(0.0, 1.0, bottom, TOP)
    parts = [_grid(y(tick), f"{100 * tick:.0f} %", LEFT - 46) for tick in (0.0, 0.25, 0.5, 0.75, 1.0)]
    parts += [_tick(x(value), bottom, f"{value:g}") for value in _spaced(epsilons, x)]
    for style, (name, values) in enumerate(lines.items()):
        places = [f"{x(a):.1f} {y(b):.1f}" for a, b in zip(epsilons, values, strict=True)]
        parts.append(f'<path class="line s{style}" d="M{"L".join(places)}"/>')
        dots = (place.split() for place in places)
        parts += [f'<circle class="dot s{style}" cx="{a}" cy="{b}" r="3.5"/>' for a, b in dots]
        parts.append(_key(name, style, LEFT - 36 + 130 * style))
    parts.append(_text((LEFT + RIGHT) / 2 - 18, bottom + 38, "epsilon"))
    return _svg(title, parts, bottom + 46)


def width_chart(widths: Mapping[str, Mapping[str, float]], title: str) -> str:
    """Draws a row of dots a method, on a logarithmic axis; one colour a radius.

    Args:
        widths: by radius, then by method.

    Example:
        >>> "<title>0.5</title>" in width_chart({"0.1": {"box": 2.0, "crown": 0.5}}, "widths")
        True
    """
    shown = list(widths)[-COLOURS:]
    methods = list(dict.fromkeys(method for name in shown for method in widths[name]))
    values = [value for name in shown for value in widths[name].values() if value > 0 and math.isfinite(value)]
    bottom = TOP + 14 + 24 * len(methods)
    low, high = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))) if values else (0, 1)
    x = Scale(10.0**low, 10.0 ** max(high, low + 1), LEFT, RIGHT - 8, log=True)
    parts = [_grid(TOP + 22 + 24 * row, method, LEFT - 10) for row, method in enumerate(methods)]
    parts += [_tick(x(tick), bottom, f"{tick:g}") for tick in x.ticks()]
    for style, name in enumerate(shown):
        for row, method in enumerate(methods):
            value = widths[name].get(method, 0.0)
            if value > 0 and math.isfinite(value):
                place = f'cx="{x(value):.1f}" cy="{TOP + 22 + 24 * row}"'
                parts.append(f'<circle class="dot s{style}" {place} r="4.5"><title>{value:.4g}</title></circle>')
        parts.append(_key(name, style, LEFT - 36 + 92 * style, "dot"))
    parts.append(_text((LEFT + RIGHT) / 2, bottom + 38, "mean width of an output's bounds"))
    return _svg(title, parts, bottom + 46)


def _spaced(values: Sequence[float], x: Scale) -> list[float]:
    """Leaves out labels that would touch their neighbour."""
    kept: list[float] = []
    for value in sorted(set(values)):
        if not kept or x(value) - x(kept[-1]) > 34:
            kept.append(value)
    return kept


def _svg(title: str, parts: Sequence[str], height: float) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def _grid(y: float, name: str, start: float) -> str:
    return f'<path class="grid" d="M{start + 6:.0f} {y:.1f}H{RIGHT}"/>{_text(start, y + 4, name, "end")}'


def _tick(x: float, bottom: float, name: str) -> str:
    return f'<path class="axis" d="M{x:.1f} {bottom}v5"/>{_text(x, bottom + 18, name)}'


def _key(name: str, style: int, left: float, kind: str = "line") -> str:
    sample = f'<path class="line s{style}" d="M{left} 12h22"/>'
    if kind == "dot":
        sample = f'<circle class="dot s{style}" cx="{left + 12}" cy="12" r="4.5"/>'
    return sample + _text(left + 28, 16, name, "start")


def _text(x: float, y: float, content: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="text-anchor:{anchor}">{escape(content)}</text>'
