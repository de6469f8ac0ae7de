"""The command: streams, exit codes, mistyped names."""

import json
import signal
import sys

import pytest
from click.testing import CliRunner

import wellposed
from wellposed import cli
from wellposed.errors import InputError
from wellposed.experiments.demo import DemoConfig, run_demo


@pytest.fixture
def small(monkeypatch):
    """Runs the demo on little data, whatever the command asks for."""
    seen = []

    def run(config, progress):
        seen.append((config, progress))
        tiny = DemoConfig(config.seeds, config.epochs, samples=100, batch_size=50, test_samples=20)
        return run_demo(tiny, progress)

    monkeypatch.setattr(cli, "run_demo", run)
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


def test_demo_writes_a_page_and_prints_the_table(small, tmp_path):
    out = tmp_path / "a" / "b"
    result = CliRunner().invoke(cli.cli, ["demo", "--out", str(out), "--seeds", "2", "--epochs", "1"])
    assert result.exit_code == 0, result.output
    assert "<!doctype html>" in (out / "demo.html").read_text()
    assert "implicit model" in result.stdout
    assert "seed 1: inf:" in result.stdout
    assert "demo.html" in result.stderr
    assert (small[0][0].seeds, small[0][0].epochs, small[0][1]) == (2, 1, True)


def test_json_is_all_there_is_on_stdout(small, tmp_path):
    arguments = ["demo", "--out", str(tmp_path), "--seeds", "1", "--epochs", "1", "--json", "--quiet"]
    result = CliRunner().invoke(cli.cli, arguments)
    found = json.loads(result.stdout)
    assert found["page"] == str(tmp_path / "demo.html")
    assert found["config"]["seeds"] == 1
    assert result.stderr == ""
    assert small[0][1] is False


def test_the_default_folder(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(cli.cli, ["demo", "--seeds", "1", "--epochs", "1"])
    assert (tmp_path / "wellposed-results" / "demo.html").exists()


def test_a_mistyped_command_is_corrected(monkeypatch, capsys):
    assert leave(monkeypatch, "dmeo") == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo", "--seeds", "0"], ["demo", "--nothing"]])
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
    monkeypatch.setattr(cli, "run_demo", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert leave(monkeypatch, "demo", "--out", str(tmp_path)) == 130
    assert capsys.readouterr().err.split() == ["interrupted"]


def test_our_errors_are_one_line(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise InputError("what is wrong")

    monkeypatch.setattr(cli, "run_demo", fail)
    assert leave(monkeypatch, "demo", "--out", str(tmp_path)) == 1
    assert capsys.readouterr().err == "Error: what is wrong\n"


def test_a_failed_certificate_fails_the_command(tmp_path, monkeypatch, capsys, small):
    monkeypatch.setattr("wellposed.experiments.demo.DemoResult.certified", False)
    assert leave(monkeypatch, "demo", "--out", str(tmp_path), "--seeds", "1", "--epochs", "1") == 1
    assert "certificate" in capsys.readouterr().err
    assert "NOT all" in (tmp_path / "demo.html").read_text()
