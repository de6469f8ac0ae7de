"""Every certificate of well-posedness against matrices that were made to deceive it, judged in fractions.

A condition that says it holds must hold without rounding, its value be no smaller than the exact one, and its gain
bound every error that its slopes allow. A matrix that holds NaN or infinity proves nothing, and nothing but an
`InputError` is raised.
"""

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.campaigns import rationals as q
from tests.campaigns.deceiving import FAMILIES, Draw, critical_rows
from wellposed.activations import Activation, get_activation
from wellposed.conditions.certificate import AffineBound, Certificate, low_rank_certificate
from wellposed.conditions.conditions import CONDITIONS
from wellposed.conditions.norms import (
    depth,
    induced_norm,
    largest_eigenvalue,
    largest_singular_value,
    spectral_norm,
    symmetric_eigenvalue,
)
from wellposed.conditions.rescaling import rescaling
from wellposed.errors import IllPosedError, InputError, MissingExtraError
from wellposed.forms import Block, Dense, ImplicitForm, gains
from wellposed.robust import METHODS, Box, output_bounds

ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "hardtanh", "leaky_relu(0.25)", "selu", "sin", "max_pool(2)",
               "group_sort(2)", "softmax(2)")  # fmt: skip
Finding = tuple[str, bool, str]


def _value_holds(certificate: Certificate, A: q.Matrix, phi: Activation) -> bool:
    """Whether the exact value of a condition is at most the stated one."""
    value, gamma = Fraction(certificate.value), Fraction(phi.constants.get(certificate.norm, 0.0))
    ends = [Fraction(end) for end in phi.slope]
    n = len(A)
    if certificate.condition == "inf":
        return gamma * q.row_norm(A) <= value
    if certificate.condition == "weighted":
        assert certificate.weights is not None
        v = [Fraction(entry) for entry in certificate.weights.tolist()]
        return all(gamma * sum(abs(a) * w for a, w in zip(A[i], v, strict=True)) <= value * v[i] for i in range(n))
    if certificate.condition == "mu":
        return all(gamma * (sum(map(abs, A[i])) - abs(A[i][i]) + A[i][i]) <= value for i in range(n))
    if certificate.condition == "triangular":
        one_sided = not any(A[i][j] for i in range(n) for j in range(i)) or not any(
            A[i][j] for i in range(n) for j in range(i + 1, n)
        )
        return one_sided and all(d * A[i][i] <= value for d in ends for i in range(n))
    if certificate.condition == "spectral":
        return q.spectral_below(A, value / gamma)
    if certificate.condition == "monotone":
        return q.symmetric_below(A, value)
    return _blocks_hold(certificate, A, phi, value, gamma)


def _blocks_hold(certificate: Certificate, A: q.Matrix, phi: Activation, value: Fraction, gamma: Fraction) -> bool:
    assert certificate.weights is not None
    size = phi.block or len(A)
    v = [Fraction(entry) for entry in certificate.weights.tolist()]
    norm = {
        "inf": q.row_norm,
        "1": lambda block: q.row_norm(q.transposed(block)),
        "2": q.spectral_from_below,
    }[certificate.norm]
    for i, weight in enumerate(v):
        rows = A[size * i : size * (i + 1)]
        norms = [norm([row[size * j : size * (j + 1)] for row in rows]) for j in range(len(v))]
        if gamma * sum(norm_j * w for norm_j, w in zip(norms, v, strict=True)) > value * weight:
            return False
    return True


def _gain_holds(certificate: Certificate, A: q.Matrix, phi: Activation) -> bool:
    """Whether no slopes make an error larger than the gain says; at most three states."""
    if not phi.componentwise or len(A) > 3 or not math.isfinite(certificate.gain):
        return True
    gain, (low, high) = Fraction(certificate.gain), phi.slope
    v = [q.ONE] * len(A) if certificate.weights is None else [Fraction(w) for w in certificate.weights.tolist()]
    for D in q.slopes(len(A), Fraction(low), Fraction(high)):
        around = q.spread(A, D)
        if around is None:
            return False
        scaled = [[entry * w / v[i] for entry, w in zip(row, v, strict=True)] for i, row in enumerate(around)]
        if not (q.spectral_below(around, gain) if certificate.norm == "2" else q.row_norm(scaled) <= gain):
            return False
    return True


