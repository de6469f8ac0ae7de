"""CROWN at the fixed point: linear bounds carried backwards through blocks and loops.

Lines above and below an activation on an interval come from `lines_of`. For any coefficient nu and
slope-times-coefficient lam, ``nu phi(z) <= lam z + g`` holds on [l, h] with ``g = max_z (nu phi(z) - lam z)``. The
maximum is attained at an end, at a kink, or where ``phi' = lam / nu``, so it is computed from points of the
interval for whatever slopes were chosen; no slope can make a bound unsound.

Between lines, ``nu' x <= lam' z + g`` with lam = s(nu) nu and these intercepts g; as z = Ax + Bu + b,

    ``c' x <= lam' (Bu + b) + sum g + (c + A' lam - nu)' x``

for **any** nu. Without a loop nu = c + A' lam by substitution and the last term vanishes; in a loop the iteration
``nu <- c + A' lam(nu)`` (`Multipliers`, many rows at once) ends somewhere and the last term is bounded by the
interval of the states, so that every iterate is sound. States that are affine on their interval are eliminated
first, up to some size, which leaves little to iterate.

`CrownPass` carries functionals back to the inputs, and `optimised` improves the free slopes, for every bound its
own. `Refinement` tightens pre-activations, unit by unit, before other blocks read them. `Continuation` finds
intervals of loops for lines to hold on, whatever certificate they have. `Crown` is the method: intervals, refined
by linear bounds, and linear bounds of what was asked for.
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.conditions.certificate import ErrorBounder
from wellposed.conditions.rounding import rounding_slack
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Operator
from wellposed.forms.evaluation import Stage
from wellposed.robust.boxes import CenterSolve, box_states
from wellposed.robust.intervals import IntervalPropagation, image, loop_states, unbounded_states
from wellposed.robust.query import Bounds, Functionals, MethodError, Query, of_states, shaped, sum_sizes
from wellposed.robust.sets import Ball, Box, Interval, SparseBox, proven_upper


class Slopes(NamedTuple):
    """Slopes of the lines below and above, and where others would do as well and may be optimised."""

    lower: Tensor
    upper: Tensor
    free_lower: Tensor
    free_upper: Tensor


@dataclass(frozen=True)
class Lines(abc.ABC):
    """How an activation is enclosed between lines."""

    phi: Activation

    @abc.abstractmethod
    def unstable(self, z: Interval) -> Tensor:
        """Tells where phi is not affine on the interval."""

    @abc.abstractmethod
    def slopes(self, z: Interval) -> Slopes:
        """Chooses slopes."""

    @abc.abstractmethod
    def touching(self, nu: Tensor, lam: Tensor, z: Interval) -> list[Tensor]:
        """Lists points of the interval inside of which ``nu phi(z) - lam z`` may be largest."""

    def intercept(self, nu: Tensor, lam: Tensor, z: Interval) -> Tensor:
        """Returns ``max_z (nu phi(z) - lam z)`` over the interval."""
        largest = torch.maximum(self._gap(nu, lam, z.lower), self._gap(nu, lam, z.upper))
        for point in self.touching(nu, lam, z):
            largest = torch.maximum(largest, self._gap(nu, lam, point))
        return largest

    def _gap(self, nu: Tensor, lam: Tensor, point: Tensor) -> Tensor:
        return nu * self.phi.function(point) - lam * point

    def chord(self, z: Interval) -> Tensor:
        """Returns the slope of the line through the ends."""
        width = z.upper - z.lower
        rise = self.phi.function(z.upper) - self.phi.function(z.lower)
        wide = width > 64 * torch.finfo(width.dtype).eps * z.magnitude
        slope = rise / torch.where(wide, width, 1.0)
        low, high = self.phi.slope
        return torch.where(wide, slope, self.phi.slope_at(z.center)).clamp(low, high)


@dataclass(frozen=True)
class Kinked(Lines):
    """Lines of a piecewise linear map: ReLU, leaky ReLU, hardtanh and their like."""

    kinks: tuple[float, ...]

    def unstable(self, z: Interval) -> Tensor:
        inside = torch.zeros_like(z.lower, dtype=torch.bool)
        for kink in self.kinks:
            inside = inside | ((z.lower < kink) & (z.upper > kink))
        return inside

    def slopes(self, z: Interval) -> Slopes:
        """Takes the chord on one side and the slope at the middle, which leaves the smaller area, on the other."""
        left, right = self.phi.slope_at(z.lower), self.phi.slope_at(z.upper)
        chord, middle, unstable = self.chord(z), self.phi.slope_at(z.center), self.unstable(z)
        convex, concave = unstable & (left < right), unstable & (left > right)
        return Slopes(torch.where(convex, middle, chord), torch.where(concave, middle, chord), convex, concave)

    def touching(self, nu: Tensor, lam: Tensor, z: Interval) -> list[Tensor]:
        return [torch.clamp(torch.full_like(z.lower, kink), z.lower, z.upper) for kink in self.kinks]


@dataclass(frozen=True)
class Sigmoidal(Lines):
    """Lines of a map that is convex below zero and concave above, ``phi(s z) = scaled tanh``: tanh and sigmoid."""

    stretch: float  # phi'(z) = phi'(0) / cosh(stretch z)^2

    def unstable(self, z: Interval) -> Tensor:
        return z.upper > z.lower

    def slopes(self, z: Interval) -> Slopes:
        lower, upper = -z.upper, -z.lower  # phi(-z) is phi(0) - phi(z) up to a constant
        return Slopes(self._above(Interval(lower, upper)), self._above(z), (z.upper <= 0), (z.lower >= 0))

    def _above(self, z: Interval) -> Tensor:
        """Chooses the slope of the line above: tangent in the middle, tangent through the left end, or chord."""
        concave, convex = z.lower >= 0, z.upper <= 0
        point = self._tangent(z)
        mixed = torch.where(point < z.upper, self.phi.slope_at(point), self.chord(z))
        return torch.where(concave, self.phi.slope_at(z.center), torch.where(convex, self.chord(z), mixed))

    @torch.no_grad()
    def _tangent(self, z: Interval) -> Tensor:
        """Finds the point d >= 0 at which the line through the left end touches, by bisection."""
        low, high = torch.zeros_like(z.lower), z.upper.clamp(min=0)
        value = self.phi.function(z.lower)
        for _ in range(24):
            point = (low + high) / 2
            steep = self.phi.slope_at(point) * (point - z.lower) > self.phi.function(point) - value
            low, high = torch.where(steep, point, low), torch.where(steep, high, point)
        return high

    def touching(self, nu: Tensor, lam: Tensor, z: Interval) -> list[Tensor]:
        """Solves ``phi'(z) = lam / nu``: z = +- log((1 + sqrt(1 - r)) / sqrt(r)) / stretch, r = lam/nu/phi'(0)."""
        with torch.no_grad():
            ratio = torch.where(nu != 0, lam / (torch.where(nu != 0, nu, 1.0) * self.phi.slope[1]), 1.0)
            ratio = ratio.clamp(torch.finfo(ratio.dtype).tiny, 1.0)
            point = ((1 - ratio).sqrt().log1p() - ratio.log() / 2) / self.stretch
        return [torch.clamp(point, z.lower, z.upper), torch.clamp(-point, z.lower, z.upper)]


def lines_of(phi: Activation) -> Lines | None:
    """Returns how an activation is enclosed between lines; None if that is not known.

    Example:
        >>> from wellposed.activations import get_activation
        >>> lines_of(get_activation("leaky_relu(0.1)")).kinks, lines_of(get_activation("gelu"))
        ((0.0,), None)
    """
    if phi.traits.kinks is not None:
        return Kinked(phi, phi.traits.kinks)
    return None if phi.traits.stretch is None else Sigmoidal(phi, phi.traits.stretch)


Coefficients = dict[int, Tensor]  # (R, n_k) by block
LATE = 3  # steps after which the iteration is extrapolated
NEWTON_STEPS = 12
LARGEST_SOLVE = 256  # states of a loop up to which every row has its own linear system for gradients
LARGEST_BATCH = 2**24  # entries of matrices and of rows that are eliminated at once
LARGEST_INVERSE = 1024  # states of a loop up to which its affine states are eliminated


@dataclass(frozen=True)
class Multipliers:
    """What a loop makes of functionals of its states.

    Args:
        start: c, the coefficients of the loop's blocks.
        slopes: lower and upper slopes of every row, by block; blocks without lines are missing.
        links: for every block, the blocks that read it with the transposed operators.
    """

    start: Coefficients
    slopes: dict[int, tuple[Tensor, Tensor]]
    links: dict[int, list[tuple[int, Operator]]]

    def lam(self, k: int, nu: Tensor) -> Tensor:
        """Returns s(nu) nu, s the upper slope where nu is positive."""
        lower, upper = self.slopes[k]
        return torch.where(nu > 0, upper, lower) * nu

    def image(self, nu: Coefficients) -> Coefficients:
        """Returns ``c + A' lam(nu)``."""
        lam = {k: self.lam(k, part) for k, part in nu.items() if k in self.slopes}
        image = {}
        for j, part in self.start.items():
            for i, operator in self.links[j]:
                part = part + operator.apply(lam[i])
            image[j] = part
        return image

    def eliminated(self, A: Tensor, sample: Tensor, max_steps: int, tolerance: float) -> Coefficients:
        """Solves ``nu = c + A' lam(nu)`` with the states eliminated whose two slopes agree.

        With the mean slopes d of a sample, ``nu (I - d A) = c + (lam(nu) - d nu) A`` (rows are functionals), and
        the last term vanishes but for states with two slopes. One inverse a sample leaves an equation of these
        alone, which is iterated; rows that it does not settle are solved by Newton's method. Where that fails too
        a residual is left, as after `settled`. Not differentiated.

        Args:
            A: (n, n), the matrix of the loop, blocks in the order of `start`.
            sample: (R,), the sample of every row; the slopes of a sample's rows are alike.
        """
        group = _Groups.of(sample)
        most = max(1, LARGEST_BATCH // (len(A) * (len(A) + group.shape[1])))
        if group.shape[0] > most:
            return self._eliminated_in_parts(A, sample, group.group // most, max_steps, tolerance)
        dtype, wide = A.dtype, torch.promote_types(A.dtype, torch.float32)  # no half precision has an inverse
        A, c = A.to(wide), group.padded(torch.cat([part.detach() for part in self.start.values()], dim=1)).to(wide)
        zero = {k: torch.zeros_like(part) for k, part in self.start.items()}
        sides = [[self.slopes[k][i] if k in self.slopes else zero[k] for k in zero] for i in (0, 1)]
        lower, upper = (
            group.padded(torch.cat([part.detach() for part in side], dim=1)).to(wide) for side in sides
        )
        middle = ((lower + upper) / 2)[:, :1]  # (S, 1, n)
        identity = torch.eye(len(A), dtype=A.dtype, device=A.device)
        inverse = torch.linalg.inv_ex(identity - middle.mT * A)[0]
        gain = A @ inverse  # (S, n, n)
        base, above, below = c @ inverse, upper - middle, lower - middle
        two = ((above != 0) | (below != 0)).any(1)
        count = int(two.sum(1).max()) if len(two) else 0
        if count:
            states = two.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]  # (S, m)
            columns = states[:, None].expand(-1, base.shape[1], -1)
            rows = gain.gather(1, states[:, :, None].expand(-1, -1, gain.shape[2]))
            inner = rows.gather(2, states[:, None].expand(-1, count, -1))
            own, above, below = (part.gather(2, columns) for part in (base, above, below))
            size = tolerance * c.abs().amax(2)
            base = base + _by_two_slopes(own, inner, above, below, size, max_steps) @ rows
        nu = group.rows(base).to(dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return dict(zip(self.start, nu.split([part.shape[1] for part in self.start.values()], dim=1), strict=True))

    def _eliminated_in_parts(
        self, A: Tensor, sample: Tensor, part: Tensor, max_steps: int, tolerance: float
    ) -> Coefficients:
        nu = {k: torch.zeros_like(rows) for k, rows in self.start.items()}
        for number in range(int(part.max()) + 1):
            (rows,) = (part == number).nonzero(as_tuple=True)
            slopes = {k: (lower[rows], upper[rows]) for k, (lower, upper) in self.slopes.items()}
            some = Multipliers({k: whole[rows] for k, whole in self.start.items()}, slopes, self.links)
            for k, solved in some.eliminated(A, sample[rows], max_steps, tolerance).items():
                nu[k][rows] = solved
        return nu

    def with_gradient(self, A: Tensor, nu: Coefficients) -> Coefficients:
        """Solves once more, by a linear system for every row with the slopes that the signs of nu choose."""
        chosen = []
        for k, part in nu.items():
            lower, upper = self.slopes.get(k, (torch.zeros_like(part),) * 2)
            chosen.append(torch.where(part > 0, upper, lower))
        dtype, wide = A.dtype, torch.promote_types(A.dtype, torch.float32)
        system = torch.eye(len(A), dtype=A.dtype, device=A.device) - torch.cat(chosen, dim=1)[:, :, None] * A
        rows = torch.cat(list(self.start.values()), dim=1)
        solved = torch.linalg.solve_ex(system.mT.to(wide), rows.to(wide))[0].to(dtype)
        return dict(zip(nu, solved.split([part.shape[1] for part in nu.values()], dim=1), strict=True))

    def settled(self, max_steps: int, tolerance: float) -> tuple[Coefficients, Coefficients]:
        """Iterates until no row changes by more than a tolerance, and returns nu with its image.

        After a few steps the secant of the last two residuals is taken (Anderson, memory one), unless gradients
        are asked for. A row that has settled is left alone, so that it does not depend on the others.
        """
        nu, size = dict(self.start), tolerance * _size(self.start)
        active, before = torch.ones_like(size, dtype=torch.bool), None
        following = self.image(nu)
        for step in range(max_steps):
            residual = {k: (following[k] - nu[k]).detach() for k in nu}
            active = active & (_size(residual) > size)
            if not bool(active.any()):
                break
            proposal = following
            if before is not None and step >= LATE and not any(part.requires_grad for part in following.values()):
                proposal = _extrapolated(following, residual, *before)
            before = following, residual
            nu = {k: torch.where(active[:, None], proposal[k], nu[k]) for k in nu}
            following = self.image(nu)
        return nu, following


@dataclass(frozen=True)
class _Groups:
    """Rows arranged by their samples, (R, n) as (S, most, n)."""

    group: Tensor  # (R,), which of the samples present
    slot: Tensor  # (R,)
    shape: tuple[int, int]

    @classmethod
    def of(cls, sample: Tensor) -> "_Groups":
        _, group, counts = torch.unique(sample, return_inverse=True, return_counts=True)
        order = group.argsort(stable=True)
        first = counts.cumsum(0) - counts
        slot = torch.empty_like(group)
        slot[order] = torch.arange(len(sample), device=sample.device) - first[group[order]]
        return cls(group, slot, (len(counts), int(counts.max()) if len(counts) else 0))

    def padded(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(*self.shape, rows.shape[1]).index_put((self.group, self.slot), rows)

    def rows(self, padded: Tensor) -> Tensor:
        return padded[self.group, self.slot]


def _by_two_slopes(
    base: Tensor, gain: Tensor, above: Tensor, below: Tensor, size: Tensor, max_steps: int
) -> Tensor:  # (S, R, m), (S, m, m), (S, R, m), (S, R, m), (S, R) -> (S, R, m)
    """Solves ``nu = base + s nu gain``, s being `above` where nu > 0 and `below` elsewhere; returns s nu."""
    nu, left = base, torch.ones_like(size, dtype=torch.bool)
    for _ in range(max_steps):
        following = base + (torch.where(nu > 0, above, below) * nu) @ gain
        left = left & ~((following - nu).abs().amax(2) <= size)
        if not bool(left.any()):
            break
        nu = torch.where(left[:, :, None], following, nu)  # a settled row does not depend on the others
    change = torch.where(nu > 0, above, below) * nu
    group, row = left.nonzero(as_tuple=True)
    some, matrix = base[group, row], gain[group]
    up, down = above[group, row], below[group, row]
    identity = torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    value = nu[group, row]
    for _ in range(min(max_steps, NEWTON_STEPS) if len(row) else 0):
        positive = value > 0
        system = identity - torch.where(positive, up, down)[:, :, None] * matrix
        value = torch.linalg.solve_ex(system.mT, some)[0]
        if bool((positive == (value > 0)).all()):
            break
    change[group, row] = torch.where(value > 0, up, down) * value
    return change


def _extrapolated(
    following: Coefficients, residual: Coefficients, last: Coefficients, before: Coefficients
) -> Coefficients:
    """Goes along the last step to where the residual would be least, in rows whose residual has not grown."""
    share = torch.where(_size(residual) > _size(before), 0.0, _secant(residual, before))[:, None]
    return {k: part - share * (part - last[k]) for k, part in following.items()}


def _secant(residual: Coefficients, before: Coefficients) -> Tensor:  # (R,)
    """Returns the share of the last step that makes the residual least, none where that is no better."""
    change = {k: residual[k] - before[k] for k in residual}
    along = torch.stack([(residual[k] * change[k]).sum(1) for k in residual]).sum(0)
    length = torch.stack([part.square().sum(1) for part in change.values()]).sum(0)
    share = along / length
    return torch.where(share.isfinite(), share.clamp(-20.0, 0.9), 0.0)


def _size(rows: Coefficients) -> Tensor:  # (R,)
    """Returns the largest absolute value of every row."""
    return torch.stack([part.detach().abs().amax(1) for part in rows.values()]).amax(0)


MAX_STEPS, TOLERANCE = 60, 1e-6  # of the iteration in a loop
SlopeChoice = dict[int, tuple[Tensor, Tensor]]  # lower and upper slopes of every row, by block


@dataclass
class LinearBound:
    """The parts of an upper bound while they are added up, and the sizes that its rounding depends on."""

    inputs: Tensor  # (R, p)
    value: Tensor  # (R,)
    size: Tensor  # (R,)
    lost: Tensor  # (R,), by underflow
    open: dict[int, Tensor]  # coefficients of blocks that are still to be replaced, (R, n_k)

    def add(self, k: int, coefficients: Tensor) -> None:
        """Adds coefficients of a block."""
        self.open[k] = self.open[k] + coefficients if k in self.open else coefficients


class CrownPass:
    """Carries functionals back to the inputs, through the lines on the intervals of an enclosure."""

    def __init__(self, enclosure: IntervalPropagation) -> None:
        self.enclosure, self.operators = enclosure, enclosure.operators
        self.lines = [lines_of(phi) for phi in enclosure.activations]
        self.columns: dict[int, list[int]] = {}
        for i, j in self.operators.blocks.A.parts:
            self.columns.setdefault(j, []).append(i)
        self._slopes: dict[int, tuple[Interval, Slopes]] = {}
        self._matrices: dict[tuple[int, ...], Tensor] = {}
        self.tiny = torch.finfo(self.operators.form.dtype).tiny

    def slopes(self, k: int) -> Slopes:
        """The slopes of a block, chosen anew when its interval has changed."""
        z, lines = self.enclosure.z(k), self.lines[k]
        assert lines is not None
        if k not in self._slopes or self._slopes[k][0] is not z:
            self._slopes[k] = z, lines.slopes(z)
        return self._slopes[k][1]

    def linear(self, rows: Functionals, choice: SlopeChoice | None = None) -> LinearBound:
        """Bounds functionals from above by linear functions of the inputs."""
        bound = LinearBound(rows.inputs, rows.constant, 4 * rows.size, rows.lost, dict(rows.states))
        for stage in reversed(self.operators.order.stages):
            if not any(k in bound.open for k in stage.blocks):
                continue
            if stage.loop is None:
                self._substitute(bound, stage.blocks[0], rows.sample, choice)
            else:
                self._close(bound, stage, rows.sample, choice)
        return bound

    def upper(self, rows: Functionals, choice: SlopeChoice | None = None) -> tuple[Tensor, Tensor]:  # (R,), (R,)
        """Bounds functionals from above; also returns how much of that is allowance for rounding."""
        bound = self.linear(rows, choice)
        p, n = rows.inputs.shape[1], self.enclosure.query.form.sizes[0]
        slack = rounding_slack(bound.size, self.operators.terms + p + n + 64) + 2 * bound.lost + 8 * n * self.tiny
        value = bound.value + self.enclosure.query.set.support_rows(bound.inputs, rows.sample) + slack
        return proven_upper(value), slack

    def _slopes_at(self, k: int, sample: Tensor, choice: SlopeChoice | None) -> tuple[Tensor, Tensor]:
        if choice is not None and k in choice:
            return choice[k]
        slopes = self.slopes(k)
        return slopes.lower[sample], slopes.upper[sample]

    def _substitute(self, bound: LinearBound, k: int, sample: Tensor, choice: SlopeChoice | None) -> None:
        nu = bound.open.pop(k)
        if self.lines[k] is None:
            self._stop(bound, k, nu, sample)
            return
        lower, upper = self._slopes_at(k, sample, choice)
        lam = torch.where(nu > 0, upper, lower) * nu
        self._intercept(bound, k, nu, lam, sample)
        self._pass_on(bound, k, lam, list(self.operators.order.rows[k]), sample)

    def _stop(self, bound: LinearBound, k: int, nu: Tensor, sample: Tensor) -> None:
        """Bounds the states of a block by their interval, where no lines are known."""
        x = self.enclosure.x(k).at(sample)
        bound.value = bound.value + x.largest(nu)
        bound.size = bound.size + 2 * (nu.detach().abs() * x.magnitude.detach()).sum(1)

    def _intercept(self, bound: LinearBound, k: int, nu: Tensor, lam: Tensor, sample: Tensor) -> None:
        lines, z = self.lines[k], self.enclosure.z(k).at(sample)
        assert lines is not None
        bound.value = bound.value + lines.intercept(nu, lam, z).sum(1) + lam @ self.enclosure.biases[k]
        with torch.no_grad():
            reach, states = self.enclosure.size(k)[sample], self.enclosure.x(k).at(sample).magnitude
            own = z.magnitude + states + self._origin(k)
            bound.size = bound.size + (6 * lam.abs() * reach + 2 * (nu.abs() + lam.abs()) * own).sum(1)
            bound.lost = bound.lost + self.operators.lost * own.sum(1)

    def _origin(self, k: int) -> float:
        """Returns |phi(0)|, to which the rounding of phi is relative."""
        phi = self.enclosure.activations[k]
        return float(phi.function(torch.zeros(1, dtype=torch.float64)).abs()) if phi.rounding else 0.0

    def _pass_on(self, bound: LinearBound, k: int, lam: Tensor, blocks: list[int], sample: Tensor) -> None:
        """Replaces ``lam' z`` of a block by inputs and by the states of other blocks.

        A new coefficient may have lost something by underflow, which counts as much as what it multiplies.
        """
        if self.operators.inputs[k].parts:
            bound.inputs = bound.inputs + self.operators.inputs_transposed[k].apply(lam)
            self._pay(bound, self.enclosure.query.set.box().interval, sample)
        for j in blocks:
            bound.add(j, self.operators.transposed[k, j].apply(lam))
            self._pay(bound, self.enclosure.x(j), sample)

    def _pay(self, bound: LinearBound, multiplied: Interval, sample: Tensor) -> None:
        with torch.no_grad():
            bound.lost = bound.lost + self.operators.lost * multiplied.magnitude.sum(1)[sample]

    def _close(self, bound: LinearBound, stage: Stage, sample: Tensor, choice: SlopeChoice | None) -> None:
        """Iterates ``nu <- c + A' lam(nu)`` in a loop and bounds what is left over by the states' interval."""
        blocks = stage.blocks
        zero = {k: bound.value.new_zeros(len(sample), self.operators.form_size(k)) for k in blocks}
        start = {k: bound.open.pop(k, zero[k]) for k in blocks}
        loop = self._loop(start, sample, choice)
        nu, image = self._multipliers(loop, stage, sample)
        for k in blocks:
            x = self.enclosure.x(k).at(sample)
            bound.value = bound.value + x.largest(image[k] - nu[k])
            self._pay(bound, self.enclosure.x(k), sample)
            bound.size = bound.size + 2 * (start[k].detach().abs() * x.magnitude.detach()).sum(1)
            if self.lines[k] is None:
                self._stop(bound, k, nu[k], sample)
            else:
                lam = loop.lam(k, nu[k])
                self._intercept(bound, k, nu[k], lam, sample)
                outside = [j for j in self.operators.order.rows[k] if j not in blocks]
                self._pass_on(bound, k, lam, outside, sample)

    def _multipliers(self, loop: Multipliers, stage: Stage, sample: Tensor) -> tuple[Coefficients, Coefficients]:
        assert stage.loop is not None
        slopes = [side for pair in loop.slopes.values() for side in pair]
        moving = torch.is_grad_enabled() and any(part.requires_grad for part in (*loop.start.values(), *slopes))
        states = stage.loop.A.shape[0]
        if states > (LARGEST_SOLVE if moving else LARGEST_INVERSE):
            return loop.settled(MAX_STEPS, TOLERANCE)
        with torch.no_grad():
            nu = loop.eliminated(self._dense(stage).detach(), sample, MAX_STEPS, TOLERANCE)
        nu = loop.with_gradient(self._dense(stage), nu) if moving else nu
        return nu, loop.image(nu)

    def _dense(self, stage: Stage) -> Tensor:
        """The matrix of a loop."""
        if stage.blocks not in self._matrices:
            assert stage.loop is not None
            self._matrices[stage.blocks] = stage.loop.A.to_dense()
        return self._matrices[stage.blocks]

    def _loop(self, start: dict[int, Tensor], sample: Tensor, choice: SlopeChoice | None) -> Multipliers:
        slopes = {k: self._slopes_at(k, sample, choice) for k in start if self.lines[k] is not None}
        links = {
            j: [(i, self.operators.transposed[i, j]) for i in self.columns.get(j, []) if i in slopes]
            for j in start
        }
        return Multipliers(start, slopes, links)


RATE, DECAY = 0.25, 0.95  # of Adam, which optimises slopes


def tightest(backward: CrownPass, rows: Functionals, steps: int) -> tuple[Tensor, Tensor]:  # (R,), (R,)
    """Bounds functionals from above, with slopes optimised for some steps; also returns the rounding's share."""
    value, slack = backward.upper(rows)
    if not steps or backward.enclosure.query.late:
        return value, slack
    better, _ = backward.upper(rows, optimised(backward, rows, steps))
    return torch.minimum(value, better), slack


@torch.enable_grad()
def optimised(backward: CrownPass, rows: Functionals, steps: int) -> SlopeChoice:
    """Finds slopes that make upper bounds smaller, by projected Adam; any slopes give sound bounds.

    Free are the slopes below a convex and above a concave piece; the best ones found are returned for each row.
    """
    states = {k: part.detach() for k, part in rows.states.items()}
    rows = replace(rows, states=states, inputs=rows.inputs.detach(), constant=rows.constant.detach())
    base, masks = _start(backward, rows.sample)
    if not base:
        return {}
    moving = {k: [part.clone().requires_grad_() for part in pair] for k, pair in base.items()}
    optimiser = torch.optim.Adam([part for pair in moving.values() for part in pair], RATE)
    best = {k: (pair[0].detach().clone(), pair[1].detach().clone()) for k, pair in moving.items()}
    least = torch.full_like(rows.constant, torch.inf)
    for _ in range(steps):
        choice = {k: _joined(moving[k], base[k], masks[k]) for k in moving}
        value, _ = backward.upper(rows, choice)
        better = (value.detach() < least)[:, None]
        least = torch.minimum(least, value.detach())
        for k, pair in choice.items():
            best[k] = _joined([part.detach() for part in pair], best[k], (better, better))
        if backward.enclosure.query.late or not _step(optimiser, value, moving, backward):
            break
    return best


def _step(optimiser: torch.optim.Optimizer, value: Tensor, moving: dict, backward: CrownPass) -> bool:
    if not value.requires_grad:
        return False
    parameters = [part for pair in moving.values() for part in pair]
    gradients = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    for part, gradient in zip(parameters, gradients, strict=True):
        part.grad = torch.zeros_like(part) if gradient is None else gradient
    optimiser.step()
    for group in optimiser.param_groups:
        group["lr"] *= DECAY
    with torch.no_grad():
        for k, pair in moving.items():
            low, high = backward.enclosure.activations[k].slope
            for part in pair:
                part.clamp_(low, high)
    return True


def _start(backward: CrownPass, sample: Tensor) -> tuple[SlopeChoice, SlopeChoice]:
    base, masks = {}, {}
    for k, lines in enumerate(backward.lines):
        if lines is not None and backward.enclosure.known(k):
            slopes = backward.slopes(k)
            base[k] = slopes.lower.detach()[sample], slopes.upper.detach()[sample]
            masks[k] = slopes.free_lower[sample], slopes.free_upper[sample]
    return base, masks


def _joined(
    moving: Sequence[Tensor], base: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    lower, upper = (torch.where(m, a, b) for m, a, b in zip(masks, moving, base, strict=True))
    return lower, upper


CHUNK = {"cpu": 2**17}  # entries of rows that are carried back at a time, for processors what their caches hold
LARGEST_CHUNK = 2**23  # elsewhere


@dataclass
class Refinement:
    """Bounds the pre-activations of units that are not affine on their interval.

    Args:
        everything: whether also those that are, for bounds of the states themselves.
        rounds: how often the units of a loop are refined; other blocks need one round.
        slope_steps: how many steps the slopes are optimised for, for every unit outside of loops.
        samples: (B,), which samples are refined; all if None.
    """

    backward: CrownPass
    rounds: int
    everything: bool = False
    slope_steps: int = 0
    samples: Tensor | None = None

    @property
    def enclosure(self) -> IntervalPropagation:
        """What is tightened."""
        return self.backward.enclosure

    def __call__(self, stage: Stage) -> None:
        """Tightens the blocks of a stage."""
        for _ in range(self.rounds if stage.loop is not None else min(self.rounds, 1)):
            if self.enclosure.query.late:
                return
            for k in stage.blocks:
                if self.backward.lines[k] is not None and self.enclosure.operators.order.rows[k]:
                    self._block(k, self.slope_steps if stage.loop is None else 0)
            if stage.loop is not None:
                self.enclosure.enclose(stage)

    def _block(self, k: int, steps: int) -> None:
        lines, z = self.backward.lines[k], self.enclosure.z(k)
        assert lines is not None
        chosen = torch.ones_like(z.lower, dtype=torch.bool) if self.everything else lines.unstable(z)
        if self.samples is not None:
            chosen = chosen & self.samples[:, None]
        bounds = bounded_units(self.backward, k, chosen, z, steps)
        self.enclosure.tighten(k, bounds)  # at the end, or a sample would depend on others


def bounded_units(backward: CrownPass, k: int, chosen: Tensor, z: Interval, steps: int = 0) -> Interval:
    """Bounds some pre-activations of a block; the others stay as they are.

    Args:
        chosen: (B, n_k), which ones.
        z: what is returned of the others, and of those for which there is no time.
    """
    sample, unit = chosen.nonzero(as_tuple=True)
    size, low, high = (row_chunk(backward.enclosure) + 1) // 2, z.lower, z.upper
    for some, units in zip(*(index.split(size) for index in (sample, unit)), strict=True):
        if len(some) == 0 or backward.enclosure.query.late:
            break
        rows = preactivations(backward.enclosure, k, some, units)
        upper, lower = tightest(backward, rows.both_signs, steps)[0].chunk(2)
        low, high = low.index_put((some, units), -lower), high.index_put((some, units), upper)
    return Interval(low, high)


def row_chunk(enclosure: IntervalPropagation) -> int:
    """Returns how many rows are carried back at a time."""
    widest = max(*enclosure.query.form.partition, enclosure.query.form.sizes[1])
    return max(1, CHUNK.get(enclosure.query.set.device.type, LARGEST_CHUNK) // widest)


def preactivations(enclosure: IntervalPropagation, k: int, sample: Tensor, unit: Tensor) -> Functionals:
    """Reads some pre-activations of a block as functionals."""
    operators = enclosure.operators
    size = operators.form_size(k)
    rows = torch.zeros(len(unit), size, dtype=operators.form.dtype, device=unit.device)
    rows = rows.scatter(1, unit[:, None], 1.0)
    states = {j: operators.transposed[k, j].apply(rows) for j in operators.order.rows[k]}
    inputs = operators.inputs_transposed[k].apply(rows)
    lost = torch.full_like(rows[:, 0], 8 * operators.lost)
    if operators.compound:  # else coefficients are entries of A and B
        reach = [enclosure.query.set.box().interval, *(enclosure.x(j) for j in operators.order.rows[k])]
        lost = lost + (operators.lost * sum_sizes(reach)).detach()[sample]
    return Functionals(states, inputs, enclosure.biases[k][unit], enclosure.size(k)[sample, unit], sample, lost)


GROWTH = 0.05  # of its width, by which a box that does not hold its image is made larger than the hull of both
ROUNDS = 12  # after which a box that does not hold its image is given up
WIDEST = 64.0  # times its first width, beyond which it is given up, too
FAR = 16.0  # times narrower than what was known, and lines on the latter have nothing to add
GAIN = 1.2  # times the first width that what is known must at least have, else it is good enough


Known = tuple[Interval, Interval, Tensor]  # pre-activations, states and the size of terms of a block


@dataclass
class Continuation:
    """Encloses the states of a loop in boxes that are guessed first and proven afterwards.

    Theorem. Let every input u of a connected set U have exactly one equilibrium, with pre-activations z(u) that
    depend on u continuously, and let S be a closed box that holds z(u0) for one u0 of U. If for every u of U
    with z(u) in S the point z(u) lies in the interior of S, then S holds z(u) for all u of U.

    Proof. Let V be the inputs of U with z(u) in S. V is closed in U, for S is closed and z continuous. It is open
    in U: around u in V, z(u) lies in the interior of S, so nearby inputs have their z in S, too. It holds u0.
    A connected set has no other part that is open, closed and not empty than itself, so V = U.

    A certificate of well-posedness gives the only equilibrium and its continuity, whatever norm it is in, and the
    error bound of the equilibrium at the center of the set puts z(u0) in S. Lines that hold on S bound z(u) by a
    box S' for every u with z(u) in S; if S' lies in the interior of S, rounding included, S is proven, and so is
    S'. Where S comes from does not matter: here the image of the point z(u0), which is the first-order range of
    z, made larger until it holds its own image.

    Args:
        backward: what bounds pre-activations.
    """

    backward: CrownPass

    @property
    def enclosure(self) -> IntervalPropagation:
        """What is tightened."""
        return self.backward.enclosure

    def why_not(self, stage: Stage) -> str:
        """Says why the theorem does not apply to a loop; nothing where it does."""
        query = self.enclosure.query
        if not isinstance(query.set, Box | SparseBox | Ball):
            return f"continuation starts from the center, which a {type(query.set).__name__} need not hold"
        for phi in self.enclosure.activations:
            if not any(math.isfinite(gamma) for gamma in phi.constants.values()):
                return f"equilibria may jump: {phi.name!r} has no Lipschitz constant"
        assert stage.loop is not None
        try:
            stage.loop.certificate  # noqa: B018
        except IllPosedError as error:
            return str(error)
        return ""

    @torch.no_grad()
    def __call__(self, stage: Stage) -> Tensor:  # (B,)
        """Tightens the blocks of a loop for samples whose box is proven.

        Returns how many times narrower they are then; 1 for samples whose box is not.
        """
        enclosure, blocks = self.enclosure, stage.blocks
        known = {k: (enclosure.z(k), enclosure.x(k), enclosure.size(k)) for k in blocks}
        centers = enclosure.query.once("center_preactivations", center_preactivations)
        box, proven = {k: centers[k] for k in blocks}, {k: known[k][0] for k in blocks}
        active, first = self._open(proven), None
        success, old = torch.zeros_like(active), torch.cat([known[k][0].width for k in blocks], dim=1).sum(1)
        for _ in range(ROUNDS):
            if not bool(active.any()) or enclosure.query.late:
                break
            image = self._image(box, known, active)
            inside = active & torch.stack([_within(image[k], box[k]) for k in blocks]).all(0)
            success = success | inside
            for k in blocks:
                proven[k] = image[k].within(box[k]).where(inside[:, None], proven[k])
            box = {k: _grown(box[k], image[k]) for k in blocks}
            width = torch.cat([box[k].width for k in blocks], dim=1)
            if first is None:
                first = width.amax(1)
                active = active & ~(old < GAIN * width.sum(1))
            active = active & ~inside & (width.amax(1) <= WIDEST * first)
        for k in blocks:
            enclosure.replace(k, *known[k])
            enclosure.tighten(k, proven[k])
        new = torch.cat([proven[k].width for k in blocks], dim=1).sum(1)
        return torch.where(success, (old / new).clamp(min=1 + GROWTH), 1.0)

    def _open(self, z: dict[int, Interval]) -> Tensor:  # (B,)
        """Tells in which samples some state is not affine on its interval."""
        lines = self.backward.lines
        marks = []
        for k, one in z.items():
            of_block = lines[k]
            marks.append(
                torch.ones_like(one.lower, dtype=torch.bool) if of_block is None else of_block.unstable(one)
            )
        return torch.cat(marks, dim=1).any(1)

    def _image(self, box: dict[int, Interval], known: dict[int, Known], active: Tensor) -> dict[int, Interval]:
        """Bounds the pre-activations of all equilibria that lie in the box."""
        for k in box:
            self.enclosure.replace(k, *known[k])
        self.enclosure.assume(box)
        bounds = {}
        for k, guess in box.items():
            z = known[k][0]
            chosen = active[:, None] & ~((z.lower > guess.lower) & (z.upper < guess.upper))
            bounds[k] = bounded_units(self.backward, k, chosen, z).within(z)
        return bounds


def _within(inner: Interval, outer: Interval) -> Tensor:  # (B,)
    """Tells in which samples an interval lies in the interior of another."""
    return ((inner.lower > outer.lower) & (inner.upper < outer.upper)).all(1)


def _grown(box: Interval, image: Interval) -> Interval:
    """Returns the hull of a box and its image, made a little larger."""
    unit = torch.finfo(image.lower.dtype).eps
    room = GROWTH * image.width + 8 * unit * image.magnitude
    lower, upper = torch.minimum(box.lower, image.lower - room), torch.maximum(box.upper, image.upper + room)
    return Interval(lower, upper)


def center_preactivations(query: Query) -> list[Interval]:
    """Encloses the pre-activations of the equilibrium at the center of the set."""
    center = query.once("center", CenterSolve.of)
    point = Query(center.form, Box(center.u, center.u), None)
    point.cache["center"] = replace(center, radius=torch.zeros_like(center.radius))
    try:
        enclosure = IntervalPropagation(point, box_states).run()
    except (IllPosedError, MethodError):
        enclosure = _center_by_certificates(point, center)
    return [Interval.around(z.center, z.radius, query.form.dtype) for z in enclosure.preactivations]


def _center_by_certificates(point: Query, center: CenterSolve) -> IntervalPropagation:
    """Puts a box around computed states, by the residual and the error constant of every loop's certificate."""
    enclosure = IntervalPropagation(point, lambda _: [Interval(x, x) for x in center.states])
    for stage in enclosure.operators.order.stages:
        if stage.loop is not None:
            residuals = []
            for k in stage.blocks:
                reach = enclosure.add(enclosure.drive(k), k, enclosure.operators.order.rows[k])
                z = reach.interval(enclosure.operators.terms, enclosure.operators.lost)
                values, x = image(enclosure.activations[k], z), center.states[k]
                residuals.append(torch.maximum(values.upper - x, x - values.lower))
            bounder = ErrorBounder(stage.loop.certificate, stage.loop.A.to_dense(), stage.loop.activation)
            residual = torch.cat(residuals, dim=1)
            error = 2 * bounder(residual, torch.zeros_like(residual))[:, None]  # twice: A may round when formed
            for k in stage.blocks:
                x = center.states[k]
                enclosure.replace(k, None, Interval.around(x, error.expand_as(x), torch.float64), None)
        enclosure.enclose(stage)
    return enclosure


def enclosed(
    query: Query, rounds: int, everything: bool, slope_steps: int = 0, continuation: bool = True
) -> list[CrownPass]:
    """Encloses all pre-activations and states by intervals that CROWN refined.

    With loops there may be two passes, of which each may prove what the other does not: one starts from what norms
    prove of the loops, one from boxes of `Continuation`. The former is left out for samples whose boxes are far
    narrower, unless the loops contract in a weighted inf norm, which proves much at little cost.

    Args:
        everything: whether to refine also what is affine on its interval.
        continuation: whether the second pass is tried.
    """
    states, contracting, reason = unbounded_states(query), not query.form.order.loops, ""
    if query.form.order.loops:
        try:
            states, contracting = loop_states(query)
        except (IllPosedError, MethodError) as error:
            if not continuation:
                raise
            reason = str(error)
    backward = CrownPass(IntervalPropagation(query, lambda _: states))
    refine = Refinement(backward, rounds, everything, slope_steps)
    if contracting or not continuation:
        backward.enclosure.run(refine)
        if not continuation or not query.form.order.loops:
            return [backward]
        other = CrownPass(backward.enclosure.copy())
        wanted = _continue(replace(refine, backward=other), "") > 1
    else:
        narrower = _continue(refine, reason)
        wanted = (narrower > 1) & (narrower < FAR) & (not reason)
        other = CrownPass(IntervalPropagation(query, lambda _: states))
        if bool(wanted.any()):
            other.enclosure.run(replace(refine, backward=other, samples=wanted))
    if not bool(wanted.any()):
        return [backward]
    other.enclosure.take(~wanted, backward.enclosure)  # else they would depend on the batch
    return [backward, other]


def _continue(refine: Refinement, reason: str) -> Tensor:  # (B,)
    """Encloses all blocks, loops by continuation where it applies; returns how much narrower that made a loop.

    Blocks that have been enclosed already are enclosed anew only after a loop has been tightened.

    Args:
        reason: why nothing is known of loops but what continuation proves; empty where something is.
    """
    enclosure, continuation = refine.enclosure, Continuation(refine.backward)
    like = enclosure.query.set.center.detach()
    narrower = like.new_ones(len(like))
    for stage in enclosure.operators.order.stages:
        fresh = not all(enclosure.known(k) for k in stage.blocks)
        if stage.loop is not None:
            why_not = continuation.why_not(stage)
            if why_not and reason:
                raise IllPosedError(reason if why_not in reason else f"{reason}; {why_not}")
            if reason:
                enclosure.forget(stage.blocks)
            elif fresh:
                enclosure.enclose(stage)
            if not why_not:
                try:
                    narrower = torch.maximum(narrower, continuation(stage))
                except (IllPosedError, MethodError) as error:  # nothing bounds the error at the center
                    if reason:
                        raise IllPosedError(f"{reason}; {error}") from error
        moved = narrower > 1
        if fresh or bool(moved.any()):
            enclosure.enclose(stage)
            (refine if fresh else replace(refine, samples=moved))(stage)
    return narrower


@dataclass(frozen=True)
class Crown:
    """Linear bounds at the fixed point, for ReLU, leaky ReLU, tanh, sigmoid and other maps with known lines.

    Where no lines are known (pooling, softmax) the backward pass ends at the states' interval, and `method` says
    so. Differentiable in all matrices.

    Args:
        rounds: how often the pre-activations of unstable units are refined; 0 takes those of the intervals.
        slope_steps: how many steps the free slopes of every bound are optimised for.
        continuation: whether loops are enclosed by `Continuation` too, or by norms alone.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> from wellposed.robust import Box, output_bounds
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> bounds = output_bounds(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), Crown(rounds=1))
        >>> bounds.lower.round(decimals=3), bounds.upper.round(decimals=3)
        (tensor([[2.]]), tensor([[4.]]))
    """

    rounds: int = 3
    slope_steps: int = 0
    continuation: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.slope_steps < 0:
            raise InputError(f"rounds and slope_steps are not negative; received {self}")

    def __call__(self, query: Query) -> Bounds:
        """Answers a query."""
        everything = query.combination is None
        passes = enclosed(query, self.rounds, everything, self.slope_steps, self.continuation)
        answers = [self._answer(one) for one in passes]
        return reduce(Bounds.within, answers).named(answers[0].method)

    def _answer(self, backward: CrownPass) -> Bounds:
        enclosure = backward.enclosure
        query, name = enclosure.query, _name(enclosure, backward, self.slope_steps)
        by_states = of_states(query, enclosure.states, name)
        if query.combination is None:
            return by_states
        rows = Functionals.of_outputs(
            enclosure.operators, query.combination.flatten(0, 1), enclosure.states, query.set, query.sample
        )
        upper, lower, slack = self._ends(backward, rows)
        return shaped(query, -lower, upper, name, slack).within(by_states).named(name)

    def _ends(self, backward: CrownPass, rows: Functionals) -> tuple[Tensor, Tensor, Tensor]:
        """Bounds functionals and their negatives from above; also returns the rounding's share."""
        size = (row_chunk(backward.enclosure) + 1) // 2
        chunks = [rows.part(slice(start, start + size)).both_signs for start in range(0, len(rows), size)]
        bounds = [tightest(backward, chunk, self.slope_steps) for chunk in chunks]
        ends = [value.chunk(2) for value, _ in bounds]
        upper, lower = (torch.cat([pair[i] for pair in ends]) for i in (0, 1))
        return upper, lower, torch.cat([slack.chunk(2)[0] for _, slack in bounds])


def _name(enclosure: IntervalPropagation, backward: CrownPass, steps: int) -> str:
    pairs = zip(enclosure.activations, backward.lines, strict=True)
    stopped = sorted({phi.name for phi, lines in pairs if lines is None})
    kind = "crown, slopes optimised" if steps else "crown"
    return f"{kind} (interval at {', '.join(stopped)})" if stopped else kind
