"""Bounds from a computed equilibrium: the norm bound, the implicit box, and bounds in the Euclidean norm.

`CenterSolve` is the equilibrium at the center of a set, with a bound of how well it satisfies its equation.
`box_bounds` is the implicit box: how far states and outputs move if every input moves by its radius (003, Theorems
5 and 6). `norm_bounds` is one number for all states (003 eqs. 4.3 and 4.4). `l2_bounds` are bounds in the
Euclidean norm, from the monotone or the spectral certificate of every loop.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.activations.slopes import why_no_slopes
from wellposed.conditions.branches import BranchEquation
from wellposed.conditions.conditions import Monotone
from wellposed.conditions.norms import largest_eigenvalue, largest_singular_value, spectral_norm
from wellposed.conditions.rounding import EPS, TINY, euclidean_norm, reciprocal_gap, upward
from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.solution import Status
from wellposed.errors import IllPosedError
from wellposed.forms import Block, Identity, ImplicitForm, Operator
from wellposed.forms.evaluation import LoopEquation, Stage
from wellposed.forms.gains import AbsoluteForm, lipschitz_image
from wellposed.forms.operators.entries import LARGEST_DENSE, abs_upper_bound, sum_length, underflow
from wellposed.robust.query import Bounds, MethodError, Query, of_states, shaped
from wellposed.robust.sets import Box, Interval


@dataclass(frozen=True)
class CenterSolve:
    """A computed equilibrium and its residual, in float64.

    Args:
        form: the form in float64.
        spread: the absolute values of its operators.
        u: (B, p), the center.
        radius: (B, p), how far every input may be from it.
        states: (B, n_k) of every block.
        residual: (B, n_k), bounds of ``|x - phi(Ax + Bu + b)|``, rounding included.
    """

    form: ImplicitForm
    spread: AbsoluteForm
    u: Tensor
    radius: Tensor
    states: list[Tensor]
    residual: list[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, query: Query) -> "CenterSolve":
        """Solves for the center of the set."""
        form = query.form.to(torch.float64)
        exact = query.set.to(torch.float64)
        u, radius = exact.center.detach(), upward(exact.deviation().detach(), 4)
        x = solve_states(form, u)
        if not bool(x.isfinite().all()):
            raise IllPosedError(
                "the equilibrium at the center of the set is not finite; check the inputs and form.certificate()"
            )
        spread = AbsoluteForm.of(form, formed=False)
        states = list(x.split(form.partition, dim=1))
        return cls(form, AbsoluteForm.of(form), u, radius, states, _residual(form, spread, x, u))

    @property
    def whole(self) -> Tensor:  # (B, n)
        """The states of all blocks side by side."""
        return torch.cat(self.states, dim=1)


def solve_states(form: ImplicitForm, u: Tensor, polish: bool = False) -> Tensor:  # (B, p) -> (B, n)
    """Solves for the states as the form does, and loops that this leaves open by splitting and Newton's method.

    Args:
        polish: whether Newton's method goes on from what the form has solved, too.
    """
    solution = form.equilibrium(u, on_failure="ignore")
    assert isinstance(solution.value, Tensor)
    x = solution.value.clone()
    open_ = (solution.status >= Status.MAX_STEPS) | polish
    (left,) = (open_ & x.isfinite().all(1)).nonzero(as_tuple=True)
    if len(left):
        x[left] = _by_stages(form, u[left], x[left], solve_loop)
    return x


def _by_stages(
    form: ImplicitForm, u: Tensor, x: Tensor, solve: Callable[[LoopEquation, Tensor, Tensor], Tensor]
) -> Tensor:  # (B, n)
    """Computes the states block by block, loops by ``solve(loop, v, start)``."""
    states = list(x.split(form.partition, dim=1))
    bias = x.new_zeros(x.shape[1]) if form.bias is None else form.bias
    offsets = (form.blocks[1].apply(u) + bias).split(form.partition, dim=1)
    for stage in form.order.stages:
        rows = {k: form.order.rows[k] for k in stage.blocks}
        drives = [
            sum((part.apply(states[j]) for j, part in rows[k].items() if j not in stage.blocks), offsets[k])
            for k in stage.blocks
        ]
        sizes = [form.partition[k] for k in stage.blocks]
        v, now = torch.cat(drives, dim=1), torch.cat([states[k] for k in stage.blocks], dim=1)
        now = form.activations[stage.blocks[0]].function(v) if stage.loop is None else solve(stage.loop, v, now)
        for k, part in zip(stage.blocks, now.split(sizes, dim=1), strict=True):
            states[k] = part
    return torch.cat(states, dim=1)


@torch.no_grad()
def states_of_branch(form: ImplicitForm, u: Tensor, start: Tensor | None = None) -> Tensor:  # (B, n)
    """Solves loops that may have no certificate: from zero as a DEQ does, then by Newton's method.

    Nothing says that there are no other solutions.

    Args:
        start: (B, n), states nearby to start from instead.
    """

    def solve(loop: LoopEquation, v: Tensor, start: Tensor) -> Tensor:
        step = partial(_step, loop)
        solution = fixed_point(step, start, v, max_steps=FROM_ZERO_STEPS, on_failure="ignore")
        assert isinstance(solution.value, Tensor)
        x = solution.value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if loop.A.shape[0] <= LARGEST_NEWTON and not any(why_no_slopes(phi) for phi in loop.activations):
            equation = branch_equation(loop)
            for row in (~solution.converged).nonzero()[:, 0].tolist():
                z = equation.solve((loop.A.apply(x[row : row + 1]) + v[row : row + 1])[0], v[row])
                x[row] = equation.function(z)
        return x

    return _by_stages(form, u, u.new_zeros(len(u), form.sizes[0]) if start is None else start, solve)


def _step(loop: LoopEquation, x: Tensor, v: Tensor) -> Tensor:
    image: Tensor = loop.activation.function(loop.A.apply(x) + v)
    return image


def branch_equation(loop: LoopEquation) -> BranchEquation:
    """Reads a loop as what `wellposed.conditions.branches` proves something about."""
    A = loop.A.to(torch.float64)
    size = abs_upper_bound(A, formed=False).to_dense()
    doubt = upward(2 * (sum_length(A) + sum_length(A.T) + 4) * EPS * size, 4)
    sizes = A.heights if isinstance(A, Block) and len(loop.activations) > 1 else (A.shape[0],)
    return BranchEquation(A.to_dense(), doubt, tuple(zip(loop.activations, sizes, strict=True)))


def solve_loop(system: LoopEquation, v: Tensor, start: Tensor) -> Tensor:  # (B, n)
    """Solves ``x = phi(Ax + v)`` by Newton's method, from what is known and from where operator splitting leads.

    Returns the states with the smallest residual on the way. Splitting (Douglas and Rachford) converges for
    monotone loops with projections such as ReLU, however far A rotates.
    """
    phi, n = system.activation, v.shape[1]
    if not phi.componentwise or n > LARGEST_NEWTON:
        return start
    A, identity = system.A.to_dense(), torch.eye(n, dtype=v.dtype, device=v.device)
    starts = [start]
    if not Monotone().why_not(phi):
        resolvent, y = torch.linalg.inv_ex(2 * identity - A)[0].mT, torch.zeros_like(v)
        for _ in range(SPLITTING_STEPS):
            inner = (y + v) @ resolvent
            y = y + phi.function(2 * inner - y) - inner
        starts.append((y + v) @ resolvent)
    best, least = start, torch.full_like(v[:, 0], math.inf)
    for x in starts:
        for _ in range(NEWTON_STEPS):
            z = x @ A.mT + v
            residual = x - phi.function(z)
            size = residual.abs().amax(1).nan_to_num(nan=math.inf)
            better = size < least
            best, least = torch.where(better[:, None], x, best), torch.minimum(size, least)
            if not bool((least > EPS * (1 + best.abs().amax(1))).any()):
                return best
            x = x - torch.linalg.solve_ex(identity - phi.slope_at(z)[:, :, None] * A, residual)[0]
    return best


def _residual(form: ImplicitForm, spread: AbsoluteForm, x: Tensor, u: Tensor) -> list[Tensor]:
    A, B, _ = form.blocks
    bias = x.new_zeros(x.shape[1]) if form.bias is None else form.bias
    z = A.apply(x) + B.apply(u) + bias
    size = spread.A.apply(x.abs()) + spread.B.apply(u.abs()) + bias.abs()
    lost = underflow(A, TINY) + underflow(B, TINY) + underflow(spread.A, TINY) + underflow(spread.B, TINY)
    error = upward(size, spread.terms) * (2 * (spread.terms + 4) * EPS) + 2 * lost
    pieces = zip(form.activations, *(t.split(form.partition, dim=1) for t in (x, z, size, error)), strict=True)
    return [_one_residual(*piece) for piece in pieces]


def _one_residual(phi: Activation, x: Tensor, z: Tensor, size: Tensor, error: Tensor) -> Tensor:
    through = lipschitz_image(phi, error)
    width = 0 if phi.componentwise else (phi.block or z.shape[1])
    own = (phi.rounding + width) * EPS * (phi.function(torch.zeros_like(z)).abs() + lipschitz_image(phi, size))
    residual_bound = upward((x - phi.function(z)).abs() + EPS * x.abs() + through + own, 4) + 4 * TINY
    return torch.where(residual_bound.isnan(), math.inf, residual_bound)


SPLITTING_STEPS, NEWTON_STEPS, LARGEST_NEWTON = 400, 30, 1024  # of loops at the center that are hard to solve
FROM_ZERO_STEPS = 500  # of loops of which nothing is known
LARGEST_GAIN = 2**25  # entries of the matrix from inputs to states that is formed for sets other than boxes


@torch.no_grad()
def box_bounds(query: Query) -> Bounds:
    """Bounds states by the implicit box, and outputs by the rows of the sensitivity matrix (003 eq. 4.8).

    With few changed entries or in a ball, the bound of an output is ``s_k`` of (or the 2-norm of) its row of
    ``S diag(sigma_u)``, which is tighter than what follows from the bounds of the states. As printed, the box is
    not cut to what phi can return; the intervals that start from it are.
    """
    if query.combination is None or _by_box(query):
        return of_states(query, box_states(query), "box")
    center = query.once("center", CenterSolve.of)
    combination = query.combination.double()
    rows = combination.flatten(0, 1)
    C, D = (getattr(center.form, name) for name in "CD")
    coefficients, direct = C.T.apply(rows).abs(), D.T.apply(rows).abs()
    slack = 2 * (center.spread.terms + rows.shape[1]) * EPS
    doubt = center.spread.C.T.apply(rows.abs()), center.spread.D.T.apply(rows.abs())
    lost = _lost(center)
    weights = (coefficients + slack * doubt[0] + lost) @ state_gains(center) + direct + slack * doubt[1] + lost
    moved = query.set.to(torch.float64).weighted_rows(upward(weights, center.spread.terms), query.sample)
    own = torch.cat(_own_radii(center), dim=1)[query.sample]
    rest = (coefficients * own).sum(1) + slack * (doubt[0] * (own + center.whole.abs()[query.sample])).sum(1)
    rest = rest + slack * (doubt[1] * center.u.abs()[query.sample]).sum(1)
    rest = rest + lost * (2 + own.sum(1) + center.whole.abs().sum(1)[query.sample])
    y = C.apply(center.whole) + D.apply(center.u)
    y = y if center.form.output_bias is None else y + center.form.output_bias
    value = (rows * y[query.sample]).sum(1)
    radius = upward(moved + rest, sum(query.form.sizes)) + slack * (rows.abs() * y.abs()[query.sample]).sum(1)
    interval = Interval.around(value.view(query.shape), radius.view(query.shape), query.form.dtype)
    return Bounds(interval.lower, interval.upper, "box", rest.view(query.shape).to(query.form.dtype))


@torch.no_grad()
def box_states(query: Query) -> list[Interval]:
    """Encloses the states of all blocks by ``x0 +- v`` with ``v >= T(|A| v + |B| sigma_u) + |x0 - f(x0)|``.

    T multiplies by the Lipschitz constants of phi (and spreads over its blocks). Such a v proves that the map
    takes the box into itself for every input of the set, so the only equilibrium lies in it; it is found by
    elimination and checked with outward rounding, as iterating from zero would rise from below. For other sets
    than boxes, with few changed entries or in a ball, v is bounded by the rows of ``(I - |A|)^-1 |B|``.
    """
    center = query.once("center", CenterSolve.of)
    pairs = zip(center.states, _state_radii(query, center), strict=True)
    return [Interval.around(x, v, query.form.dtype) for x, v in pairs]


def _lost(center: CenterSolve) -> float:
    """Bounds what underflow takes from any sum of products with the operators of a form."""
    operators = (center.spread.A, center.spread.B, center.spread.C, center.spread.D)
    return (
        4 * max(underflow(side, TINY) for part in operators for side in (part, part.T))
        + 8 * sum(center.form.sizes) * TINY
    )


def _by_box(query: Query) -> bool:
    """Tells whether the set is a box, or taken for one because its gains would be too large to form."""
    n, p, _ = query.form.sizes
    return isinstance(query.set, Box) or n * p > LARGEST_GAIN


def _weighted(query: Query, weights: Tensor) -> Tensor:  # (n, p) -> (B, n)
    """Bounds ``weights |u - center|`` over the set of every sample."""
    exact = query.set.to(torch.float64)
    first = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
    return torch.stack([exact.weighted_rows(weights, first + index) for index in range(len(exact))])


def _state_radii(query: Query, center: CenterSolve) -> list[Tensor]:  # (B, n_k)
    """Bounds ``|x - x0|`` for the computed equilibrium x0 at the center of the set."""
    if _by_box(query):
        load = torch.cat([center.radius, residual_load(center)], dim=1)
        return with_residual(center.spread).states(load)
    moved = _weighted(query, state_gains(center))
    moved = torch.where(moved > 0, moved + TINY, moved)
    pieces = upward(moved, center.u.shape[1]).split(center.form.partition, dim=1)
    return [upward(a + b, 2) for a, b in zip(_own_radii(center), pieces, strict=True)]


def _own_radii(center: CenterSolve) -> list[Tensor]:
    """Bounds how far the computed equilibrium may be from the exact one."""
    load = torch.cat([torch.zeros_like(center.radius), residual_load(center)], dim=1)
    return with_residual(center.spread).states(load)


def state_gains(center: CenterSolve) -> Tensor:  # (n, p)
    """Bounds the change of every state by the change of every input, ``(I - gamma |A|)^-1 gamma |B|``."""
    units = torch.eye(center.u.shape[1], dtype=torch.float64, device=center.u.device).split(256)
    return torch.cat([torch.cat(center.spread.states(unit), dim=1) for unit in units]).mT


def with_residual(spread: AbsoluteForm) -> AbsoluteForm:
    """Adds an input for every state, through which a residual enters."""
    B, heights = spread.B, spread.A.heights
    operators: dict[tuple[int, int], Operator] = dict(spread.B.parts)
    for k, size in enumerate(heights):
        operators[k, len(B.widths) + k] = Identity(size, torch.float64, spread.device)
    return replace(spread, B=Block(heights, (*B.widths, *heights), operators, torch.float64, spread.device))


def residual_load(center: CenterSolve) -> Tensor:  # (B, n)
    """Returns loads of the pre-activations that weigh no less than the residual once phi is applied."""
    pairs = zip(center.form.activations, center.residual, strict=True)
    return torch.cat([_load(phi, residual) for phi, residual in pairs], dim=1)


def _load(phi: Activation, residual: Tensor) -> Tensor:
    if not residual.numel():
        return residual
    if phi.componentwise:
        return upward(residual / max(phi.lipschitz(), 1e-100), 2) + 2 * TINY
    norm = "inf" if "inf" in phi.constants else next(iter(phi.constants))
    return upward(residual.amax(1, keepdim=True).expand_as(residual) / max(phi.lipschitz(norm), 1e-100), 2)


@torch.no_grad()
def norm_bounds(query: Query) -> Bounds:
    """Bounds every state by ``|x - x0|_inf <= gamma max_i s(|B_i| sigma_u) / (1 - gamma |A|_inf)``.

    s sums a row, or its k largest entries where at most k inputs change. Needs ``gamma |A|_inf < 1``.
    """
    phi = query.form.activation
    if "inf" not in phi.constants:
        raise MethodError(f"the norm bound needs a Lipschitz constant of {phi.name!r} in the inf norm; use 'box'")
    center = query.once("center", CenterSolve.of)
    spread, gamma = center.spread, phi.lipschitz("inf")
    if not query.form.sizes[0]:  # no hidden units: only the outputs are left to bound
        exact = [Interval.around(x, torch.zeros_like(x), query.form.dtype) for x in center.states]
        return of_states(query, exact, "norm")
    kappa = float(upward(spread.A.row_sums(), spread.terms).max()) * gamma * (1 + 2 * EPS)
    if not kappa < 1:
        raise MethodError(
            f"the norm bound needs gamma |A|_inf < 1, and it is {kappa:.4g}; use form.rescale(kappa) or 'box'"
        )
    moved = upward(gamma * _drive(query, center, spread.B).amax(1, keepdim=True), 2) + _lost(center)
    residual = torch.cat(center.residual, dim=1).amax(1, keepdim=True)
    radius = upward((moved + residual) * reciprocal_gap(kappa), 4)
    states = [Interval.around(x, radius.expand_as(x), query.form.dtype) for x in center.states]
    return of_states(query, states, "norm")


def _drive(query: Query, center: CenterSolve, B: Operator) -> Tensor:  # (B, n)
    if _by_box(query):
        return upward(center.spread.apply(B, center.radius), center.spread.terms)
    terms = query.form.sizes[1] + center.spread.terms
    return upward(_weighted(query, B.to_dense()), terms) + _lost(center)


LARGEST_SVD = 2**24  # entries up to which the largest singular value is computed
SMALL = 64  # rows or columns up to which that is by all singular values, the most accurate way


@torch.no_grad()
def l2_bounds(query: Query) -> Bounds:
    """Bounds states by ``|x - x0|_2 <= |B (u - u0)|_2 / m``, and functionals c by ``|c|_2`` times that.

    m = 1 - lambda_max((A + A') / 2) for projections such as ReLU, or (1 - gamma |A|_2) / gamma; block by block
    where there is no loop.
    """
    center = query.once("center", CenterSolve.of)
    distances = Distances.of(query, center)
    if not bool(distances.radius.isfinite().all()):
        raise MethodError(
            "a loop has neither a monotone nor a spectral certificate; use 'box', 'interval' or 'crown'"
        )
    if query.combination is None:
        return of_states(query, distances.states(query.form.dtype), "l2")
    rows = query.combination.double().flatten(0, 1)
    C, D = center.form.C, center.form.D
    coefficients, direct = C.T.apply(rows), D.T.apply(rows)
    sizes = center.spread.C.T.apply(rows.abs()), center.spread.D.T.apply(rows.abs())
    unit = 4 * (center.spread.terms + len(center.whole[0])) * torch.finfo(torch.float64).eps
    pieces = coefficients.split(center.form.partition, dim=1)
    lengths = torch.stack([euclidean_norm(piece) for piece in pieces], dim=1)  # (R, L)
    reach = (lengths * distances.radius[query.sample]).sum(1)
    offset = 0.0 if center.form.output_bias is None else rows @ center.form.output_bias
    base = (coefficients * center.whole[query.sample]).sum(1) + offset
    exact = query.set.to(torch.float64)
    upper = base + reach + exact.support_rows(direct, query.sample)
    lower = base - reach - exact.support_rows(-direct, query.sample)
    magnitude = exact.box().interval.magnitude[query.sample]
    states = center.whole.abs()[query.sample] + torch.cat(distances.spread(), dim=1)[query.sample]
    lost = _lost(center) * (2 + states.sum(1) + magnitude.sum(1))
    slack = unit * ((sizes[0] * states).sum(1) + (sizes[1] * magnitude).sum(1) + upper.abs() + lower.abs())
    slack = upward(slack + lost + 2 * unit * (offset.abs() if isinstance(offset, Tensor) else 0.0), 4)
    interval = Interval.around((lower + upper) / 2, upward((upper - lower) / 2 + 2 * slack, 4), query.form.dtype)
    return shaped(query, interval.lower, interval.upper, "l2", slack.to(query.form.dtype))


@dataclass(frozen=True)
class Distances:
    """How far the states of every block are from the computed center, in the Euclidean norm."""

    center: CenterSolve
    radius: Tensor  # (B, L)

    @classmethod
    def of(cls, query: Query, center: CenterSolve) -> "Distances":
        """Goes through the blocks in the order in which they are computed."""
        exact = query.set.to(torch.float64)
        distances: dict[int, Tensor] = {}
        norm = upward(exact.deviation_norm(), exact.center.shape[1])
        for stage in query.form.order.stages:
            entering = torch.stack([_entering(center, k, norm, distances, stage.blocks) for k in stage.blocks])
            change = upward(euclidean_norm(entering, 0), len(entering) + 2)
            own = torch.cat([center.residual[k] for k in stage.blocks], dim=1)
            own = upward(euclidean_norm(own), own.shape[1])
            gain, error = _gains(center, stage)
            for k in stage.blocks:
                distances[k] = upward(gain * change + error * own, 4) + 4 * TINY
        return cls(center, torch.stack([distances[k] for k in range(len(distances))], dim=1))

    def spread(self) -> list[Tensor]:
        """Repeats the distance of a block for each of its states."""
        pairs = zip(self.center.states, self.radius.unbind(1), strict=True)
        return [radius[:, None].expand_as(x) for x, radius in pairs]

    def states(self, dtype: torch.dtype) -> list[Interval]:
        """Encloses every state, in the ball and in what its activation can return."""
        intervals = []
        for phi, x, radius in zip(self.center.form.activations, self.center.states, self.spread(), strict=True):
            intervals.append(Interval.around(x, radius, dtype).cut(*phi.image))
        return intervals


def _entering(
    center: CenterSolve, k: int, norm: Tensor, distances: dict[int, Tensor], inside: tuple[int, ...]
) -> Tensor:
    """Bounds the Euclidean norm of what inputs and earlier blocks change in the pre-activations of block k."""
    A, B, _ = center.form.blocks
    by_entries = euclidean_norm(center.spread.apply(_row(center.spread.B, k), center.radius))
    total = torch.minimum(operator_norm(_row(B, k)) * norm, upward(by_entries, center.spread.terms))
    for j, part in A.rows()[k].items():
        if j not in inside:
            total = total + operator_norm(part) * distances[j]
    return upward(total, len(distances) + 4) + (len(distances) + 4) * TINY


def _row(B: Block, k: int) -> Operator:
    return B.chosen([k], range(len(B.widths)))


def _gains(center: CenterSolve, stage: Stage) -> tuple[float, float]:
    """Returns what multiplies a change of the pre-activations, and a residual of the states."""
    phis = [center.form.activations[k] for k in stage.blocks]
    if any("2" not in phi.constants for phi in phis):
        raise MethodError("the l2 bound needs Lipschitz constants in the 2-norm; use 'box' or 'interval'")
    gamma = max(phi.lipschitz("2") for phi in phis)
    if math.isinf(gamma):
        raise MethodError(f"{phis[0].name!r} has no Lipschitz constant, so the l2 bound does not apply")
    if stage.loop is None:
        return gamma, 1.0
    A, _, _ = center.form.blocks
    loop = A.chosen(stage.blocks, stage.blocks)
    if loop.shape[0] > LARGEST_DENSE:
        raise MethodError(
            f"the l2 bound forms loops of up to {LARGEST_DENSE} states; this one has {loop.shape[0]}"
        )
    gain, error = _monotone(loop, phis)
    return (gain, error) if math.isfinite(gain) else _spectral(loop, gamma)  # which is never smaller


def _spectral(loop: Operator, gamma: float) -> tuple[float, float]:
    gap = reciprocal_gap(gamma * operator_norm(loop) * (1 + 1e-15))
    return gamma * gap, gap


def _monotone(loop: Operator, phis: list) -> tuple[float, float]:
    if any(Monotone().why_not(phi) for phi in phis):
        return math.inf, math.inf
    A = loop.to_dense()
    if len(A) <= SMALL:
        proof = Monotone().certify(A, phis[0])
        return (reciprocal_gap(proof.value), proof.gain) if proof.holds else (math.inf, math.inf)
    doubt = EPS * float(euclidean_norm(A.flatten()))
    gap = reciprocal_gap((largest_eigenvalue((A + A.mT) / 2) + doubt) * (1 + 2 * EPS))
    identity = torch.eye(len(A), dtype=A.dtype, device=A.device)
    return gap, (1 + largest_singular_value(identity - A) + 2 * EPS) * gap * (1 + 4 * EPS)


def operator_norm(operator: Operator) -> float:
    """Bounds the largest singular value, by ``sqrt(|A|_1 |A|_inf)`` where that matrix is too large.

    Example:
        >>> from wellposed.forms import Dense
        >>> 4 <= operator_norm(Dense(torch.diag(torch.tensor([3.0, -4.0])))) < 4.000001
        True
    """
    if not min(operator.shape):
        return 0.0
    exact = operator.to(torch.float64)
    if min(operator.shape) <= SMALL and math.prod(operator.shape) <= LARGEST_SVD:
        return float(spectral_norm(exact.to_dense()))
    if math.prod(operator.shape) <= LARGEST_SVD:
        return largest_singular_value(exact.to_dense())
    size, terms = abs_upper_bound(exact), sum_length(exact) + sum_length(exact.T)
    down, across = size.row_sums().max(), size.T.row_sums().max()
    return float(upward(down.sqrt() * across.sqrt(), terms))
