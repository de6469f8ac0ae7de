"""What a fit minimises beside the misfit: names, weights without units, and penalties by CVXPY."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from wellposed.convex.conic import Modelled, Penalty
from wellposed.convex.problem import RowProblem
from wellposed.convex.solver import RowSolver
from wellposed.errors import InputError, require, unknown_name

OBJECTIVES = ("none", "lasso", "ridge", "elastic-net", "group", "robust")


@dataclass(frozen=True)
class Objective:
    """The objective l(a, b) of 003 eq. (3.3), row by row, with a weight without units.

    For "lasso" a strength of one is the least at which all rows of a layer are zero: the weight of |w|_1 is
    strength max |M'z|_inf; likewise for "group". For "ridge" it multiplies the mean square norm of a column, for
    "robust" half the mean square of z. A function of one's own is multiplied by the strength and nothing else.

    Args:
        name: of `OBJECTIVES`, or "own".
        strength: its weight.
        mix: share of the lasso in "elastic-net".
        penalty: takes a and b of one row, CVXPY expressions, and returns a convex expression.
        equality: whether the states must be met exactly (003 eq. 3.2).

    Example:
        >>> Objective.of("lasso", 0.1).sparse, Objective.of("ridge", 0.1).sparse
        (True, False)
    """

    name: str = "none"
    strength: float = 0.0
    mix: float = 0.5
    penalty: Penalty | None = None
    equality: bool = False

    @classmethod
    def of(
        cls, objective: str | Callable[[Any, Any], Any], strength: float, mix: float = 0.5, equality: bool = False
    ) -> "Objective":
        """Builds an objective from a name or a function."""
        if not (isinstance(strength, int | float) and 0 <= strength < float("inf")):
            raise InputError(f"strength must be a finite number that is not negative; received {strength!r}")
        if not 0 <= mix <= 1:
            raise InputError(f"mix is the share of the lasso, from 0 to 1; received {mix!r}")
        if callable(objective):
            return cls("own", float(strength), mix, objective, equality)
        if objective not in OBJECTIVES:
            raise unknown_name("objective", objective, OBJECTIVES)
        if equality and objective == "group":
            raise InputError("objective 'group' couples rows and takes no equality; choose another objective")
        return cls(objective, float(strength), mix, robust if objective == "robust" else None, equality)

    @property
    def sparse(self) -> bool:
        """Whether larger strengths give more zeros."""
        return self.name in ("lasso", "elastic-net", "group")

    def applied(self, problem: RowProblem) -> RowProblem:
        """Adds the lasso and the ridge to a problem that has neither."""
        share = {"lasso": 1.0, "elastic-net": self.mix}.get(self.name, 0.0)
        lasso = share * self.strength * float(problem.cross.abs().max()) if problem.cross.numel() else 0.0
        share = {"ridge": 1.0, "elastic-net": 1 - self.mix}.get(self.name, 0.0)
        diagonal = problem.gram.diagonal()
        ridge = share * self.strength * float(diagonal.mean()) if diagonal.numel() else 0.0
        if ridge:
            total = torch.full_like(diagonal, ridge) if problem.ridge is None else problem.ridge + ridge
            gram = problem.gram + ridge * torch.eye(len(diagonal)).to(problem.gram)
            problem = replace(problem, gram=gram, ridge=total, shared={})
        return replace(problem, lasso=lasso)

    def modelled(self, problem: RowProblem) -> RowSolver | None:
        """Returns the CVXPY model of an objective that no other solver takes."""
        if self.penalty is None and not self.equality:
            return None
        weight = self.strength * (float(problem.power.mean()) / 2 if self.name == "robust" else 1.0)
        given = self.penalty
        penalty = None if given is None or weight == 0 else (lambda a, b: weight * given(a, b))
        return Modelled(penalty, self.equality)


def robust(a: Any, b: Any) -> Any:
    """Models one row of the robustness penalty, ``|b|_1^2 / (2 (1 - |a|_1))`` (003 eq. 4.9).

    The penalty of the whole model takes the largest rows of A and B; here every row pays for itself. The terms of
    C and D belong to the output, which is fitted apart.
    """
    cvxpy = require("cvxpy", extra="convex")
    size = cvxpy.norm1(b) if b.size else 0
    room = 1 - cvxpy.norm1(a) if a.size else 1
    return cvxpy.quad_over_lin(size, room) / 2
