"""What was certified or attacked, as one self-contained HTML page: no script, no network."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wellposed.experiments.certification import Radius
from wellposed.experiments.page_style import STYLE
from wellposed.experiments.report.markup import Html, element, join, plural
from wellposed.experiments.robust_charts import accuracy_chart, width_chart
from wellposed.robust.attacks import Attack

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