def conditions(A: Tensor, phi: Activation) -> Iterator[Finding]:
    """Every condition that applies to the activation."""
    finite = bool(A.isfinite().all())
    for name in CONDITIONS:
        condition = CONDITIONS[name]
        if condition.why_not(phi):
            continue
        certificate = condition.certify(A, phi)
        if not certificate.holds:
            yield f"{name}, refused", True, ""
            continue
        E = q.exact(A) if finite else []
        good = finite and certificate.value < 1 and _value_holds(certificate, E, phi)
        yield f"{name}, holds", good, f"value {certificate.value!r}"
        if good:
            yield f"{name}, gain", _gain_holds(certificate, E, phi), f"gain {certificate.gain!r}"


def searched(A: Tensor, phi: Activation) -> Iterator[Finding]:
    """What a form says of itself: all conditions, the order of its states, norms of blocks."""
    n = len(A)
    if not bool(A.isfinite().all()):
        return
    E, one = q.exact(A), torch.eye(n, dtype=A.dtype)
    try:
        certificate = ImplicitForm(A, one, one, activation=phi).certificate()
    except IllPosedError:
        yield "form, refused", True, ""
    else:
        acyclic = certificate.note == "strictly triangular"
        good = not q.cyclic(E) if acyclic else _value_holds(certificate, E, phi)
        yield (
            f"form, {'acyclic' if acyclic else certificate.condition}",
            certificate.holds and good,
            str(certificate),
        )
    layers = depth(A.double().abs())
    yield "depth of a graph", (layers is None) == q.cyclic(E), f"{layers} layers"
    if n > 1 and phi.componentwise:
        yield from _of_blocks(A, E, phi)


def _of_blocks(A: Tensor, E: q.Matrix, phi: Activation) -> Iterator[Finding]:
    sizes = (1, len(A) - 1)
    blocks = {
        (i, j): Dense(part) for i, rows in enumerate(A.split(sizes)) for j, part in enumerate(rows.split(sizes, 1))
    }
    one, tanh = torch.eye(len(A), dtype=A.dtype), get_activation("tanh")
    try:
        form = ImplicitForm(Block(sizes, sizes, blocks), one, one, activation=[phi, tanh])
        certificate = form.certificate()
    except IllPosedError:
        return
    if certificate.condition != "blocks" or certificate.weights is None:
        return
    v, value = [Fraction(w) for w in certificate.weights.tolist()], Fraction(certificate.value)
    gamma = (Fraction(phi.lipschitz("inf")), q.ONE)
    norms = [
        [q.row_norm([row[: sizes[0]] if j == 0 else row[sizes[0] :] for row in rows]) for j in range(2)]
        for rows in (E[: sizes[0]], E[sizes[0] :])
    ]
    good = all(gamma[i] * (norms[i][0] * v[0] + norms[i][1] * v[1]) <= value * v[i] for i in range(2))
    yield "form, blocks", good and certificate.holds, str(certificate)


