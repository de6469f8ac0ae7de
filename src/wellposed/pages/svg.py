"""Small charts as SVG text, coloured by the style sheet of the page around them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 300
LEFT, RIGHT, BOTTOM = 52, 390, 256


@dataclass(frozen=True)
class Series:
    """A line with a band around it."""

    name: str
    style: int  # picks colour and dashes
    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


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
        first = math.ceil(self.low / step)
        return [step * index for index in range(first, math.floor(self.high / step) + 1)]


def line_chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    *,
    x_ticks: Sequence[float] | None = None,
    log_x: bool = False,
) -> str:
    """Draws lines with bands over a logarithmic y axis."""
    top = 34 + 16 * (len(series) > 2)
    xs = [value for one in series for value in one.x]
    ys = [max(value, 1e-20) for one in series for value in (*one.low, *one.high) if math.isfinite(value)]
    x = Scale(min(xs), max(xs), LEFT + 8, RIGHT - 8, log_x)
    y = Scale(*_whole_decades(min(ys), max(ys)), BOTTOM, top, log=True)
    ticks = x.ticks() if x_ticks is None else list(x_ticks)
    parts = [_axes(x, y, ticks, x_label, y_label)]
    parts += [_band(one, x, y) for one in series] + [_line(one, x, y) for one in series]
    parts += [_key(one.name, one.style, index) for index, one in enumerate(series)]
    return _svg(title, parts)


def histogram(counts: Mapping[str, Sequence[int]], title: str, x_label: str, y_label: str) -> str:
    """Draws shares of whole numbers, one colour for every named sample."""
    values = [value for sample in counts.values() for value in sample]
    x = Scale(min(values) - 0.5, max(values) + 0.5, LEFT, RIGHT)
    shares = {name: _shares(sample) for name, sample in counts.items()}
    y = Scale(0.0, max(share for one in shares.values() for share in one.values()), BOTTOM, 34)
    width = (x(1) - x(0)) / len(counts) * 0.9
    ticks = [tick for tick in x.ticks() if tick == int(tick)]
    parts = [_axes(x, y, ticks, x_label, y_label)]
    for style, (name, one) in enumerate(shares.items()):
        for value, share in one.items():
            left = x(value) + (style - len(counts) / 2) * width
            box = f'x="{left:.1f}" y="{y(share):.1f}" width="{width:.1f}" height="{BOTTOM - y(share):.1f}"'
            parts.append(f'<rect class="bar s{style}" {box}/>')
        parts.append(_key(name, style, style, "bar"))
    return _svg(title, parts)


def _shares(sample: Sequence[int]) -> dict[int, float]:
    return {value: sample.count(value) / len(sample) for value in sorted(set(sample))}


def _whole_decades(low: float, high: float) -> tuple[float, float]:
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return 10.0**bottom, 10.0 ** max(top, bottom + 1)


def _svg(title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def _axes(x: Scale, y: Scale, x_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    parts = []
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{RIGHT}"/>')
        parts.append(_text(LEFT - 6, y(tick) + 4, _tick(tick, y.log), "end"))
    for tick in x_ticks:
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {BOTTOM}v5"/>')
        parts.append(_text(x(tick), BOTTOM + 18, _tick(tick, False)))
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    parts.append(_text((LEFT + RIGHT) / 2, HEIGHT - 6, escape(x_label)))
    middle = (BOTTOM + y.end) / 2
    parts.append(f'<text transform="translate(11 {middle:.0f}) rotate(-90)">{escape(y_label)}</text>')
    return "\n".join(parts)


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
    return [f"{x(a):.1f} {y(max(b, 1e-20)):.1f}" for a, b in pairs if math.isfinite(b)]


def _band(one: Series, x: Scale, y: Scale) -> str:
    edge = _points(one.x, one.low, x, y) + _points(one.x, one.high, x, y)[::-1]
    return f'<path class="band s{one.style}" d="M{"L".join(edge)}Z"/>'


def _line(one: Series, x: Scale, y: Scale) -> str:
    points = _points(one.x, one.middle, x, y)
    line = f'<path class="line s{one.style}" d="M{"L".join(points)}"/>'
    if len(points) > 12:
        return line
    centres = (point.split() for point in points)
    return line + "".join(f'<circle class="dot s{one.style}" cx="{a}" cy="{b}" r="3"/>' for a, b in centres)


def _key(name: str, style: int, index: int, kind: str = "line") -> str:
    left, top = LEFT + 170 * (index % 2), 12 + 16 * (index // 2)
    sample = f'<path class="{kind} s{style}" d="M{left} {top}h22"/>'
    if kind == "bar":
        sample = f'<rect class="bar s{style}" x="{left + 8}" y="{top - 6}" width="12" height="12"/>'
    return sample + _text(left + 28, top + 4, escape(name), "start")
