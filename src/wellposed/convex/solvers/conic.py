"""Interior-point solvers: the reference for the others, and the way to objectives of one's own."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.convex.problem import RowProblem
from wellposed.convex.solvers.base import RowSolution, RowSolver, finished
from wellposed.errors import InputError, require

EXTRA = "convex"


@dataclass(frozen=True)
class Clarabel(RowSolver):
    """Solves the quadratic program on the Gram matrix by Clarabel's interior-point method.

    minimise 1/2 w'Gw - c'w + lasso 1't subject to -t <= w <= t, sum of the capped t <= kappa. Takes every problem;
    slow, and independent of the other solvers.

    Args:
        tol: Clarabel's tolerance on gap and feasibility.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> problem = row_problem(Design.of(torch.eye(2)), torch.tensor([[3.0], [1.0]]), kappa=1.0, capped=2)
        >>> Clarabel().solve(problem).weights.round(decimals=6)
        tensor([[1., 0.]], dtype=torch.float64)
    """

    tol: float = 1e-11

    def solve(self, problem: RowProblem) -> RowSolution:
        clarabel, sparse = require("clarabel", EXTRA), require("scipy.sparse", EXTRA)
        rows = [_one_row(problem, i, self.tol, clarabel, sparse) for i in range(problem.rows)]
        weights = torch.from_numpy(np.stack([row for row, _ in rows])).to(problem.cross)
        return finished(problem, weights, torch.tensor([steps for _, steps in rows]).to(weights.device))


def _one_row(
    problem: RowProblem, i: int, tol: float, clarabel: ModuleType, sparse: ModuleType
) -> tuple[np.ndarray, int]:
    """Solves one row in units in which |z| = 1; returns the weights and the iterations."""
    columns, weights = _columns(problem, i), np.zeros(problem.columns)
    if len(columns) == 0 or not bool((problem.cross[i] != 0).any()):
        return weights, 0
    size = math.sqrt(float(problem.power[i])) or 1.0
    solution = _program(problem, i, columns, size, tol, clarabel, sparse)
    weights[columns.cpu().numpy()] = np.asarray(solution.x)[: len(columns)] * size
    return weights, int(solution.iterations)


def _program(
    problem: RowProblem, i: int, columns: Tensor, size: float, tol: float, clarabel: ModuleType, sparse: ModuleType
) -> Any:
    """Solves the quadratic program of one row on some columns, with z divided by `size`."""
    gram = problem.gram[columns][:, columns].cpu().numpy()
    cross, k = problem.cross[i, columns].cpu().numpy() / size, len(columns)
    P = sparse.block_diag([sparse.csc_matrix(np.triu(gram)), sparse.csc_matrix((k, k))], format="csc")
    linear = np.concatenate([-cross, np.full(k, problem.lasso / size)])
    one = sparse.identity(k, format="csc")
    blocks = [sparse.hstack([one, -one]), sparse.hstack([-one, -one])]
    right = [np.zeros(2 * k)]
    counted = (columns < problem.capped).cpu().numpy().astype(float)
    if problem.capped:
        blocks.append(sparse.csc_matrix(np.concatenate([np.zeros(k), counted])[None]))
        right.append(np.array([problem.kappa / size]))
    A, b = sparse.vstack(blocks, format="csc"), np.concatenate(right)
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = tol
    settings.max_iter = 500
    return clarabel.DefaultSolver(P, linear, A, b, [clarabel.NonnegativeConeT(len(b))], settings).solve()


def interior_multipliers(problem: RowProblem) -> tuple[Tensor, Tensor]:  # (r, d) each
    """Computes mu_1 of a <= t and mu_2 of -a <= t (002 eq. 4) as an interior-point method leaves them: positive.

    At an exact optimum both are positive only where a = 0; an iterate is off by a little, and then both are
    positive everywhere. Columns that a row may not use get NaN.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> problem = row_problem(Design.of(torch.eye(2)), torch.tensor([[3.0], [1.0]]), kappa=1.0, capped=2)
        >>> all(bool((mu > 0).all()) for mu in interior_multipliers(problem))
        True
    """
    clarabel, sparse = require("clarabel", EXTRA), require("scipy.sparse", EXTRA)
    upper, lower = torch.full_like(problem.cross, math.nan), torch.full_like(problem.cross, math.nan)
    for i in range(problem.rows):
        columns, size = _columns(problem, i), math.sqrt(float(problem.power[i])) or 1.0
        if len(columns):
            solution = _program(problem, i, columns, size, 1e-8, clarabel, sparse)
            multipliers = torch.tensor(np.asarray(solution.z)).to(upper) * size
            upper[i, columns], lower[i, columns] = (
                multipliers[: len(columns)],
                multipliers[len(columns) : 2 * len(columns)],
            )
    return upper, lower


def _columns(problem: RowProblem, i: int) -> Tensor:
    """Lists the columns that a row may use."""
    used = problem.gram.diagonal() > 0
    if problem.support is not None:
        used = used & problem.support[i]
    return torch.nonzero(used)[:, 0]


Penalty = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Cvxpy(RowSolver):
    """Solves 003 eq. (3.4) with an objective l(a, b) of one's own, modelled in CVXPY.

    minimise l(a, b) + 1/2 |Mw - z|^2 (or, with `equality`, l(a, b) subject to Mw = z, eq. 3.2) under the cap, the
    lasso and the ridge of the problem. With an objective of one's own the gap is the difference between primal and
    dual value that the solver reports, not one that is computed here.

    Args:
        penalty: takes a and b, CVXPY expressions of one row, and returns a convex expression.
        equality: asks for the states exactly.
        solver: a solver that CVXPY knows, such as "CLARABEL" or "MOSEK".
        options: passed to it.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> problem = row_problem(Design.of(torch.eye(2)), torch.tensor([[3.0], [1.0]]), kappa=1.0, capped=2)
        >>> Cvxpy().solve(problem).weights.round(decimals=5)
        tensor([[1., 0.]], dtype=torch.float64)
    """

    penalty: Penalty | None = None
    equality: bool = False
    solver: str = "CLARABEL"
    options: tuple[tuple[str, Any], ...] = ()

    def why_not(self, problem: RowProblem) -> str | None:
        if problem.design is None:
            return "needs the data of the problem, which it no longer has; use Clarabel()"
        return None

    def solve(self, problem: RowProblem) -> RowSolution:
        self.accept(problem)
        cvxpy = require("cvxpy", EXTRA)
        assert problem.design is not None and problem.targets is not None
        M = torch.cat([piece for _, piece in problem.design.pieces()]).cpu().numpy()
        rows = [self._one_row(problem, i, M, cvxpy) for i in range(problem.rows)]
        weights = torch.from_numpy(np.stack([row for row, _ in rows])).to(problem.cross)
        solution = finished(problem, weights)
        if self.penalty is None and not self.equality:
            return solution
        gap = torch.tensor([gap for _, gap in rows]).to(weights)
        return RowSolution(solution.weights, gap, problem.scale, solution.steps)

    def _one_row(self, problem: RowProblem, i: int, M: np.ndarray, cvxpy: ModuleType) -> tuple[np.ndarray, float]:
        z = problem.column(i).cpu().numpy()
        w, cut = cvxpy.Variable(problem.columns), problem.capped
        rules = [cvxpy.norm1(w[:cut]) <= problem.kappa] if cut else []
        if problem.support is not None:
            barred = torch.nonzero(~problem.support[i])[:, 0].cpu().numpy()
            rules += [w[barred] == 0] if len(barred) else []
        misfit = cvxpy.sum_squares(M @ w - z) / 2
        cost = self.penalty(w[:cut], w[cut:]) if self.penalty is not None else 0
        if problem.lasso:
            cost = cost + problem.lasso * cvxpy.norm1(w)
        if problem.ridge is not None and bool(problem.ridge.any()):
            cost = cost + cvxpy.sum_squares(cvxpy.multiply(problem.ridge.sqrt().cpu().numpy(), w)) / 2
        rules, cost = ([*rules, M @ w == z], cost) if self.equality else (rules, cost + misfit)
        model = cvxpy.Problem(cvxpy.Minimize(cost), rules)
        try:
            model.solve(solver=self.solver, **dict(self.options))
        except cvxpy.error.SolverError as error:
            raise InputError(
                f"{self.solver} gave up on row {i} (data of very different sizes, as a rule): bring states and "
                "targets to similar scales, pass another solver, or use Automatic()"
            ) from error
        if w.value is None:
            raise InputError(
                f"row {i} has no solution ({model.status}): the states cannot be met under this cap; relax kappa, "
                "rescale the states, or drop equality"
            )
        extra = getattr(model.solver_stats, "extra_stats", None)
        primal, dual = getattr(extra, "obj_val", None), getattr(extra, "obj_val_dual", None)
        gap = math.nan if primal is None or dual is None else abs(float(primal) - float(dual))  # if it is reported
        return np.asarray(w.value, dtype=float), gap
