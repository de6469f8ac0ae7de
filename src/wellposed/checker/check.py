"""Checks the certificate beside a model file, claim by claim."""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from wellposed.checker import proofs
from wellposed.checker.grammar import anything, table
from wellposed.checker.model import Part, parts_of
from wellposed.checker.tensors import LARGEST_HEADER, Budget, Matrix, RefusedError, TensorFile, fraction, read_json

FORMAT = "wellposed-certificate-1"
LARGEST_CERTIFICATE = 1 << 30
WEIGHTS, CONFIG = "model.safetensors", "config.json"  # of a folder
NEW = ".new"  # where a newer version lies until its files are in their places


class Finding(NamedTuple):
    """One claim that was proven.

    Args:
        claim: what is claimed.
        about: of which part of the model.
        stated: the number that the certificate gives.
        proof: how it was checked.
    """

    claim: str
    about: str
    stated: str
    proof: str


def certificate_path(model: Path) -> Path:
    """Returns where the certificate of a model file lies.

    Example:
        >>> certificate_path(Path("digits.safetensors")).name
        'digits.cert'
    """
    return model.with_suffix(".cert")


def check(model: Path, certificate: Path | None = None) -> list[Finding]:
    """Proves every claim of a certificate about a model file, or raises `RefusedError` with the reason.

    Every equation of the model must be proven well-posed; what else is claimed must hold too.

    Args:
        model: a file that `wellposed.save` wrote, or a folder of `save_pretrained` or the tensors in it.
        certificate: the file beside it, with the ending .cert, if None.
    """
    file, place = _tensors(model), certificate or certificate_path(_weights(model))
    proof = TensorFile(place, LARGEST_CERTIFICATE)
    if proof.metadata.get("format") != FORMAT or not isinstance(proof.metadata.get("certificate"), str):
        raise RefusedError(f"{proof.path.name} is no certificate of the format {FORMAT!r}")
    said = read_json(proof.metadata["certificate"], "the certificate")
    if said.get("sha256") != file.digest():
        raise RefusedError(
            f"{proof.path.name} is of another model: the digest of {file.path.name} is not the one it names"
        )
    file.budget = proof.budget = Budget(file.size + proof.size)
    text = _config(file)
    if said.get("config_sha256") != (None if text is None else hashlib.sha256(text).hexdigest()):
        raise RefusedError(f"the certificate is of another {CONFIG}")
    parts = {part.name: part for part in _equations(file, text)}
    claims = said.get("claims")
    if not isinstance(claims, list) or not all(isinstance(claim, dict) for claim in claims):
        raise RefusedError("the certificate has no list of claims")
    proven: dict[str, list[Finding]] = {name: [] for name in parts}
    for claim in claims:
        about = claim.get("about", "")
        if not isinstance(about, str) or about not in parts:
            raise RefusedError(f"there is no part {about!r} in {model.name}")
        kind = claim.get("kind")
        if not isinstance(kind, str) or kind not in CLAIMS:
            raise RefusedError(f"the checker knows no claim of the kind {kind!r}")
        table(claim, dict.fromkeys(KEYS[kind], anything), f"the claim {kind}", KEYS[kind])
        if kind != "well-posed" and not proven[about]:
            raise RefusedError(f"{kind} needs well-posedness, which must be claimed before it")
        if kind == "well-posed" and proven[about]:
            raise RefusedError(f"well-posedness of {about or model.name} is claimed twice; one proof is enough")
        proven[about].append(CLAIMS[kind](claim, parts[about], proof))
    if open_parts := [name for name, found in proven.items() if not found]:
        raise RefusedError(f"nothing is claimed about the part {open_parts[0]!r}")
    return [finding for found in proven.values() for finding in found]


def equations(model: Path) -> list[Part]:
    """Reads the equations of a model file or folder, of which certificates speak."""
    file = _tensors(model)
    return _equations(file, _config(file))


def _weights(model: Path) -> Path:
    return model / WEIGHTS if model.is_dir() else model


def _tensors(model: Path) -> TensorFile:
    """Opens the tensors of a model; a folder is described by its configuration alone."""
    file = TensorFile(_weights(model))
    if model.is_dir() and not _plain(file):
        raise RefusedError(
            f"{WEIGHTS} describes itself, and {CONFIG} beside it describes it too; a folder has one description"
        )
    return file


def _plain(file: TensorFile) -> bool:
    return file.metadata in ({}, {"format": "pt"})


def _config(file: TensorFile) -> bytes | None:
    """Reads the configuration beside tensors that do not describe themselves."""
    if not _plain(file):
        return None
    if file.path.with_name(NEW).exists():
        raise RefusedError(
            f"a newer model waits in {NEW} beside {file.path.name}, left by a save that was stopped; save it again"
        )
    place = file.path.with_name(CONFIG)
    if not place.is_file() or place.stat().st_size > LARGEST_HEADER:
        raise RefusedError(f"{CONFIG} is missing or too large")
    return place.read_bytes()


