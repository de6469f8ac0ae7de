"""The demo at a small scale: its answers, its page, its record, without any optional package but numba."""

import importlib.util
import json
import re
import shlex
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner

from wellposed.cli import cli
from wellposed.cli.demo.page import answers, page, speed, steps
from wellposed.cli.demo.questions import (
    DemoConfig,
    nothing_proven,
    record,
    run_demo,
    train_feedback,
    train_network,
)
from wellposed.data.images import load_images
from wellposed.workers import one_thread

OPTIONAL = ("matplotlib", "plotly", "sklearn", "scipy", "clarabel", "cvxpy", "joblib", "highspy", "PIL", "pooch")
TINY = DemoConfig(
    epochs=4, feedback_epochs=4, states=9, train_images=300, examined=30, radii=(0.02, 0.1, 0.5), attack_steps=3
)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in OPTIONAL:
            patch.setitem(sys.modules, name, None)
        told = []
        found = run_demo(TINY, tmp_path_factory.mktemp("demo"), told.append)
        object.__setattr__(found, "told", told)
        return found


class Collector(HTMLParser):
    VOID = ("meta", "path", "rect", "circle", "image", "img", "br")

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


def test_the_conversion_is_exact_and_the_equilibria_are_reached(result):
    assert result.equation.difference <= 1e-5 * result.equation.largest_output
    assert not result.feedback.solution.failed.any()
    assert result.sparse.report.sparsity == pytest.approx(0.9, abs=0.01)
    assert result.certified


def test_bounds_hold_and_decide_classes(result):
    """Against equilibria in float64, with many more steps."""
    model, u = result.feedback.model.double(), result.test.flat(torch.float64)
    x = torch.zeros(len(u), TINY.states, dtype=torch.float64)
    for _ in range(500):
        x = torch.relu(x @ model.A.T + u @ model.B.T + model.bias)
    away = (result.feedback.solution.value.double() - x).abs().amax(1)
    assert (away <= result.feedback.bounds).all()
    exact = (x @ model.C.T + u @ model.D.T).argmax(1)
    settled = result.feedback.settled
    assert settled.any() and torch.equal(exact[settled], result.feedback.predicted[settled])
    model.float()


def test_every_start_ends_at_the_same_equilibrium(result):
    reaching = result.feedback.reaching
    assert all(values[-1] < 1e-2 * values[0] for values in reaching.distances.values())
    for values in reaching.distances.values():
        assert all(after <= TINY.kappa * before + 1e-12 for before, after in pairwise(values))


def test_the_checker_proves_both_and_refuses_a_changed_bit(result):
    proven = result.checked.proven
    assert [len(lines) for lines in proven.values()] == [2, 1]
    assert result.checked.why_not.startswith("refused: ")


def test_proofs_never_exceed_what_the_attack_leaves(result):
    for found in (result.robustness.plain, result.robustness.robust):
        for one in found.radii:
            assert not (one.certified & ~one.attacked).any() and not (one.attacked & ~one.clean).any()
        assert nothing_proven(found.radii) == 0.5


def test_the_page_is_self_contained_and_well_formed(result):
    text = page(result)
    found = collect(text)
    assert found.open == []
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    sources = [value for name, value in found.attributes if name in ("src", "href", "xlink:href")]
    assert sources and all(value.startswith("data:image/png;base64,") for value in sources)
    assert not re.search(r"url\(|@import|https?://", text)
    assert ("name", "viewport") in found.attributes
    assert "prefers-color-scheme: dark" in text and "prefers-reduced-motion" in text
    assert len(text) < 200_000


def test_the_page_answers_six_questions_and_says_the_limits(result):
    text, told = page(result), answers(result)
    assert len(told) == 6 and re.findall(r'id="question-(.)"', text) == list("abcdef")
    for one in told:
        assert one.numbers and one.answer.endswith(".")
    honest = " ".join(one.honest for one in told)
    assert "zeros are not free" in honest and "eedback" in honest and "at 0.5 nothing is proven" in honest
    assert text.count("<svg") >= 7 and text.index("x = \N{GREEK SMALL LETTER PHI}") < text.index("question-a")


def test_the_record_is_json_and_has_the_numbers_of_the_page(result):
    found = json.loads(json.dumps(record(result), allow_nan=False))
    assert found["network"]["images_right"] == result.right(result.network.predicted)
    assert found["feedback"]["failed"] == 0
    assert found["robustness"]["plain"]["nothing_proven_at"] == 0.5
    assert len(found["robustness"]["robust"]["certified"]) == len(TINY.radii)
    assert found["speed"]["compiled_milliseconds"] > 0


def test_trainings_are_reproducible(result):
    train = load_images("digits", "train").subset(TINY.train_images)
    with one_thread():  # as in the demo; sums of several threads round in another order
        assert torch.equal(train_network(TINY, train, result.test).predicted, result.network.predicted)
        again = train_feedback(TINY, train, result.test)
    assert torch.equal(again.solution.steps, result.feedback.solution.steps)
    assert again.reaching.distances == result.feedback.reaching.distances


def test_what_it_does_is_told_and_the_models_are_kept(result):
    assert [line[:3] for line in result.told] == ["(a)", "(b)", "(c)", "(d)", "(e)", "(f)"]
    names = ("network.pt2", "sparse.safetensors", "sparse.cert", "feedback.safetensors", "feedback.cert")
    assert all((result.folder / name).is_file() for name in names)


def test_the_commands_run_as_printed(result, monkeypatch):
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)
    for step in steps(result):
        name, *arguments = shlex.split(step.command)
        done = CliRunner().invoke(cli, arguments)
        assert name == "wellposed" and done.exit_code == 0, (step.command, done.output)


def test_speed_says_when_nothing_was_compiled(result):
    if importlib.util.find_spec("numba"):
        assert "times less" in speed(result)
    plain = replace(result, feedback=replace(result.feedback, reason="reference: numba is not installed"))
    assert speed(plain).startswith("No compiled kernel was used here (reference:")