def projections(A: Tensor, phi: Activation) -> Iterator[Finding]:
    """What a parametrisation makes of any matrix: rows never exceed the cap, and its certificate is true."""
    for name in CONDITIONS:
        condition = CONDITIONS[name]
        if condition.why_not(phi) or name == "triangular":
            continue
        kappa = 0.95 / phi.lipschitz(condition.norm_name(phi))
        try:
            inside = condition.parametrise(A, kappa, phi)
        except InputError:
            yield f"{name}, projection refused", True, ""
            continue
        certificate = condition.certify(inside, phi)
        if not bool(inside.isfinite().all()):
            yield f"{name}, projection overflowed", not certificate.holds, f"value {certificate.value!r}"
            continue
        E, cap = q.exact(inside), Fraction(kappa)
        if name == "inf" or (name == "weighted" and phi.componentwise):
            yield f"{name}, projected rows", q.row_norm(E) <= cap, f"{float(q.row_norm(E))!r} > {kappa!r}"
        if name == "mu":
            top = max(sum(map(abs, row)) - abs(row[i]) + row[i] for i, row in enumerate(E))
            yield "mu, projected rows", top <= cap, f"{float(top)!r} > {kappa!r}"
        yield (
            f"{name}, projected certificate",
            not certificate.holds or _value_holds(certificate, E, phi),
            f"{certificate.value!r}",
        )


def norms(A: Tensor) -> Iterator[Finding]:
    """Norms and eigenvalues that are stated as bounds."""
    if not bool(A.isfinite().all()):
        return
    E = q.exact(A)
    for kind, value in (("spectral norm", float(spectral_norm(A))), ("singular value", largest_singular_value(A))):
        good = not math.isfinite(value) or q.spectral_below(E, Fraction(value))
        yield kind, good, repr(value)
    value = symmetric_eigenvalue(A)
    yield (
        "symmetric eigenvalue",
        not math.isfinite(value) or q.symmetric_below(E, Fraction(value)),
        repr(value),
    )
    symmetric = torch.triu(A.double()) + torch.triu(A.double(), 1).mT
    value = largest_eigenvalue(symmetric)
    good = not math.isfinite(value) or q.symmetric_below(q.exact(symmetric), Fraction(value))
    yield "eigenvalue by factorisation", good, repr(value)
    simple = {("inf", "inf"): q.row_norm(E), ("1", "1"): q.row_norm(q.transposed(E)),
              ("1", "inf"): max(abs(entry) for row in E for entry in row)}  # fmt: skip
    for (start, end), least in simple.items():
        value = float(induced_norm(A, start, end).value)
        yield (
            f"induced norm {start} to {end}",
            not math.isfinite(value) or least <= Fraction(value),
            repr(value),
        )


def other_units(A: Tensor, draw: Draw) -> Iterator[Finding]:
    """Scalings that are said to bring a norm below kappa."""
    kappa = float(draw.choice([0.5, 0.95, 1.0, 3.0]))
    try:
        units = rescaling(A, kappa)
    except (IllPosedError, InputError):
        yield "rescaling, refused", True, ""
        return
    E, n = q.exact(A), len(A)
    D, inverse = ([Fraction(d) for d in units.factors(sign).tolist()] for sign in (1, -1))
    norm = q.row_norm([[D[i] * E[i][j] * inverse[j] for j in range(n)] for i in range(n)])
    yield (
        "rescaling",
        norm <= Fraction(units.norm) and units.norm < kappa,
        f"{float(norm)!r} > {units.norm!r}",
    )


def low_rank(draw: Draw, dtype: torch.dtype) -> Iterator[Finding]:
    """The norm of a product that is not formed."""
    n, rank = int(draw.integers(1, 6)), int(draw.integers(1, 3))
    L, R = (
        torch.tensor(critical_rows(draw, n)[:, :1] * draw.normal(size=(n, rank)), dtype=dtype) for _ in range(2)
    )
    if draw.random() < 0.6:  # rows of the product near one
        L = L / (L.double() @ R.double().mT).abs().sum(1).max().to(dtype)
    certificate = low_rank_certificate(L, R, get_activation("relu"))
    norm = q.row_norm(q.times(q.exact(L), q.transposed(q.exact(R))))
    yield (
        "low rank",
        not certificate.holds or norm <= Fraction(certificate.value),
        f"{float(norm)!r} > {certificate.value!r}",
    )


