"""`wellposed convert` and `wellposed show`: sources, checks, summaries, pictures, mistakes."""

import json
import signal
import sys
from collections import OrderedDict

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import wellposed
from wellposed import ImplicitForm, ImplicitModel, ImplicitRNN, cli
from wellposed.cli import convert as commands
from wellposed.convert import to_implicit
from wellposed.errors import InputError
from wellposed.forms import Block, Dense
from wellposed.forms.draw.summary import form_facts, summary_lines

CODE = """
import torch
from torch import nn

SIZE = 4

class Network(nn.Sequential):
    def __init__(self, width=6):
        super().__init__(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(), nn.Linear(width, 3))

ready = Network(5)

def broken():
    raise RuntimeError("no weights here\\nand a second line")

class Holder:
    make = staticmethod(lambda: Network(7))
"""


def invoke(*arguments, width=100):
    return CliRunner(env={"COLUMNS": str(width)}).invoke(cli.cli, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a file of networks."""
    (tmp_path / "networks.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    sys.modules.pop("networks", None)


@pytest.mark.parametrize(
    ("source", "states"),
    [("networks:Network", 6), ("networks.py:ready", 5), ("networks:Holder.make", 7), ("./networks.py:Network", 6)],
)
def test_convert_writes_the_form_of_a_factory(source, states, folder):
    result = invoke("convert", source, "--input-shape", "4", "-o", "form.safetensors")
    assert result.exit_code == 0, result.output
    form = wellposed.load(folder / "form.safetensors")
    assert isinstance(form, ImplicitForm) and form.sizes == (states, 4, 3)
    assert f"{states} states, 4 inputs (4), 3 outputs, float32" in result.stdout
    assert "Perron-Frobenius eigenvalue is 0" in result.stdout and "loops: none" in result.stdout
    assert "largest difference" in result.stdout and "wellposed show form.safetensors" in result.stderr


def test_convert_gives_the_outputs_of_the_network(folder):
    invoke("convert", "networks:ready", "--input-shape", "4", "-o", "form.safetensors", "--dtype", "float64")
    network, form = sys.modules["networks"].ready.double().eval(), wellposed.load("form.safetensors")
    u = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(form(u), network(u), rtol=1e-12, atol=1e-12)
    assert form.dtype == torch.float64


def test_convert_an_exported_program(folder):
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).eval()
    torch.export.save(torch.export.export(network, (torch.zeros(1, 4),)), "model.pt2")
    result = invoke("convert", "model.pt2", "--input-shape", "4", "-o", "form.safetensors", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["states"], facts["file"]) == (6, "form.safetensors") and facts["difference"]["largest"] < 1e-6
    u = torch.randn(3, 4)
    torch.testing.assert_close(wellposed.load("form.safetensors")(u), network(u))


def test_rescale(folder):
    invoke("convert", "networks:Network", "--input-shape", "4", "-o", "plain.safetensors")
    result = invoke(
        "convert", "networks.py:deep", "--input-shape", "4", "-o", "form.safetensors", "--rescale", "0.5"
    )
    assert result.exit_code == 2  # there is no such factory yet
    with (folder / "networks.py").open("a") as file:
        file.write(
            "\ndef deep():\n    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU())]\n"
        )
        file.write("    return nn.Sequential(*layers)\n")
    norms = {}
    for name, options in {"plain": [], "scaled": ["--rescale", "0.25"]}.items():
        sys.modules.pop("networks", None)
        torch.manual_seed(0)
        result = invoke(
            "convert", "networks.py:deep", "--input-shape", "4", "-o", f"{name}.safetensors", "--json", *options
        )
        norms[name] = json.loads(result.stdout)["norm"]
    assert norms["scaled"] < 0.25 < norms["plain"]
    u = torch.randn(4, 4)
    torch.testing.assert_close(
        wellposed.load("scaled.safetensors")(u), wellposed.load("plain.safetensors")(u), rtol=1e-6, atol=0
    )


def test_a_wrong_form_is_not_written(folder, monkeypatch):
    def wrong(network, shape):
        return ImplicitForm(torch.zeros(1, 1), torch.ones(1, 4), torch.ones(3, 1))

    monkeypatch.setattr(commands, "to_implicit", wrong)
    arguments = ["convert", "networks:Network", "--input-shape", "4", "-o", "form.safetensors"]
    result = invoke(*arguments)
    assert result.exit_code == 1 and "differs from the network by" in result.stderr
    assert not (folder / "form.safetensors").exists()
    assert invoke(*arguments, "--no-check").exit_code == 0 and (folder / "form.safetensors").exists()


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("nowhere.pt2", 2, "there is no file 'nowhere.pt2'"),
        ("weights.pt", 2, "there is no file"),
        ("networks.py", 2, "is not an exported program"),
        ("nowhere:Network", 2, "there is no module 'nowhere'"),
        ("nowhere.py:Network", 2, "there is no file 'nowhere.py'"),
        ("networks", 2, "neither an exported program"),
        ("networks:Netwrok", 2, "has no 'Netwrok'; it offers Holder, Network"),
        ("networks:SIZE", 2, "gives int; it must give a torch.nn.Module"),
        ("networks:broken", 1, "RuntimeError: no weights here\n"),
        ("torch.nn:Linear", 1, "called without arguments fails: TypeError"),
        ("torch.nn:Bilinear", 1, "called without arguments fails: TypeError"),
        ("not a name:x", 2, "not the name of a module"),
    ],
)
def test_wrong_sources(source, code, message, folder):
    result = invoke("convert", source, "--input-shape", "4", "-o", "form.safetensors")
    assert result.exit_code == code and message in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr


def leave(monkeypatch, *arguments):
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["wellposed", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_an_unsupported_module_is_one_line(folder, monkeypatch, capsys):
    (folder / "odd.py").write_text(
        "import torch\nfrom torch import nn\nclass Odd(nn.Module):\n"
        "    def forward(self, u):\n        return torch.fft.fft(u).real\n"
    )
    assert leave(monkeypatch, "convert", "odd.py:Odd", "--input-shape", "4", "-o", "form.safetensors") == 1
    error = capsys.readouterr().err
    assert "fft" in error and "register" in error and len(error.strip().splitlines()) == 1
    sys.modules.pop("odd", None)


def test_what_tracing_adds_to_an_error_is_left_out(folder, monkeypatch, capsys):
    def fail(*_):
        raise InputError("what is wrong\n\nWhile executing %relu\nOriginal traceback:")

    monkeypatch.setattr(commands, "to_implicit", fail)
    assert leave(monkeypatch, "convert", "networks:Network", "--input-shape", "4", "-o", "form.safetensors") == 1
    assert capsys.readouterr().err == "Error: what is wrong\n"


def test_a_damaged_program(folder):
    (folder / "torn.pt2").write_bytes(b"PK torn")
    result = invoke("convert", "torn.pt2", "--input-shape", "4", "-o", "form.safetensors")
    assert result.exit_code == 1 and "no exported program" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "networks:Network", "-o", "form.safetensors"], "Missing option '--input-shape'"),
        (["convert", "networks:Network", "--input-shape", "3,x,2"], "is not a shape"),
        (["convert", "networks:Network", "--input-shape", "0"], "is not a shape"),
        (
            ["convert", "networks:Network", "--input-shape", "4", "-o", "a/b/form.safetensors"],
            "there is no folder 'a/b'",
        ),
        (["convert", "networks:Network", "--input-shape", "4", "-o", "f.safetensors", "--rescale", "0"], "x>0"),
        (["show", "nowhere.safetensors"], "does not exist"),
        (["show", "networks.py", "--picture", "spy.jpeg"], "must end with .html"),
        (["show", "networks.py", "--graph", "a/b/graph.png"], "there is no folder 'a/b'"),
        (["shwo"], "did you mean 'show'"),
    ],
)
def test_mistakes_are_usage_errors(arguments, message, folder):
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_interrupt_is_clean(folder, monkeypatch, capsys):
    monkeypatch.setattr(commands, "to_implicit", lambda *_: signal.raise_signal(signal.SIGINT))
    assert leave(monkeypatch, "convert", "networks:Network", "--input-shape", "4", "-o", "form.safetensors") == 130
    assert capsys.readouterr().err.split() == ["interrupted"] and not (folder / "form.safetensors").exists()


def loop():
    sizes = (2, 3)
    A = Block(sizes, sizes, {(0, 1): Dense(torch.full((2, 3), 0.125)), (1, 0): Dense(torch.full((3, 2), -0.25))})
    B = Block(sizes, (4,), {(1, 0): Dense(torch.eye(4)[:3])})
    C = Block((1,), sizes, {(0, 0): Dense(torch.ones(1, 2))})
    return ImplicitForm(A, B, C, activation=["tanh", "relu"], labels=["plant", "[gain]"])


def test_show_describes_blocks_loops_and_certificate(folder):
    wellposed.save(loop(), "loop.safetensors")
    result = invoke("show", "loop.safetensors", width=80)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines()[:8])) <= 80
    assert "[gain] by dense" in result.stdout and "plant by dense (feedback)" in result.stdout
    assert "loops: plant <-> [gain]" in result.stdout and "0.375" in result.stdout
    facts = json.loads(invoke("show", "loop.safetensors", "--json").stdout)
    assert facts["loops"] == [["plant", "[gain]"]] and facts["certificate"]["holds"]
    assert facts["nonzeros"] == {"A": 12, "B": 3, "C": 2, "D": 0} and facts["density"] == 12 / 25
    assert [block["norm"] for block in facts["blocks"]] == [0.375, 0.5, None]


def test_numbers_of_a_form():
    form = loop()
    facts = form_facts(form)
    assert facts["stored"] == 6 + 6 + 12 + 2 and facts["bytes"] == 4 * facts["stored"]
    assert facts["norm"] == float(form.A.to_dense().abs().sum(1).max())
    weight = torch.randn(3, 3)
    shared = Block((3, 3, 3), (3, 3, 3), {(0, 1): Dense(weight), (1, 2): Dense(weight)})
    assert form_facts(ImplicitForm(shared, torch.zeros(9, 1), torch.zeros(1, 9)))["stored"] == 9 + 9 + 9


def test_a_form_without_a_proof_says_so():
    facts = form_facts(
        ImplicitForm(2 * torch.ones(2, 2), torch.ones(2, 1), torch.ones(1, 2), activation="identity")
    )
    assert not facts["certificate"]["holds"] and "certificate: NONE: " in summary_lines(facts)[-1]


def test_blocks_are_named_after_modules():
    stack = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4), torch.nn.Tanh())
    plain, named = to_implicit(stack, (2,)), to_implicit(torch.nn.Sequential(OrderedDict(encoder=stack)), (2,))
    assert [block["block"] for block in form_facts(plain)["blocks"]] == ["tanh 3", "relu 1", "y"]
    assert [block["block"] for block in form_facts(named)["blocks"]] == ["encoder.3", "encoder.1", "y"]


def test_show_draws_pictures(folder):
    wellposed.save(loop(), "loop.safetensors")
    result = invoke("show", "loop.safetensors", "--picture", "spy.html", "--graph", "graph.png")
    assert result.exit_code == 0, result.output
    assert "drew spy.html" in result.stderr and "drew graph.png" in result.stderr
    page = (folder / "spy.html").read_text()
    assert "[[A, B], [C, D]]" in page
    assert "wellposed verify loop.safetensors" in page and "certify --model loop.safetensors" in page
    assert (folder / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_show_takes_models_and_refuses_others(folder, monkeypatch, capsys):
    wellposed.save(ImplicitModel(3, 2, 5), "model.safetensors")
    assert json.loads(invoke("show", "model.safetensors", "--json").stdout)["states"] == 5
    wellposed.save(ImplicitRNN(3, 2, 5, batch_first=True), "rnn.safetensors")
    assert leave(monkeypatch, "show", "rnn.safetensors") == 1
    assert "holds ImplicitRNN" in capsys.readouterr().err
    assert leave(monkeypatch, "show", "networks.py") == 1
    assert "not a safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["form", "form.onnx", "form.pt"])
def test_the_file_to_write_has_its_ending(out, folder):
    for command in (
        ("convert", "networks:Network", "--input-shape", "4"),
        ("sparsify", "--network", "networks:Network", "--data", "digits"),
    ):
        result = invoke(*command, "-o", out)
        assert result.exit_code == 2 and f"{out!r} must end with .safetensors" in result.stderr


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_writes_an_onnx_file(folder):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model = ImplicitModel(3, 2, 4, kappa=0.5)
    wellposed.save(model, folder / "model.safetensors")
    result = invoke("export", "model.safetensors", "--onnx", "model.onnx", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["file"] == "model.onnx" and told["difference"] < 1e-3
    session, u = runtime.InferenceSession(folder / "model.onnx"), torch.randn(5, 3)
    torch.testing.assert_close(
        torch.tensor(session.run(["y"], {"u": u.numpy()})[0]), model(u).detach(), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["networks:Network", "--onnx", "model.pt"], "'model.pt' must end with .onnx"),
        (["none.safetensors", "--onnx", "model.onnx"], "there is no file 'none.safetensors'"),
        (["networks:Network", "--onnx", "model.onnx", "--input-shape", "4"], "contains no ImplicitModel"),
        (["reference:nothing", "--onnx", "model.onnx"], "unknown reference"),
    ],
)
def test_mistakes_of_export(words, complaint, folder):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    result = invoke("export", *words)
    assert result.exit_code == 2 and complaint in result.stderr
    assert "Traceback" not in result.output
