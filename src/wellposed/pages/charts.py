"""Small charts as SVG text, coloured by the style sheet of the page around them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

import numpy as np

from wellposed.pages.images import png_address, pooled, signed

WIDTH, HEIGHT = 400, 300
LEFT, RIGHT, BOTTOM = 52, 390, 256
STYLES = 4  # colours of lines and dots
MOST_PIXELS = 400  # of a side of a matrix


@dataclass(frozen=True)
class Series:
    """A line, a band, or a line with a band around it.

    Args:
        style: picks the colour.
        middle: the line; nothing draws the edges of the band as lines, the upper one dashed.
        low, high: the band; nothing draws none.
        dashed: whether the line is.
    """

    name: str
    style: int
    x: Sequence[float]
    middle: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False

    @property
    def values(self) -> list[float]:
        """All finite numbers that are drawn."""
        return [value for value in (*self.middle, *self.low, *self.high) if math.isfinite(value)]


@dataclass(frozen=True)
class Scale:
    """Maps numbers to pixels.

    Example:
        >>> Scale(1, 100, 0, 200, log=True)(10)
        100.0
        >>> Scale(0, 7, 0, 70).ticks()
        [0, 2, 4, 6]
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._place(self.low), self._place(self.high)
        share = (self._place(value) - low) / (high - low or 1.0)
        return self.start + share * (self.end - self.start)

    def _place(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self) -> list[float]:
        """Chooses round numbers."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, 1 + (last - first) // 6)]
        rough = (self.high - self.low) / 4 or 1.0
        unit = 10 ** math.floor(math.log10(rough))
        step = unit * min((m for m in (1, 2, 5, 10) if m * unit >= rough), default=10)
        first = math.ceil(self.low / step - 1e-9)
        return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], title: str, x_label: str, y_label: str) -> str:
    """Draws lines and bands over a logarithmic y axis."""
    ys = [max(value, 1e-20) for one in series for value in one.values]
    top = 34 + 16 * (len(series) > 2)
    lowest, highest = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))  # whole decades
    y = Scale(10.0**lowest, 10.0 ** max(highest, lowest + 1), BOTTOM, top, log=True)
    return _lines(series, title, (x_label, y_label), y)


def share_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, x_ticks: Sequence[float] | None = None
) -> str:
    """Draws shares from 0 to 100 %.

    Example:
        >>> drawn = share_chart([Series("a", 0, [0.0, 0.1], low=[0.9, 0.2], high=[0.9, 0.5])], "b", "c", "d")
        >>> drawn.count('class="line'), drawn.count('class="band')
        (3, 1)
    """
    y = Scale(0.0, 1.0, BOTTOM, 34 + 16 * (len(series) > 2))
    return _lines(series, title, (x_label, y_label), y, x_ticks)


def _lines(
    series: Sequence[Series],
    title: str,
    labels: tuple[str, str],
    y: Scale,
    x_ticks: Sequence[float] | None = None,
) -> str:
    xs = [value for one in series for value in one.x]
    x = Scale(min(xs), max(xs), LEFT + 8, RIGHT - 8)
    ticks = x.ticks() if x_ticks is None else spaced(x_ticks, x)
    share = not y.log
    shapes = [_axes(x, y, ticks, *labels, share=share)]
    shapes += [_band(one, x, y) for one in series if one.low]
    for one in series:
        edges = [(one.middle, one.dashed)] if one.middle else [(one.low, False), (one.high, True)]
        shapes += [_line(one, values, dashed, x, y) for values, dashed in edges]
    shapes += [_key(one.name, one.style, index, dashed=one.dashed) for index, one in enumerate(series)]
    return svg(title, shapes)


def histogram(counts: Mapping[str, Sequence[int]], title: str, x_label: str, y_label: str) -> str:
    """Draws how many samples have each whole number, one colour for every named sample."""
    values = [value for sample in counts.values() for value in sample]
    x = Scale(min(values) - 0.5, max(values) + 0.5, LEFT, RIGHT)
    numbers = {name: {value: sample.count(value) for value in set(sample)} for name, sample in counts.items()}
    top = 14 if len(counts) == 1 else 34
    y = Scale(0.0, max(count for one in numbers.values() for count in one.values()), BOTTOM, top)
    width = (x(1) - x(0)) / len(counts) * 0.9
    shapes = [_axes(x, y, [tick for tick in x.ticks() if tick == int(tick)], x_label, y_label)]
    for style, (name, one) in enumerate(numbers.items()):
        for value, count in sorted(one.items()):
            left = x(value) + (style - len(counts) / 2) * width
            box = f'x="{left:.1f}" y="{y(count):.1f}" width="{width:.1f}" height="{BOTTOM - y(count):.1f}"'
            shapes.append(f'<rect class="s{style}" {box}/>')
        shapes.append(_key(name, style, style, "bar") if len(counts) > 1 else "")
    return svg(title, shapes)


def bar_chart(values: Mapping[str, float], title: str, shown: Mapping[str, str]) -> str:
    """Draws horizontal bars from zero.

    Args:
        values: lengths, by name.
        shown: what is written beside each.

    Example:
        >>> bar_chart({"a": 1.0, "b": 2.0}, "lengths", {"a": "1 ms", "b": "2 ms"}).count("<rect")
        2
    """
    x = Scale(0.0, max(values.values()), 0, 290)
    shapes = []
    for row, (name, value) in enumerate(values.items()):
        top = 18 + 46 * row
        shapes.append(_text(2, top, escape(name), "start"))
        width = max(1.5, x(value))
        shapes.append(
            f'<rect class="s{row % STYLES}" x="2" y="{top + 6}" width="{width:.1f}" height="16" rx="2"/>'
        )
        shapes.append(_text(width + 10, top + 19, escape(shown[name]), "start"))
    return svg(title, shapes, 46 * len(values) + 8)


def limit_chart(values: Sequence[float], limit: float, title: str, x_label: str, y_label: str) -> str:
    """Draws bars from zero, and a line that none of them may reach.

    Example:
        >>> drawn = limit_chart([0.5, 0.9], 1.0, "row sums", "state", "sum")
        >>> drawn.count("<rect"), "dashed" in drawn
        (2, True)
    """
    x = Scale(0, len(values), LEFT, RIGHT)
    y = Scale(0.0, 1.12 * max(limit, *values), BOTTOM, 14)
    shapes = [_axes(x, y, [], x_label, y_label)]
    width = 0.8 * (x(1) - x(0))
    for index, value in enumerate(values):
        box = f'x="{x(index):.1f}" y="{y(value):.1f}" width="{width:.1f}" height="{BOTTOM - y(value):.1f}"'
        shapes.append(f'<rect class="s0" {box}/>')
    shapes.append(f'<path class="line s1 dashed" d="M{LEFT} {y(limit):.1f}H{RIGHT}"/>')
    return svg(title, shapes)


def dot_chart(values: Mapping[str, Mapping[str, float]], title: str, label: str) -> str:
    """Draws a row of dots for every name, on a logarithmic axis; one colour a group.

    Args:
        values: by group, then by name; of many groups the last ones are drawn.

    Example:
        >>> "<title>0.5</title>" in dot_chart({"0.1": {"box": 2.0, "crown": 0.5}}, "widths", "width")
        True
    """
    shown, left, top = list(values)[-STYLES:], 92, 30
    names = list(dict.fromkeys(name for group in shown for name in values[group]))
    drawn = [value for group in shown for value in values[group].values() if value > 0 and math.isfinite(value)]
    bottom = top + 14 + 24 * len(names)
    low, high = (math.floor(math.log10(min(drawn))), math.ceil(math.log10(max(drawn)))) if drawn else (0, 1)
    x = Scale(10.0**low, 10.0 ** max(high, low + 1), left, RIGHT - 8, log=True)
    shapes = []
    for row, name in enumerate(names):
        middle = top + 22 + 24 * row
        shapes.append(f'<path class="grid" d="M{left} {middle}H{RIGHT}"/>')
        shapes.append(_text(left - 8, middle + 4, escape(name), "end"))
        for style, group in enumerate(shown):
            value = values[group].get(name, 0.0)
            if value > 0 and math.isfinite(value):
                position = f'cx="{x(value):.1f}" cy="{middle}"'
                shapes.append(f'<circle class="s{style}" {position} r="4.5"><title>{value:.4g}</title></circle>')
    for tick in x.ticks():
        shapes.append(
            f'<path class="axis" d="M{x(tick):.1f} {bottom}v5"/>{_text(x(tick), bottom + 18, f"{tick:g}")}'
        )
    for style, group in enumerate(shown):
        start = left - 36 + 84 * style
        shapes.append(f'<circle class="s{style}" cx="{start + 12}" cy="12" r="4.5"/>')
        shapes.append(_text(start + 22, 16, escape(group), "start"))
    shapes.append(_text((left + RIGHT) / 2, bottom + 38, escape(label)))
    return svg(title, shapes, bottom + 46)


def matrix_chart(A: np.ndarray, B: np.ndarray, sizes: Sequence[int], title: str) -> str:
    """Draws A and B beside each other: blue above zero, orange below, nothing at zero; blocks are outlined.

    Of a large matrix every pixel is the largest entry of a square.

    Args:
        sizes: of the blocks of states.

    Example:
        >>> matrix_chart(np.eye(2), np.ones((2, 3)), [1, 1], "two matrices").count("<image")
        2
    """
    n, p = B.shape
    unit = WIDTH / (1.05 * (n + p))
    largest = max(float(np.abs(part).max(initial=0)) for part in (A, B)) or 1.0
    edges = list(accumulate(sizes))[:-1]
    shapes = []
    for matrix, start, name in ((A, 0.0, "A"), (B, WIDTH - p * unit, "B")):
        width, height = matrix.shape[1] * unit, n * unit
        position = f'x="{start:.1f}" y="20" width="{width:.1f}" height="{height:.1f}"'
        address = png_address(signed(pooled(matrix, MOST_PIXELS), largest))
        fill = f'href="{address}" preserveAspectRatio="none" style="image-rendering:pixelated"'
        shapes.append(f'<image {position} {fill}/><rect {position} fill="none" class="axis"/>')
        size = f"{name}: {n:,} \N{MULTIPLICATION SIGN} {matrix.shape[1]:,}"
        shapes.append(_text(start + width / 2, 13, size))
        for edge in edges:
            lines = f"M{start:.1f} {20 + edge * unit:.1f}h{width:.1f}"
            lines += f"M{start + edge * unit:.1f} 20v{height:.1f}" if name == "A" else ""
            shapes.append(f'<path class="grid" d="{lines}"/>')
    return svg(title, shapes, 22 + n * unit)


def spaced(values: Sequence[float], x: Scale) -> list[float]:
    """Leaves out labels that would touch their neighbour."""
    shown: list[float] = []
    for value in sorted(set(values)):
        if not shown or x(value) - x(shown[-1]) > 34:
            shown.append(value)
    return shown


def svg(title: str, shapes: Sequence[str], height: float = HEIGHT) -> str:
    """Writes a drawing with its title."""
    head = f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *shapes, "</svg>"])


def _axes(x: Scale, y: Scale, x_ticks: Sequence[float], x_label: str, y_label: str, share: bool = False) -> str:
    shapes = []
    for tick in y.ticks():
        shapes.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{RIGHT}"/>')
        shapes.append(_text(LEFT - 6, y(tick) + 4, f"{100 * tick:.0f} %" if share else _tick(tick, y.log), "end"))
    for tick in x_ticks:
        shapes.append(f'<path class="grid" d="M{x(tick):.1f} {BOTTOM}v5"/>')
        shapes.append(_text(x(tick), BOTTOM + 18, _tick(tick, False)))
    shapes.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    shapes.append(_text((LEFT + RIGHT) / 2, HEIGHT - 6, escape(x_label)))
    middle = (BOTTOM + y.end) / 2
    shapes.append(f'<text transform="translate(11 {middle:.0f}) rotate(-90)">{escape(y_label)}</text>')
    return "\n".join(shapes)


def _tick(value: float, power: bool) -> str:
    if not power:
        return f"{value:g}"
    return f'10<tspan dy="-4" font-size="8.5">{round(math.log10(value)):d}</tspan>'.replace(
        ">-", ">\N{MINUS SIGN}"
    )


def _text(x: float, y: float, content: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="text-anchor:{anchor}">{content}</text>'


def _points(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> list[str]:
    pairs = zip(xs, ys, strict=True)
    return [f"{x(a):.1f} {y(max(b, 1e-20) if y.log else b):.1f}" for a, b in pairs if math.isfinite(b)]


def _band(one: Series, x: Scale, y: Scale) -> str:
    edge = _points(one.x, one.low, x, y) + _points(one.x, one.high, x, y)[::-1]
    return f'<path class="band s{one.style}" d="M{"L".join(edge)}Z"/>'


def _line(one: Series, values: Sequence[float], dashed: bool, x: Scale, y: Scale) -> str:
    points = _points(one.x, values, x, y)
    dashes = " dashed" if dashed else ""
    line = f'<path class="line s{one.style}{dashes}" d="M{"L".join(points)}"/>'
    if len(points) > 12 or dashed:
        return line
    centres = (point.split() for point in points)
    return line + "".join(f'<circle class="s{one.style}" cx="{a}" cy="{b}" r="3"/>' for a, b in centres)


def _key(name: str, style: int, index: int, kind: str = "line", dashed: bool = False) -> str:
    left, top = LEFT + 170 * (index % 2), 12 + 16 * (index // 2)
    sample = f'<path class="line s{style}{" dashed" if dashed else ""}" d="M{left} {top}h22"/>'
    if kind == "bar":
        sample = f'<rect class="s{style}" x="{left + 8}" y="{top - 6}" width="12" height="12"/>'
    return sample + _text(left + 28, top + 4, escape(name), "start")
