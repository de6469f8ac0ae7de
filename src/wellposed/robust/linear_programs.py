"""The methods "lp" and "triangle": linear programs around the equilibria of ReLU forms.

`LinearProgram` is one model for many objectives, with upper bounds that no tolerance can spoil. `printed_set` and
`triangle_set` build the polyhedra around all equilibria over a set of inputs. `Relaxation` is the method: two
programs for every bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.conditions.rounding import TINY, convert_outward, rounding_slack
from wellposed.errors import InputError, require, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.robust.boxes import box_states
from wellposed.robust.crown import enclosed
from wellposed.robust.intervals import IntervalPropagation
from wellposed.robust.query import Bounds, Functionals, MethodError, Operators, Query, of_states
from wellposed.robust.sets import Box, Interval, SparseBox, Uncertainty

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
        solution = solver.getSolution()
        duals, value, point = np.zeros(len(self.row_lower)), np.nan, np.zeros(columns)
        if solution.dual_valid:
            duals = np.nan_to_num(np.asarray(solution.row_dual, dtype=np.float64), posinf=0.0, neginf=0.0)
        if solution.value_valid:
            value, point = solver.getInfo().objective_function_value, np.asarray(solution.col_value)
        duals = self.allowed(duals)
        bounds = [self.bound(objective, tried) for tried in (duals, np.zeros_like(duals), *self._rays(objective))]
        return Optimum(min(bounds), value, point, duals)

    def _rays(self, objective: Array) -> list[Array]:
        """Returns multipliers that bound an infeasible program by ever smaller numbers; none if it is feasible."""
        _, has_ray, ray = self._solver.getDualRay()
        if not has_ray:
            return []
        direction = np.nan_to_num(np.asarray(ray, dtype=np.float64))
        size = (1 + np.abs(objective).max(initial=0.0)) / max(np.abs(direction).max(initial=0.0), UNIT)
        return [self.allowed(scale * size * direction) for scale in (1e2, -1e2, 1e4, -1e4, 1e6, -1e6)]

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
        lost = 2 * gamma * magnitude + 2 * (rows + columns) * TINY * (1 + largest.sum())
        total = float(np.nextafter(by_rows.sum() + (reduced * ends).sum() + lost, np.inf))
        return total if total > -np.inf else np.inf  # overflow proves nothing


LARGEST = 2**25  # entries of a program's matrix


@dataclass(frozen=True)
class ReluConstraints:
    """The equations ``x - Ax - Bu - w = b`` in float64, with w = z_- the part that ReLU cuts off.

    Args:
        absolute_states, absolute_inputs: nowhere below ``|P||Q|`` where A or B is a product PQ, which rounds when
            it is formed.
        relu: (n,), which states pass a ReLU; the others are affine.
        terms: the length of the longest sum.
    """

    A: Array
    B: Array
    absolute_states: Array
    absolute_inputs: Array
    bias: Array
    relu: np.ndarray
    terms: int
    underflow: float

    @classmethod
    def of(cls, form: ImplicitForm, method: str) -> "ReluConstraints":
        """Reads a form; the matrices must be small enough to write down."""
        n, p, _ = form.sizes
        others = sorted({phi.name for phi in form.activations if not (phi.is_relu or phi.is_identity)})
        if others:
            raise MethodError(
                f"{method!r} is a linear program for ReLU; {', '.join(others)} is no polyhedron: use 'crown', "
                "'optimised' or 'interval'"
            )
        if 2 * n * (2 * n + p) > LARGEST:
            raise MethodError(
                f"{method!r} writes down {2 * n} x {2 * n + p} entries a sample, and takes at most {LARGEST}; use "
                "'crown' or 'optimised'"
            )
        bias = torch.zeros(n, dtype=torch.float64) if form.bias is None else form.bias
        pairs = zip(form.activations, form.partition, strict=True)
        relu = np.concatenate([np.full(size, phi.is_relu) for phi, size in pairs])
        operators = Operators(form)
        A, B = (to_array(part.to_dense()) for part in (form.A, form.B))
        over_states, over_inputs = (
            to_array(operators.abs_upper_bound(part, False).to_dense()) for part in (form.A, form.B)
        )
        return cls(A, B, over_states, over_inputs, to_array(bias), relu, operators.terms, operators.lost)

    def equations(self, x: Interval, u: Interval) -> tuple[Array, Array, Array]:
        """Returns ``(I - A, -B)`` and the two sides of ``x - Ax - Bu``, apart by what rounds in forming them."""
        states = to_array(x.magnitude)
        size = self.absolute_states @ states + states + self.absolute_inputs @ to_array(u.magnitude)
        reached = 1 + states.sum() + to_array(u.magnitude).sum()
        lost = 2 * self.terms * UNIT * size + (4 * self.terms * TINY + self.underflow) * reached
        matrix = np.concatenate([np.eye(len(self.A)) - self.A, -self.B], axis=1)
        return matrix, np.nextafter(self.bias - lost, -np.inf), np.nextafter(self.bias + lost, np.inf)


@dataclass(frozen=True)
class RelaxedSet:
    """A polyhedron that holds ``(x, u)`` for every input of one sample's set.

    Args:
        program: its first n variables are the states, the next p the inputs.
    """

    program: LinearProgram
    n: int
    p: int

    def objective(self, states: Array, inputs: Array) -> Array:
        """Pads coefficients of states and inputs with zeros for the other variables."""
        rest = len(self.program.lower) - self.n - self.p
        return np.concatenate([states, inputs, np.zeros(rest)])

    def input(self, point: Array) -> Array:  # (p,)
        """Returns the inputs of a point."""
        return point[self.n : self.n + self.p]


def printed_set(rows: ReluConstraints, x: Interval, inputs: Uncertainty, index: int) -> RelaxedSet:
    """Builds the polyhedron of 003, section 4.3: ``x >= Ax + Bu + b``, ``x >= 0`` and ``|x - x0| <= sigma_x``.

    Args:
        x: (n,), the box of Theorem 5.
    """
    matrix, lower, upper = rows.equations(x, of_sample(inputs.box().interval, index))
    upper = np.where(rows.relu, np.inf, upper)
    low = np.where(rows.relu, np.maximum(to_array(x.lower), 0.0), to_array(x.lower))
    states = low, np.maximum(to_array(x.upper), low)
    return _joined(matrix, (lower, upper), states, _no_variables(), inputs, index)


def triangle_set(rows: ReluConstraints, x: Interval, z: Interval, inputs: Uncertainty, index: int) -> RelaxedSet:
    """Builds the hull of every ReLU on its interval: ``x - w = z``, ``x, w >= 0``, ``x / h + w / |l| <= 1``.

    The last line is the triangle ``x <= h (z - l) / (h - l)``; a state that is always on has w = 0, which makes
    ``x = z``, and one that is always off x = 0.
    """
    matrix, lower, upper = rows.equations(x, of_sample(inputs.box().interval, index))
    low, high = to_array(z.lower), to_array(z.upper)
    n = len(low)
    cut = np.where(rows.relu, np.maximum(-low, 0.0), 0.0)  # the upper ends of w
    matrix = np.concatenate([matrix, -np.eye(n)], axis=1)
    (open_,) = (rows.relu & (low < 0) & (high > 0)).nonzero()
    scale = np.maximum(high[open_], cut[open_])
    triangles = np.zeros((len(open_), matrix.shape[1]))
    each = np.arange(len(open_))
    with np.errstate(invalid="ignore"):  # of infinite intervals, which `LinearProgram` refuses
        triangles[each, open_] = np.nextafter(cut[open_] / scale, 0.0)
        triangles[each, matrix.shape[1] - n + open_] = np.nextafter(high[open_] / scale, 0.0)
    most = np.nextafter(np.minimum(high[open_], cut[open_]), np.inf)
    sides = np.concatenate([lower, np.full(len(open_), -np.inf)]), np.concatenate([upper, most])
    floor = np.where(rows.relu, np.maximum(to_array(x.lower), 0.0), to_array(x.lower))
    top = np.where(rows.relu & (high <= 0), 0.0, to_array(x.upper))
    states = floor, np.maximum(top, floor)
    return _joined(np.concatenate([matrix, triangles]), sides, states, (np.zeros(n), cut), inputs, index)


Ends = tuple[Array, Array]


def _joined(matrix: Array, sides: Ends, states: Ends, more: Ends, inputs: Uncertainty, index: int) -> RelaxedSet:
    """Adds the bounds of the inputs, and for few changed entries their count."""
    box = inputs.box()
    u = to_array(box.lower[index]), to_array(box.upper[index])
    ends = [np.concatenate(pieces) for pieces in zip(states, u, more, strict=True)]
    n, p = len(states[0]), len(u[0])
    if isinstance(inputs, SparseBox):
        matrix, sides, ends = _counted(matrix, sides, ends, (n, p), (inputs, index))
    return RelaxedSet(LinearProgram(matrix, *sides, *ends), n, p)


def _counted(
    matrix: Array, sides: Ends, ends: list[Array], sizes: tuple[int, int], counted: tuple[SparseBox, int]
) -> tuple[Array, Ends, list[Array]]:
    """Writes ``u = u0 + up a - down c`` with shares ``a, c`` in [0, 1] that add up to k at most."""
    n, p = sizes
    inputs, index = counted
    center, box = to_array(inputs.center[index]), inputs.box()
    up = np.nextafter(to_array(box.upper[index]) - center, np.inf)
    down = np.nextafter(center - to_array(box.lower[index]), np.inf)
    shares = np.zeros((p + 1, matrix.shape[1] + 2 * p))
    shares[:p, n : n + p] = np.eye(p)
    shares[:p, matrix.shape[1] :] = np.concatenate([-np.diag(up), np.diag(down)], axis=1)
    shares[p, matrix.shape[1] :] = 1.0
    wide = np.concatenate([matrix, np.zeros((len(matrix), 2 * p))], axis=1)
    lower = np.concatenate([sides[0], center, [-np.inf]])
    upper = np.concatenate([sides[1], center, [float(inputs.k)]])
    both = [np.concatenate([end, np.full(2 * p, value)]) for end, value in zip(ends, (0.0, 1.0), strict=True)]
    return np.concatenate([wide, shares]), (lower, upper), both


def of_sample(whole: Interval, index: int) -> Interval:
    """Takes the intervals of one sample."""
    return Interval(whole.lower[index], whole.upper[index])


def _no_variables() -> Ends:
    return np.zeros(0), np.zeros(0)


def to_array(values: torch.Tensor) -> Array:
    """Copies a tensor into an array of float64.

    Example:
        >>> to_array(torch.ones(2))
        array([1., 1.])
    """
    return values.detach().to("cpu", torch.float64).numpy().copy()


KINDS = ("lp", "triangle")


@dataclass(frozen=True)
class Relaxation:
    """Bounds by linear programs, two for every bound, solved one after the other from where the last one ended.

    Args:
        kind: ``"lp"`` is the program as printed, ``x >= Ax + Bu + b`` in the box of Theorem 5 (003, section 4.3),
            which lets always-active states exceed their pre-activation and knows no lower end of z;
            ``"triangle"`` is the convex hull of every ReLU on the intervals that CROWN refined.
        rounds: how often the intervals of ``"triangle"`` are refined.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> from wellposed.robust import Box, output_bounds
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> around = Box(torch.ones(1, 1), 2 * torch.ones(1, 1))
        >>> output_bounds(form, around, Relaxation("triangle")).upper.round(decimals=3)
        tensor([[4.]])
    """

    kind: Literal["lp", "triangle"] = "triangle"
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("kind", self.kind, KINDS)
        if self.rounds < 0:
            raise InputError(f"rounds must not be negative; received {self.rounds}")

    @torch.no_grad()
    def __call__(self, query: Query) -> Bounds:
        """Answers a query."""
        wide = in_float64(query)
        rows = ReluConstraints.of(wide.form, self.kind)
        states, sets = self.sets(wide, rows)
        known = of_states(wide, states, self.kind)
        lower, upper = known.lower.clone(), known.upper.clone()
        asked = Objectives.of(wide, states)
        for index, polyhedron in enumerate(sets):
            for sign, row in product((1, -1), range(query.shape[1])):  # like objectives follow each other
                if query.late:
                    break
                value = sign * asked.maximum(polyhedron, index, row, sign, query)
                if sign > 0:
                    upper[index, row] = min(value, float(upper[index, row]))
                else:
                    lower[index, row] = max(value, float(lower[index, row]))
        return _converted(query, lower, upper, self._name(query), asked.slack.view(query.shape))

    def sets(self, wide: Query, rows: ReluConstraints) -> tuple[list[Interval], Iterator[RelaxedSet]]:
        """Returns intervals of all states, and a polyhedron for every sample.

        Args:
            wide: a query in float64.
        """
        if self.kind == "lp":
            states = box_states(wide)
            x = side_by_side(states)
            return states, (printed_set(rows, of_sample(x, i), wide.set, i) for i in range(len(wide.set)))
        enclosure = tightest_intervals(wide, self.rounds)
        states = enclosure.states
        x = side_by_side(states)
        z = side_by_side([enclosure.z(k) for k in range(len(states))])
        return states, (
            triangle_set(rows, of_sample(x, i), of_sample(z, i), wide.set, i) for i in range(len(wide.set))
        )

    def _name(self, query: Query) -> str:
        return self.kind if isinstance(query.set, Box | SparseBox) else f"{self.kind} (box around the set)"


@dataclass(frozen=True)
class Objectives:
    """The functionals of a query as objectives, with what rounding may take from them."""

    states: Tensor  # (R, n)
    inputs: Tensor  # (R, p)
    constant: Tensor  # (R,)
    slack: Tensor  # (R,)
    count: int

    @classmethod
    def of(cls, wide: Query, states: list[Interval]) -> "Objectives":
        """Reads the functionals of a query in float64."""
        n, p, _ = wide.form.sizes
        samples, count = wide.shape
        if wide.combination is None:
            units = torch.eye(n, dtype=torch.float64).repeat(samples, 1)
            zero = torch.zeros(samples * count, dtype=torch.float64)
            return cls(units, zero.new_zeros(len(zero), p), zero, zero, count)
        operators = Operators(wide.form)
        rows = wide.combination.flatten(0, 1)
        functionals = Functionals.of_outputs(operators, rows, states, wide.set, wide.sample)
        empty = [functionals.constant.new_zeros(len(rows), size) for size in wide.form.partition]
        pieces = torch.cat([functionals.states.get(k, part) for k, part in enumerate(empty)], dim=1)
        slack = rounding_slack(4 * functionals.size, operators.terms + 8) + 2 * functionals.lost
        return cls(pieces, functionals.inputs, functionals.constant, slack, count)

    def objective(self, index: int, row: int) -> tuple[Array, Array]:
        """Returns the coefficients of the states and of the inputs."""
        flat = index * self.count + row
        return to_array(self.states[flat]), to_array(self.inputs[flat])

    def maximum(self, polyhedron: RelaxedSet, index: int, row: int, sign: int, query: Query) -> float:
        """Bounds a functional, or its negative, from above."""
        states, inputs = self.objective(index, row)
        left = query.deadline - monotonic()
        optimum = polyhedron.program.maximum(polyhedron.objective(sign * states, sign * inputs), left)
        flat = index * self.count + row
        total = optimum.bound + sign * float(self.constant[flat]) + float(self.slack[flat])
        return total if total > -np.inf else np.inf


def tightest_intervals(wide: Query, rounds: int) -> IntervalPropagation:
    """Encloses all pre-activations and states by what the passes of CROWN prove together."""
    first, *others = (backward.enclosure for backward in enclosed(wide, rounds, wide.combination is None))
    for other in others:
        for k in range(len(first.activations)):
            first.tighten(k, other.z(k))
    return first


def in_float64(query: Query) -> Query:
    """Asks the same question in float64, on the CPU."""
    combination = None if query.combination is None else query.combination.to("cpu", torch.float64)
    form, inputs = query.form.to(torch.float64).to("cpu"), query.set.to("cpu", torch.float64)
    return Query(form, inputs, combination, query.deadline, branches=query.branches)


def side_by_side(intervals: list[Interval]) -> Interval:
    """Joins the intervals of all blocks."""
    return Interval(torch.cat([x.lower for x in intervals], dim=1), torch.cat([x.upper for x in intervals], dim=1))


def _converted(query: Query, lower: Tensor, upper: Tensor, method: str, slack: Tensor) -> Bounds:
    dtype, device = query.form.dtype, query.form.device
    (low, below), (high, above) = convert_outward(lower, dtype), convert_outward(upper, dtype)
    return Bounds((low - below).to(device), (high + above).to(device), method, slack.to(device, dtype))
