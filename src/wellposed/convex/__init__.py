"""Fits implicit models to recorded states, row by row, each row with a duality gap (003 chapter 3)."""

from collections.abc import Callable

from wellposed.convex.automatic import Automatic
from wellposed.convex.conic import Conic, Modelled
from wellposed.convex.design import Design
from wellposed.convex.eliminate import EliminationPath, EliminationStep, eliminate_features
from wellposed.convex.filters import FilterNetwork, Filters
from wellposed.convex.fit import StateFit, fit_states
from wellposed.convex.gather import Gathering
from wellposed.convex.group import GroupLasso
from wellposed.convex.homotopy import Homotopy
from wellposed.convex.objective import Objective
from wellposed.convex.problem import RowProblem, capped_norm, duality_gap, feasible, objective, row_problem
from wellposed.convex.projected import Projected
from wellposed.convex.report import FitReport
from wellposed.convex.rows import RowFit, RowGroup, row_groups
from wellposed.convex.schur import Schur
from wellposed.convex.screening import certified_zeros
from wellposed.convex.shared import RowUnits, SharedFit, fit_shared
from wellposed.convex.shared_layer import shared_layers
from wellposed.convex.shared_report import LayerFit, SharedReport
from wellposed.convex.solver import ROW_SOLVERS, RowSolution, RowSolver
from wellposed.convex.states import States, record_states
from wellposed.convex.states_file import open_states, save_states
from wellposed.convex.support import support_mask

_SOLVERS: dict[str, Callable[[], RowSolver]] = {
    "automatic": Automatic,
    "homotopy": lambda: Schur(Homotopy()),
    "refined": lambda: Schur(Homotopy(), tol=1e-9),
    "projected": Projected,
    "conic": Conic,
    "cvxpy": Modelled,
}
for _name, _factory in _SOLVERS.items():
    ROW_SOLVERS.register(_name, _factory)

__all__ = [
    "ROW_SOLVERS",
    "Automatic",
    "Conic",
    "Design",
    "EliminationPath",
    "EliminationStep",
    "FilterNetwork",
    "Filters",
    "FitReport",
    "Gathering",
    "GroupLasso",
    "Homotopy",
    "LayerFit",
    "Modelled",
    "Objective",
    "Projected",
    "RowFit",
    "RowGroup",
    "RowProblem",
    "RowSolution",
    "RowSolver",
    "RowUnits",
    "Schur",
    "SharedFit",
    "SharedReport",
    "StateFit",
    "States",
    "capped_norm",
    "certified_zeros",
    "duality_gap",
    "eliminate_features",
    "feasible",
    "fit_shared",
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
