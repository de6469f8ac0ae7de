"""Models that come with the package, on the command line."""

import json

import pytest
from click.testing import CliRunner

from wellposed.cli import cli
from wellposed.models import reference_models
from wellposed.pages.demo import shipped


def run(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_certify_takes_a_reference_model(tmp_path):
    pytest.importorskip("sklearn")
    done = run(
        *("certify", "--model", "reference:digits-robust", "--data", "digits", "--samples", 40),
        *("--epsilon", 0.01, "--method", "interval", "--steps", 3, "--json"),
        *("--out", tmp_path / "page.html"),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (radius,) = found["radii"]
    assert found["model"] == "reference:digits-robust" and radius["certified_accuracy"] >= 0.8


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("digit", "did you mean 'digits'?"), ("rolling-argmax", "holds ImplicitRNN, not a form or an")],
)
def test_others_are_refused_with_the_reason(name, complaint):
    done = run("certify", "--model", f"reference:{name}", "--data", "digits", "--epsilon", 0.01)
    assert done.exit_code == 2 and complaint in " ".join(done.output.replace("│", " ").split())


def test_the_demo_shows_one():
    line = shipped()
    assert reference_models()["addition"].certificate in line
    near, far = (float(part.split(" at k=")[0].split()[-1]) for part in line.split(";")[0].split(", ")[1:])
    assert 1e3 < far / near < 1e5  # the square of a hundredfold scale, by homogeneity
