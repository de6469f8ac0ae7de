"""Charts and pictures for pages."""

import struct
import zlib

import numpy as np
import pytest

from wellposed.pages.charts import Scale, Series, line_chart, share_chart
from wellposed.pages.images import png, signed
from wellposed.pages.markup import Step, page


def test_charts_survive_odd_numbers():
    nan = float("nan")
    series = Series("odd <name>", 0, [1, 2, 3], [0.0, 1e-3, nan], [0.0, 1e-4, nan], [0.0, 1e-2, nan])
    text = line_chart([series], "title & more", "x", "y")
    assert "nan" not in text
    assert "odd &lt;name&gt;" in text
    assert "title &amp; more" in text


def test_scale_is_monotone_and_its_ticks_are_inside():
    for scale in (Scale(1e-6, 1e2, 200, 0, log=True), Scale(0, 0.31, 0, 100), Scale(7.5, 19.5, 0, 100)):
        assert scale(scale.low) == pytest.approx(scale.start)
        assert scale(scale.high) == pytest.approx(scale.end)
        assert 2 <= len(scale.ticks()) <= 7
        assert all(scale.low <= tick <= scale.high for tick in scale.ticks())


def test_shares_reach_from_0_to_100_percent():
    text = share_chart([Series("a", 0, [0.0, 0.1], [1.0, 0.0])], "t", "x", "y")
    assert "0 %" in text and "100 %" in text


def test_opacity_is_stored_in_the_picture():
    pixels = signed(np.array([[0.0, 1.0, -1.0]]))
    data = png(pixels)
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (width, height, depth, kind) == (3, 1, 8, 6)
    start = data.index(b"IDAT")
    length = struct.unpack(">I", data[start - 4 : start])[0]
    assert zlib.decompress(data[start + 4 : start + 4 + length]) == b"\0" + pixels.tobytes()


def test_every_page_says_where_to_go_next_and_runs_no_script():
    text = page("A < B", None, steps=[Step("Look at it.", "wellposed show a&b")], command="wellposed x")
    assert "A &lt; B" in text and "Where to go next" in text and "wellposed show a&amp;b" in text
    assert "script-src" not in text and "default-src &#x27;none&#x27;" in text
