"""The command: streams, exit codes, mistyped names."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from wellposed_lab.engine.experiment import all_suites
from wellposed_lab.experiments.mathematics.parameters import CountRun

import wellposed
from wellposed import cli
from wellposed.cli.demo.questions import DemoConfig, run_demo
from wellposed.errors import InputError

TINY = {"epochs": 2, "feedback_epochs": 2, "states": 9, "train_images": 200, "examined": 20, "attack_steps": 2}


@pytest.fixture(scope="module")
def demo_result(tmp_path_factory):
    return run_demo(DemoConfig(radii=(0.02, 0.1), **TINY), tmp_path_factory.mktemp("demo"))


@pytest.fixture
def small(monkeypatch, demo_result):
    """Has the command show a small demo, whatever it asks for."""
    seen = []

    def run(config, folder, tell):
        seen.append(config)
        tell("(a) begins")
        return replace(demo_result, config=replace(demo_result.config, seed=config.seed), folder=folder)

    monkeypatch.setattr("wellposed.cli.demo.run_demo", run)
    return seen


def leave(monkeypatch, *arguments):
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["wellposed", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_version(monkeypatch, capsys):
    assert leave(monkeypatch, "--version") in (0, None)
    assert capsys.readouterr().out == f"wellposed {wellposed.__version__}\n"


def test_demo_writes_page_numbers_and_models_and_prints_the_table(small, tmp_path):
    out = tmp_path / "a" / "b"
    result = CliRunner().invoke(cli.cli, ["demo", "--out", str(out), "--seed", "2"])
    assert result.exit_code == 0, result.output
    assert "<!doctype html>" in (out / "demo.html").read_text()
    assert json.loads((out / "demo.json").read_text())["command"] == "wellposed demo --seed 2"
    assert "What have I got?" in result.stdout and result.stdout.endswith(f"now open {out / 'demo.html'}\n")
    assert result.stdout.count("  wellposed ") == 3
    assert result.stderr == "(a) begins\n"
    assert small[0].seed == 2


def test_json_is_all_there_is_on_stdout(small, tmp_path):
    result = CliRunner().invoke(cli.cli, ["demo", "--out", str(tmp_path), "--json", "--quiet"])
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "demo.json").read_text())
    assert found["page"] == str(tmp_path / "demo.html")
    assert result.stderr == ""


def test_a_mistyped_command_is_corrected(monkeypatch, capsys):
    assert leave(monkeypatch, "dmeo") == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo", "--seed", "-1"], ["demo", "--nothing"]])
def test_wrong_options(monkeypatch, capsys, arguments):
    assert leave(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert arguments[1] in captured.err


def test_a_folder_that_cannot_be_written_is_reported_before_training(small, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert leave(monkeypatch, "demo", "--out", str(tmp_path / "file" / "below")) == 1
    assert "choose another --out" in capsys.readouterr().err
    assert small == []


def test_interrupt_is_one_line_and_130(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("wellposed.cli.demo.run_demo", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert leave(monkeypatch, "demo", "--out", str(tmp_path)) == 130
    assert capsys.readouterr().err.split() == ["interrupted"]


def test_our_errors_are_one_line(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise InputError("what is wrong")

    monkeypatch.setattr("wellposed.cli.demo.run_demo", fail)
    assert leave(monkeypatch, "demo", "--out", str(tmp_path)) == 1
    assert capsys.readouterr().err == "Error: what is wrong\n"


def test_a_failed_certificate_fails_the_command(tmp_path, monkeypatch, capsys, small):
    monkeypatch.setattr("wellposed.cli.demo.questions.DemoResult.certified", False)
    assert leave(monkeypatch, "demo", "--out", str(tmp_path)) == 1
    assert "certificate" in capsys.readouterr().err


@pytest.fixture
def records(tmp_path):
    """A results folder with one finished suite."""
    invoke("run", "parameters", "--scale", "tiny", "--out", str(tmp_path), "--quiet")
    return tmp_path


def invoke(*arguments, width=80):
    return CliRunner(env={"COLUMNS": str(width)}).invoke(cli.cli, list(arguments))


def test_list_names_every_suite_and_fits_the_terminal():
    result = invoke("list")
    assert result.exit_code == 0 and all(name in result.stdout for name in all_suites())
    assert max(map(len, result.stdout.splitlines())) <= 80
    facts = json.loads(invoke("list", "--json").stdout)
    assert {fact["suite"] for fact in facts} == set(all_suites())
    unpublished = {fact["suite"] for fact in facts if not fact["claims"]}
    assert unpublished == {"beyond", "certified-loops", "certified-training", "mondeq", "sparsify-digits"}


def test_run_status_and_resume(records):
    result = invoke("status", "--out", str(records))
    assert "complete" in result.stdout and max(map(len, result.stdout.splitlines())) <= 80
    (fact,) = json.loads(invoke("status", "--out", str(records), "--json").stdout)
    assert fact["state"] == "complete" and fact["command"] == "wellposed run parameters --scale tiny"
    again = invoke("resume", "--out", str(records), "--json")
    assert json.loads(again.stdout)[0]["finished"] == fact["planned"]
    assert f"{fact['planned']} finished before" in again.stderr


def test_hints_keep_the_folder_of_the_results(tmp_path):
    place = tmp_path / "my results"
    result = invoke("run", "parameters", "--scale", "tiny", "--out", str(place))
    assert f"now: wellposed report --out '{place}'" in result.stderr
    empty = invoke("status", "--out", str(tmp_path / "none"))
    assert f"wellposed run SUITE --out {tmp_path / 'none'}" in empty.stderr


def test_report_writes_a_page_and_prints_verdicts(records):
    invoke("run", "parameters", "--out", str(records), "--quiet")
    result = invoke("report", "--out", str(records))
    assert result.exit_code == 0, result.output
    assert "parameters" in result.stdout and "report.html" in result.stderr
    assert (records / "report.html").stat().st_size > 1e6
    found = json.loads(invoke("report", "--out", str(records), "--json", "--quiet").stdout)
    assert found["verdicts"] and {v["verdict"] for v in found["verdicts"]} == {"reproduced", "undecided"}
    assert all(v["records"] for v in found["verdicts"])


def test_report_reads_further_records(records, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    result = invoke("report", "--out", str(other), "--also", str(records), "--quiet")
    assert result.exit_code == 0 and (other / "report.html").exists()
    assert result.stdout == "" and "only runs at scale default" in result.stderr  # these are tiny


def test_nothing_to_do_is_said(tmp_path):
    for command in ("resume", "report"):
        result = invoke(command, "--out", str(tmp_path / "none"))
        assert result.exit_code == 1 and "start with: wellposed run SUITE" in result.stderr
    result = invoke("status", "--out", str(tmp_path / "none"))
    assert result.exit_code == 0 and result.stdout == "" and "nothing was begun" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "identty"], "did you mean 'identity'"),
        (["run"], "Missing argument"),
        (["run", "identity", "--scale", "huge"], "'tiny', 'default', 'paper'"),
        (["run", "identity", "--seeds", "0"], "x>=1"),
        (["run", "identity", "--device", "cuda"], "no CUDA device"),
        (["report", "--also", "/nowhere/at/all"], "does not exist"),
        (["statsu"], "did you mean 'status'"),
    ],
)
def test_mistakes_are_usage_errors(arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_a_damaged_record_is_named(records):
    with (records / "records.jsonl").open("a") as file:
        file.write('{"id": "torn')
    result = invoke("status", "--out", str(records))
    assert result.exit_code == 0 and "warning" in result.stderr and "line" in result.stderr


def test_a_failed_run_fails_the_command(tmp_path, monkeypatch):
    def broken(*arguments):
        raise InputError("no such thing")

    monkeypatch.setattr(CountRun, "execute", broken)
    result = invoke("run", "parameters", "--scale", "tiny", "--out", str(tmp_path), "--quiet")
    assert result.exit_code == 1 and "some runs failed" in result.stderr
    assert "complete, with failures" in result.stdout


def test_completion_offers_suites():
    assert "_WELLPOSED_COMPLETE=bash_complete" in invoke("completion", "bash").stdout
    environment = {"_WELLPOSED_COMPLETE": "bash_complete", "COMP_WORDS": "wellposed run ari", "COMP_CWORD": "2"}
    result = CliRunner(env=environment).invoke(cli.cli, [], prog_name="wellposed")
    assert "plain,arithmetic" in result.stdout


def test_report_shows_thresholds_of_a_suite_without_claims(tmp_path):
    records = Path(__file__).parents[2] / "lab" / "results" / "beyond.jsonl"
    shown = invoke("report", "--also", str(records), "--out", str(tmp_path)).stdout
    assert "path_independent" in shown and " met" in shown