def forward_gains(A: Tensor, phi: Activation) -> Iterator[Finding]:
    """``S = |C| (I - gamma |A|)^-1 gamma |B| + |D|`` with identities around A."""
    if not phi.componentwise or len(A) > 4 or not bool(A.isfinite().all()):
        return
    one = torch.eye(len(A), dtype=A.dtype)
    try:
        S = gains(ImplicitForm(A, one, one, activation=phi), self_loops=False)
    except IllPosedError:
        return
    gamma, size = Fraction(phi.lipschitz()), [[abs(entry) for entry in row] for row in q.exact(A)]
    around = q.inverse(q.minus(q.identity(len(A)), [[gamma * entry for entry in row] for row in size]))
    good = around is not None and all(
        0 <= gamma * least <= Fraction(stated)
        for row, most in zip(around, S.tolist(), strict=True)
        for least, stated in zip(row, most, strict=True)
    )
    yield "gains", good, "" if around is None else f"{[[float(x) for x in row] for row in around]} {S.tolist()}"


def errors(A: Tensor, draw: Draw) -> Iterator[Finding]:
    """The distance to the exact equilibrium of a ReLU system, from any state."""
    n, relu = len(A), get_activation("relu")
    if n > 3 or not bool(A.isfinite().all()):
        return
    v = torch.tensor(draw.normal(size=(1, n)) * 10.0 ** draw.choice([-30, -5, 0, 5, 30]), dtype=A.dtype)
    E, target = q.exact(A), [Fraction(entry) for entry in v[0].tolist()]
    for name in ("inf", "weighted", "mu", "spectral", "monotone"):
        certificate = CONDITIONS[name].certify(A, relu)
        if not certificate.holds:
            continue
        x_star = q.relu_equilibrium(E, target)
        if x_star is None:
            yield f"{name}, no equilibrium where one is certified", False, ""
            continue
        near = torch.tensor([[float(entry) for entry in x_star]], dtype=A.dtype)
        x = near * (
            1 + torch.tensor(draw.normal(size=(1, n)), dtype=A.dtype) * 10.0 ** float(draw.choice([-20, -6, 0]))
        )
        if not bool(x.isfinite().all()):
            continue
        bound = float(AffineBound(certificate, A, relu, n + 2)(x, torch.cat([v, v.abs()], 1)))
        error = max(abs(Fraction(a) - b) for a, b in zip(x[0].tolist(), x_star, strict=True))
        yield (
            f"{name}, error bound",
            not math.isfinite(bound) or error <= Fraction(bound),
            f"{float(error)} {bound}",
        )


def long_rows(draw: Draw, dtype: torch.dtype) -> Iterator[Finding]:
    """Rows of many entries near one, whose sums are rounded many times; judged where that takes no elimination."""
    n, relu = int(draw.integers(30, 100)), get_activation("relu")
    A = torch.tensor(critical_rows(draw, n)).to(dtype)
    E = q.exact(A)
    for name in ("inf", "weighted", "mu"):
        certificate = CONDITIONS[name].certify(A, relu)
        yield (
            f"{name}, long rows",
            not certificate.holds or _value_holds(certificate, E, relu),
            f"value {certificate.value!r}",
        )
        inside = q.exact(CONDITIONS[name].parametrise(A, 0.95, relu))
        top = max(
            sum(map(abs, row)) - (abs(row[i]) - row[i] if name == "mu" else 0) for i, row in enumerate(inside)
        )
        yield f"{name}, long projected rows", top <= Fraction(0.95), f"{float(top)!r}"


