"""Interactive pictures as one HTML file that needs no server and no network."""

import os
import re
from html import escape
from pathlib import Path
from typing import Any

from wellposed.errors import InputError, require

STILL = (".png", ".svg", ".pdf")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """html, body { margin: 0; min-height: 100vh; background: #fff; color: #1c2530 }
html { font: 15px/1.45 system-ui, sans-serif }
body { display: flex; flex-direction: column }
header { padding: 14px 22px 6px } h1 { font-size: 19px; margin: 0 0 2px } p { margin: 0; color: #55606e }
.key { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 14px; border-radius: 2px }
#picture { flex: 1 0 auto }"""
SCRIPT = """const {data, layout} = JSON.parse(document.getElementById('figure').textContent);
Plotly.newPlot('picture', data, layout, {responsive: true, scrollZoom: true, displaylogo: false});"""


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
    figure: Any, path: str | os.PathLike[str], title: str, about: str, keys: dict[str, str], tall: int = 420
) -> None:
    """Writes a plotly figure with its library.

    Args:
        figure: the plotly figure.
        path: the file to write.
        title, about: the heading and the line below it.
        keys: what each colour means.
        tall: pixels that the picture has at least, below which the page scrolls.
    """
    code = require("plotly.offline", extra="plots").get_plotlyjs()
    code = re.sub(r"</(script)", r"<\\\\/\1", code, flags=re.IGNORECASE)
    legend = "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(text)}' for text, colour in keys.items()
    )
    data = figure.to_json(validate=False).replace("<", "\\u003c")
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>
<style>{STYLE}</style></head>
<body><header><h1>{escape(title)}</h1><p>{escape(about)}</p><p>{legend}</p></header>
<div id="picture" style="min-height:{tall}px" role="img" aria-label="{escape(title)}: {escape(about)}"></div>
<script id="figure" type="application/json">{data}</script>
<script>{code}</script><script>{SCRIPT}</script></body></html>
"""
    Path(path).write_text(text, encoding="utf-8")
