"""`wellposed certify`: models and data of every kind, what it proves and writes, mistakes, Ctrl-C."""

import json
import sys
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
                                                    (["--budget", "0"], "0")])  # fmt: skip
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
    assert torch.equal(model(found.attacked).argmax(1), found.said) and (found.said != y)[fallen].all()


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
