"""The choice of a row solver, and what to do when one falls short."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from wellposed.convex.problem import RowProblem
from wellposed.convex.solvers.base import RowSolution, RowSolver, finished, merged, unfinished
from wellposed.convex.solvers.conic import Clarabel
from wellposed.convex.solvers.homotopy import Homotopy, Schur
from wellposed.convex.solvers.projected import Projected
from wellposed.errors import MissingExtraError
from wellposed.kernels.cpu.background import compiling

LARGEST_PATH = 20_000  # columns; wider rows go to the projected gradient
QUICK = 10**9  # multiplications of the projected gradient, about a second: less than compiling the path takes


@dataclass(frozen=True)
class Automatic(RowSolver):
    """Chooses a solver by the problem, and tries others on rows whose gap stays too large.

    The exact path where it applies (after eliminating b if that is not capped; without the cap for a lasso beside
    a cap on a alone), the projected gradient on a GPU and for very wide rows. Rows that miss `tol` are solved
    again: with gradients from the data, then by the projected gradient, then by Clarabel if it is installed; the
    best point wins. Where numba is not installed the projected gradient takes the place of the path; so it does
    for small problems while another process compiles the path, which takes some fifteen seconds, once.

    Args:
        tol: relative gap.

    Example:
        >>> import torch
        >>> from wellposed.convex import Design, row_problem
        >>> z = torch.tensor([[3.0], [2.0], [0.5]])
        >>> problem = row_problem(Design.of(torch.eye(3)), z, kappa=2.0, capped=3)
        >>> Automatic().solve(problem).weights
        tensor([[1.5000, 0.5000, 0.0000]], dtype=torch.float64)
    """

    tol: float = 1e-9

    def solve(self, problem: RowProblem) -> RowSolution:
        best: RowSolution | None = None
        for solver in self.sequence(problem):
            rest = None if best is None else unfinished(problem, best, self.tol)
            if rest is not None and len(rest) == 0:
                break
            with suppress(MissingExtraError):  # without numba or Clarabel the others do it
                again = solver.solve(problem if rest is None else problem.chosen(rest))
                best = again if best is None or rest is None else merged(best, again, rest)
        assert best is not None  # the projected gradient is always among them
        return best

    def sequence(self, problem: RowProblem) -> Sequence[RowSolver]:
        """Lists the solvers in the order in which they are tried."""
        gradient = Projected(tol=self.tol / 2)
        by_gradient: RowSolver = gradient if problem.lasso else Schur(gradient)
        if self._large(problem):
            return by_gradient, Clarabel()
        if problem.lasso:
            exact: list[RowSolver] = [Uncapped() if problem.free and problem.capped else Homotopy()]
        else:
            refined = [Schur(refine=2)] if problem.free and problem.design is not None else []
            exact = [Schur(Homotopy()), *refined]
        steps = QUICK // max(1, problem.rows * problem.columns**2)
        if steps >= 2 * gradient.period and _path_is_compiling():
            quick = replace(gradient, max_steps=min(steps, gradient.max_steps))
            exact.insert(0, quick if problem.lasso else Schur(quick))
        return *exact, by_gradient, Clarabel()

    @staticmethod
    def _large(problem: RowProblem) -> bool:
        return problem.cross.device.type != "cpu" or problem.columns > LARGEST_PATH


def _path_is_compiling() -> bool:
    """Returns whether another process is compiling the path; the first question has it do so."""
    with suppress(MissingExtraError):
        return bool(compiling("wellposed.convex.solvers.path", torch.float64, (0,)))
    return False


@dataclass(frozen=True)
class Uncapped(RowSolver):
    """Solves a lasso beside a cap as if there were no cap: exact on the rows whose solution satisfies it anyway.

    Example:
        >>> import torch
        >>> from wellposed.convex import Design, row_problem
        >>> z = torch.tensor([[0.5], [3.0]])
        >>> problem = row_problem(Design.of(torch.eye(2)), z, kappa=1.0, capped=1, lasso=0.25)
        >>> Uncapped().solve(problem).weights
        tensor([[0.2500, 2.7500]], dtype=torch.float64)
    """

    def why_not(self, problem: RowProblem) -> str | None:
        return None if problem.lasso else "needs a lasso; use Schur()"

    def solve(self, problem: RowProblem) -> RowSolution:
        self.accept(problem)
        solution = Homotopy().solve(replace(problem, kappa=math.inf, capped=0, shared={}))
        return finished(problem, solution.weights, solution.steps)
