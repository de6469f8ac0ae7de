"""`wellposed sparsify`: networks and data of every kind, what it prints and writes, mistakes, Ctrl-C."""

import contextlib
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import wellposed
from wellposed import cli
from wellposed.cli.inputs import read_samples
from wellposed.convex import fit_states, record_states
from wellposed.forms.operators.base import Sparse

CODE = """
import torch
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
tanh = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
pixels = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
flat = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
jumps = nn.Sequential(nn.Linear(6, 12), nn.Hardshrink(), nn.Linear(12, 3))
linear = nn.Linear(6, 3)
pairs = nn.Linear(6, 8), nn.ReLU(), nn.Unflatten(1, (1, 8)), nn.MaxPool1d(2), nn.Flatten()
largest = nn.Sequential(*pairs, nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
images = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
pooled = nn.Sequential(*images, nn.Conv2d(6, 12, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(192, 10))

class Broken(nn.Module):
    def forward(self, u):
        return torch.relu(u) / 0
"""


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "110"}).invoke(cli.cli, ["sparsify", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with networks and with the file data.npz."""
    (tmp_path / "sparsify_networks.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    u = torch.randn(120, 6, generator=torch.Generator().manual_seed(1))
    y = (u[:, 0] > 0).long() + (u[:, 1] > 0).long()
    np.savez("data.npz", u=u.numpy(), y=y.numpy())
    yield tmp_path
    sys.modules.pop("sparsify_networks", None)


def basic(network="network", data="data.npz", *more):
    return invoke("--network", f"sparsify_networks:{network}", "--data", data, "-o", "model.safetensors", *more)


def given():
    with np.load("data.npz") as file:
        return torch.from_numpy(file["u"]), torch.from_numpy(file["y"])


def test_the_model_is_that_of_fit_states(folder):
    result = basic("network", "data.npz", "--kappa", 0.7, "--target-sparsity", 0.5)
    assert result.exit_code == 0, result.output
    network, (u, y) = sys.modules["sparsify_networks"].network, given()
    wanted, report = fit_states(record_states(network, [u]), kappa=0.7, target_sparsity=0.5, targets=y)
    model = wellposed.load("model.safetensors")
    assert torch.equal(model.A.to_dense(), wanted.A) and torch.equal(model.B.to_dense(), wanted.B)
    torch.testing.assert_close(model(u), wanted(u), rtol=1e-5, atol=1e-6)
    assert model.certificate().holds
    assert all(isinstance(part, Sparse) for part in model.A.parts.values())
    assert f"{100 * report.before:.2f} %" in result.stdout and f"{100 * report.after:.2f} %" in result.stdout
    assert "50.0 %" in result.stdout and "proven" in result.stdout and "relative gap" in result.stdout
    assert "wellposed.load('model.safetensors')" in result.stderr
    assert not (folder / "model.safetensors.rows").exists()


def test_options_reach_the_fit(folder):
    options = ["--objective", "lasso", "--strength", "0.05", "--bound", "row", "--support", "full", "--no-rescale"]
    more = ["--solver", "projected", "--jobs", 2, "--samples", 50, "--kappa", 0.6, "--json", "--quiet"]
    result = basic("network", "data.npz", *options, *more)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    chosen = {name: facts[name] for name in ("kappa", "bound", "objective", "strength", "units")}
    assert chosen == {"kappa": 0.6, "bound": "row", "objective": "lasso", "strength": 0.05, "units": "none"}
    assert "50 of 120 drawn with seed 0" in facts["data"] and facts["well_posed"] and facts["test"] is None
    A = wellposed.load("model.safetensors").A.detach()
    assert bool(A[:20, :20].tril().any())  # full support has loops; layered has none


def test_large_sparse_loops_load_and_run_without_forming_a(folder, monkeypatch):
    options = ("network", "data.npz", "--support", "full", "--target-sparsity", "0.8", "--gaps")
    assert basic(*options).exit_code == 0
    assert isinstance(wellposed.load("model.safetensors"), wellposed.ImplicitModel), "small ones have kernels"
    monkeypatch.setattr("wellposed.cli.sparsify.LARGEST_DENSE", 19)
    result = basic(*options)
    assert result.exit_code == 0, result.output
    form = wellposed.load("model.safetensors")
    assert isinstance(form, wellposed.ImplicitForm) and form.order.loops
    assert all(isinstance(part, Sparse) for part in form.A.parts.values())
    u = torch.randn(5, 6)
    torch.testing.assert_close(form(u), form.to_model()(u))
    checked = CliRunner().invoke(cli.cli, ["verify", "model.safetensors"])
    assert checked.exit_code == 0, checked.output
    assert basic("network", "data.npz", "--support", "full").exit_code == 0
    assert isinstance(wellposed.load("model.safetensors"), wellposed.ImplicitModel), "a dense A is no form"


def test_data_sets_by_name_are_scored_on_their_test_part(folder):
    result = basic("flat", "digits", "--samples", 200, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    test, network = wellposed.data.load_images("digits", "test"), sys.modules["sparsify_networks"].flat
    own = float((network(test.flat()).argmax(1) == test.labels).double().mean())
    model = wellposed.load("model.safetensors")
    after = float((model(test.flat()).argmax(1) == test.labels).double().mean())
    assert facts["test"]["before"] == pytest.approx(own) and facts["test"]["after"] == pytest.approx(after)
    shaped = json.loads(basic("pixels", "digits:holdout", "--samples", 200, "--json").stdout)
    assert "holdout" in shaped["data"] and "test" in shaped["test"]["source"]


def test_an_exported_program_and_a_report_of_either_kind(folder):
    network = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).eval()
    torch.export.save(torch.export.export(network, (torch.zeros(1, 6),)), "model.pt2")
    for page in ("report.html", "report.json"):
        options = ["--network", "model.pt2", "--data", "data.npz", "-o", "out.safetensors", "--report", page]
        result = invoke(*options, "--test", "data.npz")
        assert result.exit_code == 0, result.output
        assert page in result.stderr and "unseen samples" in result.stdout
    u, _ = given()
    torch.testing.assert_close(wellposed.load("out.safetensors")(u), network(u), rtol=1e-3, atol=1e-3)
    page = (folder / "report.html").read_text()
    assert "How much of the network is needed?" in page and page.count("<svg") == 2 and "<script" not in page
    assert "wellposed verify out.safetensors" in page
    command = "wellposed sparsify --network model.pt2 --data data.npz --test data.npz --report report.html"
    assert command in page and "<td" in page and ">1</th>" in page  # the layer has the name of its module
    assert json.loads((folder / "report.json").read_text())["layers"][0]["activation"] == "tanh"


def test_files_of_every_kind_hold_the_same(folder):
    u, y = given()
    np.save("u.npy", u.numpy())
    save_file({"inputs": u, "labels": y}, "data.safetensors")
    torch.save((u, y), "pair.pt")
    torch.save({"U": u, "targets": y}, "named.pt")
    for name in ("data.npz", "u.npy", "data.safetensors", "pair.pt", "named.pt"):
        found = read_samples(name)
        assert torch.equal(found.u, u)
        assert (found.targets is None) if name == "u.npy" else torch.equal(found.targets, y)


class Trap:
    def __reduce__(self):
        return (open, ("trap", "w"))


def broken_data(folder):
    u, y = given()
    bad = u.clone()
    bad[3, 2] = float("nan")
    np.savez("nan.npz", u=bad.numpy())
    np.savez("short.npz", u=u.numpy(), y=y[:-1].numpy())
    np.savez("names.npz", first=u.numpy(), second=u.numpy())
    np.save("ints.npy", (10 * u).int().numpy())
    np.save("vector.npy", u[:, 0].numpy())
    np.save("wide.npy", torch.randn(20, 7).numpy())
    np.save("object.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    np.save("same.npy", np.ones((20, 6), np.float32))
    (folder / "trap.pt").write_bytes(pickle.dumps(Trap(), protocol=2))
    (folder / "junk.npz").write_bytes(b"junk")
    (folder / "junk.safetensors").write_bytes(b"junk")


@pytest.mark.parametrize(
    ("network", "data", "message"),
    [
        ("network", "missing.npz", "there is no file 'missing.npz'"),
        ("network", "nan.npz", "1 of 120 samples hold NaN or infinity, the first is 3"),
        ("network", "short.npz", "120 samples need as many targets"),
        ("network", "names.npz", "first, second; call the inputs u"),
        ("network", "ints.npy", "floating-point"),
        ("network", "vector.npy", "one sample a row"),
        ("network", "wide.npy", "neither samples of the shape (7,)"),
        ("network", "object.npy", "cannot be read as plain arrays"),
        ("network", "trap.pt", "cannot be read as plain arrays"),
        ("network", "junk.npz", "cannot be read as plain arrays"),
        ("network", "junk.safetensors", "cannot be read as plain arrays"),
        ("network", "same.npy", "all 20 samples have the same states"),
        ("network", "mnits", "neither a data set"),
        ("network", "digits:tests", "has the parts train, test"),
        ("jumps", "data.npz", "'hardshrink' is refused"),
        ("linear", "data.npz", "no activation"),
        ("Broken", "data.npz", "NaN or infinity"),
        ("absent", "data.npz", "has no 'absent'"),
    ],
)
def test_mistakes_are_explained_with_exit_code_2(network, data, message, folder):
    broken_data(folder)
    result = basic(network, data)
    text = " ".join(result.stderr.split())
    assert result.exit_code == 2, result.output
    assert message in text and "Traceback" not in result.output and isinstance(result.exception, SystemExit)
    assert not (folder / "model.safetensors").exists() and not (folder / "trap").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kappa", 1.0], "kappa must lie strictly between 0 and 1"),
        (["--target-sparsity", 1.5], "a fraction from 0 to below 1"),
        (["--objective", "ridge", "--target-sparsity", 0.5], "needs a sparse objective"),
        (["--solver", "simplex"], "Invalid value for '--solver'"),
        (["--report", "report.txt"], "must end with .html or .json"),
        (["-o", "nowhere/model.safetensors"], "there is no folder 'nowhere'"),
        (["--network", "missing.pt2"], "Invalid value for --network: there is no file"),
        (["--test", "missing.npz"], "Invalid value for --test: there is no file"),
    ],
)
def test_bad_options(options, message, folder):
    result = basic("network", "data.npz", *options)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not (folder / "model.safetensors").exists()


def test_interrupted_filters_say_that_nothing_is_stored(folder, monkeypatch):
    reported = []

    @contextlib.contextmanager
    def impatient(quiet, units="rows"):
        def stop(done, total):
            reported.append((done, total, units))
            raise KeyboardInterrupt

        yield stop

    monkeypatch.setattr("wellposed.cli.sparsify.progress", impatient)
    result = basic("pooled", "digits", "--samples", 20)
    assert reported == [(1, 3, "layers")]
    assert result.exit_code != 0 and "filters fitted so far are not stored" in result.stderr
    assert not (folder / "model.safetensors").exists()


def test_interrupted_rows_are_kept_and_used(folder, monkeypatch):
    calls = []

    @contextlib.contextmanager
    def impatient(quiet, units="rows"):
        def stop(done, total):
            calls.append(done)
            if len(calls) == 1:
                raise KeyboardInterrupt

        yield stop

    monkeypatch.setattr("wellposed.cli.sparsify.progress", impatient)
    result = basic()
    assert result.exit_code != 0 and "model.safetensors.rows; the same command goes on" in result.stderr
    kept = {path: path.stat().st_mtime_ns for path in (folder / "model.safetensors.rows").iterdir()}
    assert len(kept) == 1 and not (folder / "model.safetensors").exists()
    result = basic("network", "data.npz", "--rows", "model.safetensors.rows")
    assert result.exit_code == 0, result.output
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert len(list((folder / "model.safetensors.rows").iterdir())) == 2  # a folder of one's own stays
    assert calls[1:] == [12, 20]  # rows that were kept count as done, over all layers
    model, (u, _) = wellposed.load("model.safetensors"), given()
    torch.testing.assert_close(model(u), sys.modules["sparsify_networks"].network(u), rtol=1e-3, atol=1e-3)


def verified(path):
    result = CliRunner().invoke(cli.cli, ["verify", str(path), "--json"])
    assert result.exit_code == 0, result.output
    return {claim["claim"]: claim["stated"] for claim in json.loads(result.stdout)["claims"]}


def test_filters_of_a_network_with_max_pooling_become_smaller_than_the_network(folder):
    result = basic("pooled", "digits", "--target-sparsity", 0.8, "--samples", 200, "--report", "page.html")
    assert result.exit_code == 0, result.output
    facts = json.loads(basic("pooled", "digits", "--target-sparsity", 0.8, "--samples", 200, "--json").stdout)
    network, model = facts["sizes"]["network"], facts["sizes"]["model"]
    assert network["weights"] == 6 * 9 + 12 * 54 + 1920 and network["bytes"] == 4 * (network["weights"] + 28)
    assert model["nonzeros"] <= 0.21 * network["nonzeros"]
    assert model["bytes"] == (folder / "model.safetensors").stat().st_size
    assert model["certificate"] == (folder / "model.cert").stat().st_size
    assert model["bytes"] + model["certificate"] < network["bytes"] and "larger" not in result.stderr
    assert f"{model['bytes']:,}" in result.stdout and f"{network['nonzeros']:,}" in result.stdout
    assert verified("model.safetensors")["well-posed"] == "no loop"
    form = wellposed.load("model.safetensors")
    u = wellposed.data.load_images("digits", "test").flat()
    expected = sys.modules["sparsify_networks"].pooled(u).detach()
    assert float((form(u) - expected).norm() / expected.norm()) < 0.3


@pytest.mark.parametrize(("support", "proof"), [("layered", "no loop"), ("full", "inf: ")])
def test_rows_of_a_network_with_max_pooling_are_saved_and_proven(support, proof, folder):
    result = basic("largest", "data.npz", "--support", support, "--kappa", 0.8)
    assert result.exit_code == 0, result.output
    assert "larger than the network" in result.stderr and "no certificate" not in result.stderr
    assert verified("model.safetensors")["well-posed"].startswith(proof)
    u, _ = given()
    network, model = sys.modules["sparsify_networks"].largest, wellposed.load("model.safetensors")
    torch.testing.assert_close(model(u), network(u), rtol=1e-2, atol=1e-2)


def test_a_dense_network_is_smaller_at_90_percent_with_its_certificate(folder):
    facts = json.loads(basic("pixels", "digits", "--target-sparsity", 0.9, "--samples", 300, "--json").stdout)
    network, model = facts["sizes"]["network"], facts["sizes"]["model"]
    assert network["bytes"] == 4 * (64 * 16 + 16 + 160 + 10)
    assert model["bytes"] + model["certificate"] < network["bytes"]


def test_gaps_in_the_certificate_are_those_that_are_printed(folder):
    result = basic("network", "data.npz", "--target-sparsity", 0.5, "--gaps")
    assert result.exit_code == 0, result.output
    stated = verified("model.safetensors")["row gaps"]
    (line,) = [line for line in result.stdout.splitlines() if "largest gap of a row, relative to |z|^2/2" in line]
    assert stated == f"20 rows within {line.split()[-1]}, relative to |z|^2/2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gaps", "--objective", "lasso", "--strength", "0.1"], "rows that minimise the misfit alone"),
        (["--shared"], "the network is no module with convolutions"),
        (["--shared", "--bound", "row"], "--bound is about rows"),
        (["--test", "pairs.npz"], "cannot be compared with outputs of the shape"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_work(options, message, folder, monkeypatch):
    np.savez("pairs.npz", u=given()[0].numpy(), y=np.ones((120, 2), np.float32))
    monkeypatch.setattr("wellposed.cli.sparsify.fit_states", lambda *_, **__: pytest.fail("it was fitted"))
    result = basic("network", "data.npz", *options)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output


def test_finished_work_is_written_before_it_is_scored(folder, monkeypatch):
    def fail(*_):
        raise RuntimeError("while scoring")

    monkeypatch.setattr("wellposed.cli.sparsify._scored", fail)
    assert isinstance(basic().exception, RuntimeError) and verified("model.safetensors")


def test_models_forms_and_references_are_taken(folder):
    assert basic().exit_code == 0
    network = sys.modules["sparsify_networks"].network
    wellposed.save(wellposed.to_implicit(network, (6,)), "form.safetensors")
    for source, data in (("form.safetensors", "data.npz"), ("reference:digits", "digits")):
        options = ["--network", source, "--data", data, "--samples", 100, "-o", "out.safetensors", "--json"]
        result = invoke(*options)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["sizes"]["network"]["weights"] > 0 and verified("out.safetensors")
    assert invoke("--network", "reference:digit", *options[2:]).exit_code == 2
