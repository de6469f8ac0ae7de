"""README: its numbers are those of the records, its code and commands run, its links lead somewhere.

The slow test makes an environment by `make demo` alone and runs in it everything that README prints.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from test_docs import FENCE, blocks

from benchmarks.figures import readme
from benchmarks.rivals import compare
from wellposed.cli import NEEDS, cli
from wellposed.cli.demo import questions

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def fenced(kind: str) -> list[str]:
    return [block["body"] for block in FENCE.finditer(TEXT) if block["info"].strip() == kind]


COMMANDS = [line for block in fenced("bash") for line in block.splitlines()]
(OUTPUT,) = fenced("text")


def test_numbers_are_those_of_the_records():
    template = readme.TEMPLATE.read_text(encoding="utf-8")
    assert readme.fill(template, readme.numbers() | {"output": OUTPUT.strip()}) == TEXT, "run: make readme"


def test_charts_and_tables_are_those_of_the_records():
    for path, text in readme.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is not what the records say; run: make readme"


def test_pages_on_rivals_say_what_was_measured():
    about = readme.read("rivals/compare.json")
    rows = [compare.Row(**row) for row in about.pop("rows")]
    assert compare.PAGE.read_text(encoding="utf-8") == compare.page(rows, about)
    count = len(compare.by_problem(rows))
    faster, less_exact = "\n".join(compare.losses(rows)), "\n".join(compare.inaccuracies(rows))
    optimistix, jaxopt = (count - faster.count(f"{name} plain") for name in ("optimistix", "jaxopt"))
    values, gradients = (count - less_exact.count(f", {kind}:") for kind in ("value", "gradient"))
    speed = " ".join((ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split())
    assert f"compares all libraries at one tolerance on {count} problems" in speed
    assert f"of optimistix on {optimistix} and of jaxopt's compiled plain loop on {jaxopt}." in speed
    assert f"most exact rival on {values} problems, gradients on {gradients}," in speed


def test_a_larger_error_of_ours_is_named():
    errors = {"torchidl": (2e-6, 1e-6), "wellposed fixed_point": (4e-6, 1.4e-6)}
    rows = [compare.Row("ring", 20, 128, name, *pair) for name, pair in errors.items()]
    (line,) = compare.inaccuracies(rows)
    assert line.endswith(", value: ours 4.0e-06, torchidl 2.0e-06")


def test_another_record_is_noticed():
    demo = readme.read("package/demo.json")
    demo["sparse"]["images_lost"] += 1
    template = readme.TEMPLATE.read_text(encoding="utf-8")
    values = readme.numbers() | readme.demo_numbers(demo) | {"output": OUTPUT.strip()}
    assert readme.fill(template, values) != TEXT


def test_a_place_without_a_number_is_an_error():
    with pytest.raises(KeyError, match="nowhere"):
        readme.fill("«nowhere»", {})


def close(one: str, other: str) -> bool:
    """Whether two texts have the same words, and numbers that differ by no more than processors do."""
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    words = NUMBER.sub("#", one) == NUMBER.sub("#", other)
    return words and all(abs(float(a) - float(b)) <= 0.05 * abs(float(b)) + 1e-5 for a, b in pairs)


def test_code_runs_and_prints_what_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace, printed = {"__name__": "__main__"}, []
    for line, code in blocks(TEXT):
        exec(compile("\n" * line + code, ROOT / "README.md", "exec"), namespace)
        printed.append(capsys.readouterr().out)
    assert close(printed[0].strip(), OUTPUT.strip()), printed[0]
    assert "256 converged" in printed[1] and "4 converged" in printed[1]
    assert not close("1 image", "2 images") and not close("10 images", "20 images")


@pytest.fixture
def after_demo(tmp_path, monkeypatch):
    """A folder with the network that the demo leaves behind, here not trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wellposed-results").mkdir()
    network = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    program = torch.export.export(network, (torch.zeros(2, 64),))
    torch.export.save(program, tmp_path / "wellposed-results" / questions.NETWORK)
    return tmp_path


def test_commands_are_understood_and_need_no_further_package(after_demo):
    """All are parsed; those that are quick are run as well."""
    shown = [shlex.split(line, comments=True) for line in COMMANDS if line.startswith("wellposed ")]
    assert len(shown) == 6
    for _, name, *words in shown:
        if name in ("convert", "show"):
            done = CliRunner().invoke(cli, [name, *words], catch_exceptions=False)
            assert done.exit_code == 0, done.output
        elif name == "verify":
            assert any(words[0] in other for _, known, *other in shown if known == "sparsify")
        else:
            command = cli.get_command(click.Context(cli), name)
            options = command.make_context(name, words).params
            assert not [need for need in NEEDS[name] if need.when(options)] and options["data"] == "digits"


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT)
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()]


@pytest.mark.slow
def test_everything_printed_runs_after_make_demo_alone(tmp_path):
    """A fresh copy of what git tracks; `make demo`, then every command and all code as printed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a checkout of git")
    for name in filter(None, listed.stdout.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    kept = {name: value for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV", "WELLPOSED_DATA", "WELLPOSED_CACHE")}  # fmt: skip
    (tmp_path / "readme.py").write_text("\n".join(code for _, code in blocks(TEXT)))
    script = "\n".join(["set -ex", *COMMANDS, "python readme.py"])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=kept, capture_output=True, text=True, check=False
    )
    if "No matching distribution" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / "wellposed-results" / "demo.html").is_file()
    assert close("\n".join(done.stdout.splitlines()[-5:-2]), OUTPUT.strip())
