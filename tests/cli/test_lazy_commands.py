"""Commands are imported when they are used; other packages add commands by entry points."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from distributions import declared_commands, write_distribution

import wellposed as wp
from wellposed import cli
from wellposed.checker.check import CONFIG as CHECKED_CONFIG
from wellposed.checker.check import WEIGHTS as CHECKED_WEIGHTS
from wellposed.checker.model import BODY
from wellposed.cli import COMMANDS, LAB_COMMANDS, short_help, verify
from wellposed.forms.storage import FORM_FORMAT
from wellposed.models.io.storage import CONFIG, FORMAT, WEIGHTS

SOURCE = Path(__file__).parents[2] / "src"

# Ends with the exit code 99 where one of the packages is imported.
LIGHT = """
import os, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "numba", "sklearn", "wellposed_lab"):
            print("imports", name, file=sys.stderr)
            sys.stderr.flush()
            os._exit(99)

sys.meta_path.insert(0, Refused())
from wellposed.cli import main
main()
"""


def light(*words, path=(), **variables):
    """Runs a command in a process that cannot import torch, and the lab neither."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, *path))), **variables}
    command = [sys.executable, "-c", LIGHT, *map(str, words)]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder in which the lab's commands are declared."""
    return write_distribution(tmp_path_factory.mktemp("lab"), "wellposed-lab", declared_commands())


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--help"], 0, "Lab commands:\n  list        List the suites"),
        (["--version"], 0, wp.__version__),
        (["completion", "zsh"], 0, "_WELLPOSED_COMPLETE"),
        (["verify", "--help"], 0, "in fractions"),
        (["vrify"], 2, "did you mean 'verify'"),
        (["verify", "nowhere.safetensors"], 2, "there is no file"),
    ],
)
def test_what_needs_no_torch_imports_none(words, code, told, lab):
    done = light(*words, path=[lab])
    assert done.returncode == code and told in done.stdout + done.stderr, done.stdout + done.stderr


def test_workers_need_no_torch():
    program = LIGHT.replace("from wellposed.cli import main\nmain()", "import wellposed.workers")
    assert program != LIGHT
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(SOURCE)}, timeout=60
    )
    assert done.returncode == 0


def test_the_check_itself_notices_torch():
    assert light("show", "--help").returncode == 99


def test_completion_of_a_command_imports_none(lab):
    words = {"_WELLPOSED_COMPLETE": "bash_complete", "COMP_WORDS": "wellposed r", "COMP_CWORD": "1"}
    program = LIGHT.replace("main()", "cli.main(prog_name='wellposed')").replace("import main", "import cli")
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{lab}", **words}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, text=True, capture_output=True, timeout=60
    )
    assert done.stdout.split() == ["plain,report", "plain,resume", "plain,run"], done.stderr


def test_a_form_is_read_by_the_library_once_it_is_proven(tmp_path):
    form = wp.ImplicitModel(3, 2, 6).form()
    path = tmp_path / "form.safetensors"
    wp.save(form, path, certificate=True)
    wp.models.save_pretrained(form, tmp_path / "folder", certificate=True)
    for model in (path, tmp_path / "folder"):
        done = invoke("verify", str(model), "--json")
        assert done.exit_code == 0 and '"proven": true' in done.stdout and "a form" in done.stdout, done.stderr
        assert light("verify", model).returncode == 99
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    done = light("verify", path)
    assert done.returncode == 1 and "is not proven" in done.stderr


def test_a_refused_model_is_refused_without_torch(tmp_path):
    path = tmp_path / "model.safetensors"
    wp.save(wp.ImplicitModel(3, 2, 6), path, certificate=True)
    assert "bit for bit" in invoke("verify", str(path)).stdout
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert light("verify", path).returncode == 1


def test_a_form_beside_the_configuration_of_a_model_is_not_taken_for_a_form(tmp_path):
    """The checker reads the file here, and `from_pretrained` the configuration."""
    torch.manual_seed(0)
    model = wp.ImplicitModel(3, 2, 6)
    wp.models.save_pretrained(model, tmp_path, certificate=True)
    wp.save(model.form(), tmp_path / WEIGHTS, certificate=True)
    assert invoke("verify", str(tmp_path / WEIGHTS)).exit_code == 0
    result = invoke("verify", str(tmp_path))
    assert result.exit_code == 1 and "is not proven" in result.stderr


def test_names_of_files_are_those_of_the_library():
    assert verify.WEIGHTS == CHECKED_WEIGHTS == WEIGHTS and CHECKED_CONFIG == CONFIG
    assert BODY == {FORM_FORMAT: "form", FORMAT: "config"}


def invoke(*words, width=80):
    return CliRunner(env={"COLUMNS": str(width)}).invoke(cli.cli, list(words))


def loaded(name):
    command = cli.cli.get_command(click.Context(cli.cli), name)
    assert command is not None and command.name == name
    return command


@pytest.mark.parametrize("name", [*COMMANDS, *LAB_COMMANDS])
def test_the_listed_help_is_that_of_the_command(name):
    listed = LAB_COMMANDS[name] if name in LAB_COMMANDS else COMMANDS[name][1]
    for room in (20, 45, 80, 1000):
        assert short_help(listed, room) == loaded(name).get_short_help_str(room)


def test_the_lab_declares_the_commands_that_help_knows():
    assert set(declared_commands()) == set(LAB_COMMANDS)


def test_the_listing_is_that_of_click(monkeypatch):
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    for width in (60, 80, 120):
        plain = click.Group(commands={name: loaded(name) for name in COMMANDS})
        expected = CliRunner().invoke(plain, ["--help"], terminal_width=width, max_content_width=width).stdout
        ours = CliRunner().invoke(cli.cli, ["--help"], terminal_width=width, max_content_width=width).stdout
        assert ours.partition("Commands:")[2] == expected.partition("Commands:")[2] != ""


def test_without_the_lab_its_commands_say_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    listed = invoke("--help").stdout
    assert "Lab" not in listed and "resume" not in listed and "verify" in listed
    monkeypatch.setattr(sys, "argv", ["wellposed", "run", "identity"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 1 and told.count("\n") == 1 and "pip install ./lab" in told


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Another package that adds commands, good ones and bad ones."""
    points = {
        "shout": "loud_commands:shout",
        "torn": "loud_commands:torn",
        "gone": "no_such_commands:gone",
        "number": "loud_commands:number",
        "verify": "loud_commands:shout",
    }
    write_distribution(tmp_path, "loud", points)
    (tmp_path / "loud_commands.py").write_text(
        "import click\nnumber = 3\n\n@click.command()\ndef shout():\n    'Say it.'\n    click.echo('LOUD')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("loud_commands", None)


def test_another_package_adds_a_command(added):
    listed = invoke("--help").stdout
    assert "Commands of other packages:\n  gone        From the package loud." in listed
    assert "loud_commands" not in sys.modules, "help has imported a command"
    assert invoke("shout").stdout == "LOUD\n"
    assert "did you mean 'shout'" in invoke("shuot").stderr
    assert loaded("verify") is verify.verify, "a command of the library was replaced"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torn", "has no attribute 'torn'"),
        ("gone", "No module named 'no_such_commands'"),
        ("number", "is a int, not a click command"),
    ],
)
def test_a_command_that_cannot_be_loaded_is_one_line(added, name, reason):
    result = invoke(name)
    assert result.exit_code == 1 and reason in result.stderr and result.stderr.count("\n") == 1
