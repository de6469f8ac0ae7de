"""The largest value of a separable function of the states, by a dual (003, Theorem 7).

`Separable` is a sum of functions of single states. `Columns` is a linear program over points of the graphs of all
states, that grows; its multipliers enter the dual of `separable_bound`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.conditions.rounding import TINY, convert_outward, rounding_slack
from wellposed.errors import InputError, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.robust.boxes import box_states
from wellposed.robust.linear_programs import (
    Array,
    LinearProgram,
    ReluConstraints,
    in_float64,
    side_by_side,
    tightest_intervals,
    to_array,
)
from wellposed.robust.query import Posed, Query
from wellposed.robust.sets import Box, Interval, Uncertainty, proven_upper

HALVINGS = 60


@dataclass(frozen=True)
class Separable:
    """The sum ``sum_i f_i(x_i)`` of functions that are all convex or all concave.

    Args:
        function: takes ``(n,)`` states to their n values, entry by entry.
        curvature: linear functions are both.

    Example:
        >>> f = Separable(lambda x: -x.square(), "concave")
        >>> point, value = f.peak(torch.tensor([2.0]), Interval(torch.tensor([0.0]), torch.tensor([3.0])))
        >>> round(float(point), 5), round(float(value), 5)
        (1.0, 1.0)
    """

    function: Callable[[Tensor], Tensor]
    curvature: Literal["convex", "concave"]

    def __post_init__(self) -> None:
        if self.curvature not in ("convex", "concave"):
            raise InputError(f"the curvature is 'convex' or 'concave'; received {self.curvature!r}")

    @classmethod
    def linear(cls, coefficients: Tensor) -> "Separable":
        """Returns ``c' x``."""
        return cls(lambda x: coefficients.to(x) * x, "convex")

    def of_some(self, states: Tensor, n: int) -> "Separable":
        """Returns the same function of some of n states, by their places."""
        if len(states) == n:
            return self
        return Separable(
            lambda x: torch.zeros_like(x).index_put((states,), self.function(x[states])), self.curvature
        )

    def at(self, x: Tensor) -> Tensor:
        """Evaluates every f_i."""
        values = self.function(x)
        if values.shape != x.shape or not bool(values.isfinite().all()):
            raise InputError(
                f"a separable function takes {tuple(x.shape)} states to as many finite values; it returned the "
                f"shape {tuple(values.shape)}"
            )
        return values

    def peak(self, slope: Tensor, x: Interval) -> tuple[Tensor, Tensor]:
        """Finds the maxima of ``f_i(x) + slope_i x`` on intervals: points, and numbers that are no smaller."""
        if self.curvature == "convex":
            low, high = (self.at(end) + slope * end for end in x)
            return torch.where(low > high, x.lower, x.upper), torch.maximum(low, high)
        low, high = x.lower.clone(), x.upper.clone()
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            rising = self._derivative(middle) + slope > 0
            low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
        rise = (self._derivative(low) + slope).clamp(min=0) * (high - low)  # the tangent lies above
        return (low + high) / 2, self.at(low) + slope * low + rise

    def _derivative(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.at(point).sum(), point)
        return slope


class Master(NamedTuple):
    """The value of a program over some points, which is no larger than over all, and its multipliers."""

    value: float
    lam: Array


