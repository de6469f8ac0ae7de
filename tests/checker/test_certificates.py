"""Certificates of our own always pass, and stop passing when anything that they speak of is changed."""

import hashlib
import json
import math
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forged_files import certify_anew, change_claims, read_parts, rewritten, write_claims, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wellposed as wp
from wellposed.activations import get_activation
from wellposed.checker import RefusedError, check
from wellposed.checker.phi import PHI, activation
from wellposed.cli import cli
from wellposed.convex import fit_states, record_states
from wellposed.convex.claims import gap_claim
from wellposed.convex.rows import support_mask
from wellposed.errors import IllPosedError, InputError
from wellposed.robust import Box
from wellposed.robust.bounds import enclosures

ROOT = Path(__file__).parents[2]
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "silu", "selu", "mish", "sin", "leaky_relu(0.2)", "hardtanh")
CONDITIONS = ("inf", "weighted", "spectral", "mu", "monotone")


def fits(condition, name):
    phi = get_activation(name)
    return (condition != "mu" or phi.slope[0] >= 0) and (condition != "monotone" or phi.projection)


@st.composite
def models(draw):
    condition = draw(st.sampled_from(CONDITIONS))
    name = draw(st.sampled_from([name for name in ACTIVATIONS if fits(condition, name)]))
    kappa = draw(st.sampled_from([0.05, 0.5, 0.9, 0.999])) / max(1.0, get_activation(name).lipschitz())
    torch.manual_seed(draw(st.integers(0, 10**6)))
    size = draw(st.integers(1, 9))
    model = wp.ImplicitModel(
        2, 2, size, activation=name, condition=condition, kappa=kappa, bias=draw(st.booleans())
    )
    model = model.to(draw(st.sampled_from([torch.float32, torch.float64])))
    with torch.no_grad():
        model.state.raw.mul_(draw(st.sampled_from([0.0, 1.0, 30.0, 1e4])))
        if model.state.log_weights is not None:
            model.state.log_weights.normal_()
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certified")


@given(models())
@settings(max_examples=60)
def test_a_saved_model_is_proven_and_computes_the_same(folder, model):
    path = folder / "model.safetensors"
    wp.save(model, path, certificate=True)
    assert [finding.claim for finding in check(path)] == ["well-posed"]
    loaded = wp.load(path)
    assert torch.equal(loaded.A, model.A) and torch.equal(loaded.state.raw, loaded.A)


@given(models(), st.integers(0, 10**6), st.sampled_from([1.0001, 1.5, 30.0]))
@settings(max_examples=25)
def test_a_forger_who_enlarges_a_row_needs_another_proof(folder, model, place, factor):
    """Enlarges the heaviest row and names the new digest; the value stated before then no longer holds."""
    path = folder / "forged.safetensors"
    model = model.double()
    wp.save(model, path, certificate=True)
    if check(path)[0].stated.split(":")[0] not in ("inf", "mu") or not model.A.any():
        return
    header, data = read_parts(path)
    begin, end = header["state.raw"]["data_offsets"]
    A = np.frombuffer(data[begin:end]).reshape(model.A.shape).copy()
    loops = (
        np.abs(A).sum(1)
        if model.condition.name == "inf"
        else (np.abs(A).sum(1) - np.abs(A.diagonal()) + A.diagonal())
    )
    if loops.max() <= 0:
        return
    A[loops.argmax()] *= factor
    rewritten(path, header, data[:begin] + A.tobytes() + data[end:])
    with pytest.raises(RefusedError, match="another model"):
        check(path)
    certify_anew(path)
    with pytest.raises(RefusedError, match="fails at state"):
        check(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: wp.ImplicitModel(3, 2, 6, triangular=True),
        lambda: wp.ImplicitModel(3, 2, 6, rank=2),
        lambda: wp.ImplicitModel(3, 2, 6, activation="max_pool(2)", condition="block"),
        lambda: wp.ImplicitModel(3, 2, 6, activation="softmax", condition="block"),
        lambda: wp.ImplicitRNN(3, 4, 5, out_features=2, num_layers=2, batch_first=True),
        lambda: wp.ImplicitModel(3, 2, 6).form(),
        lambda: wp.ImplicitModel(3, 2, 6, rank=2).form(),
        lambda: wp.series(wp.ImplicitModel(3, 4, 6).form(), wp.ImplicitModel(4, 2, 5, activation="tanh").form()),
        lambda: wp.to_implicit(
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)), (1, 6, 6)
        ),
        lambda: wp.ImplicitModel(3, 2, 6).half(),
        lambda: wp.ImplicitModel(3, 2, 6).bfloat16(),
    ],
)
def test_kinds_of_models(make, tmp_path):
    model = make()
    wp.save(model, tmp_path / "m.safetensors", certificate=True)
    assert all(finding.claim == "well-posed" for finding in check(tmp_path / "m.safetensors"))
    wp.models.save_pretrained(model, tmp_path / "folder", certificate=True)
    assert check(tmp_path / "folder" / "model.safetensors") == check(tmp_path / "m.safetensors")
    config = tmp_path / "folder" / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(RefusedError, match=r"another config\.json"):
        check(tmp_path / "folder" / "model.safetensors")


