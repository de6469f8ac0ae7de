"""A command that lacks packages names all of them at once, before it works."""

import importlib.util
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from wellposed.cli import NEEDS, cli
from wellposed.data.images import image_packages
from wellposed.errors import MissingExtraError

ROOT = Path(__file__).parents[2]
OPTIONAL = ("PIL", "clarabel", "cvxpy", "highspy", "joblib", "matplotlib", "numba", "onnx", "onnxscript", "plotly",
            "pooch", "pyautoattack", "scipy")  # fmt: skip


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A place without data in which none of the optional packages is installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in OPTIONAL else found(name))
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("WELLPOSED_CACHE", str(tmp_path / "none"))
    monkeypatch.delenv("WELLPOSED_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


MODEL = ["--model", "reference:digits"]


@pytest.mark.parametrize(
    ("words", "missing", "extras"),
    [
        (["export", "reference:digits", "--onnx", "digits.onnx"], "onnx, onnxscript", "share"),
        (["attack", *MODEL, "--data", "mnist", "--epsilon", "0.1", "--attack", "autoattack", "--out", "a.png"],
         "matplotlib, pooch, pyautoattack", "data,plots,robust"),
        (["attack", *MODEL, "--data", "digits", "--epsilon", "0.1", "--attack", "lp"], "highspy", "robust"),
        (["certify", *MODEL, "--data", "cifar10", "--method", "triangle"], "highspy, pooch", "data,robust"),
        (["show", __file__, "--picture", "a.png", "--graph", "b.html"], "matplotlib, plotly", "plots"),
        (["sparsify", "--network", "a.pt2", "--data", "fashion", "--solver", "conic", "--objective", "robust",
          "--jobs", "2", "-o", "a.safetensors"], "clarabel, cvxpy, joblib, pooch, scipy", "convex,data"),
    ],
)  # fmt: skip
def test_all_that_is_missing_is_named_at_once(words, missing, extras, bare):
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, MissingExtraError), done.output
    assert str(done.exception).startswith(f"{missing} ")
    assert str(done.exception).endswith(f"run: pip install 'wellposed[{extras}]'")
    assert not list(bare.iterdir())


def test_what_comes_with_the_package_needs_nothing_more(bare):
    command = [
        "certify",
        *MODEL,
        "--data",
        "digits",
        "--samples",
        "2",
        "--epsilon",
        "0.01",
        "--no-widths",
        "--quiet",
    ]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0 and (bare / "certify.html").is_file()


def test_data_that_are_here_need_no_download(bare, monkeypatch):
    monkeypatch.setattr("wellposed.data.images.fetch", lambda *files, **options: (0, []))
    assert image_packages("mnist", "test") == image_packages("mnist-5k", "test") == ()
    monkeypatch.setattr(
        "wellposed.data.images.fetch", lambda name, variants, *rest, **options: (len(variants) - 1, [])
    )
    assert image_packages("cifar10", "fit") == ("PIL",)


def test_the_extras_bring_what_the_commands_need():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    through = {"scipy": "cvxpy"}  # which brings it
    for need in (need for needs in NEEDS.values() for need in needs):
        assert {through.get(name, name) for name in need.packages} <= set(extras[need.extra]), need
