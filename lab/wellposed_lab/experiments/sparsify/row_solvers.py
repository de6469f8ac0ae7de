"""Algorithm 1 of 003: bisection on lambda, a LASSO problem at every step, and how its steps grow with precision.

`Bisection` solves the inner problems by coordinate descent. `RateRun` solves them by the proximal gradient method,
as the text does, counts its steps, and compares Lemmas 3 and 4 with what happens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self

import numpy as np
import torch

from wellposed.convex.problem import RowProblem
from wellposed.convex.solvers.base import RowSolution, RowSolver, finished
from wellposed.errors import require
from wellposed.kernels.cpu.cache import njit_cached
from wellposed_lab.config import Scale
from wellposed_lab.engine.experiment import Figure, Suite
from wellposed_lab.engine.run import Context, Role, Run
from wellposed_lab.engine.store import Record, Result, Value
from wellposed_lab.report.findings import median_of


@dataclass(frozen=True)
class Bisection(RowSolver):
    """Halves an interval of lambda until the LASSO solution at its upper end nearly fills the ball.

    The default repairs Algorithm 1: it starts at |M'z|_inf, above which the solution is zero (003, Lemma 1), it
    measures the interval relative to that, and it returns the upper end, which satisfies the cap. The inner
    problems are solved by coordinate descent. For comparison with `Homotopy`, which is exact and faster.

    Args:
        eps: width at which the interval is small enough, relative to |M'z|_inf (`literal`: absolute).
        inner_tol: squared changes |M_j da_j|^2 of the last sweep of an inner problem, relative to |z|^2 / 2.
        warm_start: whether an inner problem starts from the last solution (003, Algorithm 2) or from zero.
        literal: Algorithm 1 as printed: starts at |M'z|_2, and returns the last lambda that was tried, whose
            solution may violate the cap; its gap is then infinite.
        max_sweeps: passes over the columns of one inner problem.

    Example:
        >>> from wellposed.convex import Design, row_problem
        >>> problem = row_problem(Design.of(torch.eye(2)), torch.tensor([[3.0], [1.0]]), kappa=1.0, capped=2)
        >>> Bisection().solve(problem).weights.round(decimals=6)
        tensor([[1., 0.]], dtype=torch.float64)
    """

    eps: float = 1e-9
    inner_tol: float = 1e-18
    warm_start: bool = True
    literal: bool = False
    max_sweeps: int = 10_000

    def why_not(self, problem: RowProblem) -> str | None:
        if problem.free or problem.lasso:
            return "bounds the whole row and takes no lasso; use Schur(Bisection()) where columns are not capped"
        return None

    def solve(self, problem: RowProblem) -> RowSolution:
        self.accept(problem)
        gram, cross = (np.ascontiguousarray(array.cpu().numpy()) for array in (problem.gram, problem.cross))
        allowed = np.ones(cross.shape, np.bool_) if problem.support is None else problem.support.cpu().numpy()
        scale = problem.scale.cpu().numpy() * self.inner_tol
        weights, steps = _compiled()(
            gram, cross, allowed, float(problem.kappa), self.eps, scale, self.warm_start, self.literal,
            self.max_sweeps,
        )  # fmt: skip
        rows = torch.from_numpy(weights).to(problem.cross)
        counts = torch.from_numpy(steps).to(rows.device)
        if not self.literal:
            return finished(problem, rows, counts)
        fair = finished(problem, rows, counts)
        outside = rows.abs().sum(1) > problem.kappa * (1 + 1e-12)
        return RowSolution(rows, torch.where(outside, torch.inf, fair.gap), problem.scale, counts)


@cache
def _compiled() -> Any:
    """Compiles `bisect_all` and what it calls, on first use."""
    require("numba", extra="convex")
    known_to_numba = require("numba.extending", extra="convex").register_jitable(error_model="numpy")
    for function in (descend, reset, copy, norm, bisect):
        known_to_numba(function)
    return njit_cached(nogil=True, error_model="numpy")(bisect_all)


def descend(G: Any, c0: Any, level: float, allowed: Any, target: float, limit: int, a: Any, c: Any) -> int:
    """Solves min 1/2 a'Ga - c0'a + level |a|_1 by coordinate descent, in place; returns the sweeps.

    `c` is c0 - Ga throughout. A sweep whose changes da have sum_j |M_j|^2 da_j^2 <= target is the last.
    """
    d = a.shape[0]
    for sweep in range(1, limit + 1):
        gain = 0.0
        for j in range(d):
            if not allowed[j] or not G[j, j] > 0:
                continue
            old, push = a[j], c[j] + G[j, j] * a[j]
            new = (max(push - level, 0.0) + min(push + level, 0.0)) / G[j, j]
            if new == old:
                continue
            a[j] = new
            row, change = G[j], new - old
            for q in range(d):
                c[q] -= change * row[q]
            gain += G[j, j] * change * change
        if gain <= target:
            return sweep
    return limit


def reset(a: Any, c: Any, c0: Any) -> None:
    """Starts from zero."""
    for q in range(a.shape[0]):
        a[q], c[q] = 0.0, c0[q]


def copy(a: Any, to: Any) -> None:
    """Copies entries."""
    for q in range(a.shape[0]):
        to[q] = a[q]


def norm(a: Any) -> float:
    """Returns |a|_1."""
    total = 0.0
    for value in a:
        total += abs(value)
    return total


def bisect(
    G: Any, c0: Any, allowed: Any, kappa: float, eps: float, target: float, warm: bool, literal: bool,
    limit: int, best: Any,
) -> int:  # fmt: skip
    """Runs Algorithm 1 on one row; returns the sweeps of all inner problems."""
    d, low, high, square = c0.shape[0], 0.0, 0.0, 0.0
    for q in range(d):
        if allowed[q]:
            high, square = max(high, abs(c0[q])), square + c0[q] * c0[q]
    width = eps if literal else eps * high
    if literal:
        high = np.sqrt(square)
    a, c, total = np.zeros(d), c0.copy(), 0
    if not literal:  # the cap may be inactive, where assumption A1 fails
        total += descend(G, c0, 0.0, allowed, target, limit, a, c)
        if norm(a) <= kappa:
            copy(a, best)
            return total
        reset(a, c, c0)
    while high - low >= width and high > 0:
        level = (high + low) / 2
        if level in (high, low):
            break
        if not warm:
            reset(a, c, c0)
        total += descend(G, c0, level, allowed, target, limit, a, c)
        if norm(a) >= kappa:
            low = level
        else:
            high = level
        if literal or high == level:
            copy(a, best)
    return total


def bisect_all(
    G: Any, C: Any, allowed: Any, kappa: float, eps: float, targets: Any, warm: bool, literal: bool, limit: int
) -> Any:  # fmt: skip
    """Runs Algorithm 1 on every row; returns weights and sweeps."""
    weights, steps = np.zeros(C.shape), np.zeros(C.shape[0], np.int64)
    for i in range(C.shape[0]):
        steps[i] = bisect(G, C[i], allowed[i], kappa, eps, targets[i], warm, literal, limit, weights[i])
    return weights, steps


NAME = "bisection-rates"
PRECISIONS = tuple(10.0**-power for power in range(2, 11))
Vector = np.ndarray  # (n,)


@dataclass(frozen=True)
class Lasso:
    """The problems Q(lambda) of a row: min 1/2 |Ma - z|^2 + lambda |a|_1, by their Gram matrix.

    Args:
        gram, cross: M'M and M'z.
    """

    gram: np.ndarray
    cross: Vector

    @property
    def curvature(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue of M'M; the former is the constant mu of Lemma 3."""
        values = np.linalg.eigvalsh(self.gram)
        return float(values[0]), float(values[-1])

    def objective(self, a: Vector, level: float) -> float:
        """Computes the objective, up to the constant |z|^2 / 2."""
        return float(a @ self.gram @ a / 2 - self.cross @ a + level * np.abs(a).sum())

    def solve(
        self, level: float, start: Vector, gap: float, watch: Callable[[Vector], None] = lambda a: None
    ) -> tuple[Vector, int]:
        """Takes proximal gradient steps until strong convexity proves the gap; returns solution and steps."""
        mu, steepest = self.curvature
        a, steps = start, 0
        while True:
            watch(a)
            moved = a - (self.gram @ a - self.cross) / steepest
            new = np.sign(moved) * np.maximum(np.abs(moved) - level / steepest, 0.0)
            change, a, steps = new - a, new, steps + 1
            if steepest**2 * float(change @ change) <= 2 * mu * gap or steps == 100_000:
                return a, steps


