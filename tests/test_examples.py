"""Runs the examples as a reader would: the long ones as scripts, the short ones as notebooks, cell by cell.

The notebooks run with ``make docs``.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
ROW = re.compile(r"│ (\S.*?\S) +│ +([\d,]+) │ +([\d.]+) │ +([\d.]+) │ +([\d.]+)% │ +([\d.]+) │ +([\d.]+)% │")
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))

specification = importlib.util.spec_from_file_location("make_notebooks", EXAMPLES / "make_notebooks.py")
make_notebooks = importlib.util.module_from_spec(specification)
specification.loader.exec_module(make_notebooks)

# What must have come out of each, by the names that it leaves behind.
OUTCOMES = {
    "certify_and_attack": lambda end: all(
        proven <= broken for rows in end["table"].values() for proven, broken in rows
    )
    and end["table"]["digits-robust"][2][0] > end["table"]["digits"][2][0] + 0.1,
    "classify_digits": lambda end: end["accuracy"] > 0.94 and not end["solution"].failed.any(),
    "come_from_torchdeq": lambda end: end["difference"] < 1e-4 and end["apart"] < 1e-3
    and "did you mean 'f_max_iter'" in end["message"],
    "convert_a_network": lambda end: end["difference"] < 1e-4 and end["same"] and end["before"] > 0.9,
    "live_with_noise": lambda end: end["waiting"].failed.all() and end["judged"].converged.all()
    and end["errors"]["Picard"][-1] < 0.5 * end["errors"]["Picard"][0],
    "read_sequences": lambda end: end["scores"]["implicit"][1e5] > 0.8 and end["scores"]["LSTM"][1e5] < 0.3,
    "share_a_model": lambda end: end["same"] and end["differences"][20] < 1e-3 < end["differences"][5],
    "sparsify_a_network": lambda end: end["sparse"] > end["dense"] - 0.06 and end["gap"] < 1e-6
    and abs(end["report"].sparsity - 0.9) < 0.01,
    "use_scikit_learn": lambda end: end["score"] > 0.25 and end["regressor"].certificate_.holds,
    "wrap_a_cell": lambda end: end["accuracy"] > 0.95 and bool(end["independent"].independent.all()),
}  # fmt: skip


@pytest.mark.slow
def test_digits(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", "MPLBACKEND": "agg"}
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--quick", "--out", "losses.png"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    rows = {
        name: [float(number.replace(",", "")) for number in numbers] for name, *numbers in ROW.findall(run.stdout)
    }
    assert set(rows) == {"DEQ transformer", "multiscale DEQ"}, run.stdout
    for _, before, after, accuracy, steps, failed in rows.values():
        assert after < 0.7 * before and accuracy > 50 and 2 < steps < 40 and failed < 5
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_there_are_outcomes_for_every_notebook():
    assert [path.stem for path in NOTEBOOKS] == sorted(OUTCOMES) and 6 <= len(NOTEBOOKS) <= 10


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("matplotlib").use("agg")
    state = torch.get_rng_state()
    names = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)
    torch.set_rng_state(state)
    assert OUTCOMES[path.stem](names)
    if "pyplot" in names:
        names["pyplot"].close("all")
        assert (tmp_path / f"{path.stem}.png").read_bytes().startswith(b"\x89PNG")


def test_notebooks_are_those_of_the_scripts():
    assert make_notebooks.stale() == [], "run python examples/make_notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_clean(path):
    whole = json.loads(path.read_text())
    assert whole["nbformat"] == 4 and whole["cells"][0]["cell_type"] == "markdown"
    assert whole["cells"][0]["source"][0].startswith("# ")
    code = [cell for cell in whole["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in whole["cells"]}) == len(whole["cells"])
    for cell in code:
        ast.parse("".join(cell["source"]))


def test_a_changed_script_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(make_notebooks, "HERE", tmp_path)
    (tmp_path / "notebooks").mkdir()
    script = tmp_path / "one.py"
    script.write_text("# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1\n")
    assert make_notebooks.stale() == ["one.ipynb"]
    make_notebooks.notebook_path(script).write_text(make_notebooks.notebook(script.read_text()))
    assert make_notebooks.stale() == []
    script.write_text(script.read_text().replace("x = 1", "x = 2"))
    (tmp_path / "notebooks" / "orphan.ipynb").write_text("{}")
    assert make_notebooks.stale() == ["one.ipynb", "orphan.ipynb"]
    assert make_notebooks.cells(script.read_text()) == [("markdown", "# Title\n\nText."), ("code", "x = 2")]