def test_what_is_not_proven_gets_no_certificate(tmp_path):
    loop = wp.ImplicitForm(torch.tensor([[1.5]]), torch.ones(1, 1), torch.ones(1, 1), activation="tanh")
    path = tmp_path / "m.safetensors"
    with pytest.raises(IllPosedError):
        wp.save(loop, path, certificate=True)
    assert not path.with_suffix(".cert").exists()
    with pytest.raises(InputError, match="DEQ"):
        wp.models.save_pretrained(wp.DEQ(wp.models.DenseCell(3, 4)), tmp_path, certificate=True)


SIGNS = st.floats(-1, 1, width=32)


@given(
    st.integers(0, 10**6), st.sampled_from(["relu", "tanh", "sigmoid", "hardtanh", "leaky_relu(0.2)", "softsign"])
)
@settings(max_examples=4)
def test_boxes_hold_all_equilibria(folder, seed, name):
    torch.manual_seed(seed)
    path, box = folder / "boxed.safetensors", Box.around(torch.rand(2, 3), 0.2)
    model = wp.ImplicitModel(3, 2, 5, activation=name, bias=True, kappa=0.8, condition="weighted")
    claims = enclosures(model, box)
    wp.save(model, path, certificate=True, claims=claims)
    assert [finding.claim for finding in check(path)] == ["well-posed", "enclosure", "enclosure"]
    y = wp.load(path).double()(box.to(torch.float64).sample(50)).detach()
    for k, claim in enumerate(claims):
        assert bool(((y[:, k] >= claim.tensors["y0"]) & (y[:, k] <= claim.tensors["y1"])).all())
        for name_of_end, direction in (("y1", -1), ("y0", 1), ("x1", -1), ("x0", 1)):
            ends = claim.tensors["y1"] - claim.tensors["y0"] if name_of_end[0] == "y" else torch.ones(1)
            claim.tensors[name_of_end].add_(direction * 0.02 * ends)
            with pytest.raises(IllPosedError, match=r"does not hold|is empty"):
                wp.save(model, path, certificate=True, claims=[claim])
            claim.tensors[name_of_end].sub_(direction * 0.02 * ends)


