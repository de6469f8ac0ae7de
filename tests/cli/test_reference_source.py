"""Models that come with the package, on the command line."""

import json

import pytest
from click.testing import CliRunner

from wellposed.cli import cli


def run(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_certify_takes_a_reference_model(tmp_path):
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
