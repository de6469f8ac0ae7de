"""Verdicts and boxes of outputs as files: what the checker accepts is true, and what was changed is refused.

The oracle is the theorem in plain fractions, written down once more for ReLU.
"""

import json
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forged_files import change_claims
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import wellposed as wp
from wellposed import cli
from wellposed.checker import RefusedError, check
from wellposed.convert import to_implicit
from wellposed.errors import IllPosedError
from wellposed.forms import ImplicitForm
from wellposed.models.cells import DenseCell
from wellposed.robust import Box
from wellposed.robust.bounds import branches, continuations

KINDS = [
    ("relu", "inf"), ("relu", "monotone"), ("tanh", "spectral"), ("sigmoid", "mu"),
    ("leaky_relu(0.2)", "weighted"), ("hardtanh", "spectral"),
]  # fmt: skip


def drawn(seed, activation="relu", condition="monotone", n=4, p=3, q=3):
    """A model, a box of inputs and its class there."""
    torch.manual_seed(seed)
    model = wp.ImplicitModel(p, q, n, activation=activation, condition=condition, bias=True).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    u = torch.rand(1, p).double()
    return model, Box(u - 0.02, u + 0.02), model(u).argmax(1)


@pytest.mark.parametrize(("activation", "condition"), KINDS)
@pytest.mark.parametrize("verdict", [True, False])
def test_what_is_accepted_is_true(activation, condition, verdict, tmp_path):
    model, box, target = drawn(1, activation, condition, n=12)
    path = tmp_path / "m.safetensors"
    (claim,) = continuations(model, box, target if verdict else None)
    wp.save(model, path, certificate=True, claims=[claim])
    finding = check(path)[1]
    assert finding.claim == "continuation"
    y = wp.load(path)(box.sample(400)[:, 0]).detach()
    if verdict:
        assert finding.stated == f"class {int(target)} for all inputs of a box"
        assert bool((y.argmax(1) == target).all())
    else:
        y0, y1 = claim.tensors["y0"], claim.tensors["y1"]
        assert bool(((y > y0) & (y < y1)).all())
        assert bool((y1 - y0 < 2 * (y.amax(0) - y.amin(0)) + 0.1).all())