def _equations(file: TensorFile, text: bytes | None) -> list[Part]:
    return parts_of(file, None if text is None else read_json(text, CONFIG))


def _well_posed(claim: dict[str, Any], part: Part, proof: TensorFile) -> Finding:
    """Proves that ``x = phi(Ax + v)`` has exactly one solution for every v."""
    value, condition = fraction(claim.get("value"), "the value"), str(claim.get("condition"))
    if not value < 1:
        raise RefusedError(f"the value {float(value):g} is not below 1")
    if part.acyclic and condition == "acyclic":
        return Finding("well-posed", part.name, "no loop", "the blocks feed one another in one direction only")
    A = part.matrices["A"]()
    if A.shape != (len(part.phis), len(part.phis)) or not part.phis:
        raise RefusedError("A is not square, or has other states than phi")
    given = claim.get("weights")
    if condition in ("inf", "weighted"):
        v = [Fraction(1)] * len(A.rows) if condition == "inf" else proof.vector(given, len(A.rows))
        proofs.weighted(A, part.phis, v, value)
        how = "gamma |A| v <= kappa v, row by row"
    elif condition == "block" and part.size is not None and part.size > 0:
        proofs.blocks(A, part.phis[0], part.size, str(claim.get("norm")), proof.vector(given), value)
        how = "gamma N(A) v <= kappa v, block by block"
    elif condition in CONDITIONS:
        prove, how = CONDITIONS[condition]
        if condition in ("spectral", "monotone"):  # products and factors of matrices, cheaper a step than a matrix
            proof.budget.spend(len(A.rows) ** 3 // 32)
        prove(A, part.phis, value)
    else:
        raise RefusedError(f"the checker does not know the condition {condition!r} for this model")
    return Finding("well-posed", part.name, f"{condition}: {float(value):.9g} < 1", how)


CONDITIONS: dict[str, tuple[Any, str]] = {
    "mu": (proofs.one_sided, "gamma (A_ii + sum |A_ij|) <= kappa, row by row"),
    "triangular": (proofs.triangular, "zeros on one side, and the diagonal"),
    "spectral": (proofs.spectral, "kappa^2 I - gamma^2 A'A = LL' + a dominant remainder"),
    "monotone": (proofs.monotone, "kappa I - (A + A')/2 = LL' + a dominant remainder"),
}


def _enclosure(claim: dict[str, Any], part: Part, proof: TensorFile) -> Finding:
    """Proves that for inputs in a box the states stay in one, which phi(Ax + Bu + b) maps into itself (Brouwer).

    With exactly one solution, that solution lies in the box; the outputs follow.
    """
    u, x, y = (_box(claim, name, proof) for name in ("inputs", "states", "outputs"))
    proof.budget.spend((len(x) + len(y)) * (len(x) + len(u)))
    read = {name: _rows(part, name, (x, u)[name in "BD"], (x, y)[name in "CD"]) for name in "ABCD"}
    b, c = (_bias(part, name, len(box)) for name, box in (("b", x), ("c", y)))
    for i, (low, high) in enumerate(x):
        ends = [proofs.reach(read["A"](i), x), proofs.reach(read["B"](i), u)]
        image = part.phis[i].image
        if image is None:
            raise RefusedError("enclosures are checked for increasing activations whose values the checker knows")
        if image(ends[0][0] + ends[1][0] + b[i])[0] < low or image(ends[0][1] + ends[1][1] + b[i])[1] > high:
            raise RefusedError(f"the box of states does not hold state {i}")
    for i, (low, high) in enumerate(y):
        ends = [proofs.reach(read["C"](i), x), proofs.reach(read["D"](i), u)]
        if ends[0][0] + ends[1][0] + c[i] < low or ends[0][1] + ends[1][1] + c[i] > high:
            raise RefusedError(f"the box of outputs does not hold output {i}")
    width = max((float(high - low) for low, high in y), default=0.0)
    return Finding(
        "enclosure", part.name, f"{len(y)} outputs within {width:.4g}", "a box of states maps into itself"
    )


def _box(claim: dict[str, Any], name: str, proof: TensorFile) -> list[proofs.Interval]:
    ends = claim.get(name)
    if not isinstance(ends, list) or len(ends) != 2:
        raise RefusedError(f"the enclosure names no two ends of its {name}")
    low = proof.vector(ends[0])
    if not low:
        raise RefusedError(f"the box of {name} has no entries")
    box = list(zip(low, proof.vector(ends[1], len(low)), strict=True))
    if any(a > b for a, b in box):
        raise RefusedError(f"the box of {name} is empty")
    return box


def _rows(part: Part, name: str, inner: Sequence[Any], outer: Sequence[Any]) -> Any:
    """Returns a function that gives the rows of a matrix, zeros if there is none."""
    if name not in part.matrices:
        return lambda i: [Fraction(0)] * len(inner)
    found = part.matrices[name]()
    if len(found.rows) != len(outer) or any(len(row) != len(inner) for row in found.rows):
        raise RefusedError(f"{name} does not fit the boxes")
    return lambda i: [entry * found.unit for entry in found.rows[i]]


def _bias(part: Part, name: str, size: int) -> list[Fraction]:
    found = part.biases[name]() if name in part.biases else [Fraction(0)] * size
    if len(found) != size:
        raise RefusedError(f"the bias {name} does not fit the boxes")
    return found


def _row_gaps(claim: dict[str, Any], part: Part, proof: TensorFile) -> Finding:
    """Proves that rows of (A, B) are as close to the best rows as stated, for the data in the certificate."""
    A, B = part.matrices["A"](), part.matrices["B"]()
    groups, total, largest = claim.get("groups"), 0, fraction(claim.get("largest"), "the largest gap")
    if not isinstance(groups, list) or not groups:
        raise RefusedError("the gaps name no groups of rows")
    for group in groups:
        table(group, dict.fromkeys(GROUP, anything), "a group of rows")
        total += _group(group, largest, A, B, proof)
    named = [row for group in groups for row in group["rows"]]
    if len({*named}) != len(named):
        raise RefusedError("the gaps name a row twice")
    return Finding("row gaps", part.name, f"{total} rows within {float(largest):.3g}", "F(w) - D(nu), row by row")


def _group(group: Any, largest: Fraction, A: Matrix, B: Matrix, proof: TensorFile) -> int:
    try:
        rows, states, inputs = (list(group[name]) for name in ("rows", "states", "inputs"))
        exact = all(type(k) is int and k >= 0 for k in (*rows, *states, *inputs))
        kappa, only, capped = fraction(group["kappa"], "the cap"), group["support"], group["capped"]
        exact = exact and type(capped) is int and 0 <= capped <= len(states) + len(inputs)
        if (
            not exact
            or not rows
            or only not in ("all", "nonzeros")
            or len({*states}) + len({*inputs}) < len(states) + len(inputs)
        ):
            raise ValueError
        proof.budget.spend(len(rows) * (len(states) + len(inputs)))
        given = [[A.rows[i][j] for j in states] for i in rows], [[B.rows[i][j] for j in inputs] for i in rows]
        names = [group[name] for name in ("design", "targets", "dual", "ridge", "gaps")]
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise RefusedError("a group of rows makes no sense") from error
    design = proof.matrix(names[0], None, len(states) + len(inputs))
    samples = len(design.rows)
    if not samples:
        raise RefusedError("the gaps of a group are about no samples")
    targets, dual = (proof.matrix(name, len(rows), samples) for name in names[1:3])
    ridge, gaps = (
        proof.vector(names[3], design.shape[1]),
        proof.vector(names[4], len(rows)),
    )
    columns = [list(column) for column in zip(*design.rows, strict=True)]
    low = min(A.exponent, B.exponent)
    for k, i in enumerate(rows):
        w = [entry << (A.exponent - low) for entry in given[0][k]] + [e << (B.exponent - low) for e in given[1][k]]
        kept = [j for j, entry in enumerate(w) if entry or only == "all"]
        outside = sum(map(bool, A.rows[i])) + sum(map(bool, B.rows[i])) - sum(map(bool, w))
        if outside:
            raise RefusedError(f"row {i} has entries outside of its columns")
        gap = proofs.row_gap(
            [columns[j] for j in kept], design.exponent, (targets.rows[k], targets.exponent),
            ([w[j] for j in kept], low), (dual.rows[k], dual.exponent), [ridge[j] for j in kept],
            sum(j < capped for j in kept), kappa,
        )  # fmt: skip
        size = proofs.dot(targets.rows[k], targets.rows[k]) * targets.unit**2 / 2
        if gap > gaps[k]:
            raise RefusedError(f"the gap of row {i} is {float(gap):.3g}, above the {float(gaps[k]):.3g} stated")
        if gaps[k] > largest * size:  # of a target of zeros, which a row of zeros meets, nothing may be missing
            raise RefusedError(
                f"the gap of row {i} may be {float(gaps[k]):.3g}, above {float(largest):.3g} of |z|^2/2 = "
                f"{float(size):.3g}, the largest stated"
            )
    return len(rows)


GROUP = (
    *("rows", "states", "inputs", "kappa", "support", "capped"),
    *("design", "targets", "dual", "ridge", "gaps"),
)
KEYS = {
    "well-posed": ("kind", "about", "condition", "value", "norm", "weights"),
    "enclosure": ("kind", "about", "inputs", "states", "outputs"),
    "row-gaps": ("kind", "about", "largest", "groups"),
}
CLAIMS = {"well-posed": _well_posed, "enclosure": _enclosure, "row-gaps": _row_gaps}
