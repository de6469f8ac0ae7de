"""The gap bounds the distance to the optimum, and screening removes nothing that is needed."""

import pytest
import torch
from row_cases import KINDS, case

from wellposed.convex import (
    Clarabel,
    Design,
    Homotopy,
    Projected,
    Schur,
    certified_zeros,
    duality_gap,
    objective,
    row_problem,
)
from wellposed.convex.problem import feasible, gradient
from wellposed.convex.solvers.homotopy import correlation_bounds


def test_gradient_and_objective_agree_with_autograd_and_the_data():
    data = case("plain", 0)
    problem = data.problem(1.0, ridge=0.7, lasso=0.2)
    w = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    direct = (data.M @ w.mT - data.z).square().sum(0) / 2 + 0.35 * w.square().sum(1) + 0.2 * w.abs().sum(1)
    assert torch.allclose(objective(problem, w), direct)
    (slope,) = torch.autograd.grad(direct.sum(), w)
    smooth = slope - 0.2 * w.detach().sign()
    for exact in (False, True):
        assert torch.allclose(gradient(problem, w.detach(), exact=exact), smooth)


@pytest.mark.parametrize("options", [{}, {"capped": 8}, {"capped": 8, "lasso": 0.6}, {"lasso": 0.6, "ridge": 0.5}])
@pytest.mark.parametrize("kind", KINDS)
def test_gap_bounds_the_distance_to_the_optimum_anywhere(kind, options):
    problem = case(kind, 5).problem(0.8, **options)
    best = Clarabel().solve(problem)
    optimum = objective(problem, best.weights)
    assert (best.gap <= 1e-8 * problem.scale + 1e-18).all()
    for size in (0.0, 1e-3, 1.0):
        near = feasible(problem, best.weights + size * torch.randn_like(best.weights))
        excess = objective(problem, near) - optimum
        assert (duality_gap(problem, near) >= excess - 1e-9 * problem.scale).all()


@pytest.mark.parametrize("kind", ["plain", "bias", "masked"])
def test_gap_is_what_b_alone_still_costs_where_a_is_optimal(kind):
    problem = case(kind, 2).problem(0.8, capped=8)
    best = Schur().solve(problem).weights
    moved = best.clone()
    moved[:, 8:] += 0.1 * torch.randn(6, 4, dtype=torch.float64)
    moved = feasible(problem, moved)
    excess = objective(problem, moved) - objective(problem, best)
    assert torch.allclose(duality_gap(problem, moved), excess, rtol=1e-6, atol=1e-9)


def test_gap_is_infinite_outside_the_ball():
    problem = case("plain", 0).problem(0.5)
    inside, outside = torch.full((2, 6, 12), 0.5 / 12, dtype=torch.float64)
    assert duality_gap(problem, inside).isfinite().all()
    assert duality_gap(problem, 1.01 * outside).isinf().all()


def test_feasible_keeps_what_is_inside_bit_for_bit():
    problem = case("masked", 0).problem(0.5)
    w = 0.01 * torch.randn(6, 12, dtype=torch.float64) * problem.support
    assert torch.equal(feasible(problem, w), w)
    assert (feasible(problem, 100 * w).abs().sum(1) <= 0.5).all()


def tiny_problems(seed: int, rows: int, ridge: float):
    """Many rows on four columns, one of them often a copy."""
    generator = torch.Generator().manual_seed(seed)
    M = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    if seed % 3 == 0:
        M[:, 1] = M[:, 0]
    z = torch.randn(5, rows, generator=generator, dtype=torch.float64)
    return row_problem(Design.of(M), z, kappa=0.2 + 0.4 * (seed % 5), capped=4, ridge=ridge)


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_screening_removes_no_entry_of_the_solution_in_ten_thousand_problems(ridge):
    removed = total = 0
    for seed in range(50):
        problem = tiny_problems(seed, 200, ridge)
        exact = Homotopy().solve(problem)
        assert exact.relative_gap.max() < 1e-9
        for steps in (1, 5, 40):
            early = Projected(max_steps=steps, period=steps, screen=False, polish=False).solve(problem).weights
            zeros = certified_zeros(problem, early)
            lower, upper = correlation_bounds(problem, early)
            slope = gradient(problem, exact.weights).abs()
            assert exact.weights[zeros].abs().max() <= 1e-9 if zeros.any() else True
            assert (slope <= upper + 1e-9).all() and (slope >= lower - 1e-9).all()
            removed, total = removed + int(zeros.sum()), total + zeros.numel()
    assert removed > 0.1 * total


@pytest.mark.parametrize("options", [{"capped": 8}, {"capped": 8, "lasso": 2.0}, {"capped": 0, "lasso": 2.0}])
def test_screening_with_columns_that_are_not_capped(options):
    marked = 0
    for seed in range(10):
        problem = case("plain", seed, m=60).problem(0.5 if options["capped"] else torch.inf, **options)
        best = Clarabel().solve(problem).weights
        for noise in (1e-2, 1e-5):
            start = feasible(problem, best + noise * torch.randn_like(best))
            zeros = certified_zeros(problem, start)
            assert (best[zeros].abs() < 1e-6).all()
            marked += int(zeros.sum())
    assert marked > 0


def test_nothing_is_certified_where_the_cap_is_inactive():
    problem = case("plain", 0).problem(1e3)
    assert not certified_zeros(problem, Homotopy().solve(problem).weights).any()


def test_screening_inside_the_solver_changes_nothing_and_drops_columns():
    problem = case("plain", 0, m=100, d=60).problem(0.5)
    with_it, without = (
        Projected(screen=choice, polish=False, tol=1e-11).solve(problem) for choice in (True, False)
    )
    assert torch.allclose(with_it.weights, without.weights, atol=1e-6)
    assert with_it.relative_gap.max() <= 1e-11
