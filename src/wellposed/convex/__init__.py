"""Fits implicit models to recorded states, row by row, each row with a duality gap (003 chapter 3)."""

from collections.abc import Callable

from wellposed.convex.eliminate import EliminationPath, EliminationStep, eliminate_features
from wellposed.convex.fit import fit_states
from wellposed.convex.matching import Objective
from wellposed.convex.problem import Design, RowProblem, capped_norm, duality_gap, feasible, objective, row_problem
from wellposed.convex.report import FitReport, LayerFit, SharedReport
from wellposed.convex.rows import RowFit, RowGroup, row_groups, support_mask
from wellposed.convex.shared import (
    FilterNetwork,
    Filters,
    PositionSampler,
    RowUnits,
    fit_shared,
    fit_shared_path,
    shared_layers,
)
from wellposed.convex.solvers.automatic import Automatic
from wellposed.convex.solvers.base import ROW_SOLVERS, RowSolution, RowSolver
from wellposed.convex.solvers.conic import Clarabel, Cvxpy
from wellposed.convex.solvers.homotopy import Homotopy, Schur, certified_zeros
from wellposed.convex.solvers.projected import GroupLasso, Projected
from wellposed.convex.states import States, open_states, record_states, save_states

_SOLVERS: dict[str, Callable[[], RowSolver]] = {
    "automatic": Automatic,
    "homotopy": lambda: Schur(Homotopy()),
    "refined": lambda: Schur(Homotopy(), tol=1e-9),
    "projected": Projected,
    "conic": Clarabel,
    "cvxpy": Cvxpy,
}
for _name, _factory in _SOLVERS.items():
    ROW_SOLVERS.register(_name, _factory)

__all__ = [
    "ROW_SOLVERS",
    "Automatic",
    "Clarabel",
    "Cvxpy",
    "Design",
    "EliminationPath",
    "EliminationStep",
    "FilterNetwork",
    "Filters",
    "FitReport",
    "GroupLasso",
    "Homotopy",
    "LayerFit",
    "Objective",
    "PositionSampler",
    "Projected",
    "RowFit",
    "RowGroup",
    "RowProblem",
    "RowSolution",
    "RowSolver",
    "RowUnits",
    "Schur",
    "SharedReport",
    "States",
    "capped_norm",
    "certified_zeros",
    "duality_gap",
    "eliminate_features",
    "feasible",
    "fit_shared",
    "fit_shared_path",
    "fit_states",
    "objective",
    "open_states",
    "record_states",
    "row_groups",
    "row_problem",
    "save_states",
    "shared_layers",
    "support_mask",
]
