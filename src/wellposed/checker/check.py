"""Checks the certificate beside a model file, claim by claim."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from wellposed.checker import proofs
from wellposed.checker.continuation import Lines, Network, Scaled, center, on_grid, upper_bound, value
from wellposed.checker.grammar import anything, table
from wellposed.checker.model import Part, acyclic, parts_of
from wellposed.checker.phi import Phi
from wellposed.checker.tensors import (
    LARGEST_HEADER,
    Budget,
    Matrix,
    RefusedError,
    TensorFile,
    Vector,
    fraction,
    read_json,
    rounded,
    scaled,
)

FORMAT = "wellposed-certificate-1"
LARGEST_CERTIFICATE = 1 << 30
LONGEST = 2098  # bits of a float64 as a whole number of the smallest one
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

    Every equation of the model must be proven well-posed; what else is claimed must hold too. Only claims about
    branches of equilibria need no well-posedness.

    Args:
        model: a file that `wellposed.save` wrote, or a folder of `save_pretrained` or the tensors in it.
        certificate: the file beside it, with the ending .cert, if None.
    """
    with _not_too_deep():
        return _check(model, certificate)


@contextlib.contextmanager
def _not_too_deep() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise RefusedError("it is nested too deeply") from error


def _check(model: Path, certificate: Path | None) -> list[Finding]:
    file = _tensors(model)
    proof = TensorFile(certificate or certificate_path(_weights(model)), LARGEST_CERTIFICATE)
    if proof.metadata.get("format") != FORMAT or not isinstance(proof.metadata.get("certificate"), str):
        raise RefusedError(f"{proof.path.name} is no certificate of the format {FORMAT!r}")
    said = read_json(proof.metadata["certificate"], "the certificate")
    if "packed" in proof.metadata:
        proof.unpack(read_json(proof.metadata["packed"], "the table of packed tensors"))
    if said.get("sha256") != file.digest():
        raise RefusedError(
            f"{proof.path.name} is of another model: the digest of {file.path.name} is not the one it names"
        )
    file.budget = proof.budget = Budget(file.size + proof.size)
    text = _config(file)
    if said.get("config_sha256") != (None if text is None else hashlib.sha256(text).hexdigest()):
        raise RefusedError(f"the certificate is of another {CONFIG}")
    by_name = {equation.name: equation for equation in _equations(file, text)}
    claims = said.get("claims")
    if not isinstance(claims, list) or not all(isinstance(claim, dict) for claim in claims):
        raise RefusedError("the certificate has no list of claims")
    proven: dict[str, list[Finding]] = {name: [] for name in by_name}
    for claim in claims:
        about = claim.get("about", "")
        if not isinstance(about, str) or about not in by_name:
            raise RefusedError(f"there is no part {about!r} in {model.name}")
        kind = claim.get("kind")
        if not isinstance(kind, str) or kind not in CLAIMS:
            raise RefusedError(f"the checker knows no claim of the kind {kind!r}")
        table(claim, dict.fromkeys(KEYS[kind], anything), f"the claim {kind}", KEYS[kind])
        posed = any(finding.claim == "well-posed" for finding in proven[about])
        if kind not in ("well-posed", "branch") and not posed:
            raise RefusedError(f"{kind} needs well-posedness, which must be claimed before it")
        if kind == "well-posed" and posed:
            raise RefusedError(f"well-posedness of {about or model.name} is claimed twice; one proof is enough")
        proven[about].append(CLAIMS[kind](claim, by_name[about], proof))
    if open_parts := [name for name, findings in proven.items() if not findings]:
        raise RefusedError(f"nothing is claimed about the part {open_parts[0]!r}")
    return [finding for findings in proven.values() for finding in findings]


def equations(model: Path) -> list[Part]:
    """Reads the equations of a model file or folder, of which certificates speak."""
    return opened(model)[1]


