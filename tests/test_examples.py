"""Runs the examples as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"│ (\S.*?\S) +│ +([\d,]+) │ +([\d.]+) │ +([\d.]+) │ +([\d.]+)% │ +([\d.]+) │ +([\d.]+)% │")


@pytest.mark.slow
def test_digits(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", "MPLBACKEND": "agg"}
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--quick", "--out", "losses.png"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    rows = {
        name: [float(number.replace(",", "")) for number in numbers] for name, *numbers in ROW.findall(run.stdout)
    }
    assert set(rows) == {"DEQ transformer", "multiscale DEQ"}, run.stdout
    for _, before, after, accuracy, steps, failed in rows.values():
        assert after < 0.7 * before and accuracy > 50 and 2 < steps < 40 and failed < 5
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
