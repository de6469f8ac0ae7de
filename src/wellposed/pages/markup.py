"""HTML pages: text is escaped unless it is marked as `Html`; the frame that all pages share."""

import base64
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

VOID = ("br", "img", "input", "meta")


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable[str] | None


def element(tag: str, *children: Child, **attributes: str | int | bool | None) -> Html:
    """Writes an element; plain text is escaped, `Html` stays as it is.

    Args:
        tag: its name.
        children: texts, elements or lists of them; None is nothing.
        attributes: underscores become hyphens, one at the end is dropped (`class_`); None and False are left out.

    Example:
        >>> element("p", "a < b, ", element("b", "c"), class_="quiet", hidden=True)
        '<p class="quiet" hidden>a &lt; b, <b>c</b></p>'
    """
    opening = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    return Html(opening if tag in VOID else f"{opening}{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    """Concatenates texts and elements.

    Example:
        >>> join("1 < 2", element("br"), ["a", "b"])
        '1 &lt; 2<br>ab'
    """
    pieces = []
    for child in children:
        if isinstance(child, str):
            pieces.append(child if isinstance(child, Html) else escape(child))
        elif child is not None:
            pieces.append(join(*child))
    return Html("".join(pieces))


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def prose(text: str) -> Html:
    """Writes text with exponents as superscripts.

    Example:
        >>> prose("x < R^100")
        'x &lt; R<sup>100</sup>'
    """
    return Html(re.sub(r"\^(\d+)", r"<sup>\1</sup>", escape(text)))


def plural(count: int, word: str) -> str:
    """Writes a count with its word.

    Example:
        >>> plural(1, "seed"), plural(2400, "run")
        ('1 seed', '2,400 runs')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


# Returns the text of an element that `compressed` wrote.
INFLATE = """const inflate = async (packed) => {
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
};
"""


def compressed(text: str, name: str) -> Html:
    """Writes text for scripts, deflated, as an element that `INFLATE` reads.

    Args:
        name: the id of the element.

    Example:
        >>> compressed(1000 * "a", "packed")
        '<script id="packed" type="text/plain">eNp...</script>'
    """
    block = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return element("script", Html(block), id=name, type="text/plain")


def document(title: str, body: Child, *, style: str = "", script: bool = False, wide: bool = False) -> str:
    """Writes a whole file that needs no network: the head with the style sheet, and the given body.

    Args:
        title: as the browser shows it.
        style: rules after those of the style sheet.
        script: whether scripts inside the page may run.
        wide: whether the page is for wide tables.

    Example:
        >>> text = document("One page", element("p", "1 < 2"))
        >>> text.startswith("<!doctype html>"), "<p>1 &lt; 2</p>" in text
        (True, True)
    """
    policy = POLICY if script else POLICY.replace("script-src 'unsafe-inline'; ", "")
    sheet = resources.files("wellposed.pages").joinpath("style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", f"{title} \N{MIDDLE DOT} wellposed"),
        element("style", Html(sheet + style)),
    )
    whole = element("html", head, element("body", body, class_="wide" if wide else None), lang="en")
    return f"<!doctype html>\n{whole}\n"


@dataclass(frozen=True)
class Step:
    """Where a reader may go next: what for, and the command to type."""

    purpose: str
    command: str


def page(
    title: str,
    body: Child,
    *,
    lead: Child = None,
    facts: Iterable[str] = (),
    command: str | None = None,
    steps: Iterable[Step] = (),
) -> str:
    """Writes a page: heading, results, the given body, and at its end where to go next.

    Args:
        title: the question that the page answers.
        lead: the answer.
        facts: about model and data, a line each.
        command: writes the page again.
        steps: where to go next.
    """
    listed = [element("li", fact) for fact in facts]
    again = join(element("h2", "Run it again"), element("pre", element("code", command))) if command else None
    return document(
        title,
        [
            brand(),
            element("header", element("h1", title), element("div", lead, class_="finding") if lead else None,
                    element("ul", listed, class_="quiet") if listed else None),
            element("main", body, again),
            element("footer", element("h2", "Where to go next"), next_steps(steps)),
        ],
    )  # fmt: skip


def next_steps(steps: Iterable[Step]) -> Html:
    """Lists where to go next."""
    lines = [element("li", step.purpose, element("pre", element("code", step.command))) for step in steps]
    return element("ul", lines, class_="next")


def brand() -> Html:
    """Writes the line at the top of every page."""
    return element("p", "wellposed ", element("span", "every equilibrium exists, is unique, and was reached"),
                   class_="brand")  # fmt: skip


def table(names: Sequence[str], lines: Iterable[Sequence[Child]]) -> Html:
    """Writes a table whose lines become cards where the window is narrow.

    Args:
        names: of the columns.
        lines: cells; the first one is the line's name, the others are numbers.

    Example:
        >>> table(["model", "size"], [["a", "3"]])[-75:]
        '<tr><th scope="row">a</th><td data-label="size">3</td></tr></tbody></table>'
    """
    head = element("tr", [element("th", name, scope="col") for name in names])
    rows = []
    for first, *others in lines:
        cells = [element("td", cell, data_label=name) for name, cell in zip(names[1:], others, strict=True)]
        rows.append(element("tr", element("th", first, scope="row"), cells))
    return element("table", element("thead", head), element("tbody", rows), class_="stack values")


def figure(drawing: str, caption: Child = None) -> Html:
    """Writes a figure with its caption.

    Args:
        drawing: SVG or HTML.
    """
    return element("figure", Html(drawing), element("figcaption", caption) if caption else None)


def percent(value: float) -> str:
    """Writes a share.

    Example:
        >>> percent(0.9746)
        '97.5 %'
    """
    return f"{100 * float(value):.1f} %"
