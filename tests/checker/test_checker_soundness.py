"""Accepts exactly what an oracle in plain fractions accepts, whatever a forger writes."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from forged_files import write_claims, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.checker import RefusedError, check
from wellposed.checker.proofs import positive

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = st.integers(1, 4)
ENTRIES = st.one_of(
    st.integers(-12, 12).map(lambda k: k / 16),
    st.floats(-0.9, 0.9),
    st.sampled_from([0.0, 5e-324, -1e-300, 1e30, 0.1, -0.3]),
)
VALUES = st.one_of(st.integers(1, 15).map(lambda k: k / 16), st.floats(0.0, 1.5), st.just(1.0))
GAMMA = {
    "relu": Fraction(1),
    "sigmoid": Fraction(1, 4),
    "elu(1.5)": Fraction(3, 2),
    "leaky_relu(0.5)": Fraction(1),
}


@st.composite
def matrices(draw, entries=ENTRIES):
    n = draw(SIZES)
    return np.array([[draw(entries) for _ in range(n)] for _ in range(n)], dtype=np.float64)


def exact(A):
    return [[Fraction(float(entry)) for entry in row] for row in A]


def accepted(folder, A, activation, claim, tensors=None):
    model = write_model(folder / "m.safetensors", A, activation)
    write_claims(model, [{"kind": "well-posed", **claim}], tensors)
    try:
        check(model)
    except RefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("forged")


@given(matrices(), VALUES, st.sampled_from(sorted(GAMMA)), st.data())
@settings(max_examples=150)
def test_weights_are_accepted_if_and_only_if_they_prove_it(folder, A, value, name, data):
    weights = st.one_of(
        st.floats(1e-3, 8.0), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-308, 1.0, 2.0**-40])
    )
    v = np.array([data.draw(weights) for _ in A])
    sums = (
        [sum(abs(a) * Fraction(w) for a, w in zip(row, v, strict=True)) for row in exact(A)]
        if np.isfinite(v).all()
        else []
    )
    holds = bool(sums) and value < 1 and (v > 0).all()
    holds = holds and all(GAMMA[name] * s <= Fraction(value) * Fraction(w) for s, w in zip(sums, v, strict=True))
    claim = {"condition": "weighted", "value": value, "weights": "v"}
    assert accepted(folder, A, name, claim, {"v": v}) == holds


@given(matrices(), VALUES)
@settings(max_examples=100)
def test_row_sums_and_logarithmic_norms(folder, A, value):
    rows = exact(A)
    sums = [sum(map(abs, row)) for row in rows]
    loops = [total - abs(row[i]) + row[i] for i, (row, total) in enumerate(zip(rows, sums, strict=True))]
    for condition, bounds in (("inf", sums), ("mu", loops)):
        holds = value < 1 and max(bounds) <= Fraction(value)
        assert accepted(folder, A, "relu", {"condition": condition, "value": value}) == holds


@given(matrices(st.sampled_from([0.0, 0.0, 0.5, -3.0])), VALUES)
@settings(max_examples=100)
def test_triangles(folder, A, value):
    triangle = not np.tril(A, -1).any() or not np.triu(A, 1).any()
    holds = value < 1 and triangle and all(max(Fraction(0), Fraction(a)) <= Fraction(value) for a in A.diagonal())
    assert accepted(folder, A, "relu", {"condition": "triangular", "value": value}) == holds


def determinant(M):
    if not M:
        return Fraction(1)
    minors = ([row[:j] + row[j + 1 :] for row in M[1:]] for j in range(len(M)))
    return sum((-1) ** j * M[0][j] * determinant(minor) for j, minor in enumerate(minors))


def semidefinite(M):
    """Sylvester: no principal minor is negative."""
    n = len(M)
    chosen = ([i for i in range(n) if bits[i]] for bits in product((0, 1), repeat=n))
    return all(determinant([[M[i][j] for j in kept] for i in kept]) >= 0 for kept in chosen)


@given(matrices(st.one_of(st.integers(-12, 12).map(lambda k: k / 16), st.floats(-0.9, 0.9))), VALUES)
@settings(max_examples=100)
def test_spectral_and_monotone_are_never_accepted_wrongly(folder, A, value):
    rows, n = exact(A), len(A)
    cap = Fraction(value)
    gram = [[(cap**2 if i == j else 0) - sum(row[i] * row[j] for row in rows) for j in range(n)] for i in range(n)]
    part = [[(2 * cap if i == j else 0) - rows[i][j] - rows[j][i] for j in range(n)] for i in range(n)]
    reach = {"spectral": np.linalg.norm(A, 2), "monotone": np.linalg.eigvalsh((A + A.T) / 2)[-1]}
    for condition, M in (("spectral", gram), ("monotone", part)):
        got = accepted(folder, A, "relu", {"condition": condition, "value": value})
        assert not got or (value < 1 and semidefinite(M))
        if value < 1 and reach[condition] < value - 1e-9:
            assert got, "clear cases are proven"


@given(matrices(st.integers(-6, 6)))
@settings(max_examples=100)
def test_positive_never_lies(M):
    whole = [[int(entry) for entry in row] for row in (M + M.T).tolist()]
    if positive(whole):
        assert semidefinite([[Fraction(entry) for entry in row] for row in whole])
    shifted = [[entry + 100 * (i == j) for j, entry in enumerate(row)] for i, row in enumerate(whole)]
    assert positive(shifted), "a dominant matrix is proven"


@pytest.mark.parametrize("norm", ["1", "inf"])
def test_blocks(folder, norm):
    draw = np.random.default_rng(3)
    for _ in range(60):
        A, v, value = draw.uniform(-0.4, 0.4, (4, 4)), draw.uniform(0.5, 2, 2), draw.uniform(0.2, 1)
        norms = np.array([[np.linalg.norm(A[i : i + 2, j : j + 2], float(norm)) for j in (0, 2)] for i in (0, 2)])
        ratio = (norms @ v / v).max()
        claim = {"condition": "block", "value": value, "weights": "v", "norm": norm}
        got = accepted(folder, A, "max_pool(2)", claim, {"v": v})
        assert got == (ratio <= value) or abs(ratio - value) < 1e-12
    assert not accepted(folder, A, "max_pool(2)", claim | {"value": 0.99, "norm": "2"}, {"v": v})
    assert not accepted(folder, A, "max_pool(3)", claim | {"value": 0.99}, {"v": v})
    rows = np.abs(A).sum(1).max()
    for value in (0.99 * rows, 1.01 * rows):
        assert accepted(folder, A / 2, "max_pool(2)", {"condition": "inf", "value": value / 2}) == (value > rows)
    claim = {"condition": "weighted", "value": 0.99, "weights": "v"}
    assert not accepted(folder, 0 * A, "max_pool(2)", claim, {"v": np.array([1, 2, 1, 1.0])}), "not the norm inf"
