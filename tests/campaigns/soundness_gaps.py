"""Every duality gap against the conic oracle: no point is further from the best one than its gap says.

The misfits of a solver's point and of the best point known (Clarabel's, or that of any solver that satisfies cap
and support exactly) are computed in fractions from the data. What a gap may fall short by is the rounding that
`rounding_of_gap` states, and nothing else; the group lasso, whose norms have roots, is compared at 1e-12.
"""

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor
from wellposed_lab.experiments.sparsify.row_solvers import Bisection

from tests.convex.row_cases import KINDS, Case, case
from wellposed.convex import (
    ROW_SOLVERS,
    Clarabel,
    GroupLasso,
    Homotopy,
    Projected,
    RowFit,
    RowProblem,
    RowSolver,
    Schur,
    duality_gap,
    feasible,
)
from wellposed.convex.problem import rounding_of_gap
from wellposed.errors import InputError, MissingExtraError, require

HURRIED: dict[str, RowSolver] = {
    "projected, 3 steps": Projected(max_steps=3, period=3),
    "projected, 40 steps": Projected(max_steps=40, period=10, screen=False, polish=False),
    "projected after elimination": Schur(Projected(max_steps=5, period=5)),
    "bisection": Schur(Bisection()),
    "bisection, coarse": Bisection(eps=0.3),
    "bisection-literal": Schur(Bisection(eps=0.01, literal=True)),
    "path, refined once": Schur(Homotopy(), refine=1),
    "conic, coarse": Clarabel(tol=1e-3),
}
KAPPAS = (0.1, 0.7, 3.0, 1e2)
SHAPES = ("row", "state", "no cap")