def bounds(A: Tensor, draw: Draw) -> Iterator[Finding]:
    """Every method on a ReLU loop: the exact equilibria of all corners of a box lie within, with no slack.

    Of a loop without a certificate one equilibrium of every corner does, or nothing is said.
    """
    n = len(A)
    if n > 3 or not bool(A.isfinite().all()):
        return
    C = torch.tensor(draw.normal(size=(2, n)) * 10.0 ** draw.choice([-9, 0, 9])).to(A.dtype)
    u = torch.tensor(draw.normal(size=(1, n)) * 10.0 ** draw.choice([-20, -3, 0, 3, 20])).to(A.dtype)
    box = Box.around(u, float(u.abs().max()) * float(draw.choice([0.0, 1e-9, 1e-2, 1.0])), None, None)
    form, E, weights = ImplicitForm(A, torch.eye(n, dtype=A.dtype), C), q.exact(A), q.exact(C)
    ends = zip(q.exact(box.lower)[0], q.exact(box.upper)[0], strict=True)
    states = [list(q.relu_equilibria(E, list(corner))) for corner in product(*ends)]
    outputs = [[q.times(weights, [[entry] for entry in x]) for x in corner] for corner in states]
    for method in METHODS:
        try:
            proven = output_bounds(form, box, method)
        except (InputError, IllPosedError, MissingExtraError):
            continue
        lower, upper = proven.lower[0].tolist(), proven.upper[0].tolist()
        inside = [
            [all(_between(lower[i], y[i][0], upper[i]) for i in range(2)) for y in corner] for corner in outputs
        ]
        if proven.branch is None:
            kind, good = "exact corners", all(corner and all(corner) for corner in inside)
        elif bool(proven.branch.proven):
            kind, good = "exact corners of a branch", all(any(corner) for corner in inside)
        else:
            kind, good = "no branch", not any(map(math.isfinite, (*lower, *upper)))
        good = good and not any(map(math.isnan, (*lower, *upper)))
        values = [[[float(e[0]) for e in y] for y in corner] for corner in outputs]
        yield f"{kind}, {method}", good, f"{lower} {upper} {values}"


def _between(lower: float, value: Fraction, upper: float) -> bool:
    above = lower == -math.inf or Fraction(lower) <= value if lower != math.inf else False
    return above and (upper == math.inf or (upper != -math.inf and value <= Fraction(upper)))


def matrix(seed: int, number: int) -> tuple[str, Tensor, Activation, Draw]:
    """Draws the matrix of a number, with its family and an activation."""
    draw = np.random.default_rng((seed, number))
    family = list(FAMILIES)[number % len(FAMILIES)]
    phi = get_activation(ACTIVATIONS[number // len(FAMILIES) % len(ACTIVATIONS)])
    n = int(draw.integers(1, 6)) if phi.componentwise else 2 * int(draw.integers(1, 3))
    A = FAMILIES[family](draw, n)
    with np.errstate(over="ignore"):
        dtype = torch.float64 if draw.random() < 0.6 else torch.float32
    return family, torch.tensor(A).to(dtype), phi, draw


def examine(seed: int, number: int) -> tuple[Counter, list[dict[str, Any]]]:
    """Examines one matrix; returns what was checked, and what is wrong."""
    family, A, phi, draw = matrix(seed, number)
    counts: Counter = Counter()
    wrong: list[dict[str, Any]] = []
    about = {"family": family, "number": number, "activation": phi.name, "dtype": str(A.dtype)[6:]}
    checks: dict[str, Iterator[Finding]] = {
        "conditions": conditions(A, phi), "form": searched(A, phi), "projection": projections(A, phi),
        "norms": norms(A), "units": other_units(A, draw), "low rank": low_rank(draw, A.dtype),
        "gains": forward_gains(A, phi), "errors": errors(A, draw),
        "bounds": bounds(A, draw) if number % 8 == 0 else iter(()),
        "long rows": long_rows(draw, A.dtype) if number % 5 == 0 else iter(()),
    }  # fmt: skip
    for check, findings in checks.items():
        try:
            for kind, good, note in findings:
                counts[kind] += 1
                if not good:
                    wrong.append({"kind": kind, "note": note, **about})
        except Exception as error:
            counts[f"{check}, raised"] += 1
            wrong.append(
                {"kind": f"{check}, raised", "note": f"{type(error).__name__}: {str(error)[:200]}", **about}
            )
    return counts, wrong