@dataclass(frozen=True, kw_only=True)
class RateRun(Run):
    """Counts the proximal gradient steps of Algorithms 1 and 2, and checks their lemmas (003 section 3.3).

    ``steps`` is at every precision, and ``complexity`` its ratio to log2(1 / eps) (L / mu) log(1 / eps), the
    product of bisections and steps for one. ``lemma_3`` is the largest ratio of a gap to its bound after a step of
    one solve, ``lemma_4`` that of a difference of optimal values to its bound.

    Args:
        design: "gaussian", or "identity" with targets that are nearly alike.
        warm: whether an inner problem starts from the last solution.
        rows, columns: of M.
    """

    design: Literal["gaussian", "identity"] = "gaussian"
    warm: bool = True
    rows: int = 200
    columns: int = 40
    precisions: tuple[float, ...] = PRECISIONS

    @property
    def labels(self) -> tuple[str, str, str | None]:
        return f"{self.design}-rows", "warm-start" if self.warm else "cold-start", None

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run._result() for run in runs]

    def _result(self) -> Result:
        problem = self.problem()
        values = [Value("lemma_3", self._lemma_3(problem)), Value("lemma_4", self._lemma_4(problem))]
        if self.design == "gaussian":
            counts = [self._steps(problem, eps) for eps in self.precisions]
            mu, steepest = problem.curvature
            for eps, count in zip(self.precisions, counts, strict=True):
                bound = math.log2(1 / eps) * steepest / mu * math.log(1 / eps)
                values += [Value("steps", float(count), eps), Value("complexity", count / bound, eps)]
        return Result(tuple(values))

    def problem(self) -> Lasso:
        """Draws a row."""
        draw = np.random.default_rng(self.seed)
        if self.design == "identity":
            return Lasso(np.eye(self.columns), 1 + 0.1 * draw.random(self.columns))
        M = draw.standard_normal((self.rows, self.columns))
        return Lasso(M.T @ M, M.T @ draw.standard_normal(self.rows))

    def _steps(self, problem: Lasso, eps: float) -> int:
        """Bisects lambda to half of the unconstrained norm, with gaps and interval relative to those at zero."""
        best = np.linalg.solve(problem.gram, problem.cross)
        kappa, gap = np.abs(best).sum() / 2, -eps * problem.objective(best, 0.0)
        low, high = 0.0, float(np.abs(problem.cross).max())
        width, a, total = eps * high, np.zeros(self.columns), 0
        while high - low >= width:
            level = (low + high) / 2
            a, steps = problem.solve(level, a if self.warm else np.zeros(self.columns), gap)
            total += steps
            low, high = (level, high) if np.abs(a).sum() >= kappa else (low, level)
        return total

    def _lemma_3(self, problem: Lasso) -> float:
        """Compares the gap after k steps with exp(-k mu / L) times that at the start."""
        level, zero = float(np.abs(problem.cross).max()) / 10, np.zeros(self.columns)
        least = problem.objective(problem.solve(level, zero, 1e-14)[0], level)
        path: list[float] = []
        problem.solve(level, zero, 1e-9, lambda a: path.append(problem.objective(a, level) - least))
        mu, steepest = problem.curvature
        bounds = path[0] * np.exp(-mu / steepest * np.arange(len(path)))
        return float((np.array(path) / bounds)[1:].max())

    def _lemma_4(self, problem: Lasso) -> float:
        """Compares differences of optimal values with sqrt(n) |l1 - l2| A, A the largest entry of any solution."""
        levels = np.linspace(0.0, 0.9, 10) * float(np.abs(problem.cross).max())
        solutions = [problem.solve(level, np.zeros(self.columns), 1e-14)[0] for level in levels]
        optimal = np.array([problem.objective(a, level) for a, level in zip(solutions, levels, strict=True)])
        largest = max(float(np.abs(a).max()) for a in solutions)
        bounds = np.sqrt(self.columns) * np.diff(levels) * largest
        return float((np.abs(np.diff(optimal)) / bounds).max())


