"""The compiled path and the compiled descent on tiny rows, against a path of a few lines and the conditions."""

import math

import numpy as np
import pytest

from wellposed.convex.descent import bisect_all, descend
from wellposed.convex.path import CAPPED, CLOSED, FLOOR, LONG, follow_all

ALL = np.ones((1, 7), np.bool_)


def gram(seed: int, common: float = 0.0, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Draws a Gram matrix and the correlations of three rows; a common part makes entries leave the path."""
    generator = np.random.default_rng(seed)
    M = scale * (generator.normal(size=(9, 7)) + common * generator.normal(size=(9, 1)))
    return M.T @ M, generator.normal(size=(3, 9)) @ M


def reference(G: np.ndarray, c: np.ndarray, kappa: float, floor: float, target: float) -> tuple:
    """Follows a path without ties by solving with G_AA anew at every event."""
    a, active, left, steps, leaves = np.zeros(len(c)), [int(np.abs(c).argmax())], None, 0, 0
    level = np.abs(c).max()
    while True:
        steps += 1
        r = c - G @ a
        w = np.zeros(len(c))
        s = np.sign(r[active])
        w[active] = np.linalg.solve(G[np.ix_(active, active)], s)
        v, falls = G @ w, {}
        for q in set(range(len(c))) - set(active):
            for sign in (1.0, -1.0):
                if 1 - sign * v[q] > 0 and not (q == left and sign == np.sign(r[q])):
                    t = (level - sign * r[q]) / (1 - sign * v[q])
                    falls["join", q] = min(falls.get(("join", q), math.inf), t)
        for i, q in enumerate(active):
            if w[q] * s[i] < 0:
                falls["leave", q] = -a[q] / w[q]
        falls["end", FLOOR] = level - floor
        falls["end", CAPPED] = (kappa - np.abs(a).sum()) / (w[active] @ s)
        (kind, q), t = min(falls.items(), key=lambda fall: fall[1])
        a, level, left = a + t * w, level - t, None
        if kind == "end" or (level - floor) * (kappa - np.abs(a).sum()) <= target:
            return a, level, steps, q if kind == "end" else CLOSED, leaves
        if kind == "join":
            active.append(q)
        else:
            active.remove(q)
            a[q], left, leaves = 0.0, q, leaves + 1


def is_optimal(G: np.ndarray, c: np.ndarray, a: np.ndarray, level: float, allowed: np.ndarray) -> None:
    """Asserts that c - Ga lies in lambda times the subdifferential of |a|_1 on the columns that are allowed."""
    rest, scale = c - G @ a, np.abs(c).max()
    assert (np.abs(rest)[allowed] <= level + 1e-10 * scale).all()
    np.testing.assert_allclose(rest[a != 0], level * np.sign(a[a != 0]), atol=1e-10 * scale)
    assert not a[~allowed].any()


@pytest.mark.parametrize(("common", "scale"), [(0.0, 1.0), (3.0, 1.0), (3.0, 1e-7)])
@pytest.mark.parametrize(
    ("kappa", "floor", "target"),
    [(0.05, 0.0, 0.0), (0.7, 0.0, 0.0), (2.0, 0.0, 0.0), (math.inf, 0.3, 0.0), (1.0, 0.2, 0.0), (1.5, 0.1, 0.4)],
)
def test_follows_the_path(kappa, floor, target, common, scale):
    ends, leaves, kappa, floor = set(), 0, kappa / scale, floor * scale
    for seed in range(8):
        G, C = gram(seed, common, scale)
        weights, levels, steps, ended = follow_all(G, C, kappa, floor, np.full(3, target), ALL, 70)
        for i, c in enumerate(C):
            a, level, count, why, gone = reference(G, c, kappa, floor, target)
            np.testing.assert_allclose(weights[i] * scale, a * scale, atol=1e-10)
            assert levels[i] / scale == pytest.approx(level / scale, abs=1e-10)
            assert (steps[i], ended[i]) == (count, why)
            ends, leaves = ends | {why}, leaves + gone
    assert ends <= ({CAPPED, FLOOR, CLOSED} if target else {CAPPED, FLOOR})
    assert CLOSED in ends or not target
    assert leaves or kappa * scale < 2


def test_stops_after_the_last_step_allowed():
    G, C = gram(0)
    full = follow_all(G, C, math.inf, 0.0, np.zeros(3), ALL, 70)
    weights, levels, steps, ended = follow_all(G, C, math.inf, 0.0, np.zeros(3), ALL, 3)
    assert (steps == 3).all() and (ended == LONG).all() and (full[2] > 3).all() and (full[3] == FLOOR).all()
    for i in range(3):
        is_optimal(G, C[i], weights[i], levels[i], ALL[0])
        assert levels[i] > 0


def test_nothing_to_do_where_zero_is_optimal():
    G, C = gram(1)
    first = np.abs(C).max(1)
    for kappa, floor, target in ((1.0, first.max(), 0.0), (0.5, 0.0, first.max() / 2)):
        weights, levels, steps, ended = follow_all(G, C, kappa, floor, np.full(3, target), ALL, 70)
        assert not weights.any() and not steps.any() and (ended == CLOSED).all()
        np.testing.assert_array_equal(levels, first)
    for i, level in enumerate(first):
        for kappa, floor, target in ((math.inf, level, 0.0), (2.0, 0.9 * level, 0.21 * level)):
            _, levels, steps, ended = follow_all(G, C[i : i + 1], kappa, floor, np.full(1, target), ALL, 70)
            assert (levels[0], steps[0], ended[0]) == (level, 0, CLOSED)


def test_columns_that_are_barred_stay_out():
    G, C = gram(2)
    G[3], G[:, 3], C[:, 3] = 0.0, 0.0, 0.0
    allowed = np.ones((3, 7), np.bool_)
    allowed[0, np.abs(C[0]).argmax()], allowed[1, :4], allowed[2] = False, False, False
    weights, levels, steps, _ = follow_all(G, C, 0.5, 0.0, np.zeros(3), allowed, 70)
    for i in range(2):
        is_optimal(G, C[i], weights[i], levels[i], allowed[i])
        assert np.abs(weights[i]).sum() == pytest.approx(0.5, abs=1e-12)
    assert not weights[:, 3].any() and not weights[2].any() and (levels[2], steps[2]) == (0.0, 0)


def test_dependent_columns_wait_until_one_of_them_leaves():
    for seed in range(12):
        generator = np.random.default_rng(seed)
        M = generator.normal(size=(4, 7)) + 2 * generator.normal(size=(4, 1))
        G, C = M.T @ M, generator.normal(size=(3, 4)) @ M
        weights, levels, _, ended = follow_all(G, C, 0.9, 0.0, np.zeros(3), ALL, 70)
        for i in range(3):
            is_optimal(G, C[i], weights[i], levels[i], ALL[0])
            assert np.abs(weights[i]).sum() <= 0.9 + 1e-12
            assert ended[i] != CAPPED or np.abs(weights[i]).sum() == pytest.approx(0.9, abs=1e-12)


def test_columns_that_nearly_depend_on_others_stay_out():
    generator = np.random.default_rng(0)
    M = generator.normal(size=(9, 7))
    M[:, 1], M[:, 4] = (
        M[:, 0] + 1e-7 * generator.normal(size=9),
        M[:, 2] - M[:, 3] + 1e-7 * generator.normal(size=9),
    )
    G, C = M.T @ M, generator.normal(size=(30, 9)) @ M
    weights, levels, _, ended = follow_all(G, C, math.inf, 0.05, np.zeros(30), ALL, 70)
    assert (ended == FLOOR).all()
    np.testing.assert_allclose(levels, 0.05, atol=1e-12)
    rest = np.abs(C - weights @ G)
    assert (rest <= 0.05 + 1e-5).all() and (rest[weights != 0] >= 0.05 - 1e-9).all()
    assert (weights[:, 0] * weights[:, 1] == 0).all() and (weights[:, 2:5] == 0).any(1).all()


def test_descent_solves_the_penalised_row():
    for seed in range(4):
        G, C = gram(seed)
        G[5], G[:, 5], C[:, 5] = 0.0, 0.0, 0.0
        allowed = np.arange(7) != 2
        for level in (0.0, 0.5, 5.0):
            a, c = np.zeros(7), C[0].copy()
            sweeps = descend(G, C[0], level, allowed, 1e-28, 10_000, a, c)
            assert 0 < sweeps < 10_000
            np.testing.assert_allclose(c, C[0] - G @ a, atol=1e-10)
            is_optimal(G, C[0], a, level, allowed)
            assert descend(G, C[0], level, allowed, 1e-28, 10_000, a, c) <= 2
    assert descend(G, C[0], 0.0, allowed, 0.0, 3, np.zeros(7), C[0].copy()) == 3
    assert (
        descend(np.eye(7), C[0], 0.5, allowed, 0.0, 9, np.zeros(7), C[0].copy()) == 2
    )  # the second changes nothing


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_bisection_ends_at_the_cap(scale):
    counts, kappa = [], 0.8 / scale
    G, C = gram(0, scale=scale)
    for warm in (True, False):
        allowed = np.ones((3, 7), np.bool_)
        allowed[1, 0] = False
        weights, sweeps = bisect_all(G, C, allowed, kappa, 1e-8, np.full(3, 1e-24), warm, False, 10_000)
        for i in range(3):
            c = np.where(allowed[i], C[i], 0.0)
            kept = np.where(np.outer(allowed[i], allowed[i]), G, scale**2 * np.eye(7))
            expected = reference(kept, c, kappa, 0.0, 0.0)[0]
            np.testing.assert_allclose(weights[i] * scale, expected * scale, atol=1e-6)
            assert np.abs(weights[i]).sum() <= kappa
        assert (sweeps > 27).all()  # one at least for every halving of the interval
        counts.append(sweeps.sum())
    assert counts[0] < 0.8 * counts[1]


def test_bisection_knows_a_cap_that_is_not_reached():
    G, C = gram(3)
    everywhere = np.ones((3, 7), np.bool_)
    weights, _ = bisect_all(G, C, everywhere, 1e3, 0.1, np.full(3, 1e-28), True, False, 10_000)
    np.testing.assert_allclose(weights, np.linalg.solve(G, C.T).T, atol=1e-8)
    C = np.array([[0.5, -0.25, 0.25, 0.0, 0.0, 0.0, 0.0]])
    weights, sweeps = bisect_all(np.eye(7), C, everywhere, 1.0, 0.1, np.zeros(1), True, False, 10_000)
    assert (weights == C).all() and sweeps[0] == 2


def test_literal_bisection_halves_from_the_length_of_the_correlations():
    G, C = np.eye(7), np.zeros((1, 7))
    C[0, :2] = 3.0, 4.0  # the first level is 5 / 2, at which (0.5, 1.5) has norm 2
    low, high = (0.0, 0.25), (1.75, 2.75)
    for kappa, eps, expected, count in [
        (1.0, 4.0, (0.5, 1.5), 2), (1.0, 2.0, low, 4), (1.0, 2.5, low, 4), (2.5, 2.0, high, 4)
    ]:  # fmt: skip
        weights, sweeps = bisect_all(G, C, np.ones((1, 7), np.bool_), kappa, eps, np.zeros(1), True, True, 100)
        np.testing.assert_allclose(weights[0, :2], expected, atol=1e-14)
        assert sweeps[0] == count
    weights, _ = bisect_all(G, C, np.ones((1, 7), np.bool_), 9.0, 4.0, np.zeros(1), True, True, 100)
    np.testing.assert_allclose(weights[0, :2], (0.5, 1.5), atol=1e-14)
