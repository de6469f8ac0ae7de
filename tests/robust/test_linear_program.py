"""Bounds of linear programs hold whatever the solver returns."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import linprog

from wellposed.errors import InputError
from wellposed.robust.linear_programs import LinearProgram


def problem(seed, rows=12, columns=20):
    """A feasible program with equations, one-sided and two-sided rows."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < 0.7)
    inside = rng.uniform(-0.5, 0.5, columns)
    value = matrix @ inside
    lower, upper = value - rng.random(rows), value + rng.random(rows)
    lower[::3], upper[1::3] = -np.inf, np.inf
    lower[2], upper[2] = value[2], value[2]
    return LinearProgram(matrix, lower, upper, -np.ones(columns), np.ones(columns)), rng


def reference(program, objective):
    """The same by scipy."""
    high, low = np.isfinite(program.row_upper), np.isfinite(program.row_lower)
    rows = np.vstack([program.matrix[high], -program.matrix[low]])
    sides = np.concatenate([program.row_upper[high], -program.row_lower[low]])
    ends = np.stack([program.lower, program.upper], axis=1)
    return -linprog(-objective, rows, sides, bounds=ends).fun


@pytest.mark.parametrize("seed", range(5))
def test_optimum_agrees_with_scipy_for_many_objectives(seed):
    program, rng = problem(seed)
    for _ in range(6):
        objective = rng.standard_normal(20)
        found, exact = program.maximum(objective), reference(program, objective)
        assert found.bound == pytest.approx(exact, abs=1e-7)
        assert found.value == pytest.approx(exact, abs=1e-7)
        assert found.point @ objective == pytest.approx(exact, abs=1e-6)
        slack = program.matrix @ found.point
        assert (slack <= program.row_upper + 1e-6).all() and (slack >= program.row_lower - 1e-6).all()


def exact_bound(program, objective, duals):
    """The bound in rational numbers."""
    total = Fraction(0)
    for y, low, high in zip(duals, program.row_lower, program.row_upper, strict=True):
        total += Fraction(y) * Fraction(high if y > 0 else low) if y else 0
    for j, cost in enumerate(objective):
        reduced = Fraction(cost) - sum(
            Fraction(y) * Fraction(a) for y, a in zip(duals, program.matrix[:, j], strict=True)
        )
        total += reduced * Fraction(program.upper[j] if reduced > 0 else program.lower[j])
    return total


@pytest.mark.parametrize("seed", range(4))
def test_bound_is_no_smaller_than_in_rational_arithmetic(seed):
    program, rng = problem(seed, 7, 9)
    objective = rng.standard_normal(9)
    optimum = program.maximum(objective)
    others = [program.allowed(10.0**k * rng.standard_normal(7)) for k in range(-3, 9)]
    for duals in (optimum.duals, *others):
        exact, found = exact_bound(program, objective, duals), program.bound(objective, duals)
        assert Fraction(found) >= exact
        assert found - float(exact) <= 1e-11 * (1 + np.abs(duals).sum())


def test_any_duals_bound_all_feasible_points():
    program, rng = problem(3)
    objective = rng.standard_normal(20)
    optimum = program.maximum(objective)
    for _ in range(20):
        duals = program.allowed(optimum.duals + rng.standard_normal(12) * 0.3)
        assert program.bound(objective, duals) >= optimum.value - 1e-9
    crooked = optimum.duals.copy()
    crooked[0] = -5.0  # asks for the infinite lower side of row 0
    assert np.isfinite(program.bound(objective, program.allowed(crooked)))


def test_loose_solver_tolerance_does_not_make_the_bound_smaller():
    program, rng = problem(1)
    objective = rng.standard_normal(20)
    exact = reference(program, objective)
    for name in ("primal_feasibility_tolerance", "dual_feasibility_tolerance"):
        program._solver.setOptionValue(name, 1e-2)
    found = program.maximum(objective)
    assert exact - 1e-9 <= found.bound <= exact + 1.0


def test_out_of_time_still_bounds():
    program, rng = problem(2)
    objective = rng.standard_normal(20)
    found = program.maximum(objective, seconds=0.0)
    assert reference(program, objective) - 1e-9 <= found.bound <= np.abs(objective).sum() + 1e-9


def test_further_objectives_start_from_the_last_basis():
    program, rng = problem(0, 60, 90)
    objective = rng.standard_normal(90)
    program.maximum(objective)
    first = program._solver.getInfo().simplex_iteration_count
    program.maximum(objective + 1e-3 * rng.standard_normal(90))
    assert program._solver.getInfo().simplex_iteration_count < first / 3


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lower": np.full(2, -np.inf)}, "finite bounds"),
        ({"lower": np.full(2, 3.0)}, "lower <= upper"),
        ({"row_lower": np.zeros(2)}, "1 sides of rows"),
    ],
)
def test_bad_programs_are_refused(change, complaint):
    given = {"matrix": np.ones((1, 2)), "row_lower": np.zeros(1), "row_upper": np.ones(1)}
    given |= {"lower": np.zeros(2), "upper": np.ones(2)}
    with pytest.raises(InputError, match=complaint):
        LinearProgram(**given | change)


def test_bad_objective_is_refused():
    program, _ = problem(0)
    with pytest.raises(InputError, match="20 finite entries"):
        program.maximum(np.full(20, np.nan))