def opened(model: Path) -> tuple[TensorFile, list[Part]]:
    """Opens a model file or folder, and reads its equations."""
    with _not_too_deep():
        file = _tensors(model)
        return file, _equations(file, _config(file))


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
    path = file.path.with_name(CONFIG)
    if not path.is_file() or path.stat().st_size > LARGEST_HEADER:
        raise RefusedError(f"{CONFIG} is missing or too large")
    return path.read_bytes()


def _equations(file: TensorFile, text: bytes | None) -> list[Part]:
    return parts_of(file, None if text is None else read_json(text, CONFIG))


def _well_posed(claim: dict[str, Any], part: Part, proof: TensorFile) -> Finding:
    """Proves that ``x = phi(Ax + v)`` has exactly one solution for every v."""
    value, condition = fraction(claim.get("value"), "the value"), str(claim.get("condition"))
    if not value < 1:
        raise RefusedError(f"the value {rounded(value):g} is not below 1")
    if part.acyclic and condition == "acyclic":
        return Finding("well-posed", part.name, "no loop", "the blocks feed one another in one direction only")
    A = part.matrices["A"]()
    if A.shape != (len(part.phis), len(part.phis)) or not part.phis:
        raise RefusedError("A is not square, or has other states than phi")
    if condition == "components":
        return _components(claim, value, part, A, proof)
    how = _loop(claim, value, A, part.phis, part.size, proof)
    return Finding("well-posed", part.name, f"{condition}: {rounded(value):.9g} < 1", how)


def _components(claim: dict[str, Any], value: Fraction, part: Part, A: Matrix, proof: TensorFile) -> Finding:
    """Proves the loops one by one: what is left when they are taken for one block each feeds in one direction."""
    loops = claim.get("loops")
    if not isinstance(loops, list) or not loops or not part.edges:
        raise RefusedError("the claim names no loops, or the model has no blocks")
    node = list(range(len(part.sizes)))
    starts = [sum(part.sizes[:k]) for k in node]
    for number, loop in enumerate(loops):
        table(loop, dict.fromkeys(LOOP, anything), "a loop", LOOP)
        own = loop.get("blocks")
        if not isinstance(own, list) or not all(type(k) is int and 0 <= k < len(starts) for k in own):
            raise RefusedError("a loop names no blocks of the model")
        if not own or len({*own}) < len(own) or any(node[k] != k for k in own):
            raise RefusedError("a loop has no blocks, or a block is named twice")
        for k in own:
            node[k] = len(starts) + number
        states = [i for k in own for i in range(starts[k], starts[k] + part.sizes[k])]
        proof.budget.spend(len(states) ** 2, A.bits)
        inner = Matrix([[A.rows[i][j] for j in states] for i in states], A.exponent)
        stated = fraction(loop.get("value"), "the value of a loop")
        if stated > value:
            raise RefusedError(f"the value {rounded(value):g} is below {rounded(stated):g}, that of a loop")
        _loop(loop, stated, inner, [part.phis[i] for i in states], None, proof)
    if alone := [i for i, j in part.edges if i == j and node[i] == i]:
        raise RefusedError(f"block {alone[0]} feeds itself, and no loop holds it")
    if not acyclic(len(starts) + len(loops), [(node[i], node[j]) for i, j in part.edges if node[i] != node[j]]):
        raise RefusedError("the loops feed one another, so they are one loop")
    kinds = ", ".join(sorted({str(loop.get("condition")) for loop in loops}))
    return Finding(
        "well-posed", part.name, f"{kinds}: {rounded(value):.9g} < 1", f"loop by loop, {len(loops)} in all"
    )


