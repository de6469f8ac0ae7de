"""Polyhedra around all equilibria over a set of inputs: what a linear program is solved on."""

from dataclasses import dataclass

import numpy as np
import torch

from wellposed.forms import ImplicitForm
from wellposed.robust.convex_set import SparseBox
from wellposed.robust.interval import Interval
from wellposed.robust.linear_program import UNIT, Array, LinearProgram
from wellposed.robust.operators import Operators
from wellposed.robust.query import MethodError
from wellposed.robust.uncertainty import Uncertainty

LARGEST = 2**25  # entries of a program's matrix
AFFINE, RELU = "identity", "relu"


@dataclass(frozen=True)
class Rows:
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

    @classmethod
    def of(cls, form: ImplicitForm, method: str) -> "Rows":
        """Reads a form; the matrices must be small enough to write down."""
        n, p, _ = form.sizes
        others = sorted({phi.name for phi in form.activations if phi.name not in (RELU, AFFINE)})
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
        relu = np.concatenate([np.full(size, phi.name == RELU) for phi, size in pairs])
        operators = Operators(form)
        A, B = (to_array(part.to_dense()) for part in (form.A, form.B))
        over_states, over_inputs = (to_array(operators.cover(part, False).to_dense()) for part in (form.A, form.B))
        return cls(A, B, over_states, over_inputs, to_array(bias), relu, operators.terms)

    def equations(self, x: Interval, u: Interval) -> tuple[Array, Array, Array]:
        """Returns ``(I - A, -B)`` and the two sides of ``x - Ax - Bu``, apart by what rounds in forming them."""
        states = to_array(x.magnitude)
        size = self.absolute_states @ states + states + self.absolute_inputs @ to_array(u.magnitude)
        lost = 2 * self.terms * UNIT * size
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


def printed_set(rows: Rows, x: Interval, inputs: Uncertainty, index: int) -> RelaxedSet:
    """Builds the polyhedron of 003, section 4.3: ``x >= Ax + Bu + b``, ``x >= 0`` and ``|x - x0| <= sigma_x``.

    Args:
        x: (n,), the box of Theorem 5.
    """
    matrix, lower, upper = rows.equations(x, of_sample(inputs.box().interval, index))
    upper = np.where(rows.relu, np.inf, upper)
    low = np.where(rows.relu, np.maximum(to_array(x.lower), 0.0), to_array(x.lower))
    states = low, np.maximum(to_array(x.upper), low)
    return _joined(matrix, (lower, upper), states, _no_variables(), inputs, index)


def triangle_set(rows: Rows, x: Interval, z: Interval, inputs: Uncertainty, index: int) -> RelaxedSet:
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
    ends = [np.concatenate(parts) for parts in zip(states, u, more, strict=True)]
    n, p = len(states[0]), len(u[0])
    if isinstance(inputs, SparseBox):
        matrix, sides, ends = _counted(matrix, sides, ends, (n, p), (inputs, index))
    return RelaxedSet(LinearProgram(matrix, *sides, *ends), n, p)


def _counted(
    matrix: Array, sides: Ends, ends: list[Array], sizes: tuple[int, int], place: tuple[SparseBox, int]
) -> tuple[Array, Ends, list[Array]]:
    """Writes ``u = u0 + up a - down c`` with shares ``a, c`` in [0, 1] that add up to k at most."""
    n, p = sizes
    inputs, index = place
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