FITS = [
    {},
    {"target_sparsity": 0.6},
    {"kappa": 0.3, "rescale": False},
    {"bound": "row", "kappa": 0.5, "rescale": False},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", FITS, ids=str)
def test_gaps_are_computed_again(options, dtype, tmp_path):
    network = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    states = record_states(network, [torch.randn(100, 6, dtype=dtype)])
    model, report = fit_states(states, **options)
    sparse = "target_sparsity" in options
    claim = gap_claim(model, report, states, None if sparse else support_mask(states, "layered"), own=sparse)
    assert claim.facts["largest"] < (1e-5 if dtype == torch.float32 else 1e-11)
    path = tmp_path / "m.safetensors"
    wp.save(model, path, certificate=True, claims=[claim])
    assert check(path)[1].stated.startswith("18 rows within")
    assert check(path)[1].stated.endswith("relative to |z|^2/2")
    for name, change in (("gaps0", -1e-3), ("dual0", 1e-2), ("targets0", 1e-2), ("design1", 1e-2)):
        kept = claim.tensors[name].clone()
        claim.tensors[name] += change * (1 + kept.abs().max())
        with pytest.raises(IllPosedError, match="the gap of row"):
            wp.save(model, path, certificate=True, claims=[claim])
        claim.tensors[name] = kept
    for group in claim.facts["groups"]:
        group["kappa"] *= 0.01
    with pytest.raises(IllPosedError, match="exceeds its cap"):
        wp.save(model, path, certificate=True, claims=[claim])


def test_the_gap_bounds_the_loss_of_a_worse_row(tmp_path):
    """Moves a row away from the best one; the gap must grow by what that costs at least."""
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    states = record_states(network, [torch.randn(60, 4).double()])
    model, report = fit_states(states)
    u = states.U - states.U.mean(0)
    z = states.Z - states.Z.mean(0)
    before = (u @ model.B[:6].detach().mT * 1.0 - z * 2.0 ** report.exponents[0]).square().sum(0) / 2
    with torch.no_grad():
        model.B[:6] += 0.1 * torch.randn(6, 4)
    after = (u @ model.B[:6].detach().mT - z * 2.0 ** report.exponents[0]).square().sum(0) / 2
    claim = gap_claim(model, report, states, support_mask(states, "layered"))
    gaps = torch.cat([claim.tensors[f"gaps{k}"] for k in range(len(claim.facts["groups"]))])
    order = torch.tensor([row for group in claim.facts["groups"] for row in group["rows"]])
    lost = (after - before)[order]  # the first rows were the best: the gap is the loss, and a little for rounding
    assert bool((gaps >= lost - 1e-9).all()) and bool((gaps <= 1.001 * lost + 1e-9).all())
    assert float(gaps.max()) > 1e-3


def saved(tmp_path, **options):
    path = tmp_path / "m.safetensors"
    model = wp.ImplicitModel(3, 2, 6, bias=True, condition="weighted", kappa=0.8).double()
    wp.save(model, path, certificate=True, claims=enclosures(model, Box.around(torch.rand(1, 3).double(), 0.1)))
    return path


def claim(said, kind):
    return next(claim for claim in said["claims"] if claim["kind"] == kind)


FORGERIES = {
    "a smaller kappa": (lambda said: claim(said, "well-posed").update(value=0.4), "fails at state"),
    "a kappa of one": (lambda said: claim(said, "well-posed").update(value=1.0), "not below 1"),
    "kappa a text": (lambda said: claim(said, "well-posed").update(value="0.8"), "not a number"),
    "kappa a bool": (lambda said: claim(said, "well-posed").update(value=False), "not a number"),
    "kappa not there": (lambda said: claim(said, "well-posed").pop("value"), "not a number"),
    "another condition": (lambda said: claim(said, "well-posed").update(condition="triangular"), "not triangular"),
    "no loop": (lambda said: claim(said, "well-posed").update(condition="acyclic"), "does not know the condition"),
    "a condition of one's own": (lambda said: claim(said, "well-posed").update(condition=[1]), "does not know"),
    "weights of other states": (lambda said: claim(said, "well-posed").update(weights="1.u0"), "shape"),
    "weights not there": (lambda said: claim(said, "well-posed").update(weights="none"), "no tensor"),
    "weights a list": (lambda said: claim(said, "well-posed").update(weights=[1.0] * 6), "no tensor"),
    "no claims": (lambda said: said.update(claims=[]), "nothing is claimed"),
    "claims no list": (lambda said: said.update(claims={"kind": "well-posed"}), "no list of claims"),
    "a claim of another kind": (lambda said: said["claims"].append({"kind": "fast"}), "no claim of the kind"),
    "a box without uniqueness": (lambda said: said["claims"].reverse(), "needs well-posedness"),
    "outputs for states": (lambda said: claim(said, "enclosure").update(outputs=["1.x0", "1.x1"]), "does not fit"),
    "ends swapped": (lambda said: claim(said, "enclosure")["outputs"].reverse(), "empty"),
    "larger inputs": (lambda said: claim(said, "enclosure").update(inputs=["1.u0"]), "two ends"),
    "another part": (lambda said: claim(said, "well-posed").update(about="cells.0"), "no part"),
    "another digest": (lambda said: said.update(sha256="0" * 64), "another model"),
    "no digest": (lambda said: said.pop("sha256"), "another model"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_statement_is_refused_with_the_reason(name, tmp_path):
    path = saved(tmp_path)
    check(path)
    change, reason = FORGERIES[name]
    change_claims(path.with_suffix(".cert"), change)
    with pytest.raises(RefusedError, match=reason):
        check(path)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_weights_that_make_no_norm_are_refused(bad, tmp_path):
    model = write_model(tmp_path / "m.safetensors", np.zeros((2, 2)))
    facts = {"kind": "well-posed", "condition": "weighted", "value": 0.5, "weights": "v"}
    write_claims(model, [facts], {"v": np.array([1.0, 1.0])})
    assert check(model)
    write_claims(model, [facts], {"v": np.array([1.0, bad])})
    with pytest.raises(RefusedError, match=r"positive|NaN or infinity"):
        check(model)


def test_files_that_lie_about_their_size(tmp_path):
    path = saved(tmp_path)
    proof, data = path.with_suffix(".cert"), path.with_suffix(".cert").read_bytes()
    header, tail = read_parts(proof)

    def refused(content: bytes, reason: str) -> None:
        proof.write_bytes(content)
        with pytest.raises(RefusedError, match=reason):
            check(path)

    refused(b"", "no safetensors")
    refused(data[:-1], "declares")
    refused(data + b"\0", "declares")
    refused(struct.pack("<Q", 1 << 62) + data[8:], "header claims")
    for field, value in (("shape", [1 << 40]), ("data_offsets", [0, 1 << 50]), ("shape", [-6]), ("dtype", "F32")):
        changed = json.loads(json.dumps(header))
        changed["0.weights"][field] = value
        text = json.dumps(changed).encode()
        refused(struct.pack("<Q", len(text)) + text + tail, "size|declares|gaps")
    refused(struct.pack("<Q", 14) + b'{"a":1,"a":22}', "twice")
    refused(struct.pack("<Q", 10) + b"[" * 10, "no readable JSON")
    with proof.open("wb") as file:
        file.truncate((1 << 30) + 1)  # takes no room on the disk
    with pytest.raises(RefusedError, match="at most"):
        check(path)


def test_a_flipped_bit_is_refused_or_changes_nothing_that_is_proven(tmp_path):
    path = saved(tmp_path)
    proof, model = path.with_suffix(".cert"), path.read_bytes()
    data, before = proof.read_bytes(), check(path)
    draw, passed = np.random.default_rng(0), 0
    for _ in range(250):
        place, bit = int(draw.integers(len(data))), int(draw.integers(8))
        proof.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        try:
            found = check(path)
        except RefusedError:
            continue
        passed += 1  # e.g. a version number, or a weight by its last digit
        assert [f.claim for f in found] == [f.claim for f in before]
    assert passed < 125
    proof.write_bytes(data)
    for _ in range(100):
        place, bit = int(draw.integers(len(model))), int(draw.integers(8))
        path.write_bytes(model[:place] + bytes([model[place] ^ 1 << bit]) + model[place + 1 :])
        with pytest.raises(RefusedError):
            check(path)


WITH_PARAMETERS = [
    "leaky_relu(0.3)",
    "elu(2.0)",
    "hardtanh(-0.5, 2.0)",
    "rescaled('tanh', 3.0)",
    "softshrink(0.25)",
    "max_pool(4)",
    "group_sort(2)",
    "normalise(6, 1e-05)",
    "multiply(0.1, 2.0)",
    "matrix_product(2, 3, 2, 0.1, 0.7)",
]


SIZED = ("max_pool", "group_sort", "normalise", "matrix_product", "multiply")  # of which no name is without sizes


@pytest.mark.parametrize("name", [*(n for n in PHI if n not in SIZED), *WITH_PARAMETERS])
def test_constants_of_activations(name):
    """The checker's constants hold for sampled quotients and do not exceed the library's by more than its room."""
    phi, own = get_activation(name), activation(name)
    assert float(own.gamma) <= phi.lipschitz() * (1 + 5e-10)
    if own.slope is None:
        return
    z = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    values = phi(z)
    quotients = values.diff() / z.diff()
    low, high = (float(end) for end in own.slope)
    assert low - 1e-9 <= float(quotients.min()) and float(quotients.max()) <= high + 1e-9
    if own.image is not None:
        for k in range(0, 24001, 997):
            ends = own.image(Fraction(float(z[k])))
            assert float(ends[0]) - 1e-15 <= float(values[k]) <= float(ends[1]) + 1e-15
            assert float(ends[1] - ends[0]) < 1e-10


@pytest.mark.parametrize(
    "name", ["relu(", "custom", "leaky_relu('a')", "rescaled('tanh')", "hardtanh(1, 2, 3)", "(" * 300]
)
def test_activations_that_are_not_known_prove_nothing(name, tmp_path):
    model = write_model(tmp_path / "m.safetensors", np.zeros((2, 2)), name)
    write_claims(model, [{"kind": "well-posed", "condition": "inf", "value": 0.5}])
    with pytest.raises(RefusedError, match=r"cannot be read|not known"):
        check(model)


def test_the_checker_needs_the_standard_library_alone(tmp_path):
    path = saved(tmp_path)
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'safetensors', 'scipy', 'click', 'rich'): sys.modules[name] = None\n"
        "from wellposed.checker.__main__ import main\n"
        "assert {n for n in sys.modules if n.startswith('wellposed.') and '.checker' not in n} == set()\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}, timeout=60
    )
    assert done.returncode == 0 and done.stdout.count("proven:") == 2, done.stderr
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}, timeout=60
    )
    assert done.returncode == 1 and "refused" in done.stdout