def _loop(
    claim: dict[str, Any], value: Fraction, A: Matrix, phis: list[Phi], size: int | None, proof: TensorFile
) -> str:
    """Proves that a loop has exactly one solution, and says how."""
    condition, given, long = str(claim.get("condition")), claim.get("weights"), A.bits
    proof.budget.multiply(len(A.rows) ** 2, long, LONGEST if given is not None else 1)
    if condition in ("inf", "weighted"):
        v = [Fraction(1)] * len(A.rows) if condition == "inf" else proof.vector(given, len(A.rows))
        proofs.weighted(A, phis, v, value)
        return "gamma |A| v <= kappa v, row by row"
    if condition == "block" and size is not None and size > 0:
        proofs.blocks(A, phis[0], size, str(claim.get("norm")), proof.vector(given), value)
        return "gamma N(A) v <= kappa v, block by block"
    if condition not in CONDITIONS:
        raise RefusedError(f"the checker does not know the condition {condition!r} for this model")
    prove, how = CONDITIONS[condition]
    if condition in ("spectral", "monotone"):  # products and factors of matrices, and what is left of them
        proof.budget.multiply(len(A.rows) ** 3, long, long)
        longer = 2 * (long - A.exponent + value.denominator.bit_length())
        proof.budget.multiply(8 * len(A.rows) ** 2, longer, longer)
    prove(A, phis, value)
    return how


