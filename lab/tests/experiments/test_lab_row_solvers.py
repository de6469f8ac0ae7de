"""Algorithm 1 of 003: its coordinate descent on tiny rows, and its rows against the conic oracle."""

import numpy as np
import pytest
import torch
from wellposed_lab.experiments.sparsify.row_solvers import Bisection, bisect_all, descend

from tests.convex.row_cases import agrees, case, gram, is_optimal, reference
from wellposed.convex import Clarabel, Schur, capped_norm
from wellposed.errors import InputError


@pytest.mark.parametrize("kind", ["plain", "duplicates", "masked"])
def test_bisection_returns_a_feasible_point_near_the_optimum(kind):
    problem = case(kind, 1).problem(0.7)
    agrees(Bisection(), problem, Clarabel().solve(problem), 1e-6)


def test_bisection_returns_the_end_that_needs_no_projection():
    problem = case("plain", 0).problem(0.7)
    found = Bisection(eps=0.3).solve(problem)
    assert (capped_norm(problem, found.weights) < 0.7 * (1 - 1e-6)).all()


def test_warm_start_saves_sweeps():
    problem = case("plain", 1, m=60, d=40).problem(0.7)
    warm, cold = (Bisection(warm_start=choice).solve(problem).steps.sum() for choice in (True, False))
    assert warm < cold


def test_literal_algorithm_violates_the_cap_and_says_so():
    problem = case("plain", 0).problem(0.7)
    found = Bisection(eps=0.3, literal=True).solve(problem)
    outside = capped_norm(problem, found.weights) > problem.kappa
    assert outside.any()
    assert torch.equal(found.gap.isinf(), outside)


def test_inactive_cap_gives_least_squares():
    data = case("plain", 0)
    exact = torch.linalg.lstsq(data.M, data.z).solution.mT
    assert torch.allclose(Bisection().solve(data.problem(1e3)).weights, exact, atol=1e-6)


def test_free_columns_are_refused_and_may_be_eliminated():
    with pytest.raises(InputError, match="whole row"):
        Bisection().solve(case("plain", 0).problem(0.5, capped=8))
    plain = case("plain", 0).problem(0.5, capped=8)
    assert Schur(Bisection()).solve(plain).relative_gap.max() < 1e-5


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
