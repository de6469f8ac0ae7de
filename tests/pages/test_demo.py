"""The demo at a tiny scale: its numbers, its page, its record."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

from wellposed.pages.demo import FINDING, SHIFTS, DemoConfig, page, record, run_demo, table
from wellposed.pages.svg import Scale, Series, line_chart

TINY = DemoConfig(seeds=2, epochs=3, samples=400, batch_size=50, test_samples=100)


@pytest.fixture(scope="module")
def result():
    return run_demo(TINY, progress=False)


class Collector(HTMLParser):
    VOID = ("meta", "path", "rect", "circle")

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def collect(text):
    found = Collector()
    found.feed(text)
    return found


def test_models_are_comparable(result):
    sizes = [model.parameters for model in result.models]
    assert sizes == [1470, 1461, 1420, 50]
    assert all(model.errors.shape == (len(SHIFTS), 2) for model in result.models)


def test_bias_free_models_scale_exactly_and_the_mlp_does_not(result):
    ratio = {model.name: model.errors[-1] / model.errors[0] for model in result.models}
    for name in ("implicit model", "bias-free MLP"):
        assert torch.allclose(ratio[name], torch.tensor(1e4), rtol=1e-2), name
    assert ((ratio["MLP"] / 1e4 - 1).abs() > 0.1).any()


def test_the_linear_control_is_exact(result):
    assert result.models[-1].errors.max() < 1e-6


def test_equilibria_and_certificates(result):
    model = result.models[0]
    assert model.steps.shape == (len(SHIFTS), 2, 100)
    assert model.failed_share == 0
    assert len(model.certificates) == 2
    assert result.certified


def test_the_page_is_self_contained_and_well_formed(result):
    text = page(result)
    found = collect(text)
    assert found.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name in ("src", "href", "xlink:href")]
    assert not re.search(r"url\(|@import|https?://", text)
    assert ("name", "viewport") in found.attributes
    assert "prefers-color-scheme: dark" in text


def test_the_page_shows_everything(result):
    text = page(result)
    found = collect(text)
    assert found.tags.count("svg") == 3
    labels = [value for name, value in found.attributes if name == "aria-label"]
    assert len(labels) == 3
    assert all(len(label) > 30 for label in labels)
    for model in result.models:
        assert f'<th scope="row">{model.name}</th>' in text
        assert f"{model.median()[-1]:.1e}" in text
        assert f"{model.worst()[-1]:.1e}" in text
    assert result.config.command in text
    assert "seed 1: inf:" in text
    assert torch.__version__ in text


def test_the_table_fits_a_narrow_terminal(result):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(result))
    text = console.export_text()
    assert "…" not in text
    assert "bias-free MLP" in text
    assert f"{result.models[0].median()[-1]:.1e}" in text


def test_the_record_is_json(result):
    found = json.loads(json.dumps(record(result), allow_nan=False))
    assert [model["name"] for model in found["models"]] == [model.name for model in result.models]
    assert len(found["models"][0]["mse"]["100"]) == 2
    assert found["certified"] is True


def test_the_finding_is_two_sentences():
    assert len(FINDING) == 2
    assert all(sentence.endswith(".") for sentence in FINDING)


def test_runs_are_reproducible(result):
    again = run_demo(TINY, progress=False)
    for one, other in zip(result.models, again.models, strict=True):
        assert torch.allclose(one.errors, other.errors, rtol=1e-3, atol=0)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_demo(DemoConfig(seeds=1, epochs=1, samples=50, batch_size=50, test_samples=10), progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


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
