"""Interactive pictures as one HTML file that needs no server and no network."""

import base64
import os
import re
import struct
import zlib
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from wellposed.atomic import written_whole
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
    with written_whole(path) as place:
        place.write_text(text, encoding="utf-8")


def save_figure(figure: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """Writes a picture of matplotlib, whole or not at all; without an ending in its name it becomes PNG."""
    target = Path(path) if Path(path).suffix else Path(f"{os.fspath(path)}.png")
    with written_whole(target) as place:
        figure.savefig(place, format=target.suffix[1:], **options)


def png_address(pixels: np.ndarray) -> str:
    """Writes an image ``(height, width, 3)`` of bytes as a data address.

    Example:
        >>> png_address(np.zeros((1, 1, 3), dtype=np.uint8))[:30]
        'data:image/png;base64,iVBORw0K'
    """
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def png(pixels: np.ndarray) -> bytes:
    """Writes bytes as a PNG file (Portable Network Graphics, third edition, W3C, 2025): no filter, one stream.

    Args:
        pixels: grey ``(height, width)`` or coloured ``(height, width, 3)``.

    Example:
        >>> png(np.zeros((2, 3, 3), dtype=np.uint8))[:4]
        b'\\x89PNG'
    """
    height, width = pixels.shape[:2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body
