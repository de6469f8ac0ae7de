"""The methods "lp" and "triangle": linear programs around the equilibria of ReLU forms.

`LinearProgram` is one model for many objectives, with upper bounds that no tolerance can spoil. `printed_set` and
`triangle_set` build the polyhedra around all equilibria over a set of inputs. `Relaxation` is the method: two
programs for every bound. `Regions` solves many triangle programs at once, to some digits, by a primal-dual method;
`continued_box` proves boxes of loops with it, for the theorem of `Continuation`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.conditions.rounding import TINY, convert_outward, rounding_slack
from wellposed.errors import IllPosedError, InputError, require, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.robust.boxes import box_states
from wellposed.robust.crown import GAIN, Continuation, CrownPass, center_preactivations, enclosed
from wellposed.robust.intervals import IntervalPropagation
from wellposed.robust.query import Bounds, Functionals, MethodError, Operators, Query, of_states
from wellposed.robust.sets import Box, Interval, SparseBox, Uncertainty, proven_upper

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

    def part(self, states: np.ndarray) -> "ReluConstraints":
        """Takes some states, which read no others."""
        square = np.ix_(states, states)
        return replace(
            self, A=self.A[square], B=self.B[states], absolute_states=self.absolute_states[square],
            absolute_inputs=self.absolute_inputs[states], bias=self.bias[states], relu=self.relu[states],
        )  # fmt: skip

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
    matrix, lower, upper = rows.equations(x, inputs.box().interval.at(index))
    upper = np.where(rows.relu, np.inf, upper)
    low = np.where(rows.relu, np.maximum(to_array(x.lower), 0.0), to_array(x.lower))
    states = low, np.maximum(to_array(x.upper), low)
    return _joined(matrix, (lower, upper), states, (np.zeros(0), np.zeros(0)), inputs, index)


def triangle_set(rows: ReluConstraints, x: Interval, z: Interval, inputs: Uncertainty, index: int) -> RelaxedSet:
    """Builds the hull of every ReLU on its interval: ``x - w = z``, ``x, w >= 0``, ``x / h + w / |l| <= 1``.

    The last line is the triangle ``x <= h (z - l) / (h - l)``; a state that is always on has w = 0, which makes
    ``x = z``, and one that is always off x = 0.
    """
    matrix, lower, upper = rows.equations(x, inputs.box().interval.at(index))
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
            return states, (printed_set(rows, x.at(i), wide.set, i) for i in range(len(wide.set)))
        enclosure = tightest_intervals(wide, self.rounds)
        x, z = side_by_side(enclosure.states), side_by_side(enclosure.preactivations)
        return enclosure.states, (triangle_set(rows, x.at(i), z.at(i), wide.set, i) for i in range(len(wide.set)))

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

    @classmethod
    def none(cls, constraints: ReluConstraints) -> "Objectives":
        """Returns no rows."""
        n, p = constraints.B.shape
        empty = torch.zeros(0, dtype=torch.float64)
        return cls(empty.view(0, n), empty.new_zeros(0, p), empty, empty, 0)

    def __len__(self) -> int:
        return len(self.constant)

    def part(self, rows: list[int] | Tensor) -> "Objectives":
        """Takes some rows."""
        return Objectives(self.states[rows], self.inputs[rows], self.constant[rows], self.slack[rows], len(rows))

    @property
    def negated(self) -> "Objectives":
        """The rows times -1."""
        return replace(self, states=-self.states, inputs=-self.inputs, constant=-self.constant)

    def beside(self, others: "Objectives") -> "Objectives":
        """Puts other rows after these."""
        pairs = (
            (getattr(self, name), getattr(others, name)) for name in ("states", "inputs", "constant", "slack")
        )
        states, inputs, constant, slack = (torch.cat(pair) for pair in pairs)
        return Objectives(states, inputs, constant, slack, len(constant))

    def plus(self, weights: Tensor, others: "Objectives") -> "Objectives":
        """Adds other rows with some weights, none of which is negative."""
        if not len(others):
            return self
        return Objectives(
            self.states + weights @ others.states, self.inputs + weights @ others.inputs,
            self.constant + weights @ others.constant, self.slack + weights @ others.slack, self.count,
        )  # fmt: skip

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


class Maximum(NamedTuple):
    """What `Regions.maximum` has found for every row.

    Args:
        bound: (R,), proven.
        multipliers: (R, n), where it was proven.
        weights: (R, q), of the conditions.
        point: (R, 2n + p), where the relaxed program is largest, about: states and what ReLU cuts off of them, as
            shares of the most that they can be, and inputs in [-1, 1]; in float16.
        gaps: (R, n), by how much the triangle of each state raised the bound there.
    """

    bound: Tensor
    multipliers: Tensor
    weights: Tensor
    point: Tensor
    gaps: Tensor

    def part(self, rows: Tensor) -> "Maximum":
        """Takes some rows."""
        return Maximum(*(part[rows] for part in self))

    @property
    def start(self) -> "Start":
        """Where another search may start."""
        return self.multipliers, self.weights, self.point


Start = tuple[Tensor, Tensor, Tensor]  # multipliers, weights and point


@dataclass(frozen=True, eq=False)
class Regions:
    """Parts of one sample's equilibria, each with an interval for every pre-activation; bounds many rows at once.

    For any multipliers lam and weights w >= 0, with ``c = states + w' G`` and so on for the rows G that are known
    to be nonnegative, and ``nu = c + A' lam``,

        ``c' x + g' u + k <= k + lam' b + max_u (g + B' lam)' u + sum_i max_z (nu_i phi(z_i) - lam_i z_i)``

    where u ranges over the box and z_i over its interval. The least of these bounds is the maximum of the triangle
    program. `bounds` evaluates them in float64 and pays for all rounding, so that no multipliers are unsound;
    `maximum` finds good ones.

    Args:
        inputs: (p,), the box.
        z: (K, n), intervals of the pre-activations in every region.
        conditions: rows that are nonnegative in all regions.
    """

    constraints: ReluConstraints
    inputs: Interval
    z: Interval
    conditions: "Objectives"

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """A, B and b."""
        return tuple(
            torch.from_numpy(part) for part in (self.constraints.A, self.constraints.B, self.constraints.bias)
        )  # type: ignore[return-value]

    @cached_property
    def relu(self) -> Tensor:
        """(n,), which states pass a ReLU."""
        return torch.from_numpy(self.constraints.relu)

    def values(self, z: Tensor) -> Tensor:
        """Applies the activations."""
        return torch.where(self.relu, z.clamp(min=0), z)

    @cached_property
    def open(self) -> Tensor:
        """(K, n), which states are not affine on their interval."""
        return self.relu & (self.z.lower < 0) & (self.z.upper > 0)

    @cached_property
    def largest(self) -> Tensor:
        """(K, n), the largest absolute values of the states."""
        return Interval(self.values(self.z.lower), self.values(self.z.upper)).magnitude

    @cached_property
    def size(self) -> Tensor:
        """(K, n), the sizes of ``|A||x| + |B||u| + |b|``."""
        over_states, over_inputs = (
            torch.from_numpy(part) for part in (self.constraints.absolute_states, self.constraints.absolute_inputs)
        )
        driven = over_inputs @ self.inputs.magnitude + self.matrices[2].abs()
        return self.largest @ over_states.mT + driven

    @cached_property
    def lost(self) -> Tensor:
        """(K,), what underflow may take, times one and the sum of all multipliers."""
        reached = 1 + self.largest.sum(1) + self.inputs.magnitude.sum()
        return (4 * self.constraints.terms * TINY + self.constraints.underflow) * reached

    @cached_property
    def _sizes(self) -> Tensor:
        """(K, q), the sizes of the conditions' terms."""
        rows = self.conditions
        by_inputs = rows.inputs.abs() @ self.inputs.magnitude + rows.constant.abs()
        return self.largest @ rows.states.abs().mT + by_inputs

    def units(self, region: Tensor, unit: Tensor) -> "Objectives":
        """Reads some pre-activations and, after all of them, their negatives."""
        A, B, b = (part[unit] for part in self.matrices)
        slack = 2 * self.constraints.terms * UNIT * self.size[region, unit] + self.lost[region]
        return Objectives(torch.cat([A, -A]), torch.cat([B, -B]), torch.cat([b, -b]), slack.repeat(2), len(slack))

    def bounds(self, rows: "Objectives", region: Tensor, lam: Tensor, weights: Tensor) -> Tensor:  # (R,)
        """Bounds rows from above by given multipliers; weights that are negative count as none."""
        (A, B, b), weights = self.matrices, weights.clamp(min=0)
        size = (rows.states.abs() * self.largest[region]).sum(1) + rows.inputs.abs() @ self.inputs.magnitude
        size = size + rows.constant.abs() + (weights * self._sizes[region]).sum(1)
        rows = rows.plus(weights, self.conditions)
        nu, along = rows.states + lam @ A, rows.inputs + lam @ B
        value = rows.constant + lam @ b + self.inputs.largest(along)
        z = self.z.at(region)
        kink = torch.zeros_like(z.lower).clamp(z.lower, z.upper)
        points = [nu * self.values(point) - lam * point for point in (*z, kink)]
        value = value + torch.stack(points).amax(0).sum(1)
        size = size + (lam.abs() * (self.size[region] + 4 * z.magnitude)).sum(1)
        size = size + 4 * (nu.abs() * self.largest[region]).sum(1)
        terms = self.constraints.terms + 2 * A.shape[1] + B.shape[1] + weights.shape[1] + 64
        slack = rounding_slack(4 * size, terms)
        lost = 4 * self.lost[region] * (1 + lam.abs().sum(1) + weights.sum(1))
        return proven_upper(value + slack + rows.slack + lost)

    def maximum(self, rows: "Objectives", region: Tensor, steps: int, start: Start | None = None) -> Maximum:
        """Bounds rows from above.

        Args:
            region: (R,), the region of every row.
            steps: of the primal-dual method.
            start: of the same rows in other regions, NaN where there is none.
        """
        search = _PrimalDual(self, rows, region)
        lam, weights = search.run(steps, start)
        bound = self.bounds(rows, region, lam, weights)
        if start is not None:
            old = start[0].nan_to_num(0.0), start[1].nan_to_num(0.0)
            before = self.bounds(rows, region, *old)
            worse = (before < bound)[:, None]
            lam, weights = torch.where(worse, old[0], lam), torch.where(worse, old[1], weights)
            bound = torch.minimum(before, bound)
        return Maximum(bound, lam, weights, search.point(), search.gaps())

    def inputs_at(self, point: Tensor) -> Tensor:  # (R, 2n + p) -> (R, p)
        """Returns the inputs of points of `Maximum`."""
        return self.inputs.center + self.inputs.radius * point[:, 2 * len(self.relu) :].double()


