"""A relative gap of 1e-9 on request, judged from the data, where the Gram matrix alone has too few digits."""

import mpmath
import pytest
import torch
from torch import Tensor

from wellposed.convex import ROW_SOLVERS, Design, RowProblem, Schur, capped_norm, duality_gap, row_problem
from wellposed.errors import InputError

WIDE = torch.float64


def nearly_dependent(seed: int = 0, between: float = 1e-5) -> RowProblem:
    """Inputs of which one half nearly follows from the other, as neighbouring pixels do."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=WIDE)

    U = normal(200, 40)
    U[:, 20:] = U[:, :20] @ normal(20, 20) + between * normal(200, 20)
    X = (U @ normal(40, 24)).relu() + 1e-3 * normal(200, 24)
    return row_problem(Design.of(X, U), 3 * X @ normal(24, 10), kappa=0.5, capped=24)


def from_data(problem: RowProblem, weights: Tensor) -> float:
    return float((duality_gap(problem, weights, exact=True) / problem.scale).max())


@pytest.mark.parametrize("seed", range(4))
def test_the_asked_gap_is_reached_and_is_that_of_the_data(seed):
    problem = nearly_dependent(seed)
    plain, refined = Schur().solve(problem), Schur(tol=1e-9).solve(problem)
    assert from_data(problem, plain.weights) > 1e-9  # otherwise this tests nothing
    assert refined.relative_gap.max() <= 1e-9 and from_data(problem, refined.weights) <= 1e-9
    assert (capped_norm(problem, refined.weights) <= 0.5).all()


def test_passes_end_when_the_gap_is_reached():
    problem = nearly_dependent()
    tight, loose = Schur(tol=1e-9).solve(problem), Schur(tol=1e-2).solve(problem)
    assert torch.equal(loose.weights, Schur().solve(problem).weights)
    assert (loose.steps <= tight.steps).all() and (loose.steps < tight.steps).any()


def test_gap_agrees_with_arithmetic_of_fifty_digits():
    """The gap of one row, with b moved to its best value, in arithmetic where nothing cancels."""
    problem = nearly_dependent()
    found = Schur(tol=1e-9).solve(problem)
    assert problem.design is not None and problem.targets is not None and problem.ridge is not None
    (_, M), z, cut = next(problem.design.pieces()), problem.targets, problem.capped
    with mpmath.workdps(50):
        M, z = mpmath.matrix(M.tolist()), mpmath.matrix(z[:, :1].tolist())
        w, ridge = mpmath.matrix(found.weights[:1].mT.tolist()), problem.ridge.tolist()
        G = M.T * M + mpmath.diag(ridge)
        slope = G * w - M.T * z
        K, across = G[cut:, cut:], G[cut:, :cut]
        moved = mpmath.lu_solve(K, slope[cut:, 0])
        excess = (slope[cut:, 0].T * moved)[0] / 2
        reduced = slope[:cut, 0] - across.T * moved
        gap = excess + (reduced.T * w[:cut, 0])[0] + problem.kappa * max(abs(value) for value in reduced)
        relative = float(gap / (z.T * z)[0] * 2)
    assert relative <= 1e-9 and float(found.relative_gap[0]) == pytest.approx(relative, rel=0.2, abs=1e-13)


def test_refined_by_name_and_without_data():
    problem = nearly_dependent()
    assert ROW_SOLVERS.get("refined") == Schur(tol=1e-9)
    bare = RowProblem(problem.gram, problem.cross, problem.power, 0.5, 24)
    with pytest.raises(InputError, match="the data"):
        Schur(tol=1e-9).solve(bare)