def test_the_command(tmp_path):
    path, run = saved(tmp_path), CliRunner()
    done = run.invoke(cli, ["verify", str(path)])
    assert done.exit_code == 0 and "enclosure" in done.output and "bit for bit" in done.output
    found = json.loads(run.invoke(cli, ["verify", str(path), "--json"]).output)
    assert found["proven"] and len(found["claims"]) == 3
    change_claims(path.with_suffix(".cert"), FORGERIES["a smaller kappa"][0])
    done = run.invoke(cli, ["verify", str(path)])
    assert done.exit_code == 1 and "fails at state" in done.output
    path.with_suffix(".cert").unlink()
    assert run.invoke(cli, ["verify", str(path)]).exit_code == 2
    assert run.invoke(cli, ["verify", str(tmp_path / "nothing.safetensors")]).exit_code == 2


def test_a_file_that_is_not_evaluated_as_stored_is_refused(tmp_path):
    """A configuration with a smaller cap makes the library project A further, so boxes speak of another A."""
    path = saved(tmp_path)
    header, data = read_parts(path)
    config = json.loads(header["__metadata__"]["config"])
    header["__metadata__"]["config"] = json.dumps(config | {"kappa": 0.1})
    header["__metadata__"].pop("sha256", None)  # the seal of the file, which a forger leaves off
    rewritten(path, header, data)
    certify_anew(path)
    assert check(path), "the matrix in the file is proven"
    done = CliRunner().invoke(cli, ["verify", str(path)])
    assert done.exit_code == 1 and "another A" in done.output


def test_a_certificate_names_what_made_it(tmp_path):
    path = saved(tmp_path)
    header, _ = read_parts(path.with_suffix(".cert"))
    said = json.loads(header["__metadata__"]["certificate"])
    assert said["versions"]["wellposed"] == wp.__version__
    assert said["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
