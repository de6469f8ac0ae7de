"""Linear programs, one model for many objectives, and upper bounds that no tolerance can spoil."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import InputError, require

Array = NDArray[np.float64]
UNIT = 2.0**-53


class Optimum(NamedTuple):
    """What came of a linear program.

    Args:
        bound: no feasible point has a larger objective; proven from the dual values, whatever the solver returned.
        value: the objective where the solver stopped; NaN if it found no point.
        point: that point; zeros if there is none.
        duals: a multiplier for every row, of the sign that the row's finite sides allow.
    """

    bound: float
    value: float
    point: Array
    duals: Array


@dataclass(frozen=True)
class LinearProgram:
    """Maximises objectives over ``row_lower <= M v <= row_upper``, ``lower <= v <= upper`` with HiGHS.

    The model is built once; every further objective starts from the basis of the one before. The matrix and the
    sides are taken as exact.

    Args:
        matrix: M, (m, N), dense; zeros are dropped.
        row_lower, row_upper: (m,), infinite where a row has one side only.
        lower, upper: (N,), finite, as the proof needs them.

    Example:
        >>> program = LinearProgram(np.ones((1, 2)), np.array([-np.inf]), np.ones(1), np.zeros(2), np.ones(2))
        >>> round(program.maximum(np.array([1.0, 2.0])).bound, 6)
        2.0
    """

    matrix: Array
    row_lower: Array
    row_upper: Array
    lower: Array
    upper: Array

    def __post_init__(self) -> None:
        rows, columns = self.matrix.shape
        sides = self.row_lower.shape == self.row_upper.shape == (rows,)
        if not sides or not self.lower.shape == self.upper.shape == (columns,):
            raise InputError(
                f"a matrix {self.matrix.shape} needs {rows} sides of rows and {columns} bounds of variables; "
                f"received {self.row_lower.shape}, {self.row_upper.shape}, {self.lower.shape}, {self.upper.shape}"
            )
        if not (np.isfinite(self.lower).all() and np.isfinite(self.upper).all()):
            raise InputError("every variable needs finite bounds; without them nothing follows from the duals")
        if (self.lower > self.upper).any():
            raise InputError("every variable needs lower <= upper; some are the other way round")

    @cached_property
    def _solver(self) -> Any:
        highspy = require("highspy", extra="robust")
        rows, columns = self.matrix.shape
        places = self.matrix != 0
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = columns, rows
        program.col_cost_ = np.zeros(columns)
        program.col_lower_, program.col_upper_ = self.lower, self.upper
        program.row_lower_, program.row_upper_ = self.row_lower, self.row_upper
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.concatenate([[0], places.sum(1).cumsum()]).astype(np.int32)
        program.a_matrix_.index_ = places.nonzero()[1].astype(np.int32)
        program.a_matrix_.value_ = self.matrix[places]
        program.sense_ = highspy.ObjSense.kMaximize
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("presolve", "off")  # it would throw the last basis away
        solver.passModel(program)
        return solver

    @cached_property
    def _absolute(self) -> Array:
        return np.abs(self.matrix)

    def maximum(self, objective: Array, seconds: float | None = None) -> Optimum:
        """Maximises ``objective' v``.

        Args:
            seconds: when to stop at the latest; the bound holds all the same.
        """
        columns = self.matrix.shape[1]
        if objective.shape != (columns,) or not np.isfinite(objective).all():
            raise InputError(f"the objective needs {columns} finite entries; received the shape {objective.shape}")
        solver = self._solver
        solver.setOptionValue("time_limit", np.inf if seconds is None else solver.getRunTime() + max(seconds, 0.0))
        solver.changeColsCost(columns, np.arange(columns, dtype=np.int32), objective)
        solver.run()
        found = solver.getSolution()
        duals, value, point = np.zeros(len(self.row_lower)), np.nan, np.zeros(columns)
        if found.dual_valid:
            duals = np.nan_to_num(np.asarray(found.row_dual, dtype=np.float64), posinf=0.0, neginf=0.0)
        if found.value_valid:
            value, point = solver.getInfo().objective_function_value, np.asarray(found.col_value)
        duals = self.allowed(duals)
        unaided = self.bound(objective, np.zeros_like(duals))
        return Optimum(min(self.bound(objective, duals), unaided), value, point, duals)

    def allowed(self, duals: Array) -> Array:
        """Sets multipliers to zero that would ask for an infinite side of a row."""
        impossible = ((duals > 0) & np.isinf(self.row_upper)) | ((duals < 0) & np.isinf(self.row_lower))
        return np.where(impossible, 0.0, duals)

    def bound(self, objective: Array, duals: Array) -> float:
        """Bounds ``c' v`` over all feasible v from any multipliers y, rounded up.

        ``c' v = y' (M v) + (c - M' y)' v``: the first term is at most the sides of the rows, the second the
        bounds of the variables; what is lost in computing ``c - M' y`` is multiplied by the largest |v|
        (Neumaier and Shcherbina, Safe bounds in linear and mixed-integer linear programming, 2004).
        """
        rows, columns = self.matrix.shape
        reduced = objective - duals @ self.matrix
        size = np.abs(objective) + np.abs(duals) @ self._absolute
        sides = np.where(duals > 0, self.row_upper, self.row_lower)
        by_rows = np.where(duals == 0, 0.0, duals * np.where(duals == 0, 0.0, sides))
        ends = np.where(reduced > 0, self.upper, self.lower)
        largest = np.maximum(np.abs(self.lower), np.abs(self.upper))
        magnitude = np.abs(by_rows).sum() + (size * largest).sum()
        gamma = (2 * rows + columns + 16) * UNIT
        lost = 2 * gamma * magnitude + (rows + columns) * np.finfo(np.float64).tiny
        return float(np.nextafter(by_rows.sum() + (reduced * ends).sum() + lost, np.inf))