class Columns:
    """Mixes points ``(z_i, x_i, f_i)`` of every state so that ``z = Ax + Bu + b``.

    A variable is the weight of a point, of an input, or an input itself where the set is a box; where z has no
    lower end a further one takes z down from zero.
    """

    def __init__(
        self, rows: ReluConstraints, inputs: Uncertainty, index: int, f: Separable, x: Interval, z: Interval
    ) -> None:
        self.rows, self.inputs, self.index, self.f = rows, inputs, index, f
        relu = torch.as_tensor(rows.relu)
        every = torch.arange(len(relu))
        low = torch.where(relu, x.lower.clamp(min=0), x.lower)
        ends = torch.where(relu & (z.upper <= 0), 0.0, low), torch.where(relu & (z.upper <= 0), 0.0, x.upper)
        off = torch.where(relu, z.upper.clamp(max=0), low)
        starts = [(every, ends[0], torch.where(relu & (z.upper <= 0), off, ends[0]))]
        starts += [(every, ends[1], torch.where(relu & (z.upper <= 0), off, ends[1]))]
        cut = (relu & (z.lower < 0)).nonzero()[:, 0]
        zero = torch.zeros(len(cut), dtype=low.dtype)
        starts += [(cut, zero, off[cut])]
        bounded = cut[z.lower[cut].isfinite()]
        starts += [(bounded, torch.zeros(len(bounded), dtype=low.dtype), z.lower[bounded])]
        self.rays = to_array(cut[z.lower[cut].isinf()]).astype(int)
        self.unit, self.x, self.z = (torch.cat(columns) for columns in zip(*starts, strict=True))
        self.inputs_seen = inputs.center[index][None]

    def add(self, x: Tensor, z: Tensor, drive: Tensor) -> None:
        """Adds a point for every state, and the input at which ``drive' u`` is largest."""
        self.unit = torch.cat([self.unit, torch.arange(len(x))])
        self.x, self.z = torch.cat([self.x, x]), torch.cat([self.z, z])
        if isinstance(self.inputs, Box):
            return
        with torch.enable_grad():
            functional = drive.detach()[None].requires_grad_()
            support = self.inputs.support_rows(functional, torch.tensor([self.index]))
            (point,) = torch.autograd.grad(support.sum(), functional)
        self.inputs_seen = torch.cat([self.inputs_seen, point])

    def solve(self) -> Master:
        """Solves for the best mixture."""
        n, weights = len(self.rows.A), len(self.unit)
        unit, x, z = to_array(self.unit).astype(int), to_array(self.x), to_array(self.z)
        share = np.zeros((n, weights))
        share[unit, np.arange(weights)] = 1.0
        links = np.zeros((n, weights))
        links[unit, np.arange(weights)] = z
        links -= self.rows.A[:, unit] * x
        drop = np.zeros((n, len(self.rays)))
        drop[self.rays, np.arange(len(self.rays))] = -1.0
        inputs, lower, upper, total = self._inputs()
        top = np.concatenate([links, drop, -inputs], axis=1)
        bottom = np.concatenate([share, np.zeros((n, drop.shape[1] + inputs.shape[1]))], axis=1)
        pieces, sides = [top, bottom], [self.rows.bias, np.ones(n)]
        if total:
            pieces.append(
                np.concatenate([np.zeros((1, weights + drop.shape[1])), np.ones_like(lower)[None]], axis=1)
            )
            sides.append(np.ones(1))
        deepest = np.abs(links).max() * n + np.abs(inputs).sum() + np.abs(self.rows.bias).max() + 1
        ends = np.concatenate([np.ones(weights), np.full(drop.shape[1], deepest), upper])
        starts = np.concatenate([np.zeros(weights + drop.shape[1]), lower])
        side = np.concatenate(sides)
        values = _values(self.f, unit, self.x, n)
        objective = np.concatenate([values, np.zeros(drop.shape[1] + inputs.shape[1])])
        optimum = LinearProgram(np.concatenate(pieces), side, side, starts, ends).maximum(objective)
        return Master(optimum.value, optimum.duals[:n])

    def _inputs(self) -> tuple[Array, Array, Array, bool]:
        """Returns the columns of the inputs with their bounds, and whether they are weights."""
        if isinstance(self.inputs, Box):
            return (
                self.rows.B,
                to_array(self.inputs.lower[self.index]),
                to_array(self.inputs.upper[self.index]),
                False,
            )
        points = self.rows.B @ to_array(self.inputs_seen).T
        return points, np.zeros(points.shape[1]), np.ones(points.shape[1]), True


def _values(f: Separable, unit: np.ndarray, x: Tensor, n: int) -> Array:
    """Evaluates f_i at points of different states: every point in place of its state, the others at its value."""
    table = torch.stack([f.at(value.expand(n)) for value in x.unique()])
    order = torch.searchsorted(x.unique(), x)
    return to_array(table[order, torch.as_tensor(unit)])


SETS = ("theorem", "triangle")


@torch.no_grad()
def separable_bound(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    f: Separable,
    relaxation: Literal["theorem", "triangle"] = "triangle",
    rounds: int = 50,
    tolerance: float = 1e-7,
) -> Tensor:  # (B,)
    """Bounds ``max sum_i f_i(x_i)`` over all equilibria of a ReLU form, for every sample, by Theorem 7 (003).

    For any multiplier lam,

        ``p* <= support_U(B' lam) + lam' b + sum_i g_i(lam_i, (A' lam)_i)``,
        ``g_i(a, c) = max_z f_i(z_+) - a z + c z_+``;

    the least such bound is sought by linear programs over more and more points of the graphs of ``(z, z_+, f)``,
    whose dual values are the next lam. Every lam proves a bound, so it may be stopped anywhere. For linear f and
    ``"triangle"`` the least one is the triangle program's; ``"theorem"`` lies between that and the printed one,
    since ``z_+ = x > 0`` implies ``z = x``, which the printed program forgets.

    Args:
        f: convex or concave functions of the states, taken as exact.
        relaxation: which z the maximum in g runs over: ``"theorem"`` all with ``|z_+ - x0| <= sigma_x``,
            ``"triangle"`` those in the intervals that CROWN refined.
        rounds, tolerance: when to stop; the gap is relative.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> around = Box(torch.ones(1, 1), 2 * torch.ones(1, 1))
        >>> separable_bound(form, around, Separable(torch.square, "convex")).round(decimals=3)
        tensor([16.])
    """
    if relaxation not in SETS:
        raise unknown_name("relaxation", relaxation, SETS)
    if rounds < 1 or not tolerance > 0:
        raise InputError(f"rounds is at least 1 and tolerance positive; received {rounds} and {tolerance}")
    form, exact, states = Posed.of(model, inputs)
    query = Query(form, exact, None)
    f = f if states is None else f.of_some(states, form.sizes[0])
    if not form.sizes[0]:
        return inputs.center.new_zeros(len(inputs))  # a sum of nothing
    wide = in_float64(query)
    rows = ReluConstraints.of(wide.form, "separable_bound")
    x, z = _intervals(wide, relaxation)
    values = [
        _Dual(rows, wide.set, index, f, x.at(index), z.at(index)).least(rounds, tolerance)
        for index in range(len(inputs))
    ]
    value, lost = convert_outward(torch.tensor(values, dtype=torch.float64), inputs.dtype)
    return proven_upper(value + lost).to(query.form.device)


