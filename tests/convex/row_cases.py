"""Small row problems with every kind of degeneracy, and checks of their solutions."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wellposed.convex import Design, RowProblem, RowSolution, RowSolver, capped_norm, objective, row_problem
from wellposed.convex.solvers.path import CAPPED, CLOSED, FLOOR

KINDS = ("plain", "duplicates", "zeros", "few samples", "tied", "scales", "dead target", "masked", "bias")


@dataclass(frozen=True)
class Case:
    """Data of some rows."""

    M: Tensor  # (m, d)
    z: Tensor  # (m, r)
    support: Tensor | None

    def problem(self, kappa: float, capped: int | None = None, **options: float) -> RowProblem:
        width = self.M.shape[1]
        count = width if capped is None else capped
        return row_problem(Design.of(self.M), self.z, kappa=kappa, capped=count, support=self.support, **options)


def case(kind: str, seed: int, m: int = 24, d: int = 12, rows: int = 6) -> Case:
    """Draws data of one kind."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    M, support = normal(m, d), None
    if kind == "duplicates":
        M[:, 3], M[:, 4], M[:, -1] = M[:, 1], -M[:, 2], M[:, -2]
    if kind == "zeros":
        M[:, ::3] = 0.0
    if kind == "few samples":
        M = M[: d // 2]
    if kind == "tied":
        M = (M[:8] > 0).double()
    if kind == "scales":
        M = M * torch.logspace(-2, 1, d, dtype=torch.float64)
    if kind == "bias":
        M = torch.cat([M[:, :-1].relu(), torch.ones(m, 1, dtype=torch.float64)], dim=1)
    z = M @ normal(d, rows) * 0.3 + normal(len(M), rows)
    if kind == "tied":
        z = z.sign()
    if kind == "dead target":
        z[:, 0], z[:, 1] = 0.0, 1e-4 * z[:, 1]
        M = torch.cat([M[:, 1:], M[:, :1].relu()], dim=1)
    if kind == "masked":
        support = torch.rand(rows, d, generator=generator) < 0.7
        support[0], support[1, : d // 2] = False, False
    return Case(M, z, support)


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


def agrees(solver: RowSolver, problem: RowProblem, oracle: RowSolution, tol: float) -> None:
    """Asserts that a solver finds feasible rows as good as those of the oracle, up to the gaps of both."""
    solution = solver.solve(problem)
    assert (capped_norm(problem, solution.weights) <= problem.kappa + 1e-12).all()
    if problem.support is not None:
        assert (solution.weights[~problem.support] == 0).all()
    assert solution.relative_gap.max() <= tol
    best, ours = objective(problem, oracle.weights), objective(problem, solution.weights)
    slack = 1e-8 * problem.scale + 1e-13
    assert (ours <= best + solution.gap + slack).all()
    assert (best <= ours + oracle.gap + slack).all()
