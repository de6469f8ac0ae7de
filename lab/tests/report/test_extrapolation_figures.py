"""The tables of the page on extrapolation say what the records say."""

import statistics

import pytest
from wellposed_lab.engine.store import Record, Store, Value

import benchmarks.figures.extrapolation as figures
from benchmarks.harness import DOCS

pytest.importorskip("matplotlib")

PAGES = DOCS / "concepts"


def record(suite, task, model, seed, values, size=None):
    return Record(
        id=f"{task}-{model}-{seed}",
        suite=suite,
        scale="default",
        task=task,
        model=model,
        size=size,
        seed=seed,
        role="ours" if model == "implicit" else "control",
        kind="run",
        config={},
        values=tuple(Value(metric, value, at) for metric, value, at in values),
        series={},
        facts={},
        environment={},
        started="",
        seconds=0.0,
    )


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    return tmp_path


def test_without_records_every_section_names_its_commands(places):
    figures.write_sections(places)
    for name in figures.SECTIONS:
        text = (places / f"extrapolation-{name}.inc").read_text()
        assert "`wellposed run " in text and "|" not in text
    assert not list(places.glob("*.png"))


def test_the_page_includes_every_section_and_nothing_else():
    page = (PAGES / "extrapolation.md").read_text()
    included = [line.split()[-1] for line in page.splitlines() if line.startswith("```{include}")]
    assert included == [f"extrapolation-{name}.inc" for name in figures.SECTIONS]
    for name in figures.SECTIONS:
        text = (PAGES / f"extrapolation-{name}.inc").read_text()
        shown = [part.split(")")[0] for part in text.split("](")[1:]]
        assert all((PAGES / image).exists() for image in shown)


def test_medians_over_seeds(places):
    errors = [1.0, 5.0, 2.0]
    for suite, tasks in (("identity", ("identity",)), ("arithmetic", ("addition", "subtraction"))):
        rows = [
            record(suite, task, model, seed, [("test_mse", factor * error, at) for at in (5.0, 100.0, 205.0)])
            for task in tasks
            for model, factor in (("implicit", 1.0), ("mlp", 1000.0))
            for seed, error in enumerate(errors)
        ]
        Store(places / "results" / f"{suite}.jsonl").append(*rows)
    lines = figures.scale(places)
    middle = statistics.median(errors)
    assert f"| implicit model | {middle:g} | {middle:g} | {middle:g} | {middle:g} |" in lines
    assert "| MLP | 2,000 | 2,000 | 2,000 | 2,000 |" in lines
    assert not any("linear" in line for line in lines)
    assert (places / "extrapolation-scale.png").stat().st_size > 5000


def test_wins_and_their_meaning(places):
    values = {
        "implicit": 1.0,
        "implicit-triangular": 3.0,
        "implicit-triangular-capped": 0.5,
        "implicit-no-feedback": 0.4,
    }
    rows = [
        record("feedback", "addition", model, seed, [("test_mse", value, at) for at in (10.0, 100.0)])
        for model, value in values.items()
        for seed in range(8)
    ]
    Store(places / "results" / "feedback.jsonl").append(*rows)
    (line,) = [line for line in figures.feedback(places) if line.startswith("| addition")]
    assert "8 of 8 seeds, 3 |" in line and "0 of 8 seeds, 0.5 |" in line and "feedback harms" in line
