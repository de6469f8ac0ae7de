"""Runs every ```python block of the README and the documentation; ```python no-run is skipped."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(p for p in ROOT.glob("docs/**/*.md") if "_build" not in p.parts)])
FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks)`*[ ]*$",
    re.M | re.S,
)


def blocks(text: str) -> list[tuple[int, str]]:
    """The line where each runnable block begins, and its code."""
    return [
        (text.count("\n", 0, match.start("body")), re.sub(f"(?m)^{match['indent']}", "", match["body"]))
        for match in FENCE.finditer(text)
        if match["info"].strip() == "python"
    ]


@pytest.mark.filterwarnings("default")  # a page may show what a warning looks like
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page.read_text()):
        # The blank lines make a traceback point at the line of the page.
        exec(compile("\n" * line + code, page, "exec"), namespace)


def test_only_plain_python_blocks_are_taken():
    skipped = "```python no-run\n1 / 0\n```\n```bash\nls\n```\n````md\n```python\n1 / 0\n```\n````\n"
    text = f"{skipped}```python\nx = 1\n```\n"
    assert blocks(text) == [(skipped.count("\n") + 1, "x = 1\n")]


def test_a_failing_block_names_its_line():
    (line, code) = blocks("text\n\n```python\n1 / 0\n```\n")[0]
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("\n" * line + code, "page.md", "exec"), {})
    assert caught.traceback[-1].lineno + 1 == 4