def rate_plan(scale: Scale) -> list[RateRun]:
    """Returns both starts on random rows, and the rows of a network whose inputs are apart."""
    few: dict[str, Any] = {"columns": 5, "rows": 20, "precisions": PRECISIONS[:3]} if scale == "tiny" else {}
    kinds: tuple[tuple[Role, Any, bool], ...] = (
        ("ours", "gaussian", True),
        ("baseline", "gaussian", False),
        ("control", "identity", True),
    )
    return [RateRun(suite=NAME, seed=0, scale=scale, role=role, design=design, warm=warm, **few)
            for role, design, warm in kinds]  # fmt: skip


def rate_findings(records: Sequence[Record]) -> list[str]:
    """Says how steps grow, and what became of Lemma 4."""
    ends = (PRECISIONS[2], PRECISIONS[-1])
    warm, cold = (
        [median_of(records, "gaussian-rows", f"{start}-start", "complexity", eps) for eps in ends]
        for start in ("warm", "cold")
    )
    broken = median_of(records, "identity-rows", "warm-start", "lemma_4")
    if None in (*warm, *cold, broken):
        return []
    return [
        f"Over log2(1 / eps) (L / mu) log(1 / eps), the steps are {warm[0]:.2g} at a precision of {ends[0]:.0e} "
        f"and {warm[1]:.2g} at {ends[1]:.0e} with warm starts, {cold[0]:.2g} and {cold[1]:.2g} without: the order "
        "of Theorem 4 holds with and without, and warm starts gain a factor.",
        "The proof of Lemma 4 bounds |a|_1 by sqrt(n) times the largest entry, which takes n: on rows whose "
        f"inputs do not overlap a difference is {broken:.2g} times the bound, with n = 40. Theorem 4 has the "
        "factor only inside a logarithm, so its order stays.",
    ]


RATES = Suite(
    name=NAME,
    title="Rates of the bisection",
    claim="The steps of the bisection grow with the square of log(1 / eps), and warm starts need fewer.",
    papers=("003 Lemma 3", "003 Lemma 4", "003 Theorem 4"),
    plan=rate_plan,
    seeds={"tiny": 1, "default": 5, "paper": 5},
    figures=(Figure("Steps over the precision", ("gaussian-rows",), "steps", "eps", paper="003 Theorem 4"),),
    findings=rate_findings,
)
