"""The compiled path on tiny rows, against a path of a few lines and the conditions."""

import math

import numpy as np
import pytest
from row_cases import gram, is_optimal, reference

from wellposed.convex.solvers.path import CAPPED, CLOSED, FLOOR, LONG, follow_all

ALL = np.ones((1, 7), np.bool_)


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
