"""`wellposed certify`: models and data of every kind, what it proves and writes, mistakes, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import wellposed
from wellposed import cli
from wellposed.cli.certify import RADII
from wellposed.convert import to_implicit
from wellposed.models import ImplicitModel
from wellposed.robust import METHODS, Box, certification, certified_accuracy, output_bounds
from wellposed.robust.attacks import pgd
from wellposed.robust.certification import UnsoundError, examine_radii, output_widths

CODE = """
import torch
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
pixels = nn.Sequential(nn.Flatten(), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
softplus = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 3))
one = nn.Linear(6, 1)
two = nn.Linear(6, 2)
three = nn.Linear(6, 3)
number = 3

class Bistable(nn.Module):
    def forward(self, x, u):
        return torch.tanh(2 * x + u[:, :3] + 0.3)

from wellposed import DEQ
branches = nn.Sequential(DEQ(Bistable(), state_shape=(3,)), nn.Linear(3, 3))

class Nowhere(nn.Module):
    def forward(self, u):
        return u[:, :3] / 0
"""


def invoke(*arguments, command="certify"):
    return CliRunner(env={"COLUMNS": "110"}).invoke(cli.cli, [command, *map(str, arguments)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with networks and with the file data.npz, whose classes the network mostly gives."""
    (tmp_path / "certify_networks.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(entry for entry in sys.path if entry)])
    u = torch.rand(60, 6, generator=torch.Generator().manual_seed(1))
    y = network()(u).argmax(1)
    y[:6] = (y[:6] + 1) % 3
    np.savez("data.npz", u=u.numpy(), y=y.numpy())
    yield tmp_path
    sys.modules.pop("certify_networks", None)


def network():
    namespace = {}
    exec(CODE, namespace)
    return namespace["network"]


def basic(*more, model="certify_networks:network", data="data.npz", epsilons=(0.05,)):
    chosen = [part for epsilon in epsilons for part in ("--epsilon", epsilon)]
    return invoke("--model", model, "--data", data, *chosen, *more)


def given():
    with np.load("data.npz") as file:
        return torch.from_numpy(file["u"]), torch.from_numpy(file["y"])


def test_a_network_without_a_certificate_is_certified_for_a_branch(folder):
    namespace = {}
    exec(CODE, namespace)
    u, _ = given()
    np.savez("branches.npz", u=u.numpy(), y=namespace["branches"](u).argmax(1).numpy())
    told = basic(
        "--quiet", "--samples", 10, model="certify_networks:branches", data="branches.npz", epsilons=(0.01,)
    )
    assert told.exit_code == 0, told.output
    assert "proven is for the branch through the equilibrium at the center of each box" in " ".join(
        told.output.split()
    )
    assert "for the branch through the equilibrium at the center" in Path("certify.html").read_text()
    told = basic("--quiet", "--json", "--samples", 10, model="certify_networks:branches", data="branches.npz")
    facts = json.loads(told.stdout)
    assert facts["branch"].startswith("for the branch") and facts["radii"][0]["certified_accuracy"] > 0


def test_a_multiscale_network_is_certified_for_a_branch(folder, monkeypatch):
    Path("multiscale_network.py").write_text(
        "import torch\nfrom torch import nn\nfrom wellposed.models import DEQ\n"
        "from wellposed.models.cells import MultiscaleCell\ntorch.manual_seed(0)\n"
        "class First(nn.Module):\n    def forward(self, x):\n        return x[0]\n"
        "deq = DEQ(MultiscaleCell((2, 4), groups=2), max_steps=200)\n"
        "network = nn.Sequential(deq, First(), nn.Flatten(), nn.Linear(32, 3)).eval()\n"
    )
    monkeypatch.syspath_prepend(".")
    u = torch.rand(2, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = __import__("multiscale_network").network(u).argmax(1)
    np.savez("images.npz", u=u.numpy(), y=y.numpy())
    told = basic(
        "--quiet", "--json", "--no-widths", "--steps", 3,
        model="multiscale_network:network", data="images.npz", epsilons=(1e-5,),
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert facts["branch"].startswith("for the branch") and facts["radii"][0]["certified_accuracy"] == 1.0


def test_the_numbers_are_those_of_the_library(folder):
    result = basic("--json", "--quiet", epsilons=(0.05, 0.0, 0.02))
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    model, (u, y) = network(), given()
    assert [one["epsilon"] for one in facts["radii"]] == [0.0, 0.02, 0.05]
    for one in facts["radii"]:
        box = Box.around(u, one["epsilon"])
        assert one["clean_accuracy"] == pytest.approx(54 / 60)
        assert one["certified_accuracy"] == pytest.approx(certified_accuracy(model, box, y, "best"))
        assert one["attacked_accuracy"] == pytest.approx(pgd(model, u, y, one["epsilon"]).accuracy)
        assert one["certified_accuracy"] <= one["attacked_accuracy"] <= one["clean_accuracy"]
        if one["epsilon"]:
            width = float(output_bounds(model, Box.around(u[:8], one["epsilon"]), "crown").width.mean())
            assert one["widths"]["crown"] == pytest.approx(width)
    assert facts["radii"][2]["certified_accuracy"] < facts["radii"][0]["certified_accuracy"]
    assert result.stderr == ""


def test_the_table_and_the_page(folder):
    result = basic("--out", "page.html", epsilons=(0.01, 0.05))
    assert result.exit_code == 0, result.output
    assert "90.0 %" in result.stdout and "0.05" in result.stdout and "certified" in result.stdout
    page = (folder / "page.html").read_text()
    assert "page.html" in result.stderr and page.startswith("<!doctype html>")
    assert page.count("<svg") == 2 and "<script" not in page and "://" not in page
    assert "--epsilon 0.01 --epsilon 0.05" in page and "triangle" in page


@pytest.mark.parametrize("method", sorted({*METHODS} - {"norm", "best"}))
def test_a_method_by_name(folder, method):
    facts = json.loads(basic("--method", method, "--no-widths", "--json", "--quiet").stdout)
    model, (u, y) = network(), given()
    wanted = certified_accuracy(model, Box.around(u, 0.05), y, method)
    assert facts["radii"][0]["certified_accuracy"] == pytest.approx(wanted) and facts["method"] == method
    assert facts["radii"][0]["widths"] == {}


def test_complete_leaves_nothing_open(folder):
    options = "--method", "interval", "--steps", 1, "--no-widths", "--json", "--quiet"
    plain, complete = (
        json.loads(basic(*options, *more, epsilons=(0.1,)).stdout)["radii"][0]
        for more in ((), ("--complete", "--budget", 20))
    )
    assert plain["certified_accuracy"] < plain["attacked_accuracy"]
    assert plain["certified_accuracy"] < complete["certified_accuracy"] == complete["attacked_accuracy"]
    model, (u, y) = network(), given()
    points = u[None] + 0.1 * (2 * torch.rand(300, *u.shape, generator=torch.Generator().manual_seed(2)) - 1)
    stays = (model(points.clamp(0, 1)).argmax(2) == y).all(0)  # what is proven stays
    assert float(stays.double().mean()) >= complete["certified_accuracy"]
    refused = basic("--complete", model="certify_networks:softplus")
    assert refused.exit_code == 2 and "softplus" in refused.stderr.lower()


@pytest.mark.parametrize("more", [(), ("--complete", "--budget", 20)])
def test_the_page_says_whether_anything_is_left_open(folder, more):
    result = basic("--method", "interval", "--steps", 1, "--no-widths", "--quiet", *more, epsilons=(0.1,))
    assert result.exit_code == 0, result.output
    text = Path("certify.html").read_text()
    assert text.count("nothing is left open") == (2 if more else 0)
    assert text.count("the truth lies between") + text.count("The truth lies between") == (0 if more else 2)


def test_a_method_that_does_not_apply_says_so(folder):
    result = basic("--method", "norm")
    assert result.exit_code == 2 and "|A|_inf < 1" in result.stderr
    facts = json.loads(basic("--json", "--quiet").stdout)
    assert "norm" in facts["radii"][0]["not_applicable"] and "norm" not in facts["radii"][0]["widths"]


def test_models_from_files(folder):
    torch.manual_seed(0)
    model = ImplicitModel(6, 3, 10)
    wellposed.save(model, "model.safetensors")
    wellposed.save(to_implicit(network(), (6,)), "form.safetensors")
    torch.export.save(torch.export.export(network(), (torch.rand(2, 6),)), "network.pt2")
    found = {}
    for name in ("model.safetensors", "form.safetensors", "network.pt2"):
        result = basic("--json", "--quiet", "--no-widths", "--samples", 20, model=name)
        assert result.exit_code == 0, result.output
        found[name] = json.loads(result.stdout)["radii"][0]
    own = json.loads(basic("--json", "--quiet", "--no-widths", "--samples", 20).stdout)["radii"][0]
    assert found["form.safetensors"] == found["network.pt2"] == own


def test_images_are_taken_in_their_shape(folder):
    u, y = given()
    np.savez("images.npz", u=u.view(-1, 1, 2, 3).numpy(), y=y.numpy())
    result = basic("--json", "--quiet", "--no-widths", model="certify_networks:pixels", data="images.npz")
    assert result.exit_code == 0, result.output
    flat = basic("--json", "--quiet", "--no-widths", data="images.npz")
    own = basic("--json", "--quiet", "--no-widths")
    assert json.loads(flat.stdout)["radii"] == json.loads(own.stdout)["radii"]


def test_the_range_cuts_the_box(folder):
    u, y = given()
    np.savez("wide.npz", u=(2 * u - 1).numpy(), y=y.numpy())
    assert "[0, 1]" in basic(data="wide.npz").stderr
    result = basic("--range", -1, 1, "--json", "--quiet", "--no-widths", data="wide.npz", epsilons=(0.1,))
    assert result.exit_code == 0, result.output
    wanted = certified_accuracy(network(), Box.around(2 * u - 1, 0.1, -1.0, 1.0), y, "best")
    assert json.loads(result.stdout)["radii"][0]["certified_accuracy"] == pytest.approx(wanted)


def mistakes():
    u = np.random.default_rng(0).random((5, 6), dtype=np.float32)
    y = np.array([0, 1, 2, 0, 1])
    bad = u.copy()
    bad[2, 3] = np.nan
    np.savez("nan.npz", u=bad, y=y)
    np.savez("wide.npz", u=u[:, :4], y=y)
    np.savez("alone.npz", u=u)
    np.savez("far.npz", u=u, y=y + 2)
    np.savez("real.npz", u=u, y=y.astype(np.float32))
    Path("junk.safetensors").write_text("junk")


WRONG = [
    (["--data", "nan.npz"], "NaN"),
    (["--data", "wide.npz"], "shape (4,)"),
    (["--data", "alone.npz"], "no targets"),
    (["--data", "far.npz"], "classes 0 to 2"),
    (["--data", "real.npz"], "whole number"),
    (["--data", "missing.npz"], "no file 'missing.npz'"),
    (["--data", "nothing"], "neither a data set"),
    (["--epsilon", "-0.1"], "not negative"),
    (["--epsilon", "nan"], "not negative"),
    (["--epsilon", "many"], "not a number"),
    (["--range", "1", "0"], "lower end"),
    (["--model", "missing.safetensors"], "no file 'missing.safetensors'"),
    (["--model", "junk.safetensors"], "not a safetensors file"),
    (["--model", "missing.pt2"], "no file"),
    (["--model", "certify_networks:nothing"], "has no 'nothing'"),
    (["--model", "certify_networks:number"], "torch.nn.Module"),
    (["--model", "certify_networks:one"], "one output a class"),
    (["--model", "certify_networks:Nowhere"], "NaN or infinite"),
    (["--out", "page.txt"], "must end with .html"),
    (["--out", "no/folder/page.html"], "no folder"),
    (["--samples", "0"], "0"),
]


@pytest.mark.parametrize(("options", "complaint"), [*WRONG, (["--method", "crwon"], "did you mean 'crown'?"),
                                                    (["--budget", "0"], "0"),
                                                    (["--budget", "nan"], "which nan is not")])  # fmt: skip
def test_mistakes_end_with_one_message(folder, options, complaint):
    mistakes()
    result = basic(*options)  # the last of an option given twice counts, and of epsilons all
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split()) and "Traceback" not in result.output
    assert result.stdout == "" and not (folder / "certify.html").exists()


def test_ctrl_c(folder, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("wellposed.cli.certify.examine_radii", interrupted)
    arguments = ["--model", "certify_networks:network", "--data", "data.npz", "--epsilon", "0.1"]
    monkeypatch.setattr(sys, "argv", ["wellposed", "certify", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130 and capsys.readouterr().err.strip().endswith("interrupted")


def test_best_is_asked_about_open_samples_only(folder, monkeypatch):
    model, (u, y) = network(), given()
    form, asked, own, epsilon = to_implicit(model, (6,)), [], certification.certified, 0.15
    box, standing = Box.around(u, epsilon), ~pgd(model, u, y, epsilon).success
    left = standing & ~own(form, box, y, "crown")
    assert 1 < int(left.sum()) < 20

    def counted(form, box, target, method, budget):
        asked.append((method, len(target)))
        return own(form, box, target, method, budget)

    monkeypatch.setattr(certification, "certified", counted)
    (found,) = examine_radii(model, form, u, y, [epsilon]).radii
    right = model(u).argmax(1) == y
    assert sum(count for method, count in asked if method == "crown") == int(right.sum()) < len(y)
    assert sum(count for method, count in asked if method == "best") == int(left.sum())
    monkeypatch.undo()
    assert torch.equal(found.certified, own(form, box, y, "best"))


def test_a_contradiction_is_not_hidden(folder, monkeypatch):
    model, (u, y) = network(), given()
    monkeypatch.setattr(certification, "certified", lambda form, box, target, *more: torch.ones_like(target) > 0)
    with pytest.raises(UnsoundError, match="please report"):
        examine_radii(model, to_implicit(model, (6,)), u, y, [0.3])


def test_larger_boxes_contain_smaller_ones(folder):
    """One radius at a time gives the same proofs, and an attack that goes on from the last one is no weaker."""
    model, (u, y) = network(), given()
    form, radii = to_implicit(model, (6,)), [0.02, 0.1, 0.3]
    found = examine_radii(model, form, u, y, reversed(radii), method="crown")
    for epsilon, one in zip(radii, found.radii, strict=True):
        (alone,) = examine_radii(model, form, u, y, [epsilon], method="crown").radii
        assert one.epsilon == epsilon and torch.equal(one.certified, alone.certified)
        assert not (one.attacked & ~alone.attacked).any()
        assert torch.equal(one.certified, found.proven >= epsilon)
        assert torch.equal(one.clean & ~one.attacked, found.broken <= epsilon)
    fallen = found.broken.isfinite()
    assert fallen.any() and (~found.radii[0].clean).any()
    moved = (found.attacked - u).abs().flatten(1).amax(1)
    assert (moved[fallen] <= found.broken[fallen] + 1e-6).all() and (moved[~fallen] == 0).all()
    assert torch.equal(model(found.attacked).argmax(1), found.predicted) and (found.predicted != y)[fallen].all()


def test_without_epsilon_several_radii_are_tried(folder):
    arguments = ("--model", "certify_networks:network", "--data", "data.npz", "--samples", 8, "--no-widths")
    result = invoke(*arguments, "--range", 0, 1, "--json")
    assert [one["epsilon"] for one in json.loads(result.stdout)["radii"]] == list(RADII)


def test_the_page_shows_what_was_proven_and_broken(tmp_path):
    out = tmp_path / "page.html"
    arguments = (
        "--model",
        "reference:digits",
        "--data",
        "digits",
        "--samples",
        20,
        "--steps",
        5,
        "--method",
        "crown",
    )
    result = invoke(*arguments, "--no-widths", "--epsilon", 0.02, "--epsilon", 0.3, "--out", out)
    assert result.exit_code == 0, result.output
    page = out.read_text()
    assert "Proven and broken" in page and page.count("<img") >= 12 and "to 0.02" in page and "at 0.3" in page
    assert "Where to go next" in page and "wellposed attack --model reference:digits" in page
    assert "From a radius of 0.3 on, nothing is proven." in page


def test_widths_say_what_does_not_apply():
    form = to_implicit(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,))
    widths, reasons = output_widths(form, torch.full((2, 3), 0.5), 0.1)
    assert {"lp", "triangle"} <= {*reasons} and widths["crown"] <= widths["interval"] <= widths["box"] * (1 + 1e-6)


def test_a_model_without_hidden_units_is_certified(folder):
    result = basic("--json", "--quiet", model="certify_networks:three")
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)["radii"]
    assert one["certified_accuracy"] == pytest.approx(
        one["attacked_accuracy"], abs=0.02
    )  # a linear model is exact
    form, (u, _) = to_implicit(nn.Linear(6, 3), (6,)), given()
    for method in METHODS:
        bounds = output_bounds(form, Box.around(u[:4], 0.05), method)
        assert (bounds.lower <= form(u[:4])).all() and (form(u[:4]) <= bounds.upper).all()


@pytest.mark.parametrize(
    ("data", "meant"),
    [("digit", "digits"), ("MNST", "mnist"), ("cifar-10", "cifar10"), ("digits:tets", "digits:test")],
)
def test_the_nearest_data_set_is_offered(data, meant, folder):
    result = basic(data=data)
    assert result.exit_code == 2 and f"did you mean {meant!r}?" in " ".join(result.stderr.split())


def test_missing_data_do_not_name_arguments_of_python(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("WELLPOSED_OFFLINE", "1")
    result = basic(data="mnist")
    assert result.exit_code == 2 and "mnist-5k" in result.stderr
    assert "fallback" not in result.stderr and "=True" not in result.stderr


def wide():
    """A network on which branch and bound takes several parts a sample."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
    u = torch.rand(12, 6)
    np.savez("wide.npz", u=u.numpy(), y=model(u).argmax(1).numpy())
    torch.save(model.state_dict(), "wide.pt")
    Path("wide_network.py").write_text(
        "import torch\nfrom torch import nn\n"
        "network = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))\n"
        "network.load_state_dict(torch.load('wide.pt', weights_only=True))\n"
    )


OPEN = ("--method", "interval", "--steps", 1, "--no-widths", "--json", "--quiet", "--complete", "--budget", 20,
        "--samples", 20)  # fmt: skip


def test_an_interrupted_run_loses_no_finished_proof(folder, monkeypatch):
    whole = json.loads(basic(*OPEN, epsilons=(0.05, 0.1)).stdout)["radii"]
    asked, search = [], certification.branch_and_bound

    def interrupted(form, box, target, seconds):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(box)
        return search(form, box, target, seconds)

    monkeypatch.setattr(certification, "branch_and_bound", interrupted)
    journal = folder / "certify.proofs.jsonl"
    finished = journal.read_text().count("complete")
    stopped = basic(*OPEN, epsilons=(0.05, 0.1))
    assert stopped.exit_code == 1 and len(asked) == 3
    assert "finished proofs are in certify.proofs.jsonl; the same command with --resume" in stopped.stderr
    assert journal.read_text().count("complete") == 3 < finished
    with journal.open("a") as file:
        file.write('{"0.05 7 comp')  # what a killed process may leave
    again = []
    monkeypatch.setattr(certification, "branch_and_bound", lambda *given: again.append(1) or search(*given))
    resumed = basic(*OPEN, "--resume", epsilons=(0.05, 0.1))
    assert json.loads(resumed.stdout)["radii"] == whole and len(again) == finished - 3
    assert json.loads(basic(*OPEN, "--resume", epsilons=(0.05, 0.1)).stdout)["radii"] == whole
    assert len(again) == finished - 3


def test_a_journal_of_another_run_is_refused(folder):
    assert basic(*OPEN).exit_code == 0
    other = basic(*OPEN, "--resume", "--steps", 2)
    assert other.exit_code == 2 and "differs in steps" in " ".join(other.stderr.split())
    (folder / "certify.proofs.jsonl").write_text("junk\n")
    junk = basic(*OPEN, "--resume")
    assert junk.exit_code == 2 and "no journal of results" in " ".join(junk.stderr.split())
    assert basic(*OPEN).exit_code == 0


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_proofs(folder):
    wide()
    main = "from wellposed.cli import main; main()"
    command = [sys.executable, "-c", main, "certify", "wide_network:network", "--data", "wide.npz",
               "--epsilon", "0.25", "--budget", "1", "--complete", "--no-widths", "--method", "interval",
               "--steps", "1", "--json", "--quiet"]  # fmt: skip
    package = Path(wellposed.__file__).resolve().parents[1]
    options = {"text": True, "env": {**os.environ, "PYTHONPATH": str(package)}}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    journal = folder / "certify.proofs.jsonl"
    while process.poll() is None and not (journal.exists() and "complete" in journal.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and list(filter(None, said.splitlines())) == [
        "finished proofs are in certify.proofs.jsonl; the same command with --resume goes on", "interrupted"
    ]  # fmt: skip
    before = journal.read_text().splitlines()
    done = subprocess.run([*command, "--resume"], capture_output=True, timeout=120, **options)
    assert done.returncode == 0 and json.loads(done.stdout)["samples"] == 12
    assert journal.read_text().splitlines()[: len(before)] == before
    keys = [key for line in journal.read_text().splitlines()[1:] for key in json.loads(line)]
    assert len(keys) == len(set(keys)), "nothing is asked twice"


VARIABLES = [f"(declare-const {name} Real)" for name in (*(f"X_{k}" for k in range(6)), "Y_0", "Y_1", "Y_2")]


def property_file(name, outputs, low=0.3, high=0.5):
    ends = [f"(assert (>= X_{k} {low}))\n(assert (<= X_{k} {high}))" for k in range(6)]
    Path(name).write_text("\n".join([*VARIABLES, *ends, f"(assert {outputs})"]))
    return name


def onnx_file():
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    weights = {f"{kind}{k}": part.detach().numpy() for k, layer in enumerate(network()[::2])
               for kind, part in (("W", layer.weight), ("b", layer.bias))}  # fmt: skip
    nodes, at = [], "u"
    for k in range(3):
        nodes.append(onnx.helper.make_node("Gemm", [at, f"W{k}", f"b{k}"], [f"z{k}"], transB=1))
        nodes.append(onnx.helper.make_node("Relu", [f"z{k}"], [f"x{k}"]))
        at = f"x{k}"
    ends = [onnx.helper.make_tensor_value_info(name, 1, [1, size]) for name, size in (("u", 6), ("z2", 3))]
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = onnx.helper.make_graph(nodes[:-1], "g", ends[:1], ends[1:], tensors)
    onnx.save(
        onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]), "net.onnx"
    )
    return "net.onnx"


def test_properties_of_an_onnx_network_are_decided(folder):
    model, source = network(), onnx_file()
    points = 0.3 + 0.2 * torch.rand(20000, 6, generator=torch.Generator().manual_seed(0))
    y = model(points).detach()
    lead = (y[:, 0] - y[:, 1]).max().item()
    sum_ = (y[:, 0] + 2 * y[:, 2]).max().item()
    files = [
        property_file("safe.vnnlib", f"(or (>= Y_0 (+ Y_1 {lead + 0.3})) (>= (+ Y_0 (* 2 Y_2)) {sum_ + 0.5}))"),
        property_file("broken.vnnlib", f"(>= (- Y_0 Y_1) {lead - 0.01})"),
        property_file("both.vnnlib", f"(and (>= (- Y_0 Y_1) {lead - 0.01}) (<= (- Y_0 Y_1) {lead - 0.02}))"),
    ]
    given = [part for name in files for part in ("--property", name)]
    result = invoke(source, *given, "--complete", "--budget", 20, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    safe, broken, both = json.loads(result.stdout)["properties"]
    assert [one["status"] for one in (safe, broken, both)] == ["proven", "counter-example", "proven"]
    assert safe["gap"] < 0 and not (folder / "certify.html").exists()
    u = torch.tensor([broken["input"]])
    assert (model(u)[0, 0] - model(u)[0, 1]).item() >= lead - 0.01 and (
        (u >= 0.3 - 1e-6) & (u <= 0.5 + 1e-6)
    ).all()
    table = invoke("certify_networks:network", *given, "--quiet")
    assert table.exit_code == 0 and "counter-example" in table.stdout
    resumed = invoke(source, *given, "--complete", "--budget", 20, "--json", "--quiet", "--resume")
    assert resumed.exit_code == 2 and "another run" in " ".join(resumed.stderr.split())


def test_mistakes_about_properties_end_with_one_message(folder):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    source, good = onnx_file(), property_file("good.vnnlib", "(>= Y_0 1)")
    Path("bad.vnnlib").write_text("(declare-const X_0 Real)\n(assert (>= X_0 (1)")
    Path("few.vnnlib").write_text("(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 0))"
                                  "(assert (<= X_0 1))(assert (>= Y_0 0))")  # fmt: skip
    property_file("outputs.vnnlib", "(>= Y_0 1)")
    text = Path("outputs.vnnlib").read_text()
    Path("outputs.vnnlib").write_text(text + "\n(declare-const Y_3 Real)\n(assert (>= Y_3 0))")
    strange = onnx.load("net.onnx")
    strange.graph.node[1].op_type = "Erf"
    onnx.save(strange, "strange.onnx")
    for arguments, complaint in [
        ((source, "--property", "bad.vnnlib"), "bad.vnnlib, line 2: this '(' is never closed"),
        ((source, "--property", "nowhere.vnnlib"), "there is no file 'nowhere.vnnlib'"),
        ((source, "--property", "few.vnnlib"), "few.vnnlib declares 1 inputs; the network takes 6"),
        ((source, "--property", "outputs.vnnlib"), "the property has 4 outputs, the network 3"),
        (("strange.onnx", "--property", good), "the operator 'Erf' is not supported"),
        (("nowhere.onnx", "--property", good), "there is no file 'nowhere.onnx'"),
        ((source, "--property", good, "--data", "data.npz"), "leave --data and --epsilon out"),
        ((source, "--model", source, "--property", good), "two networks were given"),
        (("--property", good), "Missing option '--model'"),
        ((source,), "Missing option '--data'"),
        ((source, "--property", good, "--budget", 0), "0"),
        (("certify_networks:softplus", "--property", good, "--complete"), "softplus"),
    ]:
        result = invoke(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert complaint in " ".join(result.stderr.split()), (arguments, result.stderr)
        assert "Traceback" not in result.output and result.stdout == ""