SMALL = 2**12  # entries of B, of the states that are not affine, up to which float64 costs nothing
SHARE, OVER = 0.1, 1.7  # of dual steps by the range of conditions, and over-relaxation
LOOKS = 20  # steps of the primal-dual method between two looks at the bounds


class _PrimalDual:
    """Looks for multipliers of `Regions` by the primal-dual hybrid gradient method (Chambolle and Pock, 2011).

    States that are affine in all regions are eliminated. Of the others x is the state and w = x - z what ReLU cuts
    off of it: in units of the most that they can be, h and -l, the triangle is the corner x, w >= 0, x + w <= 1 of
    a square. Inputs t in [-1, 1] are times the radii of the box. Multipliers of ``x - w = Ax + Bu + b``, each row
    in units of its norm, and weights of the conditions are tried every few steps, the last ones and their means.
    Nothing here is proven, so float32 does.
    """

    def __init__(self, regions: Regions, rows: "Objectives", region: Tensor) -> None:
        A, B, b = regions.matrices
        affine_on = (~regions.relu | (regions.z.lower >= 0)).all(0)
        affine_off = ~affine_on & (regions.z.upper <= 0).all(0)
        (self.on,) = affine_on.nonzero(as_tuple=True)
        (self.open,) = (~affine_on & ~affine_off).nonzero(as_tuple=True)
        self.regions, self.rows, self.region = regions, rows, region
        center, radius = regions.inputs.center, regions.inputs.radius
        self.dtype = torch.float64 if len(self.open) * B.shape[1] <= SMALL else torch.float32
        on = self.on
        self.inverse = torch.linalg.inv_ex(torch.eye(len(on), dtype=A.dtype) - A[on][:, on])[0]
        self.across, back = A[self.open][:, on], self.inverse @ A[on][:, self.open]
        driven, constant = self.inverse @ B[on], self.inverse @ b[on]
        self.reduction = back, driven, constant
        inputs = B[self.open] + self.across @ driven
        offset = b[self.open] + self.across @ constant + inputs @ center
        matrix = A[self.open][:, self.open] + self.across @ back
        self.A, self.B, self.b = (part.to(self.dtype) for part in (matrix, inputs * radius, offset))
        self.ends = [end[:, self.open].to(self.dtype) for end in regions.z]  # (K, m)
        self.low, self.high = (end[region] for end in self.ends)
        self.c, self.g, self.k = self._reduced(rows)
        self.G, self.H, self.d = self._reduced(regions.conditions)

    def _reduced(self, rows: "Objectives") -> tuple[Tensor, Tensor, Tensor]:
        """Writes rows as functions of the states that are left and of t."""
        back, driven, constant = self.reduction
        states, inputs = rows.states[:, self.open] + rows.states[:, self.on] @ back, rows.inputs
        inputs = inputs + rows.states[:, self.on] @ driven
        offset = rows.constant + rows.states[:, self.on] @ constant + inputs @ self.regions.inputs.center
        radius = self.regions.inputs.radius
        return states.to(self.dtype), (inputs * radius).to(self.dtype), offset.to(self.dtype)

    def _parallel(self) -> Tensor:  # (R, m)
        """Returns the multipliers of parallel lines above and below every state."""
        low, high = self.ends
        slope = high.clamp(min=0) / (high.clamp(min=0) - low.clamp(max=0)).clamp(min=1e-30)
        system = torch.eye(len(self.A), dtype=self.dtype) - slope[:, :, None] * self.A
        inverse = torch.linalg.inv_ex(system)[0]  # (K, m, m)
        nu = torch.bmm(self.c[:, None], inverse[self.region])[:, 0]
        return (nu * slope[self.region]).nan_to_num(0.0, 0.0, 0.0)

    def value(self, lam: Tensor, weights: Tensor) -> Tensor:  # (R,)
        """Bounds rows, but for rounding."""
        nu = self.c + weights @ self.G + lam @ self.A
        along = self.g + weights @ self.H + lam @ self.B
        kink = torch.zeros_like(self.low).clamp(self.low, self.high)
        ends = [nu * point.clamp(min=0) - lam * point for point in (self.low, self.high, kink)]
        constant = self.k + weights @ self.d + lam @ self.b
        return constant + along.abs().sum(1) + torch.stack(ends).amax(0).sum(1)

    def _begin(self, start: Start | None) -> tuple[Tensor, Tensor]:
        """Returns multipliers and weights, and puts x, w and t where they belong to these or where they were."""
        high, cut = self.high.clamp(min=0), (-self.low).clamp(min=0)
        self.most = high.clamp(min=1e-20), cut.clamp(min=1e-20)
        if start is None or bool((missing := start[0][:, 0].isnan()).any()):
            lam, weights = self._parallel(), self.c.new_zeros(len(self.c), len(self.G))
            self.t = (self.g + lam @ self.B).sign()
            nu = self.c + lam @ self.A
            top = (nu - lam) * high > (-lam * self.low).clamp(min=0)
            z = torch.where(top, self.high, self.low)
            self.x, self.w = z.clamp(min=0), (-z).clamp(min=0)
        if start is None:
            return lam, weights
        shares, n = start[2].to(self.dtype), len(self.regions.relu)
        x = (shares[:, self.open] * self.most[0]).clamp(self.low.clamp(min=0), high)
        w = (shares[:, n + self.open] * self.most[1]).clamp((-self.high).clamp(min=0), cut)
        old = [start[0][:, self.open].to(self.dtype), start[1].to(self.dtype), x, w, shares[:, 2 * n :]]
        if bool(missing.any()):
            new = (lam, weights, self.x, self.w, self.t)
            old = [torch.where(missing[:, None], one, other) for one, other in zip(new, old, strict=True)]
        lam, weights, self.x, self.w, self.t = old
        return lam, weights

    def _range(self, states: Tensor, inputs: Tensor) -> Tensor:  # (R,)
        """Returns how far rows may reach, about."""
        return states.abs() @ (self.high - self.low).mean(0) + 2 * inputs.abs().sum(1)

    def _step_sizes(self, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns those of multipliers, of the primal variables in their units, and of weights."""
        x, w = self.ends[1].clamp(min=0).amax(0), (-self.ends[0]).clamp(min=0).amax(0)
        eye = torch.eye(len(self.A), dtype=self.dtype)
        whole = torch.cat([(eye - self.A) * x, -eye * w, -self.B], dim=1)
        unit = 1 / whole.norm(dim=1).clamp(min=1e-20)
        whole = whole * unit[:, None]
        gram = (whole @ whole.mT).nan_to_num(0.0, 0.0, 0.0)  # of what overflows nothing has to be found
        norm = float(torch.linalg.eigvalsh(gram)[-1].sqrt())
        steep = (lam.abs() / unit).mean(1, keepdim=True).clamp(min=1e-9) / norm
        reach = self._range(self.G, self.H).square().clamp(min=1e-30)
        of_weights = SHARE * self._range(self.c, self.g)[:, None] / reach
        sizes = self.most[0].square() @ self.G.square().mT + self.H.square().sum(1)
        primal = 1 / (norm**2 * steep + (of_weights * sizes).sum(1, keepdim=True))
        return steep * unit.square(), primal, of_weights

    def run(self, steps: int, start: Start | None) -> tuple[Tensor, Tensor]:
        """Returns the best multipliers and weights, of all states, in float64."""
        lam, weights = self._begin(start)
        best, least = (lam, weights), self.value(lam, weights)
        if steps and len(self.A):
            dual, primal, of_weights = self._step_sizes(lam)
            project = _Corners(self.low, self.high, self.most)
            of_x, of_w = (primal * most.square() for most in self.most)
        sums, count = (torch.zeros_like(lam), torch.zeros_like(weights)), 0
        for step in range(1, steps * bool(len(self.A)) + 1):
            slope = torch.addmm(self.c, lam, self.A) + weights @ self.G - lam
            x, w = project(torch.addcmul(self.x, of_x, slope), torch.addcmul(self.w, of_w, lam))
            t = torch.addcmul(self.t, primal, torch.addmm(self.g, lam, self.B) + weights @ self.H).clamp_(-1, 1)
            over_x, over_w, over_t = 2 * x - self.x, 2 * w - self.w, 2 * t - self.t
            rest = torch.addmm(torch.addmm(self.b, over_x, self.A.mT), over_t, self.B.mT) - over_x + over_w
            lam = lam - OVER * dual * rest
            new = (weights - of_weights * (over_x @ self.G.mT + over_t @ self.H.mT + self.d)).clamp(min=0)
            weights = torch.lerp(weights, new, OVER)
            self.x, self.w = torch.lerp(self.x, x, OVER), torch.lerp(self.w, w, OVER)
            self.t = torch.lerp(self.t, t, OVER)
            sums, count = (sums[0] + lam, sums[1] + weights), count + 1
            if step % LOOKS == 0 or step == steps:
                means = sums[0] / count, sums[1] / count
                for tried in ((one, many.clamp(min=0)) for one, many in ((lam, weights), means)):
                    value = self.value(*tried)
                    better = (value < least)[:, None]
                    best = torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1])
                    least = torch.minimum(least, value)
                sums, count = (torch.zeros_like(lam), torch.zeros_like(weights)), 0
        self.lam, self.weights = best
        return self._whole(*(part.double().nan_to_num(0.0, 0.0, 0.0) for part in best))

    def _whole(self, lam: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the multipliers of eliminated states: ``lam = nu`` where x = z, none where x = 0."""
        rows = self.rows.plus(weights, self.regions.conditions)
        whole = torch.zeros_like(rows.states)
        whole[:, self.open] = lam
        whole[:, self.on] = (rows.states[:, self.on] + lam @ self.across) @ self.inverse
        return whole.nan_to_num(0.0, 0.0, 0.0), weights

    def point(self) -> Tensor:  # (R, 2n + p)
        """Returns the last point in the units of `Maximum`."""
        n = len(self.regions.relu)
        shares = self.t.new_zeros(len(self.t), 2 * n + self.t.shape[1])
        shares[:, self.open], shares[:, n + self.open] = self.x / self.most[0], self.w / self.most[1]
        shares[:, 2 * n :] = self.t
        return shares.clamp(-2, 2).nan_to_num(0.0).half()

    def gaps(self) -> Tensor:  # (R, n)
        """Returns what the triangle of every state adds to the bound at the last point."""
        nu = self.c + self.weights @ self.G + self.lam @ self.A
        gaps = torch.zeros_like(self.rows.states)
        gaps[:, self.open] = (nu.abs() * torch.minimum(self.x, self.w).clamp(min=0)).double()
        return gaps.nan_to_num(0.0)


class _Corners:
    """Projects pairs (x, w), in units of the most that they can be, on the corner x, w >= 0, x + w <= 1.

    Where ReLU is affine that is a line, on which x and w have further ends.
    """

    def __init__(self, low: Tensor, high: Tensor, most: tuple[Tensor, Tensor]) -> None:
        self.most, self.inverse = most, [1 / one for one in most]
        self.x = low.clamp(min=0), high.clamp(min=0)
        self.w = (-high).clamp(min=0), (-low).clamp(min=0)

    def __call__(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        inside_x, inside_w = x.clamp(*self.x), w.clamp(*self.w)
        outside = inside_x * self.inverse[0] + inside_w * self.inverse[1] > 1
        share = (0.5 + 0.5 * (x * self.inverse[0] - w * self.inverse[1])).clamp_(0, 1)
        onto = share * self.most[0], (1 - share) * self.most[1]
        return torch.where(outside, onto[0], inside_x), torch.where(outside, onto[1], inside_w)


def crown_intervals(wide: Query, rounds: int) -> IntervalPropagation:
    """Encloses all pre-activations and states by what the passes of CROWN prove together."""
    first, *others = (backward.enclosure for backward in enclosed(wide, rounds, wide.combination is None))
    for other in others:
        for k in range(len(first.activations)):
            first.tighten(k, other.z(k))
    return first


def tightest_intervals(wide: Query, rounds: int) -> IntervalPropagation:
    """Encloses all pre-activations and states by CROWN, and loops by triangle programs too."""
    enclosure = crown_intervals(wide, rounds)
    continue_loops(enclosure)
    return enclosure


STEPS, GROWING_STEPS = 60, 30  # of the primal-dual method
LARGEST_CONTINUED = 2**28  # states of a loop, twice, times the entries of B, above which that takes too long
ROOM, AHEAD = 0.02, 1.0  # of its width and of its last growth, by which a box is made larger
GROWN, GIVEN_UP = 24, 8.0  # rounds and times the first width after which a box is given up


def continue_loops(enclosure: IntervalPropagation) -> None:
    """Tightens loops of ReLU over boxes by `Continuation`'s theorem, and what reads them by intervals.

    Triangle programs in place of CROWN map far larger boxes into themselves.
    """
    query, changed = enclosure.query, False
    if not query.form.order.loops or not isinstance(query.set, Box):
        return
    try:
        constraints = ReluConstraints.of(query.form, "continuation")
    except MethodError:
        return
    blocks: list[int] = []
    starts = np.cumsum((0, *query.form.partition))
    applies = Continuation(CrownPass(enclosure))
    for stage in enclosure.operators.order.stages:
        blocks += stage.blocks
        if stage.loop is not None and not applies.why_not(stage):
            try:
                centers = query.once("center_preactivations", center_preactivations)
            except (IllPosedError, MethodError):  # nothing bounds the error at the center
                return
            states = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in blocks])
            looping = torch.from_numpy(
                np.concatenate([np.full(query.form.partition[k], k in stage.blocks) for k in blocks])
            )
            part, known = constraints.part(states), side_by_side([enclosure.z(k) for k in blocks])
            center = side_by_side([centers[k] for k in blocks])
            low, high = known.lower.clone(), known.upper.clone()
            for index in range(len(query.set)):
                inputs, start = query.set.box().interval.at(index), center.at(index)
                proven = continued_box(part, inputs, known.at(index), start, looping, query)
                if proven is not None:
                    low[index], high[index], changed = *proven, True
            sizes = [query.form.partition[k] for k in blocks]
            for k, *ends in zip(blocks, low.split(sizes, dim=1), high.split(sizes, dim=1), strict=True):
                enclosure.tighten(k, Interval(*ends))
        if changed:
            enclosure.enclose(stage)


