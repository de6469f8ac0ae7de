"""Interactive pictures as one HTML file that needs no server and no network."""

import os
import shlex
from pathlib import Path
from typing import Any

from wellposed.atomic import atomic_write
from wellposed.errors import InputError, require
from wellposed.pages.markup import INFLATE, Html, Step, brand, compressed, document, element, next_steps

STILL = (".png", ".svg", ".pdf")
STYLE = """#picture { background: #fff; box-shadow: 0 0 0 1px var(--line); margin-top: .8rem; }
.swatch { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 0; border-radius: 2px; }
.swatches > span { white-space: nowrap; margin-right: 1.1rem; }
"""
SCRIPT = """const drawn = async () => {
  const library = document.createElement("script");
  library.textContent = await inflate(document.getElementById("library"));
  document.head.append(library);
  const {data, layout} = JSON.parse(document.getElementById("figure").textContent);
  Plotly.newPlot("picture", data, layout, {responsive: true, scrollZoom: true, displaylogo: false});
};
drawn();
"""
SAVED_AS = "model.safetensors"  # of a form that is not known to be in a file


def is_page(path: str | os.PathLike[str] | None) -> bool:
    """Tells by the ending whether a picture is to be interactive.

    Example:
        >>> is_page("spy.html"), is_page("spy.png"), is_page(None)
        (True, False, False)
    """
    ending = Path(path).suffix.lower() if path is not None else ".png"
    if ending not in (".html", *STILL):
        raise InputError(f"a picture ends with .html, {', '.join(STILL)}; received {os.fspath(path or '')!r}")
    return ending == ".html"


def write_page(
    figure: Any,
    path: str | os.PathLike[str],
    title: str,
    about: str,
    keys: dict[str, str],
    tall: int = 420,
    *,
    model_file: str = SAVED_AS,
) -> None:
    """Writes a plotly figure with its library.

    Args:
        figure: the plotly figure.
        path: the file to write.
        title, about: the heading and the line below it.
        keys: what each colour means.
        tall: pixels that the picture has at least, below which the page scrolls.
        model_file: the file of the form, for the commands at the end of the page.
    """
    name = shlex.quote(model_file)
    commands = (
        Step("Have its certificate proven by the independent checker.", f"wellposed verify {name}"),
        Step(
            "Prove how far inputs can move before the class changes.",
            f"wellposed certify --model {name} --data digits",
        ),
    )
    code = require("plotly.offline", extra="plots").get_plotlyjs()
    legend = [
        element("span", element("span", class_="swatch", style=f"background:{colour}"), text)
        for text, colour in keys.items()
    ]
    size, label = f"min-height:max({tall}px, 72vh)", f"{title}: {about}"
    picture = element("div", id="picture", role="img", aria_label=label, style=size)
    body = [
        brand(),
        element("header", element("h1", title), element("p", about, class_="quiet")),
        element("main", element("p", legend, class_="swatches"), picture),
        element("footer", element("h2", "Where to go next"), next_steps(commands)),
        element(
            "script",
            Html(figure.to_json(validate=False).replace("<", "\\u003c")),
            id="figure",
            type="application/json",
        ),
        compressed(code, "library"),
        element("script", Html(INFLATE + SCRIPT)),
    ]
    text = document(title, body, style=STYLE, script=True, wide=True)
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_figure(figure: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """Writes a picture of matplotlib, whole or not at all; without an ending in its name it becomes PNG."""
    target = Path(path) if Path(path).suffix else Path(f"{os.fspath(path)}.png")
    with atomic_write(target) as temporary:
        figure.savefig(temporary, format=target.suffix[1:], **options)