def test_a_network_with_a_loop_that_only_its_own_condition_proves(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(wp.DEQ(DenseCell(3, 5, depth=3, activation="relu")), nn.Linear(5, 2)).double()
    form = to_implicit(network, (3,)).to_dense(keep_blocks=True)
    u = torch.rand(1, 3).double()
    claims = continuations(form, Box(u - 0.02, u + 0.02), form(u).argmax(1))
    path = tmp_path / "m.safetensors"
    wp.save(form, path, certificate=True, claims=claims)
    assert [finding.stated[:8] for finding in check(path)] == [
        "monotone",
        "class 1 " if form(u).argmax() else "class 0 ",
    ]
    proof = path.with_suffix(".cert")
    for change, reason in (
        (lambda said: said["claims"][0]["loops"][0].update(blocks=[0]), "not square|is not proven|one loop|fails"),
        (lambda said: said["claims"][0]["loops"][0].update(blocks=[0, 0, 1]), "named twice"),
        (lambda said: said["claims"][0]["loops"][0].update(value=0.1), "is not proven"),
        (lambda said: said["claims"][0].update(value=0.1), "that of a loop"),
        (lambda said: said["claims"][0].update(loops=[]), "names no loops"),
    ):
        kept = proof.read_bytes()
        change_claims(proof, change)
        with pytest.raises(RefusedError, match=reason):
            check(path)
        proof.write_bytes(kept)


def exact(tensor):
    if tensor.dim() == 2:
        return [exact(row) for row in tensor]
    return [Fraction(x) for x in tensor.tolist()]


def times(row, column):
    return sum(a * b for a, b in zip(row, column, strict=True))


def largest(row, ends):
    return sum(max(a * low, a * high) for a, (low, high) in zip(row, ends, strict=True))


def oracle(model, tensors, target, branch=False):
    """The theorem for ReLU: Krawczyk's test at the center, inclusion in the interior, negative margins.

    Of a branch, Krawczyk's test for all inputs and negative margins.
    """
    A, B, C, b = (exact(part.detach()) for part in (model.A, model.B, model.C, model.bias))
    D = [[Fraction(0)] * len(B[0]) for _ in C] if model.D is None else exact(model.D.detach())
    t, n = {name: exact(value) for name, value in tensors.items()}, len(A)
    around = [[a + sign * r for a, r in zip(t["center"], t["radius"], strict=True)] for sign in (-1, 1)]
    ends = around if branch else (t["z0"], t["z1"])
    U, S = list(zip(t["u0"], t["u1"], strict=True)), list(zip(*ends, strict=True))
    if any(low > high for low, high in (*U, *S)) or not all(r > 0 for r in t["radius"]):
        return False

    def relu(x):
        return max(x, Fraction(0))

    z, r, Y = t["center"], t["radius"], t["inverse"]
    u = [(low + high) / 2 for low, high in U]
    F = [z[i] - times(A[i], map(relu, z)) - times(B[i], u) - b[i] for i in range(n)]
    ranges = [(Fraction(a - q >= 0), Fraction(a + q > 0)) for a, q in zip(z, r, strict=True)]
    for i in range(n):
        YA = [times(Y[i], [A[k][j] for k in range(n)]) for j in range(n)]
        shrunk = sum(
            (abs((i == j) - Y[i][j] + YA[j] * (low + high) / 2) + abs(YA[j]) * (high - low) / 2) * r[j]
            for j, (low, high) in enumerate(ranges)
        )
        reached = sum(
            abs(times(Y[i], [B[k][j] for k in range(n)])) * (high - low) / 2 for j, (low, high) in enumerate(U)
        )
        if not shrunk < r[i] or abs(times(Y[i], F)) + shrunk + (reached if branch else 0) > r[i]:
            return False
    if any(a - q < low or a + q > high for a, q, (low, high) in zip(z, r, S, strict=True)):
        return False

    def bound(c, d, nu):
        lam = [m * (s1 if m > 0 else s0) for m, s0, s1 in zip(nu, t["s0"], t["s1"], strict=True)]
        total = times(lam, b) + largest([d[j] + times(lam, [row[j] for row in B]) for j in range(len(d))], U)
        left = [c[j] + times(lam, [row[j] for row in A]) - nu[j] for j in range(n)]
        total += largest(left, [(relu(low), relu(high)) for low, high in S])
        for m, slope, (low, high) in zip(nu, lam, S, strict=True):
            points = [low, high, *([Fraction(0)] if low < 0 < high else [])]
            total += max(m * relu(point) - slope * point for point in points)
        return total

    for sign, start in () if branch else ((1, 0), (-1, n)):
        for i, (low, high) in enumerate(S):
            row = [sign * a for a in A[i]], [sign * a for a in B[i]]
            if not bound(*row, t["multipliers"][start + i]) + sign * b[i] < (high if sign > 0 else -low):
                return False
    for i in range(len(C)):
        rows = ([a - c for a, c in zip(M[i], M[target], strict=True)] for M in (C, D))
        if i != target and not bound(*rows, t["multipliers"][(0 if branch else 2 * n) + i]) < 0:
            return False
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("claims") / "m.safetensors"
    model, box, target = drawn(3)
    claims = continuations(model, box, target)
    wp.save(model, path, certificate=True, claims=claims)
    return path, wp.load(path), claims[0], int(target)


def rewritten(proof, tensors, number):
    """Writes other tensors in the place of those of a certificate."""
    with safe_open(proof, "pt") as file:
        metadata = file.metadata()
    metadata.pop("packed", None)
    said = json.loads(metadata["certificate"])
    save_file({f"{number}.{name}": value.contiguous() for name, value in tensors.items()}, proof, {**metadata})
    return said


@pytest.mark.parametrize("size", [1e-16, 1e-3, 1.0])
@pytest.mark.parametrize("kind", ["continuation", "branch"])
def test_every_changed_number_is_refused_or_proves_the_same(kind, size, request):
    path, model, claim, target = request.getfixturevalue("saved" if kind == "continuation" else "saved_branch")
    branch = kind == "branch"
    proof, kept = path.with_suffix(".cert"), path.with_suffix(".cert").read_bytes()
    assert oracle(model, claim.tensors, target, branch)
    refused = 0
    try:
        for name, value in claim.tensors.items():
            for k in range(0, value.numel(), 1 if name != "multipliers" else 3):
                changed = value.clone().reshape(-1)
                changed[k] += (1 if k % 2 else -1) * size * max(1.0, float(changed[k].abs()))
                tensors = {**claim.tensors, name: changed.reshape(value.shape)}
                rewritten(proof, tensors, 0 if branch else 1)
                expected = oracle(model, tensors, target, branch)
                try:
                    check(path)
                    accepted = True
                except RefusedError:
                    accepted = False
                assert accepted == expected, (name, k)
                refused += not accepted
    finally:
        proof.write_bytes(kept)
    assert refused > (20 if size == 1.0 else 3 if size == 1e-3 else -1)


FORGERIES = {
    "another class": (lambda claim: claim.update(target=(claim["target"] + 1) % 3), "is not proven to stay below"),
    "a class that is not there": (lambda claim: claim.update(target=3), "the class is 3; there are 3 outputs"),
    "a class that is no number": (lambda claim: claim.update(target=True), "the class is True"),
    "nothing about outputs": (lambda claim: claim.pop("target"), "about one class or about a box"),
    "both": (lambda claim: claim.update(outputs=["1.u0", "1.u1"]), "about one class or about a box"),
    "slopes of nothing": (lambda claim: claim.update(slopes="1.s0"), "names no two slopes"),
    "other multipliers": (lambda claim: claim.update(multipliers="1.inverse"), "has the shape"),
    "no inverse": (lambda claim: claim.pop("inverse"), "no tensor None"),
    "inputs of states": (lambda claim: claim.update(inputs=["1.z0", "1.z1"]), "does not fit"),
    "states of inputs": (lambda claim: claim.update(preactivations=["1.u0", "1.u1"]), "does not fit"),
    "a word too much": (lambda claim: claim.update(note="trust me"), "note"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_statement_is_refused(saved, name):
    path = saved[0]
    proof, kept = path.with_suffix(".cert"), path.with_suffix(".cert").read_bytes()
    change, reason = FORGERIES[name]
    try:
        change_claims(proof, lambda said: change(said["claims"][1]))
        with pytest.raises(RefusedError, match=reason):
            check(path)
    finally:
        proof.write_bytes(kept)


def test_wrong_model_and_truncated_file_are_refused_in_one_line(saved, tmp_path):
    path = saved[0]
    other = tmp_path / "other.safetensors"
    wp.save(drawn(4)[0], other)
    other.with_suffix(".cert").write_bytes(path.with_suffix(".cert").read_bytes())
    short = tmp_path / "short.safetensors"
    short.write_bytes(path.read_bytes())
    short.with_suffix(".cert").write_bytes(path.with_suffix(".cert").read_bytes()[:-100])
    for file, reason in ((other, "is of another model"), (short, "declares")):
        result = CliRunner().invoke(cli.cli, ["verify", str(file)])
        assert result.exit_code == 1
        assert reason in result.output and len(result.output.strip().splitlines()) == 1
    assert CliRunner().invoke(cli.cli, ["verify", str(path)]).exit_code == 0


def test_what_cannot_be_proven_is_refused_before_anything_is_written():
    model, box, target = drawn(3)
    with pytest.raises(IllPosedError, match=r"sample 0: output \d may exceed that of class"):
        continuations(model, box, (target + 1) % 3)
    wide = Box(box.lower - 50, box.upper + 50)
    with pytest.raises(IllPosedError, match="sample 0: "):
        continuations(model, wide, target)
    gelu = wp.ImplicitModel(3, 2, 4, activation="gelu", kappa=0.5).double()
    with pytest.raises(wp.errors.InputError, match="'gelu' has none"):
        continuations(gelu, box)


def steep(seed, phi="tanh", n=5, p=3, gain=2.0):
    """A form that no condition proves, and a box of inputs."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((n, n), (n, p), (3, n), (n,), (1, p))
    A, B, C, b, u = (torch.randn(*size, generator=generator).double() for size in sizes)
    form = ImplicitForm(gain * A / n**0.5, B, C, activation=phi, bias=b, output_bias=b[:3])
    return form, Box(u - 0.01, u + 0.01)


FUNCTIONS = {
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
    "leaky_relu(0.2)": (lambda z: np.where(z > 0, z, 0.2 * z), lambda z: np.where(z > 0, 1.0, 0.2)),
    "hardtanh": (lambda z: np.clip(z, -1, 1), lambda z: (abs(z) < 1).astype(float)),
}


def followed(form, phi, z, start, end):
    """The outputs at `end`, by Newton's method along the way from the equilibrium z at `start`."""
    A, B, C = (getattr(form, name).to_dense().numpy() for name in "ABC")
    function, slope = FUNCTIONS[phi]
    for share in np.linspace(0, 1, 20):
        v = B @ ((1 - share) * start + share * end) + form.bias.numpy()
        for _ in range(20):
            residual = z - A @ function(z) - v
            z = z - np.linalg.solve(np.eye(len(A)) - A * slope(z), residual)
    assert np.abs(residual).max() < 1e-9
    return C @ function(z) + form.output_bias.numpy()


@pytest.mark.parametrize("phi", FUNCTIONS)
def test_what_is_accepted_of_a_branch_is_true(phi, tmp_path):
    proven = 0
    for seed in range(6):
        form, box = steep(seed, phi)
        try:
            (claim,) = branches(form, box)
        except IllPosedError:
            continue
        path = tmp_path / f"{seed}.safetensors"
        wp.save(form, path, certificate=True, claims=[claim])
        finding = check(path)[-1]
        assert finding.claim == "branch" and finding.stated.endswith(
            "branch through the equilibrium at its center"
        )
        y0, y1 = (claim.tensors[name].numpy() for name in ("y0", "y1"))
        for u in box.sample(20)[:, 0].numpy():
            y = followed(form, phi, claim.tensors["center"].numpy(), box.center[0].numpy(), u)
            assert ((y > y0) & (y < y1)).all()
        proven += 1
    assert proven >= 3


@pytest.fixture(scope="module")
def saved_branch(tmp_path_factory):
    path = tmp_path_factory.mktemp("branches") / "m.safetensors"
    form, box = steep(3, "relu")
    form = form.replaced(output_bias=None)
    center = branches(form, box)[0].tensors["center"]
    target = (form.C.to_dense() @ center.relu()).argmax()[None]
    claims = branches(form, box, target)
    wp.save(form, path, certificate=True, claims=claims)
    plain = {name: getattr(form, name).to_dense() for name in "ABC"}
    return path, SimpleNamespace(**plain, bias=form.bias, D=None), claims[0], int(target)


def test_branches_of_a_model_that_is_not_well_posed(saved_branch, tmp_path):
    path, _, claim, target = saved_branch
    (finding,) = check(path)
    assert (
        finding.stated
        == f"class {target} for all inputs of a box, on the branch through the equilibrium at its center"
    )
    result = CliRunner().invoke(cli.cli, ["verify", "--json", str(path)])
    assert result.exit_code == 0 and json.loads(result.output)["claims"][0]["claim"] == "branch"
    form, other = wp.load(path), tmp_path / "m.safetensors"
    with pytest.raises(IllPosedError):
        wp.save(form, other, certificate=True)
    with pytest.raises(IllPosedError):
        wp.save(
            form,
            other,
            certificate=True,
            claims=[claim, wp.models.Claim("continuation", claim.facts, claim.tensors)],
        )


def test_a_branch_proves_no_well_posedness(saved_branch):
    path = saved_branch[0]
    proof, kept = path.with_suffix(".cert"), path.with_suffix(".cert").read_bytes()
    changes = {
        "continuation needs well-posedness": lambda said: said["claims"].append(
            {**said["claims"][0], "kind": "continuation", "preactivations": ["0.center", "0.center"]}
        ),
        "is not proven to stay below": lambda said: said["claims"][0].update(
            target=(said["claims"][0]["target"] + 1) % 3
        ),
        "preactivations": lambda said: said["claims"][0].update(preactivations=["0.center", "0.center"]),
        "the center has no interior": lambda said: said["claims"][0].update(radius="0.s0"),
        "about one class or about a box": lambda said: said["claims"][0].pop("target"),
    }
    for reason, change in changes.items():
        try:
            change_claims(proof, change)
            with pytest.raises(RefusedError, match=reason):
                check(path)
        finally:
            proof.write_bytes(kept)


def test_a_fold_has_no_branch():
    one = torch.ones(1, 1).double()
    form = ImplicitForm(3 * one, one, one, activation="tanh")
    with pytest.raises(IllPosedError, match="sample 0: no box around the equilibrium holds its own image"):
        branches(form, Box(-3 * one, 3 * one))