LOOP = ("blocks", "condition", "value", "norm", "weights")
CONDITIONS: dict[str, tuple[Callable[[Matrix, list[Phi], Fraction], None], str]] = {
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
    n, q = len(x.ends), len(y.ends)
    proof.budget.spend(64 * (n + q), max(u.bits, x.bits, y.bits))  # images and sums, in fractions
    A, B = _reach(part, "A", x, n, proof.budget), _reach(part, "B", u, n, proof.budget)
    b, c = _bias(part, "b", n), _bias(part, "c", q)
    for i, (low, high) in enumerate(x.ends):
        image = part.phis[i].image
        if image is None:
            raise RefusedError("enclosures are checked for increasing activations whose values the checker knows")
        least, most = (A[i][end] + B[i][end] + b[i] for end in (0, 1))
        if image(least)[0] < low * x.unit or image(most)[1] > high * x.unit:
            raise RefusedError(f"the box of states does not hold state {i}")
    C, D = _reach(part, "C", x, q, proof.budget), _reach(part, "D", u, q, proof.budget)
    for i, (low, high) in enumerate(y.ends):
        least, most = (C[i][end] + D[i][end] + c[i] for end in (0, 1))
        if least < low * y.unit or most > high * y.unit:
            raise RefusedError(f"the box of outputs does not hold output {i}")
    width = rounded(max(high - low for low, high in y.ends) * y.unit)
    return Finding("enclosure", part.name, f"{q} outputs within {width:.4g}", "a box of states maps into itself")


def _continuation(claim: dict[str, Any], part: Part, proof: TensorFile) -> Finding:
    """Proves that a box holds the pre-activations of all inputs of a box, and what follows for outputs.

    Either the outputs lie in a box, or that of one class is the largest; see `wellposed.checker.continuation`.
    """
    z = _box(claim, "preactivations", proof)
    n, box = len(z.ends), [(low * z.unit, high * z.unit) for low, high in z.ends]
    asked = _asked(claim, part, proof, n, 2 * n, z.bits)
    c, r = asked.ball
    lines = asked.lines(claim, box, proof)
    center(asked.network, c, r, asked.inverse, False)
    if any(p - q < low or p + q > high for p, q, (low, high) in zip(c, r, box, strict=True)):
        raise RefusedError("the equilibrium at the center of the inputs may lie outside of its box")
    A, B, b = asked.network.A, asked.network.B, asked.network.b
    for sign in (1, -1):
        for i, (low, high) in enumerate(box):
            rows = [sign * entry for entry in A.rows[i]], [sign * entry for entry in B.rows[i]]
            most = asked.bound(lines, i if sign > 0 else n + i, *rows, (A.exponent, B.exponent))
            if not most + sign * b.entries[i] * b.unit < (high if sign > 0 else -low):
                raise RefusedError(f"pre-activation {i} is not proven to lie inside its box")
    how = "lines and multipliers map a box of pre-activations into its interior"
    return _outputs_of(part, asked, "continuation", lambda row, *rows: asked.bound(lines, 2 * n + row, *rows), how)


def _branch(claim: dict[str, Any], part: Part, proof: TensorFile) -> Finding:
    """Proves that every input of a box has exactly one equilibrium in a box, and what follows for its outputs.

    The equilibria there are the branch through the one at the center of the inputs; there may be others elsewhere.
    """
    n = len(part.phis)
    asked = _asked(claim, part, proof, n, 0, 0)
    c, r = asked.ball
    lines = asked.lines(claim, [(p - q, p + q) for p, q in zip(c, r, strict=True)], proof)
    proof.budget.multiply(n * n * len(asked.network.ends), asked.network.B.bits, asked.inverse.bits)
    center(asked.network, c, r, asked.inverse, True)
    how = "Krawczyk's test for all inputs, with all slopes on a box of pre-activations"
    return _outputs_of(part, asked, "branch", lambda row, *rows: asked.bound(lines, row, *rows), how)


class _Asked(NamedTuple):
    """The network of a claim about inputs in a box, and what is claimed of its outputs: a class, or a box."""

    network: Network
    outputs: tuple[Matrix, Matrix, list[Fraction]]  # C, D and the bias
    target: int | None
    box: "_Box | None"
    multipliers: Matrix
    ball: tuple[list[Fraction], list[Fraction]]  # center and radius of Krawczyk's test
    inverse: Matrix

    def lines(self, claim: dict[str, Any], box: list[tuple[Fraction, Fraction]], proof: TensorFile) -> Lines:
        """Reads the slopes of lines on a box of pre-activations."""
        slopes, n = claim.get("slopes"), len(box)
        if not isinstance(slopes, list) or len(slopes) != 2:
            raise RefusedError("the continuation names no two slopes")
        lower, upper = (proof.values(name, (n,))[1] for name in slopes)
        both, exponent = scaled([*lower, *upper], proof.budget)
        long = max(matrix.bits for matrix in (self.network.A, self.network.B, *self.outputs[:2]))
        count, wide = len(self.multipliers.rows), n + len(self.network.ends)
        proof.budget.multiply(
            count * n * wide, long, self.multipliers.bits + max(entry.bit_length() for entry in both)
        )
        pairs = zip(self.network.phis, box, strict=True)
        images = [(value(phi, low)[0], value(phi, high)[1]) for phi, (low, high) in pairs]
        return Lines(box, Scaled(both[:n], exponent), Scaled(both[n:], exponent), on_grid(images))

    def bound(
        self, lines: Lines, row: int, states: Vector, inputs: Vector, exponents: tuple[int, int]
    ) -> Fraction:
        """Bounds a functional by a row of multipliers."""
        given = Scaled(states, exponents[0]), Scaled(inputs, exponents[1])
        nu = Scaled(self.multipliers.rows[row], self.multipliers.exponent)
        return upper_bound(self.network, lines, *given, nu)


def _asked(claim: dict[str, Any], part: Part, proof: TensorFile, n: int, own: int, bits: int) -> _Asked:
    """Reads what a claim is about.

    Args:
        n: how many pre-activations it names.
        own: rows of multipliers for them.
        bits: of their ends.
    """
    u = _box(claim, "inputs", proof)
    p = len(u.ends)
    sizes = {"A": (n, n), "B": (n, p), "C": (None, n), "D": (None, p)}
    A, B, C, D = (_formed(part, name, *sizes[name]) for name in "ABCD")
    if len(part.phis) != n:
        raise RefusedError(f"there are {n} pre-activations and {len(part.phis)} states")
    q = len(C.rows)
    D = D if D.rows else Matrix([[0] * p for _ in range(q)], 0)
    target, y = claim.get("target"), None if claim.get("outputs") is None else _box(claim, "outputs", proof)
    if (target is None) == (y is None) or (y is not None and len(y.ends) != q):
        raise RefusedError(f"a {claim['kind']} is about one class or about a box of {q} outputs")
    if target is not None and not (type(target) is int and 0 <= target < q and q > 1):
        raise RefusedError(f"the class is {target!r}; there are {q} outputs")
    nu = proof.matrix(claim.get("multipliers"), own + (q if y is None else 2 * q), n)
    Y = proof.matrix(claim.get("inverse"), n, n)
    ball = proof.vector(claim.get("center"), n), proof.vector(claim.get("radius"), n)
    bits = max(bits, *(number.bit_length() for side in ball for one in side for number in one.as_integer_ratio()))
    proof.budget.multiply(n**3, A.bits, Y.bits)
    long = max(A.bits, B.bits, C.bits, D.bits, nu.bits, u.bits, Y.bits, bits)
    proof.budget.spend(16 * n * (n + p + len(nu.rows)), long)
    b, unit = scaled(map(float, _bias(part, "b", n)), proof.budget)
    inputs = Scaled([low for low, _ in u.ends] + [high for _, high in u.ends], u.exponent)
    columns = [[list(column) for column in zip(*M.rows, strict=True)] for M in (A, B)]
    network = Network(A, B, Scaled(b, unit), part.phis, inputs, (columns[0], columns[1]))
    return _Asked(network, (C, D, _bias(part, "c", q)), target, y, nu, ball, Y)


def _outputs_of(part: Part, asked: _Asked, kind: str, bound: Callable[..., Fraction], how: str) -> Finding:
    """Proves the statement about outputs."""
    (C, D, offset), target, y = asked.outputs, asked.target, asked.box
    q, exponents = len(C.rows), (C.exponent, D.exponent)
    for i in range(q):
        if y is None and target is not None:
            rows = [[a - b for a, b in zip(M.rows[i], M.rows[target], strict=True)] for M in (C, D)]
            if i != target and not bound(i, *rows, exponents) + offset[i] - offset[target] < 0:
                raise RefusedError(f"output {i} is not proven to stay below output {target}")
            continue
        assert y is not None
        for sign, end in ((1, y.ends[i][1]), (-1, -y.ends[i][0])):
            rows = [[sign * entry for entry in M.rows[i]] for M in (C, D)]
            if bound(i if sign > 0 else q + i, *rows, exponents) + sign * offset[i] > end * y.unit:
                raise RefusedError(f"the box of outputs does not hold output {i}")
    about = ", on the branch through the equilibrium at its center" if kind == "branch" else ""
    if y is None:
        return Finding(kind, part.name, f"class {target} for all inputs of a box{about}", how)
    width = rounded(max(high - low for low, high in y.ends) * y.unit)
    about = f" for all inputs of a box{about}" if about else ""
    return Finding(kind, part.name, f"{q} outputs within {width:.4g}{about}", how)


def _formed(part: Part, name: str, rows: int | None, columns: int) -> Matrix:
    """Forms a matrix of the model; one that is not there has no entries but zeros."""
    if name not in part.matrices:
        return Matrix([[0] * columns for _ in range(rows or 0)], 0)
    matrix = part.matrices[name]()
    if rows not in (None, len(matrix.rows)) or any(len(row) != columns for row in matrix.rows):
        raise RefusedError(f"{name} does not fit the boxes")
    return matrix


class _Box(NamedTuple):
    """The intervals ``[low * unit, high * unit]``."""

    ends: list[tuple[int, int]]
    exponent: int
    bits: int

    @property
    def unit(self) -> Fraction:
        return Fraction(2) ** self.exponent


def _box(claim: dict[str, Any], name: str, proof: TensorFile) -> _Box:
    ends = claim.get(name)
    if not isinstance(ends, list) or len(ends) != 2:
        raise RefusedError(f"the enclosure names no two ends of its {name}")
    (size,), low = proof.values(ends[0], (None,))
    if not size:
        raise RefusedError(f"the box of {name} has no entries")
    high = proof.values(ends[1], (size,))[1]
    if any(a > b for a, b in zip(low, high, strict=True)):
        raise RefusedError(f"the box of {name} is empty")
    whole, exponent = scaled([*low, *high], proof.budget)
    bits = max(entry.bit_length() for entry in whole)
    return _Box(list(zip(whole[:size], whole[size:], strict=True)), exponent, bits)


def _reach(part: Part, name: str, box: _Box, rows: int, budget: Budget) -> list[tuple[Fraction, Fraction]]:
    """Encloses a matrix times a box, row by row; without a matrix that is zero."""
    if name not in part.matrices:
        return [(Fraction(0), Fraction(0))] * rows
    matrix = part.matrices[name]()
    if len(matrix.rows) != rows or any(len(row) != len(box.ends) for row in matrix.rows):
        raise RefusedError(f"{name} does not fit the boxes")
    budget.multiply(4 * rows * len(box.ends), matrix.bits, box.bits)
    unit = matrix.unit * box.unit
    ends = (proofs.reach(row, box.ends) for row in matrix.rows)
    return [(low * unit, high * unit) for low, high in ends]


def _bias(part: Part, name: str, size: int) -> list[Fraction]:
    bias = part.biases[name]() if name in part.biases else [Fraction(0)] * size
    if len(bias) != size:
        raise RefusedError(f"the bias {name} does not fit the boxes")
    return bias


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
    stated = f"{total} rows within {rounded(largest):.2e}, relative to |z|^2/2"
    return Finding("row gaps", part.name, stated, "F(w) - D(nu), row by row")


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
    count, longest = len(rows) * design.shape[1], max(A.bits, B.bits, dual.bits, targets.bits)
    proof.budget.multiply(2 * count * samples, design.bits, longest + abs(A.exponent - B.exponent))
    proof.budget.spend(16 * count, 4 * (longest + design.bits))  # squares, in fractions
    ridge, gaps = (
        proof.vector(names[3], design.shape[1]),
        proof.vector(names[4], len(rows)),
    )
    columns = [list(column) for column in zip(*design.rows, strict=True)]
    low = min(A.exponent, B.exponent)
    for k, i in enumerate(rows):
        w = [entry << (A.exponent - low) for entry in given[0][k]] + [e << (B.exponent - low) for e in given[1][k]]
        used = [j for j, entry in enumerate(w) if entry or only == "all"]
        outside = sum(map(bool, A.rows[i])) + sum(map(bool, B.rows[i])) - sum(map(bool, w))
        if outside:
            raise RefusedError(f"row {i} has entries outside of its columns")
        gap = proofs.row_gap(
            [columns[j] for j in used], design.exponent, (targets.rows[k], targets.exponent),
            ([w[j] for j in used], low), (dual.rows[k], dual.exponent), [ridge[j] for j in used],
            sum(j < capped for j in used), kappa,
        )  # fmt: skip
        size = proofs.dot(targets.rows[k], targets.rows[k]) * targets.unit**2 / 2
        if gap > gaps[k]:
            more = f"{rounded(gap):.3g}, above the {rounded(gaps[k]):.3g} stated"
            raise RefusedError(f"the gap of row {i} is {more}")
        if gaps[k] > largest * size:  # of a target of zeros, which a row of zeros meets, nothing may be missing
            raise RefusedError(
                f"the gap of row {i} may be {rounded(gaps[k]):.3g}, above {rounded(largest):.3g} of |z|^2/2 = "
                f"{rounded(size):.3g}, the largest stated"
            )
    return len(rows)


GROUP = (
    *("rows", "states", "inputs", "kappa", "support", "capped"),
    *("design", "targets", "dual", "ridge", "gaps"),
)
KEYS = {
    "well-posed": ("kind", "about", "condition", "value", "norm", "weights", "loops"),
    "enclosure": ("kind", "about", "inputs", "states", "outputs"),
    "row-gaps": ("kind", "about", "largest", "groups"),
    "continuation": (
        *("kind", "about", "inputs", "preactivations", "slopes", "multipliers"),
        *("center", "radius", "inverse", "outputs", "target"),
    ),
    "branch": (
        *("kind", "about", "inputs", "slopes", "multipliers", "center", "radius", "inverse", "outputs", "target"),
    ),
}
CLAIMS = {
    "well-posed": _well_posed,
    "enclosure": _enclosure,
    "continuation": _continuation,
    "branch": _branch,
    "row-gaps": _row_gaps,
}