def _intervals(wide: Query, relaxation: str) -> tuple[Interval, Interval]:
    """Returns intervals of the states and of the pre-activations, with no lower end where the theorem has none."""
    if relaxation == "triangle":
        enclosure = tightest_intervals(wide, 3)
        return side_by_side(enclosure.states), side_by_side(enclosure.preactivations)
    x = side_by_side(box_states(wide))
    return x, Interval(torch.where(x.lower > 0, x.lower, -torch.inf), x.upper)


class Peaks(NamedTuple):
    """The inner maxima of a multiplier, and where they are attained."""

    value: float
    x: Tensor
    z: Tensor


@dataclass(frozen=True)
class _Dual:
    """The dual problem of one sample."""

    rows: ReluConstraints
    set: Uncertainty
    index: int
    f: Separable
    x: Interval  # (n,)
    z: Interval

    def least(self, rounds: int, tolerance: float) -> float:
        columns = Columns(self.rows, self.set, self.index, self.f, self.x, self.z)
        best = torch.inf
        for _ in range(rounds):
            optimum = columns.solve()
            lam = torch.as_tensor(optimum.lam)
            peaks = self.value(lam)
            best = min(best, peaks.value if peaks.value > -torch.inf else torch.inf)
            if best - optimum.value <= tolerance * (1 + abs(best)):
                break
            columns.add(peaks.x, peaks.z, lam @ torch.as_tensor(self.rows.B))
        return best

    def value(self, lam: Tensor) -> Peaks:
        """Evaluates the dual function, rounded up."""
        relu = torch.as_tensor(self.rows.relu)
        lam = torch.where(relu & self.z.lower.isinf() & (lam > 0), 0.0, lam)  # else the bound is infinite
        through = lam @ torch.as_tensor(self.rows.A)
        on = Interval(torch.where(relu, self.x.lower.clamp(min=0), self.x.lower), self.x.upper)
        point, above = self.f.peak(through - lam, on)
        off = torch.where(lam > 0, self.z.lower, self.z.upper.clamp(max=0))
        below = self.f.at(torch.zeros_like(lam)) - torch.where(lam == 0, 0.0, lam * off)
        cut = relu & (self.z.lower < 0)
        below = torch.where(cut, below, -torch.inf)
        above = torch.where(relu & (self.z.upper <= 0), below, above)
        drive = (lam @ torch.as_tensor(self.rows.B))[None]
        sample = torch.tensor([self.index])
        support = float(self.set.support_rows(drive, sample))
        total = torch.maximum(above, below)
        value = support + float(lam @ torch.as_tensor(self.rows.bias)) + float(total.sum())
        first = above >= below
        off = off.clamp(min=-(2 * self._size() + 1))  # where z has no end
        x, z = torch.where(first, point, 0.0), torch.where(first, point, off)
        return Peaks(value + self._lost(lam, total), x, z)

    def _lost(self, lam: Tensor, total: Tensor) -> float:
        u = self.set.box().interval.magnitude[self.index]
        size = self._size() + self.x.magnitude + self.z.upper.abs()
        ends = torch.where(self.z.lower.isinf(), 0.0, self.z.lower.abs())
        magnitude = (lam.abs() * (size + ends)).sum() + total.abs().sum()
        terms = self.rows.terms + len(lam) + len(u) + 64
        lost = 8 * terms * TINY * float(1 + self.x.magnitude.sum() + u.sum() + lam.abs().sum())
        return float(rounding_slack(2 * magnitude, terms)) + lost

    def _size(self) -> Tensor:
        """Bounds ``|A||x| + |B||u| + |b|``."""
        u = self.set.box().interval.magnitude[self.index]
        size = (
            torch.as_tensor(self.rows.absolute_states) @ self.x.magnitude
            + torch.as_tensor(self.rows.absolute_inputs) @ u
        )
        return size + torch.as_tensor(self.rows.bias).abs()