def continued_box(
    constraints: ReluConstraints, inputs: Interval, known: Interval, center: Interval, looping: Tensor,
    query: Query, conditions: Objectives | None = None, gain: float = GAIN,
) -> Interval | None:  # (n,)  # fmt: skip
    """Proves a box of all pre-activations of a loop; see `Continuation`. None if that fails or is of no use.

    Args:
        constraints: of the loop and of all states that it reads.
        known: what is proven of them, which may be nothing of the loop.
        center: the equilibrium at the center of the inputs.
        looping: (n,), which states are the loop's.
        conditions: rows that are assumed to be nonnegative; the box is proven as long as they are.
        gain: how many times wider than the first guess what is known must be.
    """
    z, (unit,) = center.where(looping, known), looping.nonzero(as_tuple=True)
    if 2 * len(unit) * constraints.B.size > LARGEST_CONTINUED:
        return None
    region, found, first = torch.zeros(2 * len(unit), dtype=torch.int64), None, math.inf
    assumed, old, last = conditions or Objectives.none(constraints), known.width[unit].sum(), None
    for _ in range(GROWN * (1 if conditions is None else 2)):
        regions = Regions(constraints, inputs, Interval(*(end[None] for end in z.within(known))), assumed)
        found = _image(regions, regions.units(region[: len(unit)], unit), region, unit, found)
        image = Interval(-found.bound[len(unit) :], found.bound[: len(unit)]).within(known.at(unit))
        box, point = z.at(unit), center.at(unit)
        held = (torch.minimum(image.lower, point.lower) > box.lower) & (
            torch.maximum(image.upper, point.upper) < box.upper
        )
        if bool(held.all()):
            z = image
            break
        first = min(first, float(image.width.sum()))
        if query.late or not float(image.width.sum()) <= GIVEN_UP * first or bool(old < gain * first):
            return None
        grown, last = _grown(image, last, regions.relu[unit]), image
        z = Interval(z.lower.index_put((unit,), grown.lower), z.upper.index_put((unit,), grown.upper))
    else:
        return None
    return Interval(known.lower.index_put((unit,), z.lower), known.upper.index_put((unit,), z.upper))


