"""What was certified or attacked, as one self-contained HTML page: no script, no network.

`accuracy_chart` and `width_chart` draw certified accuracy and bounds, as SVG text for the style sheet of the page
around them. `certificate_page` and `attack_page` write the pages.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from wellposed.pages.markup import Html, element, join, plural
from wellposed.pages.style import STYLE
from wellposed.pages.svg import Scale
from wellposed.robust.attacks import Attack
from wellposed.robust.certification import Radius

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


METHODS = {  # what each proves, in a line
    "norm": "one number for all states, from induced norms (003 eq. 4.3-4.4)",
    "box": "a box from |A| and |B|, by elimination with a check (003 Theorems 5-6)",
    "interval": "intervals pushed through until they rest; on layers the same as interval propagation",
    "l2": "a Euclidean ball of states, where the form is monotone or contractive in the 2-norm",
    "crown": "linear bounds at the fixed point, refined",
    "optimised": "the same, slopes optimised for every bound",
    "lp": "the linear program as printed (003 section 4.3)",
    "triangle": "a linear program over the convex hull of every ReLU, on refined intervals",
}
MORE_STYLE = "img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }"


@dataclass(frozen=True)
class Heading:
    """What a page is about.

    Args:
        model, data: as they were given and read.
        about: facts in a few words each.
        command: that makes the page again.
    """

    model: str
    data: str
    about: Sequence[str]
    command: str


def certificate_page(heading: Heading, radii: Sequence[Radius], method: str, width_samples: int) -> str:
    """Writes the page of `wellposed certify`."""
    title = "How far can the input move before the class can change?"
    count = len(radii[0].clean)
    last = radii[-1]
    finding = (
        f"Of {plural(count, 'sample')}, {_percent(last.share('clean'))} have their class; "
        f"{_percent(last.share('certified'))} provably keep it for every change of up to {last.epsilon:g} in "
        f"every input, and {_percent(last.share('attacked'))} keep it under projected gradients. The truth at "
        "this radius lies between the last two."
    )
    names = {"certified": "certified", "attacked": "attacked (PGD)", "clean": "clean"}
    start = [last.share("clean")] if radii[0].epsilon > 0 else []  # at radius zero all three are clean accuracy
    lines = {text: [*start, *(one.share(name) for one in radii)] for name, text in names.items()}
    places = [*(0.0 for _ in start), *(one.epsilon for one in radii)]
    chart = accuracy_chart(places, lines, "Accuracy against the radius")
    figures = [_figure(chart, f"Certified by the method {method}: never above what an attack leaves.")]
    widths = {f"{one.epsilon:g}": one.widths for one in radii if one.widths}
    if widths:
        caption = (
            f"Bounds of all outputs by method, mean over {plural(width_samples, 'sample')}; one colour a radius."
        )
        figures.append(_figure(width_chart(widths, "Widths of the bounds by method"), caption))
    body = [
        element("div", element("p", finding), class_="finding"),
        element("div", figures, class_="figures"),
        element("h2", "Accuracy by radius"),
        _table(["epsilon", "clean", "certified", "attacked"], [_line(one) for one in radii]),
        *(_width_section(radii) if widths else []),
    ]
    return _page(title, heading, body)


def attack_page(heading: Heading, attack: Attack, clean: float, epsilon: float, picture: bytes | None) -> str:
    """Writes the page of `wellposed attack`."""
    finding = (
        f"{attack.name} at epsilon {epsilon:g} takes the accuracy on {plural(len(attack.inputs), 'sample')} from "
        f"{_percent(clean)} to {_percent(attack.accuracy)}. Every changed input lies in its set and was run "
        "through the model itself."
    )
    body: list[Html] = [element("div", element("p", finding), class_="finding")]
    if picture is not None:
        source = "data:image/png;base64," + base64.b64encode(picture).decode()
        shown = Html(f'<img src="{source}" alt="clean and attacked inputs, their difference, and the classes">')
        caption = "Clean, attacked, and their difference (red up, blue down); above each, the class that is given."
        body += [element("h2", "Attacked inputs"), _figure(shown, caption)]
    body += [element("h2", "Notes"), element("ul", [element("li", note) for note in attack.notes])] * bool(
        attack.notes
    )
    return _page("What an attack finds", heading, body)


def _page(title: str, heading: Heading, body: Sequence[Html]) -> str:
    facts = [element("li", fact) for fact in (f"model: {heading.model}", f"data: {heading.data}", *heading.about)]
    parts = [
        element("h1", title),
        element("ul", facts, class_="quiet"),
        *body,
        element("h2", "Run it again"),
        element("pre", heading.command),
    ]
    head = join(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"wellposed: {title}"),
        element("style", Html(STYLE + MORE_STYLE)),
    )
    whole = element("html", element("head", head), element("body", parts), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _width_section(radii: Sequence[Radius]) -> list[Html]:
    methods = list(dict.fromkeys(method for one in radii for method in (*one.widths, *one.reasons)))
    lines = []
    for method in methods:
        cells = [f"{one.widths[method]:.4g}" if method in one.widths else "\N{EN DASH}" for one in radii]
        lines.append([method, *cells])
    reasons = {method: text for one in radii for method, text in one.reasons.items()}
    told = [element("li", element("b", name), f": {METHODS[name]}.", _why(reasons.get(name))) for name in methods]
    return [
        element("h2", "Widths of the outputs' bounds"),
        _table(["method", *(f"{one.epsilon:g}" for one in radii)], lines),
        element("ul", told, class_="quiet"),
    ]


def _why(reason: str | None) -> str:
    return f" Does not apply here: {reason}." if reason else ""


def _line(one: Radius) -> list[str]:
    return [f"{one.epsilon:g}", *(_percent(one.share(name)) for name in ("clean", "certified", "attacked"))]


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> Html:
    head = element("tr", [element("th", name, scope="col") for name in names])
    rows = [_row(names, line) for line in lines]
    return element("table", element("thead", head), element("tbody", rows))


def _row(names: Sequence[str], line: Sequence[str]) -> Html:
    cells = [element("td", cell, data_label=name) for name, cell in zip(names[1:], line[1:], strict=True)]
    return element("tr", element("th", line[0], scope="row"), cells)


def _figure(drawing: str, caption: str) -> Html:
    return element("figure", Html(drawing), element("figcaption", caption))


def _percent(value: Any) -> str:
    return f"{100 * float(value):.1f} %"
