"""Screening on row problems of every kind of degeneracy: nothing that a solution needs is ever removed."""

import pytest
import torch
from row_cases import KINDS, case

from wellposed.convex import Homotopy, Projected, RowProblem, Schur, certified_zeros, objective
from wellposed.convex.solvers.homotopy import restricted

KAPPAS = (0.05, 0.3, 0.99, 3.0)
ROWS = 14


def early_points(problem: RowProblem) -> list[torch.Tensor]:
    """Feasible points from poor to good: zero, a few steps of the projected gradient, many."""
    looks = [Projected(max_steps=k, period=k, screen=False, polish=False) for k in (3, 30)]
    return [torch.zeros_like(problem.cross), *(look.solve(problem).weights for look in looks)]


def wrong_removals(problem: RowProblem) -> tuple[int, int]:
    """Counts entries that are marked and yet needed, and all that are marked.

    An entry is needed if the exact path uses it. Where solutions are not unique the path shows but one of them, so
    a row is also solved without its marked columns: its best objective must not rise.
    """
    exact = (Schur() if problem.free else Homotopy()).solve(problem)
    best, norms = objective(problem, exact.weights), problem.gram.diagonal().sqrt()
    slack = 1e-9 * problem.scale + exact.gap + 1e-13
    wrong = marked = 0
    for point in early_points(problem):
        zeros = certified_zeros(problem, point)
        share = exact.weights.abs() * norms > 1e-6 * problem.power.sqrt()[:, None] + 1e-12
        wrong += int((zeros & share).sum())
        marked += int(zeros.sum())
    for i in torch.nonzero(zeros.any(1))[:2, 0]:
        kept = restricted(problem.chosen(i[None]), torch.nonzero(~zeros[i])[:, 0])
        left = (Schur() if kept.free else Homotopy()).solve(kept)
        wrong += int(objective(kept, left.weights)[0] > best[i] + slack[i])
    return wrong, marked


def campaign(draws: int) -> tuple[int, int, int]:
    """Runs over kinds, caps, bounds and ridges; returns rows, wrong removals and all removals."""
    rows = wrong = marked = 0
    for kind in KINDS:
        for draw in range(draws):
            for k, kappa in enumerate(KAPPAS):
                data = case(kind, 100 * draw + k, m=24 + draw % 3 * 20, rows=ROWS)
                capped = 8 if draw % 3 == 1 and kind != "masked" else None
                problem = data.problem(kappa, capped, ridge=0.5 * (draw % 2))
                found = wrong_removals(problem)
                rows, wrong, marked = rows + problem.rows, wrong + found[0], marked + found[1]
    return rows, wrong, marked


def test_no_wrong_removal_in_a_thousand_degenerate_rows():
    rows, wrong, marked = campaign(2)
    assert rows >= 1000 and wrong == 0 and marked > 0.05 * rows * 12 * 3


@pytest.mark.slow
def test_no_wrong_removal_in_ten_thousand_degenerate_rows():
    rows, wrong, marked = campaign(20)
    assert rows >= 10_000 and wrong == 0 and marked > 0.05 * rows * 12 * 3


@pytest.mark.parametrize("kind", KINDS)
def test_screened_and_unscreened_solutions_are_equal(kind):
    for seed, kappa in enumerate((0.3, 0.99)):
        problem = case(kind, seed, rows=ROWS).problem(kappa)
        with_it, without = (
            Projected(screen=choice, polish=False, tol=1e-9, max_steps=2000).solve(problem)
            for choice in (True, False)
        )
        values = [objective(problem, found.weights) for found in (with_it, without)]
        allowed = 1e-9 * problem.scale + 1e-12 + with_it.gap + without.gap
        assert ((values[0] - values[1]).abs() <= allowed).all()
        if kind in ("plain", "scales", "bias"):  # where the solution is unique
            assert torch.allclose(with_it.weights, without.weights, atol=2e-4)