def _image(regions: Regions, rows: Objectives, region: Tensor, unit: Tensor, found: Maximum | None) -> Maximum:
    """Bounds all pre-activations of a loop, with effort only where they are not affine, or may not be."""
    found = regions.maximum(rows, region, 0, None if found is None else found.start)
    upper, lower = found.bound.chunk(2)
    near = regions.relu[unit] & ((upper > 0) & (lower > 0) | regions.open[0, unit])
    (some,) = near.repeat(2).nonzero(as_tuple=True)
    if len(some):
        better = regions.maximum(rows.part(some), region[some], GROWING_STEPS, found.part(some).start)
        found = Maximum(*(old.index_put((some,), new) for old, new in zip(found, better, strict=True)))
    return found


def _grown(image: Interval, last: Interval | None, relu: Tensor) -> Interval:
    """Makes an image larger, and far larger where that leaves a state affine; what has grown will grow further."""
    on, off = ~relu | (image.lower > 0), relu & (image.upper < 0)
    room = torch.where(on | off, 0.5, ROOM) * image.width + 8 * 2 * UNIT * image.magnitude
    lower, upper = image.lower - room, image.upper + room
    if last is not None:
        lower = lower - AHEAD * (last.lower - image.lower).clamp(min=0)
        upper = upper + AHEAD * (image.upper - last.upper).clamp(min=0)
    lower = torch.where(on & relu, torch.maximum(lower, image.lower / 2), lower)
    return Interval(lower, torch.where(off, torch.minimum(upper, image.upper / 2), upper))


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