def drawn(seed: int, number: int) -> tuple[str, Case, RowProblem]:
    """Draws the problem of a number: its kind, its data, and the problem itself."""
    draw = np.random.default_rng((seed, number, 1))
    kind, shape = KINDS[number % len(KINDS)], SHAPES[number // len(KINDS) % len(SHAPES)]
    data = case(kind, int(draw.integers(2**31)), d=int(draw.integers(10, 14)), rows=4)
    if draw.random() < 0.25:  # units far from one
        scale = 10.0 ** float(draw.choice([-6, 6]))
        data = Case(data.M * scale, data.z * 10.0 ** float(draw.choice([-6, 0, 6])), data.support)
    width, kappa = data.M.shape[1], float(draw.choice(KAPPAS))
    size = float(data.M.square().sum(0).mean())
    lasso = float(draw.choice([0.0, 0.02, 0.3])) * math.sqrt(size * float(data.z.square().sum(0).mean()))
    ridge = float(draw.choice([0.0, 0.1])) * size
    if shape == "no cap":
        return (
            f"{kind}, {shape}",
            data,
            data.problem(math.inf, capped=0, lasso=lasso or math.sqrt(size), ridge=ridge),
        )
    capped = width if shape == "row" else int(draw.integers(1, width))
    return f"{kind}, {shape}", data, data.problem(kappa, capped=capped, lasso=lasso, ridge=ridge)


class Judge:
    """Misfits of one problem in fractions."""

    def __init__(self, data: Case, problem: RowProblem) -> None:
        self.problem = problem
        self.M = [[Fraction(entry) for entry in row] for row in data.M.tolist()]
        self.z = [[Fraction(entry) for entry in column] for column in data.z.mT.tolist()]
        ridge = torch.zeros(problem.columns, dtype=torch.float64) if problem.ridge is None else problem.ridge
        self.ridge = [Fraction(entry) for entry in ridge.tolist()]

    def value(self, row: int, weights: Tensor) -> Fraction:
        """``1/2 |Mw - z|^2 + 1/2 sum_j r_j w_j^2 + lasso |w|_1``."""
        w = [Fraction(entry) for entry in weights.tolist()]
        used = [j for j, entry in enumerate(w) if entry]
        misfit = sum((sum((m[j] * w[j] for j in used), -t)) ** 2 for m, t in zip(self.M, self.z[row], strict=True))
        smooth = misfit + sum(self.ridge[j] * w[j] ** 2 for j in used)
        return Fraction(smooth) / 2 + Fraction(self.problem.lasso) * sum(abs(w[j]) for j in used)

    def allowed(self, row: int, weights: Tensor) -> bool:
        """Whether a row satisfies cap and support without rounding."""
        problem = self.problem
        if problem.support is not None and bool(weights[~problem.support[row]].any()):
            return False
        capped = sum((abs(Fraction(entry)) for entry in weights[: problem.capped].tolist()), Fraction(0))
        return math.isinf(problem.kappa) or capped <= Fraction(problem.kappa)


def stated(data: Case, problem: RowProblem) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights and gaps of every solver that takes a problem, and of points that are far from the best one."""
    answers = {}
    solvers = {name: ROW_SOLVERS.get(name) for name in ROW_SOLVERS.factories} | HURRIED
    for name, solver in solvers.items():
        if solver.why_not(problem) is None:
            try:
                answer = solver.solve(problem)
            except (InputError, MissingExtraError):
                continue
            answers[name] = (answer.weights, answer.gap)
    best = answers["conic"][0]
    for size in (1e-6, 1e-2, 1.0):
        near = feasible(problem, best + size * best.abs().amax(1, keepdim=True) * torch.randn_like(best))
        answers[f"any point, {size:g} away"] = (near, duality_gap(problem, near))
        answers[f"any point, from the data, {size:g} away"] = (near, duality_gap(problem, near, exact=True))
    if problem.support is None and problem.capped:
        answers |= _whole_fit(data, problem)
    return answers


def _whole_fit(data: Case, problem: RowProblem) -> dict[str, tuple[Tensor, Tensor]]:
    """The fit of all rows as `fit_states` makes it."""
    bound = "row" if problem.capped == problem.columns else "state"
    ridge = float(problem.ridge[0]) if problem.ridge is not None else 0.0
    if bound == "row" or problem.free:
        fit = RowFit(kappa=problem.kappa, bound=bound, ridge=ridge, lasso=problem.lasso, chunk=2)
        cut = problem.capped if bound == "state" else problem.columns - 1
        fitted = fit.solve(data.M[:, :cut], data.M[:, cut:], data.z)
        return {"all rows": (fitted.weights, fitted.gap)}
    return {}


def examine(seed: int, number: int) -> tuple[Counter, list[dict[str, Any]]]:
    """Examines one problem; returns how many gaps of which kind were checked, and those that are too small."""
    kind, data, problem = drawn(seed, number)
    torch.manual_seed(number)
    judge, counts, wrong = Judge(data, problem), Counter(), []
    answers = stated(data, problem)
    values = {
        (name, i): judge.value(i, weights[i])
        for name, (weights, _) in answers.items()
        for i in range(problem.rows)
        if judge.allowed(i, weights[i])
    }
    for i in range(problem.rows):
        least = min(value for (_, row), value in values.items() if row == i)
        for name, (weights, gaps) in answers.items():
            counts[f"gap, {name.partition(', 1')[0]}"] += 1
            gap, slack = float(gaps[i]), float(rounding_of_gap(problem, weights)[i])
            if math.isinf(gap):
                continue
            value = values[name, i] if (name, i) in values else judge.value(i, weights[i])
            if not value - least <= Fraction(gap) + Fraction(slack):
                note = {"kind": f"gap, {name}", "problem": kind, "number": number, "row": i, "gap": gap}
                settings = {"lasso": problem.lasso, "kappa": problem.kappa, "capped": problem.capped}
                wrong.append({**note, "is": float(value - least), "slack": slack, **settings})
    if number % 10 == 0:
        grouped(data, problem, counts, wrong, number)
    return counts, wrong


def grouped(data: Case, problem: RowProblem, counts: Counter, wrong: list[dict[str, Any]], number: int) -> None:
    """The group lasso, whose rows are one problem, against a model in CVXPY."""
    if problem.lasso or math.isinf(problem.kappa):
        return
    try:
        cvxpy = require("cvxpy", "convex")
        W = cvxpy.Variable((problem.rows, problem.columns))
    except (MissingExtraError, AttributeError):
        return
    weight = 0.1 * float(problem.cross.norm(dim=0).max())
    ridge = problem.ridge.sqrt().numpy() if problem.ridge is not None else np.zeros(problem.columns)
    cost = cvxpy.sum_squares(data.M.numpy() @ W.T - data.z.numpy()) / 2
    cost += cvxpy.sum_squares(cvxpy.multiply(np.tile(ridge, (problem.rows, 1)), W)) / 2
    rules = [cvxpy.norm1(W[i, : problem.capped]) <= problem.kappa for i in range(problem.rows)]
    if problem.support is not None:
        rules.append(cvxpy.multiply((~problem.support).numpy().astype(float), W) == 0)
    cvxpy.Problem(cvxpy.Minimize(cost + weight * cvxpy.sum(cvxpy.norm(W, 2, axis=0))), rules).solve(
        solver="CLARABEL"
    )
    best = feasible(problem, torch.tensor(np.asarray(W.value)))
    judge = Judge(data, problem)

    def total(weights: Tensor) -> float:
        misfit = sum(judge.value(i, weights[i]) for i in range(problem.rows))
        return float(misfit) + weight * float(weights.norm(dim=0).sum())

    for steps in (50, 20_000):
        solution = GroupLasso(weight, max_steps=steps).solve(problem)
        counts["gap, group lasso"] += 1
        excess, scale = total(solution.weights) - total(best), float(problem.scale.sum())
        if not excess <= float(solution.gap.sum()) + 1e-12 * scale:
            note = {"kind": "gap, group lasso", "number": number, "gap": float(solution.gap.sum())}
            wrong.append({**note, "is": excess, "scale": scale})
